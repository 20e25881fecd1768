"""clearllama quantize: the saved model is the one that --quantize makes while loading; damage to it is named."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llama.checkpoint import open_checkpoint
from llama.engine import kernels
from llama.engine.linears import QuantizedEmbedding, TileLinear
from llama.errors import CheckpointError, LlamaError
from llama.loader import build, load_model
from llama.model import Transformer
from llama.quant.groups import GroupFormat
from llama.quant.schemes import SCHEMES, scheme_for
from llama.tools.convert import convert, quantize

from . import test_huggingface, tiny
from .faults.harness import snapshot
from .scripts import make_tiny
from .test_huggingface import edit
from .test_kernels import needs_kernels
from .test_quant import distance

pytestmark = pytest.mark.usefixtures("one_thread")

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


def built(path: Path, quantize: str | None = None, rope: str = "complex", dtype: str | None = None) -> Transformer:
    """The model that llama.load makes, even without a tokenizer."""
    return build(open_checkpoint(path), "cpu", dtype, rope=rope, fast=True, quantize=quantize)


def contents(model: Transformer) -> dict[str, Any]:
    """All contents of a model: the kinds of its layers and the bytes of each tensor."""
    layers = {name: (type(m), getattr(m, "bits", 0), getattr(m, "group", 0), getattr(m, "offset", 0))
              for name, m in model.named_modules()}  # fmt: skip
    return layers | {name: (t.dtype, t.shape, t.contiguous().view(torch.uint8).numpy().tobytes())
                     for name, t in model.state_dict().items()}  # fmt: skip


# -------------------------------------------------------------------------------------------------- the saved model
SAVED = [("hf", "int8", "complex"), ("gguf", "int8", "complex"), ("gguf", "int4", "complex"),
         *((source, "int4", "half") for source in
           ("hf", "meta, tied", "meta, float8", "meta, QLoRA", "gguf, tied", "gguf, Q5_1"))]  # fmt: skip


@needs_kernels
@pytest.mark.parametrize(("source", "scheme", "rope"), SAVED)
def test_the_saved_model_equals_one_quantized_while_loading(
    sources: dict[str, Path], tmp_path: Path, source: str, scheme: str, rope: str
) -> None:
    proof = quantize(sources[source], tmp_path / "q", scheme)
    loaded, expected = built(tmp_path / "q", rope=rope), built(sources[source], scheme, rope)
    if source == "gguf, Q5_1":  # its embedding is saved in 8 bits, with the same weights
        assert torch.equal(loaded.tok_embeddings.weight, expected.tok_embeddings.weight)
        expected.set_submodule("tok_embeddings", loaded.tok_embeddings)
    assert contents(loaded) == contents(expected)
    assert torch.equal(loaded(TOKENS), expected(TOKENS))
    assert proof.tensors == len(open_checkpoint(sources[source]).shapes)
    before = ("meta, float8", "meta, QLoRA", "gguf, Q5_1")
    assert sum(AGAIN in warning for warning in proof.warnings) == (source in before)
    assert isinstance(loaded.layers[0].attention.wq, TileLinear)


# ----------------------------------------------------------------------------------------- sources that are quantized
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
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
            keeps = GroupFormat(*meaning) == rule.format or (name == "tok_embeddings.weight" and not tied)
            assert torch.equal(new.weight(name).floats(), stored_values) == keeps, name
            assert keeps or distance(new.weight(name).floats(), stored_values) < 0.15
            again += not keeps
    assert [AGAIN in warning and f"({stored})" in warning for warning in proof.warnings] == [True] * bool(again)


@needs_kernels
def test_quantizing_again_by_the_same_scheme_changes_nothing(saved: Path, tmp_path: Path) -> None:
    assert quantize(saved, tmp_path / "a", "int4").warnings == []
    assert snapshot(tmp_path / "a") == snapshot(saved)
    other = quantize(saved, tmp_path / "b", "int8")
    assert [AGAIN in warning and "(int4-g32+offset, int8-g32)" in warning for warning in other.warnings] == [True]
    assert contents(built(tmp_path / "b")) == contents(built(saved, "int8"))


# ------------------------------------------------------------------------------------------------ errors and damage
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_weight_that_cannot_be_quantized_is_named(tmp_path: Path, wrong: float) -> None:
    state = tiny.weights()
    state["layers.1.feed_forward.w_up.weight"][95, 63] = wrong
    source = tiny.write_gguf(tmp_path / "x.gguf", state=state)
    with pytest.raises(CheckpointError, match=r"x\.gguf: blk\.1\.ffn_up\.weight: a weight is not finite"):
        quantize(source, tmp_path / "q", "int4")
    assert os.listdir(tmp_path) == ["x.gguf"]


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, r"'.*\.tiles' is not part of"),
        *((wrong, rf"{UP}\.tiles is not of a supported format") for wrong in ({"group": 0}, {"shape": [100, 2**70]})),
        ({"shape": [97, 64]}, rf"{UP}\.tiles has shape \(97, 64\), but .* requires \(100, 64\)"),
    ],
)
def test_damage_is_one_line_with_a_remedy(
    saved: Path, tmp_path: Path, changes: dict[str, Any] | None, message: str
) -> None:
    """The changes are those of the metadata of one weight; None removes the whole entry of config.json."""
    damaged = shutil.copytree(saved, tmp_path / "damaged")
    file, entry = damaged / "model.safetensors", f"{UP}.tiles"
    if changes is None:
        edit(damaged, remove=("quantization_config",))
    else:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        metadata[entry] = json.dumps({**json.loads(metadata[entry]), **changes})
        save_file(load_file(file), file, metadata)
    with pytest.raises(LlamaError, match=message) as caught:
        load_model(damaged, device="cpu")
    assert "\n" not in str(caught.value)
    assert str(damaged) in str(caught.value)


# ------------------------------------------------------------------------------------------------- other machines
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_saved_model_runs_without_the_kernels(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_gguf(tmp_path / "x.gguf", TIED)
    quantize(source, tmp_path / "q", scheme)
    exact = load_model(tmp_path / "q", dtype="float32", device="cpu")(TOKENS)
    monkeypatch.setattr(kernels, "ready", lambda: False)
    model = built(tmp_path / "q")
    assert not any(isinstance(module, TileLinear | QuantizedEmbedding) for module in model.modules())
    assert distance(model(TOKENS), exact) < 0.03
    assert torch.equal(built(tmp_path / "q", dtype="float32")(TOKENS), exact)
    again = quantize(source, tmp_path / "plain", scheme)  # quantized by the reference formula
    assert again.warnings == []
    reference = load_model(tmp_path / "plain", dtype="float32", device="cpu")(TOKENS)
    assert distance(reference, exact) < 1e-3
