"""Opening a checkpoint: the format is detected from the content of the path, not from its name.

If a folder is not a checkpoint but exactly one folder below it is, that one is opened, with a warning. Downloads create
such folders: one for each of Meta's models, `original/` in a repository of the hub, a snapshot in its cache.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError, ConfigError
from ..tokenizer import Tokenizer
from . import gguf, huggingface, meta
from .architectures import window_warnings
from .base import Checkpoint

MOST_PATHS = 1000  # the most files and folders that are looked at below a folder
EXPECTED = "expected config.json, params.json or *.gguf"


def open_checkpoint(path: str | Path, tokenizer: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Read the headers of a checkpoint, which may be in a folder below the path.

    tokenizer  a file or folder with the tokenizer to use in place of the checkpoint's own

    Raises CheckpointError if one of the two can't be opened, TokenizerError if `tokenizer` has no usable one.
    """
    try:
        checkpoint = _open(Path(path))
        checkpoint.warnings = [*checkpoint.warnings, *window_warnings(checkpoint.config)]
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}") from None
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if tokenizer is not None:
        checkpoint.tokenizer_override = read_tokenizer(Path(tokenizer))
    return checkpoint


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint, or of a single tokenizer.model or tokenizer.json; no weight is read."""
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError:
        for file in [path / "tokenizer.json", path / "tokenizer.model"] if path.is_dir() else [path]:
            if file.is_file() and file.suffix != ".gguf":
                return huggingface.read_tokenizer(file)
        raise
    return checkpoint.tokenizer()


# (whether a path has this format, its reader); the first that fits is used
FORMATS: list[tuple[Callable[[Path], bool], Callable[[Path], Checkpoint]]] = [
    (huggingface.recognizes, huggingface.HuggingFaceCheckpoint),
    (meta.recognizes, meta.MetaCheckpoint),
    (gguf.recognizes, gguf.GGUFCheckpoint),
]


def _open(path: Path) -> Checkpoint:
    if not path.is_dir():
        if gguf.recognizes(path):  # raises CheckpointError if it is not a regular file
            return gguf.GGUFCheckpoint(path)
        raise CheckpointError(f"{path} is not a checkpoint: expected a GGUF file or the folder of a checkpoint")
    for file in path.iterdir():  # an incomplete snapshot of the hub's cache: without this file, answers would differ
        if file.suffix in (".json", ".jinja", ".model") and not file.exists():
            raise CheckpointError(f"{file} is a link to a missing file; complete the download")
    if reader := _reader(path):
        return reader(path)
    paths = itertools.islice(itertools.chain(path.glob("*"), path.glob("*/*")), MOST_PATHS)
    models = {folder for folder in paths if folder.name[0] != "." and folder.is_dir() and _reader(folder)}
    below = sorted(folder for folder in models if folder.parent not in models)
    if len(below) == 1:
        checkpoint = _open(below[0])
        checkpoint.warnings = [f"{path} is not a model, but contains one; using {below[0]}", *checkpoint.warnings]
        return checkpoint
    if below:
        raise CheckpointError(f"{path} contains {len(below)} models; name one of them, such as {below[0]}")
    found = sorted(file.name for file in path.iterdir())
    if huggingface.CONFIG in found:
        huggingface.open_weights(path)  # raises CheckpointError with the names of the missing files
    if "adapter_config.json" in found:
        raise CheckpointError(
            f"{path} is an adapter; pass the path of its base model (--model), and this folder in adapters (--adapter)"
        )
    raise CheckpointError(f"{path} is not a checkpoint: {EXPECTED}; found {', '.join(found[:4]) or 'no file'}")


def _reader(folder: Path) -> Callable[[Path], Checkpoint] | None:
    return next((read for recognizes, read in FORMATS if recognizes(folder)), None)
