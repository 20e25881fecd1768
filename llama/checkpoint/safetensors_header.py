"""Reader of the header of a safetensors file. It runs before the library and has clearer error messages.

A file is 8 bytes with the length of the header, the header in JSON, then the bytes of the tensors. The rules are those
of https://github.com/huggingface/safetensors#format; the tensors must cover the data without gap or overlap. Numbers of
the header are Python's unbounded integers, and no allocation depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..checks import is_integer
from ..errors import CheckpointError
from .documents import parse_json

LARGEST = 2**22  # bytes of a header; the format allows 100 million, the header of a 405B model has 0.2 million
REMEDY = "the file is damaged, download it again"

# dtype -> bytes of an entry
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


class Entry(NamedTuple):
    """A tensor's entry: begin and end count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """The tensors by name, the entries of __metadata__, and the offset in the file at which the header ends."""

    tensors: dict[str, Entry]
    metadata: Mapping[str, str]
    start: int


def read_header(path: Path) -> Header:
    """The checked header of a file. Raises CheckpointError, or OSError if the file can't be read."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, LARGEST):
            raise CheckpointError(
                f"{path} has {size:,} bytes, but its header would take {length:,}; it is truncated or not a"
                f" safetensors file, download it again"
            )
        raw = file.read(length)
    where = f"{path} (header)"
    if not raw.startswith(b"{"):
        raise CheckpointError(
            f"{where} begins with {raw[:8]!r} instead of b'{{'; it is not a safetensors file or {REMEDY}"
        )
    try:
        document = parse_json(raw, where)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {REMEDY}") from None
    metadata = document.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ must map names to strings, got {metadata!r:.60}; {REMEDY}")
    try:
        "".join((*document, *metadata, *metadata.values())).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{where}: a name is not valid Unicode (it contains a lone surrogate); {REMEDY}"
        ) from None
    tensors = {name: _entry(name, values, where) for name, values in document.items()}
    _check_cover(tensors, path, size - 8 - length)
    return Header(tensors, metadata, 8 + length)


def _entry(name: str, values: Any, where: str) -> Entry:
    """One tensor of the header. Raises CheckpointError unless its bytes match its dtype and shape."""
    values = values if isinstance(values, dict) else {}
    dtype, shape, offsets = (values.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise CheckpointError(
            f"{where}: {name!r:.80} is stored as {dtype!r:.40}, an unknown dtype; {REMEDY}, or get one in BF16"
        )
    if not _are_sizes(shape):
        raise CheckpointError(
            f"{where}: the shape of {name!r:.80} must be a list of sizes, got {shape!r:.60}; {REMEDY}"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{where}: data_offsets of {name!r:.80} must be its begin and end, got {offsets!r:.60}; {REMEDY}"
        )
    begin, end = offsets
    expected = math.prod(shape) * SIZES[dtype]
    if end - begin != expected:
        raise CheckpointError(
            f"{where}: {name!r:.80} is {dtype} of shape {tuple(shape)!s:.80}, expected"
            f" {_count(expected)} bytes, found {_count(end - begin)}; {REMEDY}"
        )
    return Entry(dtype, tuple(shape), begin, end)


def _check_cover(tensors: Mapping[str, Entry], path: Path, available: int) -> None:
    """Raise CheckpointError unless each tensor begins where the one before it ends, and the last ends the file."""
    expected, before = 0, "the header"
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != expected:
            raise CheckpointError(
                f"{path} (header): {name!r:.80} begins at byte {_count(entry.begin)} of the data, expected"
                f" {_count(expected)}, where {before} ends; {REMEDY}"
            )
        expected, before = entry.end, f"{name!r:.80}"
    if expected != available:
        verdict = "it is truncated" if available < expected else "bytes were added"
        raise CheckpointError(
            f"{path} has {available:,} bytes of tensors, but its header requires {_count(expected)}; {verdict},"
            f" download it again"
        )


def _are_sizes(value: Any) -> bool:
    """Whether a value is a list of at most 16 ints from 0 to 2^63 - 1, which bounds the time of arithmetic with it."""
    short = isinstance(value, list) and len(value) <= 16
    return short and all(is_integer(number) and 0 <= number < 2**63 for number in value)


def _count(number: int) -> str:
    """An int with thousands separators, abbreviated if huge."""
    return f"{number:,}" if number < 10**30 else "more than 10^30"
