"""Measure a model's speed: prefill, decoding, the bytes that a decoding step reads, and the memory's bandwidth.

Decoding one token spends its time reading the weights, so the bytes to read divided by the memory's bandwidth are a
lower bound on its time. The share is that bound divided by the measured time.

Letters: B batch, T tokens of a prompt, S cached tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import KVCache
from ..generate import generate
from ..model import Transformer
from ..sampling import SamplingParams

CHUNK = 256  # tokens of each prompt in a batch that are fed in one pass
BUFFER = 2**29  # bytes to measure the bandwidth on, far above the size of a processor cache
WARM_UP = 32  # tokens to feed before the timing starts: the first call of an operator is slow


def measure(model: Transformer, context: int, new_tokens: int, batch: int = 1, reps: int = 3) -> dict[str, Any]:
    """Prefill random prompts of `context` tokens and decode `new_tokens` steps greedily after them, `reps` times.

    Returns tokens per second over all rows of the batch, bytes per new token, the bandwidth in GB/s, and the peak of
    the resident memory in MiB before the bandwidth was measured. A short warm-up is not timed. The bandwidth is
    measured after each repetition, since that of a shared machine changes from second to second. Raises
    ContextLengthError if the tokens don't fit into the context.
    """
    slots, device = context + new_tokens, model.norm.weight.device
    run(model, random_prompts(model, batch, min(context, WARM_UP), seed=-1), min(2, new_tokens), slots)
    prefill_tps, decode_tps, bandwidths, peak, buffer = [], [], [], None, None
    for rep in range(reps):
        prefill_s, decode_s = run(model, random_prompts(model, batch, context, rep), new_tokens, slots)
        prefill_tps.append(batch * context / prefill_s)
        decode_tps.append(batch * new_tokens / decode_s)
        if buffer is None:  # made after the first repetition, so that the peak does not include it
            peak, buffer = peak_rss_mb(), torch.ones(BUFFER // 4, device=device)
        bandwidths.append(bandwidth(buffer))
    step_bytes = linear_bytes(model) + cache_bytes(model.new_cache(context, batch=batch), context)
    bytes_per_token = step_bytes / batch  # the rows of a batch share the weights
    return {
        "prefill_tps": round(max(prefill_tps), 1),
        "decode_tps": round(max(decode_tps), 2),
        "decode_tps_all": [round(tps, 2) for tps in decode_tps],
        "peak_rss_mb": peak,
        "prefill_tps_median": round(statistics.median(prefill_tps), 1),
        "decode_tps_median": round(statistics.median(decode_tps), 2),
        "bytes_per_token": round(bytes_per_token),
        "bandwidth_gbs": round(max(bandwidths) / 1e9, 2),
        "share": round(bytes_per_token * max(decode_tps) / max(bandwidths), 3),
    }


def run(model: Transformer, prompts: list[list[int]], steps: int, slots: int) -> tuple[float, float]:
    """(seconds of the prefill, seconds of the decoding steps after it)."""
    passes = decode(model, prompts, steps, slots)
    started = time.perf_counter()
    next(passes)
    between = time.perf_counter()
    for _ in passes:
        pass
    return between - started, time.perf_counter() - between


def random_prompts(model: Transformer, batch: int, context: int, seed: int) -> list[list[int]]:
    """Random token ids, (B, T)."""
    rng = random.Random(seed)
    return [[rng.randrange(model.config.vocab_size) for _ in range(context)] for _ in range(batch)]


def decode(model: Transformer, prompts: Sequence[Sequence[int]], steps: int, slots: int) -> Iterator[list[int]]:
    """Feed prompts (B, T) of equal length and decode greedily after them, in a cache of `slots` tokens.

    Yields the next id of each row after the prompts and after each step, 1 + steps times. A single prompt runs through
    `generate`, as all text does. Raises ContextLengthError if the tokens don't fit into the context.
    """
    if len(prompts) == 1 and slots < model.max_seq_len:  # generate needs a slot for the last id, which is not fed
        params = SamplingParams(temperature=0.0, max_new_tokens=steps + 1)
        for token in generate(model, prompts[0], params, cache=model.new_cache(slots + 1)):
            yield [token.id]
        return
    cache = model.new_cache(slots, batch=len(prompts))
    ids = feed(model, prompts, cache)
    yield ids
    for _ in range(steps):
        ids = feed(model, [[id] for id in ids], cache)
        yield ids


@torch.inference_mode()
def feed(model: Transformer, rows: Sequence[Sequence[int]], cache: KVCache) -> list[int]:
    """Feed ids (B, T) to the model, `CHUNK` of each row at a time; return the most likely next id of each row."""
    tokens = torch.tensor(rows, device=cache.device)  # (B, T)
    length = cache.length + tokens.shape[1]
    for start in range(0, tokens.shape[1], CHUNK):
        h = model.hidden(tokens[:, start : start + CHUNK], cache=cache, length=length)  # (B, t, C)
    ids: list[int] = model.output(h[:, -1]).argmax(-1).tolist()  # (B, V) -> (B,)
    return ids


# ------------------------------------------------------------------------------------------------------ memory reads
def linear_bytes(model: nn.Module) -> int:
    """Bytes of all linear layers in memory: weights, scales, biases. A step reads one row of an embedding only.

    An embedding counts if it is tied to the output layer, since a step reads all of that.
    """
    layers = [module for module in model.modules() if isinstance(getattr(module, "in_features", None), int)]
    tensors = [(*layer.parameters(recurse=False), *layer.buffers(recurse=False)) for layer in layers]
    return sum(tensor.nbytes for tensor in itertools.chain(*tensors))


def cache_bytes(cache: KVCache, length: int) -> int:
    """Bytes of keys and values that a step reads when each row of a cache has `length` tokens."""
    return sum(buffer.nbytes for layer in cache.layers for buffer in layer.buffers) * length // cache.slots


def bandwidth(buffer: Tensor, times: int = 4) -> float:
    """Bytes per second: the fastest of several sums over a buffer; on a GPU, of copies, which read and write it."""
    copy = None if buffer.device.type == "cpu" else torch.empty_like(buffer)
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        if copy is None:
            buffer.sum()
        else:
            copy.copy_(buffer)
            torch.accelerator.synchronize(buffer.device)
        seconds.append(time.perf_counter() - started)
    return buffer.nbytes * (1 if copy is None else 2) / min(seconds)


def peak_rss_mb() -> int | None:
    """Peak resident memory of this process so far, in MiB; None if the system does not report it."""
    with contextlib.suppress(
        OSError
    ):  # not by getrusage, which also counts the parent's memory at the time of the fork
        if peak := re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(peak[1]) // 2**10
    return None
