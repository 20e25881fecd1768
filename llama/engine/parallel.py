"""One model in several processes, started by torchrun: the only file with collectives (torch.distributed).

Every rank runs the same program on the same ids, with its slices of the matrices (arXiv:1909.08053):

    wq, wk, wv, w_gate, w_up  each rank has some rows: its heads and features. If there are fewer key/value
                              heads than ranks, several ranks have the same heads
    wo, w_down                each rank has some columns; the results of all ranks are summed (RowParallel)
    output                    each rank has some rows, or all if the weights are tied; all ranks get all logits
                              (GatheredOutput)

Hosts may round differently, so they could pick different tokens from nearly equal logits. Therefore all ranks take the
token that rank 0 picked (`World.agree`) and the input that rank 0 read (`World.first`). gloo carries CPU tensors, nccl
GPU tensors; both raise RuntimeError if another rank has ended.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoint.base import Checkpoint
from ..checkpoint.weight import MemoryWeight, Weight
from ..checkpoint.write import digest
from ..config import ModelConfig
from ..errors import UsageError
from ..model import Transformer
from ..quant.tiles import TILE
from ..rope import Layout
from ..tokenizer import Tokenizer
from .runtime import pick_device

WORK = timedelta(days=20)  # limit of a collective: a user may take long to type. A rank that ends is detected at once
SUMMED = ("wo", "w_down")  # layers whose columns are divided among the ranks
ALL = slice(None)
T = TypeVar("T")


class World:
    """The processes that share a model. `device` has this rank's part; `config` describes the complete model."""

    config: ModelConfig

    def __init__(self, rank: int, size: int, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        self.on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", size))  # number of ranks
        self.group = dist.new_group(timeout=WORK)

    def first(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 only; its result is returned, or its error raised, on every rank."""
        found: list[Any] = [None, None]
        if self.rank == 0:
            try:
                found[0] = function()
            except (Exception, KeyboardInterrupt) as error:
                found[1] = error
        dist.broadcast_object_list(found, 0, self.group, torch.device("cpu"))
        if found[1] is not None:
            raise found[1]
        return found[0]

    def agree(self, choice: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Rank 0's choice: tensors (n,) of ids and float32 numbers."""
        numbers = torch.stack([values.double() for values in choice])  # exact for ids and float32
        dist.broadcast(numbers, 0, self.group)
        return tuple(row.to(values.dtype) for row, values in zip(numbers, choice, strict=True))

    def check_same(self, what: str, fact: str) -> None:
        """Raise UsageError on all ranks unless `fact` is the same on all. `what` names the fact in the message."""
        facts = [""] * self.size
        dist.all_gather_object(facts, fact, self.group)
        for rank, other in enumerate(facts):
            if other != facts[0]:
                raise UsageError(f"rank {rank} and rank 0 have different {what}; start all ranks with the same {what}")

    def slice(self, checkpoint: Checkpoint) -> Checkpoint:
        """This rank's part of a checkpoint, after a check that all ranks have the same checkpoint."""
        self.config = checkpoint.config
        facts = checkpoint.config, dict(checkpoint.sampling), sample_hash(checkpoint), checkpoint.adapters_hash
        self.check_same("model files", str(facts))
        return ShardedCheckpoint(checkpoint, self.rank, self.size)

    def wrap(self, model: Transformer) -> None:
        """Wrap, in place, those layers of this rank's part of a model at which ranks exchange numbers."""
        whole = self.config
        for block in model.layers:
            for name in ("attention.wo", "feed_forward.w_down"):
                block.set_submodule(name, RowParallel(block.get_submodule(name), self.group))
        if not whole.tie_embeddings:
            widths = [len(output_rows(whole, rank, self.size)) for rank in range(self.size)]
            model.set_submodule("output", GatheredOutput(model.output, widths, self.group))
        sizes = {name: getattr(whole, name) for name in ("n_heads", "n_kv_heads", "hidden_dim")}
        model.config = dataclasses.replace(model.config, **sizes)

    def leave(self) -> None:
        """Wait for the other ranks and close the connections."""
        dist.barrier(self.group)
        dist.destroy_process_group()


def join(store: Any, rank: int, size: int, device: str | None = None) -> World:
    """Connect to the other ranks through torchrun's store. On GPUs, a rank uses the GPU numbered LOCAL_RANK."""
    chosen = pick_device(device)
    if chosen.type == "cuda":
        chosen = pick_device(f"cuda:{os.environ.get('LOCAL_RANK', rank)}")
        torch.cuda.set_device(chosen)
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):  # one host, so accept no connections from outside
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(minutes=2))
    return World(rank, size, chosen)


# ---------------------------------------------------------------------------------------------------------- layers
class RowParallel(nn.Module):
    """A linear layer whose inputs are divided among the ranks: (.., in / N) -> (.., out), the sum over all ranks."""

    def __init__(self, inner: nn.Module, group: Any):
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x).contiguous()
        dist.all_reduce(y, group=self.group)
        return y


class GatheredOutput(nn.Module):
    """An output layer whose rows are divided among the ranks: (.., C) -> (.., V) on every rank."""

    def __init__(self, inner: nn.Module, widths: list[int], group: Any):
        super().__init__()
        self.inner, self.widths, self.group = inner, widths, group

    def forward(self, h: Tensor) -> Tensor:
        y = self.inner(h)  # (.., widths[rank])
        y = F.pad(y, (0, max(self.widths) - y.shape[-1])).contiguous()
        parts = [torch.empty_like(y) for _ in self.widths]
        dist.all_gather(parts, y, self.group)
        return torch.cat([part[..., :width] for part, width in zip(parts, self.widths, strict=True)], -1)


# ------------------------------------------------------------------------------------------------------- the slices
def divides(ranks: int, config: ModelConfig) -> bool:
    """Whether a model can be divided among so many ranks, with complete heads and equal widths."""
    heads, groups = config.n_heads, config.n_kv_heads
    whole_groups = groups % ranks == 0 or ranks % groups == 0
    return heads % ranks == 0 and whole_groups and config.hidden_dim % ranks == 0


def output_rows(config: ModelConfig, rank: int, ranks: int) -> range:
    """The rows of the output layer that a rank has, in complete tiles if there are enough tiles."""
    unit = TILE if config.vocab_size >= TILE * ranks else 1
    first, last = (-(-config.vocab_size // unit) * number // ranks * unit for number in (rank, rank + 1))
    return range(first, min(last, config.vocab_size))


class ShardedCheckpoint(Checkpoint):
    """One rank's slice of a checkpoint. See Checkpoint for the members."""

    def __init__(self, whole: Checkpoint, rank: int, ranks: int):
        config = whole.config
        if not divides(ranks, config):
            sizes = ", ".join(str(n) for n in range(1, config.n_heads + 1) if divides(n, config))
            widths = f"{config.n_heads} heads, {config.n_kv_heads} key/value heads and {config.hidden_dim} features"
            raise UsageError(f"{widths} can't be divided among {ranks} processes; numbers that work: {sizes}")
        vars(self).update(vars(whole))
        self.whole, self.rank, self.ranks = whole, rank, ranks
        self.config = dataclasses.replace(
            config,
            n_heads=config.n_heads // ranks,
            n_kv_heads=max(1, config.n_kv_heads // ranks),
            hidden_dim=config.hidden_dim // ranks,
        )
        self.shapes = {name: self.weight(name).shape for name in whole.shapes}

    def cut(self, name: str) -> tuple[slice, slice]:
        """The rows and columns of a weight that this rank has; for a bias, rows are entries."""
        layer = name.split(".")[-2]
        whole, own = self.whole.config, self.config
        if layer in ("wk", "wv"):  # ranks with the same head read the same rows
            first = self.rank * whole.n_kv_heads // self.ranks * whole.head_dim
            return slice(first, first + own.n_kv_heads * whole.head_dim), ALL
        if layer == "output" and not whole.tie_embeddings:
            rows = output_rows(whole, self.rank, self.ranks)
            return slice(rows.start, rows.stop), ALL
        heads = own.n_heads * own.head_dim
        widths = {"wq": heads, "wo": heads, **dict.fromkeys(("w_gate", "w_up", "w_down"), own.hidden_dim)}
        if layer not in widths:
            return ALL, ALL
        part = slice(self.rank * widths[layer], (self.rank + 1) * widths[layer])
        return (ALL, part) if layer in SUMMED else (part, ALL)

    def weight(self, name: str, layout: Layout = "interleaved") -> Weight:
        part = self.whole.weight(name, layout)[self.cut(name)]
        if self.rank and name.endswith(("wo.bias", "w_down.bias")):
            return MemoryWeight(torch.zeros(part.shape))  # the parts are summed, and the bias must be added once
        return part

    def own_tokenizer(self) -> Tokenizer:
        return self.whole.tokenizer()


def sample_hash(checkpoint: Checkpoint) -> str:
    """A hash of all vectors and of the first row of each matrix, of three layers and of all that is outside layers.

    Training, or merging an adapter, changes the hash.
    """
    last = checkpoint.config.n_layers - 1
    layers = tuple(f"layers.{i}." for i in (0, last // 2, last))
    sample = [name for name in sorted(checkpoint.shapes) if not name.startswith("layers.") or name.startswith(layers)]
    weights = ((name, checkpoint.weight(name)) for name in sample)
    return digest((name, weight[: 1 if len(weight.shape) == 2 else None].floats()) for name, weight in weights)
