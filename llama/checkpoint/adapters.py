"""Adapters: small changes to a checkpoint's weights, merged into each weight while it is read.

    merged = weight + scale * B A          (LoRA, arXiv:2106.09685)

`AdaptedCheckpoint` is a checkpoint itself, so the loader, quantization, conversion and sharding read merged weights
like any others. The sum is computed in float32 and rounded once, when the weight is stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import CheckpointError, DamagedError, TokenizerError, UsageError
from ..tokenizer import Named, Tokenizer
from ..tokenizer.common import joined_templates
from .base import EMBEDDING, OUTPUT, Checkpoint, in_layout, model_weights
from .huggingface import read_chat_template, read_tokenizer
from .lora import Adapter, LowRank, read
from .weight import CACHED_ENTRIES, DTYPES, DerivedWeight, MemoryWeight, Weight
from .write import digest

ENDS = EMBEDDING, OUTPUT  # these may be tied, and an adapter may add rows to both
# One adapter is a path, "PATH:SCALE" or (path, scale)
OneAdapter = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]
Adapters = OneAdapter | Sequence[OneAdapter]


def with_adapters(base: Checkpoint, adapters: Adapters) -> Checkpoint:
    """The checkpoint with adapters merged; `base` itself if there are none.

    Raises UsageError for a bad scale, CheckpointError if an adapter is damaged, not a LoRA, or does not fit the base.
    """
    one = isinstance(adapters, str | os.PathLike) or (len(adapters) == 2 and isinstance(adapters[1], int | float))
    chosen = [_parse(each) for each in cast("Sequence[OneAdapter]", [adapters] if one else adapters)]
    return AdaptedCheckpoint(base, [(of_model(read(path), base), scale) for path, scale in chosen]) if chosen else base


def of_model(adapter: Adapter, base: Checkpoint) -> Adapter:
    """Convert an adapter to the model's weights in the interleaved layout; see `model_weights`."""

    def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weights = model_weights({name: MemoryWeight(tensor, name) for name, tensor in tensors.items()}, base.config)
        D, source = base.config.head_dim, adapter.layout
        return {name: in_layout(weight, name, D, source, "interleaved").floats() for name, weight in weights.items()}

    changes = [(low, whole({name: low.up})) for name, low in adapter.low_rank.items()]
    low_rank = {name: dataclasses.replace(low, up=up) for low, ups in changes for name, up in ups.items()}
    return dataclasses.replace(adapter, low_rank=low_rank, whole=whole(adapter.whole), copies=whole(adapter.copies))


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


class AdaptedWeight(DerivedWeight):
    """A weight of the base, or `whole` in place of it, plus low-rank changes."""

    changed = True

    def __init__(self, base: Weight, whole: Tensor | None, low_rank: Sequence[LowRank]):
        super().__init__(base)
        self.source, self.low_rank = base if whole is None else MemoryWeight(whole), low_rank
        self.ranges = tuple(map(range, self.source.shape))  # counted in `source`, which may itself be a part

    def floats(self) -> Tensor:
        weight = self.source[self.part].floats()
        if not self.low_rank:
            return weight
        merged, (rows, columns) = weight.to(torch.float32, copy=True), self.part
        for low in self.low_rank:
            up, down = low.up[rows].float(), low.down[:, columns].float()
            step = max(1, CACHED_ENTRIES // merged.shape[1])
            for first in range(0, len(merged), step):  # in pieces, to save memory
                merged[first : first + step].addmm_(up[first : first + step], down, alpha=low.scale)
        return merged


class AdaptedCheckpoint(Checkpoint):
    """A checkpoint with adapters merged into its weights. See Checkpoint for the members.

    If the base ties embedding and output and adapters make them differ, they are untied: PEFT trains each on its own.
    """

    def __init__(self, base: Checkpoint, adapters: Sequence[tuple[Adapter, float]]):
        vars(self).update(vars(base))  # all attributes of the base; those set below replace its own
        self.base, self.format, self.layout = base, base.format, "interleaved"
        self.shapes, tied = dict(base.shapes), self.config.tie_embeddings
        if tied:
            self.shapes[OUTPUT] = self.shapes.get(EMBEDDING, ())
        self._whole: dict[str, Tensor] = {}  # the weights that replace the base's
        for adapter, scale in adapters:
            self._replace(adapter, scale)
        for adapter, _ in adapters:
            for name, low in adapter.low_rank.items():
                self._check(adapter, name, low.shape, low.down, low.up)
        low_rank = {name for adapter, _ in adapters for name in adapter.low_rank}
        replaced = [self._whole[name] for name in ENDS if name in self._whole]
        same_type = len({weight.dtype for weight in replaced}) < 2
        equal = len(replaced) != 1 and same_type and (not replaced or torch.equal(*replaced))
        if tied and equal and not low_rank & {*ENDS}:
            del self.shapes[OUTPUT]
        elif tied:
            self.config = dataclasses.replace(self.config, tie_embeddings=False)
        if replaced:
            self.config = dataclasses.replace(self.config, vocab_size=len(replaced[0]))
        files = [one.path / name for one, _ in adapters for name in ("tokenizer.model", "tokenizer.json")]
        self._tokenizer = next((file for file in reversed(files) if file.is_file()), None)
        if self._tokenizer is not None:
            self.chat_template = read_chat_template(self._tokenizer.parent) or base.chat_template
        tokenizer = {None if self._tokenizer is None else self._tokenizer.parent: ", with its tokenizer"}
        self.adapters = [f"{one.path}, scale {scale:g}{tokenizer.get(one.path, '')}" for one, scale in adapters]
        self.adapters_hash = _hash(adapters, self._whole)
        self._weights = {}
        for name in self.shapes:
            weight = base.unscaled(self._source(name), "interleaved")
            if name in low_rank | self._whole.keys():
                found = ((adapter.low_rank.get(name), scale) for adapter, scale in adapters)
                changes = [dataclasses.replace(low, scale=scale * low.scale) for low, scale in found if low]
                weight = AdaptedWeight(weight, self._whole.get(name), changes)
            self._weights[name] = weight

    def _replace(self, adapter: Adapter, scale: float) -> None:
        """Collect the weights that an adapter replaces. Raises LlamaError if they do not fit the base."""
        whole: dict[str, Tensor] = {}
        for name, copy in adapter.copies.items():
            if not _is_copy(copy, self.base, self._source(name)):
                raise CheckpointError(
                    f"adapter {adapter.path} was trained on another model: its copy of {self.file_name(name)} differs"
                    " from the weight of the model; pass the adapter's base model (--model)"
                )
            if len(copy) != self.base.shapes[self._source(name)][0]:  # resized, but not trained: still tied
                whole |= dict.fromkeys(ENDS if self.config.tie_embeddings else (name,), copy)
        whole |= adapter.whole
        shapes = {tuple(whole[name].shape) if name in whole else self.shapes.get(name) for name in ENDS}
        if len(shapes) == 1 and (shape := shapes.pop()) and shape[1:] == (self.config.dim,):  # V may differ
            self.shapes = {**self.shapes, **dict.fromkeys(ENDS, shape)}
        for name, weight in whole.items():
            self._check(adapter, name, tuple(weight.shape), weight)
            if scale != 1 or name in self._whole:
                where = f"adapter {adapter.path} replaces {self.file_name(name)}"
                raise UsageError(f"{where}; only one adapter can replace a weight, and only with scale 1")
            self._whole[name] = weight

    def _check(self, adapter: Adapter, name: str, shape: tuple[int, ...], *parts: Tensor) -> None:
        """Raise CheckpointError unless a change of a weight fits the base and is finite."""
        where = f"adapter {adapter.path}"
        if shape != self.shapes.get(name):
            raise CheckpointError(
                f"{where} changes {self.file_name(name)} as a weight of shape {shape}, but the model"
                f" has {self.shapes.get(name)}; pass the adapter's base model (--model); if the adapter"
                " resized the vocabulary, save embed_tokens and lm_head with it (save_embedding_layers=True)"
            )
        if not all(part.is_floating_point() and bool(part.isfinite().all()) for part in parts):
            raise DamagedError(f"{where} has values that are not finite floating-point numbers")

    @property
    def about(self) -> Mapping[str, Any]:
        return {**self.base.about, "adapters": "; ".join(self.adapters)}

    def _source(self, name: str) -> str:
        """The name under which the base stores a weight. The base stores a tied output as the embedding."""
        return name if name in self.base.shapes else EMBEDDING

    def file_name(self, name: str) -> str:
        return self.base.file_name(name)

    def own_tokenizer(self) -> Tokenizer:
        if self._tokenizer is not None:
            named = Named(template=joined_templates(self.chat_template))
            with contextlib.suppress(TokenizerError):  # the base may have no tokenizer
                own = self.base.own_tokenizer()
                bos_ids = () if own.bos_id is None else (own.bos_id,)
                named = dataclasses.replace(named, bos_ids=bos_ids, stop_ids=sorted(own.stop_ids))
            return read_tokenizer(self._tokenizer, named)
        before, after = self.base.config.vocab_size, self.config.vocab_size
        if before != after:
            raise TokenizerError(
                f"adapter {'; '.join(self.adapters)} resizes the vocabulary from {before} to {after} tokens, but has no"
                " tokenizer in its folder; name the one that it was trained with (--tokenizer)"
            )
        return self.base.tokenizer()


def _is_copy(copy: Tensor, base: Checkpoint, name: str) -> bool:
    """Whether a tensor is a weight of the base, apart from rounding and the number of rows."""
    if name not in base.shapes or copy.shape[-1:] != base.shapes[name][-1:]:
        return False
    weight = base.unscaled(name, "interleaved")[: len(copy)].floats().float()
    limit = 2**-8 if base.weight(name).stored in DTYPES else 0.5  # the largest relative error of a row
    return bool(((copy[: len(weight)] - weight).norm(dim=-1) <= limit * weight.norm(dim=-1) + 1e-5).all())


def _hash(adapters: Sequence[tuple[Adapter, float]], whole: Mapping[str, Tensor]) -> str:
    """A hash of the adapters' contents and scales; it does not depend on their paths."""
    changes = [(name, whole[name]) for name in sorted(whole)]
    for adapter, scale in adapters:
        for name, low in sorted(adapter.low_rank.items()):
            changes += [(f"{name} {scale * low.scale!r}", part) for part in (low.down, low.up)]
    return digest(changes)
