"""Mutate inputs: bits, bytes and integers, words of the format, numbers in text, nodes of a JSON document.

The result depends only on the arguments and on the random generator passed in.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from typing import Any

from ..faults.harness import INTEGERS

LARGEST = 2**16  # bytes of an input; all seeds are smaller

NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
NUMBERS = (
    *(b"%d" % value for value in INTEGERS), b"1e400", b"-1e400", b"1e-320", b"0.5", b"4096.0", b"1e30", b"NaN",
    b"Infinity", b"9" * 5000, b"007", b"null", b"true",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, *INTEGERS, 10**400, 0.5, 1e308, 5e-324, math.nan, math.inf, "", "x", "a b", "../x",
    "/etc/passwd", "\x00", "\x1b[31m", "a\nb", "\ud800", "\u2028", "<s>", "<|eot_id|>", "é" * 3, "a" * 10000, [], {},
    [[]], [1, "x"], {"a": 1}, [0] * 1000,
)  # fmt: skip
WORDS = (
    b"\x00", b"\x1b", b"\n", b"\r\n", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", "\u2581".encode(), b"\xf0\x9f\x98\x80",
    b"{", b"}", b"[", b"]", b'"', b"," , b":", b"[" * 3000, b'{"a":' * 1500, b"../", b"<|eot_id|>", b"</s>",
)  # fmt: skip


def mutate(data: bytes, others: Sequence[bytes], words: Sequence[bytes], chance: random.Random) -> bytes:
    """Return a mutated input. others: inputs to copy pieces from; words: byte strings of the format to insert."""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        way = chance.randrange(12)
        if way < 3:
            data = json_node(data, chance)
        elif way < 6:
            data = _bytes(data, chance)
        elif way < 8:
            data = _insert(data, chance.choice((*words, *WORDS)), chance)
        elif way == 8:
            data = _number(data, chance)
        elif way == 9:
            data = _integer(data, chance)
        elif way == 10:
            data = _repeat(data, chance)
        else:
            data = _splice(data, chance.choice(others) if others else data, chance)
    return data[:LARGEST]


def _range(data: bytes, chance: random.Random) -> tuple[int, int]:
    """Draw a range, usually a short one."""
    start = chance.randrange(len(data) + 1)
    return start, min(len(data), start + chance.choice((1, 1, 2, 4, 8, 30, len(data))))


def _bytes(data: bytes, chance: random.Random) -> bytes:
    start, end = _range(data, chance)
    kind = chance.randrange(4)
    if kind == 0:
        return data[:start] + data[end:]
    if kind == 1:
        return data[:start] + chance.randbytes(min(end - start, 30)) + data[end:]
    if start == len(data):
        return data + chance.randbytes(1)
    changed = bytearray(data)
    changed[start] = changed[start] ^ 1 << chance.randrange(8) if kind == 2 else chance.choice((0, 1, 127, 128, 255))
    return bytes(changed)


def _insert(data: bytes, word: bytes, chance: random.Random) -> bytes:
    start, end = _range(data, chance)
    return data[:start] + word + data[start if chance.random() < 0.5 else end :]


def _integer(data: bytes, chance: random.Random) -> bytes:
    """Replace a little-endian integer at a random position by an unusual one."""
    width = chance.choice((1, 2, 4, 8))
    if len(data) < width:
        return data
    at = chance.randrange(len(data) - width + 1)
    old = int.from_bytes(data[at : at + width], "little")
    value = chance.choice((*INTEGERS, old - 1, old + 1, len(data), chance.randrange(40)))
    return data[:at] + (value % (1 << 8 * width)).to_bytes(width, "little") + data[at + width :]


def _number(data: bytes, chance: random.Random) -> bytes:
    found = list(NUMBER.finditer(data))
    if not found:
        return data
    one = chance.choice(found)
    return data[: one.start()] + chance.choice(NUMBERS) + data[one.end() :]


def _repeat(data: bytes, chance: random.Random) -> bytes:
    start, end = _range(data, chance)
    times = chance.choice((2, 2, 3, 100, 1000)) if end - start < 100 else 2
    return data[:start] + data[start:end] * times + data[end:]


def _splice(data: bytes, other: bytes, chance: random.Random) -> bytes:
    start, end = _range(other, chance)
    return _insert(data, other[start:end], chance)


def json_node(data: bytes, chance: random.Random) -> bytes:
    """Change a node of the first JSON document in the input. latin-1 preserves all bytes around it."""
    text = data.decode("latin-1")
    start = min((at for at in (text.find("{"), text.find("[")) if at >= 0), default=-1)
    try:
        document, end = json.JSONDecoder().raw_decode(text, max(start, 0))
        changed = _changed(document, document, chance)
        written = json.dumps(changed, ensure_ascii=chance.random() < 0.5)
        return data[: max(start, 0)] + written.encode("latin-1") + data[end:]
    except (ValueError, RecursionError):  # no document, or one that latin-1 can't encode
        return data


def _changed(node: Any, root: Any, chance: random.Random) -> Any:
    if isinstance(node, dict | list) and node and chance.random() < 0.8:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = chance.choice(keys)
        kind = chance.randrange(8)
        if kind == 0:
            return (
                {k: v for k, v in node.items() if k != key} if isinstance(node, dict) else node[:key] + node[key + 1 :]
            )
        if kind == 1:
            new = chance.choice(VALUES)
            return {**node, str(new)[:100]: node[key]} if isinstance(node, dict) else [*node, node[key]]
        inner = _changed(node[key], root, chance)
        return {**node, key: inner} if isinstance(node, dict) else [*node[:key], inner, *node[key + 1 :]]
    kind = chance.randrange(6)
    if kind == 0:
        return [node]
    if kind == 1:
        return _somewhere(root, chance)
    if kind == 2 and isinstance(node, int | float) and not isinstance(node, bool):
        return node + chance.choice((-1, 1, 0.5)) if abs(node) < 1e15 else -node
    return chance.choice(VALUES)


def _somewhere(node: Any, chance: random.Random) -> Any:
    """Return a random part of a document."""
    while isinstance(node, dict | list) and node and chance.random() < 0.7:
        node = chance.choice(list(node.values()) if isinstance(node, dict) else node)
    return node
