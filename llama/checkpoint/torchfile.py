"""torch's own files (.pth, .pt, pytorch_model.bin): a pickle with tensors, read with weights_only and never without.

The weights stay in the mapped file until they are used. An error of torch's is told anew, because torch advises to
read the file again with weights_only=False, which would run whatever code the file holds.
"""

from __future__ import annotations

import contextlib
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .documents import size_of

LARGEST_PICKLE = 2**26  # bytes; the names and shapes of a model of 405B parameters take 0.2 million
ZIP, PICKLE = b"PK\x03\x04", b"\x80\x02"


def read_torch(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name. Raises CheckpointError when it holds anything but {str: dense CPU tensor}."""
    size = size_of(path)
    try:
        with open(path, "rb") as file:
            start = file.read(512)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    refuse_mistakes(path, start)
    mapped = start.startswith(ZIP)
    if mapped:
        _records(path)
    if not mapped and not start.startswith(PICKLE):
        raise CheckpointError(f"{path} is not a torch file: {_what_it_is(start)}")
    try:
        with warnings.catch_warnings(), _nameable(path) as name:
            warnings.simplefilter("ignore")  # torch remarks on its own storage classes
            value = torch.load(name, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise CheckpointError(f"{path}: {_reason(error, path, size)}") from None
    return _checked(value, path)


@contextlib.contextmanager
def _nameable(path: Path) -> Iterator[Path]:
    """A way to the file whose name is UTF-8: torch opens no other."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with open(path, "rb") as file:
            yield Path(f"/proc/self/fd/{file.fileno()}")
    else:
        yield path


def checksums(path: Path) -> tuple[int, ...]:
    """The CRC-32 of each tensor's bytes as the archive lists them; empty for files of the older kind."""
    if not is_archive(path):
        return ()
    return tuple(item.CRC for item in _records(path) if "/data/" in item.filename and item.file_size)


def is_archive(path: Path) -> bool:
    """Whether a file is of torch's newer kind, a zip archive, by its first bytes."""
    with open(path, "rb") as file:
        return file.read(4) == ZIP


def _records(path: Path) -> list[zipfile.ZipInfo]:
    """The table of contents at the end of an archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            for record in records:  # torch checks no CRC-32; that of the pickle, where shapes and places are, is cheap
                if record.filename.endswith("/data.pkl") and record.CRC and record.file_size < LARGEST_PICKLE:
                    archive.read(record)
            return records
    except Exception:  # BadZipFile, and what else Python meets in a table of contents that is none
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is cut off or damaged: the table of contents at the end of its"
            f" archive is missing, or what it says of the tensors is not what was written; fetch it again"
        ) from None


def refuse_mistakes(path: Path, start: bytes) -> None:
    """Raise CheckpointError when the first bytes of a file show that something else was saved in its place."""
    if not start:
        raise CheckpointError(f"{path} is empty; the download probably never finished")
    for sign, meaning in MISTAKES:
        if start.lstrip().lower().startswith(sign.lower()):
            raise CheckpointError(f"{path} is {meaning}")


# What is found in place of weights, by its first bytes, and what to do about it.
MISTAKES = [
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself; run 'git lfs pull' where it came from"),
    (b"<!DOCTYPE", "a web page, probably an error page saved in place of the download; fetch it again"),
    (b"<html", "a web page, probably an error page saved in place of the download; fetch it again"),
    (b"<?xml", "an XML page, probably an error page saved in place of the download; fetch it again"),
]


def _what_it_is(start: bytes) -> str:
    """What a file is that neither torch's archive nor its older pickle begins like."""
    for sign, at, meaning in OTHERS:
        if start[at:].startswith(sign):
            return f"it is {meaning}"
    return f"it begins with {start[:8]!r}; fetch it again"


# (first bytes, where they stand, what they are the sign of)
OTHERS = [
    (b"GGUF", 0, "a GGUF file; give it the ending .gguf and name it itself"),
    (b'{"', 8, "a safetensors file, which belongs into a folder of Hugging Face's with its config.json"),
    (
        b"\x80",
        0,
        "a pickle of Python's, which can run code when read and is refused; get the weights as torch saves them",
    ),
    (b"\x1f\x8b", 0, "a gzip archive; unpack it first"),
    (b"ustar", 257, "a tar archive; unpack it first"),
    (b"{", 0, "a JSON text, perhaps the answer of a server instead of the download; fetch it again"),
]


def _reason(error: Exception, path: Path, size: int) -> str:
    text = " ".join(str(error).split())
    asked = torch.serialization.get_unsafe_globals_in_checkpoint
    if "Unsupported global" in text or "weights_only" in text or "WeightsUnpickler" in text:
        try:
            names = ", ".join(sorted(asked(path))[:3])
        except Exception:  # of the older kind, or damaged: torch has told the first it met
            names = ", ".join(re.findall(r"GLOBAL ([\w.]+)", text)[:1])
        wants = f" (it asks for {names})" if names else ""
        return (
            f"it holds objects other than tensors{wants}, which could run code, and is refused; get the weights alone"
        )
    if "not in a subdirectory" in text:
        return "it is a zip archive, but none that torch wrote; unpack it, or fetch the weights again"
    if isinstance(error, EOFError) or "central directory" in text or "PytorchStreamReader" in text:
        return f"it is damaged or cut off ({size} bytes); fetch it again"
    return f"torch can't read it ({type(error).__name__}); it is damaged, or no file of weights"


def _storage_of(tensor: Tensor) -> str:
    """How a tensor is stored that is not simply its numbers, one after another."""
    if tensor.device.type == "meta":
        return "a tensor without values (on the device 'meta')"
    kind = "nested" if tensor.is_nested else "quantized by torch" if tensor.is_quantized else ""
    return f"a tensor {kind or f'of the kind {tensor.layout}'.replace('torch.', '')} on {tensor.device}"


def _checked(value: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; expected a mapping of names to tensors")
    for name, tensor in value.items():
        if not isinstance(name, str) or not name.isprintable():
            raise CheckpointError(f"{path} holds an entry named {name!r:.60}; expected names of tensors")
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise CheckpointError(f"{path}: {name} is a {kind} and no tensor; expected the weights alone")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_nested or tensor.is_quantized:
            kind = _storage_of(tensor)
            raise CheckpointError(f"{path}: {name} is {kind}; expected a dense tensor with its values in the file")
        if tensor.untyped_storage().nbytes() < tensor.nbytes:  # strides of 0: kilobytes that claim terabytes
            raise CheckpointError(
                f"{path}: {name} claims shape {tuple(tensor.shape)} on {tensor.untyped_storage().nbytes()} bytes;"
                f" the file is forged or damaged"
            )
    return value
