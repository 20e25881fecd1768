"""Reader of torch's files (.pth, .pt, pytorch_model.bin): a pickle with tensors, always read with weights_only=True.

The weights stay in the mapped file until they are used. torch's error messages are replaced, because they recommend
weights_only=False, which would run any code in the file.
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
    """The tensors of a file by name. Raises CheckpointError if it holds anything but {str: dense CPU tensor}."""
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
        with warnings.catch_warnings(), _as_utf8(path) as name:
            warnings.simplefilter("ignore")  # torch warns about its own storage classes
            value = torch.load(name, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise CheckpointError(f"{path}: {_reason(error, path, size)}") from None
    return _checked(value, path)


@contextlib.contextmanager
def _as_utf8(path: Path) -> Iterator[Path]:
    """A path to the file that is valid UTF-8, as torch requires."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with open(path, "rb") as file:
            yield Path(f"/proc/self/fd/{file.fileno()}")
    else:
        yield path


def checksums(path: Path) -> tuple[int, ...]:
    """The CRC-32 of each tensor by the archive's table of contents; empty for the legacy format."""
    if not is_archive(path):
        return ()
    return tuple(item.CRC for item in _records(path) if "/data/" in item.filename and item.file_size)


def is_archive(path: Path) -> bool:
    """Whether a file is a zip archive, torch's format since 1.6, by its first bytes."""
    with open(path, "rb") as file:
        return file.read(4) == ZIP


def _records(path: Path) -> list[zipfile.ZipInfo]:
    """The table of contents at the end of an archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            for record in records:  # torch checks no CRC-32; that of the pickle, with shapes and offsets, is quick
                if record.filename.endswith("/data.pkl") and record.CRC and record.file_size < LARGEST_PICKLE:
                    archive.read(record)
            return records
    except Exception:  # BadZipFile, and whatever zipfile raises for a damaged table of contents
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is cut off or damaged: the table of contents at the end of the"
            f" archive is missing, or the description of the tensors fails its checksum; fetch it again"
        ) from None


def refuse_mistakes(path: Path, start: bytes) -> None:
    """Raise CheckpointError if the first bytes of a file are those of a failed download."""
    if not start:
        raise CheckpointError(f"{path} is empty; the download probably never finished")
    for sign, meaning in MISTAKES:
        if start.lstrip().lower().startswith(sign.lower()):
            raise CheckpointError(f"{path} is {meaning}")


# First bytes of a failed download -> what the file is, and the remedy
MISTAKES = [
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself; run 'git lfs pull' where it came from"),
    (b"<!DOCTYPE", "a web page, probably an error page saved in place of the download; fetch it again"),
    (b"<html", "a web page, probably an error page saved in place of the download; fetch it again"),
    (b"<?xml", "an XML page, probably an error page saved in place of the download; fetch it again"),
]


def _what_it_is(start: bytes) -> str:
    """What a file is that begins neither like torch's archive nor like its legacy pickle."""
    for sign, at, meaning in OTHERS:
        if start[at:].startswith(sign):
            return f"it is {meaning}"
    return f"it begins with {start[:8]!r}; fetch it again"


# (first bytes, their offset, what the file is)
OTHERS = [
    (b"GGUF", 0, "a GGUF file; rename it to end in .gguf and use its path"),
    (b'{"', 8, "a safetensors file, which belongs in a Hugging Face folder with a config.json"),
    (
        b"\x80",
        0,
        "a Python pickle, which can run code when read and is refused; get the weights as saved by torch.save",
    ),
    (b"\x1f\x8b", 0, "a gzip archive; unpack it first"),
    (b"ustar", 257, "a tar archive; unpack it first"),
    (b"{", 0, "a JSON text, perhaps a server's error response instead of the download; fetch it again"),
]


def _reason(error: Exception, path: Path, size: int) -> str:
    text = " ".join(str(error).split())
    if "Unsupported global" in text or "weights_only" in text or "WeightsUnpickler" in text:
        try:
            names = ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))[:3])
        except Exception:  # a legacy or damaged file: torch's message has the first name
            names = ", ".join(re.findall(r"GLOBAL ([\w.]+)", text)[:1])
        imports = f" (it imports {names})" if names else ""
        return (
            f"it holds objects other than tensors{imports}, which could run code, and is refused; get the weights alone"
        )
    if "not in a subdirectory" in text:
        return "it is a zip archive that was not written by torch; unpack it, or fetch the weights again"
    if isinstance(error, EOFError) or "central directory" in text or "PytorchStreamReader" in text:
        return f"it is damaged or cut off ({size} bytes); fetch it again"
    return f"torch can't read it ({type(error).__name__}); it is damaged or not a file of weights"


def _storage_of(tensor: Tensor) -> str:
    """A description of a tensor that is not dense, or not on the CPU."""
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
            raise CheckpointError(f"{path}: {name} is a {kind}, not a tensor; expected the weights alone")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_nested or tensor.is_quantized:
            kind = _storage_of(tensor)
            raise CheckpointError(f"{path}: {name} is {kind}; expected a dense tensor with its values in the file")
        if tensor.untyped_storage().nbytes() < tensor.nbytes:  # strides of 0: kilobytes that claim terabytes
            raise CheckpointError(
                f"{path}: {name} claims shape {tuple(tensor.shape)} on {tensor.untyped_storage().nbytes()} bytes;"
                f" the file is forged or damaged"
            )
    return value
