"""Does a model fit on some GPUs, and how fast can it be at best? Computed from bytes and bandwidth alone.

A GPU with a slice of each layer holds a smaller model (fewer heads, a narrower feed-forward network), so ModelConfig
counts its weights and its cache. A decoding step reads every weight and all keys and values once, so it takes at least
these bytes divided by the bandwidth. Real programs reach a share of this bound (REACHED).
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .. import checks, spelling
from ..config import ModelConfig
from ..errors import UsageError
from ..quant.schemes import pick_scheme, scheme_for
from ..system.memory import activation_bytes, cache_bytes, logits_bytes
from .model_facts import Bits

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
RESERVE = 0.1  # share of the memory for CUDA's context, kernels and fragmentation, as in vLLM
CHUNK = 2048  # tokens of a prompt in one pass, as in generate.prefill on CUDA
HOST = 8  # GPUs of a host; tensor parallelism communicates twice a layer, so by default it stays within one
MOST_GPUS = 4096
MOST_SEQUENCES = 2**20

# The smallest and the largest share of the bandwidth that gpt-fast reports for decoding in bfloat16 at batch 1, on 1 to
# 8 A100s with 80 GB (its README, GB/s divided by 2,039).
REACHED = 0.56, 0.73


class GPU(NamedTuple):
    """A device, in bytes and bytes per second; a bandwidth of 0 is unknown. A GB of a data sheet is 10^9 bytes."""

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
        GPU("A100-80", 80e9, 2.039e12, "NVIDIA A100 data sheet, SXM"),
        GPU("A100-40", 40e9, 1.555e12, "NVIDIA A100 data sheet, SXM"),
        GPU("L40S", 48e9, 864e9, "NVIDIA L40S data sheet"),
        GPU("L4", 24e9, 300e9, "NVIDIA L4 data sheet"),
        GPU("RTX4090", 24e9, 1.008e12, "NVIDIA Ada GPU architecture white paper"),
        GPU("RTX3090", 24e9, 936e9, "NVIDIA Ampere GA102 white paper"),
        GPU("MI300X", 192e9, 5.3e12, "AMD Instinct MI300X data sheet"),
    )
}
ALIASES = {"a100": "a100-80", "h100-sxm": "h100", "4090": "rtx4090", "3090": "rtx3090"}
CUSTOM = ("custom", "cpu")  # without a data sheet: the user gives the memory and, for the speed, the bandwidth


def parse_gpus(text: str, memory: float | None = None, bandwidth: float | None = None) -> tuple[int, GPU]:
    """'16xH100' -> (16, the GPU). memory, bandwidth: in place of those of the data sheet."""
    match = re.fullmatch(r"\s*(?:(\d{1,6})\s*[x*]\s*)?([A-Za-z0-9][\w.-]*)\s*", text)
    if not match or not 1 <= int(match[1] or 1) <= MOST_GPUS:
        raise UsageError(f"expected GPUs as a number up to {MOST_GPUS} and a name, as in 16xH100, got {text!r:.60}")
    name = ALIASES.get(match[2].lower(), match[2].lower())
    if name not in (*GPUS, *CUSTOM):
        near = spelling.nearest(name, (*GPUS, *CUSTOM), 1, 0.7)
        known = f"did you mean {near[0]}?" if near else f"known: {', '.join(gpu.name for gpu in GPUS.values())}."
        raise UsageError(f"unknown GPU {match[2]!r}; {known} For another: --gpus custom --gpu-memory 16GB")
    gpu = GPUS.get(name, GPU(name, 0, 0, "as given"))
    given = {"memory": memory, "bandwidth": bandwidth}
    for field, value in given.items():
        if value is not None:
            checks.positive(f"--gpu-{field}", value, 1e21)
    if not (memory or gpu.memory):
        raise UsageError(f"the GPU {name!r} has no data sheet: add --gpu-memory")
    if name in GPUS and (memory or bandwidth):
        gpu = gpu._replace(source=f"{gpu.source}; {' and '.join(filter(given.get, given))} as given")
    return int(match[1] or 1), gpu._replace(memory=memory or gpu.memory, bandwidth=bandwidth or gpu.bandwidth)


def scheme_bits(name: str | None, size: int, tied: bool) -> Bits:
    """Bits per weight of a model that is quantized by a scheme; None: every weight has `size` bytes."""
    if name is None:
        return Bits(8 * size, 8 * size, 8 * size)
    scheme = pick_scheme(name)
    output = scheme_for("output", scheme).bits_per_weight
    return Bits(scheme.bits_per_weight, output, output if tied else 8 * size)


class Split(NamedTuple):
    """The GPUs that share each layer (tensor), and the number of layers of each stage of a pipeline."""

    tensor: int
    layers: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """The split in the form of `plan --json`."""
        return {"gpus": self.tensor * len(self.layers), "tensor": self.tensor, "pipeline": len(self.layers),
                "layers": list(self.layers)}  # fmt: skip


def splits(config: ModelConfig, count: int) -> Iterator[Split]:
    """Every way to split a model over exactly `count` GPUs, the widest tensor parallelism first.

    Heads and feed-forward network are divided evenly; with fewer key/value heads than GPUs, several have the same head.
    """
    heads, kv, layers = config.n_heads, config.n_kv_heads, config.n_layers
    for tensor in range(min(count, heads), 0, -1):
        stages, rest = divmod(count, tensor)
        even = not (rest or heads % tensor or config.hidden_dim % tensor) and 0 in (kv % tensor, tensor % kv)
        if even and stages <= layers:
            yield Split(tensor, tuple(layers * (i + 1) // stages - layers * i // stages for i in range(stages)))


def choose(config: ModelConfig, count: int) -> Split | None:
    """The widest tensor parallelism within a host, and stages over hosts; None if the model can't be split so."""
    return next((split for split in splits(config, count) if split.tensor <= HOST), None)


def pick_split(config: ModelConfig, count: int, tensor: int | None, pipeline: int | None) -> Split:
    """The split with these numbers, by default that of `choose`. Raises UsageError if there is none."""
    ways = list(splits(config, count))
    wanted = [way for way in ways if tensor in (None, way.tensor) and pipeline in (None, len(way.layers))]
    if tensor is None and pipeline is None:
        wanted = [way for way in ways if way.tensor <= HOST]
    if not wanted:
        possible = ", ".join(f"{way.tensor} x {len(way.layers)}" for way in ways) or "none"
        raise UsageError(
            f"{count} GPUs can't share {config.n_heads} heads, {config.n_kv_heads} key/value heads and"
            f" {config.n_layers} layers evenly in this way; possible values of tensor x pipeline: {possible}"
        )
    return wanted[0]


class Stage(NamedTuple):
    """Bytes on one GPU of a stage, and of the weights that a decoding step reads."""

    layers: int
    weights: float
    kv_cache: int
    activations: int
    weights_read: float

    @property
    def needs(self) -> float:
        """Bytes in total, without the reserve."""
        return self.weights + self.kv_cache + self.activations


@dataclass(frozen=True)
class Run:
    """`batch` sequences of `context` tokens. size: bytes of a value that is not quantized."""

    config: ModelConfig
    bits: Bits
    batch: int
    context: int
    size: int = 2
    kv_cache: str = "model"  # or "int8"

    def stages(self, split: Split) -> list[Stage]:
        """What a GPU of each stage holds. The first has the embedding, the last the output layer."""
        found, bits, tied, tensor = [], self.bits, self.config.tie_embeddings, split.tensor
        for index, layers in enumerate(split.layers):
            part = replace(
                self.config,
                n_layers=layers,
                no_rope_layers=(),
                n_heads=self.config.n_heads // tensor,
                n_kv_heads=max(1, self.config.n_kv_heads // tensor),
                hidden_dim=self.config.hidden_dim // tensor,
                vocab_size=-(-self.config.vocab_size // tensor),
            )
            heads, vocabulary = 2 * part.head_dim * (part.n_heads + part.n_kv_heads), part.vocab_size * part.dim
            matrices = layers * part.dim * (heads + 3 * part.hidden_dim)
            vectors = part.n_params - matrices - vocabulary * (1 if tied else 2)  # norms and biases
            first, last = index == 0, index == len(split.layers) - 1
            read = vectors * self.size + (matrices * bits.layers + last * vocabulary * bits.output) / 8
            embedding = vocabulary * bits.embedding / 8 if first and not (last and tied) else 0
            cache = cache_bytes(part, self.context, self.size, self.kv_cache, self.batch)
            activations = activation_bytes(part, self.context, self.size, self.kv_cache, CHUNK)
            activations += (self.batch - 1) * logits_bytes(part)
            found.append(Stage(layers, read + embedding, cache, activations, read))
        return found

    def needs(self, split: Split) -> float:
        """Bytes on the fullest GPU, without the reserve."""
        return max(stage.needs for stage in self.stages(split))

    def fits(self, split: Split | None, gpu: GPU) -> bool:
        """Whether every GPU keeps its reserve free."""
        return split is not None and self.needs(split) <= (1 - RESERVE) * gpu.memory

    def largest_context(self, split: Split, gpu: GPU) -> int:
        """The most tokens of each sequence with which the run fits; 0 if it does not fit with one token."""
        limit = self.config.max_seq_len
        return largest(limit, lambda context: replace(self, context=context).fits(split, gpu))

    def smallest(self, gpu: GPU) -> Split | None:
        """The split over the fewest GPUs that the run fits on."""
        counts = range(1, min(MOST_GPUS, self.config.n_layers * HOST) + 1)
        return next((way for n in counts if self.fits(way := choose(self.config, n), gpu)), None)


def largest(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number from 1 to `limit` for which `holds` is true; 0 if none. `holds` must be monotonic."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda number: not holds(number))


def plan(run: Run, gpu: GPU, split: Split, others: dict[str | None, Bits]) -> dict[str, Any]:
    """The facts of a run in the form of `plan --json`. others: name -> weights to compare."""
    checks.integer("batch", run.batch, 1, 2**31)
    checks.integer("context", run.context, 1, 2**31)
    stages, smallest, reserve = run.stages(split), run.smallest(gpu), RESERVE * gpu.memory
    full = max(stages, key=lambda stage: stage.needs)
    fits = run.fits(split, gpu)
    step = sum(stage.weights_read + stage.kv_cache for stage in stages) / gpu.bandwidth if gpu.bandwidth else None
    alternatives = {name: replace(run, bits=bits) for name, bits in others.items()}
    config = run.config
    return {
        "parameters": config.n_params,
        "layers": config.n_layers,
        "heads": config.n_heads,
        "kv_heads": config.n_kv_heads,
        "max_seq_len": config.max_seq_len,
        "kv_cache": run.kv_cache,
        "batch": run.batch,
        "context": run.context,
        "gpus": split.tensor * len(split.layers),
        "gpu": gpu._asdict() | {"bandwidth": gpu.bandwidth or None},
        "split": split.as_dict(),
        "kv_head_copies": max(1, split.tensor // config.n_kv_heads),
        "memory": {
            "weights": round(full.weights),
            "kv_cache": full.kv_cache,
            "activations": full.activations,
            "reserve": round(reserve),
            "total": round(full.needs + reserve),
            "of": round(gpu.memory),
        },
        "stages": [
            {**stage._asdict(), "weights": round(stage.weights), "weights_read": round(stage.weights_read)}
            | {"kv_cache_read": stage.kv_cache}
            for stage in stages
        ],
        "fits": fits,
        "smallest": smallest and smallest.as_dict(),
        "largest_batch": largest(MOST_SEQUENCES, lambda batch: replace(run, batch=batch).fits(split, gpu)),
        "largest_context": run.largest_context(split, gpu),
        "alternatives": [
            {
                "quantize": name,
                "weights": round(sum(stage.weights for stage in other.stages(Split(1, (config.n_layers,))))),
                "per_gpu": round(other.needs(split) + reserve),
                "fits": other.fits(split, gpu),
                "largest_context": other.largest_context(split, gpu),
                "smallest": (few := other.smallest(gpu)) and few.as_dict(),
            }
            for name, other in alternatives.items()
        ],
        "decode": {"step_s": step, "tps_each": 1 / step, "tps_batch": run.batch / step} if step and fits else None,
    }
