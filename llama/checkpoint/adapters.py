"""Adapters: small changes to a checkpoint's weights, merged into each weight while it is read.

    merged = weight + scale * B A          (LoRA, arXiv:2106.09685)

`AdaptedCheckpoint` is a checkpoint itself, so the loader, quantization, conversion and sharding read merged weights
like any others. Besides the model, only the adapter and the weight that is being read are in memory. The sum is
computed in float32 and rounded once, when the weight is stored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import CheckpointError, UsageError
from ..quant.blocks import Blocks
from ..rope import Layout, to_half_layout, to_interleaved_layout
from ..tokenizer import Tokenizer
from .base import PIECE, Checkpoint
from .write import ROTATED, raw_bytes

EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"

# A path, "PATH:SCALE", or (path, scale); or several of them
OneAdapter = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]
Adapters = OneAdapter | Sequence[OneAdapter]


@dataclass(frozen=True)
class LowRank:
    """The change scale * up @ down to a matrix (out, in): down (r, in), up (out, r)."""

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True)
class Adapter:
    """An adapter as its reader returns it, with the model's tensor names.

    layout    the order of the rows of wq and wk
    low_rank  changes of matrices
    replaced  complete tensors that replace those of the base
    about     for display: rank, number of matrices, the base it was trained on
    warnings  entries without effect
    """

    path: Path
    layout: Layout
    low_rank: Mapping[str, LowRank]
    replaced: Mapping[str, Tensor]
    about: str
    warnings: Sequence[str] = ()


def _peft() -> Callable[[Path, Checkpoint], Adapter]:
    from . import peft_lora

    return peft_lora.read


def _gguf() -> Callable[[Path, Checkpoint], Adapter]:
    from . import gguf_lora

    return gguf_lora.read


# (whether a path has this format, its reader); a new format adds one line.
FORMATS: list[tuple[Callable[[Path], bool], Callable[[], Callable[[Path, Checkpoint], Adapter]]]] = [
    (Path.is_dir, _peft),
    (lambda path: path.is_file() and path.suffix == ".gguf", _gguf),
]


def with_adapters(base: Checkpoint, adapters: Adapters) -> Checkpoint:
    """The checkpoint with adapters merged; `base` itself if there are none.

    Raises UsageError for a bad scale, CheckpointError if an adapter is damaged, not a LoRA, or does not fit the base.
    """
    one = isinstance(adapters, str | os.PathLike) or (len(adapters) == 2 and isinstance(adapters[1], int | float))
    chosen = [_parse(each) for each in cast("Sequence[OneAdapter]", [adapters] if one else adapters)]
    return AdaptedCheckpoint(base, [(open_adapter(path, base), scale) for path, scale in chosen]) if chosen else base


def _parse(adapter: OneAdapter) -> tuple[Path, float]:
    """Split an adapter into path and scale. An existing path is never split at its colon."""
    path, scale = adapter if isinstance(adapter, tuple) else (adapter, 1.0)
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"an adapter must be a path, 'PATH:SCALE' or (path, scale), got {adapter!r:.80}")
    if isinstance(path, str) and not isinstance(adapter, tuple) and ":" in path and not os.path.lexists(path):
        head, tail = path.rsplit(":", 1)
        try:
            path, scale = head, float(tail)
        except ValueError:
            if os.path.lexists(head):
                raise UsageError(f"adapter {path}: the scale {tail!r:.40} is not a number") from None
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise UsageError(f"adapter {path}: the scale must be a finite number, got {scale!r:.40}")
    return Path(path), float(scale)


def open_adapter(path: Path, base: Checkpoint) -> Adapter:
    """Read an adapter. Raises CheckpointError if it is not an adapter, is damaged, or does not fit the base."""
    if not path.exists():
        raise CheckpointError(
            f"adapter {path} does not exist; expected a PEFT folder with adapter_config.json, or a GGUF adapter (.gguf)"
        )
    for recognizes, reader in FORMATS:
        if recognizes(path):
            return reader()(path, base)
    raise CheckpointError(
        f"adapter {path} is a file; expected the folder with adapter_config.json, or a GGUF adapter (.gguf)"
    )


class AdaptedCheckpoint(Checkpoint):
    """A checkpoint with adapters merged into its weights. See Checkpoint for the members.

    If the base ties embedding and output and an adapter changes one of them, they are untied: the adapter was trained
    with the other one unchanged.
    """

    def __init__(self, base: Checkpoint, adapters: Sequence[tuple[Adapter, float]]):
        self.base, self._adapters = base, adapters
        self.path, self.format, self.layout, self.config = base.path, base.format, base.layout, base.config
        self.parts, self.chat_template, self.sampling = base.parts, base.chat_template, base.sampling
        self.warnings, self.notes = [*base.warnings, *(w for one, _ in adapters for w in one.warnings)], base.notes
        self.shapes = dict(base.shapes)
        self._changed = {name for one, _ in adapters for name in (*one.low_rank, *one.replaced)}
        if self.config.tie_embeddings and self._changed & {EMBEDDING, OUTPUT}:
            self.config = dataclasses.replace(self.config, tie_embeddings=False)
            self.shapes[OUTPUT] = self.shapes[EMBEDDING]
        for adapter, scale in adapters:
            self._check(adapter, scale)
        self.adapters = [f"{one.path}: {one.about}, scale {scale:g}" for one, scale in adapters]
        self.adapters_hash = _hash(adapters)

    def _check(self, adapter: Adapter, scale: float) -> None:
        """Raise CheckpointError unless an adapter fits the base and the other adapters."""
        where = f"adapter {adapter.path}"
        for name, low in adapter.low_rank.items():
            made = len(low.up), low.down.shape[1]
            if low.up.shape[1] != len(low.down) or made != self.shapes.get(name):
                raise CheckpointError(
                    f"{where} has A {tuple(low.down.shape)} and B {tuple(low.up.shape)} for {self.file_name(name)},"
                    f" whose shape is {self.shapes.get(name)}; the adapter was trained on another model; pass that"
                    f" model with --model"
                )
        for name, tensor in adapter.replaced.items():
            if tuple(tensor.shape) != self.shapes.get(name):
                resized = " (its vocabulary was resized)" if name in (EMBEDDING, OUTPUT) else ""
                raise CheckpointError(
                    f"{where} replaces {self.file_name(name)} of shape {self.shapes.get(name)} with one of"
                    f" shape {tuple(tensor.shape)}{resized}; the adapter was trained on another model; merge the"
                    " adapter into that model with peft (merge_and_unload) and load the result"
                )
            others = [one for one, _ in self._adapters if one is not adapter and name in {*one.low_rank, *one.replaced}]
            if others:
                raise CheckpointError(
                    f"{where} replaces {self.file_name(name)}, which {others[0].path} also changes; pass only"
                    " one of these adapters"
                )
        if adapter.replaced and scale != 1:
            raise UsageError(
                f"{where} replaces {self.file_name(next(iter(adapter.replaced)))} completely, so its scale must be 1,"
                f" got {scale:g}"
            )
        for tensor in (*(part for low in adapter.low_rank.values() for part in (low.down, low.up)),
                       *adapter.replaced.values()):  # fmt: skip
            if not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(
                    f"{where} contains values that are not finite; its training failed or the file is damaged; download"
                    " it again"
                )

    @property
    def about(self) -> Mapping[str, Any]:
        return {**self.base.about, "adapters": "; ".join(self.adapters)}

    def _source(self, name: str) -> str:
        """The name under which the base stores a weight; the embedding's if the output is tied to it."""
        return name if name in self.base.shapes else EMBEDDING

    def changed(self, name: str) -> bool:
        return name in self._changed

    def tensor(self, name: str) -> Tensor:
        return (
            self.piece(name, slice(None), slice(None)) if self.changed(name) else self.base.tensor(self._source(name))
        )

    def piece(self, name: str, rows: slice, columns: slice) -> Tensor:
        replaced = [self._ordered(name, one.replaced[name], one) for one, _ in self._adapters if name in one.replaced]
        if replaced:
            weight = replaced[0][rows] if replaced[0].dim() == 1 else replaced[0][rows, columns]
        else:
            weight = self.base.piece(self._source(name), rows, columns)
        if not self.changed(name):
            return weight
        merged = weight.to(torch.float32, copy=True)
        for one, scale in self._adapters:
            if name in one.low_rank:
                low = one.low_rank[name]
                up, down = self._ordered(name, low.up, one)[rows].float(), low.down[:, columns].float()
                step = max(1, PIECE // merged.shape[1])
                for first in range(0, len(merged), step):  # in pieces, to save memory
                    merged[first : first + step].addmm_(up[first : first + step], down, alpha=scale * low.scale)
        return merged

    def _ordered(self, name: str, tensor: Tensor, adapter: Adapter) -> Tensor:
        """A tensor with the rows in the base's order."""
        if adapter.layout == self.layout or not name.endswith(ROTATED):
            return tensor
        reorder = to_half_layout if self.layout == "half" else to_interleaved_layout
        return reorder(tensor, self.config.head_dim)

    def file_name(self, name: str) -> str:
        return self.base.file_name(name)

    def stored(self, name: str) -> str:
        return self.base.stored(self._source(name))

    def bits(self, name: str) -> float:
        return self.base.bits(self._source(name))

    def blocks(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Blocks | None:
        return None if self.changed(name) else self.base.blocks(self._source(name), rows, columns)

    def tiles(self, name: str) -> Tensor | None:
        return None if self.changed(name) else self.base.tiles(self._source(name))

    def release(self, name: str) -> None:
        self.base.release(self._source(name))

    def own_tokenizer(self) -> Tokenizer:
        before = len(self.base.warnings)
        tokenizer = self.base.tokenizer()
        self.warnings = [*self.warnings, *self.base.warnings[before:]]
        return tokenizer

    def chat_format(self, tokenizer: Tokenizer) -> str | None:
        return self.base.chat_format(tokenizer)


def describe_ranks(low_rank: Mapping[str, LowRank], trained_on: str | None) -> str:
    """'LoRA of rank 8 on 224 matrices, trained on ORG/NAME'."""
    ranks = sorted({len(low.down) for low in low_rank.values()})
    span = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}" if ranks else "0"
    trained = f", trained on {trained_on:.200}" if trained_on else ""
    return f"LoRA of rank {span} on {len(low_rank)} matrices{trained}"


def _hash(adapters: Sequence[tuple[Adapter, float]]) -> str:
    """A hash of the adapters' contents and scales; it does not depend on their paths."""
    digest = hashlib.sha256()
    for adapter, scale in adapters:
        digest.update(f"{adapter.layout} {scale!r}\n".encode())
        tensors = dict(adapter.replaced)
        for name, low in adapter.low_rank.items():
            tensors |= {f"{name} down {low.scale!r}": low.down, f"{name} up": low.up}
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(raw_bytes(tensor).data)
    return digest.hexdigest()
