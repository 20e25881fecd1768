"""The memory that a run needs, the memory that is free, and an error if it does not fit, before any weight is read.

Without this check the system would kill the process or swap. Free is the smallest amount that the machine and every
limit on the process leave: containers set limits by Linux's control groups. A limit that is not reported is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import MemoryLimitError

if TYPE_CHECKING:
    import torch  # imported where it is needed: the doctor formats sizes before it knows whether torch can be imported

    from ..config import ModelConfig

GIB = 2**30
RUNTIME = 48 * 2**20  # what torch allocates at its first matrix products; measured: docs/guides/long-contexts.md
SMALL = 64 * 2**20  # bytes; a smaller cache is allocated without checking what is free
REMEDIES = (
    "quantize the weights (--quantize int4), use a shorter context (--max-seq-len) or a cache of 8 bits"
    " (--kv-cache int8), or skip this check (--no-memory-check)"
)


class Room(NamedTuple):
    """Memory that is free under one limit. The message names the limit, after the size: 3 GiB "are free on cuda:0"."""

    bytes: int
    message: str


def cache_bytes(config: ModelConfig, tokens: int, itemsize: int, kind: str = "model", batch: int = 1) -> int:
    """Bytes of a KV cache (cache.KVCache) with `tokens` slots: entries of `itemsize` bytes, or 8 bits and scales."""
    scales = 2 * config.n_layers * config.n_kv_heads * tokens * 4 if kind == "int8" else 0
    return batch * (config.kv_cache_bytes(tokens, 1 if scales else itemsize) + scales)


def activation_bytes(config: ModelConfig, tokens: int, itemsize: int, kind: str, chunk: int) -> int:
    """An upper bound on the bytes of a forward pass of `chunk` tokens with `tokens` cached, without weights and cache.

    The scores of attention are not counted, since the fused kernels compute them in tiles.
    """
    T, S = min(chunk, tokens), tokens
    q, kv = config.n_heads * config.head_dim, 2 * config.n_kv_heads * config.head_dim
    attention = (q + kv) * (itemsize + 12) + q * itemsize  # before and after the rotation, which is float32
    feed_forward = 4 * config.hidden_dim * itemsize  # gate, silu(gate), up, their product
    new = T * (config.dim * (3 * itemsize + 8) + max(attention, feed_forward))  # 8: the hidden state in float32, twice
    mask = T * S * (1 + itemsize)  # as booleans and as floats
    keys = S * kv * (itemsize + 4) if kind == "int8" else 0  # dequantized values of one layer
    growth = cache_bytes(config, S, itemsize, kind) // config.n_layers  # the second copy while a layer's cache grows
    table = S * config.head_dim // 2 * (8 + 16)  # RoPE and its angles
    return new + max(mask + keys, growth) + logits_bytes(config) + table


def logits_bytes(config: ModelConfig) -> int:
    """An upper bound on the bytes of one token's logits and of sampling from them: four float32 copies."""
    return config.vocab_size * 4 * 4


def free_memory(device: torch.device | str = "cpu", root: Path = Path("/")) -> Room | None:
    """The free memory of a device under the tightest limit; None if none is known. root contains proc and sys."""
    import torch

    kind = torch.device(device)
    if kind.type == "cuda":
        free, _ = torch.cuda.mem_get_info(kind)
        unused = torch.cuda.memory_reserved(kind) - torch.cuda.memory_allocated(kind)
        return Room(free + unused, f"are free on {kind}")
    available = re.search(r"^MemAvailable:\s*(\d+) kB", read(root / "proc/meminfo"), re.MULTILINE)
    found = [Room(int(available[1]) * 1024, "are free on this machine")] if available else []
    files = ("memory.max", "memory.current", "memory.limit_in_bytes", "memory.usage_in_bytes")  # both versions
    for group, most, used in limits("memory", root, *files):
        stat = dict(line.split() for line in read(group / "memory.stat").splitlines())
        # The page cache counts as used, but is reclaimed first
        pages = (stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))
        left = most - used + min(sum(map(int, pages)), used)
        found.append(Room(max(0, left), "are left under the memory limit of this container"))
    return min(found, default=None)


def limits(controller: str, root: Path, *files: str) -> Iterator[tuple[Path, int, int]]:
    """The control groups of this process, from its own to the root, each with the two numbers in its `files`.

    `files` names the files of both cgroup versions. A group whose files have other words, such as "max", is left
    out. Inside a container, the path of the group may be its path on the host, where nothing is found; then the root of
    the mount is the container's group.
    """
    for line in read(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controller in controllers.split(",") or not controllers:  # version 2 has no list of controllers
            mount = root / "sys/fs/cgroup" / (controllers and controller)
            own = mount / path.strip("/")
            for group in (own, *own.parents):
                words = [word for file in files for word in read(group / file).split()]
                if len(words) == 2 and all(map(str.isdecimal, words)):
                    yield group, int(words[0]), int(words[1])


def read(path: Path) -> str:
    """The text of a file; empty if it can't be read."""
    try:
        return path.read_text(errors="surrogateescape")
    except (OSError, ValueError):
        return ""


def check(what: str, weights: int, cache: int, activations: int, device: torch.device, ranks: int = 1) -> None:
    """Raise MemoryLimitError if a run, with these bytes in each of `ranks` processes, does not fit on a device."""
    needed, working = weights + cache + activations + RUNTIME, activations + RUNTIME
    each = "" if ranks == 1 else f" in each of {ranks} processes"
    parts = f"{format_bytes(weights)} weights, {format_bytes(cache)} KV cache, {format_bytes(working)} working memory"
    _refuse(needed * ranks, f"{what} needs {format_bytes(needed)} of memory{each} ({parts})", device)


def check_growth(size: int, tokens: int, device: torch.device) -> None:
    """Raise MemoryLimitError if `size` more bytes for a KV cache of `tokens` slots are not free (cache.MemoryCheck)."""
    if size > SMALL and device.type != "meta":
        _refuse(size, f"a KV cache for {tokens:,} tokens needs {format_bytes(size)} more memory", device)


def _refuse(size: int, need: str, device: torch.device) -> None:
    """Raise MemoryLimitError if `size` bytes are not free."""
    room = free_memory(device)
    if room is not None and size > room.bytes:
        free = f"{format_bytes(room.bytes)} {room.message}"
        raise MemoryLimitError(f"{need}, but only {free}; {REMEDIES}")


def format_bytes(size: int) -> str:
    """A number of bytes in GiB, or in MiB below that."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.0f} MiB"
