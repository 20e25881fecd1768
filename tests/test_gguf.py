"""The GGUF reader: exact weights of valid files, one clear error for every invalid file."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from llama import loader
from llama.checkpoint import open_checkpoint
from llama.checkpoint.gguf import PLAIN, GGUFFile
from llama.checkpoint.gguf_header import read_header
from llama.errors import CheckpointError, LlamaError
from llama.quant.blocks import READERS
from llama.rope_scaling import inverse_frequencies

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def test_header_equals_that_of_the_gguf_package(tiny_gguf: Path) -> None:
    ours = read_header(tiny_gguf.read_bytes(), "tiny")
    theirs = gguf.GGUFReader(tiny_gguf)
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.type, info.offset, info.nbytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
    for key, value in ours.metadata.items():
        expected = theirs.fields[key].contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected


def test_logits_are_those_of_the_weights_in_the_file(tiny_gguf: Path) -> None:
    model = loader.load_model(tiny_gguf, dtype="float32", device="cpu")
    tokens = tiny.random_tokens(30)
    torch.testing.assert_close(model(tokens), tiny.model()(tokens), rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["real", "half"])
def test_every_form_of_rope_has_the_same_logits(tiny_gguf: Path, form: str) -> None:
    tokens = tiny.random_tokens(30)
    model = loader.load_model(tiny_gguf, dtype="float32", device="cpu", rope=form)
    torch.testing.assert_close(model(tokens), tiny.model()(tokens), rtol=0, atol=1e-4)


BIG = tiny.ModelConfig(256, 1, 4, 2, 64, 512, 320, max_seq_len=64)


@pytest.mark.parametrize(("name", "error"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 0.01), ("Q4_0", 0.15),
                                             ("Q4_1", 0.15), ("Q5_0", 0.1), ("Q5_1", 0.1)])  # fmt: skip
def test_quantized_files_are_near_the_original_weights(tmp_path: Path, name: str, error: float) -> None:
    state = tiny.weights(BIG)
    checkpoint = open_checkpoint(tiny.write_gguf(tmp_path / "x.gguf", BIG, state, quantization=name))
    for key, tensor in state.items():
        read = checkpoint.tensor(key).float()
        assert read.shape == tensor.shape
        assert float((read - tensor).norm() / tensor.norm()) < (error if tensor.dim() == 2 else 1e-6)


def _q4_k(block: bytes) -> list[float]:
    """Q4_K by the layout in llama.cpp's ggml-quants.c, one weight at a time."""
    d, dmin = (float(x) for x in np.frombuffer(block[:4], np.float16))
    packed, quants = block[4:16], block[16:]
    out = []
    for j in range(8):
        if j < 4:
            scale, low = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4)
            low = (packed[j + 4] >> 4) | (packed[j] >> 6 << 4)
        for i in range(32):
            byte = quants[32 * (j // 2) + i]
            out.append(d * scale * (byte >> 4 if j % 2 else byte & 15) - dmin * low)
    return out


def _q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    d = float(np.frombuffer(block[208:], np.float16)[0])
    out = [0.0] * 256
    for half in range(2):
        for i in range(32):
            for quarter in range(4):
                byte = low[64 * half + 32 * (quarter % 2) + i]
                nibble = byte >> 4 if quarter >= 2 else byte & 15
                value = nibble | ((high[32 * half + i] >> (2 * quarter)) & 3) << 4
                at = 128 * half + 32 * quarter + i
                out[at] = d * int(scales[8 * half + 2 * quarter + i // 16]) * (value - 32)
    return out


@pytest.mark.parametrize(("type", "read"), [(12, _q4_k), (14, _q6_k)])
def test_k_quants_follow_the_layout_of_llama_cpp(
    tmp_path: Path, type: int, read: Callable[[bytes], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, size = ("Q4_K", 144) if type == 12 else ("Q6_K", 210)
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (8, size), dtype=np.uint8)
    halves = rng.uniform(0.01, 0.1, (8, 2)).astype(np.float16).view(np.uint8).reshape(8, 4)
    if name == "Q4_K":
        raw[:, :4] = halves
    else:
        raw[:, 208:] = halves[:, :2]
    writer = gguf.GGUFWriter(str(tmp_path / "k.gguf"), "llama")
    writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType(type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part = GGUFFile(tmp_path / "k.gguf").tensors["w"]
    assert part.shape == (8, 256)
    expected = torch.tensor([read(row.tobytes()) for row in raw])
    torch.testing.assert_close(part.read(), expected, rtol=1e-4, atol=1e-4)


RARE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4")


@pytest.mark.parametrize("name", [*READERS, *RARE])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_quantized_tensors_equal_those_of_the_gguf_package(tmp_path: Path, name: str) -> None:
    type = gguf.GGMLQuantizationType[name]
    per_block, size = gguf.constants.GGML_QUANT_SIZES[type]
    raw = np.random.default_rng(0).integers(0, 256, (40, 1536 // per_block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    for label, blocks in (("matrix", raw), ("vector", raw[0])):
        writer.add_tensor(label, blocks, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors, expected = GGUFFile(tmp_path / "x.gguf").tensors, torch.from_numpy(gguf.quants.dequantize(raw, type))
    assert float(expected.isfinite().float().mean()) > 0.8  # random scales may be NaN or infinite
    equal = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    equal(tensors["matrix"].read(), expected)
    equal(tensors["vector"].read(), expected[0])
    for columns in (slice(0, 7), slice(33, 100), slice(None)):
        equal(tensors["matrix"].piece(slice(3, 9), columns), expected[3:9, columns])


@pytest.mark.parametrize("quantization", ["F32", "Q8_0"])
def test_a_weight_is_multiplied_by_its_factor(tmp_path: Path, quantization: str) -> None:
    """llama.cpp writes factors for NVFP4, and applies them to weights of every type."""
    state, factor = tiny.weights(), torch.tensor([0.37])
    extra = {"blk.0.attn_q.scale": factor, "blk.1.ffn_up.scale": factor, "blk.1.ffn_up.input_scale": 5 * factor}
    path = tiny.write_gguf(tmp_path / "x.gguf", quantization=quantization, state=state, extra=extra)
    checkpoint = open_checkpoint(path)
    plain = open_checkpoint(tiny.write_gguf(tmp_path / "plain.gguf", quantization=quantization, state=state))
    for name in state:
        changed = name in ("layers.0.attention.wq.weight", "layers.1.feed_forward.w_up.weight")
        expected = plain.tensor(name) * (0.37 if changed else 1)
        torch.testing.assert_close(checkpoint.tensor(name), expected, rtol=1e-6, atol=0)
        if expected.dim() == 2:
            assert torch.equal(checkpoint.piece(name, slice(3, 9), slice(32)), checkpoint.tensor(name)[3:9, :32])
            blocks = checkpoint.blocks(name)
            if blocks is not None:
                torch.testing.assert_close(blocks.weight, checkpoint.tensor(name), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("factor", "found"), [(torch.ones(2), "2 of them"), (torch.tensor([math.nan]), "nan")])
def test_a_factor_that_is_not_one_finite_number_is_refused(tmp_path: Path, factor: torch.Tensor, found: str) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", extra={"blk.0.attn_q.scale": factor})
    with pytest.raises(CheckpointError, match=rf"blk\.0\.attn_q\.scale must hold one finite number, .* got {found}"):
        open_checkpoint(path)


@pytest.mark.row("D12")
def test_rope_freqs_are_applied(tmp_path: Path) -> None:
    divisors = torch.linspace(1, 8, 8)
    path = tiny.write_gguf(tmp_path / "x.gguf", extra={"rope_freqs.weight": divisors})
    model = loader.load_model(path, dtype="float32", device="cpu")
    assert model.config.rope_scaling == {"rope_type": "divisors", "divisors": divisors.tolist()}
    tokens = tiny.random_tokens(100)
    assert not torch.allclose(model(tokens), tiny.model()(tokens), atol=1e-2)


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    more = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = open_checkpoint(tiny.write_gguf(tmp_path / "x.gguf", metadata=more)).config
    assert config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


def scaling(tmp_path: Path, metadata: dict[str, Any], extra: dict[str, torch.Tensor] | None = None) -> Any:
    entries = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
    return open_checkpoint(tiny.write_gguf(tmp_path / "x.gguf", metadata=entries, extra=extra)).config.rope_scaling


LLM, ATTENTION = gguf.Keys.LLM, gguf.Keys.Attention


@pytest.mark.parametrize(
    ("key", "plain", "other"),
    [
        (ATTENTION.CAUSAL, True, False),
        (ATTENTION.SCALE, 0.0, 0.5),
        (ATTENTION.CLAMP_KQV, 0.0, 8.0),
        (LLM.ATTN_LOGIT_SOFTCAPPING, 0.0, 50.0),
        (LLM.FINAL_LOGIT_SOFTCAPPING, 0.0, 30.0),
        (LLM.LOGIT_SCALE, 0.0, 0.1),
        (LLM.EMBEDDING_SCALE, 0.0, 12.0),
        (LLM.RESIDUAL_SCALE, 0.0, 0.2),
        (LLM.USE_PARALLEL_RESIDUAL, False, True),
    ],
)
def test_a_key_that_changes_the_computation_is_refused(tmp_path: Path, key: str, plain: Any, other: Any) -> None:
    key = key.format(arch="llama")
    open_checkpoint(tiny.write_gguf(tmp_path / "plain.gguf", metadata={key: plain}))
    with pytest.raises(CheckpointError, match=re.escape(key.removeprefix("llama."))):
        open_checkpoint(tiny.write_gguf(tmp_path / "other.gguf", metadata={key: other}))


def test_a_factor_alone_is_linear_as_in_llama_cpp(tmp_path: Path) -> None:
    assert scaling(tmp_path, {"factor": 4.0}) == {"rope_type": "linear", "factor": 4.0}
    assert scaling(tmp_path, {"factor": 0.0}) is None
    with pytest.raises(CheckpointError, match="'factor' must be a number above 0"):
        scaling(tmp_path, {"factor": -1.0})
    with pytest.raises(CheckpointError, match=r"attn_factor is 2\.0, but .*type linear does not use it"):
        scaling(tmp_path, {"factor": 4.0, "attn_factor": 2.0})
    with pytest.raises(CheckpointError, match=r"is yarn, but .*factor is missing"):
        scaling(tmp_path, {"type": "yarn"})


@pytest.mark.parametrize(("key", "value"), [("attention.causal", False), ("vocab_size", 5)])
def test_keys_that_change_the_result_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", metadata={f"llama.{key}": value})
    with pytest.raises(CheckpointError, match=rf"llama\.{key} is {value}"):
        open_checkpoint(path)


def test_yarn_keys_are_read(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert scaling(tmp_path, yarn) == expected
    betas = {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    assert scaling(tmp_path, {**yarn, **betas}) == {**expected, "beta_fast": 16.0, "beta_slow": 2.0}
    # llama.cpp multiplies its own 0.1 ln(factor) + 1 by attn_factor
    sharper = scaling(tmp_path, {**yarn, "attn_factor": 2.0})["attention_factor"]
    assert sharper == pytest.approx(2 * (0.1 * math.log(4) + 1))


def test_longrope_tables_are_read(tmp_path: Path) -> None:
    short, long = torch.linspace(1, 2, 8), torch.linspace(1, 16, 8)
    tables = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    longrope = {"type": "longrope", "original_context_length": 64, "attn_factor": 1.25}
    assert scaling(tmp_path, longrope, tables) == {
        "rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist(),
        "original_max_position_embeddings": 64, "attention_factor": 1.25,
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=r"longrope needs the tensors"):
        scaling(tmp_path, longrope)


@pytest.mark.parametrize("factor", [8.0, 32.0, 4.0])
@pytest.mark.parametrize("length", [64, 8192])
@pytest.mark.row("D12")
def test_divisors_of_llama3_are_recognized(tmp_path: Path, factor: float, length: int) -> None:
    made = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": length}  # fmt: skip
    plain, scaled = (inverse_frequencies(16, 10000.0, kind)[0] for kind in (None, made))
    path = tiny.write_gguf(tmp_path / "x.gguf", extra={"rope_freqs.weight": plain / scaled})
    read = open_checkpoint(path).config.rope_scaling
    assert read is not None
    assert torch.equal(inverse_frequencies(16, 10000.0, read)[0], scaled)  # bit for bit


def split(tmp_path: Path, tensors: int = 5) -> list[Path]:
    """The tiny model split into several files by the gguf package."""
    reader = gguf.GGUFReader(tiny.write_gguf(tmp_path / "whole.gguf"))
    writer = gguf.GGUFWriter(str(tmp_path / "part.gguf"), "llama", split_max_tensors=tensors)
    for key, value in {**tiny.architecture(), **tiny.byte_vocabulary()}.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif key in tiny.FLOATS:
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("part-*.gguf"))


@pytest.mark.row("D13")
def test_a_split_model_opens_from_any_part(tmp_path: Path) -> None:
    parts = split(tmp_path)
    assert len(parts) > 2
    tokens = tiny.random_tokens(30)
    expected = loader.load_model(tmp_path / "whole.gguf", dtype="float32", device="cpu")(tokens)
    (tmp_path / "whole.gguf").unlink()
    for path in (parts[0], parts[-1], tmp_path):
        checkpoint = open_checkpoint(path)
        assert list(checkpoint.parts) == [part.name for part in parts]
        assert torch.equal(loader.build(checkpoint, "cpu", "float32")(tokens), expected)


@pytest.mark.row("D13")
def test_a_missing_or_renamed_part_is_an_error(tmp_path: Path) -> None:
    parts = split(tmp_path)
    with pytest.raises(CheckpointError, match=r"contains 2 GGUF models .*; name one of them"):
        open_checkpoint(tmp_path)
    kept = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=rf"1 are missing: {parts[1].name}"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"but part 2 of \d+ by its header"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(kept)
    stray = tmp_path / "renamed.gguf"
    shutil.copy(parts[1], stray)
    with pytest.raises(CheckpointError, match="rename it to its original name"):
        open_checkpoint(stray)


@pytest.mark.row("D13")
def test_a_wrong_tensor_count_of_a_split_model_is_an_error(tmp_path: Path) -> None:
    parts = split(tmp_path)
    data = bytearray(parts[0].read_bytes())
    at = data.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    data[at] += 1
    parts[0].write_bytes(data)
    with pytest.raises(CheckpointError, match=r"contain \d+ tensors, expected \d+"):
        open_checkpoint(parts[1])


def test_biases_are_read(tmp_path: Path) -> None:
    config = dataclasses.replace(tiny.CONFIG, attention_bias=True, mlp_bias=True)
    state = tiny.weights(config)
    model = loader.load_model(tiny.write_gguf(tmp_path / "x.gguf", config, state), dtype="float32", device="cpu")
    tokens = tiny.random_tokens(30)
    torch.testing.assert_close(model(tokens), tiny.model(config)(tokens), rtol=0, atol=1e-6)
    assert model.layers[0].attention.wq.bias is not None


def test_a_file_without_output_weight_is_tied(tmp_path: Path) -> None:
    tied = open_checkpoint(tiny.write_gguf(tmp_path / "x.gguf", without=("output.weight",)))
    assert tied.config.tie_embeddings
    model = loader.build(tied, "cpu", "float32")
    assert model.output.weight.data_ptr() == model.tok_embeddings.weight.data_ptr()


def test_the_format_is_detected_by_content(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights in Ünicode.pth"
    path.write_bytes(tiny_gguf.read_bytes())
    assert open_checkpoint(path).format == "GGUF"
    link = tmp_path / "link"
    link.symlink_to(path)
    assert open_checkpoint(link).config == tiny.CONFIG


# -------------------------------------------------------------------------------------------------- not a checkpoint
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"PK\x03\x04" + bytes(60), "name the folder"),
        (b"\x80\x02}q\x00.", "pickle"),
        (b"hello", "begins with b'hello'"),
    ],
)
def test_files_of_other_formats_are_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(path)


def test_paths_that_are_not_regular_files_are_errors(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "fifo")
    for path, says in ((tmp_path, "not a checkpoint"), (tmp_path / "no", "No such file"), (tmp_path / "fifo", "regular"),
                       (Path("/dev/null"), "regular"), (Path("a\0b"), "not a path")):  # fmt: skip
        with pytest.raises(CheckpointError, match=says):
            open_checkpoint(path)


# --------------------------------------------------------------------------------------------- wrong architectures
@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"general.architecture": "gpt2"}, "architecture is 'gpt2'"),
        ({"llama.embedding_length": None}, "llama.embedding_length is missing"),
        ({"llama.attention.head_count": None}, "head_count is missing"),
        ({"llama.attention.head_count": "4"}, "must be one number"),
        ({"llama.attention.head_count": [4, 4]}, "must be one number"),
        ({"llama.attention.head_count": 0}, "above 0"),
        ({"llama.attention.head_count_kv": 3}, "multiple of n_kv_heads"),
        ({"llama.attention.head_count": 8}, "attn_q.weight has shape"),
        ({"llama.block_count": 3}, "has 3 layers"),
        ({"llama.block_count": 2**31}, "has 2147483648 layers"),
        ({"llama.feed_forward_length": 97}, "ffn_gate.weight has shape"),
        ({"llama.embedding_length": 2**31}, "have shape|has shape"),
        ({"llama.rope.dimension_count": 8}, "but the head dimension is"),
        ({"llama.rope.freq_base": 0.0}, "rope_theta"),
        ({"llama.expert_count": 8}, "mixture of 8 experts"),
        ({"llama.rope.scaling.type": "spiral"}, "spiral"),
        ({"split.count": 3, "split.no": 1}, r"part 1 \(from 0\) of 3"),
    ],
)
@pytest.mark.row("D10")
def test_metadata_that_contradicts_the_tensors_is_an_error(tmp_path: Path, metadata: dict[str, Any], says: str) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", metadata=metadata)
    with pytest.raises(LlamaError, match=says):
        loader.load_model(path, device="cpu")


def test_a_huge_context_allocates_nothing(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", metadata={"llama.context_length": 2**31})
    llm = loader.load(path, device="cpu", dtype="float32")
    assert len(llm.generate("hello", max_new_tokens=2).tokens) <= 2


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", without=("blk.1.ffn_up.weight",))
    with pytest.raises(CheckpointError, match=re.escape("1 tensor is missing: blk.1.ffn_up.weight")):
        loader.load_model(path)
    path = tiny.write_gguf(tmp_path / "y.gguf", extra={"blk.0.attn_norm.bias": torch.zeros(64)})
    with pytest.raises(CheckpointError, match=re.escape("1 tensor is unexpected: blk.0.attn_norm.bias")):
        loader.load_model(path)


def test_values_beyond_float16_are_an_error_not_infinity(tmp_path: Path) -> None:
    state = tiny.weights()
    state["norm.weight"][3] = 1e5
    path = tiny.write_gguf(tmp_path / "x.gguf", state=state)
    with pytest.raises(CheckpointError, match=r"norm.weight holds values beyond float16"):
        loader.load_model(path, dtype="float16", device="cpu")


def test_reading_never_changes_the_file(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny_gguf.read_bytes())
    model = loader.load_model(path, dtype="float32", device="cpu")
    model.norm.weight.fill_(9)  # float32 weights are in the mapped file; a write goes to a private copy
    assert path.read_bytes() == tiny_gguf.read_bytes()


def test_a_folder_may_hold_other_files_beside_a_gguf(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "model.gguf")
    for name in ("README.md", "a.txt", "zzz"):
        (tmp_path / name).write_text("words")
    assert set(open_checkpoint(tmp_path).shapes) == set(open_checkpoint(tmp_path / "model.gguf").shapes)


def test_a_header_is_limited_before_it_is_read(tmp_path: Path) -> None:
    """Files with holes: a few kilobytes on disk that claim millions of strings, entries or bytes."""

    def sparse(name: str, start: bytes, size: int) -> Path:
        path = tmp_path / name
        path.write_bytes(start)
        os.truncate(path, size)
        return path

    head = b"GGUF" + struct.pack("<I", 3)
    key = struct.pack("<Q", 1) + b"x"
    strings = head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, 10**8)
    numbers = head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 4, 10**9)
    entries = head + struct.pack("<QQ", 10**6, 1)
    cases = {"strings": (strings, "2,097,152 strings"), "numbers": (numbers, "at most 134,217,728"),
             "entries": (entries, "expected at most 32,768")}  # fmt: skip
    for name, (start, words) in cases.items():
        path = sparse(f"{name}.gguf", start, 2**33)
        used = time.process_time()
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(path)
        assert time.process_time() - used < 0.5
