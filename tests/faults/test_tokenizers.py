"""Group E: changed tokenizer files, invalid texts, ids without a token."""

from __future__ import annotations

import contextlib
import json
import random
import time
from pathlib import Path

import pytest

from llama.errors import LlamaError
from llama.tokenizer import Tokenizer, open_tokenizer
from llama.tokenizer.gguf import from_metadata

from ..scripts import make_tiny
from ..test_tokenizer import TEXTS, piece_metadata
from ..test_tokenizer_files import LIBRARY, MODEL, opened, source
from .conftest import Try

RUN = ("-n", "1", "--device", "cpu", "--dtype", "float32")
FILES = {"tiktoken": make_tiny.tiktoken_model(300), "json": json.dumps(source()).encode(), "model": MODEL}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_changed_file_is_an_error_or_a_tokenizer_that_keeps_the_law(tmp_path: Path, name: str, count: int) -> None:
    """Flipped bits, changed digits and cuts: no other exception, no control id from a text, no id out of range."""
    dice = random.Random(count)
    for _ in range(count):
        data = bytearray(FILES[name])
        at = dice.randrange(len(data))
        if dice.random() < 0.2:
            del data[at:]
        else:
            data[at] ^= 1 << dice.randrange(8)
        (tmp_path / "tokenizer").write_bytes(data)
        with contextlib.suppress(LlamaError):
            tokenizer = open_tokenizer(tmp_path / "tokenizer")
            for text in (*TEXTS[:12], *list(tokenizer.control)[:5]):
                ids = tokenizer.encode(text)
                assert not set(ids) & set(tokenizer.control.values())
                assert all(0 <= id < tokenizer.n_vocab for id in ids)
                tokenizer.decode(ids)


def test_texts_that_are_not_unicode(tiny_gguf: Path, tmp_path: Path, attempt: Try) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "stop": ["b", "c\\ud83d"]}\n')
    prompts = ("generate", "--prompts", tmp_path / "in.jsonl", *RUN, "-m", tiny_gguf)
    attempt(*prompts).refused("in.jsonl line 1", "surrogate", code=2)
    raw, found = "é".encode() + b"\xc3", "byte 2 is 0xc3"
    attempt("generate", *RUN, "-m", tiny_gguf, stdin=raw).refused("standard input", found, "convert", code=2)
    argument = raw.decode(errors="surrogateescape")
    attempt("generate", "--raw", argument, *RUN, "-m", tiny_gguf).refused("prompt", found, "convert", code=2)


@pytest.mark.parametrize("tokenizer", [from_metadata(piece_metadata(LIBRARY), "x"), opened(source())], ids=repr)
def test_long_texts_round_trip_in_bounded_time(tokenizer: Tokenizer) -> None:
    for text in ("\0" * 20_000, " " * 100_000, "a" * 100_000, "שלום \u202e\u2067" * 5_000, "e" + "\u0301" * 20_000):
        started = time.thread_time()
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert time.thread_time() - started < 3
