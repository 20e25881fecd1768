"""The plan against real tensors, published file sizes, counted operations and simulated schedules."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from llama.cache import KVCache
from llama.checkpoint import open_checkpoint
from llama.cli import main
from llama.cli.plan import architecture, quantity
from llama.config import ModelConfig
from llama.engine.linears import BlockLinear
from llama.errors import ConfigError, LlamaError, UsageError
from llama.hub.families import official
from llama.quant.schemes import SCHEMES, quantize, scheme_for
from llama.tools import plan
from llama.tools.plan import GPUS, Run, Split, parse_gpus
from llama.weights import expected_shapes

from . import tiny

ROOT = Path(__file__).resolve().parent.parent
B405, B70, B8 = (official()[name] for name in ("llama-3.1-405b", "llama-3.1-70b", "llama-3.1-8b"))
H100 = GPUS["H100"]

# 8 heads and 2 key/value heads, so that 1, 2, 4 and 8 GPUs can share it, the last two with copies
SMALL = ModelConfig(64, 6, 8, 2, 8, 96, 320, max_seq_len=256)
KINDS = {
    "plain": SMALL,
    "many kv": replace(SMALL, n_kv_heads=8),
    "tied": replace(SMALL, tie_embeddings=True),
    "biases": replace(SMALL, attention_bias=True, mlp_bias=True),
    "some without RoPE": replace(SMALL, qkv_bias=True, no_rope_layers=(3,)),
}
BY_ROWS = ("wq", "wk", "wv", "w_gate", "w_up", "tok_embeddings", "output")  # split along the first axis
BY_COLUMNS = ("wo", "w_down")


def shard(name: str, shape: tuple[int, ...], config: ModelConfig, tensor: int) -> tuple[int, ...]:
    """The shape of one GPU's part of a tensor, derived from what each layer computes."""
    stem, kind = name.split(".")[-2:]
    if stem in ("wk", "wv"):
        heads = max(config.n_kv_heads // tensor, 1)
        return (heads * config.head_dim, *shape[1:])
    if stem in BY_ROWS:
        return (shape[0] // tensor, *shape[1:])
    if stem in BY_COLUMNS and kind == "weight":
        return (shape[0], shape[1] // tensor)
    return shape  # norms, and biases that are added once


def expected_bytes(config: ModelConfig, split: Split, index: int, size: int) -> int:
    """Bytes of the tensors on a GPU of a stage."""
    begin = sum(split.layers[:index])
    mine, total = range(begin, begin + split.layers[index]), 0
    first, last = index == 0, index == split.pipeline - 1
    for name, shape in expected_shapes(config).items():
        if name.startswith("layers."):
            here = int(name.split(".")[1]) in mine
        elif name.startswith("tok_embeddings"):
            here = first or (config.tie_embeddings and last)
        else:
            here = last
        total += here * size * torch.Size(shard(name, shape, config, tensor=split.tensor)).numel()
    return total


# -------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [(6,), (3, 3), (1, 2, 3)])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_of_a_gpu_are_the_bytes_of_its_tensors(
    kind: str, layers: tuple[int, ...], tensor: int, dtype: str
) -> None:
    config, split = KINDS[kind], Split(tensor, layers)
    size = plan.DTYPE_BYTES[dtype]
    found = plan.stages(Run(config, 1, 16, dtype), split)
    assert [stage.weights for stage in found] == [expected_bytes(config, split, i, size) for i in range(len(layers))]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tied", [False, True])
def test_quantized_weights_are_the_bytes_of_a_gpus_layers(scheme: str, tied: bool) -> None:
    config = replace(tiny.WIDE, tie_embeddings=tied)
    total = 0
    for name, weight in tiny.weights(config).items():
        wanted = "output" if tied and name.startswith("tok_embeddings") else name.removesuffix(".weight")
        if weight.dim() == 1 or (name.startswith("tok_embeddings") and not tied):
            total += 2 * weight.numel()
            continue
        kind = scheme_for(wanted, SCHEMES[scheme])
        total += sum(buffer.nbytes for buffer in BlockLinear(quantize(weight, kind.format)).buffers())
    assert plan.weight_bytes(config, 2, SCHEMES[scheme]) == total
    if tied:  # the first of two stages has a copy of the last one's output layer
        kind = scheme_for("output", SCHEMES[scheme])
        total += sum(
            t.nbytes
            for t in BlockLinear(quantize(tiny.weights(config)["tok_embeddings.weight"], kind.format)).buffers()
        )
    halves = [replace(config, n_layers=1)] * 2
    parts = [plan.weight_bytes(half, 2, SCHEMES[scheme], i == 0, i == 1) for i, half in enumerate(halves)]
    assert sum(parts) == total


@pytest.mark.parametrize(("shards", "published"), [(8, 101_470_976_045), (16, 51_268_302_389)])
def test_the_shards_of_405b_have_the_sizes_of_the_published_files(shards: int, published: int) -> None:
    """Each of 16 shards has one of the 8 key/value heads, so every head is stored twice."""
    weights = plan.weight_bytes(plan.slice_of(B405, shards, 126), 2)
    assert 0 < published - weights < 10**6  # the archive's own bytes


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_keys_and_values_are_the_bytes_of_a_cache(tensor: int) -> None:
    split = Split(tensor, (2, 4))
    for stage in plan.stages(Run(SMALL, 3, 40), split):
        heads = max(1, 2 // tensor)
        cache = KVCache(stage.layers, heads, 8, 40, batch=3, dtype=torch.bfloat16)
        assert stage.cache == sum(buffer.nbytes for layer in cache.layers for buffer in layer.buffers)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-70b", "llama-3.1-8b", "llama-3.1-405b", "llama-3.2-1b"])
def test_all_gpus_together_have_the_model_and_the_copies(name: str) -> None:
    config = official()[name]
    for count in (1, 2, 4, 8, 16):
        split = plan.choose(config, count, H100)
        assert split is not None
        n, stages = split.tensor, split.pipeline
        total = sum(n * stage.weights for stage in plan.stages(Run(config, 1, 64), split))
        copies = max(1, n // config.n_kv_heads)
        kv = 2 * config.n_layers * config.n_kv_heads * config.head_dim * config.dim
        norms = (2 * config.n_layers + 1) * config.dim
        tied = config.vocab_size * config.dim * (config.tie_embeddings and stages > 1)
        assert total == 2 * (config.n_params + (copies - 1) * kv + (n - 1) * norms + tied)


@pytest.mark.parametrize("name", official())
@pytest.mark.parametrize("scheme", [None, "int4"])
def test_more_gpus_never_need_more_memory_each(name: str, scheme: str | None) -> None:
    config = official()[name]
    run = Run(config, 4, 2048, scheme=SCHEMES[scheme] if scheme else None)
    for count in range(1, 25):
        few, many = (plan.choose(config, n, H100) for n in (count, 2 * count))
        if few and many:
            needs = [max(stage.needs for stage in plan.stages(run, split)) for split in (few, many)]
            assert needs[1] <= needs[0], (count, few, many)


def test_known_models_fit_as_computed_by_hand() -> None:
    """405,853,388,800 parameters of 2 bytes are 812 GB: 101.5 on each of 8 GPUs, 50.7 on each of 16."""

    def fits(config: ModelConfig, gpus: str, **options: Any) -> bool:
        return plan.plan(Run(config, 8, 8192, **options), *parse_gpus(gpus)).fits

    assert not fits(B405, "8xH100")
    assert fits(B405, "16xH100")
    assert fits(B405, "8xH200")  # 101.5 and 4.2 of keys and values, of 126.9
    assert fits(B405, "8xH100", scheme=SCHEMES["int8"])  # 54
    assert not fits(B405, "16xL40S")  # 50.7 of 43.2
    assert not fits(B70, "1xH100")  # 141
    assert not fits(B70, "2xH100")  # 70.6 and 10.7, of 72
    assert fits(B70, "4xH100")
    assert fits(B70, "1xH100", scheme=SCHEMES["int4"])  # 45 and 21.5
    assert fits(B8, "1xH100")
    assert not fits(B8, "1xRTX4090")  # 16.1 and 8.6, of 21.6
    assert fits(replace(B8, n_layers=20), "1xRTX4090")


@given(batch=st.integers(1, 40), context=st.integers(1, 20_000), count=st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=40, deadline=None)
def test_the_largest_batch_and_context_are_the_largest_that_fit(batch: int, context: int, count: int) -> None:
    run = Run(B70, batch, context, scheme=SCHEMES["int4"])
    made = plan.plan(run, count, H100)
    assert made.fits == (made.largest_batch >= batch) == (made.largest_context >= context)
    for field, most, limit in (("batch", made.largest_batch, 2**20), ("context", made.largest_context, 131072)):
        if most > 0:
            assert plan.fits(replace(run, **{field: most}), made.split, H100)
        if most < limit:
            assert not plan.fits(replace(run, **{field: most + 1}), made.split, H100)


@pytest.mark.parametrize("gpu", ["H100", "L40S", "RTX4090", "MI300X"])
def test_no_smaller_number_of_gpus_fits(gpu: str) -> None:
    for config in (B8, B70, B405):
        run = Run(config, 2, 4096)
        best = plan.smallest(run, GPUS[gpu])
        assert best is not None
        assert plan.fits(run, best, GPUS[gpu])
        for count in range(1, best.gpus):
            assert not plan.plan(run, count, GPUS[gpu]).fits if plan.choose(config, count, GPUS[gpu]) else True


# --------------------------------------------------------------------------------------------------------- speed
@pytest.mark.parametrize("keys", [1, 7, 40])
def test_operations_are_counted_as_by_torch(keys: int) -> None:
    net = tiny.model(SMALL, attention="reference")
    cache = net.new_cache(64)
    if keys > 1:
        net(tiny.random_tokens(keys - 1, SMALL), cache=cache)
    with FlopCounterMode(display=False) as counted:
        net(tiny.random_tokens(1, SMALL), cache=cache)
    run, split = Run(SMALL, 1, keys, "float32"), Split(1, (6,))
    assert plan.traffic(run, split, plan.stages(run, split)[0]).flops == counted.get_total_flops()


def test_a_step_reads_every_matrix_once_and_the_cache() -> None:
    """8B on an H100, by hand: all parameters except the embedding, and 131,072 bytes for each cached token."""
    made = plan.plan(Run(B8, 8, 8192), 1, H100)
    read = 2 * (8_030_261_248 - 128_256 * 4096) + 8 * 8192 * 131_072
    assert made.decoding is not None
    assert made.decoding.seconds == pytest.approx(read / 3.35e12, rel=1e-12)
    assert made.decoding.by == "memory"
    assert made.decoding.each_tps * 8 == pytest.approx(made.decoding.batch_tps)
    tied = official()["llama-3.2-1b"]
    made = plan.plan(Run(tied, 1, 512), 1, H100)
    assert made.decoding is not None
    assert made.decoding.seconds == pytest.approx((2 * tied.n_params + 512 * 32_768) / 3.35e12, rel=1e-12)


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_an_all_reduce_sends_the_bytes_of_a_ring(tensor: int) -> None:
    """A simulated ring: in N - 1 rounds every GPU sends a part to be summed, in N - 1 more the sums are distributed."""
    parts = [[{rank} for _ in range(tensor)] for rank in range(tensor)]  # the ranks summed in each part of each GPU
    sent = [0] * tensor
    for lap in range(2):
        for step in range(tensor - 1):
            moving = [(rank - step + lap) % tensor for rank in range(tensor)]
            for rank, part in enumerate(moving):
                parts[(rank + 1) % tensor][part] |= parts[rank][part]
                sent[rank] += B405.dim * 2 // tensor
    assert all(part == set(range(tensor)) for gpu in parts for part in gpu)
    run = Run(B405, 1, 64)
    assert {plan.reduce_bytes(run, tensor)} == set(sent)
    one, two = (
        plan.traffic(run, Split(tensor, (n, 100)), plan.stages(run, Split(tensor, (n, 100)))[0]) for n in (5, 6)
    )
    assert two.shared - one.shared == 2 * sent[0]  # two more all-reduces with one more layer
    assert one.shared == (2 * 5 + 1) * sent[0]
    assert one.handed == 2 * B405.dim


def simulate(times: list[float], groups: int, rounds: int = 60) -> float:
    """Seconds per token of a simulated pipeline, whose stages process one group at a time."""
    free, ready = [0.0] * len(times), [0.0] * groups
    ends = []
    for _ in range(rounds):
        for group in range(groups):
            for stage, seconds in enumerate(times):
                free[stage] = max(free[stage], ready[group]) + seconds
                ready[group] = free[stage]
        ends.append(ready[-1])
    return (ends[-1] - ends[rounds // 2]) / (rounds - 1 - rounds // 2)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("layers", [(126,), (63, 63), (30, 50, 46), (16, 15, 16, 16, 16, 15, 16, 16)])
def test_a_step_takes_as_long_as_in_a_simulated_pipeline(batch: int, layers: tuple[int, ...]) -> None:
    bound = plan.decoding(Run(B405, batch, 4096), Split(8, layers), H100)
    assert bound.groups == min(batch, len(layers))
    assert bound.rows * bound.groups == pytest.approx(batch)
    times = [stage.bound for stage in bound.times]
    assert bound.seconds == pytest.approx(simulate(times, bound.groups), rel=1e-6)


def test_links_within_a_host_and_between_hosts_have_their_own_rates() -> None:
    within, slow = 450e9, 50e9
    gpu = replace(H100, link=within, network=slow)
    assert plan.link_seconds(gpu, Split(8, (1,)), 0, 9e9, 0) == 9e9 / within
    assert plan.link_seconds(gpu, Split(16, (1,)), 0, 9e9, 0) == 9e9 / slow
    assert plan.link_seconds(gpu, Split(4, (1, 1, 1)), 0, 0, 9e9) == 9e9 / within  # GPUs 0-3 to 4-7
    assert plan.link_seconds(gpu, Split(4, (1, 1, 1)), 1, 0, 9e9) == 9e9 / slow  # 4-7 to 8-11
    assert plan.link_seconds(gpu, Split(8, (1, 1)), 0, 9e9, 1) == 9e9 / within  # the sums stay within the host


@given(
    batch=st.integers(1, 256),
    context=st.integers(1, 30_000),
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.integers(1, 6),
    factor=st.floats(1.1, 8),
)
@settings(max_examples=60, deadline=None)
def test_bounds_scale_with_the_hardware_and_the_run(
    batch: int, context: int, tensor: int, pipeline: int, factor: float
) -> None:
    split = Split(tensor, plan.even_layers(80, pipeline))
    run = Run(B70, batch, context)
    bound = plan.decoding(run, split, H100)
    faster = replace(H100, **{name: factor * getattr(H100, name) for name in ("bandwidth", "flops", "link", "network")})
    assert plan.decoding(run, split, faster).seconds == pytest.approx(bound.seconds / factor)
    assert plan.prefill(run, split, faster).tps == pytest.approx(plan.prefill(run, split, H100).tps * factor)
    more = plan.decoding(replace(run, batch=batch + 1), split, H100)
    assert more.batch_tps >= bound.batch_tps * (1 - 1e-9)  # another sequence shares the weights
    assert more.each_tps <= bound.each_tps * (1 + 1e-9)
    longer = plan.decoding(replace(run, context=2 * context), split, H100)
    assert longer.seconds >= bound.seconds
    fewer = plan.decoding(replace(run, scheme=SCHEMES["int4"]), split, H100)
    assert fewer.seconds <= bound.seconds


def test_prefill_is_two_operations_per_weight_and_half_of_the_pairs() -> None:
    made = plan.plan(Run(B8, 1, 4096), 1, H100)
    weights = 8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096
    pairs = sum(range(1, 4097))
    scores = 4 * 32 * 32 * 128 * pairs  # q k^T and its product with v: 2 operations for each of D, H heads, 32 layers
    assert made.prefill is not None
    assert made.prefill.tps == pytest.approx(4096 * 989e12 / (2 * weights * 4096 + scores), rel=1e-4)
    assert made.prefill.by == "compute"


# --------------------------------------------------------------------------------------------------------- splits
def test_tensor_parallelism_fills_a_host_and_a_pipeline_connects_hosts() -> None:
    assert plan.choose(B405, 16, H100) == Split(8, (63, 63))
    assert plan.choose(B405, 8, H100) == Split(8, (126,))
    assert plan.choose(B405, 12, H100) == Split(4, (42, 42, 42))
    assert plan.choose(B405, 7, H100) == Split(1, (18,) * 7)
    assert plan.choose(B405, 16, replace(H100, per_host=16)) == Split(16, (126,))
    assert plan.pick_split(B405, 16, H100, 16, None) == Split(16, (126,))
    assert plan.pick_split(B405, 16, H100, None, 4).tensor == 4


def test_the_nearest_numbers_that_can_be_split_are_named() -> None:
    for heads, layers, count in ((7, 1, 4), (7, 1, 2), (6, 1, 5), (4, 2, 7), (8, 4, 5)):
        config = replace(B405, n_heads=heads, n_kv_heads=heads, hidden_dim=heads * 64, n_layers=layers)
        valid = [n for n in range(1, 2 * count + 1) if plan.splits(config, n)]
        nearest = sorted(sorted(valid, key=lambda n: abs(n - count))[:4])
        with pytest.raises(UsageError, match=f"numbers that can be split: {', '.join(map(str, nearest))}$"):
            plan.pick_split(config, count, H100, None, None)


@pytest.mark.parametrize("name", official())
def test_every_split_divides_heads_and_layers_evenly(name: str) -> None:
    config = official()[name]
    for count in (1, 2, 3, 6, 8, 16, 24):
        for split in plan.splits(config, count):
            n = split.tensor
            assert n * split.pipeline == count
            assert sum(split.layers) == config.n_layers
            assert max(split.layers) - min(split.layers) <= 1
            assert config.n_heads % n == 0 == config.hidden_dim % n
            # a GPU must have the key/value heads of its query heads: head h reads h // G
            group = config.n_heads // config.n_kv_heads
            for rank in range(n):
                heads = {h // group for h in range(rank * config.n_heads // n, (rank + 1) * config.n_heads // n)}
                assert len(heads) == max(1, config.n_kv_heads // n)


# -------------------------------------------------------------------------------------------------------- the GPUs
def test_the_rates_agree_with_the_data_sheets_of_machines() -> None:
    """DGX data sheets give totals of eight GPUs, with sparsity, links in both directions, adapters in Gb/s."""
    dgx = {  # GB, sparse PFLOP/s, how many of these one 16-bit operation counts as, TB/s of NVLink, Gb/s of an adapter
        "A100-80": (640, 5, 1, 4.8, 200),
        "A100-40": (320, 5, 1, 4.8, 200),
        "H100": (640, 32, 2, 7.2, 400),
        "H200": (1128, 32, 2, 7.2, 400),
        "B200": (1440, 72, 2, 14.4, 400),
    }
    for name, (memory, rate, per_16_bits, links, adapter) in dgx.items():
        gpu = GPUS[name]
        assert gpu.memory * 8 == memory * 1e9
        assert gpu.flops * 8 * 2 * per_16_bits == pytest.approx(rate * 1e15, rel=0.02)
        assert gpu.link * 2 * 8 == pytest.approx(links * 1e12)
        assert gpu.network * 8 == adapter * 1e9


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("Llama3.1-8B-Instruct", "llama-3.1-8b"),
        ("Llama-2-7b-chat-hf", "llama-2-7b"),
        ("CodeLlama-70b-Instruct-hf", "codellama-70b-instruct"),
    ],
)
def test_the_name_of_a_repository_stands_for_its_shapes(
    name: str, shapes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "-m", name, "--gpus", "H100"])
    out, err = capsys.readouterr()
    assert out.startswith(f"model       {shapes}: ")
    assert err == f"clearllama: no file or folder {name!r} here; the shapes are those of {shapes}\n"


@pytest.mark.parametrize("fast", [True, False])
def test_a_cpu_has_the_dtype_in_which_it_would_run(
    fast: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: fast)
    main(["plan", "-m", "llama-3-8b", "--gpus", "1xcpu", "--gpu-memory", "64GB"])
    out = capsys.readouterr().out
    assert f"weights {'bfloat16' if fast else 'float32'}" in out
    assert ("--dtype bfloat16" in out) != fast


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    for text in ("16xH1000", "tpu", "2xA30"):
        with pytest.raises(UsageError, match=r"nown: H100, .*MI300X.*custom"):
            parse_gpus(text)
    for text in ("", "x", "-1xH100", "1.5xH100", "H100x16"):
        with pytest.raises(UsageError, match=r"a number and a name, as in 16xH100|unknown GPU"):
            parse_gpus(text)
    for text in ("0xH100", "000xH100", "4097xH100", "99999999xH100", "9" * 5000 + "xH100"):
        with pytest.raises(UsageError, match="the number of GPUs must lie between 1 and 4,096"):
            parse_gpus(text)
    with pytest.raises(UsageError, match=r"has no data sheet: add --gpu-memory$"):
        parse_gpus("4xcustom", flops=1e12)
    with pytest.raises(UsageError, match="bandwidth must be above 0"):
        parse_gpus("H100", bandwidth=0.0)
    assert parse_gpus("16xh100") == (16, H100)
    assert parse_gpus(" 2 x a100 ") == (2, GPUS["A100-80"])
    assert parse_gpus("cpu", memory=24e9, bandwidth=40e9, flops=4e11)[1].bandwidth == 40e9
    slower = parse_gpus("H100", bandwidth=3e12)[1]
    assert (slower.bandwidth, slower.memory) == (3e12, 80e9)
    assert "bandwidth as given" in slower.source


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [("memory", "80GB", 80e9), ("memory", "24GiB", 24 * 2**30), ("bandwidth", "3350GB/s", 3.35e12),
     ("link", "3.35 TB/s", 3.35e12), ("flops", "989TFLOP/s", 989e12), ("flops", "989 TFLOPS", 989e12),
     ("flops", "1e12FLOP/s", 1e12), ("memory", "512B", 512.0), ("network", "40gb/s", 40e9)],
)  # fmt: skip
def test_quantities_are_parsed(option: str, text: str, value: float) -> None:
    assert quantity(text, f"--gpu-{option}") == value


@pytest.mark.parametrize(
    ("option", "text", "example"),
    [("memory", text, "80GB or 24GiB") for text in
     ("", "GB", "1", "80", "1e12", "80G", "80 apples", "-80GB", "80GB/s", "80GB/h", "nan", "inf", "8 0GB", "1e999GB",
      "9" * 5000 + "GB")]
    + [("bandwidth", "3350", "3350GB/s"), ("network", "50GB", "3350GB/s"), ("flops", "989", "989TFLOP/s"),
       ("flops", "989TB/s", "989TFLOP/s")],
)  # fmt: skip
def test_a_malformed_quantity_is_refused(option: str, text: str, example: str) -> None:
    with pytest.raises(UsageError, match=f"--gpu-{option} must be a number with a unit, such as {example}, got"):
        quantity(text, f"--gpu-{option}")


# ------------------------------------------------------------------------------------------------------ the command
def test_the_report_fits_into_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("smollm2-135m-instruct", "llama-2-7b", "llama-3.1-405b"):
        for gpu in GPUS:
            for count in (1, 3, 48) if name != "smollm2-135m-instruct" else (1, 9):
                code = main(["plan", "-m", name, "--gpus", f"{count}x{gpu}", "--batch", "12"])
                out = capsys.readouterr().out
                assert max(map(len, out.splitlines())) <= 100, out
                assert code == (0 if "\nfits        yes" in out else 1)
                assert ("upper bounds" in out) == (code == 0)


def test_a_gpu_without_rates_gets_a_plan_without_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "-m", "llama-3.1-8b", "--gpus", "1xcustom", "--gpu-memory", "16GB", "--quantize", "int4"]
    assert main(command) == 0
    bare = capsys.readouterr().out
    assert main([*command, "--gpu-bandwidth", "1TB/s"]) == 0
    assert "\nspeed       not estimated: add --gpu-flops\n" in capsys.readouterr().out
    assert main([*command, "--gpu-bandwidth", "1TB/s", "--gpu-flops", "100TFLOP/s"]) == 0
    full = capsys.readouterr().out
    assert bare.endswith("\n\nspeed       not estimated: add --gpu-bandwidth and --gpu-flops\n")
    start, end = "\nlinks ", "1 (1 x 1)\n\n"  # without the line on the rates and those on the speed
    assert bare[bare.index(start) : bare.rindex(end)] == full[full.index(start) : full.rindex(end)]
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["gpu"]["bandwidth"], facts["gpu"]["flops"]) == (None, None)
    assert (facts["decode"], facts["prefill"]) == (None, None)


@pytest.mark.parametrize("size", [8e9, 16e9])
def test_the_longest_context_of_each_kind_of_weights_is_listed(size: float, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "-m", "llama-3.1-8b", "--gpus", "custom", "--gpu-memory", f"{size:.0f}B"]
    assert main(command) == 1
    out = capsys.readouterr().out
    rows = re.findall(r"^(bfloat16|int8|int4) +[\d.]+ +[\d.]+ +(?:yes|no) +([\d,]+|none) ", out, re.MULTILINE)
    assert [kind for kind, _ in rows] == ["bfloat16", "int8", "int4"]
    assert [count != "none" for _, count in rows] == ([False, False, True] if size == 8e9 else [False, True, True])
    for kind, text in rows:  # the run with this many tokens fits, and with one more it does not
        count = 0 if text == "none" else int(text.replace(",", ""))
        option = [] if kind == "bfloat16" else ["--quantize", kind]
        assert main([*command, *option, "--context", str(count + 1)]) == 1
        assert count == 0 or main([*command, *option, "--context", str(count)]) == 0


def test_json_has_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", str(ROOT / "configs/llama-3.1-405b.json"), "--gpus", "16xH100", "--batch", "8"]
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    made = plan.plan(Run(B405, 8, 8192), 16, H100)
    assert made.decoding is not None
    assert facts["model"] == "llama-3.1-405b"
    assert facts["split"] == {"gpus": 16, "tensor": 8, "pipeline": 2, "layers": [63, 63]}
    assert facts["memory"]["weights"] == made.fullest.weights
    assert facts["memory"]["total"] == sum(
        facts["memory"][key] for key in ("weights", "kv_cache", "activations", "reserve")
    )
    assert facts["decode"]["tps_batch"] == made.decoding.batch_tps
    assert facts["decode"]["step_s"] == made.decoding.seconds
    assert main(command) == 0
    text = capsys.readouterr().out
    for line in (
        f"{facts['memory']['total'] / 1e9:.2f}  of 80.00",
        f"{facts['decode']['tps_each']:,.1f} tok/s each, {facts['decode']['tps_batch']:,.1f} in total",
        f"{facts['prefill']['tps']:,.0f} tok/s",
        f"up to {facts['largest_batch']} sequences",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-m", "llama-3.1-405b", "--gpus", "16xH100", "--tensor-parallel", "3"], r"work: 16 x 1, 8 x 2, 4 x 4, 2 x 8, 1 x 16"),
        (["-m", "llama-3.1-405b", "--gpus", "16xH100", "--tensor-parallel", "8", "--pipeline-parallel", "4"], r"tensor 8 x pipeline 4"),
        (["-m", "llama-3.1-8b", "--gpus", "37xH100"], r"37 GPUs can't be split.*numbers that can be split: 34, 36, 38, 40"),
        (["-m", "llama-3.1-8b", "--gpus", "H100", "--batch", "0"], "batch must be an integer from 1"),
        (["-m", "llama-3.1-8b", "--gpus", "H100", "--context", "-5"], "context must be an integer from 1"),
        (["-m", "llama-3.1-8b", "--gpus", "H100", "--quantize", "int3"], "unknown quantization scheme"),
        (["-m", "llama-3.1-8b", "--gpus", "H100", "--gpu-memory", "much"], "--gpu-memory must be a number"),
        (["-m", "llama-3.1-8b", "--gpus", "H100", "--gpus-per-host", "0"], "per_host must be above 0"),
        (["-m", "llama-9.json", "--gpus", "H100"], "no such file; known models: .*llama-3.1-405b"),
        (["-m", "zzz", "--gpus", "H100"], "no file or folder 'zzz'; give a path, .*; known without files: .*, llama-3-8b,"),
        (["-m", "Llama-3.1-9B-Instruct", "--gpus", "H100"], r"did you mean .*llama-3\.1-8b\b .*Known without files: "),
        (["-m", "/models/Meta-Llama-3-8B", "--gpus", "H100"], r"did you mean llama-3-8b\b"),
        (["-m", "llama-3-8b", "--gpus", "RTX-4080"], r"unknown GPU 'RTX-4080'.* did you mean RTX4090 or RTX3090\? Known: .*--gpus 1xcustom --gpu-memory 16GB"),
        (["-m", "llama-3-8b", "--gpus", "custom", "--gpu-flops", "1TFLOP/s"], "'custom' has no data sheet: add --gpu-memory"),
    ],
)  # fmt: skip
def test_an_impossible_plan_is_refused(arguments: list[str], why: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) in (1, 2)
    out, err = capfd.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert re.search(why, err), err


def test_a_run_beyond_the_models_context_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "-m", "llama-2-7b", "--gpus", "H100", "--context", "10000"])
    assert "the model was trained for 4,096 tokens" in capsys.readouterr().out


def test_a_configuration_file_is_enough(tmp_path: Path) -> None:
    theirs = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    (tmp_path / "8b").mkdir()
    file = tmp_path / "8b" / "config.json"
    file.write_text(json.dumps(theirs))
    name, config, _ = architecture(str(file))
    assert (name, config.n_params) == ("8b", B8.n_params)

    metas = {"dim": 16384, "n_layers": 126, "n_heads": 128, "n_kv_heads": 8, "vocab_size": 128256,
             "ffn_dim_multiplier": 1.2, "multiple_of": 4096, "norm_eps": 1e-5, "rope_theta": 500000.0,
             "use_scaled_rope": True}  # fmt: skip
    file = tmp_path / "params.json"
    file.write_text(json.dumps(metas))
    assert architecture(str(file))[1].n_params == 405_853_388_800
    assert architecture(str(file))[1].max_seq_len == 131072
    for theta, context in ((500000.0, 8192), (1000000.0, 16384), (10000.0, 4096)):  # as the loader infers it
        file.write_text(json.dumps(metas | {"use_scaled_rope": False, "rope_theta": theta}))
        assert architecture(str(file))[1].max_seq_len == context
    file.write_text(json.dumps(metas | {"vocab_size": -1}))
    with pytest.raises(ConfigError, match="does not state all sizes"):
        architecture(str(file))

    ours = json.loads((ROOT / "configs/llama-2-7b.json").read_text())
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(ours | {"n_layers": 16}))
    assert architecture(str(file)) == ("mine", replace(official()["llama-2-7b"], n_layers=16), None)
    file.write_text(json.dumps(ours | {"colour": "blue"}))
    with pytest.raises(ConfigError, match="colour"):
        architecture(str(file))
    for text in ("", "[]", "{", '{"dim": 1}'):
        file.write_text(text)
        with pytest.raises(LlamaError):
            architecture(str(file))


def test_a_checkpoint_is_read_by_its_headers(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "small.gguf")
    name, config, checkpoint = architecture(str(path))
    assert (name, config.n_params) == ("small.gguf", tiny.CONFIG.n_params)
    assert checkpoint is not None
    assert plan.stored_in(checkpoint, 2) is None  # float32, which a run casts


def planned(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> dict[str, Any]:
    assert main(["plan", "-m", str(path), "--gpus", "1xL4", "--context", "64", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_quantized_gguf_is_planned_by_the_bytes_that_a_gpu_stores(
    type: str, tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compared with the buffers of the layers; other tensors become bfloat16."""
    config = replace(tiny.WIDE, tie_embeddings=tied)
    path = tiny.write_gguf(tmp_path / "x.gguf", config, quantization=type)
    checkpoint, expected = open_checkpoint(path), 0
    for name, shape in checkpoint.shapes.items():
        blocks = checkpoint.blocks(name, slice(None)) if len(shape) == 2 else None
        if blocks is None or (name == "tok_embeddings.weight" and not tied):
            expected += 2 * math.prod(shape)
        else:
            expected += sum(buffer.nbytes for buffer in BlockLinear(blocks).buffers())
    facts = planned(capsys, path)
    assert facts["memory"]["weights"] == expected
    assert facts["stored"] == [type]
    assert facts["dequantized"] == []
    assert facts["quantize"] == "as stored"
    found = {other["quantize"]: other["weights"] for other in facts["alternatives"]}
    assert list(found) == ["as stored", None, "int8", "int4"]
    assert found["as stored"] == expected
    assert found[None] == 2 * config.n_params == planned(capsys, path, "--dtype", "bfloat16")["memory"]["weights"]
    assert found["int4"] == planned(capsys, path, "--quantize", "int4")["memory"]["weights"]
    assert main(["plan", "-m", str(path), "--gpus", "1xL4"]) == 0
    out = capsys.readouterr().out
    assert "weights as stored, keys and values bfloat16" in out
    assert f"\nstored      {type}: " in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_quantized_folder_is_planned_like_its_scheme(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny.write_gguf(tmp_path / "x.gguf", replace(tiny.WIDE, tie_embeddings=True))
    assert main(["quantize", str(source), str(tmp_path / "saved"), "--scheme", scheme, "--quiet"]) == 0
    capsys.readouterr()
    made = planned(capsys, source, "--quantize", scheme)["memory"]["weights"]
    found = planned(capsys, tmp_path / "saved")
    assert found["stored"]
    assert found["memory"]["weights"] == made


def test_keys_and_values_in_8_bits_are_the_bytes_of_a_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf")
    facts = planned(capsys, path, "--kv-cache", "int8", "--batch", "3")
    config = tiny.CONFIG
    cache = KVCache(config.n_layers, config.n_kv_heads, config.head_dim, 64, batch=3, dtype=torch.bfloat16, kind="int8")
    expected = sum(buffer.nbytes for layer in cache.layers for buffer in layer.buffers)
    assert facts["memory"]["kv_cache"] == facts["stages"][0]["kv_cache_read"] == expected
    assert expected < planned(capsys, path, "--batch", "3")["memory"]["kv_cache"]
    main(["plan", "-m", str(path), "--gpus", "1xL4", "--kv-cache", "int8"])
    assert "keys and values int8" in capsys.readouterr().out
