"""The plan against real tensors, published file sizes and numbers computed by hand."""

from __future__ import annotations

import contextlib
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

from llama.cache import KVCache
from llama.checkpoint import open_checkpoint
from llama.cli import main
from llama.config import ModelConfig
from llama.engine.linears import GroupedLinear
from llama.errors import LlamaError
from llama.loader import load_model
from llama.quant.schemes import SCHEMES, quantize, scheme_for
from llama.study.perplexity import tiny_folder
from llama.system.memory import Room
from llama.tools.convert import convert
from llama.tools.families import architecture, official
from llama.tools.plan import GPUS, Run, parse_gpus, plan, weight_bytes
from llama.weights import expected_shapes

from . import tiny
from .scripts import make_tiny

B405, B70, B8 = (official()[name] for name in ("llama-3.1-405b", "llama-3.1-70b", "llama-3.1-8b"))
H100 = GPUS["h100"]

SMALL = ModelConfig(64, 6, 8, 2, 8, 96, 320, max_seq_len=256)
KINDS = {
    "plain": SMALL,
    "tied": replace(SMALL, tie_embeddings=True),
    "biases": replace(SMALL, attention_bias=True, mlp_bias=True),
    "some without RoPE": replace(SMALL, qkv_bias=True, no_rope_layers=(3,)),
}


def run_of(config: ModelConfig, batch: int = 1, context: int = 64, scheme: str | None = None, **options: Any) -> Run:
    return Run(config, weight_bytes(config, scheme, options.get("size", 2)), batch, context, **options)


# -------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_the_weights_are_the_bytes_of_the_tensors(kind: str, size: int) -> None:
    config = KINDS[kind]
    expected = {name: size * math.prod(shape) for name, shape in expected_shapes(config).items()}
    run = run_of(config, size=size)
    assert run.weights == sum(expected.values())
    assert run.weights - run.weights_read == (0 if config.tie_embeddings else expected["tok_embeddings.weight"])
    assert replace(run, gpus=4).memory["weights"] == round(run.weights / 4)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tied", [False, True])
def test_quantized_weights_are_the_bytes_of_a_gpus_layers(scheme: str, tied: bool) -> None:
    config, total = replace(tiny.WIDE, tie_embeddings=tied), 0
    for name, weight in tiny.weights(config).items():
        wanted = "output" if tied and name.startswith("tok_embeddings") else name.removesuffix(".weight")
        if weight.dim() == 1 or (name.startswith("tok_embeddings") and not tied):
            total += 2 * weight.numel()
            continue
        kind = scheme_for(wanted, SCHEMES[scheme])
        total += sum(buffer.nbytes for buffer in GroupedLinear(quantize(weight, kind.format)).buffers())
    assert run_of(config, scheme=scheme).weights == total


@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("kind", ["model", "int8"])
def test_keys_and_values_are_the_bytes_of_a_cache(gpus: int, kind: str) -> None:
    cache = KVCache(6, max(1, 2 // gpus), 8, 40, batch=3, dtype=torch.bfloat16, kind=kind)
    expected = sum(buffer.nbytes for layer in cache.layers for buffer in layer.buffers)
    assert run_of(SMALL, 3, 40, gpus=gpus, kv_cache=kind).memory["kv_cache"] == expected


def test_known_models_fit_as_computed_by_hand() -> None:
    """405,853,388,800 parameters of 2 bytes are 812 GB: 101.5 on each of 8 GPUs, 50.7 on each of 16."""

    def fits(config: ModelConfig, text: str, scheme: str | None = None) -> bool:
        gpus, gpu = parse_gpus(text)
        return run_of(config, 8, 8192, scheme, gpus=gpus).fits(gpu)

    assert not fits(B405, "8xH100")
    assert fits(B405, "16xH100")
    assert fits(B405, "8xH200")  # 101.5 and 4.2 of keys and values, of 126.9
    assert fits(B405, "8xH100", "int8")  # 54
    assert not fits(B405, "16xL40S")  # 50.7 of 43.2
    assert not fits(B70, "2xH100")  # 70.6 and 10.7, of 72
    assert fits(B70, "4xH100")
    assert fits(B70, "1xH100", "int4")  # 45 and 21.5
    assert not fits(B8, "1xRTX4090")  # 16.1 and 8.6, of 21.6
    assert fits(replace(B8, n_layers=20), "1xRTX4090")


@given(batch=st.integers(1, 40), context=st.integers(1, 20_000), gpus=st.sampled_from([1, 2, 3, 8]))
@settings(max_examples=20, deadline=None)
def test_the_largest_and_smallest_runs_are_those_that_fit(batch: int, context: int, gpus: int) -> None:
    run = run_of(B70, batch, context, "int4", gpus=gpus)
    facts = plan(run, H100, {})
    assert facts["fits"] == (facts["largest_batch"] >= batch) == (facts["largest_context"] >= context)
    for field, limit in (("batch", 2**20), ("context", 131072)):
        most = facts[f"largest_{field}"]
        assert most == 0 or replace(run, **{field: most}).fits(H100)
        assert most == limit or not replace(run, **{field: most + 1}).fits(H100)
    few = facts["smallest"]["gpus"]
    assert [replace(run, gpus=count).fits(H100) for count in range(1, few + 1)] == [False] * (few - 1) + [True]


# --------------------------------------------------------------------------------------------------------- speed
def test_a_step_reads_every_matrix_once_and_the_cache() -> None:
    """8B on H100s, by hand: all parameters except the embedding, and 131,072 bytes for each cached token."""
    read = 2 * (8_030_261_248 - 128_256 * 4096) + 8 * 8192 * 131_072
    for gpus in (1, 2):
        decode = plan(run_of(B8, 8, 8192, gpus=gpus), H100, {})["decode"]
        assert decode["step_s"] == pytest.approx(read / 3.35e12 / gpus, rel=1e-12)
        assert decode["tps_each"] * 8 == pytest.approx(decode["tps_batch"]) == pytest.approx(8 / decode["step_s"])
    tied = official()["llama-3.2-1b"]
    decode = plan(run_of(tied, 1, 512), H100, {})["decode"]
    assert decode["step_s"] == pytest.approx((2 * tied.n_params + 512 * 32_768) / 3.35e12, rel=1e-12)


# ------------------------------------------------------------------------------------------------------ the command
def test_gpus_are_parsed() -> None:
    assert parse_gpus("16xh100") == (16, H100)
    assert parse_gpus(" 2 x a100 ") == (2, GPUS["a100"])
    assert parse_gpus("cpu", 24e9, 40e9)[1][1:3] == (24e9, 40e9)
    assert parse_gpus("H100", bandwidth=3e12)[1][1:3] == (80e9, 3e12)


def test_the_report_has_the_facts_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    for name, gpus in (("smollm2-135m-instruct", "1xL4"), ("llama-2-7b", "3xA100"), ("llama-3.1-405b", "9xH200"),
                       ("llama-3.1-405b", "32xMI300X")):  # fmt: skip
        command = ["plan", "-m", name, "--gpus", gpus, "--batch", "12"]
        code = main(command)
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 100, out
        assert main([*command, "--json"]) == code
        facts = json.loads(capsys.readouterr().out)
        assert bool(re.search(r"^fits +yes", out, re.MULTILINE)) == facts["fits"] == (code == 0)
        for other in facts["alternatives"]:
            assert other["fits"] == (other["largest_context"] >= facts["context"])
            assert f"\n{other['quantize'] or facts['stored']}" in out
        memory = facts["memory"]
        parts = ("weights", "kv_cache", "activations", "reserve")
        assert memory["total"] == pytest.approx(sum(memory[part] for part in parts), abs=4)
        assert f" {memory['total'] / 1e9:.2f} GB on each GPU: " in out
        assert ("tok/s each" in out) == (facts["decode"] is not None) == facts["fits"]


def test_a_gpu_without_a_bandwidth_gets_a_plan_without_a_speed(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "-m", "llama-3.1-8b", "--gpus", "1xcustom", "--gpu-memory", "16GB", "--quantize", "int4"]
    speed = ["--gpu-bandwidth", "1000GB/s"]
    for more, text in (
        ([], "not estimated: add --gpu-bandwidth"),
        (speed, "speed     at most "),
        ([*speed, "--gpus", "1xcpu"], "speed     about "),
    ):
        assert main([*command, *more]) == 0
        assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-m", "llama-3.1-8b", "--gpus", "37xH100"], r"number of GPUs must be an integer from 1 to 32, got 37"),
        (["-m", "llama-3.1-8b", "--gpus", "H100", "--batch", "0"], "batch must be an integer from 1"),
        (["-m", "llama-3.1-8b", "--gpus", "H100", "--gpu-memory", "80TB"], "--gpu-memory: invalid gigabytes value: '80TB'"),
        (["-m", "llama-3.1-8b", "--gpus", "H100", "--gpu-memory", "0"], "--gpu-memory must be a number above 0"),
        (["-m", "zzz", "--gpus", "H100"], "no file or folder 'zzz'; give a path, .*; models without files: .*, llama-3-8b,"),
        (["-m", "llama-3-8b", "--gpus", "2xtpu"], "unknown GPU 'tpu'; known: h100, .*custom"),
        (["-m", "llama-3-8b", "--gpus", "custom"], "custom has no data sheet: add --gpu-memory"),
    ],
)  # fmt: skip
def test_an_impossible_plan_is_refused(arguments: list[str], why: str, capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["plan", *arguments]) in (1, 2)
    out, err = capfd.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert re.search(why, err), err


def test_a_configuration_file_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text((tiny_folder() / "config.json").read_text())
    assert architecture(str(file)) == (open_checkpoint(tiny_folder()).config, None)
    for text in ("", "[]", "{", '{"hidden_size": 1}'):
        file.write_text(text)
        with pytest.raises(LlamaError):
            architecture(str(file))


def planned(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> dict[str, Any]:
    assert main(["plan", "-m", str(path), "--gpus", "1xL4", "--context", "64", "--json", *options]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_folder_is_planned_by_the_bytes_that_a_cpu_stores(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 bits of a file stay 16 bits if the kernels of the CPU widen them in each product."""
    source = make_tiny.make(tmp_path / "Llama-3-8B", "llama-3-8b")
    path = convert(source, tmp_path / "hf", "hf", dtype=torch.bfloat16).path
    facts = planned(capsys, path, "--gpus", "1xcpu", "--gpu-memory", "16GB", "--dtype", dtype)
    stored = sum(weight.nbytes for weight in load_model(path, "cpu", dtype, fast=True).parameters())
    assert facts["memory"]["weights"] == pytest.approx(stored, rel=0.01)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q8_0", "Q5_0"])
def test_a_quantized_gguf_is_planned_by_the_bytes_that_a_gpu_stores(
    type: str, tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compared with the buffers of the layers; other tensors become bfloat16."""
    config = replace(tiny.WIDE, tie_embeddings=tied)
    path = tiny.write_gguf(tmp_path / "x.gguf", config, quantization=type)
    checkpoint, expected = open_checkpoint(path), 0
    for name, shape in checkpoint.shapes.items():
        weight = checkpoint.weight(name)
        blocks = weight.groups() if weight.format is not None and type != "Q5_0" else None
        if blocks is None or (name == "tok_embeddings.weight" and not tied):
            expected += 2 * math.prod(shape)
        else:
            expected += sum(buffer.nbytes for buffer in GroupedLinear(blocks).buffers())
    facts = planned(capsys, path)
    assert facts["memory"]["weights"] == expected
    found = {other["quantize"]: other["per_gpu"] for other in facts["alternatives"]}
    stored = [] if type == "Q5_0" else ["as stored"]  # Q5_0 is dequantized
    assert (facts["quantize"], {*found}) == (next(iter(stored), None), {*stored, None, "int8", "int4"})
    for options in ((), ("--dtype", "bfloat16"), ("--quantize", "int4")):
        alone = planned(capsys, path, *options)
        assert found[alone["quantize"]] == alone["memory"]["total"]
        speeds = {other["quantize"]: other["tps_each"] for other in alone["alternatives"]}
        assert speeds[alone["quantize"]] == alone["decode"]["tps_each"]
        assert [*speeds.values()] == sorted(speeds.values(), reverse=True), "the fastest is not the first"
        assert options[:1] != ("--dtype",) or alone["memory"]["weights"] == 2 * config.n_params


# -------------------------------------------------------------------------------------------------- this machine
def here_or_named(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["plan", "llama-3.1-8b", "--json", *words])
    return json.loads(capsys.readouterr().out)


def test_without_gpus_the_plan_is_for_the_memory_that_is_free(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    free = {"cpu": 40 * 10**9, "cuda:0": 60 * 10**9, "cuda:1": 50 * 10**9}
    monkeypatch.setattr("llama.tools.plan.free_memory", lambda device="cpu": Room(free[device], ""))
    monkeypatch.setattr("llama.tools.plan.read_bandwidth", lambda device: {"cpu": 3e10, "cuda": 9e11}[device.type])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    speed = ("--gpu-bandwidth", "30GB/s")
    here, named = here_or_named(capsys), here_or_named(capsys, "--gpus", "1xcpu", "--gpu-memory", "40GB", *speed)
    source = f"free on this machine, which reads 30 GB/s now in {torch.get_num_threads()} threads"
    assert here["gpu"].pop("source") == source
    named["gpu"].pop("source")
    assert here == named
    assert here_or_named(capsys, "--gpu-bandwidth", "50GB/s")["gpu"]["bandwidth"] == 5e10
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Test")
    speed = ("--gpu-bandwidth", "900GB/s")
    here, named = here_or_named(capsys), here_or_named(capsys, "--gpus", "2xcustom", "--gpu-memory", "50GB", *speed)
    source = "free on this machine, which reads 900 GB/s now"
    assert here["gpu"] == {**named["gpu"], "name": "NVIDIA Test", "source": source}
    assert {**here, "gpu": None} == {**named, "gpu": None}


def test_a_machine_of_unknown_memory_is_asked_for(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("llama.tools.plan.free_memory", lambda device="cpu": None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", "llama-3.1-8b"]) == 2
    assert "add --gpus 1xcpu --gpu-memory GB" in capsys.readouterr().err
