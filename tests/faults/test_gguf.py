"""Group D: a crafted GGUF file for each fault, and a valid file with any part of its header changed."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from llama.checkpoint import open_checkpoint
from llama.checkpoint.gguf_header import LARGEST_HEADER, read_header
from llama.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------------------------------------------- crafted files
def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def entry(key: bytes, type: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", type) + value


def array(type: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", type, count) + items


def tensor(name: bytes = b"t", dims: tuple[int, ...] = (32,), type: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims)
    return string(name) + shape + struct.pack("<IQ", type, offset)


def file(entries: list[bytes], tensors: list[bytes] = (), data: int = 0, **header: Any) -> bytes:  # type: ignore[assignment]
    head = header.get("magic", b"GGUF") + struct.pack(
        "<IQQ", header.get("version", 3), header.get("n_tensors", len(tensors)), header.get("n_kv", len(entries))
    )
    body = head + b"".join(entries) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + bytes(data)


HUGE = (2**31, 2**32, 2**63, 2**64 - 1)
# Required text of the message -> files
CRAFTED: dict[str, list[bytes]] = {
    "the header needs": [
        *(file([entry(b"k", 9, array(type, n))]) for n in HUGE for type in (0, 12, 8)),
        *(file([], n_kv=n) for n in HUGE),
    ],
    "a string ends at byte": [
        *(file([entry(b"k", 8, string(b"", n))]) for n in HUGE),
        *(file([], [string(b"", n) + bytes(24)]) for n in (2**40, 2**64 - 1)),
    ],
    "is cut or not UTF-8": [*(file([], n_tensors=n)[:24] for n in HUGE), file([entry(b"k", 8, string(b"\xff"))])],
    "expected a number or a string": [file([entry(b"k", 9, array(9, 1) * 5000)]), file([entry(b"k", 13, bytes(8))])],
    "has GGUF version": [*(file([], version=n) for n in (0, 1, 4)), b"GGUF" + struct.pack(">IQQ", 3, 0, 0)],
    "dimensions, expected 1 to 4": [file([], [tensor(dims=dims)], 128) for dims in ((), (1, 1, 1, 1, 32))],
    "has the unknown type 999": [file([], [tensor(type=999)], 128)],
    "in blocks of": [file([], [tensor(dims=(33,), type=2)], 128)],
    "the file has": [
        file([], [tensor(dims=(2**32 + 1, 2**32 - 1, 2**32, 2**32 + 4))], 128),  # the product wraps to 4
        file([], [tensor()], 127),
        *(file([], [tensor(b"a"), tensor(b"b", offset=n)], 256) for n in (0, 1, 127)),
    ],
    "key k occurs twice": [file([entry(b"k", 0, b"x")] * 2)],
    "tensor t occurs twice": [file([], [tensor(), tensor(offset=128)], 256)],
    "expected a power of two": [
        file([entry(b"general.alignment", type, value)])
        for type, value in ((4, bytes(4)), (4, b"\3\0\0\0"), (8, string(b"32")), (6, struct.pack("<f", 32)))
    ],
}  # fmt: skip


@pytest.mark.parametrize("says", CRAFTED)
def test_each_crafted_fault_is_refused(says: str) -> None:
    _, good = read_header(file([entry(b"k", 9, array(8, 1, string(b"a")))], [tensor()], 128), "good.gguf")
    assert good["t"].nbytes == 128
    for content in CRAFTED[says]:
        with pytest.raises(CheckpointError, match=says) as error:
            read_header(content, "bad.gguf")
        assert len(str(error.value)) < 400


def test_a_header_is_limited_before_it_is_read(tmp_path: Path) -> None:
    """Files with holes: a few bytes on disk that claim millions of strings or numbers."""
    for type, count in ((8, 10**8), (4, 10**9), (4, LARGEST_HEADER // 4)):
        (tmp_path / "x.gguf").write_bytes(file([entry(b"k", 9, array(type, count))]))
        os.truncate(tmp_path / "x.gguf", 2**33)
        used = time.process_time()
        with pytest.raises(CheckpointError, match=r"x\.gguf"):
            open_checkpoint(tmp_path / "x.gguf")
        assert time.process_time() - used < 0.5
