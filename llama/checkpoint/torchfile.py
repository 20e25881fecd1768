"""Reader of torch's files (.pth, .pt, pytorch_model.bin): torch.load in its safe mode, and what that does not check.

`weights_only` runs no code of the file, but a bytearray(n) can fill memory, and a tuple nested a million deep can crash
the process; so the pickle's operations are checked first. `mmap` leaves the values in the file, but trusts the sizes in
the pickle; so they are compared with the records of the zip archive.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, DamagedError, LlamaError
from ..system.documents import size_of, utf8_name

ZIP, PICKLE = b"PK\x03\x04", b"\x80\x02"  # the first bytes of an archive, and of a file from before torch 1.6
LARGEST_PICKLE = 2**22  # bytes; the names and shapes of a model of 405B parameters take 0.2 million
DEEPEST = 1000  # levels of nesting; a state dict has 4, and each 1,000 tensors count as one more
FUNCTIONS = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3",
             "torch._utils _rebuild_parameter"}  # fmt: skip
TYPES = re.compile(r"torch(\.storage)? \w+Storage|torch (bool|[a-z]+\d+\w*)")  # storages and dtypes


def read_torch(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, mapped if it is an archive.

    Raises CheckpointError if it holds anything but {str: dense CPU tensor}, or contradicts itself.
    """
    size_of(path)  # refuses a pipe, which would block
    try:
        with open(path, "rb") as file:
            refuse_mistakes(path, start := file.read(64))
            if not start.startswith((ZIP, PICKLE)):
                raise CheckpointError(f"{path} is not a torch file: it begins with {start[:8]!r}")
            file.seek(0)
            pickles = io.BytesIO(file.read(LARGEST_PICKLE))
        with utf8_name(path) as name:
            if start.startswith(ZIP):
                return _read_archive(name, path)
            for _ in range(5):  # a magic number, the version, the system, the tensors, the keys of the storages
                _check_pickle(pickles, path)
            return _dense_tensors(torch.load(name, "cpu", weights_only=True), path)
    except LlamaError:
        raise
    except Exception as error:  # of a dozen kinds; torch wraps some in a text that recommends weights_only=False
        cause = error.__context__ or error
        raise DamagedError(f"torch.load can't read {path} ({type(cause).__name__}: {cause!s:.120})") from None


def _read_archive(name: str, path: Path) -> dict[str, Tensor]:
    records = read_records(name, path)
    reader: Any = torch._C.PyTorchFileReader(name)  # that of torch.load, so that both see the same pickle and offsets
    content = reader.get_record("data.pkl")
    crc = records["data.pkl"].CRC
    if crc and zlib.crc32(content) != crc:  # 0: written without checksums
        raise DamagedError(f"{path}: the CRC-32 of data.pkl does not match")
    if "byteorder" in records and reader.get_record("byteorder") != b"little":  # torch would swap bytes in the mapping
        raise CheckpointError(f"{path} is from a big-endian machine; save it again on a little-endian one")
    _check_pickle(io.BytesIO(content), path)
    tensors = _dense_tensors(torch.load(name, "cpu", mmap=True, weights_only=True), path)

    # Each storage of the tensors must be one record. The file is mapped as a whole: addresses follow the offsets.
    storages = {s.data_ptr(): s.nbytes() for t in tensors.values() if (s := t.untyped_storage()).nbytes()}
    data = {reader.get_record_offset(n): i for n, i in records.items() if n.startswith("data/") and i.file_size}
    if len(storages) != len(data):
        raise DamagedError(f"{path}: its tensors use {len(storages)} records, but it has {len(data)}")
    start = min(storages, default=0) - min(data, default=0)
    for (address, nbytes), (offset, record) in zip(sorted(storages.items()), sorted(data.items()), strict=True):
        if address != start + offset or nbytes != record.file_size:
            raise DamagedError(f"{path}: {record.filename} has {record.file_size:,} bytes, expected {nbytes:,}")
    return tensors


def read_records(name: str | Path, path: Path) -> dict[str, zipfile.ZipInfo]:
    """The records of an archive, without their folder. Raises CheckpointError for what a mapping would read wrongly."""
    with zipfile.ZipFile(name) as archive:
        found = archive.infolist()
    records = {info.filename.partition("/")[2]: info for info in found}
    if len({record.lower() for record in records}) < len(found):  # torch.load ignores case
        raise DamagedError(f"{path} has two records of one name")
    for record, info in records.items():
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise CheckpointError(f"{path}: {record:.80} is compressed or encrypted; save it with torch.save")
    if "data.pkl" not in records or records["data.pkl"].file_size > LARGEST_PICKLE:
        raise CheckpointError(f"{path}: expected a data.pkl of at most {LARGEST_PICKLE:,} bytes; use torch.save")
    return records


def _check_pickle(file: io.BytesIO, path: Path) -> None:
    """Raise CheckpointError if the next pickle in `file` needs other globals than a state dict, or nests deeply.

    Refuses a container from the memo: it could grow after its depth is counted.
    """
    stack: list[Any] = []  # the depth of a value, 0 for a number, a string or a tensor; the name of a global
    marks: list[int] = []
    memo: dict[int, Any] = {}
    argument: Any
    for operation, argument, _ in pickletools.genops(file):
        name, needs = operation.name, operation.stack_before
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
            if stack[-1] and stack[-1].__class__ is int:
                raise CheckpointError(f"{path}: its pickle uses a container twice, unlike a state dict")
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "GLOBAL":
            stack.append(argument)
            if argument not in FUNCTIONS and not TYPES.fullmatch(argument):
                raise CheckpointError(f"{path} holds more than tensors ({argument:.80}); get only the weights")
        elif name == "PROTO" and argument != 2:
            raise CheckpointError(f"{path} has pickle protocol {argument}; save it with torch.save's default, 2")
        elif not needs:
            stack += [int(name.startswith("EMPTY"))] * len(operation.stack_after)
        else:
            mark = pickletools.markobject in needs
            first = marks.pop() - needs.index(pickletools.markobject) if mark else len(stack) - len(needs)
            values = stack[first:]
            del stack[first:]
            depth = 1 + max([0, *[value for value in values if value.__class__ is int]])
            if depth > DEEPEST:
                raise CheckpointError(f"{path}: its pickle nests values more than {DEEPEST:,} deep")
            if name in ("REDUCE", "NEWOBJ") and values[0] not in FUNCTIONS:
                raise CheckpointError(f"{path}: its pickle calls {values[0]!s:.80}, unlike a state dict")
            tensor = name == "BINPERSID" or (name == "REDUCE" and values[0] != "collections OrderedDict")
            stack += [0 if tensor else depth] * len(operation.stack_after)


def _dense_tensors(state: object, path: Path) -> dict[str, Tensor]:
    """Return what torch.load found if it is {str: dense CPU tensor}. Raises CheckpointError if not."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, expected tensors by name")
    tensors = dict(dict.items(state))  # not state.items(), an attribute that the pickle of an OrderedDict can set
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path} has a {type(tensor).__name__} named {name!s:.80}, expected tensors by name")
        # Strides of 0 describe terabytes by a few bytes, and C++ kernels would read a negated view as it is stored
        entries = tensor.untyped_storage().nbytes() // tensor.itemsize
        if math.prod(tensor.shape) > entries or tensor.is_neg() or tensor.data_ptr() % tensor.itemsize:
            raise CheckpointError(f"{path}: {name:.80} is not a tensor of {entries:,} stored entries")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def refuse_mistakes(path: Path, start: bytes) -> None:
    """Raise CheckpointError if the first bytes of a file are those of a failed download."""
    if not start:
        raise DamagedError(f"{path} is empty")
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a git-lfs pointer, not the file itself; run 'git lfs pull'")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError(f"{path} is a web page in place of the file; open its address in a browser to see why")


def is_archive(path: Path) -> bool:
    """Whether a file is a zip archive, torch's format since 1.6, so that `read_torch` maps it."""
    with open(path, "rb") as file:
        return file.read(4) == ZIP
