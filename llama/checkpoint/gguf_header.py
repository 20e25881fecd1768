"""Reader of the header of GGUF, llama.cpp's file format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

A file consists of metadata, an entry for each tensor, and the tensors' bytes. The gguf package's reader hangs on a
crafted header, so this is our own: no number in the header sets a size before it is checked against the file's size.
"""

from __future__ import annotations

import math
import mmap
import struct
from typing import Any, NamedTuple

import numpy as np

from ..checks import is_integer
from ..errors import CheckpointError, DamagedError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LARGEST_HEADER = 2**26  # bytes; Llama 3's header has 10 million

# Value type -> format of struct and numpy
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
UINT32, STRING, ARRAY, UINT64 = 4, 8, 9, 10


class TensorInfo(NamedTuple):
    """A tensor's entry. A row is stored in blocks: `block` weights in `size` bytes, 1 weight in 4 bytes for F32.

    type    the name of a type: F32, Q4_K, ...
    shape   in torch's order; GGUF stores it reversed
    offset  where the first byte is, counted from the file's start
    """

    type: str
    block: int
    size: int
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.block * self.size


class _Cursor:
    """A position in the header. Reading past the end, or past LARGEST_HEADER, raises DamagedError."""

    def __init__(self, data: mmap.mmap | bytes, where: str):
        self.data, self.where, self.at = data, where, 0
        self.end = min(len(data), LARGEST_HEADER)

    def take(self, count: int) -> int:
        """Skip `count` bytes; returns the position of the first."""
        if count > self.end - self.at:
            raise DamagedError(
                f"{self.where}: the header needs {count} bytes at byte {self.at}, but must end by {self.end}"
            )
        self.at += count
        return self.at - count

    def scalar(self, type: int) -> Any:
        format = SCALARS[type]
        return struct.unpack_from(format, self.data, self.take(struct.calcsize(format)))[0]

    def strings(self, count: int) -> list[str]:
        """Read `count` strings. A vocabulary has 100,000, so this is one loop without calls of `take`."""
        data, at, end, found, length_at = self.data, self.at, self.end, list[str](), struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > end:
                    raise DamagedError(f"{self.where}: a string ends at byte {at}, but the header must end by {end}")
                found.append(data[start:at].decode())
        except (struct.error, UnicodeDecodeError):
            raise DamagedError(f"{self.where}: the string near byte {at} is cut or not UTF-8") from None
        self.at = at
        return found

    def value(self, key: str) -> Any:
        type = self.scalar(UINT32)
        item, count = (self.scalar(UINT32), self.scalar(UINT64)) if type == ARRAY else (type, 1)
        if item == STRING:
            self.take(8 * count)  # refuses a `count` that is too large: each length takes 8 bytes
            self.at -= 8 * count
            strings = self.strings(count)
            return strings if type == ARRAY else strings[0]
        if item not in SCALARS:
            raise DamagedError(f"{self.where}: {key:.80} has the value type {item}, expected a number or a string")
        if type != ARRAY:
            return self.scalar(type)
        dtype = np.dtype(SCALARS[item])
        return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize)).copy()

    def tensor(self, name: str) -> TensorInfo:
        """Read the rest of an entry, after its name. The offset counts from the start of the data, not of the file."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # takes 20 ms, so only for GGUF files

        n_dims = self.scalar(UINT32)
        if not 1 <= n_dims <= 4:
            raise DamagedError(f"{self.where}: tensor {name:.80} has {n_dims} dimensions, expected 1 to 4")
        shape = tuple(self.scalar(UINT64) for _ in range(n_dims))[::-1]
        number, offset = self.scalar(UINT32), self.scalar(UINT64)
        try:
            type = GGMLQuantizationType(number)
        except ValueError:
            found = f"{self.where}: tensor {name:.80} has the unknown type {number}"
            raise CheckpointError(f"{found}; get the model as Q4_K_M or Q8_0") from None
        block, size = GGML_QUANT_SIZES[type]
        if shape[-1] % block:
            raise DamagedError(f"{self.where}: tensor {name:.80} has rows of {shape[-1]}, not a multiple of {block}")
        return TensorInfo(type.name, block, size, shape, offset)


def read_header(data: mmap.mmap | bytes, where: str) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """The metadata and the tensors' entries. Raises CheckpointError if the header contradicts itself or the file."""
    header = _Cursor(data, where)
    magic = bytes(data[header.take(4) : 4])
    if magic != MAGIC:
        raise DamagedError(f"{where} is not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}")
    if (version := header.scalar(UINT32)) not in VERSIONS:
        raise CheckpointError(f"{where} has GGUF version {version}, expected {VERSIONS[0]} or {VERSIONS[1]}")
    n_tensors, n_metadata = header.scalar(UINT64), header.scalar(UINT64)
    metadata: dict[str, Any] = {}
    for _ in range(n_metadata):
        (key,) = header.strings(1)
        if key in metadata:
            raise DamagedError(f"{where}: the metadata key {key:.80} occurs twice")
        metadata[key] = header.value(key)
    alignment = metadata.get("general.alignment", 32)
    if not is_integer(alignment) or alignment < 1 or alignment & (alignment - 1):
        raise DamagedError(f"{where}: general.alignment is {alignment!r:.40}, expected a power of two")
    tensors: dict[str, TensorInfo] = {}
    for _ in range(n_tensors):
        (name,) = header.strings(1)
        if name in tensors:
            raise DamagedError(f"{where}: tensor {name:.80} occurs twice")
        tensors[name] = header.tensor(name)

    # Each tensor begins at the first multiple of the alignment after the end of the tensor before it. llama.cpp checks
    # this too: otherwise, a tensor with a changed type or shape would be read as other numbers.
    start = end = -(-header.at // alignment) * alignment
    for name, info in tensors.items():
        begin = start + info.offset
        if begin != end or end + info.nbytes > len(data):
            found = f"{where}: tensor {name:.80} has {info.nbytes} bytes from byte {begin}"
            raise DamagedError(f"{found}; expected it at byte {end} of a file with {len(data)} bytes")
        tensors[name] = info._replace(offset=end)
        end = -(-(end + info.nbytes) // alignment) * alignment
    return metadata, tensors
