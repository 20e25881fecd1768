"""Control strings in raw text: control tokens on request, and only then."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from llama.chat import encode_chat, render
from llama.errors import TokenizerError
from llama.text import Llama

from .conftest import Run
from .test_control_ids import OTHERS, TEMPLATE, TURNS
from .test_tokenizer import pieces_json
from .test_tokenizer_files import LIBRARY, added, opened, source

KINDS = {**TURNS, **OTHERS}
PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"

# Not two that are equal in lower case: the library then chooses one at random
ADDED = ["<a>", "<|x|>", "foo", "Bar", "é", "the", " the", "a b", "[REF]", "  ", "REF", "_"]
NORMALIZERS: list[Any] = [
    None, {"type": "NFC"}, {"type": "Lowercase"},
    {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
                                         {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
]  # fmt: skip


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 300))])
def test_random_flags_of_added_tokens_give_the_librarys_ids(seed: int) -> None:
    """The library is the reference with all its added tokens, and again with those that are special switched off."""
    dice = random.Random(seed)
    found = dice.choice([source(), json.loads(pieces_json(LIBRARY, True)), json.loads(pieces_json(LIBRARY, False))])
    found["normalizer"] = dice.choice([found["normalizer"], *NORMALIZERS])
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    start = max(found["model"]["vocab"].values()) + 10
    for i, content in enumerate(names := dice.sample(ADDED, dice.randint(1, 6))):
        chosen = {flag: dice.random() < 0.4 for flag in flags}
        found["added_tokens"].append(added(start + i, content, content.startswith("<"), **chosen))
    ours, theirs, plain = opened(found), *(Backend.from_str(json.dumps(found)) for _ in range(2))
    plain.encode_special_tokens = True
    for _ in range(24):
        text = "".join(dice.choices([*names, " ", "a", "foo", "x", "\n", "É", ".", "dog"], k=dice.randint(0, 8)))
        try:
            expected, without = (backend.encode(text, add_special_tokens=False).ids for backend in (theirs, plain))
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # a defect of the library with stripped spaces
                raise
            with pytest.raises(TokenizerError, match="can't be encoded"):
                ours.encode(text, parse_special=True)
            continue
        assert ours.encode(text, parse_special=True) == expected, (text, found["added_tokens"])
        assert ours.encode(text) == without, (text, found["added_tokens"])


@pytest.mark.parametrize("name", KINDS)
def test_without_the_request_text_stays_text(name: str) -> None:
    tokenizer = KINDS[name]
    control = next(text for text in tokenizer.control if text)
    assert tokenizer.encode(control, parse_special=True) == [tokenizer.control[control]]
    assert tokenizer.control[control] not in tokenizer.encode(control)
    assert tokenizer.encode("hello", parse_special=True) == tokenizer.encode("hello")
    assert tokenizer.encode("", parse_special=True) == tokenizer.encode("") == []
    if "<start_of_turn>" in tokenizer.control:
        messages = [{"role": "user", "content": "hello the"}, {"role": "assistant", "content": " a\n"}]
        text = render(TEMPLATE, messages, tokenizer)
        assert tokenizer.encode(text, parse_special=True) == encode_chat(tokenizer, TEMPLATE, messages)


def test_generate_continues_what_a_chat_continues(tiny_llm: Llama) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 2.0, "seed": 1}
    expected = tiny_llm.chat([{"role": "user", "content": "hello"}], **options).tokens
    assert tiny_llm.generate(PROMPT, parse_special=True, **options).tokens == expected
    assert [c.tokens for c in tiny_llm.generate([PROMPT], parse_special=True, **options)] == [expected]


def test_the_command_reads_control_tokens_on_request(clearllama: Run, tiny_gguf: Path) -> None:
    command = ("generate", "-m", str(tiny_gguf), "--json", "-n", "6", "--temp", "2", "--seed", "1", "--dtype", "fp32")
    chat = json.loads(clearllama(*command, "hello").stdout)
    special = clearllama(*command, "--raw", "--parse-special", PROMPT)
    plain = clearllama(*command, "--raw", PROMPT)
    assert json.loads(special.stdout)["tokens"] == chat["tokens"]
    assert json.loads(plain.stdout)["prompt_tokens"] > chat["prompt_tokens"]
    assert b"<|im_end|> as plain text; --parse-special enables control tokens" in plain.stderr
