"""Reader of torch's files (.pth, .pt, pytorch_model.bin): a pickle that describes tensors, and their values.

Neither Python's unpickler nor torch's is used: torch_pickle.py interprets the few operations that describe tensors. The
result is checked against the archive's table of contents (torch_archive.py) before a value is used. The values of an
archive stay in the mapped file.
"""

from __future__ import annotations

import io
import math
import mmap
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import torch
from torch import Tensor

from ..errors import CheckpointError
from .documents import size_of
from .torch_archive import ZIP as ZIP
from .torch_archive import Record, read_records
from .torch_pickle import LARGEST_PICKLE, REMEDY, Described, Storage, read_pickle

PICKLE = b"\x80\x02"
MAGIC, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001  # the first two pickles of a legacy file
# Records that torch.save writes besides data.pkl and data/...; older versions write only some of them.
ADDITIONS = {"version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id"}
BIG_ENDIAN = "was written on a big-endian machine, which is not supported; save it again on a little-endian machine"


class Tensors(dict[str, Tensor]):
    """The tensors of a file by name. sums: the CRC-32 of each tensor's storage; 0 or missing if the file has none."""

    sums: Mapping[str, int] = MappingProxyType({})


def read_torch(path: Path) -> Tensors:
    """The tensors of a file by name. Raises CheckpointError if it holds anything but {str: dense CPU tensor}."""
    size = size_of(path)
    try:
        with open(path, "rb") as file:
            start = file.read(512)
            refuse_mistakes(path, start)
            if start.startswith(ZIP):
                return _read_archive(file, path, size)
            if start.startswith(PICKLE):
                return _read_legacy(file, path, size)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    raise CheckpointError(f"{path} is not a torch file: {_what_it_is(start)}")


def checksums(path: Path) -> tuple[int, ...]:
    """The CRC-32 of each tensor by the archive's table of contents; empty for the legacy format."""
    return tuple(item.crc for name, item in records(path).items() if name.startswith("data/") and item.size)


def check_bytes(tensors: Tensors, name: str, path: Path) -> None:
    """Compare the storage of a tensor with its CRC-32. Raises CheckpointError if they differ."""
    expected = tensors.sums.get(name)
    values = torch.empty(0, dtype=torch.uint8).set_(tensors[name].untyped_storage())
    if expected and zlib.crc32(values.numpy().data) != expected:
        raise CheckpointError(f"{path}: the CRC-32 of {name} does not match; the file is damaged, download it again")


def records(path: Path) -> dict[str, Record]:
    """The checked table of contents of an archive; empty for the legacy format."""
    with open(path, "rb") as file:
        return read_records(file, path, size_of(path)) if is_archive(path) else {}


def is_archive(path: Path) -> bool:
    """Whether a file is a zip archive, torch's format since 1.6, by its first bytes."""
    with open(path, "rb") as file:
        return file.read(4) == ZIP


# ------------------------------------------------------------------------------------------------------- the formats
def _read_archive(file: BinaryIO, path: Path, size: int) -> Tensors:
    """The tensors of an archive, mapped. Raises CheckpointError unless each storage has its own record."""
    found = read_records(file, path, size)
    pickle = found.get("data.pkl")
    if pickle is None:
        raise CheckpointError(
            f"{path} is an archive without tensors (it has no data.pkl); download the file again, or save it with"
            " torch.save"
        )
    if pickle.size > LARGEST_PICKLE:
        raise CheckpointError(
            f"{path}: its pickle has {pickle.size:,} bytes, expected at most {LARGEST_PICKLE:,}; {REMEDY}"
        )
    content = pickle.read(file)
    if pickle.crc and zlib.crc32(content) != pickle.crc:  # 0: torch was told to compute none
        raise CheckpointError(
            f"{path} is damaged: the description of the tensors fails its checksum; download it again"
        )
    order = found.get("byteorder")
    if order is not None and (order.size > 99 or order.read(file) != b"little"):
        raise CheckpointError(f"{path} {BIG_ENDIAN}")
    tensors = _described(read_pickle(io.BytesIO(content), path), path)
    storages = {f"data/{key}": storage for key, storage in _storages(tensors, path).items()}
    if odd := sorted(found.keys() - storages.keys() - ADDITIONS - {"data.pkl"}):
        raise CheckpointError(
            f"{path} holds the record {odd[0]!r:.80}, which belongs to no tensor; {REMEDY}, or get a file with only"
            " the weights"
        )
    for name, storage in storages.items():
        record = found.get(name)
        if record is None or record.size != storage.nbytes:
            has = "is missing" if record is None else f"has {record.size:,} bytes"
            raise CheckpointError(
                f"{path}: the record {name!r:.80} {has}, expected {storage.nbytes:,} bytes for its tensors; {REMEDY}"
            )
        if record.start % storage.dtype.itemsize:
            raise CheckpointError(
                f"{path}: the values of {name!r:.80} are not aligned; download the file again, or save it with"
                " torch.save"
            )
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def values(key: str, dtype: torch.dtype) -> Tensor:
        record = found[f"data/{key}"]
        return torch.frombuffer(mapped, dtype=dtype, count=record.size // dtype.itemsize, offset=record.start)

    made = Tensors((name, _tensor(described, values)) for name, described in tensors.items())
    made.sums = {name: found[f"data/{described.storage.key}"].crc for name, described in tensors.items()}
    return made


def _read_legacy(file: BinaryIO, path: Path, size: int) -> Tensors:
    """The tensors of a file in torch's format before 1.6: five pickles, then the storages, each after its length."""
    file.seek(0)
    pickles = io.BytesIO(file.read(LARGEST_PICKLE))
    if read_pickle(pickles, path) != MAGIC or read_pickle(pickles, path) != LEGACY_VERSION:
        raise CheckpointError(f"{path} is not a torch file: it is {OTHERS[2][2]}")
    system = read_pickle(pickles, path)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointError(f"{path} {BIG_ENDIAN}")
    tensors = _described(read_pickle(pickles, path), path)
    keys, storages = read_pickle(pickles, path), _storages(tensors, path)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or sorted(keys) != sorted(storages):
        raise CheckpointError(f"{path}: its list of storages does not match its tensors; {REMEDY}")
    end = pickles.tell() + sum(8 + storage.nbytes for storage in storages.values())
    if end != size:
        what = "truncated" if end > size else "followed by other bytes"
        raise CheckpointError(
            f"{path} is damaged or {what}: it has {size:,} bytes, expected {end:,} for its tensors; download it again"
        )
    loaded: dict[str, Tensor] = {}
    file.seek(pickles.tell())
    for key in keys:
        if int.from_bytes(file.read(8), "little") != storages[key].numel:
            raise CheckpointError(
                f"{path}: the storage {key!r:.80} has another length than its tensors require; {REMEDY}"
            )
        loaded[key] = torch.empty(storages[key].nbytes, dtype=torch.uint8)
        file.readinto(loaded[key].numpy())  # type: ignore[attr-defined]
    return Tensors((name, _tensor(one, lambda key, dtype: loaded[key].view(dtype))) for name, one in tensors.items())


def _described(value: object, path: Path) -> dict[str, Described]:
    """Return a value if it maps names to tensors that lie within their storages. Raises CheckpointError if not."""
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a {_kind(value)}, expected a mapping of names to tensors; get a file with only the weights"
        )
    for name, tensor in value.items():
        if not isinstance(tensor, Described):
            raise CheckpointError(
                f"{path}: {name} is a {_kind(tensor)}, not a tensor; get a file with only the weights"
            )
        available, numel = tensor.storage.nbytes // tensor.dtype.itemsize, math.prod(tensor.shape)
        last = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
        # with strides of 0, a tensor of terabytes could have a storage of kilobytes
        if numel > available or (numel and last >= available) or tensor.storage.nbytes % tensor.dtype.itemsize:
            raise CheckpointError(
                f"{path}: {name} claims the shape {tensor.shape}, but its storage has {tensor.storage.nbytes} bytes;"
                f" {REMEDY}"
            )
    return value


def _kind(value: object) -> str:
    return "tensor" if isinstance(value, Described) else type(value).__name__


def _storages(tensors: Mapping[str, Described], path: Path) -> dict[str, Storage]:
    """The storages of tensors by their keys. Raises CheckpointError if two tensors disagree about one."""
    found: dict[str, Storage] = {}
    for name, tensor in tensors.items():
        storage = tensor.storage
        if found.setdefault(storage.key, storage).nbytes != storage.nbytes:
            raise CheckpointError(
                f"{path}: {name} and another tensor disagree about the size of their storage; {REMEDY}"
            )
    return found


def _tensor(described: Described, values: Callable[[str, torch.dtype], Tensor]) -> Tensor:
    """The tensor that is described. values: returns all values of a storage, by its key and in a dtype."""
    if 0 in described.shape:
        return torch.empty(0, dtype=described.dtype).as_strided(described.shape, described.strides)
    return values(described.storage.key, described.dtype).as_strided(
        described.shape, described.strides, described.offset
    )


def refuse_mistakes(path: Path, start: bytes) -> None:
    """Raise CheckpointError if the first bytes of a file are those of a failed download."""
    if not start:
        raise CheckpointError(f"{path} is empty; the download was probably interrupted, download it again")
    for sign, meaning in MISTAKES:
        if start.lstrip().lower().startswith(sign.lower()):
            raise CheckpointError(f"{path} is {meaning}")


# First bytes of a failed download -> what the file is, and the remedy
MISTAKES = [
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself; run 'git lfs pull' where it came from"),
    (b"<!DOCTYPE", "a web page, probably an error page saved in place of the download; download it again"),
    (b"<html", "a web page, probably an error page saved in place of the download; download it again"),
    (b"<?xml", "an XML page, probably an error page saved in place of the download; download it again"),
]


def _what_it_is(start: bytes) -> str:
    """What a file is that begins neither like torch's archive nor like its legacy pickle."""
    for sign, at, meaning in OTHERS:
        if start[at:].startswith(sign):
            return f"it is {meaning}"
    return f"it begins with {start[:8]!r}; download it again"


# (first bytes, their offset, what the file is)
OTHERS = [
    (b"GGUF", 0, "a GGUF file; rename it to end in .gguf and use its path"),
    (b'{"', 8, "a safetensors file, which belongs in a Hugging Face folder with a config.json"),
    (
        b"\x80",
        0,
        "a Python pickle, which can run code when read and is refused; get weights saved by torch.save with"
        " pickle_protocol=2",
    ),
    (b"\x1f\x8b", 0, "a gzip archive; unpack it first"),
    (b"ustar", 257, "a tar archive; unpack it first"),
    (b"{", 0, "a JSON text, perhaps a server's error response instead of the download; download it again"),
]
