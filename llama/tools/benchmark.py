"""Speed as numbers: prefill and decoding timed, what a decoding step reads, and how fast this memory can be read.

Decoding one token does little but read the weights, so the bytes it has to read, divided by the bandwidth of the
memory, are the time it could take at best; how near a model comes to that is its share.

Letters: B batch, T tokens of a prompt, S cached tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..cache import KVCache
from ..errors import UsageError
from ..generate import generate
from ..model import Transformer
from ..sampling import SamplingParams

CHUNK = 256  # tokens of each prompt of a batch that go in at once
WARM_UP = 32  # tokens that go in before anything is timed: the first call of an operator sets it up
PROFILED = 8  # decoding steps in a profile


@dataclass(frozen=True)
class Speed:
    """One model, timed: a number for each repetition.

    prefill_s      seconds for `batch` prompts of `context` tokens
    decode_s       seconds for the `new_tokens` steps behind them
    bandwidths     bytes a second that the memory gave right after each
    step_bytes     bytes that one decoding step has to read
    peak_rss_mb    largest resident memory, MiB, before the bandwidth was measured; None where nobody tells
    """

    batch: int
    context: int
    new_tokens: int
    prefill_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    bandwidths: tuple[float, ...]
    step_bytes: int
    peak_rss_mb: int | None

    @property
    def prefill_tps(self) -> list[float]:
        """Prompt tokens a second, over all rows of the batch."""
        return [self.batch * self.context / seconds for seconds in self.prefill_s]

    @property
    def decode_tps(self) -> list[float]:
        """New tokens a second, over all rows of the batch."""
        return [self.batch * self.new_tokens / seconds for seconds in self.decode_s]

    @property
    def bytes_per_token(self) -> float:
        """Bytes to be read for each new token; the rows of a batch share the weights."""
        return self.step_bytes / self.batch

    @property
    def share(self) -> float:
        """How much of the bandwidth decoding uses: the best run beside the best bandwidth."""
        return self.bytes_per_token * max(self.decode_tps) / max(self.bandwidths)

    def as_dict(self) -> dict[str, float | int | list[float] | None]:
        """The numbers to show: rounded, GB/s for the bandwidth."""
        return {
            "prefill_tps": round(max(self.prefill_tps), 1),
            "decode_tps": round(max(self.decode_tps), 2),
            "decode_tps_all": [round(tps, 2) for tps in self.decode_tps],
            "peak_rss_mb": self.peak_rss_mb,
            "prefill_tps_median": round(statistics.median(self.prefill_tps), 1),
            "decode_tps_median": round(statistics.median(self.decode_tps), 2),
            "bytes_per_token": round(self.bytes_per_token),
            "bandwidth_gbs": round(max(self.bandwidths) / 1e9, 2),
            "share": round(self.share, 3),
        }


def measure(model: Transformer, context: int, new_tokens: int, batch: int = 1, reps: int = 3) -> Speed:
    """Prefill random prompts of `context` tokens and decode `new_tokens` steps greedily behind them, `reps` times.

    A few tokens go through first, untimed. The bandwidth is measured after each repetition and not once at the end,
    since what a shared machine gives changes from second to second. Raises ContextLengthError when it does not fit.
    """
    _run(model, _prompts(model, batch, min(context, WARM_UP), seed=-1), min(2, new_tokens), context + new_tokens)
    prefill_s, decode_s, bandwidths, peak, buffer = [], [], [], None, None
    for rep in range(reps):
        seconds = _run(model, _prompts(model, batch, context, rep), new_tokens, context + new_tokens)
        prefill_s.append(seconds[0])
        decode_s.append(seconds[1])
        if buffer is None:  # from here on it is in the memory too
            peak = peak_rss_mb()
            buffer = torch.ones(buffer_bytes(model.norm.weight.device) // 4, device=model.norm.weight.device)
        bandwidths.append(bandwidth(buffer))
    read = linear_bytes(model) + cache_bytes(model.new_cache(context, batch=batch), context)
    return Speed(batch, context, new_tokens, tuple(prefill_s), tuple(decode_s), tuple(bandwidths), read, peak)


def _run(model: Transformer, prompts: list[list[int]], steps: int, room: int) -> tuple[float, float]:
    """Seconds of a prefill and of so many steps behind it."""
    passes = decode(model, prompts, steps, room)
    started = time.perf_counter()
    next(passes)
    between = time.perf_counter()
    for _ in passes:
        pass
    return between - started, time.perf_counter() - between


def _prompts(model: Transformer, batch: int, context: int, seed: int) -> list[list[int]]:
    """Random ids, (B, T)."""
    rng = random.Random(seed)
    return [[rng.randrange(model.config.vocab_size) for _ in range(context)] for _ in range(batch)]


def decode(model: Transformer, prompts: Sequence[Sequence[int]], steps: int, room: int) -> Iterator[list[int]]:
    """Feed prompts (B, T) of one length and decode greedily behind them, in a cache for `room` tokens.

    Yields the next id of each row after the prompts and after each of the steps, 1 + steps times. A single prompt goes
    the way of all text, through `generate`. Raises ContextLengthError when it does not fit.
    """
    if len(prompts) == 1 and room < model.max_seq_len:  # generate wants a place for the last id too, which is not fed
        params = SamplingParams(temperature=0.0, max_new_tokens=steps + 1)
        for token in generate(model, prompts[0], params, cache=model.new_cache(room + 1)):
            yield [token.id]
        return
    cache = model.new_cache(room, batch=len(prompts))
    ids = feed(model, prompts, cache)
    yield ids
    for _ in range(steps):
        ids = feed(model, [[id] for id in ids], cache)
        yield ids


@torch.inference_mode()
def feed(model: Transformer, rows: Sequence[Sequence[int]], cache: KVCache) -> list[int]:
    """Feed ids (B, T) into the model, `CHUNK` of each row at a time: the likeliest next id of each row."""
    tokens = torch.tensor(rows, device=cache.device)  # (B, T)
    length = cache.length + tokens.shape[1]
    for start in range(0, tokens.shape[1], CHUNK):
        h = model.hidden(tokens[:, start : start + CHUNK], cache=cache, length=length)  # (B, t, C)
    ids: list[int] = model.output(h[:, -1]).argmax(-1).tolist()  # (B, V) -> (B,)
    return ids


# ------------------------------------------------------------------------------------------------- what memory does
def linear_bytes(model: nn.Module) -> int:
    """Bytes of every linear layer as it is held: weights, scales, biases. The embedding, read by the row, is not one.

    Where embeddings are tied, the output layer is the same matrix, and that is read whole.
    """
    layers = [module for module in model.modules() if isinstance(getattr(module, "in_features", None), int)]
    return sum(tensor.nbytes for layer in layers for tensor in _tensors(layer))


def _tensors(layer: nn.Module) -> Iterator[Tensor]:
    yield from layer.parameters(recurse=False)
    yield from layer.buffers(recurse=False)
    yield from (value for value in vars(layer).values() if isinstance(value, Tensor))  # packed by torch


def cache_bytes(cache: KVCache, length: int) -> int:
    """Bytes of keys and values that a step reads behind `length` tokens in each row of a cache."""
    return sum(buffer.nbytes for layer in cache.layers for buffer in layer.buffers) * length // cache.slots


def buffer_bytes(device: torch.device) -> int:
    """What to measure a bandwidth on: far more than a cache holds, 512 MiB or, with memory to spare, 1 GiB."""
    return 2**30 if _free_bytes(device) >= 2**32 else 2**29


def _free_bytes(device: torch.device) -> int:
    """Memory that is free on a device; 0 where nobody tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _kib("/proc/meminfo", "MemAvailable") * 1024


def bandwidth(buffer: Tensor, times: int = 4) -> float:
    """Bytes a second: the best of several sums over a buffer; on a GPU, of copies of it, which read and write."""
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
    """Largest resident memory of this process so far, MiB; None where the system does not tell."""
    peak = _kib("/proc/self/status", "VmHWM")  # getrusage would count what the parent held before this program began
    if peak:
        return peak // 2**10
    try:
        import resource
    except ImportError:
        return None
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used // (2**20 if sys.platform == "darwin" else 2**10)


def _kib(path: str, key: str) -> int:
    """A number of Linux's in KiB; 0 on other systems."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), 0)


# ------------------------------------------------------------------------------------------------------- the profile
@dataclass(frozen=True)
class Cost:
    """What one operator took of a profile: the time in it and not in operators that it calls, and its share of all."""

    operator: str
    calls: int
    self_ms: float
    share: float


def profile(
    model: Transformer, folder: Path, context: int, new_tokens: int, batch: int = 1, top: int = 10
) -> dict[str, list[Cost]]:
    """Run a prefill and a few decoding steps under torch.profiler: "prefill" and "decode" -> the costliest operators.

    The traces go to prefill.json and decode.json in the folder, for chrome://tracing or ui.perfetto.dev. What lies in
    no operator, Python and compiled code, has the phase's own name. The profiler itself costs time at every call.
    Raises UsageError when the folder can't be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}; expected a folder for the traces") from None
    on_gpu = model.norm.weight.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    prompts = _prompts(model, batch, context, seed=0)
    _run(model, [row[:WARM_UP] for row in prompts], min(2, new_tokens), context + new_tokens)
    passes = decode(model, prompts, min(PROFILED, new_tokens), context + new_tokens)
    found = {}
    for phase, count in (("prefill", 1), ("decode", None)):
        with torch.profiler.profile(activities=activities) as prof, torch.profiler.record_function(phase):
            for _ in itertools.islice(passes, count):
                pass
        prof.export_chrome_trace(str(folder / f"{phase}.json"))
        found[phase] = _costs(prof, on_gpu)[:top]
    return found


def _costs(prof: torch.profiler.profile, on_gpu: bool) -> list[Cost]:
    """Every operator of a profile, the costliest first."""
    rows = []
    for event in prof.key_averages():
        if event.device_type.name == "CPU":  # the kernels of a GPU are in their operators' time
            spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            rows.append((event.key, event.count, spent / 1e3))
    whole = sum(ms for *_, ms in rows) or 1.0
    return [Cost(key, count, ms, ms / whole) for key, count, ms in sorted(rows, key=lambda row: -row[2])]
