"""A path to a checkpoint, the format decided by what is there and never by its name."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError, LlamaError
from . import gguf, huggingface, meta, quantized, torchfile
from .base import Checkpoint
from .documents import size_of

# (is the path of this format?, its reader): a new format adds one line. A folder may hold two formats, as the
# repositories of Meta's on the hub do; the first one here is taken.
FORMATS: list[tuple[Callable[[Path], bool], Callable[[Path], Checkpoint]]] = [
    (quantized.recognizes, quantized.QuantizedCheckpoint),
    (huggingface.recognizes, huggingface.HuggingFaceCheckpoint),
    (meta.recognizes, meta.MetaCheckpoint),
    (gguf.recognizes, gguf.GGUFCheckpoint),
]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read the headers of a checkpoint. Raises CheckpointError when there is none that can be run."""
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
    raise CheckpointError(_no_folder(path, names) if stat.S_ISDIR(mode) else _no_file(path, start))


def _no_folder(path: Path, names: list[str]) -> str:
    """What is wrong with a folder that is no checkpoint."""
    if not names:
        return f"{path} is an empty folder; expected config.json, params.json or a .gguf file in it"
    for name in {meta.PARAMS, huggingface.CONFIG} & set(names):  # it is there and was not taken for a file
        try:
            size_of(path / name)
        except CheckpointError as error:
            return str(error)
    if "adapter_config.json" in names:
        return f"{path} holds an adapter, not a model; merge it into its base model"
    if any(name.startswith("tokenizer") for name in names):
        return f"{path} holds a tokenizer and no model: neither config.json nor params.json nor a .gguf file is in it"
    found = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{path} is no checkpoint: neither config.json nor params.json nor a .gguf file is in it (but {found})"


def _no_file(path: Path, start: bytes) -> str:
    """What is wrong with a file that is no checkpoint."""
    try:
        torchfile.refuse_mistakes(path, start)
    except CheckpointError as error:
        return str(error)
    if start.startswith(torchfile.ZIP) or start[8:10] in (b'{"', b"{ ") or start.lstrip().startswith(b"{"):
        return f"{path} is one file of a checkpoint that is a folder; name the folder: {path.parent}"
    if start.startswith(torchfile.PICKLE):
        return f"{path} is a pickle, which can run code when read and is not accepted"
    return f"{path} is not a GGUF file: it begins with {start[:8]!r} instead of b'GGUF'"
