"""Run several ranks without importing torch in each: a server imports it once and forks the ranks.

Run as a program, this is the server. It reads requests from stdin, one JSON object per line: the number of ranks, a
folder, and the name of a function in CASES that each rank calls. The results are saved in the folder; the answer lists
the errors of failed ranks.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llama import loader
from llama.cache import KVCache
from llama.checkpoint import open_checkpoint
from llama.engine import kernels, parallel
from llama.engine.linears import TileEmbedding, TileLinear
from llama.engine.nonfinite import locate
from llama.engine.sharding import Rank
from llama.errors import ContextLengthError, LlamaError, NumericalError
from llama.generate import generate, prefill
from llama.generation.batch import Batch, Request, Started, TokenEvent
from llama.generation.speculative import Draft, DraftToken, make_draft, speculate
from llama.model import Transformer
from llama.sampling import SamplingParams
from llama.text import Session

ROOT = Path(__file__).resolve().parent.parent


class Ranks:
    """The forking server."""

    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.ranks"]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=env)

    def run(self, tensor: int, pipeline: int, case: str, **arguments: Any) -> list[Any]:
        """Call CASES[case](world, **arguments) on each rank and return the results."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            request = {"folder": folder, "tensor": tensor, "pipeline": pipeline, "case": case, "arguments": arguments}
            self.server.stdin.write(json.dumps(request).encode() + b"\n")
            self.server.stdin.flush()
            answer = json.loads(self.server.stdout.readline())
            assert not answer["failed"], "\n".join(answer["failed"])
            ranks = range(tensor * pipeline)
            return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in ranks]

    def close(self) -> None:
        self.server.communicate()  # the server exits at the end of its stdin


def serve() -> None:
    """Fork the ranks of each request and wait for them."""
    torch.set_num_threads(1)
    kernels.ready()  # once, instead of in every rank
    gc.freeze()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        children = {}
        for rank in range(request["tensor"] * request["pipeline"]):
            child = os.fork()
            if child == 0:
                run_rank(rank, request)
            children[child] = rank
        failed, deadline = [], time.monotonic() + 60
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                if failed or time.monotonic() > deadline:
                    failed.append(f"ranks {sorted(children.values())} were still running")
                    for child in children:
                        os.kill(child, signal.SIGKILL)
                        os.waitpid(child, 0)
                    break
                time.sleep(0.005)
                continue
            rank = children.pop(pid)
            if status:
                errors = Path(request["folder"]) / f"{rank}.txt"
                failed.append(f"rank {rank}: {errors.read_text() if errors.exists() else status}")
                time.sleep(0.5)  # let the other ranks end on their own
        sys.stdout.write(json.dumps({"failed": failed}) + "\n")
        sys.stdout.flush()


def run_rank(rank: int, request: dict[str, Any]) -> None:
    """Join the world, run the requested case, save its result, and exit."""
    folder, tensor, pipeline = Path(request["folder"]), request["tensor"], request["pipeline"]
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(tensor * pipeline))
    os.environ["CLEARLLAMA_STORE"] = str(folder / "store")
    code = 1
    try:
        world = parallel.join(Rank(rank, tensor, pipeline), "cpu")
        returned = CASES[request["case"]](world, **request["arguments"])
        parallel.leave(world)
        torch.save(returned, folder / f"{rank}.pt")
        code = 0
    except BaseException:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)


# ----------------------------------------------------------------------------------------------------------- cases
def build(path: str, world: parallel.World | None = None, plain: bool = False, **options: Any) -> Transformer:
    """Return a model in float32 with the default kernels. plain: dequantize quantized weights."""
    options = {"dtype": "float32", "device": "cpu", "fast": True, **options}
    with parallel.all_succeed(world):
        model = loader.build(open_checkpoint(path), world=world, **options)
    for name, layer in list(model.named_modules()):
        if plain and isinstance(layer, TileLinear):
            linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            linear.weight = nn.Parameter(layer.weight, requires_grad=False)
            if layer.bias is not None:
                linear.bias = nn.Parameter(layer.bias, requires_grad=False)
            model.set_submodule(name, linear)
        if plain and isinstance(layer, TileEmbedding):
            layer.dtype = torch.float32
    return model.float() if plain else model


def ask(world: parallel.World, path: str, what: str = "answers", **options: Any) -> dict[str, Tensor]:
    """Run QUESTIONS[what] on a model of several ranks. Rank 0 returns its results; all return their weights' shapes."""
    model = build(path, world, **options)
    shapes = {name: torch.tensor(tensor.shape) for name, tensor in model.state_dict().items()}
    if world.leader:
        return {**QUESTIONS[what](model), **shapes}
    model.runner = runner = CountingRunner(world, model.runner.cache_kind)
    parallel.follow(model, world)
    return {**shapes, "caches created": torch.tensor(runner.created), "most caches alive": torch.tensor(runner.most)}


class CountingRunner(parallel.StageRunner):
    """Counts the caches of a rank."""

    def __init__(self, world: parallel.World, cache_kind: str):
        super().__init__(world, cache_kind)
        self.alive: weakref.WeakSet[KVCache] = weakref.WeakSet()
        self.created = self.most = 0

    def new_cache(self, *args: Any) -> KVCache:
        cache = super().new_cache(*args)
        self.alive.add(cache)
        self.created, self.most = self.created + 1, max(self.most, len(self.alive))
        return cache


@torch.inference_mode()
def answers(model: Transformer) -> dict[str, Tensor]:
    """Return logits and tokens from every way in which the package runs a model."""
    vocab = model.config.vocab_size
    ids = torch.randint(vocab, (2, 24), generator=torch.Generator().manual_seed(1))  # (B, T)
    row = ids[0].tolist()
    out = {"all positions": model(ids)}
    cache = model.new_cache()
    out["prefill"] = prefill(model, row[:20], cache, chunk=7)
    out["decode"] = prefill(model, row[20:21], cache)
    cache.trim(11)  # other tokens follow from here
    other = model.new_cache(40)
    out["other"] = prefill(model, ids[1, :9].tolist(), other)
    out["trimmed"] = prefill(model, ids[1, 11:18].tolist(), cache)
    out["other again"] = prefill(model, ids[1, 9:12].tolist(), other)
    del other
    both = model.new_cache(30, batch=2)
    out["batch"] = model(ids[:, :12], cache=both)
    positions = torch.stack((torch.arange(12, 15), torch.arange(10, 13)))  # rows of different lengths
    out["ragged"] = model(ids[:, 12:15], positions, both)
    grown = model.new_cache(1100)
    prefill(model, (row * 43)[:1030], grown, chunk=512)  # beyond its initial slots
    out["grown"] = prefill(model, row[:1], grown)
    return {**out, **generated(model, row)}


def generated(model: Transformer, row: list[int]) -> dict[str, Tensor]:
    """Return the tokens generated after a prompt: greedy, sampled, speculative, and in a session."""
    greedy, sampled = SamplingParams(max_new_tokens=10), SamplingParams(max_new_tokens=10, temperature=1.0, seed=3)
    session = Session()
    first = [token.id for token in generate(model, row, greedy, cache=session.reuse(model, row))]
    session.tokens, session.busy = row + first[:-1], False
    longer = [*row, *first[:5], 7, 8]
    second = [token.id for token in generate(model, longer, greedy, cache=session.reuse(model, longer))]
    draft = HalfRight(row + first)
    speculative = [token.id for token in speculate(model, row, greedy, draft=draft)]
    out = {"greedy": first, "session": second, "speculative": speculative}
    out["drafted, accepted"] = [draft.drafted, draft.accepted]
    if (ngrams := make_draft("ngram")) is not None:
        out["ngram"] = [token.id for token in speculate(model, row * 2, greedy, draft=ngrams)]
    out["sampled"] = [token.id for token in generate(model, row, sampled)]
    return {name: torch.tensor(ids, dtype=torch.long) for name, ids in out.items()}


class HalfRight(Draft):
    """Draft the known continuation with every third token wrong, so that some tokens are rejected."""

    def __init__(self, text: list[int]):
        super().__init__(4)
        self.text = text

    def length(self) -> int:
        return self.most

    def propose(self, tokens: list[int], limit: int, pick: Any) -> list[DraftToken]:
        at = range(len(tokens), min(len(tokens) + limit, len(self.text)))
        return [DraftToken(self.text[i] if i % 3 else 1 - min(1, self.text[i]), None) for i in at]


@torch.inference_mode()
def refusals(model: Transformer) -> dict[str, Tensor]:
    """Return logits computed after calls that were refused: the ranks must still be in step."""
    row = list(range(20))
    cache = model.new_cache(16)
    foreign = copy.copy(model.new_cache(30)) if model.runner.distributed else model.new_cache(3)
    calls: list[Callable[[], Any]] = [
        lambda: prefill(model, row, cache),
        lambda: model(torch.tensor([row]), torch.arange(1, 21), cache),
        lambda: prefill(model, row, foreign),  # the other ranks do not have this cache
    ]
    for call in calls:
        try:
            call()
        except (ContextLengthError, ValueError):
            continue
        raise AssertionError("expected the call to be refused")
    return {"after": prefill(model, row[:16], model.new_cache(16))}


@torch.inference_mode()
def logits(model: Transformer) -> dict[str, Tensor]:
    """Return a few logits and tokens; a subset of `answers`."""
    row = list(range(3, 20))
    cache = model.new_cache()
    first = prefill(model, row, cache, chunk=8)
    tokens = [token.id for token in generate(model, row, SamplingParams(max_new_tokens=6))]
    return {"prefill": first, "decode": prefill(model, [5], cache), "greedy": torch.tensor(tokens)}


def many(model: Transformer) -> dict[str, Tensor]:
    """Run prompts of many lengths through three slots. Some share a prefix; one is invalid."""
    draw = torch.Generator().manual_seed(5)
    shared = torch.randint(model.config.vocab_size, (20,), generator=draw).tolist()
    requests = []
    for i, length in enumerate((3, 30, 9, 25, 1, 17, 1030)):
        own = torch.randint(model.config.vocab_size, (length,), generator=draw).tolist()
        prompt = shared + own if i % 2 else own
        requests.append(Request(prompt, SamplingParams(max_new_tokens=3 + 2 * i, temperature=0.5 * (i % 3), seed=i)))
    requests.insert(3, Request([], SamplingParams()))
    out: dict[str, list[int]] = {str(number): [] for number in range(len(requests))}
    for event in Batch(model, requests, slots=3):
        if isinstance(event, TokenEvent):
            out[str(event.number)].append(event.token.id)
        elif isinstance(event, Started):
            out[str(event.number)].append(-event.cached)
    return {name: torch.tensor(ids, dtype=torch.long) for name, ids in out.items()}


def not_finite(model: Transformer) -> dict[str, Tensor]:
    """Return the error message for a NaN weight. The second call shows that the ranks are still in step."""
    messages = []
    for _ in range(2):
        try:
            list(generate(model, [1, 2, 3], SamplingParams(max_new_tokens=3), diagnose=partial(locate, model)))
        except NumericalError as error:
            messages.append(str(error))
    return {"message": torch.tensor(list(messages[1].encode()))}


def threads(model: Transformer) -> dict[str, Tensor]:
    """Return the tokens of the same requests, one after the other and from two threads."""
    requests = [([5 + i, 6, 7], SamplingParams(max_new_tokens=12, temperature=1.0, seed=i)) for i in range(4)]
    serial = [[token.id for token in generate(model, *request)] for request in requests]
    with ThreadPoolExecutor(max_workers=2) as pool:
        concurrent = list(pool.map(lambda request: [token.id for token in generate(model, *request)], requests))
    return {"serial": torch.tensor(serial), "concurrent": torch.tensor(concurrent)}


QUESTIONS: dict[str, Callable[[Transformer], dict[str, Tensor]]] = {
    "answers": answers,
    "logits": logits,
    "refusals": refusals,
    "many": many,
    "not_finite": not_finite,
    "threads": threads,
}


def memory(world: parallel.World, path: str, **options: Any) -> dict[str, int]:
    """Return the bytes that loading and running a model adds to this process' peak memory, with mapped files."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    before = status("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    with parallel.all_succeed(world):
        model = loader.build(open_checkpoint(path), device="cpu", fast=True, world=world, **options)
    loaded = status("VmHWM:") - before
    if world.leader:
        for _ in range(2):
            with torch.inference_mode():
                model(torch.arange(8)[None])
    else:
        parallel.follow(model, world)
    return {"loaded": loaded, "run": status("VmHWM:") - before}


def differ(world: parallel.World, paths: list[str]) -> str:
    """Return the error message of a rank if each loads a different model."""
    try:
        build(paths[world.rank.number], world)
    except LlamaError as error:
        world.broken = "as expected"  # skips the orderly shutdown
        return str(error)
    return "nothing"


CASES: dict[str, Callable[..., Any]] = {"ask": ask, "memory": memory, "differ": differ}

if __name__ == "__main__":
    serve()
