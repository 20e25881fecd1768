"""clearllama quantize: the saved model is the one that --quantize makes while loading; damage to it is named."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import llama
from llama.checkpoint import base, huggingface_write, open_checkpoint, quantized
from llama.checkpoint.write import Model
from llama.cli import main
from llama.config import ModelConfig
from llama.engine import kernels
from llama.engine.linears import TileEmbedding, TileLinear
from llama.errors import CheckpointError, LlamaError, UsageError
from llama.loader import build, load, load_model
from llama.model import Transformer
from llama.quant import rounding
from llama.quant.blocks import BlockFormat
from llama.quant.schemes import SCHEMES, scheme_for
from llama.quant.tiles import unpack
from llama.tools.convert import convert
from llama.tools.quantize import quantize
from llama.weights import check_tensors, expected_shapes, to_layout

from . import test_huggingface, tiny
from .scripts import make_tiny
from .test_convert import files
from .test_huggingface import edit
from .test_kernels import PLAIN_KINDS, needs_kernels
from .test_quant import distance

pytestmark = pytest.mark.usefixtures("one_thread")

Capture = pytest.CaptureFixture[str]
TOKENS = test_huggingface.tokens(40)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
ODD = {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN, "intermediate_size": 100, "vocab_size": 331}
TIED = dataclasses.replace(tiny.WIDE, tie_embeddings=True)
AGAIN = "the source is already quantized"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every format; that of Hugging Face has every optional part and odd sizes."""
    root = tmp_path_factory.mktemp("sources")
    made = {
        "meta": make_tiny.make(root / "meta", "llama-3.1-405b", shards=2),
        "meta, tied": make_tiny.make(root / "tied", "llama-3.2-1b"),
        "meta, float8": make_tiny.make(root / "fp8", "llama-3.1-405b", shards=2, quantization="fp8"),
        "meta, QLoRA": make_tiny.make(root / "qlora", "llama-3.2-1b", quantization="qlora"),
        "gguf": tiny.write_gguf(root / "wide.gguf", tiny.WIDE),
        "gguf, tied": tiny.write_gguf(root / "tied.gguf", TIED),
        "gguf, Q5_1": tiny.write_gguf(root / "q5.gguf", tiny.WIDE, quantization="Q5_1"),
    }
    folder = root / "hf"
    convert(made["gguf"], folder, "hf")  # for its tokenizer
    test_huggingface.write(folder, **ODD)
    edit(folder, file="generation_config.json", eos_token_id=[2, 7], do_sample=True, temperature=0.6, top_k=7)
    return {"hf": folder, **made}


@pytest.fixture(scope="module")
def saved(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face folder as int4: layers of 4 bits, an output layer of 8, an embedding in floating point."""
    target = tmp_path_factory.mktemp("saved") / "int4"
    quantize(sources["hf"], target, "int4")
    return target


@pytest.fixture
def damaged(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(saved, tmp_path / "damaged")


def built(path: Path, quantize: str | None = None, rope: str = "complex", dtype: str | None = None) -> Transformer:
    """The model that llama.load makes, even without a tokenizer."""
    return build(open_checkpoint(path), "cpu", dtype, rope=rope, fast=True, quantize=quantize)


def contents(model: Transformer) -> dict[str, Any]:
    """All contents of a model: the kinds of its layers and the bytes of each tensor."""
    layers = {name: (type(m), getattr(m, "bits", 0), getattr(m, "group", 0), getattr(m, "offset", 0))
              for name, m in model.named_modules()}  # fmt: skip
    return layers | {name: (t.dtype, t.shape, t.contiguous().view(torch.uint8).numpy().tobytes())
                     for name, t in model.state_dict().items()}  # fmt: skip


def interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of q or k from Hugging Face's halves of a head to interleaved pairs."""
    heads = weight.unflatten(0, (-1, 2, head_dim // 2))  # (H, 2, D/2, ..)
    return heads.transpose(1, 2).flatten(0, 2)


# -------------------------------------------------------------------------------------------------- the saved model
@needs_kernels
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("source", ["hf", "meta", "gguf"])
def test_the_saved_model_equals_one_quantized_while_loading(
    sources: dict[str, Path], tmp_path: Path, source: str, scheme: str
) -> None:
    proof = quantize(sources[source], tmp_path / "q", scheme)
    loaded, expected = built(tmp_path / "q"), built(sources[source], scheme)
    assert contents(loaded) == contents(expected)
    assert torch.equal(loaded(TOKENS), expected(TOKENS))
    assert proof.tensors == len(open_checkpoint(sources[source]).shapes)
    assert not any(AGAIN in warning for warning in proof.warnings)
    assert {
        type(layer) for name, layer in loaded.named_modules() if name.split(".")[-1] in ("wq", "w_up", "output")
    } == {TileLinear}


@needs_kernels
@pytest.mark.parametrize("source", ["hf", "meta, tied", "meta, float8", "meta, QLoRA", "gguf, tied", "gguf, Q5_1"])
def test_this_holds_for_every_source_and_the_other_layout(
    sources: dict[str, Path], tmp_path: Path, source: str
) -> None:
    proof = quantize(sources[source], tmp_path / "q", "int4")
    loaded, expected = built(tmp_path / "q", rope="half"), built(sources[source], "int4", "half")
    if source == "gguf, Q5_1":  # its embedding is saved in 8 bits, with the same weights
        assert torch.equal(loaded.tok_embeddings.weight, expected.tok_embeddings.weight)
        expected.set_submodule("tok_embeddings", loaded.tok_embeddings)
    assert contents(loaded) == contents(expected)
    assert torch.equal(loaded(TOKENS), expected(TOKENS))
    before = ("meta, float8", "meta, QLoRA", "gguf, Q5_1")
    assert sum(AGAIN in warning for warning in proof.warnings) == (source in before)


@needs_kernels
@pytest.mark.parametrize("rope", ["complex", "half"])
def test_the_logits_are_near_those_of_transformers(sources: dict[str, Path], tmp_path: Path, rope: str) -> None:
    from transformers import LlamaForCausalLM

    quantize(sources["hf"], tmp_path / "q", "int8")
    expected = LlamaForCausalLM.from_pretrained(sources["hf"], dtype=torch.float32)(TOKENS).logits
    assert distance(load_model(tmp_path / "q", dtype="float32", device="cpu", rope=rope)(TOKENS), expected) < 0.03
    assert distance(built(tmp_path / "q", rope=rope)(TOKENS), expected) < 0.05


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_file_matches_its_metadata(sources: dict[str, Path], tmp_path: Path, scheme: str) -> None:
    """Read by the safetensors package and compared with weights quantized by the reference formula."""
    from safetensors import safe_open

    quantize(sources["gguf, tied"], tmp_path / "q", scheme)
    with safe_open(tmp_path / "q" / "model.safetensors", "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    state = tiny.weights(TIED)
    theirs = {"wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj",
              "w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj", "w_down": "mlp.down_proj", "norm": "model.norm",
              "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
              "tok_embeddings": "model.embed_tokens"}  # fmt: skip
    assert len(tensors) == len(state)
    for name, weight in state.items():
        *start, last, _ = name.split(".")
        stem = f"model.layers.{start[1]}.{theirs[last]}" if start else theirs[last]
        if weight.dim() == 1:
            assert torch.equal(tensors[f"{stem}.weight"], weight)
            continue
        declared = json.loads(metadata[f"{stem}.tiles"])
        rule = scheme_for("output" if last == "tok_embeddings" else name, SCHEMES[scheme])
        assert declared == {"shape": list(weight.shape), "bits": rule.bits, "group": rule.group, "offset": rule.offset}
        tiles = tensors[f"{stem}.tiles"]
        assert tiles.dtype == torch.uint8
        found = unpack(tiles, *declared["shape"], BlockFormat(rule.bits, rule.group, rule.offset)).weight
        reference = rounding.quantize(weight, rule.format).weight
        assert distance(found, reference) < 1e-4  # two ranges may be equally good
        assert torch.equal(open_checkpoint(tmp_path / "q").tensor(name), found)


@pytest.mark.parametrize("source", ["hf", "meta", "meta, tied", "meta, QLoRA", "gguf", "gguf, Q5_1"])
def test_everything_else_is_kept(sources: dict[str, Path], tmp_path: Path, source: str) -> None:
    proof = quantize(sources[source], tmp_path / "q", "int4")
    old, new = open_checkpoint(sources[source]), open_checkpoint(tmp_path / "q")
    assert new.config == old.config
    assert new.chat_template == old.chat_template
    assert new.sampling == old.sampling
    assert new.warnings == []
    assert any("wrote no chat template" in warning for warning in proof.warnings) == source.startswith("meta")
    ours, theirs = new.tokenizer(), old.tokenizer()
    text = "Hello\n\n 12345 über 😀 <|im_end|> <|eot_id|>  x"
    assert ours.encode(text, bos=True) == theirs.encode(text, bos=True)
    assert (ours.bos_id, ours.eos_id, ours.stop_ids) == (theirs.bos_id, theirs.eos_id, theirs.stop_ids)
    if source == "hf":
        assert new.sampling == {"temperature": 0.6, "top_k": 7}
        assert new.config.rope_scaling == {key: value for key, value in YARN.items() if key != "rope_theta"}
        assert ours.stop_ids >= {2, 7}
        assert "<|im_start|>" in str(new.chat_template)
    plain = {name for name, shape in old.shapes.items() if len(shape) == 1}
    plain |= set() if old.config.tie_embeddings else {"tok_embeddings.weight"}
    for name in plain:
        assert torch.equal(
            new.tensor(name).float(), to_layout(name, old.tensor(name), 16, old.layout, "interleaved").float()
        )
        if source in ("hf", "meta", "gguf"):
            assert new.tensor(name).dtype == old.tensor(name).dtype
    assert {name for name in new.shapes if new.tiles(name) is None} == plain - (
        {"tok_embeddings.weight"} if "Q5" in source else set()
    )


def test_biases_and_rows_are_in_metas_layout(sources: dict[str, Path], saved: Path) -> None:
    state, new = load_file(sources["hf"] / "model.safetensors"), open_checkpoint(saved)
    for ours, theirs in (("wq", "q_proj"), ("wk", "k_proj")):
        for kind, bound in (("bias", 0.0), ("weight", 0.1)):
            original = interleaved(state[f"model.layers.1.self_attn.{theirs}.{kind}"], 16)
            assert distance(new.tensor(f"layers.1.attention.{ours}.{kind}"), original) <= bound
    for ours, theirs in (("attention.wv", "self_attn.v_proj"), ("feed_forward.w_down", "mlp.down_proj")):
        assert torch.equal(new.tensor(f"layers.1.{ours}.bias"), state[f"model.layers.1.{theirs}.bias"])


# ----------------------------------------------------------------------------------------- sources that are quantized
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", ["int8", "int8-sym", "int8-row", "int4", "int4-sym", "int4-all"])
@pytest.mark.parametrize("stored", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantized_weights_of_a_gguf_are_kept_if_the_scheme_has_their_format(
    tmp_path: Path, stored: str, scheme: str, tied: bool
) -> None:
    source = tiny.write_gguf(tmp_path / "x.gguf", TIED if tied else tiny.WIDE, quantization=stored)
    proof = quantize(source, tmp_path / "q", scheme)
    kind = gguf.GGMLQuantizationType[stored]
    meaning = {"Q4_0": (4, 32, False), "Q4_1": (4, 32, True), "Q8_0": (8, 32, False)}[stored]
    again = 0
    new = open_checkpoint(tmp_path / "q")
    for name, weight in tiny.weights(TIED if tied else tiny.WIDE).items():
        if weight.dim() == 2:
            stored_values = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
            output = name == "output.weight" or (tied and name == "tok_embeddings.weight")
            rule = scheme_for("output" if output else name, SCHEMES[scheme])
            keeps = BlockFormat(*meaning) == rule.format or (name == "tok_embeddings.weight" and not tied)
            assert torch.equal(new.tensor(name), stored_values) == keeps, name
            assert keeps or distance(new.tensor(name), stored_values) < 0.15
            again += not keeps
    assert [AGAIN in warning and f"({stored})" in warning for warning in proof.warnings] == [True] * bool(again)


@needs_kernels
def test_quantizing_again_by_the_same_scheme_changes_nothing(saved: Path, tmp_path: Path) -> None:
    first = quantize(saved, tmp_path / "a", "int4")
    assert first.warnings == []
    assert files(tmp_path / "a") == files(saved)
    other = quantize(saved, tmp_path / "b", "int8")
    assert [AGAIN in warning and "(int4-g32+offset, int8-g32)" in warning for warning in other.warnings] == [True]
    assert contents(built(tmp_path / "b")) == contents(built(saved, "int8"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"quantize": "int4"}, {"dtype": "float32"}], ids=str)
def test_the_default_dtype_of_the_process_changes_nothing(
    sources: dict[str, Path], options: dict[str, str], dtype: torch.dtype
) -> None:
    for source in sources.values():
        expected = llama.load(source, device="cpu", **options).model(TOKENS)
        torch.set_default_dtype(dtype)
        try:
            found = llama.load(source, device="cpu", **options).model(TOKENS)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(found, expected)


@needs_kernels
def test_loading_warns_that_weights_are_quantized_again(saved: Path, sources: dict[str, Path]) -> None:
    def warned(path: Path, scheme: str) -> list[bool]:
        return [AGAIN in warning for warning in load(path, "cpu", quantize=scheme).warnings if "quantiz" in warning]

    assert warned(saved, "int4") == []
    assert warned(saved, "int8") == warned(saved, "int4-g64") == [True]
    assert warned(sources["gguf, tied"], "int4") == [] == warned(sources["hf"], "int4")


@pytest.mark.parametrize("count", [1, 2, 5, 35])
def test_the_weights_are_the_same_in_any_number_of_files(
    sources: dict[str, Path], saved: Path, tmp_path: Path, count: int
) -> None:
    proof = quantize(sources["hf"], tmp_path / "q", "int4", shards=count)
    assert len(list((tmp_path / "q").glob("*.safetensors"))) == count
    one, other = open_checkpoint(saved), open_checkpoint(tmp_path / "q")
    assert one.shapes == other.shapes
    for name in one.shapes:
        ours, theirs = ((c.tensor(name) if c.tiles(name) is None else c.tiles(name)) for c in (one, other))
        assert torch.equal(ours, theirs)
        assert one.stored(name) == other.stored(name)
    assert proof.tensors == 35


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 64), (33, 200), (70, 131)])
@pytest.mark.parametrize("kind", PLAIN_KINDS, ids=str)
def test_every_block_format_has_metadata(kind: tuple[int, int, bool], rows: int, columns: int) -> None:
    metadata = json.dumps({"shape": [rows, columns], **dict(zip(quantized.FIELDS, kind, strict=False))})
    assert quantized._parse_format(metadata, "here") == (BlockFormat(*kind), (rows, columns))


def test_rows_can_be_read_alone(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, name = open_checkpoint(saved), "layers.0.feed_forward.w_up.weight"
    tiles = checkpoint.tiles(name)
    assert tiles is not None
    weight = unpack(tiles, 100, 64, BlockFormat(4, 32, True)).weight
    for piece in (1, 17 * 64, 40 * 64, 2**20):
        monkeypatch.setattr(base, "PIECE", piece)
        assert torch.equal(checkpoint.tensor(name), weight)
    for part in (slice(0, 1), slice(3, 50), slice(16, 32), slice(90, 200), slice(5, 5)):
        blocks = checkpoint.blocks(name, part)
        assert blocks is not None
        assert torch.equal(blocks.weight, weight[part])


# --------------------------------------------------------------------------------------------- other commands
def test_the_other_commands_read_the_folder(sources: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "q"
    assert main(["quantize", str(sources["gguf, tied"]), str(target), "--scheme", "int8", "--shards", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{target}\n20 tensors were read back and are equal; sha256 of all tensors: ")
    assert "MB of weights (" in err
    more = ["--scheme", "int8", "--json", "-q"]
    assert main(["quantize", str(sources["gguf, tied"]), str(tmp_path / "again"), *more]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert report["sha256"] in out
    assert report["bytes_before"] == sources["gguf, tied"].stat().st_size
    assert (
        report["bytes_after"] == (tmp_path / "again" / "model.safetensors").stat().st_size < report["bytes_before"] / 3
    )
    assert main(["inspect", str(target), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["quantization"] == "int8"
    assert facts["mismatches"] == facts["warnings"] == []
    plain = 5 * 128 * 4
    assert facts["stored_bytes"] == {
        "int8-g32+offset": sum(facts["file_bytes"].values()) - headers(target) - plain,
        "F32": plain,
    }
    assert main(["verify", str(target), "--tensors"]) == 0
    assert "nothing failed" in capsys.readouterr().out
    talk = ["the hello", "-n", "8", "--temp", "2", "--seed", "1", "-q"]
    assert main(["generate", "-m", str(target), *talk]) == 0
    assert main(["generate", "-m", str(sources["gguf, tied"]), "--quantize", "int8", *talk]) == 0
    ours = capsys.readouterr().out
    assert ours[: len(ours) // 2] == ours[len(ours) // 2 :] != ""


def headers(folder: Path) -> int:
    """Bytes of the headers of the weight files."""
    return sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("to", ["hf", "meta", "gguf"])
def test_converting_dequantizes(sources: dict[str, Path], tmp_path: Path, to: str) -> None:
    source = quantize(sources["meta"], tmp_path / "q", "int4").path
    with pytest.raises(UsageError, match=r"quantized .*int4-g32\+offset, int8-g32.*--dtype float32 is exact"):
        convert(source, tmp_path / "out", to)
    proof = convert(source, tmp_path / "out", to, dtype=torch.float32)
    quantized_model, back = (load_model(path, dtype="float32", device="cpu") for path in (source, proof.path))
    assert torch.equal(back(TOKENS), quantized_model(TOKENS))
    original = load_model(sources["meta"], dtype="float32", device="cpu")
    assert 0.01 < distance(back(TOKENS), original(TOKENS)) < 0.4
    assert proof.warnings == []


def test_the_schemes_are_listed(capsys: Capture) -> None:
    assert main(["quantize", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(SCHEMES)
    assert main(["quantize", "--list", "--json"]) == 0
    schemes = json.loads(capsys.readouterr().out)
    assert schemes["int4"]["bits_per_weight"] == 5
    assert schemes["int8-row"]["bits_per_weight"] == 8
    assert schemes["int4-sym-g128"]["bits_per_weight"] == 4.125


# ------------------------------------------------------------------------------------------------ errors and damage
def test_usage_errors_are_one_line(sources: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    source, target = str(sources["gguf"]), str(tmp_path / "q")
    for args, code, message in (
        (
            [source, target, "--scheme", "int3"],
            2,
            "unknown quantization scheme 'int3'; known: int8, int8-sym, int8-row",
        ),
        ([source], 2, "quantize needs SRC and DST"),
        ([source, target, "--shards", "-1"], 2, "shards must be an integer of at least 0, got -1"),
        ([source, target, "--shards", "100"], 1, "21 weights can't be split into 100 files; lower --shards"),
        ([source, str(tmp_path / "no" / "q")], 2, f"{tmp_path / 'no'} is not a folder; create it first"),
        ([source, source], 2, "is the source"),
        ([source, source, "--force"], 2, "is the source"),
        ([str(tmp_path / "nothing"), target], 1, "nothing"),
        ([str(sources["hf"]), str(sources["hf"].parent), "--force"], 2, "is the source or contains it"),
    ):
        assert main(["quantize", *args]) == code, args
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert len(err.splitlines()) == 1
        assert os.listdir(tmp_path) == []


@pytest.mark.row("F05")
def test_an_existing_folder_is_replaced_only_by_force(sources: dict[str, Path], tmp_path: Path) -> None:
    source = shutil.copytree(sources["hf"], tmp_path / "source")
    before = files(source)
    quantize(source, tmp_path / "q", "int4")
    complete = files(tmp_path / "q")
    (tmp_path / "q" / "config.json").write_text("x")
    with pytest.raises(UsageError, match="exists already; name another target, or replace it with force=True"):
        quantize(source, tmp_path / "q", "int4")
    assert files(tmp_path / "q").keys() == complete.keys()
    quantize(source, tmp_path / "q", "int4", force=True)
    assert files(tmp_path / "q") == complete
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file, but this format is a folder"):
        quantize(source, tmp_path / "file", "int4", force=True)
    quantize(source, source / "q", "int4")  # a folder in the source is not a part of it
    assert files(source / "q") == complete
    shutil.rmtree(source / "q")
    assert files(source) == before
    assert sorted(os.listdir(tmp_path)) == ["file", "q", "source"]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("kernel", [True, False])
def test_a_weight_that_cannot_be_quantized_is_named(
    tmp_path: Path, wrong: float, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setattr(kernels, "ready", lambda: False)
    state = tiny.weights()
    state["layers.1.feed_forward.w_up.weight"][95, 63] = wrong
    source = tiny.write_gguf(tmp_path / "x.gguf", state=state)
    with pytest.raises(
        CheckpointError, match=r"x\.gguf: blk\.1\.ffn_up\.weight: a weight is not finite.*can't be quantized"
    ):
        quantize(source, tmp_path / "q", "int4")
    assert os.listdir(tmp_path) == ["x.gguf"]
    if kernel and kernels.ready():
        with pytest.raises(CheckpointError, match=r"x\.gguf: blk\.1\.ffn_up\.weight: a weight is not finite"):
            load_model(source, device="cpu", quantize="int4")


def test_a_rope_scaling_that_the_folder_cannot_express_is_refused(tmp_path: Path) -> None:
    divisors = {"rope_freqs.weight": torch.linspace(1, 3, 16)}
    source = tiny.write_gguf(tmp_path / "x.gguf", tiny.WIDE, extra=divisors)
    with pytest.raises(LlamaError, match=r"x\.gguf can't be saved: .*can't express the rope scaling 'divisors'"):
        quantize(source, tmp_path / "q", "int4")
    assert os.listdir(tmp_path) == ["x.gguf"]


@pytest.mark.row("F01")
@pytest.mark.row("F02")
def test_a_full_disk_leaves_no_files(
    sources: dict[str, Path], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    command = ["quantize", str(sources["hf"]), str(tmp_path / "q")]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))  # a write fails in the middle of the weights
    try:
        assert main(command) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"clearllama: error: {tmp_path / 'q'}: File too large; nothing was changed\n")
    assert os.listdir(tmp_path) == []
    size, left = (saved / "model.safetensors").stat().st_size, 2**20  # a megabyte must stay free
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, left))  # type: ignore[attr-defined]
    left += int(0.8 * size)
    with pytest.raises(CheckpointError, match=r"1 MB free, but the new files need 0 MB; nothing was written"):
        quantize(sources["hf"], tmp_path / "q")
    left += int(0.3 * size)
    quantize(sources["hf"], tmp_path / "q")
    shutil.rmtree(tmp_path / "q")
    monkeypatch.undo()

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; .* MB are free and .* nothing was changed"):
        quantize(sources["hf"], tmp_path / "q")
    assert os.listdir(tmp_path) == []


def test_the_proof_finds_a_wrong_byte(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = huggingface_write.raw_bytes

    def change_a_bit(tensor: Tensor) -> Any:
        raw = original(tensor).copy()
        raw[-1] ^= 1
        return raw

    monkeypatch.setattr(huggingface_write, "raw_bytes", change_a_bit)
    with pytest.raises(CheckpointError, match="differs after it was written"):
        quantize(sources["hf"], tmp_path / "q")
    assert os.listdir(tmp_path) == []


# A process that has imported everything; its forks kill themselves at the n-th operation on the disk.
DYING = """
import os, signal, sys
from llama.tools.quantize import quantize
source, target = sys.argv[1:]
quantize(source, target + ".warm", "int4")
for line in sys.stdin:
    last, seen = int(line), 0
    child = os.fork()
    if child == 0:
        def count(event, args):
            global seen
            if event in ("progress", "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
                seen += 1
                if seen == last:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)
        quantize(source, target, "int4", progress=lambda *step: count("progress", step))
        print(seen, flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print("killed" if os.WIFSIGNALED(status) else "failed", flush=True)
"""


@pytest.mark.slow  # tests/faults/test_writes.py runs a shorter version by default
@pytest.mark.row("F03")
def test_a_killed_quantization_leaves_a_complete_target_or_none(sources: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "model"
    process = subprocess.Popen([sys.executable, "-c", DYING, str(sources["gguf"]), str(target)],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None

    def die_at(step: int) -> str:
        print(step, file=process.stdin, flush=True)
        return process.stdout.readline().strip()  # type: ignore[union-attr]

    steps, complete, outcomes = int(die_at(-1)), files(target), []
    assert len(complete) == 5
    for step in (*range(1, steps - 5, steps // 5), *range(steps - 4, steps + 1)):
        shutil.rmtree(target, ignore_errors=True)
        for left in tmp_path.glob(".convert-*"):  # so that the next process need not remove it
            left.unlink() if left.is_file() else shutil.rmtree(left)
        assert die_at(step) == "killed"
        outcomes.append("complete" if target.exists() else "absent")
        assert not target.exists() or files(target) == complete
    assert set(outcomes) == {"absent", "complete"}
    shutil.rmtree(target)
    assert die_at(steps // 2) == "killed"
    assert len(os.listdir(tmp_path)) == 3  # the temporary folder, its lock, and the folder of the warm-up
    assert int(die_at(-1)) > steps
    process.communicate()
    assert files(target) == complete
    assert sorted(os.listdir(tmp_path)) == ["model", "model.warm"]  # the files of the killed process were removed


# ---------------------------------------------------------------------------------------------------------- damage
UP = "model.layers.1.mlp.up_proj"


def edit_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change names, shapes or metadata in the header of the weights' file."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


def edit_metadata(**changes: Any) -> Callable[[Path], None]:
    """Change the metadata of one weight; None removes a key."""

    def change(header: dict[str, Any]) -> None:
        metadata = {**json.loads(header["__metadata__"][f"{UP}.tiles"]), **changes}
        kept = {key: value for key, value in metadata.items() if value is not None}
        header["__metadata__"][f"{UP}.tiles"] = json.dumps(kept)

    return lambda folder: edit_header(folder, change)


def edit_quantization(**changes: Any) -> Callable[[Path], None]:
    """Change entries of quantization_config; None removes a key."""

    def change(folder: Path) -> None:
        entries = {**json.loads((folder / "config.json").read_text())["quantization_config"], **changes}
        edit(folder, quantization_config={key: value for key, value in entries.items() if value is not None})

    return change


def edit_tensor(name: str, **changes: Any) -> Callable[[Path], None]:
    """Change the entry of one tensor in the header."""
    return lambda folder: edit_header(folder, lambda header: header[name].update(changes))


def rename(names: dict[str, str]) -> Callable[[Path], None]:
    """Rename tensors, together with their metadata."""

    def change(header: dict[str, Any]) -> None:
        for entries in (header, header["__metadata__"]):
            moved = {new: entries.pop(old) for old, new in names.items() if old in entries}
            entries.update(moved)

    return lambda folder: edit_header(folder, change)


def replace_metadata(text: str | None) -> Callable[[Path], None]:
    """Replace the text of one weight's metadata; None removes it."""

    def change(header: dict[str, Any]) -> None:
        del header["__metadata__"][f"{UP}.tiles"]
        if text is not None:
            header["__metadata__"][f"{UP}.tiles"] = text

    return lambda folder: edit_header(folder, change)


def copy_source_weights(folder: Path) -> None:
    """Replace the quantized weights by those of the source."""
    test_huggingface.write(folder.parent / "original", **ODD)
    shutil.copy(folder.parent / "original" / "model.safetensors", folder)


CONFIG = r"damaged: config\.json: quantization_config: "
META = rf"damaged/model\.safetensors: the metadata of {UP}\.tiles"
SIZE = rf"damaged/model\.safetensors: {UP}\.tiles is (\w+ \(.*\)); expected U8 \(7, \d+\) for a weight (.*) in int.*; the file is damaged, "
REMEDY = "quantize the source again"
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no version": (edit_quantization(format_version=None), f"{CONFIG}format_version must be 1, got None; {REMEDY}"),
    "a later version": (edit_quantization(format_version=2), f"{CONFIG}format_version must be 1, got 2; {REMEDY}, or use the version"),
    "a version as text": (edit_quantization(format_version="1"), f"{CONFIG}format_version must be 1, got '1'; {REMEDY}"),
    "a boolean version": (edit_quantization(format_version=True), f"{CONFIG}format_version must be 1, got True; {REMEDY}"),
    "no scheme": (edit_quantization(scheme=None), f"{CONFIG}scheme must be a name, got None; {REMEDY}"),
    "a number for a scheme": (edit_quantization(scheme=4), f"{CONFIG}scheme must be a name, got 4; {REMEDY}"),
    "no layout": (edit_quantization(layout=None), f"{CONFIG}layout must be 'interleaved', got None; {REMEDY}"),
    "another layout": (edit_quantization(layout="half"), f"{CONFIG}layout must be 'interleaved', got 'half'; {REMEDY}"),
    "an unknown key": (edit_quantization(desc_act=True), f"{CONFIG}unknown keys: desc_act; {REMEDY}"),
    "another method": (edit_quantization(quant_method="hqq"), r"damaged: config\.json: quantization_config: the weights are quantized \('hqq': HQQ"),
    "no method": (edit_quantization(quant_method=None), r"damaged: config\.json: quantization_config: the weights are quantized, but the quant_method is missing"),
    "no quantization_config": (lambda d: edit(d, remove=("quantization_config",)), r"model\.safetensors: '.*\.tiles' is not part of"),
    "a list for quantization_config": (lambda d: edit(d, quantization_config=[1]), r"quantization_config must be an object, got \[1\]"),
    "tied embeddings": (lambda d: edit(d, tie_word_embeddings=True), r"tie_word_embeddings, but lm_head\.weight differs"),
    "a layer more": (lambda d: edit(d, num_hidden_layers=3), "has 3 layers, but the file has tensors of 2"),
    "wider": (lambda d: edit(d, intermediate_size=112), r"proj\.tiles has shape .* requires"),
    "no metadata": (lambda d: edit_header(d, lambda h: h.pop("__metadata__")), r"metadata of .*\.tiles is missing, so the shape and the bits are unknown; quantize"),
    "no metadata of one weight": (replace_metadata(None), f"{META} is missing, so the shape and the bits are unknown; {REMEDY}"),
    "not JSON": (replace_metadata("{bits: 4}"), f"{META} is not valid JSON: .*; {REMEDY}"),
    "empty": (replace_metadata(""), f"{META} is empty.*; {REMEDY}"),
    "a list": (replace_metadata("[4, 32]"), f"{META}: expected an object {{...}}, got a list; {REMEDY}"),
    "bits twice": (replace_metadata('{"bits": 4, "bits": 8}'), f"{META}: the key 'bits' occurs twice.*; {REMEDY}"),
    "no bits": (edit_metadata(bits=None), f"{META}: the key bits is missing; {REMEDY}"),
    "3 bits": (edit_metadata(bits=3), rf"{META} is '.*\"bits\": 3.*'; expected shape, offset, 4 or 8 bits and a group of 16, 32, 64, 128 .*; {REMEDY}"),
    "bits as text": (edit_metadata(bits="4"), f"{META}: bits must be an integer, got '4'.*; {REMEDY}"),
    "boolean bits": (edit_metadata(bits=True), f"{META}: bits must be an integer, got true.*; {REMEDY}"),
    "no group": (edit_metadata(group=None), f"{META}: the key group is missing; {REMEDY}"),
    "groups of 48": (edit_metadata(group=48), rf"{META} is '.*\"group\": 48.*'; expected .*; {REMEDY}"),
    "a negative group": (edit_metadata(group=-32), rf"{META} is '.*\"group\": -32.*'; expected .*; {REMEDY}"),
    "4 bits with one scale per row": (edit_metadata(group=0), rf"{META} is '.*\"group\": 0.*'; expected .*0 for 8 bits without offset.*; {REMEDY}"),
    "rows with an offset": (edit_metadata(bits=8, group=0), rf"{META} is '.*\"bits\": 8.*'; expected .*; {REMEDY}"),
    "no offset": (edit_metadata(offset=None), f"{META}: the key offset is missing; {REMEDY}"),
    "an offset of 1": (edit_metadata(offset=1), f"{META}: offset must be true or false, got 1.*; {REMEDY}"),
    "an unknown key of the metadata": (edit_metadata(sparse=True), rf"{META} is '.*\"sparse\": true.*; {REMEDY}"),
    "no shape": (edit_metadata(shape=None), f"{META}: shape must be two sizes above 0, got None; {REMEDY}"),
    "a shape of one": (edit_metadata(shape=[100]), rf"{META}: shape must be two sizes above 0, got \[100\]; {REMEDY}"),
    "a shape of fractions": (edit_metadata(shape=[100.0, 64]), rf"{META}: shape must be two sizes above 0, got \[100\.0, 64\]; {REMEDY}"),
    "an empty shape": (edit_metadata(shape=[0, 64]), rf"{META}: shape must be two sizes above 0, got \[0, 64\]; {REMEDY}"),
    "a huge shape": (edit_metadata(shape=[100, 2**70]), rf"{META}: shape must be two sizes above 0, got \[100, 1180.*; {REMEDY}"),
    "8 bits instead of 4": (edit_metadata(bits=8), SIZE + REMEDY),
    "an offset that is missing": (edit_metadata(offset=False), SIZE + REMEDY),
    "other groups": (edit_metadata(group=16), SIZE + REMEDY),
    "more columns": (edit_metadata(shape=[100, 96]), SIZE + REMEDY),
    "more rows": (edit_metadata(shape=[113, 64]), SIZE.replace("7,", "8,") + REMEDY),
    "fewer rows": (edit_metadata(shape=[97, 64]), rf"{UP}\.tiles has shape \(97, 64\), but the configuration requires \(100, 64\)"),
    "tiles of one row": (edit_tensor(f"{UP}.tiles", shape=[7 * 640]), SIZE + REMEDY),
    "tiles across": (edit_tensor(f"{UP}.tiles", shape=[640, 7]), SIZE + REMEDY),
    "tiles of signed bytes": (edit_tensor(f"{UP}.tiles", dtype="I8"), SIZE + REMEDY),
    "a norm of bytes": (edit_tensor("model.norm.weight", dtype="U8", shape=[256]), r"model\.norm\.weight is stored as U8, expected one of F32, BF16, F16"),
    "a norm in tiles": (rename({"model.norm.weight": f"{UP}.weight", f"{UP}.tiles": "model.norm.tiles"}), r"up_proj\.weight has shape \(64,\), but the configuration requires \(100, 64\) \(and 1 more"),
    "a tensor twice": (rename({f"{UP}.tiles": "model.layers.1.mlp.gate_proj.weight"}), r"gate_proj\.\w+ is in .* and in"),
    "an unknown name": (rename({f"{UP}.tiles": "model.layers.1.mlp.side_proj.tiles"}), "'model.layers.1.mlp.side_proj.tiles' is not part of a LLaMA"),
    "tiles of a bias": (rename({f"{UP}.tiles": f"{UP}.bias.tiles"}), r"up_proj\.bias\.tiles' is not part of a LLaMA"),
    "the source's own weights": (copy_source_weights, rf"model\.safetensors: (.*)\.weight is F32; expected \1\.tiles as for all linear layers here; the file is of another model, {REMEDY}"),
    "half a file": (lambda d: os.truncate(d / "model.safetensors", 30_000), "it is truncated, download it again"),
    "no file": (lambda d: (d / "model.safetensors").unlink(), r"has config\.json but no weights"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_one_line_with_a_remedy(damaged: Path, fault: str) -> None:
    damage, message = FAULTS[fault]
    damage(damaged)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(damaged, device="cpu")
    assert "\n" not in str(caught.value)
    assert str(damaged) in str(caught.value)


def test_a_flipped_bit_in_the_header_is_an_error_or_gives_a_valid_header(damaged: Path) -> None:
    path = damaged / "model.safetensors"
    data = bytearray(path.read_bytes())
    length, rng = int.from_bytes(data[:8], "little"), random.Random(0)
    rejected: list[str] = []
    for _ in range(120):
        position, bit = rng.randrange(8 + length), 1 << rng.randrange(8)
        data[position] ^= bit
        path.write_bytes(data)
        try:
            checkpoint = open_checkpoint(damaged)
            check_tensors(checkpoint)
            checkpoint.tensor("layers.1.feed_forward.w_up.weight")
        except LlamaError as error:
            rejected.append(str(error))
        data[position] ^= bit
    assert len(rejected) > 90
    assert not any("\n" in message for message in rejected)


# ------------------------------------------------------------------------------------------------- other machines
@pytest.mark.parametrize("scheme", ["int8", "int8-row", "int4", "int4-sym-g64"])
def test_a_saved_model_runs_without_the_kernels(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_gguf(tmp_path / "x.gguf", TIED)
    quantize(source, tmp_path / "q", scheme)
    exact = load_model(tmp_path / "q", dtype="float32", device="cpu")(TOKENS)
    monkeypatch.setattr(kernels, "ready", lambda: False)
    model = built(tmp_path / "q")
    assert not any(isinstance(module, TileLinear | TileEmbedding) for module in model.modules())
    assert distance(model(TOKENS), exact) < 0.03
    assert torch.equal(built(tmp_path / "q", dtype="float32")(TOKENS), exact)
    again = quantize(source, tmp_path / "plain", scheme)  # quantized by the reference formula
    assert again.warnings == []
    reference = load_model(tmp_path / "plain", dtype="float32", device="cpu")(TOKENS)
    assert distance(reference, exact) < 1e-3


MEMORY = """
import os, sys, torch
from pathlib import Path
import llama
from llama.checkpoint import open_checkpoint
from llama.loader import build
from llama.tools.quantize import quantize

def load(path, scheme=None):
    return build(open_checkpoint(path), "cpu", fast=True, quantize=scheme)

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key + ":"))

def growth(run):
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak
    before, anonymous = status("VmRSS"), status("RssAnon")
    result = run()
    print(status("VmHWM") - before, status("RssAnon") - anonymous)

tiny, large, out = map(Path, sys.argv[1:])
quantize(tiny, out / "t", "int4"), load(out / "t"), load(tiny, "int4")  # to import everything
growth(lambda: quantize(large, out / "q", "int4"))
growth(lambda: load(large, "int4"))
growth(lambda: load(out / "q"))
"""


@needs_kernels
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
@pytest.mark.slow
def test_memory_has_the_quantized_weights_and_two_others(sources: dict[str, Path], tmp_path: Path) -> None:
    config = ModelConfig(1024, 4, 16, 16, 64, 2816, 8192, max_seq_len=64, tie_embeddings=True)
    noise = torch.randn(config.vocab_size * config.dim, generator=torch.Generator().manual_seed(0)).bfloat16() / 32
    shapes = expected_shapes(config)
    model = Model(config, shapes, dict.fromkeys(shapes, torch.bfloat16),
                  lambda name: noise[: math.prod(shapes[name])].view(shapes[name]))  # fmt: skip
    (tmp_path / "large").mkdir()
    huggingface_write.write(tmp_path / "large", model)
    source = sum(model.nbytes(name) for name in shapes)
    largest = max(model.nbytes(name) for name in shapes)
    out = subprocess.run([sys.executable, "-c", MEMORY, str(sources["gguf"]), str(tmp_path / "large"), str(tmp_path)],
                         check=True, capture_output=True, text=True).stdout  # fmt: skip
    (saving, _), (loading, _), (_, mapping) = ([int(n) for n in line.split()] for line in out.splitlines())
    quantized_bytes = (tmp_path / "q" / "model.safetensors").stat().st_size
    assert source > 100e6
    assert quantized_bytes < 0.36 * source
    assert saving < 2 * largest + 6e6, (saving, largest)
    assert loading < quantized_bytes + 2 * largest + 6e6, (loading, quantized_bytes, largest)
    assert mapping < 6e6
