"""Opening a checkpoint: the format is detected from the content of the path, not from its name.

If a folder is not a checkpoint but exactly one folder below it is, that one is opened, with a warning. Downloads create
such folders: one for each of Meta's models, `original/` in a repository of the hub, a snapshot in its cache.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError, LlamaError, TokenizerError
from ..tokenizer import Tokenizer, is_tokenizer, open_tokenizer
from . import gguf, huggingface, meta, prequantized, quantized, torchfile
from .base import Checkpoint
from .documents import read_json, size_of
from .nearby import MOST_FOLDERS, folders_in

# (whether a path has this format, its reader); a new format adds one line. A folder may have two formats, like Meta's
# repositories on the hub; the first match is used, and `beside` reports it.
FORMATS: list[tuple[Callable[[Path], bool], Callable[[Path], Checkpoint]]] = [
    (quantized.recognizes, quantized.QuantizedCheckpoint),
    (prequantized.recognizes, prequantized.PrequantizedCheckpoint),
    (huggingface.recognizes, huggingface.HuggingFaceCheckpoint),
    (meta.recognizes, meta.MetaCheckpoint),
    (gguf.recognizes, gguf.GGUFCheckpoint),
]


WEIGHTS = (".safetensors", ".bin")  # of Hugging Face's format
# Sizes in params.json that config.json states too
SAME = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}


def open_checkpoint(path: str | Path, tokenizer: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Read the headers of a checkpoint, which may be in a folder below the path.

    tokenizer  a file or folder with the tokenizer to use in place of the checkpoint's own

    Raises CheckpointError if the path is not a supported checkpoint, TokenizerError if the tokenizer can't be used.
    """
    checkpoint = _open(Path(path))
    if tokenizer is not None:
        try:
            given = read_tokenizer(Path(tokenizer))
        except CheckpointError as error:
            raise TokenizerError(
                f"no usable tokenizer at {tokenizer}: expected a tokenizer.model, a tokenizer.json, a GGUF file, or a"
                f" folder with one of them ({error})"
            ) from None
        meta.check_vocabulary(given, checkpoint.config, str(tokenizer))
        checkpoint.given = given
    return checkpoint


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint, or of a single tokenizer.model or tokenizer.json; no weight is read."""
    alone = [path / name for name in ("tokenizer.json", "tokenizer.model")] if path.is_dir() else [path]
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError:
        for file in alone:
            if file.is_file() and is_tokenizer(file):
                settings = file.with_name("tokenizer_config.json")
                return open_tokenizer(file, read_json(settings) if settings.is_file() else None)
        raise
    return checkpoint.tokenizer()


def _open(path: Path) -> Checkpoint:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise CheckpointError(
                f"{path} is neither a regular file nor a folder; expected a model folder or a .gguf file"
            )
        readers = [reader for recognizes, reader in FORMATS if recognizes(path)]
        below = find_below(path) if stat.S_ISDIR(mode) and (not readers or _lacks_weights(path)) else []
        if readers and readers[-1] is not huggingface.HuggingFaceCheckpoint and _lacks_weights(path):
            return noted(readers[-1](path))  # a GGUF file or Meta's files beside a config.json
        if len(below) == 1:
            checkpoint = _open(below[0])
            checkpoint.warnings = [f"{path} is not a model, but contains one; using {below[0]}", *checkpoint.warnings]
            return checkpoint
        if below:
            raise CheckpointError(f"{path} is not a model, but contains several: {_named(below)}; name one of them")
        if readers:
            return noted(readers[0](path))
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


def noted(checkpoint: Checkpoint) -> Checkpoint:
    """Add a warning if the folder has a model in Meta's format and a config.json: only one of them is read.

    Raises CheckpointError if the two state different sizes.
    """
    path = checkpoint.path
    if not (huggingface.recognizes(path) and meta.recognizes(path) and any(path.glob("consolidated.*.pth"))):
        return checkpoint
    params, settings = read_json(path / meta.PARAMS), read_json(path / huggingface.CONFIG)
    for ours, theirs in SAME.items():
        one, other = params.get(ours), settings.get(theirs)
        if one is not None and other is not None and one != other:
            raise CheckpointError(
                f"{path} has files of two models: {meta.PARAMS} has {ours} {one}, but {huggingface.CONFIG} has"
                f" {theirs} {other}; move the files of one model to another folder"
            )
    if checkpoint.format == "Meta":
        choice = f"reading {meta.PARAMS} and the .pth files; {huggingface.CONFIG} has no weights here"
    else:
        choice = f"reading {huggingface.CONFIG} and its weights; {meta.PARAMS} and the .pth files are not used"
    checkpoint.warnings = [f"{path} has files of two formats: {choice}", *checkpoint.warnings]
    return checkpoint


def find_below(folder: Path) -> list[Path]:
    """The checkpoints at most two levels below a folder. Folders inside a checkpoint are not searched."""
    found: list[Path] = []
    level = folders_in(folder)
    for _ in range(2):
        models = [one for one in level if _is_model(one)]
        found += models
        level = [below for one in level if one not in models for below in folders_in(one)][:MOST_FOLDERS]
    return found


def _is_model(folder: Path) -> bool:
    try:
        readers = [reader for recognizes, reader in FORMATS if recognizes(folder)]
        return bool(readers) and (readers[-1] is not huggingface.HuggingFaceCheckpoint or not _lacks_weights(folder))
    except OSError:  # not readable
        return False


def _lacks_weights(folder: Path) -> bool:
    """Whether a folder has Hugging Face's config.json without its weights; other formats may be in it or below it."""
    return huggingface.recognizes(folder) and not any(file.suffix in WEIGHTS for file in folder.iterdir())


def _named(paths: list[Path]) -> str:
    names = [str(path) for path in paths[:4]] + [f"{len(paths) - 4} more"] * (len(paths) > 4)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _explain_folder(path: Path, names: list[str]) -> str:
    """The error message for a folder that is not a checkpoint."""
    if not names:
        return f"{path} is an empty folder; expected config.json, params.json or *.gguf"
    for name in {meta.PARAMS, huggingface.CONFIG} & set(names):  # present, but not a regular file
        try:
            size_of(path / name)
        except CheckpointError as error:
            return str(error)
    if "adapter_config.json" in names:
        return f"{path} contains an adapter, not a model; pass its base model as --model and this folder as --adapter"
    if any(name.startswith("tokenizer") for name in names):
        return f"{path} contains a tokenizer but no model: expected config.json, params.json or *.gguf"
    found = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{path} is not a checkpoint: expected config.json, params.json or *.gguf; found {found}"


def _explain_file(path: Path, start: bytes) -> str:
    """The error message for a file that is not a checkpoint."""
    try:
        torchfile.refuse_mistakes(path, start)
    except CheckpointError as error:
        return str(error)
    if start.startswith(torchfile.ZIP) or start[8:10] in (b'{"', b"{ ") or start.lstrip().startswith(b"{"):
        return f"{path} is one file of a checkpoint folder; name the folder: {path.parent}"
    if start[:1] == torchfile.PICKLE[:1] and start[1:2] <= b"\x05":  # a pickle of any protocol
        return f"{path} is a pickle, which is not read because it could run code; convert it to safetensors"
    return (
        f"{path} is not a checkpoint: expected a .gguf file, or a folder with config.json or params.json; found a file"
        f" that begins with {start[:8]!r}"
    )
