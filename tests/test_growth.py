"""Normalizers and pre-tokenizers that could fill the memory are refused; the library would end the process."""

from __future__ import annotations

import base64
import json
import struct
import unicodedata
from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers

from llama.errors import TokenizerError
from llama.tokenizer.growth import GROWTH, LARGEST_GROWTH, growth, longest_replacement
from llama.tokenizer.huggingface import HuggingFaceTokenizer
from llama.tokenizer.sentencepiece import SentencePieceModelTokenizer, write_field

from .test_tokenizer_files import MODEL, added, source

LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


REFUSED: dict[str, dict[str, Any]] = {
    "twelve replacements": sequence(*[replace("a", "a" * 10)] * 12),
    "replacements of nothing": sequence(*[replace("", "yy")] * 20),
    "a prefix": {"type": "Prepend", "prepend": "▁" * 256},
    "sequences in sequences": sequence(*[sequence(*[replace("a", "aa")] * 3)] * 3),
    "a step that looks like a list": {**replace("a", "a" * 1000), "normalizers": []},
}


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_lengthen_a_text_are_refused(name: str) -> None:
    found = source(normalizer=REFUSED[name])
    found["added_tokens"].append(added(261, "aab", normalized=True))  # normalized when it is added
    with pytest.raises(TokenizerError, match="characters for one character of a text"):
        HuggingFaceTokenizer(json.dumps(found).encode(), "tokenizer.json")
    levels = {"type": "Sequence", "pretokenizers": [LEVEL] * 3}
    with pytest.raises(TokenizerError, match="may write 512 characters for one character of a text"):
        HuggingFaceTokenizer(json.dumps(source(pre_tokenizer=levels)).encode(), "tokenizer.json")


def test_the_bound_of_a_replacement() -> None:
    steps = (replace(" ", "▁"), replace("ab", "xyz"), replace("ab", "c"), replace("", "xy"))
    assert [*map(growth, steps)] == [1, 1.5, 1, 5]
    assert growth({"type": "Replace", "pattern": {"Regex": "a"}, "content": "xy"}) == 5


@pytest.mark.parametrize("name", [name for name in GROWTH if name != "BertNormalizer"])
def test_the_bound_holds_for_every_character(name: str) -> None:
    """The oracle is the library, run on every character that has a decomposition or a lower case."""
    changed = [one for one in map(chr, range(0x110000)) if unicodedata.decomposition(one) or one.lower() != one]
    if hasattr(normalizers, name) and name != "ByteLevel":
        largest = max(len(getattr(normalizers, name)().normalize_str(character)) for character in changed)
    else:
        step = getattr(pre_tokenizers, name)()
        largest = max(sum(len(word) for word, _ in step.pre_tokenize_str(one)) for one in (*changed[::50], "😀", "é"))
    assert largest <= GROWTH[name] < 2.5 * largest


def test_a_table_of_replacements_is_measured() -> None:
    """The oracle is the library: "a" -> text. The root's offset is 1, so "a" is at 1 ^ 97 = 96, its value at 96 ^ 3."""
    trie = [{0: 1 << 10, 96: 97 | 0x100 | 3 << 10, 99: 2**31}.get(i, 0) for i in range(256)]
    for text in ("xyz", "漢", "é" * 256, "x" * 257):
        table = struct.pack("<257I", 1024, *trie) + text.encode() + b"\0"
        assert longest_replacement(table) == len(text)
        model = MODEL + write_field(3, write_field(2, table))
        step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
        assert growth(step) == len(text)
        if len(text) > LARGEST_GROWTH:
            with pytest.raises(TokenizerError, match="may write 257 characters for one character of a text"):
                SentencePieceModelTokenizer(model, "x")
        else:
            ours = SentencePieceModelTokenizer(model, "x")
            assert ours.decode(ours.encode("abab")) == f"{text}b" * 2
