"""One model in several processes, on one host or many: the only file with collectives (torch.distributed).

Rank 0 runs the program as if it were alone. Before it runs the blocks or the output layer, it sends the arguments to
the other ranks as an order, and they make the same call:

    rank 0                                           ranks 1, 2, ...
    runner.run(tokens, .., cache)   ──── order ───►  follow: runner.run(tokens, .., its own cache)
        embedding, wo, w_down       ◄─ all_reduce ─►     embedding, wo, w_down
    model.output(h)                 ── order, h ──►  follow: its rows of the vocabulary
        logits                      ◄─── gather ────     its logits

So only rank 0 reads the prompt, samples tokens and decides when to stop. sharding.py defines which rank holds which
weights. gloo carries CPU tensors, nccl carries GPU tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import causal_mask
from ..cache import KVCache, MemoryCheck
from ..config import ModelConfig
from ..errors import LlamaError, ParallelError, UsageError
from ..model import Runner, Transformer
from .runtime import pick_device
from .sharding import Rank

distributed: Any = dist  # its type annotations omit the stores
Store = Any

JOIN_SECONDS = 120  # limit for all ranks to connect; CLEARLLAMA_JOIN_SECONDS overrides it
WORK_SECONDS = 1800  # limit of one collective in a forward pass: a stage waits while the previous one computes
IDLE_DAYS = 20  # limit of the wait for an order: a user may take long. A rank that ends is detected at once anyway
FRAME = 2048  # bytes of an order's first message; the rest follows in a second. JSON: unpickling could run sent code
LINE = 8192  # bytes of a message in `exchange`


class World:
    """The processes that share a model.

    rank         this process among them
    device       the device of its part of the model
    fingerprint  facts that must be the same in all ranks; `all_succeed` compares them
    """

    def __init__(self, rank: Rank, device: torch.device):
        self.rank, self.device = rank, device
        self.fingerprint: list[str] = []
        self.loaded = False  # whether all ranks have passed `all_succeed`
        self.broken: str | None = None  # the reason why the ranks are out of step
        self.lost = False  # whether the reason is that another rank ended
        self.lock = Lock()  # held by a thread of rank 0 from an order until it is carried out
        work, idle = timedelta(seconds=WORK_SECONDS), timedelta(days=IDLE_DAYS)
        tensor, ranks = rank.tensor, range(rank.tensor * rank.pipeline)
        self.orders = dist.new_group(timeout=idle, backend="gloo")
        self.all = dist.new_group(timeout=work)
        groups = [
            dist.new_group(list(ranks[s : s + tensor]), timeout=work) for s in ranks[::tensor]
        ]  # every rank creates all groups
        self.stage = groups[rank.stage]

    def __str__(self) -> str:
        stages = f" in {self.rank.pipeline} stages" if self.rank.pipeline > 1 else ""
        return f"{self.size} processes{stages}"

    def break_off(self, error: Exception) -> ParallelError:
        """Mark the ranks as out of step, and return the error to raise."""
        self.broken = " ".join(str(error).split())[:200] or type(error).__name__
        self.lost = isinstance(error, dist.DistError) or "gloo" in self.broken or "NCCL" in self.broken
        if self.lost:
            return ParallelError(f"another rank ended or can't be reached ({self.broken}); restart all ranks")
        return ParallelError(f"rank {self.rank.number} failed ({self.broken}); restart all ranks")

    @property
    def leader(self) -> bool:
        return self.rank.number == 0

    @property
    def on_this_host(self) -> int:
        """The number of ranks that share this host's memory."""
        return int(os.environ.get("LOCAL_WORLD_SIZE") or self.size)

    @property
    def size(self) -> int:
        return self.rank.tensor * self.rank.pipeline

    # ------------------------------------------------------------------------------------------- rank 0 and the others
    def send_order(self, order: Mapping[str, Any]) -> None:
        """Send an order from rank 0 to all other ranks."""
        data = json.dumps(order, separators=(",", ":")).encode()
        framed = len(data).to_bytes(8, "little") + data
        framed += bytes(max(0, FRAME - len(framed)))
        dist.broadcast(_bytes(framed[:FRAME]), 0, self.orders)
        if len(framed) > FRAME:
            dist.broadcast(_bytes(framed[FRAME:]), 0, self.orders)

    def receive_order(self) -> Any:
        """Wait for the next order of rank 0."""
        frame = torch.empty(FRAME, dtype=torch.uint8)
        dist.broadcast(frame, 0, self.orders)
        framed = bytes(frame.tolist())
        length = int.from_bytes(framed[:8], "little")
        if length + 8 > FRAME:
            rest = torch.empty(length + 8 - FRAME, dtype=torch.uint8)
            dist.broadcast(rest, 0, self.orders)
            framed += bytes(rest.tolist())
        return json.loads(framed[8 : 8 + length])

    def exchange(self, message: str) -> list[str]:
        """Send a message to all ranks; return the messages of all ranks, in order of rank."""
        data = message.encode()[:LINE].ljust(LINE, b" ")
        frames = [torch.empty(LINE, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(frames, _bytes(data), group=self.orders)
        return [bytes(frame.tolist()).decode(errors="replace").strip() for frame in frames]

    # ------------------------------------------------------------------------------------------------ the collectives
    def sum(self, x: Tensor) -> Tensor:
        """Sum x over the ranks of the stage, in place."""
        dist.all_reduce(x, group=self.stage)
        return x

    def gather_columns(self, y: Tensor, widths: list[int]) -> Tensor:
        """On rank 0, concatenate y (.., widths[part]) of all parts of the stage; other ranks return their y, padded."""
        y = F.pad(y, (0, max(widths) - y.shape[-1])).contiguous()
        parts = [torch.empty_like(y) for _ in widths] if self.leader else None
        dist.gather(y, parts, 0, self.stage)
        if parts is None:
            return y
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1)

    def send(self, h: Tensor) -> None:
        """Send h to the rank of the same part in the next stage; part 0 of the last stage sends to rank 0."""
        rank = self.rank
        if rank.stage + 1 < rank.pipeline:
            dist.send(h.contiguous(), rank.number + rank.tensor, self.all)
        elif rank.part == 0:
            dist.send(h.contiguous(), 0, self.all)

    def receive(self, h: Tensor) -> Tensor:
        """Receive into h what the previous stage sent; on rank 0 that is the last stage."""
        dist.recv(h, (self.rank.number - self.rank.tensor) % self.size, self.all)
        return h


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# --------------------------------------------------------------------------------------------------------- joining
def join(rank: Rank, device: str | torch.device | None = None, store: Store | None = None) -> World:
    """Connect to the other ranks, `rank.tensor * rank.pipeline` in all.

    They connect through `store`; None: the one that torchrun's environment names (MASTER_ADDR, MASTER_PORT). Each uses
    the GPU of its LOCAL_RANK if the host has GPUs, unless `device` is given. Raises ParallelError if the ranks do not
    connect in time, UsageError if the device is not available.
    """
    size, local = rank.tensor * rank.pipeline, int(os.environ.get("LOCAL_RANK", rank.number))
    chosen = pick_device(device)
    if chosen.type == "cuda":
        if chosen.index not in (None, 0) or local >= torch.cuda.device_count():
            raise UsageError(
                f"rank {rank.number} needs GPU {local}, and this host has {torch.cuda.device_count()} GPUs; start one"
                " rank per GPU, with --device cuda, or use --device cpu"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    elif chosen.type != "cpu":
        raise UsageError(f"several processes can share a model on cpu or cuda, not on {chosen.type}")
    if int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == size:  # one host: nothing needs to be reachable from outside
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    seconds = join_seconds()
    try:
        store = rendezvous(rank.number, size, timedelta(seconds=seconds)) if store is None else store
        store.set_timeout(timedelta(seconds=seconds))
        dist.init_process_group(
            backend, store=store, rank=rank.number, world_size=size, timeout=timedelta(seconds=seconds)
        )
        return World(rank, chosen)
    except LlamaError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ParallelError(
            f"rank {rank.number} of {size} did not connect to the others within {seconds:g} s ({reason}); check"
            " that all ranks are started with the same MASTER_ADDR and MASTER_PORT and can reach each other"
        ) from error


def join_seconds() -> float:
    """How long ranks wait for each other at the start. Raises UsageError if the environment's value is invalid."""
    value = os.environ.get("CLEARLLAMA_JOIN_SECONDS", str(JOIN_SECONDS))
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0
    if not 0 < seconds < 1e6:
        raise UsageError(f"CLEARLLAMA_JOIN_SECONDS is {value!r:.40}; expected a number of seconds above 0")
    return seconds


def rendezvous(rank: int, size: int, timeout: timedelta) -> Store:
    """The store that the environment names; rank 0 opens it unless torchrun has.

    PyTorch's store listens on all interfaces. For a loopback address it gets a socket that listens on loopback only.
    """
    if path := os.environ.get("CLEARLLAMA_STORE"):
        return distributed.FileStore(path, size)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    prefix = "clearllama"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun has opened it
        tcp = distributed.TCPStore(host, port, size, False, timeout, wait_for_workers=False)
        return distributed.PrefixStore(f"{prefix}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", tcp)
    listen = None
    if rank == 0:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if ip_address(address[4][0]).is_loopback:
            with socket.socket(address[0], socket.SOCK_STREAM) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    listener.bind(address[4])
                    listener.listen(128)
                except OSError as error:
                    raise ParallelError(
                        f"rank 0 can't open MASTER_PORT {port} of {host}: {error.strerror}; choose another port"
                    ) from None
                listen = listener.detach()  # the store closes it
    tcp = distributed.TCPStore(
        host, port, size, rank == 0, timeout, wait_for_workers=False, use_libuv=listen is None, master_listen_fd=listen
    )
    return distributed.PrefixStore(prefix, tcp)


@contextmanager
def all_succeed(world: World | None) -> Iterator[None]:
    """A block that each rank runs alone, such as loading: afterwards either all ranks continue or all raise.

    A rank raises its own error if it has one, else ParallelError with the error of the lowest rank that failed. Ranks
    with different fingerprints, for example because they read different files, raise ParallelError too.
    """
    if world is None:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    report = {"error": failure and (str(failure)[:500] or type(failure).__name__), "fingerprint": world.fingerprint}
    with _connected(world):
        reports = [json.loads(text) for text in world.exchange(json.dumps(report))]
    if failure is not None:
        raise failure
    for rank, other in enumerate(reports):
        if other["error"] is not None:
            raise ParallelError(f"rank {rank}: {other['error']}")
        if other["fingerprint"] != reports[0]["fingerprint"]:
            pairs = zip(other["fingerprint"], reports[0]["fingerprint"], strict=False)
            theirs, ours = next(pair for pair in pairs if pair[0] != pair[1])
            raise ParallelError(
                f"rank {rank} has {theirs}, but rank 0 has {ours}; start all ranks with the same model and options"
            )
    world.loaded = True


@contextmanager
def _connected(world: World) -> Iterator[None]:
    """Convert PyTorch's errors about a lost rank to a ParallelError; afterwards the world can't be used."""
    try:
        yield
    except ParallelError:
        raise
    except Exception as error:
        raise world.break_off(error) from error
    except BaseException:
        world.broken = "interrupted"
        raise


def leave(world: World) -> None:
    """End the run: rank 0 tells the other ranks to end, and every rank closes its connections."""
    if world.leader and world.broken is None:
        with no_interrupt(), _connected(world):
            world.send_order({"do": "end"})
    if world.broken is None:
        dist.destroy_process_group()


@contextmanager
def no_interrupt() -> Iterator[None]:
    """Delay an interrupt until the end of the block: an operation of all ranks must be completed by all of them."""
    pending: list[int] = []
    try:
        previous = signal.signal(signal.SIGINT, lambda number, frame: pending.append(number))
    except ValueError:  # only the main thread is interrupted, and this is another one
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            signal.raise_signal(signal.SIGINT)


# ----------------------------------------------------------------------------------------------------------- cache
class SharedCache(KVCache):
    """A cache of rank 0 that the other ranks mirror: it records the rows that are copied, and the parent of a view.

    moves    (source row, or None for zeros; target row; length, negative for an exchange) since the last forward pass
    view_of  parent and first row, if this is a view by `rows`
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.moves: list[tuple[int | None, int, int]] = []
        self.view_of: tuple[SharedCache, int] | None = None

    def rows(self, first: int, last: int, length: int = 0) -> KVCache:
        part = super().rows(first, last, length)
        part.view_of = self, first  # type: ignore[attr-defined]
        return part

    def copy_row(self, source: int, target: int, length: int) -> None:
        self.moves.append((source, target, length))
        super().copy_row(source, target, length)

    def swap_rows(self, a: int, b: int, length: int) -> None:
        self.moves.append((a, b, -length))
        super().swap_rows(a, b, length)

    def clear_row(self, row: int) -> None:
        self.moves.append((None, row, 0))
        super().clear_row(row)


# ---------------------------------------------------------------------------------------------------------- layers
class ParallelEmbedding(nn.Module):
    """An embedding whose rows are divided among the ranks of the stage. (B, T) -> (B, T, C)."""

    def __init__(self, inner: nn.Module, rows: slice, world: World):
        super().__init__()
        self.inner, self.rows, self.world = inner, rows, world

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self.rows.start
        inside = (tokens >= self.rows.start) & (tokens < self.rows.stop)  # (B, T)
        h = self.inner(own.where(inside, 0))  # (B, T, C)
        return self.world.sum(h.masked_fill(~inside.unsqueeze(-1), 0))


class RowParallel(nn.Module):
    """A linear layer whose inputs are divided among the ranks of the stage. (.., K / N) -> (.., N_out) on each rank."""

    def __init__(self, inner: nn.Module, world: World):
        super().__init__()
        self.inner, self.world = inner, world

    def forward(self, x: Tensor) -> Tensor:
        return self.world.sum(self.inner(x).contiguous())


class GatheredOutput(nn.Module):
    """An output layer whose rows are divided among the ranks of the first stage. On rank 0: (.., C) -> (.., V)."""

    def __init__(self, inner: nn.Module, widths: list[int], world: World):
        super().__init__()
        self.inner, self.widths, self.world = inner, widths, world

    def forward(self, h: Tensor) -> Tensor:
        world = self.world
        with world.lock, no_interrupt(), _connected(world):
            world.send_order({"do": "output", "shape": list(h.shape)})
            return self.share(h)

    def share(self, h: Tensor) -> Tensor:
        """Broadcast h of rank 0, gather the logits of all ranks on rank 0."""
        h = h.contiguous()
        dist.broadcast(h, 0, self.world.stage)
        return self.world.gather_columns(self.inner(h), self.widths)


# --------------------------------------------------------------------------------------------------- one forward pass
def share(model: Transformer, config: ModelConfig, world: World, **settings: Any) -> Runner:
    """Replace layers in one rank's slice of a model by parallel ones, in place; return the runner to set.

    config is the complete model's; settings are those of `Runner`.
    """
    rank = world.rank
    if rank.tensor > 1:
        blocks: Any = model.layers
        for block in blocks:
            block.set_submodule("attention.wo", RowParallel(block.attention.wo, world))
            block.set_submodule("feed_forward.w_down", RowParallel(block.feed_forward.w_down, world))
        if rank.stage == 0:
            rows = [rank.vocabulary(config, part) for part in range(rank.tensor)]
            widths = [part.stop - part.start for part in rows]
            model.set_submodule("tok_embeddings", ParallelEmbedding(model.tok_embeddings, rows[rank.part], world))
            model.set_submodule("output", GatheredOutput(model.output, widths, world))
    model.config = config
    runner = (LeaderRunner if world.leader else StageRunner)(world, **settings)
    weight, kind = model.norm.weight, runner.cache_kind
    facts = str(config), f"{weight.dtype} on {weight.device.type}", f"KV cache {kind}", model.rope.form
    world.fingerprint += [f"{fact[:200]} ({hashlib.sha256(fact.encode()).hexdigest()[:8]})" for fact in facts]
    return runner


class StageRunner(Runner):
    """Runs the layers of one pipeline stage. Rank 0 returns the last stage's h, normed."""

    distributed = True

    def __init__(self, world: World, cache_kind: str = "model", check_memory: MemoryCheck | None = None):
        super().__init__(cache_kind, check_memory)
        self.world = world

    def run(
        self,
        model: Transformer,
        tokens: Tensor,
        positions: Tensor,
        keys: Tensor | None,
        seq_len: int,
        cache: KVCache | None,
    ) -> Tensor:
        world = self.world
        freqs_cis = model.rope.freqs_cis(positions, seq_len)  # (T, D/2) or (B, T, D/2)
        mask = None if keys is None else causal_mask(positions, keys)  # (T, S) or (B, 1, T, S)
        if world.rank.stage == 0:
            h = model.tok_embeddings(tokens)  # (B, T, C)
        else:
            h = world.receive(model.norm.weight.new_empty(*tokens.shape, model.config.dim))  # (B, T, C)
        for i, block in enumerate(model.layers):
            h = block(h, freqs_cis, mask, positions, None if cache is None else cache.layers[i])
        if world.rank.pipeline > 1:
            world.send(h)
            if world.leader:
                h = world.receive(torch.empty_like(h))
        return model.norm(h)


class LeaderRunner(StageRunner):
    """The runner of rank 0: sends the arguments of `run` to the other ranks, then runs its own stage.

    `Transformer.hidden` has checked the arguments by then, so invalid ones never reach the other ranks. An error in
    `run`, for example too little memory on one rank, leaves the ranks out of step.
    """

    cache_type = SharedCache

    def __init__(self, world: World, cache_kind: str = "model", check_memory: MemoryCheck | None = None):
        super().__init__(world, cache_kind, check_memory)
        self.names: weakref.WeakKeyDictionary[KVCache, int] = weakref.WeakKeyDictionary()
        self.created = 0  # number of names assigned so far
        self.deleted: list[int] = []  # names of caches that no longer exist

    def run(
        self,
        model: Transformer,
        tokens: Tensor,
        positions: Tensor,
        keys: Tensor | None,
        seq_len: int,
        cache: KVCache | None,
    ) -> Tensor:
        world = self.world
        with world.lock:
            if world.broken is not None:
                raise ParallelError(f"a rank failed in an earlier call ({world.broken}); restart all ranks")
            model.rope.freqs_cis(positions[:0], seq_len)  # extends the table, or raises before the others are involved
            order = {
                "do": "run",
                "tokens": tokens.tolist(),
                "positions": positions.tolist(),
                "keys": None if keys is None else keys.shape[-1],
                "seq_len": seq_len,
                "cache": None if cache is None else self.describe(cache),
            }
            with no_interrupt():
                with _connected(world):
                    deleted, self.deleted = self.deleted, []
                    world.send_order({**order, "deleted": deleted})
                try:
                    return super().run(model, tokens, positions, keys, seq_len, cache)
                except Exception as error:
                    raise world.break_off(error) from error

    def describe(self, cache: KVCache) -> dict[str, Any]:
        """What the other ranks need to mirror a cache: its name, its shape, its copied rows, and the filled slots."""
        parent, first = cache.view_of if isinstance(cache, SharedCache) and cache.view_of else (cache, 0)
        if not isinstance(parent, SharedCache) or parent not in self.names:
            raise UsageError(
                "a cache of a model in several processes must be made by model.new_cache(), not by copying"
            )
        moves, parent.moves = parent.moves, []
        return {
            "name": self.names[parent],
            "shape": [parent.max_len, parent.batch, parent.fixed],
            "slots": parent.slots,
            "moves": moves,
            "rows": None if parent is cache else [first, first + cache.batch],
            "end": cache.layers[0].visible,
        }

    def new_cache(self, model: Transformer, max_len: int | None, batch: int, fixed: bool | None) -> KVCache:
        """`Runner.new_cache`, and a name by which the other ranks know the cache."""
        cache = super().new_cache(model, max_len, batch, fixed)
        self.created += 1
        self.names[cache] = self.created
        weakref.finalize(cache, self.forget, self.created).atexit = False
        return cache

    def forget(self, name: int) -> None:
        """Record, for the next order, that the cache of that name no longer exists."""
        self.deleted.append(name)


@torch.inference_mode()
def follow(model: Transformer, world: World) -> None:
    """The loop of every rank but 0: carry out rank 0's orders until it ends the run. Any error is a ParallelError."""
    caches: dict[int, KVCache] = {}
    device, dtype = model.norm.weight.device, model.norm.weight.dtype

    def mirror(order: Any) -> KVCache:
        """This rank's copy of the cache that an order is about, brought up to date."""
        if order["name"] not in caches:
            caches[order["name"]] = model.new_cache(*order["shape"])
        cache = caches[order["name"]]
        cache.reserve(order["slots"])
        for source, target, length in order["moves"]:
            if source is None:
                cache.clear_row(target)
            elif length < 0:
                cache.swap_rows(source, target, -length)
            else:
                cache.copy_row(source, target, length)
        if order["rows"] is not None:
            cache = cache.rows(*order["rows"])
        for layer in cache.layers:
            layer.visible = order["end"]
        return cache

    def run(order: Any) -> None:
        for name in order["deleted"]:
            caches.pop(name, None)
        cache = None if order["cache"] is None else mirror(order["cache"])
        tokens = torch.tensor(order["tokens"], device=device)  # (B, T)
        positions = torch.tensor(order["positions"], device=device)  # (T,) or (B, T)
        keys = positions if cache is None else torch.arange(order["keys"] or 0, device=device)  # (S,) or (B, S)
        sees_all = order["keys"] is None
        model.runner.run(model, tokens, positions, None if sees_all else keys, order["seq_len"], cache)

    def output(order: Any) -> None:
        if isinstance(model.output, GatheredOutput):
            model.output.share(torch.empty(order["shape"], dtype=dtype, device=device))

    actions: dict[str, Callable[[Any], None]] = {"run": run, "output": output}
    while True:
        with _connected(world):
            order = world.receive_order()
            if order["do"] == "end":
                return
            actions[order["do"]](order)
