"""What every checkpoint can tell, whatever format it is stored in."""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..config import LARGEST_SIZE, ModelConfig
from ..quant.blocks import Blocks
from ..rope import Layout
from ..rope_scaling import inverse_frequencies
from ..tokenizer import Tokenizer


class Checkpoint(ABC):
    """A model on disk, described from its headers; weights are read one by one when asked for.

    path           file or folder
    format         its name, for people
    config         the architecture
    layout         how the rows of wq and wk are ordered
    shapes         the model's tensor names -> shapes
    parts          the files that hold weights -> bytes, in order
    chat_template  Jinja source, or None
    sampling       defaults the checkpoint asks for: temperature, top_p, ...
    warnings       what a user should hear at once: entries that have no effect, files left aside
    notes          what was not said in the files and how it was decided
    about          what else the checkpoint says of itself, for people: name, licence, quantization, ...
    """

    path: Path
    format: str
    config: ModelConfig
    layout: Layout = "interleaved"
    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, int]
    chat_template: str | None = None
    sampling: Mapping[str, Any] = MappingProxyType({})
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def about(self) -> Mapping[str, Any]:
        return {}

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """One weight by the model's name for it, on the CPU, in floating point; it must not be written to."""

    def piece(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Some rows and columns of what `tensor` gives, without reading much else; of a vector, the entries `rows`."""
        whole = self.tensor(name)
        return whole[rows] if whole.dim() == 1 else whole[rows, columns]

    def file_name(self, name: str) -> str:
        """What the files call the tensor that the model calls `name`."""
        return name

    @abstractmethod
    def stored(self, name: str) -> str:
        """How the weight is stored: F32, BF16, F16, or the name of a quantization."""

    def bits(self, name: str) -> float:
        """Bits that a number of the weight takes in the files, scales included where they lie in its blocks."""
        return {"F64": 64, "F32": 32, "BF16": 16, "F16": 16}.get(self.stored(name), 8)

    def blocks(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Blocks | None:
        """Rows of a weight as the blocks of 4 or 8 bits they are stored in, or None if it is stored otherwise.

        columns begin and end where groups do.
        """
        return None

    def tiles(self, name: str) -> Tensor | None:
        """A weight as tiles.pack has it, mapped, if it is stored so; `blocks` tells its kind."""
        return None

    @abstractmethod
    def release(self, name: str) -> None:
        """The weight was copied and is not needed for now: its pages of the file need not stay in memory."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that belongs to the weights. Raises TokenizerError where there is none that can be used."""

    def chat_format(self, tokenizer: Tokenizer) -> str | None:
        """A built-in format for a conversation, for a checkpoint that can't carry a template; None for others."""
        return None


def checked(config: ModelConfig) -> ModelConfig:
    """The configuration, its RoPE tried out below and above the trained length. Raises ConfigError."""
    for seq_len in (None, LARGEST_SIZE):
        inverse_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling, seq_len=seq_len, max_seq_len=config.max_seq_len
        )
    return config


def their_name(name: str, names: Mapping[str, str], layers: str = "layers") -> str:
    """The model's name of a tensor -> a file's. names maps the file's stems to the model's, as readers have them."""
    theirs = {ours: source for source, ours in names.items()}
    stem, kind = name.rsplit(".", 1)  # kind is weight or bias
    if not stem.startswith("layers."):
        return f"{theirs[stem]}.{kind}"
    _, layer, inner = stem.split(".", 2)
    return f"{layers}.{layer}.{theirs[inner]}.{kind}"


def stored_bytes(tensors: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """{tensor: (dtype, bytes)} -> {dtype: bytes}, the largest first."""
    total: dict[str, int] = {}
    for dtype, nbytes in tensors.values():
        total[dtype] = total.get(dtype, 0) + nbytes
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def drop_pages(tensor: Tensor) -> None:
    """Take the pages of a tensor that lies in a file mapped privately out of this process' memory.

    They are read again, from the page cache, when somebody looks. Only for tensors that nobody wrote to: what was
    written would be lost. Where the system has no madvise nothing happens.
    """
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    length = (tensor.data_ptr() + tensor.nbytes) // page * page - first
    if _madvise is not None and length > 0 and tensor.is_contiguous():
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_DONTNEED))


def _find_madvise() -> Any:
    if not hasattr(mmap, "MADV_DONTNEED"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)


_madvise = _find_madvise()

# dtypes that weights may be stored in -> the name formats use for them
FLOATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
