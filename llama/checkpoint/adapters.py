"""Adapters: small changes to a checkpoint's weights, merged into each weight while it is read.

    merged = weight + scale * B A          (LoRA, arXiv:2106.09685)

`AdaptedCheckpoint` is a checkpoint itself, so the loader, quantization, conversion and sharding read merged weights
like any others. The sum is computed in float32 and rounded once, when the weight is stored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import CheckpointError, DamagedError, UsageError
from ..quant.blocks import Blocks
from ..tokenizer import Tokenizer
from .base import PIECE, Checkpoint
from .lora import EMBEDDING, OUTPUT, Adapter, read
from .write import raw_bytes, to_layout

# A path, "PATH:SCALE", or (path, scale); or several of them
OneAdapter = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]
Adapters = OneAdapter | Sequence[OneAdapter]


def with_adapters(base: Checkpoint, adapters: Adapters) -> Checkpoint:
    """The checkpoint with adapters merged; `base` itself if there are none.

    Raises UsageError for a bad scale, CheckpointError if an adapter is damaged, not a LoRA, or does not fit the base.
    """
    one = isinstance(adapters, str | os.PathLike) or (len(adapters) == 2 and isinstance(adapters[1], int | float))
    chosen = [_parse(each) for each in cast("Sequence[OneAdapter]", [adapters] if one else adapters)]
    return AdaptedCheckpoint(base, [(read(path), scale) for path, scale in chosen]) if chosen else base


def _parse(adapter: OneAdapter) -> tuple[Path, float]:
    """Split an adapter into path and scale. An existing path is never split at its colon."""
    path, scale = adapter if isinstance(adapter, tuple) else (adapter, 1.0)
    if isinstance(adapter, str) and ":" in adapter and not os.path.lexists(adapter):
        path, _, scale = adapter.rpartition(":")  # type: ignore[assignment]
    try:
        path, scale = Path(path), float(scale)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"an adapter must be PATH, PATH:SCALE or (path, scale), got {adapter!r:.200}") from None
    if not math.isfinite(scale):
        raise UsageError(f"adapter {path}: the scale must be a finite number, got {scale}")
    return path, scale


class AdaptedCheckpoint(Checkpoint):
    """A checkpoint with adapters merged into its weights. See Checkpoint for the members.

    If the base ties embedding and output and an adapter changes one of them, they are untied: the adapter was trained
    with the other one unchanged.
    """

    def __init__(self, base: Checkpoint, adapters: Sequence[tuple[Adapter, float]]):
        self.base, self._adapters = base, adapters
        self.path, self.format, self.layout, self.config = base.path, base.format, base.layout, base.config
        self.parts, self.chat_template, self.sampling = base.parts, base.chat_template, base.sampling
        self.warnings, self.notes = base.warnings, base.notes
        self.shapes = dict(base.shapes)
        self._changed = {name for one, _ in adapters for name in one.low_rank}
        if self.config.tie_embeddings and self._changed & {EMBEDDING, OUTPUT}:
            self.config = dataclasses.replace(self.config, tie_embeddings=False)
            self.shapes[OUTPUT] = self.shapes[EMBEDDING]
        for adapter, _ in adapters:
            self._check(adapter)
        self.adapters = [f"{one.path}, scale {scale:g}" for one, scale in adapters]
        self.adapters_hash = _hash(adapters)

    def _check(self, adapter: Adapter) -> None:
        """Raise CheckpointError unless an adapter fits the base and is finite."""
        where = f"adapter {adapter.path}"
        for name, low in adapter.low_rank.items():
            if low.shape != self.shapes.get(name):
                raise CheckpointError(
                    f"{where} changes {self.file_name(name)} as a weight of shape {low.shape}, but the model"
                    f" has {self.shapes.get(name)}; pass the model (--model) that it was trained on"
                )
            if not all(part.is_floating_point() and bool(part.isfinite().all()) for part in (low.down, low.up)):
                raise DamagedError(f"{where} has values that are not finite floating-point numbers")

    @property
    def about(self) -> Mapping[str, Any]:
        return {**self.base.about, "adapters": "; ".join(self.adapters)}

    def _source(self, name: str) -> str:
        """The name under which the base stores a weight; the embedding's if the output is tied to it."""
        return name if name in self.base.shapes else EMBEDDING

    def changed(self, name: str) -> bool:
        return name in self._changed

    def tensor(self, name: str) -> Tensor:
        everything = slice(None)
        return self.piece(name, everything, everything) if self.changed(name) else self.base.tensor(self._source(name))

    def piece(self, name: str, rows: slice, columns: slice) -> Tensor:
        weight = self.base.piece(self._source(name), rows, columns)
        if not self.changed(name):
            return weight
        merged = weight.to(torch.float32, copy=True)
        for one, scale in self._adapters:
            if name in one.low_rank:
                low = one.low_rank[name]
                up = to_layout(name, low.up, self.config.head_dim, one.layout, self.layout)[rows].float()
                down, step = low.down[:, columns].float(), max(1, PIECE // merged.shape[1])
                for first in range(0, len(merged), step):  # in pieces, to save memory
                    merged[first : first + step].addmm_(up[first : first + step], down, alpha=scale * low.scale)
        return merged

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
        return self.base.tokenizer()

    def chat_format(self, tokenizer: Tokenizer) -> str | None:
        return self.base.chat_format(tokenizer)


def _hash(adapters: Sequence[tuple[Adapter, float]]) -> str:
    """A hash of the adapters' contents and scales; it does not depend on their paths."""
    digest = hashlib.sha256()
    for adapter, scale in adapters:
        digest.update(f"{adapter.layout} {scale!r}\n".encode())
        for name, low in sorted(adapter.low_rank.items()):
            for part in (low.down, low.up):
                digest.update(f"{name} {tuple(part.shape)} {part.dtype} {low.scale!r}\n".encode())
                digest.update(raw_bytes(part).data)
    return digest.hexdigest()
