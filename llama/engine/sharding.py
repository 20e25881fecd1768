"""The slice of a checkpoint that one rank reads: a checkpoint itself, of a model with fewer heads and layers.

The ranks form P stages of N ranks each. A stage has some of the layers, and within a stage each matrix is divided into
N parts (arXiv:1909.08053): wq, wk, wv, w_gate and w_up by rows, so that each rank computes its own heads and features;
wo and w_down by columns, so that the results of the N ranks are summed. Embedding and output are divided by the rows of
the vocabulary. If there are fewer key/value heads than ranks, several ranks have the same heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.base import Checkpoint
from ..config import ModelConfig
from ..errors import UsageError
from ..quant.blocks import Blocks
from ..quant.tiles import TILE
from ..tokenizer import Tokenizer

SUMMED = ("attention.wo", "feed_forward.w_down")  # divided by columns


@dataclass(frozen=True)
class Rank:
    """One of the processes that share a model: number = stage * tensor + part.

    tensor    N, the number of ranks that share each matrix
    pipeline  P, the number of stages
    """

    number: int = 0
    tensor: int = 1
    pipeline: int = 1

    @property
    def stage(self) -> int:
        return self.number // self.tensor

    @property
    def part(self) -> int:
        return self.number % self.tensor

    def layers(self, config: ModelConfig) -> range:
        """The layers of this stage, as numbers in the complete model."""
        counts = stages(config, self.pipeline)
        first = sum(counts[: self.stage])
        return range(first, first + counts[self.stage])

    def vocabulary(self, config: ModelConfig, part: int | None = None) -> slice:
        """The rows of embedding and output of a part (default: this rank's), in complete tiles if there are enough."""
        part, unit = self.part if part is None else part, TILE if config.vocab_size >= TILE * self.tensor else 1
        units = -(-config.vocab_size // unit)
        first, last = (min(config.vocab_size, unit * (units * p // self.tensor)) for p in (part, part + 1))
        return slice(first, last)

    def config(self, config: ModelConfig) -> ModelConfig:
        """The configuration of this rank's part of a model."""
        rows, layers = self.vocabulary(config), self.layers(config)
        return dataclasses.replace(
            config,
            n_layers=len(layers),
            no_rope_layers=tuple(i - layers.start for i in config.no_rope_layers if i in layers),
            n_heads=config.n_heads // self.tensor,
            n_kv_heads=max(1, config.n_kv_heads // self.tensor),
            hidden_dim=config.hidden_dim // self.tensor,
            vocab_size=rows.stop - rows.start,
        )

    def cut(self, name: str, config: ModelConfig) -> tuple[slice, slice]:
        """The rows and columns of a weight of the complete model that this rank has; for a bias, its entries."""
        everything = slice(None)
        stem = name.rsplit(".", 1)[0]
        inner = ".".join(stem.split(".")[-2:])
        if inner in SUMMED:
            size = (config.n_heads * config.head_dim if inner == SUMMED[0] else config.hidden_dim) // self.tensor
            own = slice(self.part * size, (self.part + 1) * size)
            return (everything, own) if name.endswith(".weight") else (everything, everything)
        if stem in ("tok_embeddings", "output"):
            return self.vocabulary(config), everything
        if inner in ("attention.wk", "attention.wv"):
            heads = max(1, config.n_kv_heads // self.tensor)
            head = self.part * config.n_kv_heads // self.tensor
            return slice(head * config.head_dim, (head + heads) * config.head_dim), everything
        if inner == "attention.wq":
            size = config.n_heads // self.tensor * config.head_dim
        elif inner in ("feed_forward.w_gate", "feed_forward.w_up"):
            size = config.hidden_dim // self.tensor
        else:
            return everything, everything  # norms
        return slice(self.part * size, (self.part + 1) * size), everything


def stages(config: ModelConfig, pipeline: int) -> list[int]:
    """The number of layers per stage that makes the largest stage smallest; the first also has the embeddings."""
    if pipeline == 1:
        return [config.n_layers]
    embeddings = config.vocab_size * config.dim * (1 if config.tie_embeddings else 2)
    layer = (config.n_params - embeddings) / config.n_layers
    others = pipeline - 1

    def largest(first: int) -> float:
        return max(embeddings + first * layer, -(-(config.n_layers - first) // others) * layer)

    first = min(range(1, config.n_layers - others + 1), key=largest)
    rest = config.n_layers - first
    return [first] + [rest * (i + 1) // others - rest * i // others for i in range(others)]


def fits(config: ModelConfig, tensor: int) -> bool:
    """Whether a model's matrices can be divided into `tensor` parts: complete heads, equal widths, no empty part."""
    heads, groups = config.n_heads, config.n_kv_heads
    return (
        heads % tensor == 0
        and (groups % tensor == 0 or tensor % groups == 0)
        and config.hidden_dim % tensor == 0
        and config.vocab_size >= tensor
    )


def check_world(config: ModelConfig, tensor: int, pipeline: int) -> None:
    """Raise UsageError, with the sizes that work, if a model can't be divided into P stages of N ranks."""
    if not fits(config, tensor):
        sizes = ", ".join(str(n) for n in range(1, config.n_heads + 1) if fits(config, n))
        raise UsageError(
            f"tensor parallelism over {tensor} processes does not fit this model of {config.n_heads} heads,"
            f" {config.n_kv_heads} key/value heads and a feed-forward width of {config.hidden_dim};"
            f" sizes that work: {sizes}"
        )
    if pipeline > config.n_layers:
        raise UsageError(
            f"a pipeline of {pipeline} stages does not fit this model of {config.n_layers} layers;"
            f" sizes that work: 1 to {config.n_layers}"
        )


class ShardedCheckpoint(Checkpoint):
    """One rank's slice of a checkpoint. See Checkpoint for the members."""

    def __init__(self, whole: Checkpoint, rank: Rank):
        check_world(whole.config, rank.tensor, rank.pipeline)
        self.whole, self.rank = whole, rank
        self.path, self.format, self.layout = whole.path, whole.format, whole.layout
        self.parts, self.warnings, self.notes = whole.parts, whole.warnings, whole.notes
        self.adapters, self.adapters_hash = whole.adapters, whole.adapters_hash
        self.config = rank.config(whole.config)
        layers = rank.layers(whole.config)
        self._names: dict[str, str] = {}  # name in this slice -> name in the complete model
        for name in whole.shapes:
            first, *rest = name.split(".", 2)
            if first == "layers" and int(rest[0]) in layers:
                self._names[f"layers.{int(rest[0]) - layers.start}.{rest[1]}"] = name
            elif first == "norm" or (first in ("tok_embeddings", "output") and rank.stage == 0):
                self._names[name] = name
        self.shapes = {name: self._shape(source) for name, source in self._names.items()}

    def _shape(self, source: str) -> tuple[int, ...]:
        shape = self.whole.shapes[source]
        return tuple(
            len(range(*cut.indices(size)))
            for size, cut in zip(shape, self.rank.cut(source, self.whole.config), strict=False)
        )

    @property
    def about(self) -> Mapping[str, Any]:
        return self.whole.about

    def tensor(self, name: str) -> Tensor:
        source = self._names[name]
        rows, columns = self.rank.cut(source, self.whole.config)
        found = self.whole.piece(source, rows, columns)
        if source.endswith(".bias") and source.removesuffix(".bias").endswith(SUMMED) and self.rank.part:
            return torch.zeros_like(found)  # the parts are summed, and the bias must be added once
        if not found.is_contiguous():
            found = found.contiguous()
            self.whole.release(source)
        return found

    def blocks(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Blocks | None:
        source = self._names[name]
        own = self.rank.cut(source, self.whole.config)
        size = self.whole.shapes[source]
        return self.whole.blocks(
            source, *(_within(o, r, n) for o, r, n in zip(own, (rows, columns), size, strict=True))
        )

    def tiles(self, name: str) -> Tensor | None:
        source = self._names[name]
        rows, columns = self.rank.cut(source, self.whole.config)
        size = self.whole.shapes[source]
        first, last, _ = rows.indices(size[0])
        if columns != slice(None) or first % TILE or (last % TILE and last != size[0]):
            return None
        packed = self.whole.tiles(source)
        return None if packed is None else packed[first // TILE : -(-last // TILE)]

    def check_groups(self, group: int | None = None) -> None:
        """Raise UsageError if a division by columns would cut through a quantization group.

        group  inputs per group that weights will be quantized in; None: the groups of the file
        """
        for name in (n for n in self.shapes if n.removesuffix(".weight").endswith(SUMMED)):
            width = self.shapes[name][1]
            stored = self.whole.blocks(self._names[name], slice(0, 1)) if group is None else None
            wide = group if group is not None else stored.group if stored is not None else 0
            if wide and width % wide and self.rank.tensor > 1:
                raise UsageError(
                    f"tensor parallelism over {self.rank.tensor} processes divides {name.split('.', 2)[2]} into parts"
                    f" of {width} inputs, but its quantization groups have {wide} inputs; use fewer processes"
                    + (", smaller groups" if group is not None else "")
                    + " or --dtype float32 without --quantize"
                )

    def file_name(self, name: str) -> str:
        return self.whole.file_name(self._names[name])

    def changed(self, name: str) -> bool:
        return self.whole.changed(self._names[name])

    def stored(self, name: str) -> str:
        return self.whole.stored(self._names[name])

    def release(self, name: str) -> None:
        self.whole.release(self._names[name])

    def own_tokenizer(self) -> Tokenizer:
        return self.whole.tokenizer()


def _within(outer: slice, inner: slice, size: int) -> slice:
    """The slice `inner` of the slice `outer` of `size` entries."""
    some = range(*outer.indices(size))[inner]
    return slice(some.start, some.stop)
