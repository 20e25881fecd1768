"""Compute from bytes and bandwidth whether a model fits on some GPUs, and the highest speed of decoding.

The GPUs share the weights evenly, and the keys and values by heads. A decoding step reads every weight and all keys and
values once, so its time is at least the number of these bytes divided by the bandwidth.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from .. import checks
from ..checkpoint.base import EMBEDDING
from ..config import ModelConfig
from ..errors import UsageError
from ..generate import prompt_chunk
from ..quant.schemes import pick_scheme, scheme_for
from ..system.memory import activation_bytes, cache_bytes, free_memory, logits_bytes
from ..weights import expected_shapes
from .benchmark import read_bandwidth

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
RESERVE = 0.1  # share of the memory for CUDA's context, kernels and fragmentation, as in vLLM
MOST_SEQUENCES = 2**20


class GPU(NamedTuple):
    """A device: memory in bytes, bandwidth in bytes per second (0: unknown). A GB in a data sheet is 10^9 bytes."""

    name: str
    memory: float
    bandwidth: float
    source: str


GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        GPU("H100", 80e9, 3.35e12, "NVIDIA H100 data sheet, SXM5"),
        GPU("H100-PCIe", 80e9, 2.0e12, "NVIDIA H100 data sheet, PCIe"),
        GPU("H200", 141e9, 4.8e12, "NVIDIA H200 data sheet, SXM"),
        GPU("B200", 180e9, 8.0e12, "NVIDIA DGX B200 data sheet, an eighth of it"),
        GPU("A100", 80e9, 2.039e12, "NVIDIA A100 data sheet, SXM"),
        GPU("A100-40", 40e9, 1.555e12, "NVIDIA A100 data sheet, SXM"),
        GPU("L40S", 48e9, 864e9, "NVIDIA L40S data sheet"),
        GPU("L4", 24e9, 300e9, "NVIDIA L4 data sheet"),
        GPU("RTX5090", 32e9, 1.792e12, "NVIDIA GeForce RTX 50 specifications"),
        GPU("RTX5080", 16e9, 960e9, "NVIDIA GeForce RTX 50 specifications"),
        GPU("RTX5070", 12e9, 672e9, "NVIDIA GeForce RTX 50 specifications"),
        GPU("RTX4090", 24e9, 1.008e12, "NVIDIA Ada GPU architecture white paper"),
        GPU("RTX4080", 16e9, 716.8e9, "NVIDIA GeForce RTX 40 specifications"),
        GPU("RTX4070", 12e9, 504e9, "NVIDIA GeForce RTX 40 specifications"),
        GPU("RTX4060Ti", 16e9, 288e9, "NVIDIA GeForce RTX 40 specifications"),
        GPU("RTX4060", 8e9, 272e9, "NVIDIA GeForce RTX 40 specifications"),
        GPU("RTX3090", 24e9, 936e9, "NVIDIA Ampere GA102 white paper"),
        GPU("MI300X", 192e9, 5.3e12, "AMD Instinct MI300X data sheet"),
        GPU("custom", 0, 0, "no data sheet"),
        GPU("cpu", 0, 0, "no data sheet"),
    )
}


def this_machine() -> tuple[int, GPU]:
    """The number of CUDA devices, and a GPU with the least free memory of a device and the measured bandwidth.

    Without CUDA, it is one device: the CPU with its free memory.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rooms = [free_memory(f"cuda:{i}") for i in range(count)] or [free_memory()]
    free = min(room.bytes if room else 0 for room in rooms)
    if not free:
        raise UsageError("the free memory of this machine is not known: add --gpus 1xcpu --gpu-memory GB")
    bandwidth = read_bandwidth(torch.device("cuda" if count else "cpu"))
    source = f"free on this machine, which reads {bandwidth / 1e9:,.0f} GB/s now"
    name = torch.cuda.get_device_name(0) if count else "cpu"
    return count or 1, GPU(name, free, bandwidth, source if count else f"{source} in {torch.get_num_threads()} threads")


def parse_gpus(text: str | None, memory: float | None = None, bandwidth: float | None = None) -> tuple[int, GPU]:
    """'16xH100' -> (16, the GPU); None is this machine. `memory` and `bandwidth` replace the data sheet's values."""
    if text is None:
        count, gpu = this_machine()
    else:
        match = re.fullmatch(r"\s*(?:(\d{1,6})\s*[x*]\s*)?([A-Za-z0-9][\w.-]*)\s*", text)
        if not match:
            raise UsageError(f"expected GPUs as a number and a name, as in 16xH100, got {text!r:.60}")
        count, gpu = int(match[1] or 1), GPUS[checks.choice("GPU", match[2].lower(), GPUS)]
    for option, value in (("--gpu-memory", memory), ("--gpu-bandwidth", bandwidth)):
        if value is not None:
            checks.number(option, value, 0, 1e18, above=True)
    if memory or bandwidth:
        gpu = GPU(gpu.name, memory or gpu.memory, bandwidth or gpu.bandwidth, f"{gpu.source}; values from the options")
    if not gpu.memory:
        raise UsageError(f"{gpu.name} has no data sheet: add --gpu-memory")
    return count, gpu


def weight_bytes(config: ModelConfig, scheme: str | None, size: int) -> dict[str, float]:
    """The bytes of each weight of a model. Weights that the scheme does not quantize have `size` bytes per value."""
    chosen, found = scheme and pick_scheme(scheme), {}
    for name, shape in expected_shapes(config).items():
        quantized = chosen and len(shape) == 2 and (config.tie_embeddings or name != EMBEDDING)
        bits = scheme_for(name, chosen).bits_per_weight if chosen and quantized else 8 * size
        found[name] = math.prod(shape) * bits / 8
    return found


@dataclass(frozen=True)
class Run:
    """`batch` sequences of `context` tokens on some GPUs.

    sizes  bytes of each weight
    size   bytes of a value that is not quantized
    """

    config: ModelConfig
    sizes: Mapping[str, float]
    batch: int
    context: int
    gpus: int = 1
    size: int = 2
    kv_cache: str = "model"  # or "int8"

    @cached_property
    def weights(self) -> float:
        """Bytes of all weights."""
        return math.fsum(self.sizes.values())

    @property
    def weights_read(self) -> float:
        """Bytes of the weights that a decoding step reads. The embedding counts only if it is also the output layer."""
        return self.weights - (0 if self.config.tie_embeddings else self.sizes[EMBEDDING])

    @property
    def memory(self) -> dict[str, int]:
        """Bytes on each GPU. If there are more GPUs than key/value heads, several GPUs store the same head."""
        c = self.config
        cache = cache_bytes(c, self.context, self.size, self.kv_cache, self.batch)
        activations = activation_bytes(c, self.context, self.size, self.kv_cache, prompt_chunk("cuda"))
        return {
            "weights": round(self.weights / self.gpus),
            "kv_cache": cache // c.n_kv_heads * -(-c.n_kv_heads // self.gpus),
            "activations": activations + (self.batch - 1) * logits_bytes(c),
        }

    def fits(self, gpu: GPU) -> bool:
        """Whether every GPU keeps its reserve free."""
        return sum(self.memory.values()) <= (1 - RESERVE) * gpu.memory

    def step(self, gpu: GPU) -> float | None:
        """The shortest time of a decoding step in seconds; None if the run does not fit or the bandwidth is unknown."""
        if not (gpu.bandwidth and self.fits(gpu)):
            return None
        return (self.weights_read / self.gpus + self.memory["kv_cache"]) / gpu.bandwidth

    def largest_context(self, gpu: GPU) -> int:
        """The largest number of tokens per sequence with which the run fits; 0 if it does not fit with one token."""
        return largest(self.config.max_seq_len, lambda context: replace(self, context=context).fits(gpu))


def largest(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number from 1 to `limit` for which `holds` is true; 0 if none. `holds` must be monotonic."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda number: not holds(number))


def plan(run: Run, gpu: GPU, others: Mapping[str | None, Mapping[str, float]]) -> dict[str, Any]:
    """The facts of a run in the form of `plan --json`.

    others  name of a quantization to compare -> bytes of each weight
    """
    config = run.config
    checks.integer("batch", run.batch, 1, 2**31)
    checks.integer("context", run.context, 1, 2**31)
    most = max(config.n_heads, config.n_layers)  # GPUs that can share a model, by heads or by layers
    checks.integer("number of GPUs", run.gpus, 1, most)
    memory, fits, reserve = run.memory, run.fits(gpu), round(RESERVE * gpu.memory)
    step, runs = run.step(gpu), {name: replace(run, sizes=sizes) for name, sizes in others.items()}
    fastest = sorted(runs, key=lambda name: runs[name].step(gpu) or math.inf)
    alternatives = [
        {
            "quantize": name,
            "per_gpu": sum(runs[name].memory.values()) + reserve,
            "fits": runs[name].fits(gpu),
            "largest_context": runs[name].largest_context(gpu),
            "tps_each": 1 / seconds if (seconds := runs[name].step(gpu)) else None,
        }
        for name in fastest
    ]
    return {
        "parameters": config.n_params,
        "max_seq_len": config.max_seq_len,
        "kv_cache": run.kv_cache,
        "batch": run.batch,
        "context": run.context,
        "gpus": run.gpus,
        "gpu": gpu._asdict() | {"bandwidth": gpu.bandwidth or None},
        "memory": {**memory, "reserve": reserve, "total": sum(memory.values()) + reserve, "of": round(gpu.memory)},
        "weights_read": round(run.weights_read / run.gpus),
        "fits": fits,
        "smallest": next(({"gpus": n} for n in range(1, most + 1) if replace(run, gpus=n).fits(gpu)), None),
        "largest_batch": largest(MOST_SEQUENCES, lambda batch: replace(run, batch=batch).fits(gpu)),
        "largest_context": run.largest_context(gpu),
        "alternatives": alternatives,
        "decode": step and {"step_s": step, "tps_each": 1 / step, "tps_batch": run.batch / step},
    }
