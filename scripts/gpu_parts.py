"""The parts of gpu_check.py. Each part is a function that yields rows and runs in a process of its own.

Models have the official shapes (configs/) and random weights that are drawn on the device, so no checkpoint is needed.
Most parts use the public functions: generate, Batch, speculate, quantize_, and the runners. Times are measured by the
caller of these functions, except those of single kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # import this copy of the package, not an installed one

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from llama.attention import Attend, causal_mask  # noqa: E402
from llama.config import ModelConfig  # noqa: E402
from llama.engine import triton_kernels  # noqa: E402
from llama.engine.cuda_graphs import GraphRunner  # noqa: E402
from llama.engine.fused import FusedRunner, packed  # noqa: E402
from llama.engine.linears import (  # noqa: E402
    BlockLinear,
    SkipInit,
    computes_quantized,
    make_embedding,
    make_linear,
    quantize_,
)
from llama.engine.placement import Placement, describe_devices, pick_placement, place  # noqa: E402
from llama.errors import NumericalError, UsageError  # noqa: E402
from llama.generate import generate, prefill  # noqa: E402
from llama.generation.batch import Batch, Ended, Request, Started, TokenEvent  # noqa: E402
from llama.generation.speculative import NGramDraft, speculate  # noqa: E402
from llama.model import Cache, RMSNorm, Runner, Transformer  # noqa: E402
from llama.quant.blocks import Blocks  # noqa: E402
from llama.quant.schemes import SCHEMES, Scheme, scheme_for  # noqa: E402
from llama.rope import FORMS, to_half_layout  # noqa: E402
from llama.sampling import SamplingParams  # noqa: E402
from llama.tools.benchmark import cache_bytes, linear_bytes  # noqa: E402

TINY = ModelConfig(32, 2, 4, 2, 8, 48, 64, rope_theta=500000.0, max_seq_len=4096)
SHAPES = {"8B": "llama-3.1-8b", "1B": "llama-3.2-1b"}
GGUF = {  # blocks of GGUF types, in addition to SCHEMES
    "Q4_0": Scheme(4, 32, False, ""),
    "Q2_K": Scheme(4, 16, True, ""),
    "Q3_K": Scheme(4, 16, False, ""),
    "Q6_K": Scheme(8, 16, False, ""),
    "Q8_0": Scheme(8, 32, False, ""),
}
COPY, MATMUL = "copy, bytes read and written", "matrix product"  # the rows whose values are the ceilings
DECODING, PREFILL = "decoding", "prefill of 4,096"  # the rows that gpu_check.py compares
EXACT, ROUNDED = 1e-4, 0.03  # limits of ||difference|| / ||expected|| in float32 and in bfloat16


class Row(NamedTuple):
    """One result. `passed` is None if there is no limit; `expected` is an estimate made before the first run."""

    what: str
    value: float | str
    unit: str = ""
    limit: str = ""
    passed: bool | None = None
    expected: str = ""


def info(what: str, value: float | str, unit: str = "", expected: str = "") -> Row:
    """Return a result without a limit."""
    return Row(what, value, unit, expected=expected)


def at_least(what: str, value: float, limit: float, unit: str = "", expected: str = "") -> Row:
    """Return a result with a lower limit. NaN fails."""
    return Row(what, value, unit, f">= {limit:g}", value >= limit, expected)


def at_most(what: str, value: float, limit: float, unit: str = "") -> Row:
    """Return a result with an upper limit. NaN fails."""
    return Row(what, value, unit, f"<= {limit:g}", value <= limit)


def holds(what: str, passed: bool) -> Row:
    """Return a result that must be true."""
    return Row(what, "yes" if passed else "no", "", "yes", passed)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a part is run with: the device, tiny shapes, settings to change, and the ceilings (bytes/s and FLOP/s)."""

    device: torch.device
    tiny: bool = False
    change: tuple[str, ...] = ()
    bandwidth: float = math.nan
    matmul: float = math.nan

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.tiny else torch.bfloat16

    @property
    def fuses(self) -> bool:
        """Whether the fused kernels can run: on CUDA, or on a CPU by Triton's interpreter."""
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return triton_kernels.ready() and (self.device.type == "cuda" or interpreted)

    def config(self, size: str, layers: int | None = None) -> ModelConfig:
        """Return an official configuration, with `layers` layers if that is given, or the tiny configuration."""
        if self.tiny:
            return dataclasses.replace(TINY, tie_embeddings=size == "1B")
        config = ModelConfig(**json.loads((ROOT / "configs" / f"{SHAPES[size]}.json").read_text()))
        return dataclasses.replace(config, n_layers=layers or config.n_layers)

    def judge(self, row: Row) -> Row:
        """Drop the limit of a speed unless it was measured on a GPU with real sizes."""
        return row if self.device.type == "cuda" and not self.tiny else row._replace(limit="", passed=None)


class Part(NamedTuple):
    """A part, the group that selects it, and its approximate seconds on an H100 or H200."""

    rows: Callable[[Run], Iterator[Row]]
    group: str
    seconds: int


# ------------------------------------------------------------------------------------------------------------- models
def empty_model(config: ModelConfig, form: str) -> Transformer:
    """Return a model without memory for its weights."""
    with torch.device("meta"), SkipInit():
        return Transformer(config, form).requires_grad_(False).eval()


def random_model(run: Run, config: ModelConfig, dtype: torch.dtype, scheme: str | None = None) -> Transformer:
    """Return a model with random weights that depend only on the arguments. Quantized weights are random integers.

    Its runner is GraphRunner, the loader's default on CUDA. On a CPU, GraphRunner works without graphs.
    """
    model = empty_model(config, "real")
    generator = torch.Generator(run.device).manual_seed(0)
    for name, linear in [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]:
        if scheme is None:
            linear.weight = nn.Parameter(normal(tuple(linear.weight.shape), run, dtype, generator), False)
        else:
            model.set_submodule(name, random_blocks(linear, name, scheme, run, generator))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight = nn.Parameter(normal(tuple(module.weight.shape), run, dtype, generator), False)
        elif isinstance(module, RMSNorm):
            module.weight = nn.Parameter(torch.ones(config.dim, dtype=dtype, device=run.device), False)
    if config.tie_embeddings:
        model.set_submodule("tok_embeddings", make_embedding(model.output, dtype))
    model.runner = GraphRunner()
    return model


def normal(shape: tuple[int, ...], run: Run, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return normal noise of standard deviation 0.02. If tiny, 0.2: else all logits would be nearly equal."""
    return torch.empty(shape, dtype=dtype, device=run.device).normal_(0, 0.2 if run.tiny else 0.02, generator=generator)


def random_blocks(linear: nn.Linear, name: str, scheme: str, run: Run, generator: torch.Generator) -> BlockLinear:
    """Return a layer with random quantized weights, scaled to a standard deviation of 0.02, or more if tiny."""
    kind = scheme_for(name, {**SCHEMES, **GGUF}[scheme])
    shape = linear.out_features, linear.in_features
    groups = -(-shape[1] // kind.group) if kind.group else 1
    quants = torch.randint(2**kind.bits, shape, dtype=torch.uint8, device=run.device, generator=generator)
    noise = torch.rand((shape[0], groups), device=run.device, generator=generator)
    scale = ((0.5 + noise) * (0.7 if run.tiny else 0.07) / 2**kind.bits).half().float()
    offset = (-scale * 2 ** (kind.bits - 1)).half().float() if kind.offset else None
    return BlockLinear(Blocks(quants, scale, offset, kind.bits, kind.group))


def copied(model: Transformer, form: str, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Return a copy of an unquantized model with another form of RoPE, device and dtype."""
    other = empty_model(model.config, form)
    state = {name: tensor.to(device, dtype) for name, tensor in model.state_dict().items()}
    if FORMS[form].layout == "half":
        for name in state:
            if name.endswith(("wq.weight", "wk.weight")):
                state[name] = to_half_layout(state[name], model.config.head_dim)
    other.load_state_dict(state, assign=True)
    other.runner = GraphRunner()
    return other.requires_grad_(False)


class InductorRunner(GraphRunner):
    """Decodes with a block and a norm compiled by torch.compile, in the same CUDA graph as the other runners."""

    def __init__(self, model: Transformer):
        super().__init__()
        on_gpu = model.norm.weight.device.type == "cuda"
        options: dict[str, Any] = {"options": {"coordinate_descent_tuning": True}} if on_gpu else {"backend": "eager"}
        plain = isinstance(model.layers[0].attention.wq, nn.Linear)  # quantized layers may break the graph
        compiled = functools.partial(torch.compile, fullgraph=plain, dynamic=False, **options)
        self.block, self.norm = compiled(type(model.layers[0]).forward), compiled(type(model.norm).forward)

    def run(
        self, model: Transformer, tokens: Tensor, positions: Tensor, keys: Tensor | None, end: int, cache: Cache
    ) -> Tensor:
        if cache is None or keys is None or tokens.shape[1] != 1:
            return super().run(model, tokens, positions, keys, end, cache)
        h = model.tok_embeddings(tokens)  # (B, 1, C)
        freqs_cis, mask = model.rope.freqs_cis(positions, end), causal_mask(positions, keys)
        for block, layer in zip(model.layers, cache.layers, strict=True):
            h = self.block(block, h, freqs_cis, mask, positions, layer)  # (B, 1, C)
        normed: Tensor = self.norm(model.norm, h)
        return normed


def run_by(run: Run, model: Transformer, way: str) -> Transformer:
    """Set a model's runner; return the model. way: unfused, Inductor, or fused, which without Triton is unfused."""
    if way == "fused" and run.fuses:
        model.runner = FusedRunner(model)
    elif way == "Inductor":
        model.runner = InductorRunner(model)
    return model


def ways(run: Run) -> tuple[str, ...]:
    """Return the ways of decoding whose results are compared."""
    return ("unfused", "fused") if run.fuses else ("unfused",)


# ------------------------------------------------------------------------------------------------ measures and inputs
def ids(length: int, config: ModelConfig, seed: int = 0) -> list[int]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(config.vocab_size, (length,), generator=generator).tolist()
    return found


def new_ids(model: Transformer, prompt: Sequence[int], params: SamplingParams, **options: Any) -> list[int]:
    """Return the ids that a model generates."""
    return [token.id for token in generate(model, prompt, params, **options)]


def relative(value: Tensor, expected: Tensor) -> float:
    """Return ||value - expected|| / ||expected||."""
    difference = value.double().cpu() - expected.double().cpu()
    return float(difference.norm() / expected.double().cpu().norm())


def seconds(run: Run, work: Callable[[], object]) -> float:
    """Return the time of one call, including the work of the device."""
    settle(run)
    began = time.perf_counter()
    work()
    settle(run)
    return time.perf_counter() - began


def median_s(run: Run, work: Callable[[], object], times: int = 5) -> float:
    """Return the median time of several calls, after one call that is not timed."""
    work()
    return statistics.median(seconds(run, work) for _ in range(times))


def settle(run: Run) -> None:
    """Wait until the device has finished."""
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)


def clear(run: Run) -> None:
    """Free unused memory."""
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()


def step_s(run: Run, produce: Callable[[int], object], few: int, many: int) -> float:
    """Return the seconds of one decoding step: a difference, without the prompt. `produce(n)` generates n tokens."""
    produce(many)  # warm up with the longer first: compiled code and caches then fit both
    produce(few)
    spent = [
        seconds(run, lambda: produce(many)) - seconds(run, lambda: produce(few)) for _ in range(1 if run.tiny else 3)
    ]
    return statistics.median(spent) / (many - few)


def decode_s(run: Run, model: Transformer, context: int, **params: Any) -> float:
    """Return the seconds of a decoding step after `context` tokens, measured by the caller of generate."""
    few, many = (2, 6) if run.tiny else (16, 144)
    prompt, cache = ids(context, model.config), model.new_cache(context + many)

    def produce(count: int) -> None:
        cache.trim(min(cache.length, context - 1))  # later calls compute only the last token of the prompt
        new_ids(model, prompt, SamplingParams(max_new_tokens=count, **params), cache=cache)

    return step_s(run, produce, few, many)


def step_bytes(run: Run, model: Transformer, context: int) -> int:
    """Return the bytes that a decoding step reads on average in `decode_s`."""
    length = context + (4 if run.tiny else 80)
    return linear_bytes(model) + cache_bytes(model.new_cache(length), length)  # a new cache may have fewer slots


def linear_flops(config: ModelConfig, length: int) -> int:
    """Return the FLOPs of the linear layers for a prompt, and of the output layer for its last token."""
    norms = (2 * config.n_layers + 1) * config.dim
    embeddings = (1 if config.tie_embeddings else 2) * config.vocab_size * config.dim
    return 2 * (config.n_params - embeddings - norms) * length + 2 * config.vocab_size * config.dim


def score_flops(config: ModelConfig, length: int) -> int:
    """Return the FLOPs of q k^T and of its product with v, for all pairs of tokens."""
    return 4 * length**2 * config.n_heads * config.head_dim * config.n_layers


@contextlib.contextmanager
def cudnn_attention(enabled: bool) -> Iterator[None]:
    """Enable or disable cuDNN's attention. PyTorch prefers it on some GPUs; it prepares a plan for each new shape."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


# -------------------------------------------------------------------------------------------------------- the ceilings
def ceilings(run: Run) -> Iterator[Row]:
    """Describe the machine. Measure the bandwidth of a copy on the device and the rate of a bfloat16 matrix product."""
    yield info("gpu", platform.processor() or platform.machine())
    if run.device.type == "cuda":
        properties = torch.cuda.get_device_properties(run.device)
        yield info("gpu", properties.name)
        yield info("memory", properties.total_memory / 2**30, "GiB")
        yield info("multiprocessors", properties.multi_processor_count)
        yield info("capability", f"{properties.major}.{properties.minor}")
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
            yield info("driver", found.split("\n")[0])
    yield info("python", platform.python_version())
    yield info("torch", torch.__version__)
    yield info("cuda", str(torch.version.cuda))
    yield info("triton", importlib.import_module("triton").__version__ if triton_kernels.ready() else "None")
    yield info("date", time.strftime("%Y-%m-%d"))
    size, times = (2**20, 1) if run.tiny else (2**32, 5)
    source = torch.empty(size, dtype=torch.uint8, device=run.device).random_(0, 256)
    target = torch.empty_like(source)
    ten = range(10)  # calls per measurement, so that synchronizing takes no share
    spent = median_s(run, lambda: [target.copy_(source) for _ in ten], times) / len(ten)
    yield info(COPY, 2 * size / spent / 1e12, "TB/s", "4.3")
    n = 128 if run.tiny else 8192
    a, b = (torch.randn(n, n, device=run.device, dtype=run.dtype) for _ in range(2))
    spent = median_s(run, lambda: [a @ b for _ in ten], times) / len(ten)
    yield info(MATMUL, 2 * n**3 / spent / 1e12, "TFLOP/s", "790")


def installed(name: str) -> bool:
    """Whether a package can be imported."""
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
        return True
    return False


# --------------------------------------------------------------------------------------------------------- correctness
def plain(run: Run) -> Iterator[Row]:
    """Compare the unfused model on the device with the CPU in float32, at real widths."""
    cpu, length = dataclasses.replace(run, device=torch.device("cpu")), 24 if run.tiny else 96
    for size in SHAPES:
        config = dataclasses.replace(run.config(size, 2), vocab_size=64 if run.tiny else 8192)
        original = random_model(cpu, config, torch.float32)
        tokens = torch.tensor([ids(length, config)])
        expected = copied(original, "complex", cpu.device, torch.float32)(tokens)
        there = tokens.to(run.device)
        for form in FORMS:
            for dtype, limit in ((torch.float32, EXACT), (torch.bfloat16, ROUNDED)):
                logits = copied(original, form, run.device, dtype)(there)
                name = f"{size} {str(dtype).removeprefix('torch.')}, rope {form}"
                yield at_most(f"{name}: error", relative(logits, expected), limit)
        model = copied(original, "real", run.device, torch.float32)
        for kind, limit in (("model", EXACT), ("int8", 0.05)):
            model.runner.cache_kind = kind
            cache = model.new_cache(length)
            half = length // 2
            cuts = [(0, half), (half, length - 6), *((i, i + 1) for i in range(length - 6, length))]
            logits = torch.cat([model(there[:, first:last], cache=cache) for first, last in cuts], 1)
            yield at_most(f"{size}: in chunks, cache {kind}: error", relative(logits, expected), limit)
        rows = torch.cat((there.flip(1), there))
        yield at_most(f"{size}: second row of a batch: error", relative(model(rows)[1:], expected), EXACT)


def quantized(run: Run) -> Iterator[Row]:
    """Compare quantized layers on the device, for a prompt and token by token, with the CPU in float32."""
    length, cpu = 5 if run.tiny else 48, torch.device("cpu")
    for size in SHAPES:
        config = dataclasses.replace(run.config(size, 1), vocab_size=64 if run.tiny else 8192)
        tokens = torch.tensor([ids(length, config)], device=run.device)
        for scheme in ("int8", "int8-row", "int4", "int4-sym-g128", *GGUF):
            model = random_model(run, config, torch.float32, scheme)
            exact = random_model(run, config, torch.float32, scheme).to(cpu)
            expected, cache = exact(tokens.cpu()), model.new_cache(length)
            steps = torch.cat([model(tokens[:, i : i + 1], cache=cache) for i in range(length)], 1)
            yield at_most(f"{size} {scheme}, a prompt: error", relative(model(tokens), expected), EXACT)
            yield at_most(f"{size} {scheme}, token by token: error", relative(steps, expected), EXACT)


def fused(run: Run) -> Iterator[Row]:
    """Compare the fused kernels with the unfused model on the device, at real widths."""
    if not run.fuses:
        yield info("fused kernels", "skipped: they need CUDA and Triton")
        return
    half = torch.bfloat16 if run.device.type == "cuda" else torch.float16  # the interpreter truncates to bfloat16
    cases = [
        *((scheme, torch.float32, EXACT) for scheme in (None, "int8", "int4")),
        *((scheme, half, ROUNDED) for scheme in (None, "int8", "int4", "int8-row", "int4-sym-g128", *GGUF)),
    ]
    for size in SHAPES:
        for scheme, dtype, limit in cases:
            name = f"{size} {scheme or 'floats'}, {str(dtype).removeprefix('torch.')}"
            yield from fused_rows(run, run.config(size, 2), scheme, dtype, name, limit)
            clear(run)


def fused_rows(
    run: Run, config: ModelConfig, scheme: str | None, dtype: torch.dtype, name: str, limit: float
) -> Iterator[Row]:
    """Compare a prompt in two chunks and six eager steps with one uncached pass; in float32 also steps as a graph."""
    exact = random_model(run, config, torch.float32, scheme)
    exact.load_state_dict(random_model(run, config, dtype, scheme).state_dict())
    tokens = torch.tensor([ids(96, config)], device=run.device)
    expected, quick = exact(tokens), random_model(run, config, dtype, scheme)
    try:
        quick.runner = FusedRunner(quick)
    except UsageError as error:  # groups of 16, for example
        yield info(f"{name}: not fused", str(error))
        return
    cache = quick.new_cache(128)
    cuts = [(0, 40), (40, 90), *((i, i + 1) for i in range(90, 96))]
    logits = torch.cat([quick(tokens[:, first:last], cache=cache) for first, last in cuts], 1)
    yield at_most(f"{name}: error", relative(logits, expected), limit)
    if dtype == torch.float32:
        params = SamplingParams(max_new_tokens=12)
        same = new_ids(quick, tokens[0].tolist(), params) == new_ids(exact, tokens[0].tolist(), params)
        yield holds(f"{name}: the graph generates the same 12 tokens", same)


def tokens(run: Run) -> Iterator[Row]:
    """Compare the tokens of CUDA graphs with those of the plain loop: growing caches, stop ids, sampling, drafts."""
    config = run.config("1B", 4)
    prompt, new = ids(20 if run.tiny else 1000, config), 8 if run.tiny else 64  # the cache grows at 1,024
    plain = random_model(run, config, torch.float32)
    plain.runner = Runner()  # waits for the device after each token
    greedy = SamplingParams(max_new_tokens=new)
    for way in ways(run):
        model = run_by(run, random_model(run, config, torch.float32), way)
        for options in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}, {"repetition_penalty": 1.2}):
            params = SamplingParams(max_new_tokens=new, **options)
            label = "greedy" if not options else " ".join(f"{key} {value}" for key, value in options.items())
            same = new_ids(model, prompt, params) == new_ids(plain, prompt, params)
            yield holds(f"{way} as a graph, {label}: same tokens as the plain loop", same)
        expected, cache = new_ids(plain, prompt, greedy), model.new_cache(2 * len(prompt) + new)
        stop = expected[5]
        until = expected[: expected.index(stop) + 1]
        found = new_ids(model, prompt, greedy, stop_ids=[stop], cache=cache)
        ended = found == until and cache.length == len(prompt) + len(until) - 1
        yield holds(f"{way}: stops at the stop id, and the cache ends before it", ended)
        longer = prompt + until + prompt[:7]
        again = new_ids(model, longer, greedy, cache=cache)
        yield holds(f"{way}: continues with the same cache", again == new_ids(plain, longer, greedy))
        repeated = prompt[:8] * 4
        found = [token.id for token in speculate(model, repeated, greedy, NGramDraft())]
        yield holds(f"{way}: speculative decoding, same tokens", found == new_ids(plain, repeated, greedy))
        model.norm.weight.fill_(math.nan)
        try:
            new_ids(model, prompt, greedy)
        except NumericalError:
            yield holds(f"{way}: NaN is an error", True)
        else:
            yield holds(f"{way}: NaN is an error", False)


def requests(config: ModelConfig, length: int, new: int) -> list[Request]:
    """Return eleven requests: greedy and sampled, of several lengths, some with a shared prefix."""
    shared = ids(length, config, seed=99)
    prompts = [shared * (i % 2) + ids(length - 2 * i, config, seed=i) for i in range(11)]
    options = [{} if i % 3 else {"temperature": 0.7, "seed": i} for i in range(11)]
    return [
        Request(prompt, SamplingParams(max_new_tokens=new - i % 4, **option))
        for i, (prompt, option) in enumerate(zip(prompts, options, strict=True))
    ]


def batch(run: Run) -> Iterator[Row]:
    """Compare the answers of batches with those of the same requests, run one by one."""
    config = run.config("1B", 4)
    asked = requests(config, *((24, 8) if run.tiny else (400, 32)))
    plain = random_model(run, config, torch.float32)
    plain.runner = Runner()
    expected = [new_ids(plain, request.prompt, request.params) for request in asked]
    for way in ways(run):
        model = run_by(run, random_model(run, config, torch.float32), way)
        for slots in (1, 4, 8):
            answers: list[list[int]] = [[] for _ in asked]
            for event in Batch(model, asked, slots=slots):
                if isinstance(event, TokenEvent):
                    answers[event.number].append(event.token.id)
                elif isinstance(event, Ended) and event.error is not None:
                    raise event.error
            same = sum(map(list.__eq__, answers, expected))
            yield at_least(f"{way}, {slots} slots: answers equal to one by one, of {len(asked)}", same, len(asked))


def threads(run: Run) -> Iterator[Row]:
    """Compare the answers of two threads that share a model with those of one."""
    config = run.config("1B", 4)
    asked = requests(config, *((24, 8) if run.tiny else (200, 48)))
    plain = random_model(run, config, torch.float32)
    plain.runner = Runner()
    expected = [new_ids(plain, request.prompt, request.params) for request in asked]
    for way in ways(run) if run.device.type == "cuda" else ("unfused",):  # the interpreter supports one thread
        model = run_by(run, random_model(run, config, torch.float32), way)
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda request: new_ids(model, request.prompt, request.params), asked))  # noqa: B023
        same = sum(map(list.__eq__, found, expected))
        yield at_least(f"{way}: answers of two threads equal to those of one, of {len(asked)}", same, len(asked))


def devices(run: Run) -> Iterator[Row]:
    """Compare the answers on each named device, and with layers on all GPUs, with those on the default device."""
    config, params = run.config("1B", 4), SamplingParams(max_new_tokens=8 if run.tiny else 32)
    prompt = ids(24, config)
    expected = new_ids(random_model(run, config, torch.float32), prompt, params)
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if run.device.type == "cuda" else ["cpu"]
    for name in names:
        there = dataclasses.replace(run, device=pick_placement(config, name).output)
        for way in ways(there):
            model = run_by(there, random_model(there, config, torch.float32), way)
            yield holds(f"{name}, {way}: same tokens as on {run.device}", new_ids(model, prompt, params) == expected)
    if len(names) > 1:
        model = random_model(run, config, torch.float32)
        model.runner = place(model, pick_placement(config, names))
        yield holds(f"{describe_devices(model)}: same tokens", new_ids(model, prompt, params) == expected)


def gpu_layers(run: Run) -> Iterator[Row]:
    """Compare a model whose first half is on the CPU, as by --gpu-layers, with the same model on the device."""
    config, cpu = run.config("8B", 4), torch.device("cpu")
    model = random_model(run, config, run.dtype)
    there = torch.tensor([ids(16 if run.tiny else 128, config)], device=run.device)
    expected = random_model(run, config, run.dtype)(there)
    half = config.n_layers // 2
    model.runner = place(model, Placement(cpu, (cpu,) * half + (run.device,) * (config.n_layers - half), run.device))
    if installed("platformdirs"):  # required by the C++ kernels
        from llama.engine.cpu_attention import pick_attention

        for block in model.layers[:half]:
            block.set_submodule("attention.attend", Attend(pick_attention(cpu)))
            for name, linear in [(n, m) for n, m in block.named_modules() if isinstance(m, nn.Linear)]:
                block.set_submodule(name, make_linear(linear.weight, cpu, linear.bias))
    cache = model.new_cache(there.shape[1])
    yield info("devices", describe_devices(model))
    yield at_most("a prompt: error", relative(model(there), expected), ROUNDED)
    yield at_most("with a cache: error", relative(model(there, cache=cache), expected), ROUNDED)
    homes = [block.attention_norm.weight.device for block in model.layers]
    yield holds(
        "caches are on the devices of their layers", [layer.buffers[0].device for layer in cache.layers] == homes
    )


def quantizing(run: Run) -> Iterator[Row]:
    """Compare weights quantized on the device with those quantized on the CPU, and time it for a layer of 8B."""
    if not installed("platformdirs") or not computes_quantized(torch.device("cpu")):
        yield info("quantizing", "skipped: the C++ kernels of the CPU need a compiler and platformdirs (--wheels)")
        return
    config = dataclasses.replace(run.config("8B", 1), vocab_size=64 if run.tiny else 8192)
    for scheme in ("int8", "int4"):
        model, other = (random_model(run, config, run.dtype) for _ in range(2))
        spent = seconds(run, lambda: quantize_(model, scheme))  # noqa: B023
        yield info(f"{scheme}: seconds for one layer of 8B", spent, "s", "under 0.3")
        quantize_(other.to("cpu"), scheme)
        for name in ("layers.0.attention.wq", "layers.0.feed_forward.w_down", "output"):
            here, there = (m.get_submodule(name).weight for m in (model, other))
            yield at_most(f"{scheme} {name}: error", relative(here, there), 1e-3)


# --------------------------------------------------------------------------------------------------------------- speed
class Goal(NamedTuple):
    """The minimum share of the copy bandwidth, and the estimated tokens per second."""

    share: float | None
    expected: str


GOALS = {
    ("8B", "bf16", "fused"): Goal(0.85, "210-232"),
    ("8B", "int8", "fused"): Goal(None, "285-300"),
    ("8B", "int4", "fused"): Goal(None, "330-355"),
    ("1B", "bf16", "fused"): Goal(0.78, "1000-1100"),
    ("1B", "int8", "fused"): Goal(None, "1200-1500"),
    ("1B", "int4", "fused"): Goal(None, "1200-1500"),
    ("8B", "bf16", "unfused"): Goal(None, "130"),
    ("8B", "bf16", "Inductor"): Goal(None, "185-205"),
    ("1B", "bf16", "Inductor"): Goal(None, "650-800"),
}


def decode(run: Run, size: str, weights: str, way: str) -> Iterator[Row]:
    """Measure greedy decoding after 512 tokens; without Inductor also prefill, first tokens and, in bfloat16, top-p."""
    model = random_model(run, run.config(size), run.dtype, None if weights == "bf16" else weights)
    run_by(run, model, way)
    yield info("runner", type(model.runner).__name__)
    context = 16 if run.tiny else 512
    spent, read = decode_s(run, model, context), step_bytes(run, model, context)
    share, expected = GOALS.get((size, weights, way), Goal(None, ""))
    yield info(DECODING, 1 / spent, "tok/s", expected)
    yield info("bytes read by a step", read / 1e9, "GB")
    reached = read / spent / run.bandwidth
    of = "share of the copy bandwidth"
    yield info(of, reached) if share is None else run.judge(at_least(of, reached, share))
    if way == "Inductor":
        return
    goal = 0.70 if (size, weights, way) == ("8B", "bf16", "fused") else None
    yield from prefill_rows(run, model, goal, {"8B": "39,000, .70-.75", "1B": "220,000, .62"}[size])
    if weights == "bf16":
        sampled = decode_s(run, model, context, temperature=0.8, top_p=0.9, seed=1)
        yield info("decoding with top-p", 1 / sampled, "tok/s", "0.2-0.3 ms a step more")
        yield info("top-p: additional time", 1e3 * (sampled - spent), "ms a step")
    yield from first_token(run, model, context)


def prefill_rows(run: Run, model: Transformer, share: float | None, expected: str) -> Iterator[Row]:
    """Measure a prompt of 4,096 tokens, also as a share of the rate of a matrix product."""
    config, length = model.config, 64 if run.tiny else 4096
    prompt, cache = ids(length, config), model.new_cache(length)

    def work() -> None:
        cache.trim(0)
        prefill(model, prompt, cache)

    spent = median_s(run, work, 3)
    yield info(PREFILL, length / spent, "tok/s", expected)
    flops = linear_flops(config, length) + score_flops(config, length) / 2  # half: the mask is causal
    of, reached = f"{PREFILL}: share of the matmul rate", flops / spent / run.matmul
    yield info(of, reached) if share is None else run.judge(at_least(of, reached, share))


def first_token(run: Run, model: Transformer, context: int) -> Iterator[Row]:
    """Measure the time to the first token and to the 32nd, with a new cache and again with the same cache."""
    prompt, params, cache = ids(context, model.config), SamplingParams(max_new_tokens=32), model.new_cache(context + 32)
    for name in ("new cache, graph captured", "same cache, graph reused"):
        cache.trim(0)
        settle(run)
        began, times = time.perf_counter(), []
        for _ in generate(model, prompt, params, cache=cache):
            times.append(time.perf_counter() - began)
        yield info(f"{name}: first token of {context}", 1e3 * times[0], "ms")
        yield info(f"{name}: 32 tokens", 1e3 * times[-1], "ms")


def against_transformers(run: Run, size: str, cudnn: bool) -> Iterator[Row]:
    """Measure transformers with the same weights and a static cache; on CUDA it compiles its decoding step."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        yield info("transformers", "not installed")
        return
    config = run.config(size)
    model = random_model(run, config, run.dtype)
    scaling = config.rope_scaling or {"rope_type": "default"}
    their_config = LlamaConfig(
        hidden_size=config.dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.hidden_dim,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.max_seq_len,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters={"rope_theta": config.rope_theta, **scaling},
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(run.device):
        theirs = LlamaForCausalLM._from_config(their_config, dtype=run.dtype).eval()
    for name, tensor in theirs.named_parameters():
        ours = model.get_parameter(our_name(name))
        rotated = name.endswith(("q_proj.weight", "k_proj.weight"))
        tensor.data.copy_(to_half_layout(ours, config.head_dim) if rotated else ours)
    context, few, many = (16, 2, 6) if run.tiny else (512, 16, 144)
    prompt = torch.tensor([ids(context, config)], device=run.device)
    long = torch.tensor([ids(64 if run.tiny else 4096, config)], device=run.device)
    with cudnn_attention(cudnn):
        logits = theirs(prompt).logits
        yield at_most("logits against ours: error", relative(model(prompt), logits), EXACT if run.tiny else 0.05)
        del model, logits
        clear(run)
        prefilling = functools.partial(theirs, long, logits_to_keep=1)
        yield info(PREFILL, long.shape[1] / median_s(run, prefilling, 3), "tok/s")

        def produce(count: int) -> None:
            theirs.generate(
                prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, cache_implementation="static"
            )

        yield info("compiling", seconds(run, lambda: produce(many)), "s")
        yield info(DECODING, 1 / step_s(run, produce, few, many), "tok/s")


def our_name(theirs: str) -> str:
    """Return the name in this package of a parameter of transformers."""
    names = {
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w_gate",
        "mlp.up_proj": "feed_forward.w_up",
        "mlp.down_proj": "feed_forward.w_down",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
    }
    ours = theirs.removeprefix("model.")
    for their_part, our_part in names.items():
        ours = ours.replace(their_part, our_part)
    return ours


# -------------------------------------------------------------------------------------------------- kernel by kernel
class Launch(NamedTuple):
    """One run of a kernel on the device."""

    name: str
    grid: tuple[int, ...]
    start: float
    duration: float  # microseconds


def kernels(run: Run, size: str, weights: str) -> Iterator[Row]:
    """Measure every kernel of a decoding step in a profile of 33 steps, and the bandwidth of the products."""
    model = random_model(run, run.config(size), run.dtype, None if weights == "bf16" else weights)
    first: Any = model.layers[0]
    parts = [
        [first.attention.wq, first.attention.wk, first.attention.wv],
        [first.attention.wo],
        [first.feed_forward.w_gate, first.feed_forward.w_up],
        [first.feed_forward.w_down],
        [model.output],
    ]
    sizes = [sum(linear_bytes(layer) for layer in layers) for layers in parts]
    run_by(run, model, "fused")
    context, passes = (16, 4) if run.tiny else (512, 33)
    prompt, cache = ids(context + 1, model.config), model.new_cache(context + passes + 1)
    params = SamplingParams(max_new_tokens=passes)
    new_ids(model, prompt, params, cache=cache)  # captures the graph
    cache.trim(context)  # one token of the prompt remains, so every pass is a step
    activity = torch.profiler.ProfilerActivity
    wall = 0.0
    with torch.profiler.profile(activities=[activity.CUDA if run.device.type == "cuda" else activity.CPU]) as profile:
        wall = seconds(run, lambda: new_ids(model, prompt, params, cache=cache))
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(str(Path(folder) / "trace.json"))
        events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
    launches = [
        Launch(event["name"], tuple(event["args"].get("grid", ())), event["ts"], event["dur"])
        for event in events
        if event.get("cat") == "kernel"
    ]
    yield info("wall time of a step, profiled", 1e6 * wall / passes, "us")
    yield from kernel_rows(launches, passes, model.config.n_layers, sizes, run.bandwidth)


def kernel_rows(
    launches: Iterable[Launch], passes: int, layers: int, sizes: Sequence[int], bandwidth: float
) -> Iterator[Row]:
    """Yield rows for each kernel of a step, in order. sizes: weight bytes of qkv, wo, gate and up, down, output.

    Launches with the same name and grid belong to one kernel. If each layer has several such launches, their order
    tells them apart.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[Launch]] = {}
    for launch in sorted(launches, key=lambda launch: launch.start):
        groups.setdefault((launch.name, launch.grid), []).append(launch)
    found: list[list[Launch]] = []
    for group in groups.values():
        turns = max(1, len(group) // (passes * layers))
        found += [group[turn::turns] for turn in range(turns)]
    found.sort(key=lambda group: group[0].start)
    products = [group for group in found if group[0].name in ("_qkv", "_linear")]
    named = dict(zip(map(id, products), zip(("qkv", "wo", "gate, up", "down", "output"), sizes, strict=True)))  # noqa: B905
    for group in found:
        spent = statistics.median(launch.duration for launch in group)
        label, read = named.get(id(group), ("", 0)) if len(products) == len(sizes) else ("", 0)
        name = f"{group[0].name[:50]} {group[0].grid} {label}".strip()
        yield info(f"{name}: time", spent, f"us, {len(group) / passes:g} in a step")
        if read:
            yield info(f"{name}: share of the copy bandwidth", read / spent * 1e6 / bandwidth)
    busy = sum(launch.duration for group in found for launch in group)
    yield info("all kernels of a step", busy / passes, "us")


# ------------------------------------------------------------------------------------------------ contexts and batches
def contexts(run: Run, size: str) -> Iterator[Row]:
    """Measure decoding in long contexts."""
    model = run_by(run, random_model(run, run.config(size), run.dtype), "fused")
    for context in (32, 64) if run.tiny else (8192, 32768):
        began = time.perf_counter()
        spent = decode_s(run, model, context)
        yield info(f"context of {context}: decoding", 1 / spent, "tok/s")
        reached = step_bytes(run, model, context) / spent / run.bandwidth
        yield info(f"context of {context}: share of the copy bandwidth", reached)
        yield info(f"context of {context}: time of the measurement", time.perf_counter() - began, "s")
        clear(run)


def batches(run: Run, size: str, weights: str = "bf16") -> Iterator[Row]:
    """Measure the tokens per second of whole batches, after 16 steps that are not timed."""
    config = run.config(size)
    model = random_model(run, config, run.dtype, None if weights == "bf16" else weights)
    run_by(run, model, "fused")
    context, warm, new = (16, 2, 6) if run.tiny else (512, 16, 80)
    for slots in (2,) if run.tiny else (1, 8, 64):
        asked = [Request(ids(context, config, seed=i), SamplingParams(max_new_tokens=new)) for i in range(slots)]
        began, times, started = time.perf_counter(), [], 0.0
        for event in Batch(model, asked, slots=slots):
            if isinstance(event, TokenEvent):
                times.append(time.perf_counter())
            elif isinstance(event, Started):
                started = time.perf_counter()
        # Prompts run one after the other, while the first answers continue: count from the last prompt on.
        after = [moment for moment in times if moment > started][warm * slots :]
        yield info(f"batch of {slots}: decoding", (len(after) - 1) / (after[-1] - after[0]), "tok/s")
        yield info(f"batch of {slots}: decoding and prompts", len(times) / (times[-1] - began), "tok/s")


def new_lengths(run: Run) -> Iterator[Row]:
    """Measure prompts of new lengths, with and without cuDNN's attention."""
    config = run.config("1B")
    for way in ways(run):
        model, first = run_by(run, random_model(run, config, run.dtype), way), 20 if run.tiny else 700
        for cudnn in (True, False):
            with cudnn_attention(cudnn):
                cache = model.new_cache(2 * first)

                def work(length: int) -> None:
                    cache.trim(0)  # noqa: B023
                    prefill(model, ids(length, config), cache)  # noqa: B023

                work(first)
                lengths = range(first + 1, first + (4 if run.tiny else 12))
                new = statistics.median(seconds(run, lambda: work(length)) for length in lengths)  # noqa: B023
                old = statistics.median(seconds(run, lambda: work(length)) for length in lengths)  # noqa: B023
                first += 100 if not run.tiny else 5
            name = f"{way}, {'with' if cudnn else 'without'} cuDNN"
            yield info(f"{name}: additional time of a new length", 1e3 * (new - old), "ms", "55 with, 0 without")
            yield info(f"{name}: a repeated length", 1e3 * old, "ms")


def speculative(run: Run) -> Iterator[Row]:
    """Measure speculative decoding with n-gram drafts on a repetitive text."""
    config = run.config("1B")
    model = run_by(run, random_model(run, config, run.dtype), "fused")
    prompt, draft = ids(16, config) * (2 if run.tiny else 16), NGramDraft()
    few, many = (2, 6) if run.tiny else (16, 144)
    drafted = step_s(run, lambda n: list(speculate(model, prompt, SamplingParams(max_new_tokens=n), draft)), few, many)
    yield info("n-gram drafts accepted", f"{draft.accepted} of {draft.drafted}")
    yield info("speculative", 1 / drafted, "tok/s")
    yield info("plain", 1 / decode_s(run, model, len(prompt)), "tok/s")


# ------------------------------------------------------------------------------------------------------------- changes
def change(run: Run) -> Iterator[Row]:
    """Time decoding with and without a change of settings: fields of BlockSizes, such as stages=4, or cudnn=1."""
    wanted = {name: int(value) for name, value in (item.split("=") for item in run.change)}
    cudnn = wanted.pop("cudnn", None)
    if unknown := set(wanted) - set(triton_kernels.BlockSizes._fields):
        raise ValueError(
            f"unknown settings {sorted(unknown)}; known: cudnn, {', '.join(triton_kernels.BlockSizes._fields)}"
        )
    usual = triton_kernels.pick_block_sizes

    @contextlib.contextmanager
    def changed() -> Iterator[None]:
        sizes = mock.patch.object(triton_kernels, "pick_block_sizes", lambda *args: usual(*args)._replace(**wanted))
        with sizes, contextlib.nullcontext() if cudnn is None else cudnn_attention(bool(cudnn)):
            yield

    for size in SHAPES:
        for weights in ("bf16", "int8", "int4"):
            model = random_model(run, run.config(size), run.dtype, None if weights == "bf16" else weights)
            run_by(run, model, "fused")
            before, after = [], []
            for _ in range(2):
                before.append(1 / decode_s(run, model, 16 if run.tiny else 512))
                with changed():
                    after.append(1 / decode_s(run, model, 16 if run.tiny else 512))
            name = f"{size} {weights}"
            yield info(f"{name}: unchanged", max(before), f"tok/s, lowest {min(before):.4g}")
            yield info(f"{name}: with {' '.join(run.change)}", max(after), f"tok/s, lowest {min(after):.4g}")
            yield info(f"{name}: changed over unchanged", max(after) / max(before))
            del model
            clear(run)


def tune(run: Run, size: str, weights: str) -> Iterator[Row]:
    """Time many block sizes for each weight of a block, and report the fastest."""
    if not run.fuses:
        yield info("block sizes", "skipped: they need CUDA and Triton")
        return
    config = run.config(size)
    heads = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    shapes = {
        "qkv": (heads, config.dim),
        "wo": (config.dim, config.n_heads * config.head_dim),
        "gate, up": (2 * config.hidden_dim, config.dim),
        "down": (config.dim, config.hidden_dim),
    }
    for what, (n, k) in shapes.items():
        yield from tune_one(run, what, n, k, None if weights == "bf16" else weights)


def tune_one(run: Run, label: str, n: int, k: int, scheme: str | None) -> Iterator[Row]:
    """Time one weight with the default and the fastest block sizes. Its copies together exceed the L2 cache."""
    generator = torch.Generator(run.device).manual_seed(0)
    with torch.device("meta"), SkipInit():
        linear = nn.Linear(k, n, bias=False)
    bits, weights = SCHEMES[scheme].bits if scheme else 16, []
    for _ in range(2 if run.tiny else max(2, int(3e8 / (n * k * bits / 8)))):
        if scheme:
            weights.append(packed(random_blocks(linear, label, scheme, run, generator)))
        else:
            weights.append(packed(make_linear(normal((n, k), run, run.dtype, generator), run.device, plain=True)))
    x, out = torch.randn(k, device=run.device, dtype=run.dtype), torch.empty(n, device=run.device)
    usual = triton_kernels.pick_block_sizes(weights[0])
    found = {}
    for rows in (2, 4, 8) if bits == 16 else (4,):
        for columns in (usual.columns // 4, usual.columns // 2, usual.columns, usual.columns * 2):
            for warps in (1, 2, 4, 8):
                sizes = usual._replace(rows=rows, columns=columns, warps=warps)
                if (columns < 256 or columns > 2 * k) and not run.tiny:
                    continue

                def work(sizes: triton_kernels.BlockSizes = sizes) -> None:
                    for weight in weights:
                        triton_kernels.linear(weight, x, out, blocks=sizes)

                with contextlib.suppress(Exception):  # a block size may not fit the device
                    found[sizes] = median_s(run, replayed(run, work)) / len(weights)
    best = min(found, key=lambda sizes: found[sizes])
    size = sum(part.nbytes for part in weights[0][:3] if part is not None)
    yield info(f"{label}: default {tuple(usual)}", size / found[usual] / run.bandwidth, "of the copy bandwidth")
    yield info(f"{label}: fastest {tuple(best)}", size / found[best] / run.bandwidth, "of the copy bandwidth")


def replayed(run: Run, work: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays `work` as a CUDA graph, which excludes the time of launches."""
    work()
    if run.device.type != "cuda":
        return work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


# ------------------------------------------------------------------------------------------- the parts, in order
def speed_parts() -> Iterator[tuple[str, Part]]:
    """Yield the parts that time decoding. Those that decide whether to keep the fused kernels come first."""
    for size, spent in (("8B", 40), ("1B", 30)):
        for way in ("fused", "Inductor"):
            yield (
                f"{size} bf16: {way}",
                Part(functools.partial(decode, size=size, weights="bf16", way=way), "speed", spent),
            )
    for size, spent in (("8B", 100), ("1B", 60)):
        part = functools.partial(against_transformers, size=size, cudnn=True)
        yield f"{size} bf16: transformers", Part(part, "speed", spent)
    for size in SHAPES:
        for weights in ("int8", "int4"):
            part = functools.partial(decode, size=size, weights=weights, way="fused")
            yield f"{size} {weights}: fused", Part(part, "speed", 20)
    for size, weights in (("8B", "bf16"), ("1B", "bf16"), ("8B", "int4")):
        yield f"kernels of {size} {weights}", Part(functools.partial(kernels, size=size, weights=weights), "speed", 15)
    yield (
        "8B bf16: unfused",
        Part(functools.partial(decode, size="8B", weights="bf16", way="unfused"), "speed", 30),
    )


def more_parts() -> Iterator[tuple[str, Part]]:
    """Yield the parts that time everything else."""
    for size, weights, spent in (("8B", "bf16", 40), ("1B", "bf16", 30), ("8B", "int4", 30)):
        part = functools.partial(batches, size=size, weights=weights)
        yield f"{size} {weights}: batches", Part(part, "more", spent)
    yield "new lengths", Part(new_lengths, "more", 20)
    for size, spent in (("8B", 40), ("1B", 25)):
        yield f"{size} bf16: contexts", Part(functools.partial(contexts, size=size), "more", spent)
    yield "speculative", Part(speculative, "more", 20)
    for size in SHAPES:
        for weights in ("int8", "int4"):
            part = functools.partial(decode, size=size, weights=weights, way="Inductor")
            yield f"{size} {weights}: Inductor", Part(part, "more", 40)
    for size, spent in (("8B", 100), ("1B", 60)):
        part = functools.partial(against_transformers, size=size, cudnn=False)
        yield f"{size} bf16: transformers without cuDNN", Part(part, "more", spent)


PARTS: dict[str, Part] = {
    "ceilings": Part(ceilings, "always", 10),
    "plain": Part(plain, "correctness", 40),
    "fused": Part(fused, "correctness", 80),
    "tokens": Part(tokens, "correctness", 30),
    "batch": Part(batch, "correctness", 25),
    "threads": Part(threads, "correctness", 15),
    "quantized": Part(quantized, "correctness", 70),
    "devices": Part(devices, "correctness", 15),
    "gpu layers": Part(gpu_layers, "correctness", 45),
    "quantizing": Part(quantizing, "correctness", 45),
    **dict(speed_parts()),
    **dict(more_parts()),
    "change": Part(change, "change", 90),
    **{
        f"tune {size} {weights}": Part(functools.partial(tune, size=size, weights=weights), "tune", 60)
        for size in SHAPES
        for weights in ("bf16", "int8", "int4")
    },
}
