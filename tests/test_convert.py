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
from llama.checkpoint.meta_write import feed_forward_keys
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


@pytest.mark.parametrize(
    "like", ["llama-1-7b", "llama-2-70b", "codellama-7b", "llama-3-8b", "llama-3.1-405b", "llama-3.2-1b"]
)
def test_round_trip_through_all_formats_is_bit_equal(tmp_path: Path, like: str) -> None:
    source = make_tiny.make(tmp_path / "meta", like, shards=2 if "405b" in like else 1)
    hf = convert(source, tmp_path / "hf", "hf")
    file = convert(hf.path, tmp_path / "model.gguf", "gguf")
    back = convert(file.path, tmp_path / "back", "meta")
    assert len({proof.sha256 for proof in (hf, file, back)}) == 1
    [warning] = hf.warnings
    assert warning.startswith("wrote no chat template, because the name meta does not contain instruct or chat")
    assert file.warnings == []
    original, final = torch.load(source / "consolidated.00.pth"), torch.load(tmp_path / "back" / "consolidated.00.pth")
    if "405b" not in like:
        for name, tensor in final.items():
            assert torch.equal(tensor, original[name])
            assert tensor.dtype == original[name].dtype
    configs = [open_checkpoint(path).config for path in (source, hf.path, file.path, back.path)]
    assert all(config == configs[0] for config in configs[1:])
    outputs = [logits(path) for path in (source, hf.path, file.path, back.path)]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    tokenizers = [llama.load_tokenizer(path) for path in (source, hf.path, file.path, back.path)]
    text = " The dog bites the man.\n\n 12345 😀 <|eot_id|> </s>  x"
    assert len({tuple(tokenizer.encode(text, bos=True)) for tokenizer in tokenizers}) == 1
    assert len({tokenizer.stop_ids for tokenizer in tokenizers}) == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_gguf_entries_are_normal_float32_numbers(sign: int) -> None:
    largest, smallest = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
    written: list[float] = []
    writer = SimpleNamespace(add_float32=lambda key, value: written.append(value))
    for value in (0.0, smallest, 1.5, largest):
        gguf_write.add(writer, "key", sign * value)
    assert written == [0.0, sign * smallest, sign * 1.5, sign * largest]
    for value in (smallest / 2, 2.0**128, math.inf, math.nan):
        with pytest.raises(ConfigError, match="key as float32, which can't hold"):
            gguf_write.add(writer, "key", sign * value)


@pytest.mark.parametrize("key", ["beta_fast", "beta_slow"])
def test_betas_that_llama_cpp_does_not_read_are_a_warning(tmp_path: Path, key: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    for name, extra in (("a", {}), ("b", {key: 2.0})):
        test_huggingface.write(tmp_path / name, rope_parameters={**yarn, **extra})
        proof = convert(tmp_path / name, tmp_path / f"{name}.gguf", "gguf")
        assert any("llama.cpp 0.3.36 does not read them" in warning for warning in proof.warnings) == (name == "b")


def test_a_number_of_shards_that_does_not_divide_the_weights_is_refused_with_those_that_do(tmp_path: Path) -> None:
    source = tiny.write_gguf(tmp_path / "a.gguf", dataclasses.replace(tiny.CONFIG, hidden_dim=90))
    with pytest.raises(LlamaError, match=r"into 3 equal shards; numbers that work: 1, 2, 4$"):
        convert(source, tmp_path / "b", "meta", shards=3)
    with pytest.raises(
        LlamaError, match=r"has 90 rows, .* into 4 equal shards; numbers that work: 1, 2, 3, 5, 6, 9, 10, 15$"
    ):
        convert(source, tmp_path / "b", "meta", shards=4)


@pytest.mark.parametrize("shards", [1, 2, 4, 8, 16])
def test_written_shards_merge_to_the_same_weights(tmp_path: Path, shards: int) -> None:
    config = make_tiny.tiny_config("llama-3.1-405b", 16)
    state = make_tiny.weights(config)
    source = make_tiny.write_meta(tmp_path / "a", "llama-3.1-405b", config, state, 1, None)
    convert(source, tmp_path / "b", "meta", shards=shards)
    expected = make_tiny.write_meta(tmp_path / "c", "llama-3.1-405b", config, state, shards, None)
    for rank in range(shards):
        ours, theirs = (torch.load(tmp_path / name / f"consolidated.{rank:02d}.pth") for name in ("b", "c"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(logits(tmp_path / "b"), logits(expected))


def test_written_files_pass_the_checks_of_torch_and_zipfile(tmp_path: Path) -> None:
    import zipfile

    source = make_tiny.make(tmp_path / "a", "llama-2-13b", shards=2)
    convert(source, tmp_path / "b", "meta", shards=2)
    for rank in range(2):
        file = tmp_path / "b" / f"consolidated.{rank:02d}.pth"
        assert zipfile.ZipFile(file).testzip() is None
        mapped, read = torch.load(file, mmap=True), torch.load(file, mmap=False)
        assert all(torch.equal(mapped[name], read[name]) for name in read)
    done = subprocess.run(["md5sum", "-c", "checklist.chk"], cwd=tmp_path / "b", capture_output=True, check=False)
    assert done.returncode == 0


def test_metas_code_reads_the_written_files(tmp_path: Path) -> None:
    model = test_huggingface.write(tmp_path / "hf", num_key_value_heads=2, max_position_embeddings=4096)
    proof = convert(tmp_path / "hf", tmp_path / "meta", "meta")
    tokens = TOKENS % 320
    [expected] = meta_code.run([meta_code.job(proof.path, tokens, "llama3", 320)])
    assert float((model(tokens).logits - expected).abs().max()) < 5e-4


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_metas_code_reads_the_written_shards(tmp_path: Path, ranks: int) -> None:
    source = make_tiny.make(tmp_path / "a", "llama-3.1-70b", shards=8)
    convert(source, tmp_path / "b", "meta", shards=ranks)
    [expected] = meta_code.run([meta_code.job(tmp_path / "b", TOKENS, "llama-models", 768)], ranks)
    assert float((logits(source) - expected).abs().max()) < 2e-4


@pytest.mark.parametrize("like", ["llama-2-7b", "codellama-34b", "llama-3.1-8b", "llama-3.2-3b"])
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


@pytest.mark.parametrize(
    ("changes", "to", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "gguf", "can't express .*dynamic"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "meta", "can't express .*yarn"),
        ({"attention_bias": True}, "meta", "attention_bias is always False, but this model has True"),
        ({"head_dim": 32}, "meta", "head_dim is always 16, but this model has 32"),
    ],
    ids=str,
)  # fmt: skip
def test_a_model_that_a_format_cannot_express_is_refused(
    tmp_path: Path, changes: dict[str, Any], to: str, message: str
) -> None:
    test_huggingface.write(tmp_path / "hf", **changes)
    before = files(tmp_path)
    with pytest.raises(LlamaError, match=message):
        convert(tmp_path / "hf", tmp_path / "out", to)
    assert files(tmp_path) == before
    assert os.listdir(tmp_path) == ["hf"]


def test_biases_survive_gguf(tmp_path: Path) -> None:
    test_huggingface.write(tmp_path / "hf", attention_bias=True, mlp_bias=True, head_dim=24)
    proof = convert(tmp_path / "hf", tmp_path / "x.gguf", "gguf")
    tokens = test_huggingface.tokens(60)
    one, other = (llama.load_model(path, dtype="float32", device="cpu") for path in (tmp_path / "hf", proof.path))
    assert torch.equal(one(tokens), other(tokens))


@pytest.mark.parametrize(
    ("heads", "kv", "shards", "fit"), [(6, 3, 2, "1, 3, 6"), (4, 2, 8, "1, 2, 4"), (12, 3, 2, "1, 3, 6, 12")]
)
def test_no_shard_splits_a_head(tmp_path: Path, heads: int, kv: int, shards: int, fit: str) -> None:
    test_huggingface.write(tmp_path / "hf", hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=kv)
    with pytest.raises(LlamaError, match=rf"can't be divided into {shards} equal shards; numbers that work: {fit}"):
        convert(tmp_path / "hf", tmp_path / "meta", "meta", shards=shards)


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


@pytest.mark.parametrize("name", make_tiny.names())
def test_metas_formula_gives_the_width_of_every_official_model(name: str) -> None:
    config = make_tiny.real_config(name)
    keys = feed_forward_keys(config.dim, config.hidden_dim)
    base = int(8 * config.dim / 3)
    base = int(keys["ffn_dim_multiplier"] * base) if "ffn_dim_multiplier" in keys else base
    assert keys["multiple_of"] * -(-base // keys["multiple_of"]) == config.hidden_dim
    assert keys["multiple_of"] in (256, 1024, 4096)  # an official pair


@pytest.mark.parametrize("hidden", [96, 97, 170, 1000])
def test_metas_formula_can_express_any_width(hidden: int) -> None:
    keys = feed_forward_keys(64, hidden)
    base = int(keys.get("ffn_dim_multiplier", 1.0) * int(8 * 64 / 3))
    assert keys["multiple_of"] * -(-base // keys["multiple_of"]) == hidden


# ------------------------------------------------------------------------------------------- complete or absent
@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny.make(tmp_path / "source", "llama-3-8b")


def test_an_existing_target_is_replaced_only_by_force(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "hf", "hf")
    before = files(tmp_path / "hf")
    with pytest.raises(UsageError, match="exists already"):
        convert(source, tmp_path / "hf", "hf")
    assert files(tmp_path / "hf") == before
    (tmp_path / "hf" / "config.json").write_text("x")
    (tmp_path / "hf").chmod(0o700)
    convert(source, tmp_path / "hf", "hf", force=True)
    assert files(tmp_path / "hf") == before
    assert (tmp_path / "hf").stat().st_mode & 0o777 == 0o700
    for target in (source, source.parent):
        with pytest.raises(UsageError, match="is the source or contains it"):
            convert(source, target, "hf", force=True)
    with pytest.raises(UsageError, match="is not a folder; create it first"):
        convert(source, tmp_path / "no" / "hf", "hf")
    with pytest.raises(UsageError, match="is a folder, but this format is a file"):
        convert(source, tmp_path / "hf", "gguf", force=True)
    with pytest.raises(UsageError, match="unknown format"):
        convert(source, tmp_path / "x", "onnx")
    with pytest.raises(LlamaError, match=r"can't be divided into 3 equal shards; numbers that work: 1, 2, 4"):
        convert(source, tmp_path / "x", "meta", shards=3)
    assert sorted(os.listdir(tmp_path)) == ["hf", "source"]


FOREIGN: dict[str, tuple[str, ...]] = {
    "a.jpg, which no conversion writes": ("a.jpg",),
    "thesis.txt, which no conversion writes": ("config.json", "thesis.txt"),
    "model.safetensors.bak, which": ("config.json", "model.safetensors", "model.safetensors.bak"),
    "notes.json, which": ("consolidated.00.pth", "params.json", "notes.json"),
    "the folder photos, which": ("config.json", "model.safetensors", "photos/a.jpg"),
    "the folder tokenizer.json, which": ("config.json", "model.safetensors", "tokenizer.json/a.jpg"),
    "config.json and no weights": ("config.json", "tokenizer.json"),
}


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


def test_all_that_the_writers_write_may_be_replaced(source: Path, tmp_path: Path) -> None:
    """Whatever the writer of the old folder, its shards and its tokenizer."""
    makers: list[Callable[[Path], object]] = [
        lambda path: convert(source, path, "hf", force=True),
        lambda path: convert(source, path, "hf", shards=3, force=True),
        lambda path: convert(source, path, "meta", shards=2, force=True),
        lambda path: quantize(source, path, force=True),
    ]
    for make in [*makers, makers[0]]:
        make(tmp_path / "x")
    assert files(tmp_path / "x").keys() >= {"config.json", "model.safetensors"}


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
    with pytest.raises(CheckpointError, match="Input/output error; nothing was changed"):
        convert(source, tmp_path / "hf", "hf", force=True)
    assert files(tmp_path / "hf") == before


def test_the_embedding_is_split_as_the_familys_code_expects(tmp_path: Path) -> None:
    for like, axis in (("llama-2-13b", 1), ("codellama-13b", 1), ("llama-3-70b", 0)):
        source = make_tiny.make(tmp_path / like, like)
        convert(source, tmp_path / f"{like}-2", "meta", shards=2)
        full, part = (torch.load(folder / "consolidated.00.pth")["tok_embeddings.weight"]
                       for folder in (source, tmp_path / f"{like}-2"))  # fmt: skip
        assert torch.equal(part, full.chunk(2, axis)[0])


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


def test_the_proof_finds_a_missing_permutation(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llama.checkpoint import huggingface_write

    monkeypatch.setattr(huggingface_write, "ROTATED", ())
    with pytest.raises(CheckpointError, match=r"attention\.w[qk]\.weight differs after"):
        convert(source, tmp_path / "hf", "hf")


KILLS = 12


@pytest.mark.slow  # tests/faults/test_writes.py runs a shorter version by default
def test_a_killed_conversion_leaves_a_complete_target_or_none(forked: Forked, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    target.parent.mkdir()
    command = ("convert", str(source), str(target), "--to", "meta", "--shards", "2")
    times = []
    for _ in range(2):  # the first run is slower
        began = time.perf_counter()
        assert forked.run(command, None).returncode == 0
        times.append(time.perf_counter() - began)
        complete = files(target)
        shutil.rmtree(target)
    rng = random.Random(0)
    outcomes = []
    for step in range(KILLS):
        process = forked.start(command)
        time.sleep(min(times) * (step + rng.random()) / KILLS)  # spread over the whole run
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.kill(process, signal.SIGKILL)
        forked.finish()
        if target.exists():
            assert files(target) == complete
            shutil.rmtree(target)
            outcomes.append("complete")
        else:
            outcomes.append("absent")
    assert forked.run(command, None).returncode == 0
    assert files(target) == complete
    assert os.listdir(target.parent) == ["model"]  # the files of killed processes were removed
    assert "absent" in outcomes


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


def test_progress_is_reported(source: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    proof = convert(source, tmp_path / "hf", "hf", progress=lambda *step: steps.append(step))
    assert steps[-1] == ("checking", proof.tensors, proof.tensors)
    assert ("writing", proof.tensors, proof.tensors) in steps
    assert convert_module.WRITERS.keys() == {"meta", "hf", "gguf"}


def test_each_matrix_keeps_its_dtype_and_vectors_get_the_widest_that_changes_no_value(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    convert(tiny.write_gguf(tmp_path / "t.gguf"), source, "hf")
    tensors = load_file(source / "model.safetensors")
    narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    up = "model.layers.0.mlp.up_proj.weight"

    def dtypes(mixed: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, torch.dtype]:
        save_file(mixed, source / "model.safetensors", {"format": "pt"})
        return convert_module.plan_dtypes(open_checkpoint(source), dtype)

    plan = dtypes({**narrow, up: tensors[up]})
    matrices = {name for name in plan if "norm" not in name}
    assert {name for name in matrices if plan[name] == torch.float32} == {"layers.0.feed_forward.w_up.weight"}
    assert {plan[name] for name in matrices} == {torch.float32, torch.bfloat16}
    assert {plan[name] for name in plan.keys() - matrices} == {torch.float32}  # the widest of the matrices
    vectors = {name: tensor.float() for name, tensor in narrow.items() if tensor.dim() == 1}
    assert set(dtypes({**narrow, **vectors}).values()) == {torch.bfloat16}  # changes no value
    vectors["model.norm.weight"][3] += 2**-20
    plan = dtypes({**narrow, **vectors})
    assert {name for name in plan if plan[name] == torch.float32} == {"norm.weight"}
    assert set(dtypes({**narrow, up: tensors[up]}, torch.float16).values()) == {torch.float16}


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
