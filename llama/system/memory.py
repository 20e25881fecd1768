"""What a run needs of memory, and what is free: too much is refused in words before anything is read.

Otherwise the system ends the process without a word, or turns to swapping and stands still. What is needed:

    weights      as they will be held: of a file's own blocks, rounded, or cast (weights.held)
    cache        keys and values of the tokens
    activations  what a chunk of the prompt has in the air at once
    runtime      what torch takes at its first products: code, threads, buffers of its kernels

What is free is the least of what the machine and every limit around the process leave; a limit that the system does
not tell of is none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import MemoryLimitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..config import ModelConfig

GIB = 2**30
RUNTIME = 48 * 2**20  # measured: docs/long-contexts.md
UNLIMITED = 2**60  # cgroups write a limit that nobody reaches where there is none
SMALL = 64 * 2**20  # a cache below this is made without asking what is free


@dataclass(frozen=True)
class Room:
    """Memory that is free under one limit.

    message    what is free and which limit says so, for people
    addresses  whether the limit counts addresses: a file that is mapped already has its own
    """

    bytes: int
    message: str
    addresses: bool = False


@dataclass(frozen=True)
class Need:
    """Bytes of memory that a run takes at its peak; `mapped` of the weights stay in the file they are mapped from."""

    weights: int
    cache: int
    activations: int
    mapped: int = 0
    runtime: int = RUNTIME

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations + self.runtime


# --------------------------------------------------------------------------------------------------- what is needed
def cache_bytes(config: ModelConfig, tokens: int, itemsize: int, kind: str = "model", batch: int = 1) -> int:
    """Bytes of a KV cache (cache.KVCache) with `tokens` slots: of `itemsize` bytes, or in 8 bits with their scales."""
    if kind == "int8":
        scales = 2 * config.n_layers * config.n_kv_heads * tokens * 4
        return batch * (config.kv_cache_bytes(tokens, 1) + scales)
    return batch * config.kv_cache_bytes(tokens, itemsize)


def activation_bytes(
    config: ModelConfig, tokens: int, chunk: int, itemsize: int, kind: str = "model", batch: int = 1
) -> int:
    """A bound on what a forward pass of `chunk` tokens holds besides weights and cache, once `tokens` are cached.

    Of each new token: its hidden state, that state normed in float32, and the larger of what attention and what the
    feed-forward network have at once. For each pair of a new token and a key: the mask as truth values and as numbers.
    Scores are not kept, since the fused kernels work through them in tiles. Of each key, in one layer: in 8 bits the
    numbers it stands for, and what a cache that grows has twice. At last the logits of one token. Of each position: the
    table of RoPE and what it is made of.
    """
    T, S = min(chunk, tokens), tokens
    q, kv = config.n_heads * config.head_dim, 2 * config.n_kv_heads * config.head_dim
    attention = (q + kv) * (itemsize + 12) + q * itemsize  # before and after the rotation, which is float32
    feed_forward = 4 * config.hidden_dim * itemsize  # gate, silu(gate), up, their product
    new = T * (config.dim * (3 * itemsize + 8) + max(attention, feed_forward))
    mask = T * S * (1 + itemsize)
    keys = S * kv * (itemsize + 4) if kind == "int8" else 0
    growth = cache_bytes(config, S, itemsize, kind) // config.n_layers
    table = S * config.head_dim // 2 * (8 + 16)
    return batch * (new + max(mask + keys, growth) + logits_bytes(config)) + table


def logits_bytes(config: ModelConfig) -> int:
    """A bound on what the logits of one token take, and what choosing by them does: four times in float32."""
    return config.vocab_size * 4 * 4


def need(
    config: ModelConfig,
    weights: int,
    *,
    itemsize: int,
    tokens: int,
    chunk: int = 256,
    kind: str = "model",
    batch: int = 1,
    mapped: int = 0,
) -> Need:
    """What a run over so many tokens, prompt and answer, takes; weights and mapped are bytes."""
    cache = cache_bytes(config, tokens, itemsize, kind, batch)
    return Need(weights, cache, activation_bytes(config, tokens, chunk, itemsize, kind, batch), mapped)


# ------------------------------------------------------------------------------------------------------ what is free
def rooms(device: torch.device | str = "cpu", root: Path = Path("/")) -> list[Room]:
    """What every limit on a device leaves; empty where the system tells nothing. root is where /proc and /sys hang."""
    kind = torch.device(device)
    if kind.type == "cuda":
        free, _ = torch.cuda.mem_get_info(kind)
        unused = torch.cuda.memory_reserved(kind) - torch.cuda.memory_allocated(kind)
        return [Room(free + unused, f"are free on {kind}")]
    return [*_machine(root), *_cgroups(root), *_addresses(root)]


def free_memory(device: torch.device | str = "cpu", root: Path = Path("/")) -> int | None:
    """Bytes free on a device under all limits; None where the system tells nothing."""
    return min((room.bytes for room in rooms(device, root)), default=None)


def _machine(root: Path) -> Iterator[Room]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield Room(int(line.split()[1]) * 1024, "are free on this machine")
            return
    if root == Path("/") and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        # Elsewhere than on Linux what is free is hard to tell; but no more than all of it.
        yield Room(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "are in this machine")


def _cgroups(root: Path) -> Iterator[Room]:
    """Of the process' control group and of each above it, in either version of the interface.

    What files have in memory counts as used there, but goes first; so it is free. A limit may lie at the mount itself:
    inside a container the path of the group may be another than outside.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names: Sequence[str]
        if controllers == "memory" or "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
        elif controllers == "":
            mount = root / "sys/fs/cgroup"
            names = ("memory.max", "memory.current", "inactive_file", "active_file")
        else:
            continue
        parts = [part for part in path.strip().split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            group = mount.joinpath(*parts[:depth])
            limit, used = (_number(group / name) for name in names[:2])
            if limit is None or used is None or limit >= UNLIMITED:
                continue
            stat = dict(line.split() for line in _lines(group / "memory.stat") if len(line.split()) == 2)
            files = sum(int(stat.get(name, 0)) for name in names[2:])
            yield Room(max(0, limit - used + min(files, used)), "are left under the memory limit of this container")


def _addresses(root: Path) -> Iterator[Room]:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    fields = " ".join(_lines(root / "proc/self/statm")).split()
    if limit != resource.RLIM_INFINITY and fields:
        used = int(fields[0]) * os.sysconf("SC_PAGE_SIZE")
        yield Room(max(0, limit - used), "of addresses are left by the limit of this shell (ulimit -v)", addresses=True)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", and where there is none."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


# --------------------------------------------------------------------------------------------------------- the check
def check(what: str, need: Need, found: Sequence[Room], remedies: Sequence[str], ranks: int = 1) -> None:
    """Raise MemoryLimitError where a need does not fit into every room, with the numbers and what to lower.

    ranks  processes that need the same and share the rooms
    """
    for room in sorted(found, key=lambda room: room.bytes):
        asked = need.total - need.mapped if room.addresses else need.total
        if asked > (room.bytes if room.addresses else room.bytes // ranks):
            each = "" if ranks == 1 else f" in each of {ranks} processes"
            parts = (
                f"{format_bytes(need.weights)} weights, {format_bytes(need.cache)} KV cache,"
                f" {format_bytes(need.activations + need.runtime)} to compute"
            )
            raise MemoryLimitError(
                f"{what} needs {format_bytes(asked)} of memory{each} ({parts}), and {format_bytes(room.bytes)}"
                f" {room.message}; {', '.join([*remedies, NO_CHECK])}"
            )


NO_CHECK = "or leave this check out (--no-memory-check)"


def check_cache(size: int, tokens: int, found: Sequence[Room]) -> None:
    """Raise MemoryLimitError where `size` more bytes for a KV cache of `tokens` slots are not free."""
    for room in sorted(found, key=lambda room: room.bytes):
        if size > room.bytes:
            raise MemoryLimitError(
                f"a KV cache for {tokens:,} tokens needs {format_bytes(size)} more memory, and"
                f" {format_bytes(room.bytes)} {room.message};"
                f" shorten the text or --max-seq-len, keep it in 8 bits (--kv-cache int8), {NO_CHECK}"
            )


def format_bytes(size: int) -> str:
    """A number of bytes in GiB, or in MiB below that."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.0f} MiB"


def remedies(need: Need, dtype: torch.dtype, quantize: str | None, kv_cache: str) -> list[str]:
    """What to lower, by what takes the most; the rest are settings of the run as `loader.load` has them."""
    found = []
    if quantize is None and need.weights > need.cache / 4:
        found.append("round the weights (--quantize int4)")
        if dtype == torch.float32:
            found.append("halve them (--dtype bfloat16)")
    if need.cache > need.weights / 8:
        found.append("take a shorter prompt, --max-new-tokens or --max-seq-len")
        if kv_cache != "int8":
            found.append("keep keys and values in 8 bits (--kv-cache int8)")
    return found or ["take a smaller model"]
