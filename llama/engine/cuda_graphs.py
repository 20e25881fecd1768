"""Decoding on a CUDA device without waiting for it: each step is a CUDA graph, and tokens are read a few steps late.

A CUDA device works asynchronously. Reading each new token before the next step is launched would leave the device idle
in between. So the token stays on the device, where it is the next step's input, and the host reads it some steps
later. Steps that were launched beyond a stop are discarded. A CUDA graph launches the few hundred kernels of a step by
one call. Each cache has a graph of its own, which is captured again when the cache or the RoPE table has grown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..cache import KVCache, MemoryCheck
from ..model import Pick, Runner, Transformer
from .hooks import HookWatch

STRIDE = 4  # steps whose tokens are read together
AHEAD = 2  # such groups that may be in flight while one is read


class GraphRunner(Runner):
    """Decodes a text or a batch by replaying CUDA graphs.

    It decodes eagerly if the RoPE frequencies depend on the length, or if the model has hooks, which no replay calls.

    Threads may share a runner: `turn` lets one pass at a time use the buffers of the graphs.
    """

    def __init__(self, cache_kind: str = "model", check_memory: MemoryCheck | None = None):
        super().__init__(cache_kind, check_memory)
        self.hooked = HookWatch("CUDA graphs", rounds=False)
        self._steps: WeakKeyDictionary[KVCache, GraphStep] = WeakKeyDictionary()
        self._lock = RLock()
        self._last: torch.cuda.Event | None = None  # recorded at the end of the previous pass

    def decode(
        self, model: Transformer, logits: Tensor, cache: KVCache, steps: int, pick: Pick
    ) -> Generator[list[Any]]:
        if cache.batch != 1 or model.rope.by_length or self.hooked(model):
            yield from super().decode(model, logits, cache, steps, pick)
            return
        start, yielded = cache.length, 0
        step = self.step_for(cache, torch.full((1,), start, device=cache.device))
        choices: list[tuple[Tensor, ...]] = []
        pending: deque[PendingTokens] = deque()
        try:
            for count in range(steps):
                if count:
                    cache.place_next()
                    logits = step.next_logits(model, cache)[0]  # (V,)
                    cache.commit()
                choices.append(pick(logits))
                step.tokens.copy_(choices[-1][0][None])
                at_once = count in (0, steps - 1)  # read the first token before the next step is launched
                if at_once or len(choices) == STRIDE:
                    pending.append(PendingTokens(choices))
                    choices = []
                while pending and (at_once or len(pending) > AHEAD):
                    for values in pending.popleft().read():
                        yielded += 1
                        yield values
        finally:  # while the loop runs, the cache is ahead of what was yielded
            cache.trim(min(cache.length, start + max(0, yielded - 1)))

    def next_logits(self, model: Transformer, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Replay a graph of `Runner.next_logits`. The next call with this cache overwrites the result."""
        step = self.step_for(cache, positions)
        step.tokens.copy_(tokens)
        return step.next_logits(model, cache)

    def launch_logits(self, model: Transformer, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Launch the kernels of `next_logits` one by one. A graph captures these launches."""
        return super().next_logits(model, tokens, positions, cache)

    def step_for(self, cache: KVCache, positions: Tensor) -> GraphStep:
        """Return the step of a cache, set to these positions. It is kept, so that the next answer reuses its graph."""
        with self._lock:
            if cache not in self._steps:
                self._steps[cache] = GraphStep(self, cache, positions)
            step = self._steps[cache]
        with torch.inference_mode():
            step.positions.copy_(positions)
        return step

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Let one pass use the buffers: lock out other threads, and make the current stream wait for the previous pass.

        A CUDA device is made the current device. During a capture and on a CPU, only the lock is held.
        """
        with self._lock:
            if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
                yield
                return
            with torch.cuda.device(device):
                stream = torch.cuda.current_stream(device)
                if self._last is None:
                    self._last = torch.cuda.Event()
                else:
                    stream.wait_event(self._last)
                try:
                    yield
                finally:
                    self._last.record(stream)


class PendingTokens:
    """The results of some steps, on their way from the device."""

    def __init__(self, choices: list[tuple[Tensor, ...]]):
        columns = [torch.cat(column) for column in zip(*choices, strict=True)]  # ids, extremes, log-probabilities
        self.columns, self.arrived = columns, None
        if columns[0].is_cuda:
            self.columns = [torch.empty(len(c), dtype=c.dtype, pin_memory=True) for c in columns]
            for here, there in zip(self.columns, columns, strict=True):
                here.copy_(there, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(columns[0].device))  # may not be the current device

    def read(self) -> list[list[Any]]:
        """The values of each step. Waits for these steps, not for later ones."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return [list(row) for row in zip(*(column.tolist() for column in self.columns), strict=True)]


class GraphStep:
    """One decoding step: `tokens` (B, 1) at `positions`, (1,) or (B, 1) -> logits (B, V). Positions advance by one.

    On a CUDA device the step is captured as a graph and replayed. It is captured again if the cache or the RoPE table
    has grown, or if the weights have moved.
    """

    def __init__(self, runner: GraphRunner, cache: KVCache, positions: Tensor):
        self._launch, self._turn, self._hooked = runner.launch_logits, runner.turn, runner.hooked
        self.device = cache.device
        self.tokens = torch.zeros(cache.batch, 1, dtype=torch.long, device=self.device)
        self.positions = torch.zeros_like(positions)
        self._captures = self.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._memory = (0, 0)  # at the capture: the slots of the cache, and the address of one weight
        self._table: tuple[Tensor, ...] = ()  # at the capture: the RoPE table
        self._logits = torch.empty(0)

    def next_logits(self, model: Transformer, cache: KVCache) -> Tensor:
        """Return the logits after `tokens`, and cache their keys and values. The next call overwrites the logits."""
        if not self._captures or self._hooked(model):
            self._step(model, cache)
            return self._logits
        with self._turn(self.device):
            memory = cache.slots, model.norm.weight.data_ptr()
            if self._graph is None or self._memory != memory or self._table is not model.rope.table:
                self._capture(model, cache)
                self._memory, self._table = memory, model.rope.table
            self._graph.replay()  # type: ignore[union-attr]
        return self._logits

    def _step(self, model: Transformer, cache: KVCache) -> None:
        self._logits = self._launch(model, self.tokens, self.positions, cache)
        self.positions += 1

    def _capture(self, model: Transformer, cache: KVCache) -> None:
        positions = self.positions.clone()
        self._graph = capture(lambda: self._step(model, cache), lambda: self.positions.copy_(positions))


def capture(step: Callable[[], object], restore: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture `step` as a CUDA graph on the current device, after two warm-up runs that `restore` undoes.

    The warm-up runs use the current stream. On a stream of their own they could overlap with other passes.
    """
    for _ in range(2):
        step()
        restore()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # all threads share the default stream of torch.cuda.graph
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph
