"""A path to a checkpoint, the format decided by what the file holds and never by its name."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ..config import ModelConfig
from ..errors import CheckpointError
from ..rope import Layout
from ..tokenizer import Tokenizer
from . import gguf
from .blocks import Blocks4


class Checkpoint(Protocol):
    """A model on disk, described from its headers; weights are read one by one when asked for.

    path           file or folder
    format         its name, for people
    config         the architecture, already held against the tensors' shapes
    layout         how the rows of wq and wk are ordered
    shapes         the model's tensor names -> shapes
    chat_template  Jinja source, or None on a base model
    about          what else the file says of itself, for people: name, licence, quantization, ...
    """

    @property
    def path(self) -> Path: ...
    @property
    def format(self) -> str: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def about(self) -> Mapping[str, Any]: ...

    def tensor(self, name: str) -> Tensor:
        """One weight by the model's name for it, on the CPU, in floating point."""
        ...

    def blocks4(self, name: str) -> Blocks4 | None:
        """The same weight as the 4-bit blocks it is stored in, or None if it is stored otherwise."""
        ...

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that belongs to the weights."""
        ...


# (does the file begin like this format?, its reader): a new format adds one line
FORMATS: list[tuple[Callable[[bytes], bool], Callable[[Path], Checkpoint]]] = [
    (gguf.recognizes, gguf.GGUFCheckpoint),
]

# What people hand over by mistake, by its first bytes, and what to do about it.
MISTAKES = [
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself; run 'git lfs pull' where it came from"),
    (b"<!DOCTYPE", "a web page, probably an error page saved in place of the download; fetch it again"),
    (b"<html", "a web page, probably an error page saved in place of the download; fetch it again"),
    (b"PK\x03\x04", "a zip archive (a torch .pth, perhaps), which this version does not read yet"),
    (b"\x80\x02", "a pickle, which can run code when read and is not accepted"),
]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read the headers of a checkpoint. Raises CheckpointError when there is none that can be run."""
    path = Path(path)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise CheckpointError(f"{path} is a folder; this version reads GGUF files, so name the .gguf file in it")
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        with open(path, "rb") as file:
            start = file.read(64)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # a NUL byte in the path
        raise CheckpointError(f"{str(path)!r} is not a path: {error}") from None
    if not start:
        raise CheckpointError(f"{path} is empty; the download probably never finished")
    for recognizes, reader in FORMATS:
        if recognizes(start):
            return reader(path)
    for sign, meaning in MISTAKES:
        if start.lstrip().lower().startswith(sign.lower()):
            raise CheckpointError(f"{path} is {meaning}")
    raise CheckpointError(f"{path} is not a GGUF file: it begins with {start[:8]!r} instead of b'GGUF'")
