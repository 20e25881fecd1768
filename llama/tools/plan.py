"""Plan a model on GPUs: the memory and traffic of each GPU, and upper bounds on the speed.

Everything is computed from shapes. A GPU with a slice of a model holds a smaller model (fewer heads, a narrower
feed-forward network, fewer layers), so ModelConfig itself counts its weights and its cache. Speeds are bounds of the
roofline model (Williams, Waterman, Patterson 2009): the slowest of memory, arithmetic and links at the rates of the
data sheets. Real programs reach a share of these bounds (REACHED).

Letters: B sequences, S tokens in each, N GPUs that share each layer (tensor parallelism, arXiv:1909.08053),
P stages of consecutive layers (pipeline parallelism, arXiv:1811.06965), C model dim, V vocabulary.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from .. import checks, spelling
from ..config import ModelConfig
from ..errors import UsageError
from ..quant.schemes import Scheme, scheme_for
from ..system import memory
from ..system.memory import cache_bytes

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
RESERVE = 0.1  # share of the memory for CUDA's context, kernels, link buffers and fragmentation, as in vLLM
CHUNK = 2048  # tokens of a prompt in one pass, as in generate.prefill on CUDA
MOST_GPUS = 4096  # the limit of a plan, and of the search for the smallest number of GPUs

# GPUs -> share of the data sheet's bandwidth that gpt-fast reports for decoding at batch 1 on A100s with 80 GB (its
# README, GB/s divided by 2,039): Llama 2 7B on one GPU, then 70B on 2, 4 and 8.
REACHED = {1: 0.69, 2: 0.73, 4: 0.66, 8: 0.56}


@dataclass(frozen=True)
class GPU:
    """A device, in bytes, bytes per second and operations per second.

    bandwidth, flops  0 if they are not known; then no speeds are estimated
    flops     dense 16-bit operations: half of the number that a data sheet gives with sparsity
    link      between two GPUs of a host, in one direction: half of the number that a data sheet gives for both
    network   of one GPU to another host, in one direction
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float
    per_host: int
    network: float
    source: str


# A GB of a data sheet is 10^9 bytes; drivers report a few percent more. The network is the adapter that the usual
# machine (HGX, DGX, MI300X platform) has for each GPU; without a usual machine it is assumed.
ASSUMED = "network assumed: 100 Gb/s a host"
GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("H100", 80e9, 3.35e12, 989e12, 450e9, 8, 50e9, "NVIDIA H100 data sheet, SXM5; DGX H100 data sheet"),
        GPU("H100-PCIe", 80e9, 2.0e12, 756e12, 64e9, 8, 1.5625e9, f"NVIDIA H100 data sheet, PCIe; {ASSUMED}"),
        GPU("H200", 141e9, 4.8e12, 989e12, 450e9, 8, 50e9, "NVIDIA H200 data sheet, SXM; DGX H200 data sheet"),
        GPU("B200", 180e9, 8.0e12, 2250e12, 900e9, 8, 50e9, "NVIDIA DGX B200 data sheet, an eighth of it"),
        GPU("A100-80", 80e9, 2.039e12, 312e12, 300e9, 8, 25e9, "NVIDIA A100 data sheet, SXM; DGX A100 data sheet"),
        GPU("A100-40", 40e9, 1.555e12, 312e12, 300e9, 8, 25e9, "NVIDIA A100 data sheet, SXM; DGX A100 data sheet"),
        GPU("L40S", 48e9, 864e9, 362e12, 32e9, 8, 1.5625e9, f"NVIDIA L40S data sheet; {ASSUMED}"),
        GPU("L4", 24e9, 300e9, 121e12, 32e9, 8, 1.5625e9, f"NVIDIA L4 data sheet; {ASSUMED}"),
        GPU(
            "RTX4090", 24e9, 1.008e12, 165e12, 32e9, 8, 1.5625e9, f"NVIDIA Ada GPU architecture white paper; {ASSUMED}"
        ),
        GPU("RTX3090", 24e9, 936e9, 71e12, 32e9, 8, 1.5625e9, f"NVIDIA Ampere GA102 white paper; {ASSUMED}"),
        GPU("MI300X", 192e9, 5.3e12, 1307e12, 448e9, 8, 50e9, "AMD Instinct MI300X data sheet"),
    )
}
ALIASES = {"a100": "A100-80", "h100-sxm": "H100", "4090": "RTX4090", "3090": "RTX3090"}
CUSTOM = ("custom", "cpu")  # without a data sheet: the user gives the memory, and for speeds bandwidth and flops


def parse_gpus(text: str, **own: float | int | None) -> tuple[int, GPU]:
    """'16xH100' -> (16, the GPU). `own` overrides fields of the GPU by name, except where a value is None.

    Raises UsageError with the known GPUs, or if a custom GPU has no memory.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*[x*]\s*)?([A-Za-z0-9][\w.-]*)\s*", text)
    if not match:
        raise UsageError(f"expected GPUs as a number and a name, as in 16xH100, got {text!r:.60}")
    if match[1] and (len(match[1]) > 6 or not 1 <= int(match[1]) <= MOST_GPUS):
        raise UsageError(f"the number of GPUs must lie between 1 and {MOST_GPUS:,}, as in 16xH100, got {text!r:.60}")
    count, name = int(match[1] or 1), match[2].lower()
    given = {field: value for field, value in own.items() if value is not None}
    if low := [field for field, value in given.items() if not 0 < value < 1e21]:
        raise UsageError(f"the GPU's {low[0]} must be above 0, got {given[low[0]]:g}")
    if name in CUSTOM:
        if "memory" not in given:
            raise UsageError(f"the GPU {name!r} has no data sheet: add --gpu-memory")
        plain: dict[str, Any] = {"bandwidth": 0, "flops": 0, "link": 32e9, "per_host": 8, "network": 1.5625e9} | given
        return count, GPU(name=name, source=f"as given; links as PCIe 4.0 x16; {ASSUMED}", **plain)
    known = {key.lower(): key for key in GPUS} | ALIASES
    if name not in known:
        meant = spelling.did_you_mean(spelling.nearest(match[2], (*GPUS, *CUSTOM), cutoff=0.7))
        raise UsageError(
            f"unknown GPU {match[2]!r}, expected a GPU such as H100 or 16xH100;"
            f" {meant}{'K' if meant else 'k'}nown: {', '.join((*GPUS, *CUSTOM))}; for another GPU, give its memory:"
            f" --gpus {count}xcustom --gpu-memory 16GB"
        )
    gpu = GPUS[known[name]]
    changed: dict[str, Any] = given
    return count, replace(gpu, source=f"{gpu.source}; {', '.join(given)} as given", **changed) if given else gpu


# ------------------------------------------------------------------------------------------------------- memory
@dataclass(frozen=True)
class Stored:
    """Weights as a file stores them: bits per weight of the layers' matrices, the output layer and the embedding."""

    layers: float
    output: float
    embedding: float
    types: tuple[str, ...]  # Q4_1, Q8_0, ..., the largest share first
    dequantized: tuple[str, ...] = ()  # those that a GPU has no kernel for


def stored_in(checkpoint: Checkpoint, size: int, on_cpu: bool = False) -> Stored | None:
    """The bits per weight of a checkpoint with quantized matrices; None if none is quantized. Reads one row of each.

    size    bytes of each weight in the run, for matrices that are not quantized, or that are dequantized on reading
    on_cpu  a CPU computes with a file's blocks; a GPU with those in engine.linears.gpu_format, embeddings excepted
    """
    from ..engine.linears import gpu_format

    matrices = {name: shape[0] * shape[1] for name, shape in checkpoint.shapes.items() if len(shape) == 2}
    kept = [name for name in matrices if checkpoint.blocks(name, slice(0, 1)) is not None]
    entries: dict[str, int] = {}
    for name in kept:
        kind = checkpoint.stored(name)
        entries[kind] = entries.get(kind, 0) + matrices[name]

    tied = checkpoint.config.tie_embeddings
    dequantized: set[str] = set()

    def bits_of(name: str) -> float:
        blocks = checkpoint.blocks(name, slice(0, 1)) if name in kept else None
        if blocks is None or (name == "tok_embeddings.weight" and not tied and not on_cpu):
            return 8 * size
        if on_cpu:
            return checkpoint.bits(name)
        format = gpu_format(blocks)
        if format is None:
            dequantized.add(checkpoint.stored(name))
            return 8 * size
        return format.bits + 16 * (1 + format.offset) / (format.group or checkpoint.shapes[name][1])

    def bits(names: list[str]) -> float:
        return sum(matrices[name] * bits_of(name) for name in names) / sum(matrices[name] for name in names)

    if not entries:
        return None
    return Stored(
        bits([name for name in matrices if name.startswith("layers.")]),
        bits(["tok_embeddings.weight" if tied else "output.weight"]),
        bits(["tok_embeddings.weight"]),
        tuple(sorted(entries, key=lambda kind: -entries[kind])),
        tuple(sorted(dequantized)),
    )


@dataclass(frozen=True)
class Run:
    """B sequences of S tokens to run on a model.

    scheme    quantization of the linear layers, by a scheme or as stored; None: dtype
    kv_cache  "model": keys and values in dtype; "int8": in 8 bits
    """

    config: ModelConfig
    batch: int
    context: int
    dtype: str = "bfloat16"
    scheme: Scheme | Stored | None = None
    kv_cache: str = "model"

    @property
    def size(self) -> int:
        """Bytes of a value that is not quantized."""
        return DTYPE_BYTES[self.dtype]

    def cache_bytes(self, part: ModelConfig) -> int:
        """Bytes of one sequence's keys and values in a slice of the model."""
        return cache_bytes(part, self.context, self.size, self.kv_cache)


@dataclass(frozen=True)
class Split:
    """N GPUs for each layer, and the number of layers of each of the P stages."""

    tensor: int
    layers: tuple[int, ...]

    @property
    def pipeline(self) -> int:
        """P."""
        return len(self.layers)

    @property
    def gpus(self) -> int:
        """N P."""
        return self.tensor * self.pipeline


def slice_of(config: ModelConfig, tensor: int, layers: int) -> ModelConfig:
    """The slice of `layers` layers on each of `tensor` GPUs, as a model of its own.

    It has rows of wq, wk, wv, w_gate, w_up, columns of wo and w_down, rows of both vocabulary matrices; norms and the
    biases of wo and w_down are not split. With fewer key/value heads than GPUs, several GPUs have the same head.
    """
    return replace(
        config,
        n_layers=layers,
        no_rope_layers=(),
        n_heads=config.n_heads // tensor,
        n_kv_heads=max(1, config.n_kv_heads // tensor),
        hidden_dim=config.hidden_dim // tensor,
        vocab_size=-(-config.vocab_size // tensor),
    )


def matrix_params(config: ModelConfig) -> int:
    """The number of parameters in the linear layers of all blocks, without biases."""
    bare = replace(config, attention_bias=False, qkv_bias=False, mlp_bias=False, tie_embeddings=True)
    return bare.n_params - vocabulary_params(config) - (2 * config.n_layers + 1) * config.dim


def vocabulary_params(config: ModelConfig) -> int:
    """V C: the number of parameters of the embedding or of the output layer."""
    return config.vocab_size * config.dim


def weight_bytes(
    config: ModelConfig, size: int, scheme: Scheme | Stored | None = None, first: bool = True, last: bool = True
) -> float:
    """Bytes of a slice's weights; the `first` has the embedding, the `last` the final norm and the output layer.

    With a scheme, embeddings stay in floating point unless they are tied. Then they are quantized as the output layer
    is (engine.linears.embedding_of), and a first stage without the output layer has a copy.
    """
    matrices, vocabulary = matrix_params(config), vocabulary_params(config)
    embeddings = vocabulary * (1 if config.tie_embeddings else 2)
    vectors = config.n_params - matrices - embeddings - (0 if last else config.dim)  # norms and biases
    if isinstance(scheme, Stored):
        bits, output_bits, embedding_bits = scheme.layers, scheme.output, scheme.embedding
    else:
        bits = 8 * size if scheme is None else scheme.bits_per_weight
        output_bits = 8 * size if scheme is None else scheme_for("output", scheme).bits_per_weight
        embedding_bits = output_bits if config.tie_embeddings else 8 * size
    total = vectors * size + matrices * bits / 8
    if last:
        total += vocabulary * output_bits / 8
    if first and not (last and config.tie_embeddings):
        total += vocabulary * embedding_bits / 8
    return total


def activation_bytes(run: Run, part: ModelConfig) -> int:
    """The bound of system/memory.py on a slice's activations: a chunk of one prompt, the logits of each sequence."""
    one_prompt = memory.activation_bytes(part, run.context, run.size, run.kv_cache, CHUNK)
    return one_prompt + (run.batch - 1) * memory.logits_bytes(part)


@dataclass(frozen=True)
class Stage:
    """The memory of one GPU of a stage, in bytes."""

    layers: int
    first: bool
    last: bool
    weights: float
    cache: int
    activations: int

    @property
    def needs(self) -> float:
        """Bytes in total."""
        return self.weights + self.cache + self.activations


def stages(run: Run, split: Split) -> list[Stage]:
    """The memory of a GPU of each stage."""
    found = []
    for index, layers in enumerate(split.layers):
        part = slice_of(run.config, split.tensor, layers)
        first, last = index == 0, index == split.pipeline - 1
        found.append(
            Stage(
                layers,
                first,
                last,
                weight_bytes(part, run.size, run.scheme, first, last),
                run.cache_bytes(part) * run.batch,
                activation_bytes(run, part),
            )
        )
    return found


def fits(run: Run, split: Split, gpu: GPU) -> bool:
    """Whether every stage leaves RESERVE of its GPUs free."""
    return max(stage.needs for stage in stages(run, split)) <= (1 - RESERVE) * gpu.memory


# ------------------------------------------------------------------------------------------------------- splits
def tensor_sizes(config: ModelConfig, most: int = MOST_GPUS) -> list[int]:
    """Every N that divides the heads and hidden_dim, and divides the key/value heads or is a multiple of them."""
    kv = config.n_kv_heads
    return [
        n
        for n in range(1, min(most, config.n_heads) + 1)
        if config.n_heads % n == 0 and config.hidden_dim % n == 0 and (kv % n == 0 or n % kv == 0)
    ]


def even_layers(n_layers: int, pipeline: int) -> tuple[int, ...]:
    """Layers of each stage, as even as possible; later stages get the remainder."""
    return tuple(n_layers * (i + 1) // pipeline - n_layers * i // pipeline for i in range(pipeline))


def splits(config: ModelConfig, count: int) -> list[Split]:
    """Every way to split a model over exactly `count` GPUs, the widest tensor parallelism first."""
    sizes = [n for n in reversed(tensor_sizes(config, count)) if count % n == 0]
    return [Split(n, even_layers(config.n_layers, count // n)) for n in sizes if count // n <= config.n_layers]


def choose(config: ModelConfig, count: int, gpu: GPU) -> Split | None:
    """Tensor parallelism within a host, since it communicates twice a layer, and stages over hosts; or None."""
    return next((split for split in splits(config, count) if split.tensor <= gpu.per_host), None)


def pick_split(config: ModelConfig, count: int, gpu: GPU, tensor: int | None, pipeline: int | None) -> Split:
    """The split with these numbers, by default that of `choose`. Raises UsageError with the splits that work."""
    ways = splits(config, count)
    wanted = [way for way in ways if tensor in (None, way.tensor) and pipeline in (None, way.pipeline)]
    if tensor is None and pipeline is None:
        chosen = choose(config, count, gpu)
        wanted = [] if chosen is None else [chosen]
    if wanted:
        return wanted[0]
    given = " x ".join(
        f"{name} {value}" for name, value in (("tensor", tensor), ("pipeline", pipeline)) if value is not None
    )
    possible = ", ".join(f"{way.tensor} x {way.pipeline}" for way in ways)
    if not possible:
        numbers = [n for n in range(1, 2 * count + 1) if splits(config, n)]
        near = sorted(sorted(numbers, key=lambda n: abs(n - count))[:4])
        possible = f"none for {count}; numbers that can be split: {', '.join(map(str, near))}"
    raise UsageError(
        f"{count} GPUs can't be split{' as ' + given if given else ''}: --tensor-parallel must divide"
        f" {config.n_heads} heads and a width of {config.hidden_dim}, and divide {config.n_kv_heads} key/value heads or"
        f" be a multiple of them; --pipeline-parallel must be at most {config.n_layers} (layers); values of"
        f" --tensor-parallel x --pipeline-parallel that work: {possible}"
    )


def smallest(run: Run, gpu: GPU) -> Split | None:
    """The split over the fewest GPUs that the run fits on; None if it fits on no number up to MOST_GPUS."""
    most = min(MOST_GPUS, run.config.n_layers * gpu.per_host)
    for count in range(1, most + 1):
        split = choose(run.config, count, gpu)
        if split is not None and fits(run, split, gpu):
            return split
    return None


def most(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which `holds` is true; 0 if none. `holds` must be monotonic."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def largest_context(run: Run, split: Split, gpu: GPU) -> int:
    """The most tokens of each sequence with which a run fits; 0 if it does not fit with one token."""
    return most(lambda context: fits(replace(run, context=context), split, gpu), run.config.max_seq_len)


# -------------------------------------------------------------------------------------------------------- speed
@dataclass(frozen=True)
class Times:
    """Seconds that some work keeps each resource of a GPU busy."""

    memory: float
    compute: float
    links: float

    @property
    def bound(self) -> float:
        """The lower bound of the time, in which all three overlap."""
        return max(self.memory, self.compute, self.links)

    @property
    def by(self) -> Literal["memory", "compute", "links"]:
        """The resource that takes longest."""
        names: tuple[Literal["memory", "compute", "links"], ...] = ("memory", "compute", "links")
        return max(names, key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class Traffic:
    """What one GPU of a stage moves and computes in a decoding step of B sequences at their full length.

    weights  bytes read once, independent of B
    cache    bytes of keys and values read for one sequence
    flops    operations for one sequence
    shared   bytes sent within the N GPUs for one sequence
    handed   bytes sent to the next stage for one sequence
    """

    weights: float
    cache: int
    flops: float
    shared: float
    handed: int


def traffic(run: Run, split: Split, stage: Stage) -> Traffic:
    """The traffic of a decoding step on one GPU of a stage.

    After wo and after w_down the N GPUs add up their hidden states of C values (an all-reduce); in a ring each sends
    2 (N - 1) / N of them. The first stage also adds up the embedding, the last gathers the logits, and each stage
    sends its hidden state to the next.
    """
    config, tensor = run.config, split.tensor
    part = slice_of(config, tensor, stage.layers)
    products = matrix_params(part) + (vocabulary_params(part) if stage.last else 0)
    reduced = (2 * stage.layers + stage.first) * reduce_bytes(run, tensor)
    gathered = part.vocab_size * run.size * (tensor - 1) if stage.last else 0
    return Traffic(
        weights=weight_bytes(part, run.size, run.scheme, first=False, last=stage.last),
        cache=run.cache_bytes(part),
        flops=2 * products + score_flops(part, run.context),
        shared=reduced + gathered,
        handed=0 if stage.last else config.dim * run.size,
    )


def reduce_bytes(run: Run, tensor: int) -> float:
    """Bytes that each of N GPUs sends in a ring to add up one token's hidden state."""
    return run.config.dim * run.size * 2 * (tensor - 1) / tensor


def score_flops(config: ModelConfig, keys: float) -> float:
    """Operations of q k^T and of its product with v for one query, in all layers."""
    return 4 * config.n_heads * config.head_dim * keys * config.n_layers


def link_seconds(gpu: GPU, split: Split, index: int, shared: float, handed: float) -> float:
    """Seconds to send bytes within stage `index` and to the next stage, both at once, in a host or over the network."""
    first, last = index * split.tensor, (index + 1) * split.tensor - 1
    host = [number // gpu.per_host for number in (first, last, last + 1)]
    within, onward = (gpu.link if one == other else gpu.network for one, other in itertools.pairwise(host))
    return max(shared / within, handed / onward)


@dataclass(frozen=True)
class Decoding:
    """A lower bound on the seconds of a step that decodes one token of each of B sequences.

    groups  number of groups of sequences, which let the stages of a pipeline work at the same time
    rows    sequences in a group
    times   of one group, for each stage
    """

    seconds: float
    groups: int
    rows: float
    times: tuple[Times, ...]
    batch: int

    @property
    def by(self) -> str:
        """The resource that limits the slowest stage."""
        return max(self.times, key=lambda times: times.bound).by

    @property
    def each_tps(self) -> float:
        """Upper bound on the tokens per second of one sequence."""
        return 1 / self.seconds

    @property
    def batch_tps(self) -> float:
        """Upper bound on the tokens per second of all sequences."""
        return self.batch / self.seconds


def decoding(run: Run, split: Split, gpu: GPU) -> Decoding:
    """The bound on a decoding step.

    The stages of a pipeline work at the same time, each on another group of B / min(P, B) sequences. A token passes
    all stages, and the slowest stage processes all groups in turn; the step takes the longer of these two times.
    """
    groups = min(split.pipeline, run.batch)
    rows = run.batch / groups
    times = []
    for index, stage in enumerate(stages(run, split)):
        cost = traffic(run, split, stage)
        memory = (cost.weights + rows * cost.cache) / gpu.bandwidth
        links = link_seconds(gpu, split, index, rows * cost.shared, rows * cost.handed)
        times.append(Times(memory, rows * cost.flops / gpu.flops, links))
    seconds = max(sum(stage.bound for stage in times), groups * max(stage.bound for stage in times))
    return Decoding(seconds, groups, rows, tuple(times), run.batch)


@dataclass(frozen=True)
class Prefill:
    """An upper bound on the prompt tokens per second of all sequences, and the resource that limits it."""

    tps: float
    by: str


def prefill(run: Run, split: Split, gpu: GPU) -> Prefill:
    """The bound on prefilling prompts of S tokens with all stages busy: 2 operations per weight, half of all pairs.

    Reading the weights, once a chunk, and the output layer, for one token of a prompt, are not counted.
    """
    slowest = []
    for index, stage in enumerate(stages(run, split)):
        part = slice_of(run.config, split.tensor, stage.layers)
        operations = 2 * matrix_params(part) + score_flops(part, run.context / 2)
        handed = 0 if stage.last else run.config.dim * run.size
        shared = 2 * stage.layers * reduce_bytes(run, split.tensor)
        slowest.append(Times(0, operations / gpu.flops, link_seconds(gpu, split, index, shared, handed)))
    worst = max(slowest, key=lambda times: times.bound)
    return Prefill(1 / worst.bound, worst.by)


# --------------------------------------------------------------------------------------------------------- the plan
@dataclass(frozen=True)
class Plan:
    """A run on GPUs: the memory of each, whether it fits, what would fit, and the bounds on its speed."""

    run: Run
    gpu: GPU
    split: Split
    stages: tuple[Stage, ...]
    fits: bool
    smallest: Split | None
    largest_batch: int
    largest_context: int
    decoding: Decoding | None
    prefill: Prefill | None

    @property
    def fullest(self) -> Stage:
        """The stage whose GPUs need the most memory."""
        return max(self.stages, key=lambda stage: stage.needs)


def plan(run: Run, count: int, gpu: GPU, tensor: int | None = None, pipeline: int | None = None) -> Plan:
    """Plan a run. The speeds are None if it does not fit, or if the GPU's rates are not known.

    Raises UsageError if the split is impossible.
    """
    checks.integer("batch", run.batch, 1, 2**31)
    checks.integer("context", run.context, 1, 2**31)
    split = pick_split(run.config, count, gpu, tensor, pipeline)
    fit = fits(run, split, gpu)
    rated = fit and gpu.bandwidth > 0 < gpu.flops
    return Plan(
        run,
        gpu,
        split,
        tuple(stages(run, split)),
        fit,
        smallest(run, gpu),
        most(lambda batch: fits(replace(run, batch=batch), split, gpu), 2**20),
        largest_context(run, split, gpu),
        decoding(run, split, gpu) if rated else None,
        prefill(run, split, gpu) if rated else None,
    )
