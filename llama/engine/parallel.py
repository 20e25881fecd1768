"""One model in several processes, on one host or many: the only file with collectives (torch.distributed).

Rank 0 runs the whole program as if it were alone. What it feeds into its model, `hidden` and `output`, it tells the
others first, and they call the same functions of theirs:

    rank 0                                         ranks 1, 2, ...
    model.hidden(tokens, .., cache) ── order ───►  follow: model.hidden(tokens, .., a cache of its own)
        embedding, wo, w_down       ◄─ all_reduce ─►   embedding, wo, w_down
    model.output(h)                 ── order, h ──►  follow: rows of the vocabulary
        logits                      ◄─── gather ────   its logits

So there is one prompt, one draw and one end for all. checkpoint/part.py says who has which weights; a rank is model,
cache and collectives of its part. gloo carries what lies on a CPU, nccl what lies on a GPU.
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

from ..cache import KVCache
from ..config import ModelConfig
from ..errors import LlamaError, ParallelError, UsageError
from ..model import Transformer
from .runtime import pick_device
from .sharding import Place

distributed: Any = dist  # typed, it hides the stores
Store = Any

JOIN_SECONDS = 120  # for all ranks to come together; CLEARLLAMA_JOIN_SECONDS overrides it
WORK_SECONDS = 1800  # for one collective of a forward pass: a stage waits while the one before it computes
IDLE_DAYS = 20  # for the next order: a user may think for long. A rank that ends is noticed at once all the same
FRAME = 2048  # bytes of an order; a longer one is followed by its rest
LINE = 8192  # bytes of what a rank says in `exchange`


class World:
    """The ranks that share a model, and this one's place among them.

    device  where its part of the model lies
    told    what must be the same in all ranks; `together` compares it
    """

    def __init__(self, place: Place, device: torch.device):
        self.place, self.device = place, device
        self.told: list[str] = []
        self.loaded = False  # whether all ranks have come through `together`
        self.broken: str | None = None  # why the ranks are out of step
        self.lost = False  # whether that is because another one ended
        self.turn = Lock()  # held by a thread of rank 0 from an order until it is carried out
        work, idle = timedelta(seconds=WORK_SECONDS), timedelta(days=IDLE_DAYS)
        tensor, ranks = place.tensor, range(place.tensor * place.pipeline)
        self.orders = dist.new_group(timeout=idle, backend="gloo")
        self.all = dist.new_group(timeout=work)
        groups = [dist.new_group(list(ranks[s : s + tensor]), timeout=work) for s in ranks[::tensor]]  # by everybody
        self.stage = groups[place.stage]

    def __str__(self) -> str:
        stages = f" in {self.place.pipeline} stages" if self.place.pipeline > 1 else ""
        return f"{self.size} processes{stages}"

    def break_off(self, error: Exception) -> ParallelError:
        """The ranks are out of step from now on: what to raise."""
        self.broken = " ".join(str(error).split())[:200] or type(error).__name__
        self.lost = isinstance(error, dist.DistError) or "gloo" in self.broken or "NCCL" in self.broken
        if self.lost:
            return ParallelError(f"another rank ended or can't be reached ({self.broken}); start again")
        return ParallelError(f"rank {self.place.rank} broke off and the ranks are out of step: {self.broken}")

    @property
    def leader(self) -> bool:
        return self.place.rank == 0

    @property
    def on_this_host(self) -> int:
        """Ranks that share this host's memory."""
        return int(os.environ.get("LOCAL_WORLD_SIZE") or self.size)

    @property
    def size(self) -> int:
        return self.place.tensor * self.place.pipeline

    # ------------------------------------------------------------------------------------------- rank 0 and the others
    def tell(self, order: Mapping[str, Any]) -> None:
        """Rank 0: the next order for everybody."""
        data = json.dumps(order, separators=(",", ":")).encode()
        framed = len(data).to_bytes(8, "little") + data
        framed += bytes(max(0, FRAME - len(framed)))
        dist.broadcast(_bytes(framed[:FRAME]), 0, self.orders)
        if len(framed) > FRAME:
            dist.broadcast(_bytes(framed[FRAME:]), 0, self.orders)

    def hear(self) -> Any:
        """The others: wait for the next order."""
        frame = torch.empty(FRAME, dtype=torch.uint8)
        dist.broadcast(frame, 0, self.orders)
        framed = bytes(frame.tolist())
        length = int.from_bytes(framed[:8], "little")
        if length + 8 > FRAME:
            rest = torch.empty(length + 8 - FRAME, dtype=torch.uint8)
            dist.broadcast(rest, 0, self.orders)
            framed += bytes(rest.tolist())
        return json.loads(framed[8 : 8 + length])

    def exchange(self, said: str) -> list[str]:
        """What each rank says, by rank."""
        data = said.encode()[:LINE].ljust(LINE, b" ")
        frames = [torch.empty(LINE, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(frames, _bytes(data), group=self.orders)
        return [bytes(frame.tolist()).decode(errors="replace").strip() for frame in frames]

    # ------------------------------------------------------------------------------------------------ the collectives
    def sum(self, x: Tensor) -> Tensor:
        """The sum of what the parts of a stage hold, in place."""
        dist.all_reduce(x, group=self.stage)
        return x

    def columns(self, y: Tensor, widths: list[int]) -> Tensor:
        """y (.., widths[part]) of all parts, one behind the other, on rank 0; the others get theirs back."""
        y = F.pad(y, (0, max(widths) - y.shape[-1])).contiguous()
        parts = [torch.empty_like(y) for _ in widths] if self.leader else None
        dist.gather(y, parts, 0, self.stage)
        if parts is None:
            return y
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1)

    def hand_on(self, h: Tensor) -> None:
        """h to this part of the next stage; from the last stage to rank 0, which alone goes on."""
        place = self.place
        if place.stage + 1 < place.pipeline:
            dist.send(h.contiguous(), place.rank + place.tensor, self.all)
        elif place.part == 0:
            dist.send(h.contiguous(), 0, self.all)

    def take_over(self, h: Tensor) -> Tensor:
        """What `hand_on` of the stage before gave, into h; on rank 0 that is the last stage."""
        dist.recv(h, (self.place.rank - self.place.tensor) % self.size, self.all)
        return h


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# --------------------------------------------------------------------------------------------------------- joining
def join(place: Place, device: str | torch.device | None = None, store: Store | None = None) -> World:
    """Meet the other ranks: `place.tensor * place.pipeline` of them.

    They meet at a store, or as torchrun's environment says (MASTER_ADDR, MASTER_PORT). Each takes the GPU of its
    LOCAL_RANK if there are any, unless `device` says otherwise. Raises ParallelError where they don't come together in
    time, UsageError where the device can't be had.
    """
    size, local = place.tensor * place.pipeline, int(os.environ.get("LOCAL_RANK", place.rank))
    chosen = pick_device(device)
    if chosen.type == "cuda":
        if chosen.index not in (None, 0) or local >= torch.cuda.device_count():
            raise UsageError(
                f"rank {place.rank} would take GPU {local} and this host has {torch.cuda.device_count()}; start one"
                " rank for each GPU, without a number in --device, or take --device cpu"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    elif chosen.type != "cpu":
        raise UsageError(f"several processes can share a model on cpu or cuda, not on {chosen.type}")
    if int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == size:  # one host: nothing need be heard outside of it
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    seconds = join_seconds()
    try:
        store = meeting_point(place.rank, size, timedelta(seconds=seconds)) if store is None else store
        store.set_timeout(timedelta(seconds=seconds))
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=size, timeout=timedelta(seconds=seconds)
        )
        return World(place, chosen)
    except LlamaError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        told = " ".join(str(error).split())[:200]
        raise ParallelError(
            f"rank {place.rank} of {size} did not meet the others within {seconds:g} s ({told}); are all of them"
            " started, with the same MASTER_ADDR and MASTER_PORT, and can they reach each other?"
        ) from error


def join_seconds() -> float:
    """How long ranks wait for each other at the start. Raises UsageError where the environment has no such number."""
    told = os.environ.get("CLEARLLAMA_JOIN_SECONDS", str(JOIN_SECONDS))
    try:
        seconds = float(told)
    except ValueError:
        seconds = 0
    if not 0 < seconds < 1e6:
        raise UsageError(f"CLEARLLAMA_JOIN_SECONDS is {told!r:.40}; expected a number of seconds above 0")
    return seconds


def meeting_point(rank: int, size: int, timeout: timedelta) -> Store:
    """The store that the environment names; rank 0 opens it where nobody else has.

    torch's own listens to all networks, so where the address is this host's alone, it gets a socket that does not.
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
                        f"rank 0 can't open MASTER_PORT {port} of {host}: {error.strerror}; take another port"
                    ) from None
                listen = listener.detach()  # the store closes it
    tcp = distributed.TCPStore(
        host, port, size, rank == 0, timeout, wait_for_workers=False, use_libuv=listen is None, master_listen_fd=listen
    )
    return distributed.PrefixStore(prefix, tcp)


@contextmanager
def together(world: World | None) -> Iterator[None]:
    """What all ranks do by themselves, such as loading: either all go on behind it, or all raise.

    A rank raises its own error if it has one, else ParallelError with the first of another's; also where `told`
    differs, as for ranks that have read other files.
    """
    if world is None:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    said = {"error": failure and (str(failure)[:500] or type(failure).__name__), "told": world.told}
    with _connected(world):
        heard = [json.loads(text) for text in world.exchange(json.dumps(said))]
    if failure is not None:
        raise failure
    for rank, other in enumerate(heard):
        if other["error"] is not None:
            raise ParallelError(f"rank {rank}: {other['error']}")
        if other["told"] != heard[0]["told"]:
            pairs = zip(other["told"], heard[0]["told"], strict=False)
            theirs, ours = next(pair for pair in pairs if pair[0] != pair[1])
            raise ParallelError(f"rank {rank} has another model or other options than rank 0: {theirs}, not {ours}")
    world.loaded = True


@contextmanager
def _connected(world: World) -> Iterator[None]:
    """Turns what torch says when a rank is gone into a ParallelError; from then on the world can't be used."""
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
    """Rank 0: the others may end. All: close the connections."""
    if world.leader and world.broken is None:
        with whole(), _connected(world):
            world.tell({"do": "end"})
    if world.broken is None:
        dist.destroy_process_group()


@contextmanager
def whole() -> Iterator[None]:
    """Hold an interrupt back until the block is through: what was begun with the others must be ended with them."""
    heard: list[int] = []
    try:
        previous = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    except ValueError:  # only the main thread is interrupted, and this is another
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if heard:
            signal.raise_signal(signal.SIGINT)


# ---------------------------------------------------------------------------------------------------------- layers
class ParallelEmbedding(nn.Module):
    """An embedding of which each part of the stage has some rows. (B, T) -> (B, T, C)."""

    def __init__(self, inner: nn.Module, rows: slice, world: World):
        super().__init__()
        self.inner, self.rows, self.world = inner, rows, world

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self.rows.start
        inside = (tokens >= self.rows.start) & (tokens < self.rows.stop)  # (B, T)
        h = self.inner(own.where(inside, 0))  # (B, T, C)
        return self.world.sum(h.masked_fill(~inside.unsqueeze(-1), 0))


class RowParallel(nn.Module):
    """A linear layer of which each part of the stage has some inputs. (.., K / N) -> (.., N_out), the same in each."""

    def __init__(self, inner: nn.Module, world: World):
        super().__init__()
        self.inner, self.world = inner, world

    def forward(self, x: Tensor) -> Tensor:
        return self.world.sum(self.inner(x).contiguous())


class GatheredOutput(nn.Module):
    """An output layer of which each part of the first stage has some rows. On rank 0: (.., C) -> (.., V)."""

    def __init__(self, inner: nn.Module, widths: list[int], world: World):
        super().__init__()
        self.inner, self.widths, self.world = inner, widths, world

    def forward(self, h: Tensor) -> Tensor:
        world = self.world
        with world.turn, whole(), _connected(world):
            world.tell({"do": "output", "shape": list(h.shape)})
            return self.share(h)

    def share(self, h: Tensor) -> Tensor:
        """Rank 0's h for everybody, everybody's logits for rank 0."""
        h = h.contiguous()
        dist.broadcast(h, 0, self.world.stage)
        return self.world.columns(self.inner(h), self.widths)


# ----------------------------------------------------------------------------------------------------- one forward pass
def share(model: Transformer, config: ModelConfig, world: World) -> Transformer:
    """Make a part of a model one of a world, in place; returns it. `config` is the whole model's."""
    place = world.place
    if place.tensor > 1:
        blocks: Any = model.layers
        for block in blocks:
            block.attention.wo = RowParallel(block.attention.wo, world)
            block.feed_forward.w_down = RowParallel(block.feed_forward.w_down, world)
        if place.stage == 0:
            rows = [place.vocabulary(config, part) for part in range(place.tensor)]
            model.tok_embeddings = ParallelEmbedding(model.tok_embeddings, rows[place.part], world)  # type: ignore[assignment]
            model.output = GatheredOutput(model.output, [r.stop - r.start for r in rows], world)  # type: ignore[assignment]
    model.config = config
    model.run = Pass(model, world)  # type: ignore[method-assign]
    if world.leader:
        leader = Leader(model, world)
        model.hidden, model.new_cache = leader, leader.new_cache  # type: ignore[assignment, method-assign]
    weight = model.norm.weight
    facts = str(config), f"{weight.dtype} on {weight.device.type}", f"KV cache {model.cache_kind}", model.rope.form
    world.told += [f"{fact[:200]} ({hashlib.sha256(fact.encode()).hexdigest()[:8]})" for fact in facts]
    return model


class Pass:
    """`Transformer.run` over the stages. Every rank of a stage has the same h; on rank 0 it comes out normed."""

    def __init__(self, model: Transformer, world: World):
        self.model, self.world = model, world
        self.begun: bool | None = (
            None  # whether a pass has come to where ranks wait for each other; None: there is none
        )

    def __call__(
        self, tokens: Tensor, turns: tuple[Tensor, ...], mask: Tensor | None, positions: Tensor, cache: KVCache | None
    ) -> Tensor:
        if self.begun is None:  # nobody else would know
            raise UsageError(
                "a model in several processes is asked through `hidden`, which tells the others, not `run`"
            )
        self.begun = True
        model, world, weight = self.model, self.world, self.model.norm.weight
        if world.place.stage == 0:
            h = model.tok_embeddings(tokens)  # (B, T, C)
        else:
            h = world.take_over(weight.new_empty(*tokens.shape, model.config.dim))
        for i, block in enumerate(model.layers):
            h = block(h, turns, mask, positions, None if cache is None else cache.layers[i])
        if world.place.pipeline > 1:
            world.hand_on(h)
            if world.leader:
                h = world.take_over(torch.empty_like(h))
        return model.norm(h)


class Leader:
    """`Transformer.hidden` of rank 0: tells the others what it is called with, then does its part."""

    def __init__(self, model: Transformer, world: World):
        self.model, self.world = model, world
        self.names: weakref.WeakKeyDictionary[KVCache, int] = weakref.WeakKeyDictionary()
        self.made = 0  # names given
        self.gone: list[int] = []  # caches that nobody holds any more

    def __call__(
        self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None, **options: Any
    ) -> Tensor:
        with self.world.turn:
            return self.order(tokens, positions, cache, options)

    def order(
        self, tokens: Tensor, positions: Tensor | None, cache: KVCache | None, options: Mapping[str, Any]
    ) -> Tensor:
        """One pass of all ranks."""
        world = self.world
        if world.broken is not None:
            raise ParallelError(f"the ranks are out of step ({world.broken}); start again")
        order = {
            "do": "hidden",
            "tokens": tokens.tolist(),
            "positions": None if positions is None else positions.tolist(),
            "options": options,
            "cache": None if cache is None else self.describe(cache),
        }
        with whole():
            with _connected(world):
                gone, self.gone = self.gone, []
                world.tell({**order, "gone": gone})
            return in_step(world, self.model, tokens, positions, cache, options)

    def describe(self, cache: KVCache) -> dict[str, Any]:
        """What the others need to know of a cache to hold its like: which it is, its shape, how far it is filled."""
        whole, first = cache.whole or (cache, 0)
        if whole not in self.names:
            raise UsageError("the ranks share the caches that new_cache of their model made, and not copies of them")
        moves, whole.moves = whole.moves, []
        return {
            "name": self.names[whole],
            "shape": [whole.max_len, whole.batch],
            "slots": whole.slots,
            "moves": moves,
            "rows": None if cache.whole is None else [first, first + cache.batch],
            "length": cache.length,
            "filled": cache.filled,
        }

    def new_cache(self, *args: Any, **options: Any) -> KVCache:
        """`Transformer.new_cache`, and a name under which the others will know the cache."""
        cache = Transformer.new_cache(self.model, *args, **options)
        self.made += 1
        self.names[cache], cache.moves = self.made, []
        weakref.finalize(cache, self.gone_with, self.made).atexit = False
        return cache

    def gone_with(self, name: int) -> None:
        """The cache of that name is no more."""
        self.gone.append(name)


def in_step(
    world: World,
    model: Transformer,
    tokens: Tensor,
    positions: Tensor | None,
    cache: KVCache | None,
    options: Mapping[str, Any],
) -> Tensor:
    """`Transformer.hidden` as every rank does it.

    Arguments that it refuses are refused in all ranks, before they wait for each other: there they stay in step. After
    any other error they are not; memory, for one, may be short in one rank alone.
    """
    run: Any = model.run
    run.begun = False
    try:
        return Transformer.hidden(model, tokens, positions, cache, **options)
    except Exception as error:
        if isinstance(error, ValueError) and not run.begun:
            raise
        raise world.break_off(error) from error
    finally:
        run.begun = None


@torch.inference_mode()
def follow(model: Transformer, world: World) -> None:
    """Every rank but 0: do what rank 0 says, until it says that this is the end. Raises ParallelError."""
    caches: dict[int, KVCache] = {}
    device, dtype = model.norm.weight.device, model.norm.weight.dtype
    does: dict[str, Callable[[Any], None]] = {}

    def hidden(order: Any) -> None:
        for name in order["gone"]:
            caches.pop(name, None)
        told, cache = order["cache"], None
        if told is not None:
            if told["name"] not in caches:
                caches[told["name"]] = model.new_cache(*told["shape"])
            cache = caches[told["name"]]
            cache.reserve(told["slots"])
            for source, target, length in told["moves"]:
                cache.clear_row(target) if source is None else cache.copy_row(source, target, length)
            if told["rows"] is not None:
                cache = cache.rows(*told["rows"])
            cache.fill_to(told["length"], told["filled"])
        tokens = torch.tensor(order["tokens"], device=device)  # (B, T)
        positions = None if order["positions"] is None else torch.tensor(order["positions"], device=device)
        try:
            in_step(world, model, tokens, positions, cache, order["options"])
        except ValueError:  # rank 0 hears the same, and says so
            if world.broken is not None:
                raise

    def output(order: Any) -> None:
        if isinstance(model.output, GatheredOutput):
            model.output.share(torch.empty(order["shape"], dtype=dtype, device=device))

    does.update(hidden=hidden, output=output)
    while True:
        with _connected(world):
            order = world.hear()
            if order["do"] == "end":
                return
            does[order["do"]](order)
