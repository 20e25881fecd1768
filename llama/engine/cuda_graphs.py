"""Decoding on a device that works behind the program's back: one step after the other, and nobody waits for any.

A CUDA device is given work and does it later. Asking it for each new token would leave it idle meanwhile; so the token
stays there and is the next step's input, and the program reads tokens some steps late. What it ordered beyond a stop
is dropped. A step is a CUDA graph: a few hundred kernels, ordered by one call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention import causal_mask
from ..cache import KVCache
from ..model import Transformer
from ..sampling import SamplingParams, draw, extreme, probs
from .fused import Fused

STRIDE = 4  # steps whose tokens are told at once
AHEAD = 2  # such strides that are under way while one is read


class Choice(NamedTuple):
    """A new token, what sampling.extreme says of its logits, and its log-probability if that is asked for."""

    id: int
    top: float
    logprob: float | None


def fits(model: Transformer, cache: KVCache) -> bool:
    """Whether `decode` can go on from a cache: one text on a CUDA device, under frequencies that stay as they are."""
    alone = cache.on_one_device and "hidden" not in vars(model)  # else somebody has to hear of each pass (parallel.py)
    return cache.device.type == "cuda" and cache.batch == 1 and alone and not model.rope.by_length


@torch.inference_mode()
def decode(
    model: Transformer,
    logits: Tensor,
    cache: KVCache,
    params: SamplingParams,
    room: int,
    *,
    n_vocab: int | None = None,
    seen: Tensor | None = None,
    generator: torch.Generator | None = None,
    logprobs: bool = False,
) -> Generator[Choice]:
    """Yield `room` tokens; `logits` (V,) are those after the prompt, which the cache holds.

    n_vocab, seen and logprobs as in `generate.generate`, which stops by closing the generator. Then, as at its end, the
    cache holds the prompt and the tokens that were yielded, but for the last. While it runs the cache is ahead.
    """
    start, said = cache.length, 0
    steps = steps_of(model, cache)
    steps.position.fill_(start)
    waiting: list[tuple[Tensor, ...]] = []
    told: deque[Report] = deque()
    try:
        for count in range(room):
            if count:
                logits = steps.next_logits(cache)
            waiting.append(choose(logits[:n_vocab], params, seen, generator, logprobs))
            next_id = waiting[-1][0]  # (1,)
            steps.token.copy_(next_id[None])
            if seen is not None:
                seen = torch.cat((seen, next_id))
            if count in (0, room - 1) or len(waiting) == STRIDE:
                told.append(Report(waiting))
                waiting = []
            while told and (len(told) > AHEAD or count == room - 1):
                for choice in told.popleft().read():
                    said += 1
                    yield choice
    finally:
        cache.trim(min(cache.length, start + max(0, said - 1)))


def choose(
    logits: Tensor, params: SamplingParams, seen: Tensor | None, generator: torch.Generator | None, logprobs: bool
) -> tuple[Tensor, ...]:
    """An id (1,) from logits (V,), their extreme (1,), and the id's log-probability (1,) if asked for.

    Nothing waits for the device: a NaN chooses some token, and whoever reads the extreme will know.
    """
    if params.greedy and seen is None:
        next_id = logits.argmax(keepdim=True)
    else:
        next_id = draw(probs(logits, params, seen)[None], generator)
    top = extreme(logits)[None]  # (1,)
    return (next_id, top, logits.log_softmax(-1)[next_id]) if logprobs else (next_id, top)


class Report:
    """Some choices on their way from the device."""

    def __init__(self, choices: list[tuple[Tensor, ...]]):
        columns = [torch.cat(column) for column in zip(*choices, strict=True)]  # ids, largest logits, log-probabilities
        self.columns, self.arrived = columns, None
        if columns[0].is_cuda:
            self.columns = [torch.empty(len(c), dtype=c.dtype, pin_memory=True) for c in columns]
            for here, there in zip(self.columns, columns, strict=True):
                here.copy_(there, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> list[Choice]:
        """The choices. Waits for their steps and not for those behind."""
        if self.arrived is not None:
            self.arrived.synchronize()
        ids, tops, *logprobs = (column.tolist() for column in self.columns)
        return [Choice(*row) for row in zip(ids, tops, logprobs[0] if logprobs else [None] * len(ids), strict=True)]


class Steps:
    """Steps of a model behind a cache: `token` (1, 1) goes in at `position` (1,), logits (V,) come out.

    On a CUDA device a step is captured in a graph and replayed, until the cache or the table of RoPE has grown. The
    cache holds this, so that the next answer behind it finds the graph; this doesn't hold the cache.
    """

    def __init__(self, model: Transformer, device: torch.device):
        self.model = model
        self.token = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self._records = device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._slots, self._table = 0, model.rope.table  # what the graph was captured with
        self._logits = torch.empty(0)

    def next_logits(self, cache: KVCache) -> Tensor:
        """The logits after `token`, whose key and value enter the cache; the next call overwrites them."""
        cache.place_next()
        if not self._records:
            self._step(cache)
        else:
            if self._graph is None or self._slots != cache.slots or self._table is not self.model.rope.table:
                self._capture(cache)
            self._graph.replay()  # type: ignore[union-attr]
        cache.commit()
        return self._logits

    def _step(self, cache: KVCache) -> None:
        self._logits = next_logits(self.model, self.token, self.position, cache)[0]
        self.position += 1

    def _capture(self, cache: KVCache) -> None:
        position = self.position.clone()
        self._graph = capture(lambda: self._step(cache), lambda: self.position.copy_(position))
        self._slots, self._table = cache.slots, self.model.rope.table


def steps_of(model: Transformer, cache: KVCache) -> Steps:
    """The steps that were made for a cache, or new ones."""
    if not isinstance(cache.steps, Steps) or cache.steps.model is not model:
        cache.steps = Steps(model, cache.device)
    return cache.steps


def next_logits(model: Transformer, token: Tensor, position: Tensor, cache: KVCache) -> Tensor:
    """Logits (B, V) float32 after tokens (B, 1) at a position (1,), the same in every row.

    Their keys and values enter the cache, whose layers have been told to hand out all slots. Nothing waits for the
    device or depends on the position's value.
    """
    if "hidden" in vars(model):  # others have to hear of it (parallel.py), and of how far the rows are filled
        filled = position.expand(cache.batch, 1)[:, 0].tolist()
        cache.fill_to(max(filled), filled)
        return model.output(model.hidden(token, position, cache)[:, -1]).float()
    if isinstance(model.run, Fused) and model.run.fits(cache):
        model.rope.rows(position[:0], min(cache.slots, model.max_seq_len))  # no rows, but the table is there
        return model.run.next_logits(token, position, cache)[None]
    turns = model.rope.rows(position, min(cache.slots, model.max_seq_len))
    mask = causal_mask(position, torch.arange(cache.slots, device=token.device))  # (1, S)
    return model.output(model.run(token, turns, mask, position, cache)[:, -1]).float()


def capture(step: Callable[[], object], restore: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `step` orders; it runs twice before, and `restore` undoes what a run has changed."""
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
