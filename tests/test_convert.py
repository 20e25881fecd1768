"""Conversions: the same weights in every format, complete or absent, and readable by the formats' own programs."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import llama
from llama.checkpoint import gguf_write, open_checkpoint
from llama.config import ModelConfig
from llama.errors import CheckpointError, ConfigError, LlamaError, UsageError
from llama.tools import convert as convert_module
from llama.tools.convert import convert
from llama.tools.quantize import quantize

from . import meta_code, test_huggingface, tiny
from .forked import Forked
from .scripts import make_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(500, (1, 100), generator=torch.Generator().manual_seed(1))


def logits(path: Path) -> torch.Tensor:
    return llama.load_model(path, dtype="float32", device="cpu")(TOKENS)


def files(folder: Path) -> dict[str, str]:
    """Every file below a folder and its hash."""
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(folder.rglob("*")) if file.is_file()}  # fmt: skip


@pytest.mark.parametrize("like", ["llama-2-7b", "codellama-34b", "llama-3.1-8b", "llama-3.2-3b"])
@pytest.mark.row("C08")
def test_transformers_reads_the_written_files(tmp_path: Path, like: str) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    source = make_tiny.make(tmp_path / "meta", like)
    convert(source, tmp_path / "hf", "hf", shards=3)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) >= 3
    model = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert float((logits(source) - model(TOKENS).logits).abs().max()) < 5e-4
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "hf"), llama.load_tokenizer(source)
    text = "The dog bites the man: 12345 über 😀\n\n  x"
    assert theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids == ours.encode(text)


def test_the_gguf_package_reads_the_written_file(tmp_path: Path) -> None:
    source = make_tiny.make(tmp_path / "meta", "llama-3.1-8b")
    proof = convert(source, tmp_path / "x.gguf", "gguf")
    reader = gguf.GGUFReader(proof.path)
    state = torch.load(source / "consolidated.00.pth")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    raw = tensors["blk.1.attn_q.weight"]
    assert raw.tensor_type == gguf.GGMLQuantizationType.BF16
    weight = gguf.quants.dequantize(raw.data, raw.tensor_type)
    assert torch.equal(torch.from_numpy(weight), state["layers.1.attention.wq.weight"].float())
    divisors = tensors["rope_freqs.weight"].data
    assert divisors.shape == (8,)
    assert divisors[0] == 1
    assert divisors[-1] == 8


@pytest.mark.parametrize(
    "rope",
    [rope for rope in test_huggingface.ROPES if rope["rope_type"] not in ("dynamic",) and rope.get("truncate", True)],
    ids=test_huggingface.label,
)
def test_rope_scalings_survive_gguf(tmp_path: Path, rope: dict[str, Any]) -> None:
    test_huggingface.write(tmp_path / "hf", rope_parameters={**rope, "rope_theta": 10000.0})
    proof = convert(tmp_path / "hf", tmp_path / "x.gguf", "gguf")
    back = convert(proof.path, tmp_path / "back", "hf")
    tokens = test_huggingface.tokens(60)
    models = [
        llama.load_model(path, dtype="float32", device="cpu") for path in (tmp_path / "hf", proof.path, back.path)
    ]
    for model in models[1:]:
        assert float((model(tokens) - models[0](tokens)).abs().max()) < 1e-4


def test_biases_survive_gguf(tmp_path: Path) -> None:
    test_huggingface.write(tmp_path / "hf", attention_bias=True, mlp_bias=True, head_dim=24)
    proof = convert(tmp_path / "hf", tmp_path / "x.gguf", "gguf")
    tokens = test_huggingface.tokens(60)
    one, other = (llama.load_model(path, dtype="float32", device="cpu") for path in (tmp_path / "hf", proof.path))
    assert torch.equal(one(tokens), other(tokens))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 21])
def test_a_hugging_face_folder_has_the_requested_number_of_files(source: Path, tmp_path: Path, count: int) -> None:
    convert(source, tmp_path / "hf", "hf", shards=count)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == count
    assert torch.equal(logits(tmp_path / "hf"), logits(source))


def test_the_tokenizer_of_another_model_is_refused_and_a_damaged_one_is_reported(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.model").write_bytes(make_tiny.tiktoken_model(600))
    with pytest.raises(CheckpointError, match="use the tokenizer that was published"):
        convert(source, tmp_path / "hf", "hf")
    (source / "tokenizer.model").write_bytes(b"nonsense")
    proof = convert(source, tmp_path / "hf", "hf")
    assert any("is not a tokenizer file" in warning for warning in proof.warnings)


def test_a_quantized_source_needs_a_dtype(tmp_path: Path) -> None:
    source = tiny.write_gguf(tmp_path / "x.gguf", quantization="Q4_0")
    with pytest.raises(UsageError, match=r"quantized .Q4_0.*--dtype float32 is exact"):
        convert(source, tmp_path / "hf", "hf")
    proof = convert(source, tmp_path / "hf", "hf", dtype=torch.float32)
    tokens = tiny.random_tokens(40)
    one, other = (llama.load_model(path, dtype="float32", device="cpu") for path in (source, proof.path))
    assert torch.equal(one(tokens), other(tokens))


def test_a_dtype_too_small_for_a_weight_is_refused(tmp_path: Path) -> None:
    state = tiny.weights()
    state["norm.weight"][3] = 1e6
    source = tiny.write_gguf(tmp_path / "x.gguf", state=state)
    with pytest.raises(CheckpointError, match=r"beyond the range of torch\.float16"):
        convert(source, tmp_path / "hf", "hf", dtype=torch.float16)
    assert os.listdir(tmp_path) == ["x.gguf"]


# ------------------------------------------------------------------------------------------- complete or absent
@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny.make(tmp_path / "source", "llama-3-8b")


FOREIGN: dict[str, tuple[str, ...]] = {
    "a.jpg, which no conversion writes": ("a.jpg",),
    "thesis.txt, which no conversion writes": ("config.json", "thesis.txt"),
    "model.safetensors.bak, which": ("config.json", "model.safetensors", "model.safetensors.bak"),
    "notes.json, which": ("consolidated.00.pth", "params.json", "notes.json"),
    "the folder photos, which": ("config.json", "model.safetensors", "photos/a.jpg"),
    "the folder tokenizer.json, which": ("config.json", "model.safetensors", "tokenizer.json/a.jpg"),
    "config.json and no weights": ("config.json", "tokenizer.json"),
}


@pytest.mark.row("F05")
@pytest.mark.parametrize("message", FOREIGN)
def test_a_folder_with_a_file_that_no_conversion_writes_is_never_replaced(
    source: Path, tmp_path: Path, message: str
) -> None:
    target = tmp_path / "proj"
    for name in FOREIGN[message]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(name)
    for write in (lambda: convert(source, target, "hf", force=True), lambda: quantize(source, target, force=True)):
        with pytest.raises(UsageError, match=f"proj contains {message}.*, so it is not replaced; remove it first"):
            pytest.fail(str(write()))
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*.*") if path.is_file()) == sorted(
        FOREIGN[message]
    )


@pytest.mark.row("F01")
@pytest.mark.row("F02")
def test_a_full_disk_leaves_no_files(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"0 MB free, but the new files need"):
        convert(source, tmp_path / "hf", "hf")
    monkeypatch.undo()

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; .* MB are free and .* nothing was changed"):
        convert(source, tmp_path / "hf", "hf")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.row("F05")
def test_an_old_target_comes_back_if_the_new_one_cannot_take_its_place(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "hf", "hf")
    before, rename = files(tmp_path / "hf"), os.rename

    def fail_once(old: Path, new: Path) -> None:
        if Path(new) == tmp_path / "hf" and Path(old).name == "hf":
            raise OSError(errno.EIO, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(os, "rename", fail_once)
    monkeypatch.setattr(convert_module, "swap", lambda one, other: False)  # a disk that can't swap
    with pytest.raises(CheckpointError, match="Input/output error; nothing was changed"):
        convert(source, tmp_path / "hf", "hf", force=True)
    assert files(tmp_path / "hf") == before


def test_the_proof_finds_a_wrong_byte(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llama.checkpoint import huggingface_write

    original = huggingface_write.raw_bytes

    def change_a_bit(tensor: torch.Tensor) -> Any:
        raw = original(tensor).copy()
        raw[7] ^= 1
        return raw

    monkeypatch.setattr(huggingface_write, "raw_bytes", change_a_bit)
    with pytest.raises(CheckpointError, match="differs after it was written"):
        convert(source, tmp_path / "hf", "hf")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.row("C08")
def test_the_proof_finds_a_missing_permutation(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llama.checkpoint import huggingface_write

    monkeypatch.setattr(huggingface_write, "ROTATED", ())
    with pytest.raises(CheckpointError, match=r"attention\.w[qk]\.weight differs after"):
        convert(source, tmp_path / "hf", "hf")


KILLS = 12


@pytest.mark.slow  # tests/test_quantize.py checks the same writers by default
def test_one_weight_is_in_memory_at_a_time(tmp_path: Path) -> None:
    config = ModelConfig(512, 12, 8, 8, 64, 1776, 768, rope_theta=500000.0, max_seq_len=8192)
    source = make_tiny.write_meta(tmp_path / "a", "llama-3-8b", config, make_tiny.weights(config), 1, None)
    size = (source / "consolidated.00.pth").stat().st_size
    script = (
        "import sys, torch; from llama.tools.convert import convert; from llama import loader;"
        "convert(sys.argv[1], sys.argv[2], 'hf');"
        "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')])"
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    base = subprocess.run(
        [sys.executable, "-c", script, str(make_tiny.make(tmp_path / "tiny", "llama-3-8b")), str(tmp_path / "t")],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    out = subprocess.run([sys.executable, "-c", script, str(source), str(tmp_path / "b")], check=True,
                         capture_output=True, text=True).stdout  # fmt: skip
    grown = (int(out) - int(base)) * 1024
    assert size > 75e6
    assert grown < 0.35 * size, (grown, size)


# ---------------------------------------------------------------------------------------------- the configuration
TABLES = {"short_factor": [1.0] * 8, "long_factor": [2.3] * 8}
SCALED: dict[str, tuple[dict[str, Any], str | None]] = {  # (config.json's entries, the error for GGUF)
    "yarn 1": ({"rope_scaling": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.5}}, None),
    "yarn 0.5": ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, None),
    "yarn without a factor": ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 32}}, None),
    "yarn 4": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0}}, None),
    "ntk": ({"rope_scaling": {"rope_type": "ntk", "factor": 3.0}}, None),
    "linear": ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, None),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "factor": 7, **TABLES}}, None),
    "half a token": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50.7}},
        "as an integer, got 50.7",
    ),
    "theta": ({"rope_theta": 1e39}, "llama.rope.freq_base as float32, which can't hold 1e[+]39"),
    "eps": ({"rms_norm_eps": 1e-47}, "as float32, which can't hold 1e-47"),
}


@pytest.mark.row("F08")
@pytest.mark.parametrize(
    ("name", "to"), [(name, to) for name in SCALED for to in ("gguf", "hf") if (name, to) != ("ntk", "hf")]
)
def test_a_conversion_keeps_the_rotation_and_the_context_or_refuses(tmp_path: Path, name: str, to: str) -> None:
    entries, error = SCALED[name]
    source = convert(tiny.write_gguf(tmp_path / "t.gguf"), tmp_path / "source", "hf").path
    config = json.loads((source / "config.json").read_text())
    config.pop("rope_parameters", None)
    (source / "config.json").write_text(json.dumps({**config, **entries}))
    if error is not None and to == "gguf":
        with pytest.raises(ConfigError, match=error):
            convert(source, tmp_path / "new", to)
        assert not (tmp_path / "new").exists()
        return
    old, new = (
        llama.load_model(path, dtype="float32", device="cpu")
        for path in (source, convert(source, tmp_path / "new", to).path)
    )
    assert old.max_seq_len == new.max_seq_len
    tokens = tiny.random_tokens(100)
    torch.testing.assert_close(old(tokens), new(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.row("F08")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_eps": 1.1e-5}, "its norm_eps 1e-05 would become 1.1e-05"),
        ({"rope_theta": 10001.0}, "its rope_theta 10000.0 would become 10001.0"),
        ({"max_seq_len": 255}, "its max_seq_len 256 would become 255"),
        ({"n_kv_heads": 4}, "its n_kv_heads 2 would become 4"),
        ({"tie_embeddings": True}, "its tie_embeddings False would become True"),
        ({"rope_scaling": {"rope_type": "divisors", "divisors": [1.001] * 8}}, "frequencies for 1 tokens would change"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.5}},
            "its RoPE attention factor 1 for 1 tokens would become 1.5",
        ),
    ],
)
def test_a_configuration_that_computes_something_else_is_no_proof(change: dict[str, Any], message: str) -> None:
    convert_module.check_config(tiny.CONFIG, tiny.CONFIG)
    with pytest.raises(ConfigError, match=message):
        convert_module.check_config(tiny.CONFIG, dataclasses.replace(tiny.CONFIG, **change))
