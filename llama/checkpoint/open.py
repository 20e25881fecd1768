"""Opening a checkpoint: the format is detected from the content of the path, not from its name."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError, LlamaError
from . import gguf, huggingface, meta, prequantized, quantized, torchfile
from .base import Checkpoint
from .documents import size_of

# (whether a path has this format, its reader); a new format adds one line. A folder may have two formats, like Meta's
# repositories on the hub; the first match is used.
FORMATS: list[tuple[Callable[[Path], bool], Callable[[Path], Checkpoint]]] = [
    (quantized.recognizes, quantized.QuantizedCheckpoint),
    (prequantized.recognizes, prequantized.PrequantizedCheckpoint),
    (huggingface.recognizes, huggingface.HuggingFaceCheckpoint),
    (meta.recognizes, meta.MetaCheckpoint),
    (gguf.recognizes, gguf.GGUFCheckpoint),
]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read the headers of a checkpoint. Raises CheckpointError if the path is not a supported checkpoint."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise CheckpointError(f"{path} is neither a regular file nor a folder")
        for recognizes, reader in FORMATS:
            if recognizes(path):
                return reader(path)
        if stat.S_ISDIR(mode):
            names = sorted(file.name for file in path.iterdir())
        else:
            with open(path, "rb") as file:
                start = file.read(64)
    except LlamaError:
        raise
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}") from None
    except ValueError as error:  # a NUL byte in the path
        raise CheckpointError(f"{str(path)!r} is not a path: {error}") from None
    raise CheckpointError(_explain_folder(path, names) if stat.S_ISDIR(mode) else _explain_file(path, start))


def _explain_folder(path: Path, names: list[str]) -> str:
    """The error message for a folder that is not a checkpoint."""
    if not names:
        return f"{path} is an empty folder; expected config.json, params.json or a .gguf file in it"
    for name in {meta.PARAMS, huggingface.CONFIG} & set(names):  # present, but not a regular file
        try:
            size_of(path / name)
        except CheckpointError as error:
            return str(error)
    if "adapter_config.json" in names:
        return f"{path} holds an adapter, not a model; pass its base model by --model, and this folder by --adapter"
    if any(name.startswith("tokenizer") for name in names):
        return f"{path} holds a tokenizer and no model: expected config.json, params.json or a .gguf file"
    found = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{path} is not a checkpoint: expected config.json, params.json or a .gguf file; found {found}"


def _explain_file(path: Path, start: bytes) -> str:
    """The error message for a file that is not a checkpoint."""
    try:
        torchfile.refuse_mistakes(path, start)
    except CheckpointError as error:
        return str(error)
    if start.startswith(torchfile.ZIP) or start[8:10] in (b'{"', b"{ ") or start.lstrip().startswith(b"{"):
        return f"{path} is one file of a checkpoint folder; name the folder: {path.parent}"
    if start.startswith(torchfile.PICKLE):
        return f"{path} is a pickle, which can run code when read and is not accepted"
    return f"{path} is not a GGUF file: it begins with {start[:8]!r} instead of b'GGUF'"
