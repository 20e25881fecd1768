"""What one of several processes reads of a checkpoint: a checkpoint itself, of a model with fewer heads and layers.

The processes stand in P stages of N. A stage has some of the layers, and within a stage each matrix is cut into N parts
(arXiv:1909.08053): wq, wk, wv, w_gate and w_up by their rows, so that a process computes heads and inner features of
its own; wo and w_down by their columns, so that what the N processes get is summed up. Embedding and output are cut by
the rows of the vocabulary. Where there are fewer key/value heads than processes, several have the same.
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

SUMMED = ("attention.wo", "feed_forward.w_down")  # cut by columns


@dataclass(frozen=True)
class Place:
    """Where a process stands: rank = stage * tensor + part.

    tensor    N, processes that share each matrix
    pipeline  P, stages that follow each other
    """

    rank: int = 0
    tensor: int = 1
    pipeline: int = 1

    @property
    def stage(self) -> int:
        return self.rank // self.tensor

    @property
    def part(self) -> int:
        return self.rank % self.tensor

    def layers(self, config: ModelConfig) -> range:
        """The layers of this stage, of the whole model's."""
        counts = stages(config, self.pipeline)
        first = sum(counts[: self.stage])
        return range(first, first + counts[self.stage])

    def vocabulary(self, config: ModelConfig, part: int | None = None) -> slice:
        """The rows of embedding and output that a part has, this one unless said; whole tiles if there are enough."""
        part, unit = self.part if part is None else part, TILE if config.vocab_size >= TILE * self.tensor else 1
        units = -(-config.vocab_size // unit)
        first, last = (min(config.vocab_size, unit * (units * p // self.tensor)) for p in (part, part + 1))
        return slice(first, last)

    def config(self, config: ModelConfig) -> ModelConfig:
        """The sizes of this part of a model."""
        rows = self.vocabulary(config)
        return dataclasses.replace(
            config,
            n_layers=len(self.layers(config)),
            n_heads=config.n_heads // self.tensor,
            n_kv_heads=max(1, config.n_kv_heads // self.tensor),
            hidden_dim=config.hidden_dim // self.tensor,
            vocab_size=rows.stop - rows.start,
        )

    def cut(self, name: str, config: ModelConfig) -> tuple[slice, slice]:
        """Rows and columns of a weight of the whole model that this part has; of a bias, entries and nothing."""
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
    """How many layers each stage has, so that the largest is as small as can be; the first has the embeddings too."""
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
    """Whether a model's matrices can be cut into so many parts: whole heads, equal widths, no part empty."""
    heads, groups = config.n_heads, config.n_kv_heads
    return (
        heads % tensor == 0
        and (groups % tensor == 0 or tensor % groups == 0)
        and config.hidden_dim % tensor == 0
        and config.vocab_size >= tensor
    )


def check_world(config: ModelConfig, tensor: int, pipeline: int) -> None:
    """Raise UsageError, naming the sizes that work, where a model can't be shared by P stages of N processes."""
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


class PartCheckpoint(Checkpoint):
    """The part of a checkpoint that belongs to one process; see Checkpoint for the members."""

    def __init__(self, whole: Checkpoint, place: Place):
        check_world(whole.config, place.tensor, place.pipeline)
        self.whole, self.place = whole, place
        self.path, self.format, self.layout = whole.path, whole.format, whole.layout
        self.parts, self.warnings, self.notes = whole.parts, whole.warnings, whole.notes
        self.config = place.config(whole.config)
        layers = place.layers(whole.config)
        self._names: dict[str, str] = {}  # name in this part -> name in the whole
        for name in whole.shapes:
            first, *rest = name.split(".", 2)
            if first == "layers" and int(rest[0]) in layers:
                self._names[f"layers.{int(rest[0]) - layers.start}.{rest[1]}"] = name
            elif first == "norm" or (first in ("tok_embeddings", "output") and place.stage == 0):
                self._names[name] = name
        self.shapes = {name: self._shape(source) for name, source in self._names.items()}

    def _shape(self, source: str) -> tuple[int, ...]:
        shape = self.whole.shapes[source]
        return tuple(
            len(range(*cut.indices(size)))
            for size, cut in zip(shape, self.place.cut(source, self.whole.config), strict=False)
        )

    @property
    def about(self) -> Mapping[str, Any]:
        return self.whole.about

    def tensor(self, name: str) -> Tensor:
        source = self._names[name]
        rows, columns = self.place.cut(source, self.whole.config)
        found = self.whole.piece(source, rows, columns)
        if source.endswith(".bias") and source.removesuffix(".bias").endswith(SUMMED) and self.place.part:
            return torch.zeros_like(found)  # the parts are summed up, and the bias belongs there once
        if not found.is_contiguous():
            found = found.contiguous()
            self.whole.release(source)
        return found

    def blocks(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Blocks | None:
        source = self._names[name]
        own = self.place.cut(source, self.whole.config)
        size = self.whole.shapes[source]
        return self.whole.blocks(
            source, *(_within(o, r, n) for o, r, n in zip(own, (rows, columns), size, strict=True))
        )

    def tiles(self, name: str) -> Tensor | None:
        source = self._names[name]
        rows, columns = self.place.cut(source, self.whole.config)
        size = self.whole.shapes[source]
        first, last, _ = rows.indices(size[0])
        if columns != slice(None) or first % TILE or (last % TILE and last != size[0]):
            return None
        packed = self.whole.tiles(source)
        return None if packed is None else packed[first // TILE : -(-last // TILE)]

    def check_groups(self, group: int | None = None) -> None:
        """Raise UsageError where a cut by columns would go through a group of integers that share a scale.

        group  inputs of a group that weights are to be rounded to; None: those of the file
        """
        for name in (n for n in self.shapes if n.removesuffix(".weight").endswith(SUMMED)):
            width = self.shapes[name][1]
            stored = self.whole.blocks(self._names[name], slice(0, 1)) if group is None else None
            wide = group if group is not None else stored.group if stored is not None else 0
            if wide and width % wide and self.place.tensor > 1:
                raise UsageError(
                    f"tensor parallelism over {self.place.tensor} processes cuts {name.split('.', 2)[2]} into parts of"
                    f" {width} inputs, and its integers share a scale in groups of {wide}; take fewer processes"
                    + (", smaller groups" if group is not None else "")
                    + " or --dtype float32 without --quantize"
                )

    def file_name(self, name: str) -> str:
        return self.whole.file_name(self._names[name])

    def stored(self, name: str) -> str:
        return self.whole.stored(self._names[name])

    def release(self, name: str) -> None:
        self.whole.release(self._names[name])

    def tokenizer(self) -> Tokenizer:
        return self.whole.tokenizer()


def _within(outer: slice, inner: slice, size: int) -> slice:
    """The slice `inner` of the slice `outer` of so many."""
    some = range(*outer.indices(size))[inner]
    return slice(some.start, some.stop)
