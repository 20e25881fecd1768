"""Run everything that needs a GPU: check the results, and compare the speed with what the device can do.

usage: python scripts/gpu_check.py [--out docs/benchmarks/GPU.json] [--minutes 8] [--only PART ..] [--tune]

It needs no network and no checkpoint: models have the official shapes (configs/) and random weights, made on the
device. Each part runs in a process of its own, so that a crash ends only that part. Parts for which no time is left are
skipped and reported as skipped. Bandwidths and rates are measured in the same run, and limits are shares of them. With
--device cpu --tiny every part runs on tiny shapes without a GPU; this tests the script and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llama.attention import Attend
from llama.cache import KVCache
from llama.config import ModelConfig
from llama.engine import triton_kernels
from llama.engine.cpu_attention import pick_attention
from llama.engine.cuda_graphs import STRIDE, GraphRunner, capture
from llama.engine.fused import FusedRunner
from llama.engine.linears import BlockLinear, SkipInit, make_embedding, make_linear
from llama.engine.placement import Placement, describe_devices, place
from llama.engine.triton_kernels import BlockSizes, Weight, pick_block_sizes
from llama.errors import NumericalError
from llama.generate import generate, prefill
from llama.generation.speculative import NGramDraft, speculate
from llama.model import RMSNorm, Runner, Transformer
from llama.quant.blocks import Blocks
from llama.quant.schemes import SCHEMES, scheme_for
from llama.rope import FORMS, to_half_layout
from llama.sampling import SamplingParams, choose
from llama.tools.benchmark import cache_bytes, linear_bytes

ROOT = Path(__file__).resolve().parent.parent
SMALL = ModelConfig(512, 4, 8, 2, 64, 1408, 2048, rope_theta=500000.0, max_seq_len=4096)
TINY = ModelConfig(32, 2, 4, 2, 8, 48, 64, rope_theta=500000.0, max_seq_len=4096)


class Row(NamedTuple):
    """One result. `passed` is None if there is no limit."""

    what: str
    value: float | str
    unit: str = ""
    limit: str = ""
    passed: bool | None = None


def info(what: str, value: float | str, unit: str = "") -> Row:
    """Return a result without a limit."""
    return Row(what, value, unit)


def at_least(what: str, value: float, limit: float, unit: str = "") -> Row:
    """Return a result with a lower limit."""
    return Row(what, value, unit, f">= {limit:g}", value >= limit)


def at_most(what: str, value: float, limit: float, unit: str = "") -> Row:
    """Return a result with an upper limit; NaN exceeds every limit."""
    return Row(what, value, unit, f"<= {limit:g}", value <= limit)


def holds(what: str, passed: bool) -> Row:
    """Return a result that is true or false."""
    return Row(what, "yes" if passed else "no", "", "yes", passed)


@dataclasses.dataclass
class Run:
    """Settings of a part: device, sizes, and the measured ceilings (bytes/s and FLOP/s)."""

    device: torch.device
    tiny: bool
    tune: bool
    bandwidth: float = math.nan
    matmul: float = math.nan

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.tiny else torch.bfloat16

    def config(self, name: str) -> ModelConfig:
        """Return an official shape, or the tiny one."""
        return TINY if self.tiny else ModelConfig(**json.loads((ROOT / "configs" / f"{name}.json").read_text()))

    @property
    def small(self) -> ModelConfig:
        return TINY if self.tiny else SMALL

    @property
    def fuses(self) -> bool:
        """Whether the fused kernels can run: on CUDA, or on a CPU by Triton's interpreter."""
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return triton_kernels.ready() and (self.device.type == "cuda" or interpreted)

    def judge(self, row: Row) -> Row:
        """Drop the limit of a speed unless it was measured on a GPU with real sizes."""
        return row if self.device.type == "cuda" and not self.tiny else row._replace(limit="", passed=None)


# ---------------------------------------------------------------------------------------------- models and timing
def random_model(run: Run, config: ModelConfig, dtype: torch.dtype, scheme: str | None = None) -> Transformer:
    """Return a model with random weights, created on the device; quantized weights are drawn, not quantized.

    Its runner is the loader's for CUDA. On a CPU that runner does the same without graphs.
    """
    with torch.device("meta"), SkipInit():
        model = Transformer(config, "real").requires_grad_(False).eval()
    generator = torch.Generator(run.device).manual_seed(0)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, linear in layers:
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


def fuse(run: Run, model: Transformer) -> Transformer:
    """Let a model run by the fused kernels if they can run, in place; return the model."""
    if run.fuses:
        model.runner = FusedRunner(model)
    return model


def normal(shape: tuple[int, ...], run: Run, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return normal noise of standard deviation 0.02, or 0.2 if tiny: few inputs would make all logits equal."""
    return torch.empty(shape, dtype=dtype, device=run.device).normal_(0, 0.2 if run.tiny else 0.02, generator=generator)


def random_blocks(linear: nn.Linear, name: str, scheme: str, run: Run, generator: torch.Generator) -> BlockLinear:
    """Return a layer with random quantized weights, scaled to a standard deviation of 0.02."""
    kind = scheme_for(name, SCHEMES[scheme])
    shape = linear.out_features, linear.in_features
    groups = -(-shape[1] // kind.group) if kind.group else 1
    quants = torch.randint(2**kind.bits, shape, dtype=torch.uint8, device=run.device, generator=generator)
    noise = torch.rand((shape[0], groups), device=run.device, generator=generator)
    scale = ((0.5 + noise) * 0.07 / 2**kind.bits).half().float()
    offset = (-scale * 2 ** (kind.bits - 1)).half().float() if kind.offset else None
    return BlockLinear(Blocks(quants, scale, offset, kind.bits, kind.group))


def wait(run: Run) -> None:
    """Wait until the device has finished."""
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)


def seconds(run: Run, work: Callable[[], object], times: int = 5) -> float:
    """Return the median time of `work` after one warm-up call, measured by the device's clock if it has one."""
    work()
    wait(run)
    times_s = []
    for _ in range(times):
        if run.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            times_s.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            work()
            times_s.append(time.perf_counter() - began)
    return statistics.median(times_s)


def ids(length: int, config: ModelConfig, seed: int = 0) -> list[int]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(config.vocab_size, (length,), generator=generator).tolist()
    return found


def relative(value: Tensor, expected: Tensor) -> float:
    """Return ||value - expected|| / ||expected||."""
    difference = value.double().cpu() - expected.double().cpu()
    return float(difference.norm() / expected.double().cpu().norm())


def copied(model: Transformer, config: ModelConfig, form: str, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Return a copy of a model with another form of RoPE, device and dtype."""
    other = Transformer(config, form).requires_grad_(False).eval()
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if FORMS[form].layout == "half":
        rotated = ("wq.weight", "wk.weight")
        state = {n: to_half_layout(t, config.head_dim) if n.endswith(rotated) else t for n, t in state.items()}
    other.load_state_dict(state)
    return other.to(device=device, dtype=dtype)


def decode_speed(run: Run, model: Transformer, context: int, new: int) -> float:
    """Return tokens per second of greedy decoding after a prompt, as a caller receives them."""
    config, params = model.config, SamplingParams(max_new_tokens=new + 1 + 2 * STRIDE)
    cache = model.new_cache(context + params.max_new_tokens)
    logits = prefill(model, ids(context, config), cache)
    greedy = functools.partial(choose, params=params)
    tokens = model.runner.decode(model, logits, cache, params.max_new_tokens, greedy)
    with contextlib.closing(tokens):
        for _ in range(1 + STRIDE):  # tokens arrive in strides: start and stop the clock after one
            next(tokens)
        began = time.perf_counter()
        for _ in range(new):
            next(tokens)
        return new / (time.perf_counter() - began)


def decode_rows(run: Run, model: Transformer, name: str, share: float | None = None) -> list[Row]:
    """Return the decoding speed after 512 tokens, the bytes read per step, and the share of the bandwidth."""
    context, new = (16, 8) if run.tiny else (512, 128)
    speed = decode_speed(run, model, context, new)
    cache = model.new_cache(context + new)
    read = linear_bytes(model) + cache_bytes(cache, min(context + new // 2, cache.slots))
    rows = [info(f"{name}: decoding", speed, "tok/s"), info(f"{name}: bytes read per step", read / 1e9, "GB")]
    of = f"{name}: share of the copy bandwidth"
    reached = speed * read / run.bandwidth
    return [*rows, info(of, reached) if share is None else run.judge(at_least(of, reached, share))]


def prefill_row(run: Run, model: Transformer, name: str, share: float | None = None) -> Row:
    """Return the prefill rate of 4,096 tokens as a share of the rate of a matrix product."""
    config, length = model.config, 64 if run.tiny else 4096
    prompt = ids(length, config)
    cache = model.new_cache(length)

    def work() -> None:
        cache.trim(0)
        prefill(model, prompt, cache, chunk=length)

    spent = seconds(run, work, times=3)
    of = f"{name}: prefill of {length} tokens ({length / spent:,.0f} tok/s), share of the matmul rate"
    flops = linear_flops(config, length) + score_flops(config, length) / 2  # half: the mask is causal
    reached = flops / spent / run.matmul
    return info(of, reached) if share is None else run.judge(at_least(of, reached, share))


def linear_flops(config: ModelConfig, length: int) -> int:
    """Return the operations of the linear layers for a prompt, and of the output layer for its last token."""
    norms = (2 * config.n_layers + 1) * config.dim
    embeddings = (1 if config.tie_embeddings else 2) * config.vocab_size * config.dim
    return 2 * (config.n_params - embeddings - norms) * length + 2 * config.vocab_size * config.dim


def score_flops(config: ModelConfig, length: int) -> int:
    """Return the operations of q k^T and of its product with v, for all pairs of tokens."""
    return 4 * length**2 * config.n_heads * config.head_dim * config.n_layers


# ------------------------------------------------------------------------------------------------------ the parts
def ceilings(run: Run) -> list[Row]:
    """Measure the limits of the device: a copy within its memory, a matrix product in bfloat16."""
    size = 2**20 if run.tiny else 2**32
    source = torch.empty(size, dtype=torch.uint8, device=run.device).random_(0, 256)
    target = torch.empty_like(source)
    run.bandwidth = 2 * size / seconds(run, lambda: target.copy_(source), times=20)
    n = 128 if run.tiny else 8192
    a, b = (torch.randn(n, n, device=run.device, dtype=run.dtype) for _ in range(2))
    run.matmul = 2 * n**3 / seconds(run, lambda: a @ b, times=20)
    return [
        info("copy, bytes read and written", run.bandwidth / 1e12, "TB/s"),
        info(f"matrix product {n}^3", run.matmul / 1e12, "TFLOP/s"),
    ]


def plain_model(run: Run) -> list[Row]:
    """Compare the plain model on the device with the CPU in float32."""
    config, rows = run.small, []
    cpu = Run(torch.device("cpu"), run.tiny, False)
    original = random_model(cpu, config, torch.float32)
    tokens = torch.tensor([ids(96, config)])
    expected = copied(original, config, "complex", cpu.device, torch.float32)(tokens)
    there = tokens.to(run.device)
    for form in FORMS:
        model = copied(original, config, form, run.device, torch.float32)
        rows.append(at_most(f"logits float32, rope {form}: error", relative(model(there), expected), 1e-4))
        logits = model.bfloat16()(there)
        rows.append(at_most(f"logits bfloat16, rope {form}: error", relative(logits, expected), 0.03))
    model = copied(original, config, "real", run.device, torch.float32)
    cache = model.new_cache(96)
    parts = [
        model(there[:, first:last], cache=cache)
        for first, last in ((0, 50), (50, 90), *((i, i + 1) for i in range(90, 96)))
    ]
    rows.append(at_most("cached against uncached: error", relative(torch.cat(parts, 1), expected), 1e-4))
    both = torch.cat((there, there.flip(1)))
    rows.append(at_most("a batch against row by row: error", relative(model(both)[1:], model(both[1:])), 1e-4))
    for kind in ("model", "int8"):
        model.runner.cache_kind = kind
        cache = model.new_cache(96)
        steps = torch.cat([model(there[:, i : i + 1], cache=cache) for i in range(96)], 1)
        rows.append(
            at_most(
                f"token by token, cache {kind}: error", relative(steps, expected), 1e-4 if kind == "model" else 0.05
            )
        )
    return rows


def fused(run: Run) -> list[Row]:
    """Compare the fused kernels with the plain model, on the device."""
    if not run.fuses:
        return [info("fused kernels", "skipped: they need CUDA and Triton")]
    config, rows = run.small if run.tiny else dataclasses.replace(run.small, head_dim=128, n_layers=2), []
    tokens = torch.tensor([ids(96, config)], device=run.device)
    half = torch.bfloat16 if run.device.type == "cuda" else torch.float16  # Triton's interpreter has no bfloat16 dot
    exactly, roughly = (torch.float32, 1e-4), (half, 0.03)
    cases = [(scheme, *kind) for scheme in (None, "int8", "int4") for kind in (exactly, roughly)]
    for scheme, dtype, limit in [*cases, ("int8-row", *exactly), ("int4-sym-g128", *roughly)]:
        plain, exact, quick = (random_model(run, config, kind, scheme) for kind in (dtype, torch.float32, dtype))
        exact.load_state_dict(plain.state_dict())
        expected, quick.runner = exact(tokens), FusedRunner(quick)
        cache = quick.new_cache(128)
        cuts = [(0, 40), (40, 90), *((i, i + 1) for i in range(90, 96))]
        logits = torch.cat([quick(tokens[:, first:last], cache=cache) for first, last in cuts], 1)
        name = f"fused, {scheme or 'plain'} weights, {str(dtype).removeprefix('torch.')}"
        rows.append(at_most(f"{name}: error", relative(logits, expected), limit))
        cache.trim(95)
        step = quick.runner.step_for(quick, cache)
        step.token.copy_(tokens[:, -1:])
        step.position.fill_(95)
        difference = relative(step.next_logits(quick, cache), expected[0, -1])
        rows.append(at_most(f"{name}, a step as a graph: error", difference, limit))
    return rows


def same_tokens(run: Run) -> list[Row]:
    """Compare the tokens of asynchronous decoding with the plain loop: growing caches, stop ids, sampling."""
    config, rows = run.small, []
    prompt, new = ids(20 if run.tiny else 1000, config), 8 if run.tiny else 64  # the cache grows at 1,024
    plain = random_model(run, config, torch.float32)
    plain.runner = Runner()  # waits for the device after each token
    for way in ("eager", "fused") if run.fuses else ("eager",):
        model = random_model(run, config, torch.float32)
        model = fuse(run, model) if way == "fused" else model
        for options in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}, {"repetition_penalty": 1.2}):
            params = SamplingParams(max_new_tokens=new, **options)
            label = "greedy" if not options else " ".join(f"{key} {value}" for key, value in options.items())
            same = new_ids(model, prompt, params) == new_ids(plain, prompt, params)
            rows.append(holds(f"{way} as a graph, {label}: same {new} tokens as the plain loop", same))
        greedy = SamplingParams(max_new_tokens=new)
        expected, cache = new_ids(plain, prompt, greedy), model.new_cache(2 * len(prompt) + new)
        stop = expected[5]
        found = new_ids(model, prompt, greedy, stop_ids=[stop], cache=cache)
        until = expected[: expected.index(stop) + 1]
        rows.append(
            holds(
                f"{way}: ends with the stop id, and the cache ends before it",
                found == until and cache.length == len(prompt) + len(until) - 1,
            )
        )
        longer = prompt + until + prompt[:7]
        again = new_ids(model, longer, greedy, cache=cache)
        rows.append(holds(f"{way}: continues with the same cache", again == new_ids(plain, longer, greedy)))
        repeated = prompt[:8] * 4
        found = [token.id for token in speculate(model, repeated, greedy, NGramDraft())]
        rows.append(holds(f"{way}: speculative decoding, same tokens", found == new_ids(plain, repeated, greedy)))
        model.norm.weight.fill_(math.nan)
        try:
            list(generate(model, prompt, greedy))
            rows.append(holds(f"{way}: NaN is an error", False))
        except NumericalError:
            rows.append(holds(f"{way}: NaN is an error", True))
    return rows


def new_ids(model: Transformer, prompt: Sequence[int], params: SamplingParams, **options: Any) -> list[int]:
    """Return the ids that a model generates."""
    return [token.id for token in generate(model, prompt, params, **options)]


def llama_8b(run: Run) -> list[Row]:
    """Measure the shape of Llama 3.1 8B in bfloat16."""
    model = random_model(run, run.config("llama-3.1-8b"), run.dtype)
    rows = decode_rows(run, model, "8B, plain model, as a graph")
    rows.append(prefill_row(run, model, "8B, plain model"))
    rows += decode_rows(run, fuse(run, model), "8B", 0.85)
    return [*rows, prefill_row(run, model, "8B", 0.70)]


def llama_8b_quantized(run: Run) -> list[Row]:
    """Measure the same shape in 8 and 4 bits, as multiples of bfloat16."""
    rows, config = [], run.config("llama-3.1-8b")
    speeds: dict[str, float] = {}
    for scheme, limit in ((None, 0.0), ("int8", 1.6), ("int4", 2.4)):
        model = fuse(run, random_model(run, config, run.dtype, scheme))
        name = f"8B {scheme or 'bfloat16'}"
        rows += decode_rows(run, model, name)
        speeds[name] = next(float(row.value) for row in rows if row.what == f"{name}: decoding")
        if scheme:
            rows.append(
                run.judge(at_least(f"8B {scheme}: times bfloat16", speeds[name] / speeds["8B bfloat16"], limit))
            )
            rows.append(prefill_row(run, model, name))
        del model
        clear(run)
    return rows


def llama_1b(run: Run) -> list[Row]:
    """Measure the shape of Llama 3.2 1B in bfloat16, 8 and 4 bits."""
    rows, config = [], run.config("llama-3.2-1b")
    for scheme in (None, "int8", "int4"):
        model = random_model(run, config, run.dtype, scheme)
        if scheme is None:
            rows += decode_rows(run, model, "1B, plain model, as a graph")
        rows += decode_rows(run, fuse(run, model), f"1B {scheme or 'bfloat16'}", None if scheme else 0.78)
        if scheme is None:
            rows.append(prefill_row(run, model, "1B"))
        del model
        clear(run)
    return rows


def against_transformers(run: Run) -> list[Row]:
    """Compare logits and speed with transformers on the same weights."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return [info("transformers", "not installed")]
    rows = []
    for name in ("llama-3.2-1b", "llama-3.1-8b"):
        config, short = run.config(name), name.removeprefix("llama-")
        model = random_model(run, config, run.dtype)
        with torch.device(run.device):
            theirs = LlamaForCausalLM._from_config(
                LlamaConfig(
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
                    rope_parameters={
                        "rope_theta": config.rope_theta,
                        **(config.rope_scaling or {"rope_type": "default"}),
                    },
                ),
                dtype=run.dtype,
            ).eval()
        for their_name, tensor in theirs.named_parameters():
            ours = model.get_parameter(our_name(their_name))
            rotated = their_name.endswith(("q_proj.weight", "k_proj.weight"))
            tensor.data.copy_(to_half_layout(ours, config.head_dim) if rotated else ours)
        context, new = (16, 4) if run.tiny else (512, 64)
        tokens = torch.tensor([ids(context, config)], device=run.device)
        out = theirs(input_ids=tokens, use_cache=True)
        rows.append(
            at_most(
                f"{short}: logits against transformers', error",
                relative(model(tokens), out.logits),
                1e-4 if run.tiny else 0.05,
            )
        )
        past, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        for step in range(new + 4):
            if step == 4:  # the first steps are warm-up
                wait(run)
                began = time.perf_counter()
            out = theirs(input_ids=token, past_key_values=past, use_cache=True)
            past, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        wait(run)
        their_speed = new / (time.perf_counter() - began)
        length = 32 if run.tiny else 4096
        prompt = torch.tensor([ids(length, config)], device=run.device)
        work = functools.partial(theirs, input_ids=prompt, logits_to_keep=1)
        their_prefill = length / seconds(run, work, times=3)
        del theirs, out, past, work
        clear(run)
        ours_speed = decode_speed(run, fuse(run, model), context, 8 if run.tiny else 128)
        rows += [
            info(f"{short}: transformers decodes", their_speed, "tok/s"),
            info(f"{short}: times transformers", ours_speed / their_speed),
        ]
        rows.append(info(f"{short}: transformers prefills {length}", their_prefill, "tok/s"))
        rows.append(prefill_row(run, model, short))
        del model
        clear(run)
    return rows


def our_name(theirs: str) -> str:
    """Return this package's name of one of transformers' parameters."""
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


def batches(run: Run) -> list[Row]:
    """Measure batched decoding with the plain model; a step is a CUDA graph."""
    rows = []
    for name in ("llama-3.2-1b", "llama-3.1-8b"):
        config, short = run.config(name), name.removeprefix("llama-")
        model = random_model(run, config, run.dtype)
        context, steps = (16, 4) if run.tiny else (512, 32)
        for batch in (1, 2) if run.tiny else (1, 8, 64):
            cache = KVCache(
                config.n_layers, config.n_kv_heads, config.head_dim, context + 4 * steps, batch=batch, dtype=run.dtype,
                device=run.device, fixed=True,
            )  # fmt: skip
            with torch.inference_mode():
                tokens = torch.tensor([ids(context, config, seed=row) for row in range(batch)], device=run.device)
                for row in range(0, context, 128):
                    model.hidden(tokens[:, row : row + 128], cache=cache)
                rows.append(
                    info(f"{short}, batch {batch}: decoding", batch * step_speed(run, model, cache, steps), "tok/s")
                )
            del cache
            clear(run)
    return rows


def some_layers(run: Run) -> list[Row]:
    """Check --gpu-layers: the last half of 8B's layers on the device, the others on the CPU, as the loader does."""
    config, cpu = run.config("llama-3.1-8b"), torch.device("cpu")
    model = random_model(run, config, run.dtype)
    context, new = (16, 8) if run.tiny else (512, 32)
    tokens = torch.tensor([ids(context, config)], device=run.device)
    expected = model(tokens)
    half = config.n_layers // 2
    model.runner = place(model, Placement(cpu, (cpu,) * half + (run.device,) * (config.n_layers - half), run.device))
    for block in model.layers[:half]:
        block.set_submodule("attention.attend", Attend(pick_attention(cpu)))
        for name, linear in [(n, m) for n, m in block.named_modules() if isinstance(m, nn.Linear)]:
            block.set_submodule(name, make_linear(linear.weight, cpu, linear.bias))
    clear(run)
    name = f"8B, {config.n_layers - half} of {config.n_layers} layers on the device"
    cache = model.new_cache(context)
    rows = [
        info(f"{name}: devices", describe_devices(model)),
        at_most(f"{name}: error", relative(model(tokens), expected), 0.03),
        at_most(f"{name}, cached: error", relative(model(tokens, cache=cache), expected), 0.03),
        holds(f"{name}: caches are on the devices of their layers", cache_devices(cache) == weight_devices(model)),
    ]
    steps = generate(model, ids(context, config), SamplingParams(max_new_tokens=new + 1))
    next(steps)
    began = time.perf_counter()
    count = sum(1 for _ in steps)
    return [*rows, info(f"{name}: decoding", count / (time.perf_counter() - began), "tok/s")]


def cache_devices(cache: KVCache) -> list[torch.device]:
    """Return the device of each layer's keys and values."""
    return [layer.buffers[0].device for layer in cache.layers]


def weight_devices(model: Transformer) -> list[torch.device]:
    """Return the device of each layer's weights."""
    return [block.attention_norm.weight.device for block in model.layers]


def step_speed(run: Run, model: Transformer, cache: KVCache, steps: int) -> float:
    """Return decoding steps per second of a batch with a filled cache."""
    token = torch.zeros(cache.batch, 1, dtype=torch.long, device=run.device)
    position = torch.full((1,), cache.length, device=run.device)
    cache.place_next()

    def step() -> None:
        logits = model.runner.next_logits(model, token, position, cache)  # (B, V)
        token.copy_(logits.argmax(-1, keepdim=True))

    if run.device.type == "cuda":
        step = capture(step, lambda: token.zero_()).replay
    return steps / seconds(run, lambda: [step() for _ in range(steps)], times=3)


def speculative(run: Run) -> list[Row]:
    """Measure speculative decoding by n-grams on a repetitive text."""
    rows, config = [], run.config("llama-3.2-1b")
    model = fuse(run, random_model(run, config, run.dtype))
    prompt, new = ids(16, config) * (2 if run.tiny else 16), 16 if run.tiny else 256
    params = SamplingParams(max_new_tokens=new)
    draft = NGramDraft()
    for _ in range(2):  # the first pass is warm-up
        began = time.perf_counter()
        count = sum(1 for _ in speculate(model, prompt, params, draft))
        spent = time.perf_counter() - began
    began = time.perf_counter()
    plain = sum(1 for _ in generate(model, prompt, params))
    rows.append(info("1B, n-gram drafts accepted", f"{draft.accepted} of {draft.drafted}"))
    rows.append(info("1B, speculative, prompt included", count / spent, "tok/s"))
    return [*rows, info("1B, plain, prompt included", plain / (time.perf_counter() - began), "tok/s")]


def inductor(run: Run) -> list[Row]:
    """Measure torch.compile's code for a block's step, for comparison with the fused kernels."""
    if run.device.type != "cuda":
        return [info("torch.compile", "skipped: it needs CUDA")]
    model = random_model(run, run.config("llama-3.2-1b"), run.dtype)
    options = {"coordinate_descent_tuning": True, "triton.unique_kernel_names": True}
    compiled = torch.compile(type(model.layers[0]).forward, fullgraph=True, dynamic=False, options=options)
    for block in model.layers:
        plain = block.forward

        def forward(h: Tensor, *rest: Any, block: nn.Module = block, plain: Any = plain) -> Tensor:
            return compiled(block, h, *rest) if h.shape[1] == 1 else plain(h, *rest)

        block.forward = forward  # type: ignore[method-assign]
    began = time.perf_counter()
    rows = decode_rows(run, model, "1B by torch.compile")
    return [*rows, info("1B by torch.compile: compiling and measuring", time.perf_counter() - began, "s")]


def tune(run: Run) -> list[Row]:
    """Find the fastest block sizes of the fused products (pick_block_sizes): time all of them for each weight."""
    if not run.fuses or not run.tune:
        return [info("block sizes of the fused products", "skipped: needs --tune, CUDA and Triton")]
    rows = []
    for name in ("llama-3.1-8b", "llama-3.2-1b"):
        config = run.config(name)
        heads = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        shapes = {
            "qkv": (heads, config.dim),
            "wo": (config.dim, config.n_heads * config.head_dim),
            "gate, up": (2 * config.hidden_dim, config.dim),
            "down": (config.dim, config.hidden_dim),
        }
        for scheme in (None, "int8", "int4"):
            for what, (n, k) in shapes.items():
                label = f"{name.removeprefix('llama-')} {scheme or 'bfloat16'} {what}"
                rows += tune_one(run, label, n, k, scheme)
    return rows


def tune_one(run: Run, label: str, n: int, k: int, scheme: str | None) -> list[Row]:
    """Time one weight with the usual and the fastest block size. Several copies keep it out of the L2 cache."""
    generator = torch.Generator(run.device).manual_seed(0)
    with torch.device("meta"), SkipInit():
        linear = nn.Linear(k, n, bias=False)
    bits = SCHEMES[scheme].bits if scheme else 16
    weights = []
    for _ in range(max(2, int(3e8 / (n * k * bits / 8)))):
        if scheme:
            weights.append(random_blocks(linear, label, scheme, run, generator).packed)
        else:
            data = normal((n, k), run, torch.bfloat16, generator)
            weights.append(Weight(data, None, None, None, n, k, 16, k))
    x, out = torch.randn(k, device=run.device, dtype=torch.bfloat16), torch.empty(n, device=run.device)
    usual = pick_block_sizes(weights[0])
    found = {}
    for rows in (2, 4, 8) if bits == 16 else (4,):
        for columns in (usual.columns // 4, usual.columns // 2, usual.columns, usual.columns * 2):
            for warps in (1, 2, 4, 8):
                sizes = BlockSizes(rows, columns, warps)
                if columns < 256 or columns > 2 * k:
                    continue

                def work(sizes: BlockSizes = sizes) -> None:
                    for weight in weights:
                        triton_kernels.linear(weight, x, out, blocks=sizes)

                with contextlib.suppress(Exception):  # a block size may not fit the device
                    found[sizes] = seconds(run, capture(work, lambda: None).replay, times=5) / len(weights)
    best = min(found, key=lambda sizes: found[sizes])
    size = sum(part.nbytes for part in weights[0][:3] if part is not None)
    return [
        info(f"{label}: usual {tuple(usual)}", size / found[usual] / run.bandwidth, "of the copy"),
        info(f"{label}: fastest {tuple(best)}", size / found[best] / run.bandwidth, "of the copy"),
    ]


# name -> (the part, its approximate seconds on an H100); most important first
PARTS: dict[str, tuple[Callable[[Run], list[Row]], int]] = {
    "ceilings": (ceilings, 15),
    "right": (plain_model, 25),
    "fused": (fused, 75),
    "tokens": (same_tokens, 40),
    "8B": (llama_8b, 40),
    "8B quantized": (llama_8b_quantized, 60),
    "1B": (llama_1b, 40),
    "transformers": (against_transformers, 60),
    "batches": (batches, 40),
    "gpu layers": (some_layers, 60),
    "speculative": (speculative, 25),
    "inductor": (inductor, 90),
    "tune": (tune, 200),
}


# --------------------------------------------------------------------------------------------------- running the parts
def clear(run: Run) -> None:
    """Free unused memory."""
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()


def one_part(name: str, run: Run) -> dict[str, Any]:
    """Run a part and return its results; an exception becomes its `error`."""
    began = time.perf_counter()
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    found: dict[str, Any] = {"part": name, "rows": [], "error": None}
    try:
        with torch.inference_mode():
            found["rows"] = [written(row) for row in PARTS[name][0](run)]
    except Exception as error:
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
    if run.device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            found["peak_gb"] = torch.cuda.max_memory_allocated(run.device) / 1e9
    found["seconds"] = time.perf_counter() - began
    found["bandwidth"], found["matmul"] = run.bandwidth, run.matmul
    with contextlib.suppress(RuntimeError):
        clear(run)
    return found


def written(row: Row) -> dict[str, Any]:
    """Return a result for JSON; NaN and infinity, which JSON lacks, become text."""
    finite = isinstance(row.value, str) or math.isfinite(row.value)
    return row._replace(value=row.value if finite else str(row.value))._asdict()


def in_a_process(name: str, run: Run, limit: float) -> dict[str, Any]:
    """Run `one_part` in a process of its own; kill it after `limit` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "part.json"
        command = [sys.executable, __file__, "--device", str(run.device), "--part", name, "--part-out", str(target)]
        command += ["--ceilings", str(run.bandwidth), str(run.matmul)]
        command += [*(["--tiny"] if run.tiny else []), *(["--tune"] if run.tune else [])]
        began = time.perf_counter()
        try:
            code = subprocess.run(command, timeout=limit, check=False).returncode
            why = f"the process ended with exit code {code}"
        except subprocess.TimeoutExpired:
            why = f"not finished after {limit:.0f} s"
        if target.is_file():
            result: dict[str, Any] = json.loads(target.read_text())
            return result
        return {"part": name, "rows": [], "error": why, "seconds": time.perf_counter() - began}


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the GPU, its driver and the versions."""
    found: dict[str, Any] = {
        "gpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": getattr(triton_kernels.triton, "__version__", None),
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = torch.cuda.get_device_name(device)
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["multiprocessors"] = properties.multi_processor_count
        found["capability"] = f"{properties.major}.{properties.minor}"
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
    return found


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Format the results of a part."""
    peak = f", peak {found['peak_gb']:.1f} GB" if "peak_gb" in found else ""
    yield f"== {found['part']} ({found['seconds']:.1f} s{peak})"
    for row in found["rows"]:
        value = row["value"] if isinstance(row["value"], str) else f"{row['value']:.4g}"
        verdict = {True: "ok  ", False: "FAIL", None: "    "}[row["passed"]]
        yield f"{verdict} {row['what']:<72} {value} {row['unit']} {row['limit']}".rstrip()
    if found["error"]:
        yield f"FAIL {found['error']}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, print and save their results. Returns 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="default: docs/benchmarks/GPU.json")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to test this script")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--tune", action="store_true", help="also time other block sizes (takes minutes)")
    parser.add_argument("--inline", action="store_true", help="run all parts in this process")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--part-out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ceilings", nargs=2, type=float, default=(math.nan, math.nan), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    began = time.perf_counter()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device found; --device cpu --tiny tests the script itself")
    run = Run(torch.device(args.device), args.tiny, args.tune, *args.ceilings)
    if args.part:
        args.part_out.write_text(json.dumps(one_part(args.part, run)))
        return 0
    host = machine(run.device)
    print(" ".join(f"{key} {value}" for key, value in host.items()), flush=True)
    parts = []
    for name in dict.fromkeys(["ceilings", *args.only]):  # the limits are shares of the ceilings
        left = 60 * args.minutes - (time.perf_counter() - began)
        needed = 0 if args.tiny else PARTS[name][1]
        if needed > left:
            why = f"skipped: it takes about {needed} s, and {max(0.0, left):.0f} s are left"
            found: dict[str, Any] = {"part": name, "rows": [info(why, "")._asdict()], "error": None, "seconds": 0.0}
        else:
            found = one_part(name, run) if args.inline else in_a_process(name, run, max(30.0, left))
        run.bandwidth, run.matmul = found.pop("bandwidth", run.bandwidth), found.pop("matmul", run.matmul)
        parts.append(found)
        print("\n".join(lines(found)), flush=True)
    failed = [row["what"] for part in parts for row in part["rows"] if row["passed"] is False]
    failed += [f"{part['part']}: {part['error']}" for part in parts if part["error"]]
    slug = re.sub(r"[^a-z0-9]+", "-", str(host["gpu"]).lower()).strip("-")
    out = args.out or ROOT / "docs" / "benchmarks" / f"{slug}.json"
    report = {"machine": host, "seconds": time.perf_counter() - began, "failed": failed, "parts": parts}
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(failed)} failed; {out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
