"""A bound on the text that the steps of a tokenizer.json write."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

from tokenizers import Tokenizer as Backend

from ..errors import TokenizerError

# The most characters that steps may write for one. Llama 2's may write 2, those of SmolLM2 4, and NFKC 18.
LARGEST_GROWTH = 256

# Steps that lengthen a text, and the most characters that they write for one
GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 4, "ByteLevel": 8,
          "Metaspace": 2}  # fmt: skip


def check_growth(backend: Backend, where: str) -> None:
    """Raise TokenizerError if the steps before the model may lengthen a text more than LARGEST_GROWTH times.

    The library has no bound: a few replacements that each double a text fill the memory, and then the library ends
    the process. A step that writes once per text is counted per character: added tokens may split a text anywhere.
    The steps are read from the library, which completes and sorts what a file writes.
    """
    steps = filter(None, (backend.normalizer, backend.pre_tokenizer))
    check_factor(math.prod(growth(json.loads(step.__getstate__())) for step in steps), where)


def check_factor(factor: float, where: str) -> None:
    """Raise TokenizerError if a normalizer may write too many characters for one."""
    if factor > LARGEST_GROWTH:
        raise TokenizerError(f"{where}: its normalizer may write {factor:,.0f} characters for one character of a text")


def growth(part: dict[str, Any]) -> float:
    """The most characters that a step writes for one character of a text."""
    if part["type"] == "Sequence":
        return math.prod(map(growth, part.get("normalizers") or part.get("pretokenizers") or ()))
    if part["type"] == "Prepend":
        return 1 + len(part["prepend"])
    if part["type"] == "Replace":
        old, new = part["pattern"].get("String"), part["content"]
        return max(1.0, len(new) / len(old)) if old else 1 + 2 * len(new)  # a pattern may match between characters
    if part["type"] == "Precompiled":
        return longest_replacement(base64.b64decode(part["precompiled_charsmap"]))
    return GROWTH.get(part["type"], 1)


def longest_replacement(charsmap: bytes) -> int:
    """The length of the longest text in SentencePiece's table: a trie's size, the trie, texts that end with NUL."""
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(len(text.decode(errors="replace")) for text in texts.split(b"\0"))
