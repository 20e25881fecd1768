"""Reader of torch's files (.pth, pytorch_model.bin): torch.load in its safe mode, and the checks that it lacks.

`weights_only` runs no code of the file, but a bytearray(n) can fill memory, and a tuple nested a million deep can crash
the process; so the pickle's operations are read first. `mmap` leaves the values in the file, but trusts the sizes in
the pickle; so they are compared with the records of the zip archive.
"""

from __future__ import annotations

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
from ..system.documents import start_of

ZIP = b"PK\x03\x04"  # the first bytes of an archive, torch's format since version 1.6
LARGEST_PICKLE = 2**22  # bytes; the names and shapes of a model of 405B parameters take 0.2 million
MOST_TUPLES = 2**15  # 4 for each tensor; tuples nested deeper can overflow the C stack when they are hashed
FUNCTIONS = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3",
             "torch._utils _rebuild_parameter"}  # fmt: skip
PLAIN = (str, int, float, type(None))  # types beside tensors that `read_nested` accepts
TYPES = re.compile(r"torch(\.storage)? \w+Storage|torch (bool|[a-z]+\d+\w*)")  # storages and dtypes


def read_torch(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, mapped.

    Raises CheckpointError if the file holds anything but {str: dense CPU tensor}, or contradicts itself.
    """
    return {name: tensor.detach() for name, tensor in read_nested(path, flat=True).items()}


def read_nested(path: Path, flat: bool = False) -> dict[Any, Any]:
    """A file's dict of dense, mapped CPU tensors, numbers, strings and None, and of lists and dicts of all these.

    flat  allow only {str: tensor}; otherwise, a list or dict may contain itself

    Raises CheckpointError if the file holds anything else, or contradicts itself.
    """
    try:
        if not start_of(path).startswith(ZIP):
            raise CheckpointError(f"{path} is not in the format of torch 1.6 or later; save it again with torch.save")
        return _read_archive(path, flat)
    except LlamaError:
        raise
    except Exception as error:  # a dozen kinds occur; torch wraps some in a text that recommends weights_only=False
        cause = error.__context__ or error
        raise DamagedError(f"torch.load can't read {path} ({type(cause).__name__}: {cause!s:.120})") from None


def _read_archive(path: Path, flat: bool) -> dict[Any, Any]:
    records = read_records(path)
    reader: Any = torch._C.PyTorchFileReader(str(path))  # torch.load uses this reader, so both see the same pickle
    content = reader.get_record("data.pkl")
    crc = records["data.pkl"].CRC
    if crc and zlib.crc32(content) != crc:  # 0: written without checksums
        raise DamagedError(f"{path}: the CRC-32 of data.pkl does not match")
    if "byteorder" in records and reader.get_record("byteorder") != b"little":  # torch would swap bytes in the mapping
        raise CheckpointError(f"{path} is from a big-endian machine; save it again on a little-endian one")
    _check_pickle(content, path)
    found = torch.load(path, "cpu", mmap=True, weights_only=True)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, expected tensors by name")
    for name, value in dict.items(found) if flat else ():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{path} has a {type(value).__name__} named {name!s:.80}, expected tensors by name")
    tensors = _dense_tensors(found, path)

    # Each storage of the tensors must be one record. The file is mapped as a whole: addresses follow the offsets.
    storages = {s.data_ptr(): s.nbytes() for t in tensors if (s := t.untyped_storage()).nbytes()}
    data = {
        reader.get_record_offset(n): i.file_size for n, i in records.items() if n.startswith("data/") and i.file_size
    }
    start = min(storages, default=0) - min(data, default=0)
    if storages != {start + offset: size for offset, size in data.items()}:
        raise DamagedError(f"{path}: the sizes of its records are not those of its tensors")
    return dict(dict.items(found))  # not found.items(), an attribute that the pickle of an OrderedDict can set


def read_records(path: Path) -> dict[str, zipfile.ZipInfo]:
    """The records of an archive, by their names without the folder.

    Raises CheckpointError for what a mapping would read wrongly.
    """
    with zipfile.ZipFile(path) as archive:
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


def _check_pickle(content: bytes, path: Path) -> None:
    """Raise CheckpointError if a pickle has too many tuples, or names what a pickled state dict does not need."""
    tuples = 0
    for operation, argument, _ in pickletools.genops(content):
        tuples += operation.name.startswith("TUPLE")
        if operation.name == "GLOBAL" and argument not in FUNCTIONS and not TYPES.fullmatch(str(argument)):
            raise CheckpointError(f"{path} holds more than tensors ({argument:.80}); get only the weights")
        if operation.name == "PROTO" and argument != 2:
            raise CheckpointError(f"{path} has pickle protocol {argument}; save it with torch.save's default, 2")
    if tuples > MOST_TUPLES:
        raise CheckpointError(f"{path}: its pickle has {tuples:,} tuples, expected at most {MOST_TUPLES:,}")


def _dense_tensors(state: object, path: Path) -> list[Tensor]:
    """All tensors in what torch.load found. Raises CheckpointError for what `read_nested` does not return."""
    found: dict[int, Any] = {}  # by id: each part once, since a file can repeat a list a million times
    rest = [state]
    while rest:
        one = rest.pop()
        if id(one) in found:
            continue
        found[id(one)] = one
        if isinstance(one, Tensor):
            # Strides of 0 describe terabytes by a few bytes, and C++ kernels would read a negated view as it is stored
            entries = one.untyped_storage().nbytes() // one.itemsize
            if math.prod(one.shape) > entries or one.is_neg() or one.data_ptr() % one.itemsize:
                raise CheckpointError(f"{path}: a tensor of shape {tuple(one.shape)} has {entries:,} stored entries")
        elif isinstance(one, dict):
            rest += [*dict.keys(one), *dict.values(one)]
        elif isinstance(one, list):
            rest += one
        elif not isinstance(one, PLAIN):
            raise CheckpointError(f"{path} has a {type(one).__name__}, expected tensors, numbers and strings")
    return [one for one in found.values() if isinstance(one, Tensor)]
