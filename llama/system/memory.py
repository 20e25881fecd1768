"""The memory that a run needs, the memory that is free, and an error if it does not fit, before any weight is read.

Without this check the system would kill the process or swap. A run needs memory for:

    weights      in the form they will have in memory: stored blocks, quantized here, or cast
    cache        keys and values of the tokens
    activations  intermediate results of one chunk of the prompt
    runtime      what torch allocates at its first matrix products: code, threads, kernel buffers

Free is the smallest amount that the machine and every limit on the process leave. A limit that the system does not
report is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MemoryLimitError
from .groups import control_groups, read_lines
from .limits import address_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch  # imported where it is needed: the doctor formats sizes before it knows whether torch can be imported

    from ..config import ModelConfig

GIB = 2**30
RUNTIME = 48 * 2**20  # measured: docs/guides/long-contexts.md
# In version 1 and 2 of control groups: the files with the limit and with the used bytes; the lines of the page cache
GROUP_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
GROUP_PAGES = {1: ("total_inactive_file", "total_active_file"), 2: ("inactive_file", "active_file")}
UNLIMITED = 2**60  # bytes; cgroups report a limit above this where none is set
SMALL = 64 * 2**20  # bytes; a smaller cache is allocated without checking what is free


@dataclass(frozen=True)
class Room:
    """Memory that is free under one limit.

    message    the end of a sentence that begins with the size and names the limit
    addresses  whether the limit counts address space, of which a mapped file already has its part
    """

    bytes: int
    message: str
    addresses: bool = False


@dataclass(frozen=True)
class Need:
    """Bytes of memory that a run needs at its peak; `mapped` bytes of the weights are pages of a mapped file."""

    weights: int
    cache: int
    activations: int
    mapped: int = 0
    runtime: int = RUNTIME

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations + self.runtime


# ---------------------------------------------------------------------------------------------------- needed memory
def cache_bytes(config: ModelConfig, tokens: int, itemsize: int, kind: str = "model", batch: int = 1) -> int:
    """Bytes of a KV cache (cache.KVCache) with `tokens` slots: entries of `itemsize` bytes, or 8 bits and scales."""
    if kind == "int8":
        scales = 2 * config.n_layers * config.n_kv_heads * tokens * 4
        return batch * (config.kv_cache_bytes(tokens, 1) + scales)
    return batch * config.kv_cache_bytes(tokens, itemsize)


def activation_bytes(
    config: ModelConfig, tokens: int, chunk: int, itemsize: int, kind: str = "model", batch: int = 1
) -> int:
    """An upper bound on the bytes of a forward pass of `chunk` tokens with `tokens` cached, without weights and cache.

    For each new token: its hidden state, that state normalized in float32, and the larger of the intermediate results
    of attention and of the feed-forward network. For each pair of a new token and a key: the mask as booleans and as
    floats; scores are not counted, since the fused kernels compute them in tiles. For each key of one layer: its
    dequantized values if the cache has 8 bits, and the second copy while the cache grows. The logits of one token. For
    each position: the table of RoPE and its angles.
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
    """An upper bound on the bytes of one token's logits and of sampling from them: four float32 copies."""
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
    """The memory that a run over `tokens` tokens, prompt and answer, needs; `weights` and `mapped` are bytes."""
    cache = cache_bytes(config, tokens, itemsize, kind, batch)
    return Need(weights, cache, activation_bytes(config, tokens, chunk, itemsize, kind, batch), mapped)


# ------------------------------------------------------------------------------------------------------ free memory
def rooms(device: torch.device | str = "cpu", root: Path = Path("/")) -> list[Room]:
    """The free memory under each limit on a device; empty if the system reports none. root contains proc and sys."""
    import torch

    kind = torch.device(device)
    if kind.type == "cuda":
        free, _ = torch.cuda.mem_get_info(kind)
        unused = torch.cuda.memory_reserved(kind) - torch.cuda.memory_allocated(kind)
        return [Room(free + unused, f"are free on {kind}")]
    return [*_machine(root), *_cgroups(root), *_addresses(root)]


def free_memory(device: torch.device | str = "cpu", root: Path = Path("/")) -> int | None:
    """Bytes free on a device under all limits; None if the system reports none."""
    return min((room.bytes for room in rooms(device, root)), default=None)


def _machine(root: Path) -> Iterator[Room]:
    for line in read_lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield Room(int(line.split()[1]) * 1024, "are free on this machine")
            return
    if root == Path("/") and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        # Other systems than Linux don't report free memory in a portable way; the total is an upper bound.
        yield Room(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "are in this machine")


def _cgroups(root: Path) -> Iterator[Room]:
    """The limits of the process's control group and of its ancestors, in version 1 and 2 of the interface.

    The page cache counts as used in a group, but is reclaimed first, so it counts as free here.
    """
    for version, group in control_groups("memory", root):
        limit, used = (_number(group / name) for name in GROUP_FILES[version])
        if limit is None or used is None or limit >= UNLIMITED:
            continue
        stat = dict(line.split() for line in read_lines(group / "memory.stat") if len(line.split()) == 2)
        files = sum(int(stat.get(name, 0)) for name in GROUP_PAGES[version])
        yield Room(max(0, limit - used + min(files, used)), "are left under the memory limit of this container")


def _addresses(root: Path) -> Iterator[Room]:
    limit = address_limit()
    fields = " ".join(read_lines(root / "proc/self/statm")).split()
    if limit is not None and fields:
        used = int(fields[0]) * os.sysconf("SC_PAGE_SIZE")
        message = "of address space are left under the limit of this shell (ulimit -v)"
        yield Room(max(0, limit - used), message, addresses=True)


def _number(path: Path) -> int | None:
    """The integer in a file; None for "max" or a missing file."""
    text = "".join(read_lines(path)).strip()
    return int(text) if text.isdigit() else None


# --------------------------------------------------------------------------------------------------------- the check
NO_CHECK = "or skip this check (--no-memory-check)"


def check(what: str, need: Need, found: Sequence[Room], remedies: Sequence[str], ranks: int = 1) -> None:
    """Raise MemoryLimitError, with the sizes and the remedies, if a need exceeds the free memory under a limit.

    ranks  number of processes with the same need that share the memory
    """
    for room in sorted(found, key=lambda room: room.bytes):
        needed = need.total - need.mapped if room.addresses else need.total
        if needed > (room.bytes if room.addresses else room.bytes // ranks):
            each = "" if ranks == 1 else f" in each of {ranks} processes"
            parts = (
                f"{format_bytes(need.weights)} weights, {format_bytes(need.cache)} KV cache,"
                f" {format_bytes(need.activations + need.runtime)} working memory"
            )
            raise MemoryLimitError(
                f"{what} needs {format_bytes(needed)} of memory{each} ({parts}), but only {format_bytes(room.bytes)}"
                f" {room.message}; {', '.join([*remedies, NO_CHECK])}"
            )


def check_cache(size: int, tokens: int, found: Sequence[Room]) -> None:
    """Raise MemoryLimitError if `size` more bytes for a KV cache of `tokens` slots are not free."""
    for room in sorted(found, key=lambda room: room.bytes):
        if size > room.bytes:
            raise MemoryLimitError(
                f"a KV cache for {tokens:,} tokens needs {format_bytes(size)} more memory, but only"
                f" {format_bytes(room.bytes)} {room.message}; shorten the text, lower max_seq_len (--max-seq-len),"
                f" store keys and values in 8 bits (--kv-cache int8), {NO_CHECK}"
            )


def format_bytes(size: int) -> str:
    """A number of bytes in GiB, or in MiB below that."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.0f} MiB"


def remedies(need: Need, dtype: torch.dtype, quantize: str | None, kv_cache: str) -> list[str]:
    """What reduces the need, the largest part first; the other arguments are the run's, as `loader.load` has them."""
    import torch

    found = []
    if quantize is None and need.weights > need.cache / 4:
        found.append("quantize the weights (--quantize int4)")
        if dtype == torch.float32:
            found.append("use half the bytes (--dtype bfloat16)")
    if need.cache > need.weights / 8:
        found.append("use a shorter prompt or a lower max_new_tokens (--max-new-tokens) or max_seq_len (--max-seq-len)")
        if kv_cache != "int8":
            found.append("store keys and values in 8 bits (--kv-cache int8)")
    return found or ["use a smaller model"]


def check_growth(size: int, tokens: int, device: torch.device) -> None:
    """`check_cache` on a device, for a KV cache that will hold `tokens` slots (cache.MemoryCheck)."""
    if size > SMALL and device.type != "meta":
        check_cache(size, tokens, rooms(device))
