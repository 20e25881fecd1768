"""Decoding on a CUDA device without waiting for it: each step is a CUDA graph, and tokens are read a few steps late.

A CUDA device works asynchronously. Reading each new token before the next step is launched would leave the device idle
in between. So the token stays on the device, where it is the next step's input, and the host reads it some steps
later. Steps that were launched beyond a stop are discarded. A CUDA graph launches the few hundred kernels of a step by
one call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..cache import KVCache, MemoryCheck
from ..model import Choose, Runner, Transformer

STRIDE = 4  # steps whose tokens are read together
AHEAD = 2  # such groups that may be in flight while one is read


class GraphRunner(Runner):
    """Decodes one text by replaying a CUDA graph. Frequencies that depend on the length, and batches, run eagerly."""

    def __init__(self, cache_kind: str = "model", check_memory: MemoryCheck | None = None):
        super().__init__(cache_kind, check_memory)
        self._steps: WeakKeyDictionary[KVCache, GraphStep] = WeakKeyDictionary()

    def decode(
        self, model: Transformer, logits: Tensor, cache: KVCache, steps: int, choose: Choose
    ) -> Generator[list[Any]]:
        if cache.batch != 1 or model.rope.by_length:
            yield from super().decode(model, logits, cache, steps, choose)
            return
        start, yielded = cache.length, 0
        step = self.step_for(model, cache)
        step.position.fill_(start)
        choices: list[tuple[Tensor, ...]] = []
        pending: deque[PendingTokens] = deque()
        try:
            for count in range(steps):
                if count:
                    logits = step.next_logits(model, cache)
                choices.append(choose(logits))
                step.token.copy_(choices[-1][0][None])
                if count in (0, steps - 1) or len(choices) == STRIDE:
                    pending.append(PendingTokens(choices))
                    choices = []
                while pending and (len(pending) > AHEAD or count == steps - 1):
                    for values in pending.popleft().read():
                        yielded += 1
                        yield values
        finally:  # while the loop runs, the cache is ahead of what was yielded
            cache.trim(min(cache.length, start + max(0, yielded - 1)))

    def step_for(self, model: Transformer, cache: KVCache) -> GraphStep:
        """The step recorded for a cache, or a new one. It is kept, so that the next answer reuses the graph."""
        if cache not in self._steps:
            self._steps[cache] = GraphStep(self, model, cache.device)
        return self._steps[cache]


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
            self.arrived.record()

    def read(self) -> list[list[Any]]:
        """The values of each step. Waits for these steps, not for later ones."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return [list(row) for row in zip(*(column.tolist() for column in self.columns), strict=True)]


class GraphStep:
    """One decoding step: `token` (1, 1) at `position` (1,) -> logits (V,).

    On a CUDA device it is captured in a graph and replayed, until the cache or the table of RoPE has grown.
    """

    def __init__(self, runner: Runner, model: Transformer, device: torch.device):
        self._next_logits = runner.next_logits
        self.token = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self._captures = device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._slots, self._table = 0, model.rope.table  # those of the captured graph
        self._logits = torch.empty(0)

    def next_logits(self, model: Transformer, cache: KVCache) -> Tensor:
        """The logits after `token`, whose key and value enter the cache. The next call overwrites them."""
        cache.place_next()
        if not self._captures:
            self._step(model, cache)
        else:
            if self._graph is None or self._slots != cache.slots or self._table is not model.rope.table:
                self._capture(model, cache)
            self._graph.replay()  # type: ignore[union-attr]
        cache.commit()
        return self._logits

    def _step(self, model: Transformer, cache: KVCache) -> None:
        self._logits = self._next_logits(model, self.token, self.position, cache)[0]
        self.position += 1

    def _capture(self, model: Transformer, cache: KVCache) -> None:
        position = self.position.clone()
        self._graph = capture(lambda: self._step(model, cache), lambda: self.position.copy_(position))
        self._slots, self._table = cache.slots, model.rope.table


def capture(step: Callable[[], object], restore: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a CUDA graph of `step`. It runs twice before, and `restore` undoes the changes of a run."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
            restore()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph
