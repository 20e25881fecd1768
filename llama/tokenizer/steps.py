"""Check the steps of a tokenizer.json before and after its model: their types, and how much text they may add.

The `tokenizers` library runs normalizers and pre-tokenizers on every text. Each may lengthen the text, so a few of them
in a short file could use any amount of memory. Each accepted type has a bound here, and the product of the bounds is
limited. A type without a bound is refused.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import TokenizerError
from .patterns import check_pattern, check_sizes

# Characters written for one. Llama 2's steps may write 2, those of SmolLM2 4, and NFKC 18.
LARGEST_GROWTH = 256
MOST_STEPS = 64  # each step may process the complete text

LISTS = ("normalizers", "pretokenizers", "decoders", "processors")
Step = Mapping[str, Any]


def parts(step: Any) -> Iterator[dict[str, Any]]:
    """The single steps of a normalizer, pre-tokenizer, decoder or post-processor; sequences are flattened."""
    if isinstance(step, dict) and step.get("type") == "Sequence":
        lists = [step[name] for name in LISTS if name in step]
        if len(lists) != 1 or not isinstance(lists[0], list):
            raise ValueError(f"a Sequence must have one list of steps, found {len(lists)}")
        for inner in lists[0]:
            yield from parts(inner)
    elif step is not None:
        yield step


def has(step: Any, *types: str) -> bool:
    """Whether a step of one of these types is among the parts."""
    return any(part.get("type") in types for part in parts(step))


def check_steps(source: Mapping[str, Any], where: str) -> None:
    """Raise TokenizerError if a step has a type that the LLaMA family does not use, or if the steps add much text."""
    for place, known in (("decoder", DECODERS), ("post_processor", POST_PROCESSORS)):
        for part in parts(source.get(place)):
            if kind(part, place, known, where) == "Replace" and replaced(part) != ("\u2581", " "):
                raise TokenizerError(
                    f"{where}: its decoder replaces {replaced(part)[0]!r:.60} with {replaced(part)[1]!r:.60}, expected"
                    f" U+2581 with a space; the LLaMA family uses no other replacement"
                )
    growth(source, where)


def growth(source: Mapping[str, Any], where: str) -> float:
    """A bound on the number of characters that the model gets for each character of a text.

    Raises TokenizerError if it is above LARGEST_GROWTH. What a step adds once to a text counts for every character,
    because added tokens divide a text, and each part is then a text.
    """
    factor = 1.0
    steps = 0
    patterns: list[str] = []
    for place, known in (("normalizer", NORMALIZERS), ("pre_tokenizer", PRE_TOKENIZERS)):
        for part in parts(source.get(place)):
            steps += 1
            if steps > MOST_STEPS:
                raise TokenizerError(
                    f"{where}: its normalizer and pre_tokenizer have more than {MOST_STEPS} steps, the most that is"
                    f" accepted; the file is damaged or forged, download it from the model's authors"
                )
            pattern = part.get("pattern")
            if isinstance(pattern, Mapping) and isinstance(pattern.get("Regex"), str):
                patterns.append(pattern["Regex"])
                check_sizes(patterns, where)
                check_pattern(patterns[-1], where)
            factor *= known[kind(part, place, known, where)](part)
            if factor > LARGEST_GROWTH:
                raise TokenizerError(
                    f"{where}: its normalizer and pre_tokenizer may write more than {LARGEST_GROWTH} characters for one"
                    f" character of a text, which is not supported; download the file from the model's authors"
                )
    return factor


def kind(part: Any, place: str, known: Any, where: str) -> str:
    """The type of a step. Raises TokenizerError if it is not known."""
    name = part.get("type") if isinstance(part, dict) else None
    if not isinstance(name, str) or name not in known:
        article = "an" if place[0] in "aeiou" else "a"
        raise TokenizerError(
            f"{where}: its {place} has a step of the type {name!r:.40}, which the LLaMA family does not use; supported"
            f" in {article} {place}: {', '.join(known)}"
        )
    return name


def replaced(part: Step) -> tuple[str | None, str]:
    """The string that a Replace step searches for (None: a regular expression), and the string that it writes."""
    return part["pattern"].get("String"), part["content"]


def _replace(part: Step) -> float:
    """A bound on the growth by a Replace step. An empty pattern matches before and after every character."""
    old, new = replaced(part)
    return max(1.0, len(new) / len(old)) if old else 1.0 + 2 * len(new)


def _precompiled(part: Step) -> float:
    try:
        data = base64.b64decode(part["precompiled_charsmap"], validate=True)
    except binascii.Error:
        raise ValueError("its precompiled_charsmap is not base64") from None
    return charsmap_growth(data)


def charsmap_growth(data: bytes) -> float:
    """A bound on the growth by SentencePiece's table of replacements. Raises ValueError if the table is damaged.

    The table consists of the size of a trie in bytes, the trie in 32-bit units, and replacements that end with NUL. The
    libraries follow the offsets of the trie without checking them.
    Format: google/sentencepiece src/normalizer.cc; s-yata/darts-clone.
    """
    size = struct.unpack_from("<I", data)[0] if len(data) >= 4 else 0
    texts = data[4 + size :]
    damaged = ValueError("its table of replacements (charsmap) is damaged")
    if not size or size % 1024 or not texts.endswith(b"\0"):  # units come in blocks of 256
        raise damaged
    try:
        texts.decode()
    except UnicodeDecodeError:
        raise damaged from None
    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    offset = (units >> 10) << ((units & 0x200) >> 6)
    first = np.arange(len(units)) ^ offset  # the unit of the label 0; those of other labels differ in the low 8 bits
    inner = units < 2**31  # other units have a value and are not followed, except the first one, the root
    inner[0] = True
    if (first[inner] >= len(units)).any():
        raise damaged
    values = units[first[inner & (units & 0x100 != 0)]] & 0x7FFFFFFF
    if (values >= len(texts)).any():
        raise damaged
    raw = np.frombuffer(texts, np.uint8)
    if (raw[values] & 0xC0 == 0x80).any():  # the value points inside a character
        raise damaged
    ends = np.flatnonzero(raw == 0)
    before = np.concatenate(([0], np.cumsum(raw & 0xC0 != 0x80)))  # characters before each byte
    return float(max(1, (before[ends[np.searchsorted(ends, values)]] - before[values]).max(initial=0)))


def _prefix(part: Step) -> float:
    return 2.0 if part.get("add_prefix_space", True) else 1.0


# Type of a step -> a bound on its growth. Unicode's longest decompositions have 4 characters, 18 for NFKC and NFKD.
NORMALIZERS: dict[str, Callable[[Step], float]] = {
    "NFC": lambda _: 4,
    "NFD": lambda _: 4,
    "NFKC": lambda _: 18,
    "NFKD": lambda _: 18,
    "Lowercase": lambda _: 3,
    "Strip": lambda _: 1,
    "Prepend": lambda part: 1 + len(part["prepend"]),
    "Replace": _replace,
    "Precompiled": _precompiled,
}
PRE_TOKENIZERS: dict[str, Callable[[Step], float]] = {
    "ByteLevel": lambda part: 4 * _prefix(part),  # a character has at most four bytes
    "Metaspace": lambda _: 2,
    "Split": lambda _: 1,
    "Digits": lambda _: 1,
    "Punctuation": lambda _: 1,
    "Whitespace": lambda _: 1,
    "WhitespaceSplit": lambda _: 1,
}
DECODERS = ("ByteLevel", "Metaspace", "ByteFallback", "Fuse", "Strip", "Replace")
POST_PROCESSORS = ("TemplateProcessing", "ByteLevel", "BertProcessing", "RobertaProcessing")
