"""Opening a checkpoint: the format is detected from the content of the path, not from its name.

If a folder is not a checkpoint but exactly one folder below it is, that one is opened, with a warning. Downloads create
such folders: one for each of Meta's models, `original/` in a repository of the hub, a snapshot in its cache.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError, LlamaError, TokenizerError
from ..system.documents import read_json, size_of
from ..tokenizer import Tokenizer, is_tokenizer, open_tokenizer
from . import gguf, huggingface, meta, prequantized, quantized, torchfile
from .base import Checkpoint, check_vocabulary

# (whether a path has this format, its reader). The first that fits is used; `_open_file` opens single files.
HUGGING_FACE: list[tuple[Callable[[Path], bool], Callable[[Path], Checkpoint]]] = [
    (quantized.recognizes, quantized.QuantizedCheckpoint),
    (prequantized.recognizes, prequantized.PrequantizedCheckpoint),
    (huggingface.recognizes, huggingface.HuggingFaceCheckpoint),
]
OTHERS: list[tuple[Callable[[Path], bool], Callable[[Path], Checkpoint]]] = [
    (meta.recognizes, meta.MetaCheckpoint),
    (gguf.recognizes, gguf.GGUFCheckpoint),
]
MOST_PATHS = 1000  # the most files and folders that are looked at below a folder
EXPECTED = "expected config.json, params.json or *.gguf"


def open_checkpoint(path: str | Path, tokenizer: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Read the headers of a checkpoint, which may be in a folder below the path.

    tokenizer  a file or folder with the tokenizer to use in place of the checkpoint's own

    Raises CheckpointError if the path is not a supported checkpoint, TokenizerError if the tokenizer can't be used.
    """
    try:
        checkpoint = _open(Path(path))
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}") from None
    except ValueError as error:  # a NUL byte in the path
        if isinstance(error, LlamaError):
            raise
        raise CheckpointError(f"{str(path)!r} is not a path: {error}") from None
    if tokenizer is not None:
        try:
            override = read_tokenizer(Path(tokenizer))
        except CheckpointError as error:
            raise TokenizerError(f"no usable tokenizer at {tokenizer}: {error}") from None
        check_vocabulary(override, checkpoint.config, str(tokenizer))
        checkpoint.tokenizer_override = override
    return checkpoint


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint, or of a single tokenizer.model or tokenizer.json; no weight is read."""
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError:
        for file in [path / "tokenizer.json", path / "tokenizer.model"] if path.is_dir() else [path]:
            if file.is_file() and is_tokenizer(file):
                settings = file.with_name("tokenizer_config.json")
                return open_tokenizer(file, read_json(settings) if settings.is_file() else None)
        raise
    return checkpoint.tokenizer()


def _open(path: Path) -> Checkpoint:
    if not path.is_dir():
        return _open_file(path)
    readers = _readers(path)
    if readers:
        checkpoint = readers[0](path)
        if huggingface.recognizes(path) and meta.recognizes(path) and any(path.glob("consolidated.*.pth")):
            warning = f"{path} has files of two formats; only those of {checkpoint.format} are read"
            checkpoint.warnings = [warning, *checkpoint.warnings]
        return checkpoint
    paths = itertools.islice(itertools.chain(path.glob("*"), path.glob("*/*")), MOST_PATHS)
    models = {folder for folder in paths if folder.name[0] != "." and _is_model(folder)}
    below = sorted(folder for folder in models if folder.parent not in models)
    if len(below) == 1:
        checkpoint = _open(below[0])
        checkpoint.warnings = [f"{path} is not a model, but contains one; using {below[0]}", *checkpoint.warnings]
        return checkpoint
    if below:
        names = ", ".join(map(str, below[:4])) + ", ..." * (len(below) > 4)
        raise CheckpointError(f"{path} is not a model, but contains several: {names}; name one of them")
    if huggingface.recognizes(path):
        return huggingface.HuggingFaceCheckpoint(path)  # raises CheckpointError, with what is missing
    raise CheckpointError(_explain_folder(path))


def _readers(folder: Path) -> list[Callable[[Path], Checkpoint]]:
    """The readers that fit a folder; Hugging Face's only if it has .safetensors or .bin files."""
    lacks_weights = not any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir())
    formats = OTHERS if lacks_weights else [*HUGGING_FACE, *OTHERS]
    return [read for recognizes, read in formats if recognizes(folder)]


def _is_model(folder: Path) -> bool:
    try:
        return folder.is_dir() and bool(_readers(folder))
    except OSError:  # not readable
        return False


def _explain_folder(path: Path) -> str:
    """The error message for a folder that is not a checkpoint."""
    names = sorted(file.name for file in path.iterdir())
    for name in {meta.PARAMS, huggingface.CONFIG} & set(names):
        size_of(path / name)  # raises CheckpointError if it is not a regular file
    if "adapter_config.json" in names:
        return f"{path} contains an adapter, not a model; pass its base model as --model and this folder as --adapter"
    found = ", ".join(names[:4]) + ", ..." * (len(names) > 4)
    return f"{path} is not a checkpoint: {EXPECTED}; found {found or 'no file'}"


def _open_file(path: Path) -> Checkpoint:
    size_of(path)  # raises CheckpointError if it is not a regular file
    if gguf.recognizes(path):
        return gguf.GGUFCheckpoint(path)
    with open(path, "rb") as file:
        start = file.read(64)
    torchfile.refuse_mistakes(path, start)
    if start.startswith((torchfile.ZIP, torchfile.PICKLE)) or b"{" in (start.lstrip()[:1], start[8:9]):
        raise CheckpointError(f"{path} is one file of a checkpoint folder; name the folder: {path.parent}")
    raise CheckpointError(f"{path} is not a checkpoint: {EXPECTED}; found a file that begins with {start[:8]!r}")
