"""Measure the speed of a model's prefill and decoding, and the memory that they take.

Letters: B batch, T tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..generate import generate, prefill_chunks
from ..model import Transformer
from ..sampling import SamplingParams
from ..system.memory import read

WARM_UP = 32  # tokens to feed before the timing starts: the first call of an operator is slow


def measure(model: Transformer, context: int, new_tokens: int, batch: int = 1, reps: int = 3) -> dict[str, Any]:
    """Prefill random prompts of `context` tokens, then decode `new_tokens` steps greedily. Repeat this `reps` times.

    Returns tokens per second, summed over the rows of the batch, and the peak of the resident memory in MiB. A short
    warm-up is not timed. Raises ContextLengthError if the tokens don't fit into the context.
    """
    slots = context + new_tokens
    run(model, batch, min(context, WARM_UP), min(2, new_tokens), slots, seed=-1)
    times = [run(model, batch, context, new_tokens, slots, rep) for rep in range(reps)]
    prefill_tps = [batch * context / seconds for seconds, _ in times]
    decode_tps = [batch * new_tokens / seconds for _, seconds in times]
    return {
        "prefill_tps": round(max(prefill_tps), 1),
        "decode_tps": round(max(decode_tps), 2),
        "decode_tps_all": [round(tps, 2) for tps in decode_tps],
        "peak_rss_mb": peak_rss_mb(),
        "prefill_tps_median": round(statistics.median(prefill_tps), 1),
        "decode_tps_median": round(statistics.median(decode_tps), 2),
    }


def read_bandwidth(device: torch.device) -> float:
    """Bytes that the device reads per second, measured by summing a tensor of 268 MB ten times."""
    x = torch.ones(2**26, device=device)
    float(x.sum())
    started = time.perf_counter()
    for _ in range(10):
        total = x.sum()
    float(total)  # wait for the device
    return 10 * x.nbytes / (time.perf_counter() - started)


def run(model: Transformer, batch: int, context: int, steps: int, slots: int, seed: int) -> tuple[float, float]:
    """Prefill random prompts and decode. Returns (seconds of the prefill, seconds of the decoding steps)."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(model.config.vocab_size) for _ in range(context)] for _ in range(batch)]  # (B, T)
    passes = decode(model, prompts, steps, slots)
    started = time.perf_counter()
    next(passes)
    between = time.perf_counter()
    for _ in passes:
        pass
    return between - started, time.perf_counter() - between


@torch.inference_mode()
def decode(model: Transformer, prompts: Sequence[Sequence[int]], steps: int, slots: int) -> Iterator[list[int]]:
    """Feed prompts (B, T) of equal length and then decode greedily, in a cache of `slots` tokens.

    Yields the next id of each row: once after the prompts, then after each step. A single prompt runs through
    `generate`, like the prompt of a user. Raises ContextLengthError if the tokens don't fit into the context.
    """
    if len(prompts) == 1 and slots < model.max_seq_len:  # generate needs one more slot, for the last id
        params = SamplingParams(temperature=0.0, max_new_tokens=steps + 1)
        for token in generate(model, prompts[0], params, cache=model.new_cache(slots + 1)):
            yield [token.id]
        return
    cache, fed = model.new_cache(slots, batch=len(prompts)), prompts
    for _ in range(1 + steps):
        *_, h = prefill_chunks(model, fed, cache)  # (B, T, C)
        ids = model.output(h[:, -1]).argmax(-1).tolist()  # (B, V) -> (B,)
        fed = [[id] for id in ids]
        yield ids


def peak_rss_mb() -> int | None:
    """Peak resident memory of this process so far, in MiB; None if the system does not report it."""
    # getrusage is not used: it also counts the parent's memory at the time of the fork
    peak = re.search(r"^VmHWM:\s+(\d+) kB", read(Path("/proc/self/status")), re.MULTILINE)
    return int(peak[1]) // 2**10 if peak else None
