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
from llama.cli.plan import architecture, quantity
from llama.config import ModelConfig
from llama.engine.linears import BlockLinear
from llama.errors import LlamaError, UsageError
from llama.hub.families import official
from llama.quant.schemes import SCHEMES, quantize, scheme_for
from llama.tools.plan import GPUS, Run, parse_gpus, plan, scheme_bits
from llama.weights import expected_shapes

from . import tiny

ROOT = Path(__file__).resolve().parent.parent
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
    bits = scheme_bits(scheme, options.get("size", 2), config.tie_embeddings)
    return Run(config, bits, batch, context, **options)


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
        total += sum(buffer.nbytes for buffer in BlockLinear(quantize(weight, kind.format)).buffers())
    assert run_of(config, scheme=scheme).weights == total


def test_the_shards_of_405b_have_the_sizes_of_the_published_files() -> None:
    assert run_of(B405, gpus=8).memory["weights"] == pytest.approx(101_470_976_045, rel=1e-4)


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
def test_the_name_of_a_repository_stands_for_its_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    for name, shapes in (
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("Llama3.1-8B-Instruct", "llama-3.1-8b"),
        ("Llama-2-7b-chat-hf", "llama-2-7b"),
    ):
        main(["plan", "-m", name, "--gpus", "H100", "--json"])
        out, err = capsys.readouterr()
        assert json.loads(out)["model"] == shapes
        assert err == f"clearllama: no file or folder {name!r} here; the shapes are those of {shapes}\n"


@pytest.mark.parametrize("fast", [True, False])
def test_a_cpu_has_the_dtype_in_which_it_would_run(
    fast: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: fast)
    main(["plan", "-m", "llama-3-8b", "--gpus", "1xcpu", "--gpu-memory", "64GB"])
    assert f"keys, values  {'bfloat16' if fast else 'float32'}," in capsys.readouterr().out


def test_gpus_and_quantities_are_parsed() -> None:
    assert parse_gpus("16xh100") == (16, H100)
    assert parse_gpus(" 2 x a100 ") == (2, GPUS["a100-80"])
    assert parse_gpus("cpu", 24e9, 40e9)[1][1:3] == (24e9, 40e9)
    slower = parse_gpus("H100", bandwidth=3e12)[1]
    assert (slower.bandwidth, slower.memory) == (3e12, 80e9)
    assert "bandwidth as given" in slower.source
    for text, unit, value in (
        *(("80GB", "b", 80e9), ("24GiB", "b", 24 * 2**30), ("512B", "b", 512.0)),
        *(("3350GB/s", "b/s", 3.35e12), ("3.35 TB/s", "b/s", 3.35e12), ("40gb/s", "b/s", 40e9)),
    ):
        assert quantity(text, "--gpu-memory", unit, "") == value
    for text in (
        "",
        "GB",
        "80",
        "1e12",
        "80G",
        "80 apples",
        "-80GB",
        "80GB/s",
        "nan",
        "inf",
        "8 0GB",
        "9" * 5000 + "GB",
    ):
        with pytest.raises(UsageError, match="--gpu-memory must be a number above 0 with a unit, such as 80GB, got"):
            quantity(text, "--gpu-memory", "b", "80GB")


def test_the_report_has_the_facts_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("smollm2-135m-instruct", "llama-2-7b", "llama-3.1-405b"):
        for gpu in [gpu.name for gpu in GPUS.values() if gpu.memory]:
            for count in (1, 9) if name == "smollm2-135m-instruct" else (1, 3, 32):
                command = ["plan", "-m", name, "--gpus", f"{count}x{gpu}", "--batch", "12"]
                code = main(command)
                out = capsys.readouterr().out
                assert max(map(len, out.splitlines())) <= 100, out
                assert main([*command, "--json"]) == code
                facts = json.loads(capsys.readouterr().out)
                assert bool(re.search(r"^fits +yes", out, re.MULTILINE)) == facts["fits"] == (code == 0)
                memory = facts["memory"]
                parts = ("weights", "kv_cache", "activations", "reserve")
                assert memory["total"] == pytest.approx(sum(memory[part] for part in parts), abs=4)
                assert f" {memory['total'] / 1e9:.2f} of {memory['of'] / 1e9:.2f} GB" in out
                assert ("tok/s each" in out) == (facts["decode"] is not None) == facts["fits"]


def test_a_gpu_without_a_bandwidth_gets_a_plan_without_a_speed(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "-m", "llama-3.1-8b", "--gpus", "1xcustom", "--gpu-memory", "16GB", "--quantize", "int4"]
    for more, text in (([], "not estimated: add --gpu-bandwidth"), (["--gpu-bandwidth", "1TB/s"], "tok/s each")):
        assert main([*command, *more]) == 0
        assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-m", "llama-3.1-8b", "--gpus", "37xH100"], r"number of GPUs must be an integer from 1 to 32, got 37"),
        (["-m", "llama-3.1-8b", "--gpus", "H100", "--batch", "0"], "batch must be an integer from 1"),
        (["-m", "llama-3.1-8b", "--gpus", "H100", "--context", "0"], "context must be an integer from 1"),
        (["-m", "llama-3.1-8b", "--gpus", "H100", "--quantize", "int3"], "unknown quantization scheme"),
        (["-m", "llama-3.1-8b", "--gpus", "H100", "--gpu-flops", "1TFLOP/s"], "; plan divides the bytes evenly"),
        (["-m", "llama-9.json", "--gpus", "H100"], "llama-9.json"),
        (["-m", "zzz", "--gpus", "H100"], "no file or folder 'zzz'; give a path, .*; models without files: .*, llama-3-8b,"),
        (["-m", "/models/Meta-Llama-3-8B", "--gpus", "H100"], r"no file or folder '/models"),
        (["-m", "llama-3-8b", "--gpus", "RTX-4080"], r"unknown GPU 'RTX-4080'; known: .*RTX4090.*--gpu-memory 16GB"),
        (["-m", "llama-3-8b", "--gpus", "2xtpu"], r"unknown GPU 'tpu'; known: H100, .*MI300X"),
        (["-m", "llama-3-8b", "--gpus", "0xH100"], "a number up to 4096 and a name"),
        (["-m", "llama-3-8b", "--gpus", "custom"], "custom has no data sheet: add --gpu-memory"),
        (["-m", "llama-3-8b", "--gpus", "H100", "--gpu-memory", "0GB"], "--gpu-memory must be a number above 0"),
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
    ours = json.loads((ROOT / "configs/llama-2-7b.json").read_text())
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(ours | {"n_layers": 16}))
    assert architecture(str(file)) == ("mine", replace(official()["llama-2-7b"], n_layers=16), None)
    for text in ("", "[]", "{", '{"dim": 1}'):
        file.write_text(text)
        with pytest.raises(LlamaError):
            architecture(str(file))


def planned(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> dict[str, Any]:
    assert main(["plan", "-m", str(path), "--gpus", "1xL4", "--context", "64", "--json", *options]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


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
        blocks = checkpoint.blocks(name, slice(None)) if len(shape) == 2 and type != "Q5_0" else None
        if blocks is None or (name == "tok_embeddings.weight" and not tied):
            expected += 2 * math.prod(shape)
        else:
            expected += sum(buffer.nbytes for buffer in BlockLinear(blocks).buffers())
    facts = planned(capsys, path)
    assert facts["memory"]["weights"] == expected
    assert (facts["stored"], facts["dequantized"]) == ([type], [type] if type == "Q5_0" else [])
    assert facts["quantize"] == "as stored"
    found = {other["quantize"]: other["weights"] for other in facts["alternatives"]}
    assert list(found) == ["as stored", None, "int8", "int4"]
    assert found["as stored"] == expected
    assert found[None] == 2 * config.n_params == planned(capsys, path, "--dtype", "bfloat16")["memory"]["weights"]
    assert found["int4"] == planned(capsys, path, "--quantize", "int4")["memory"]["weights"]
    assert main(["plan", "-m", str(path), "--gpus", "1xL4"]) == 0
    out = capsys.readouterr().out
    assert ("; a GPU dequantizes Q5_0" in out) == (type == "Q5_0")
