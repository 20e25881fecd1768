"""Quantized GGUF files: the integers of the gguf package, which are llama.cpp's, and llama.cpp's choice of types."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import llama
from llama.checkpoint import open_checkpoint
from llama.config import ModelConfig
from llama.errors import CheckpointError, UsageError
from llama.quant import gguf_types
from llama.quant.blocks import READERS
from llama.quant.gguf_types import MIXES, TYPES, types_of
from llama.tools.convert import convert
from llama.weights import expected_shapes

from . import test_adapters, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(3, 260, (1, 20), generator=torch.Generator().manual_seed(1))
WIDE = ModelConfig(256, 5, 4, 2, 64, 512, 320, norm_eps=2**-17, max_seq_len=256)


def weight(rows: int = 32, columns: int = 1024) -> Tensor:
    """Random rows, and rows of zeros, of one sign, with tiny and large values, and with quants halfway between two."""
    w = 0.05 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    w[0], w[1], w[2], w[3], w[4] = 0, w[1].abs(), -w[2].abs(), 1e-6 * w[3], 1e4 * w[4]
    w[5] = torch.arange(columns) % 32 * 0.5
    w[5, ::32] = 127
    w[6, 32:] = 0
    w[7] = 1
    return w


def dequantized(raw: Any, type: str) -> Tensor:
    raw = raw.numpy() if isinstance(raw, Tensor) else np.array(raw)
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type]))


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "Q5_0"])
def test_the_bytes_are_those_of_the_gguf_package(type: str) -> None:
    ours = gguf_types.quantize(weight(), type).numpy()
    assert np.array_equal(ours, gguf.quants.quantize(weight().numpy(), gguf.GGMLQuantizationType[type]))


@pytest.mark.parametrize("type", TYPES)
def test_both_readers_agree_on_the_bytes(type: str) -> None:
    raw = gguf_types.quantize(weight(), type).numpy()
    assert torch.equal(READERS[type](raw).weight, dequantized(raw, type))
    assert raw.nbytes == TYPES[type].size((32, 1024))


# llama.cpp's own quantizer has on these weights: Q4_K 0.0713, Q5_K 0.0361, Q6_K 0.0177
ERRORS = {"Q8_0": 0.0055, "Q4_0": 0.088, "Q5_0": 0.044, "Q4_K": 0.072, "Q5_K": 0.0362, "Q6_K": 0.0178}


@pytest.mark.parametrize("type", TYPES)
def test_the_error_is_at_most_that_of_llama_cpp(type: str) -> None:
    w = 0.05 * torch.randn(64, 1024, generator=torch.Generator().manual_seed(3))
    error = (dequantized(gguf_types.quantize(w, type), type) - w).norm() / w.norm()
    assert error < ERRORS[type]


@pytest.mark.parametrize("type", TYPES)
def test_special_rows_stay_close(type: str) -> None:
    """Of each block, the error is at most a step of its range; zeros stay zeros."""
    w = weight()
    back = dequantized(gguf_types.quantize(w, type), type)
    steps = {"Q8_0": 127, "Q4_0": 8, "Q5_0": 16, "Q4_K": 7, "Q5_K": 14, "Q6_K": 30}[type]
    largest = w.unflatten(1, (-1, TYPES[type].block)).abs().amax(-1, keepdim=True)
    error = (back - w).unflatten(1, (-1, TYPES[type].block)).abs()
    normal = largest > 1e-5  # float16 can't hold the scales of smaller blocks exactly
    assert bool((error <= 1.01 * largest / steps)[normal.expand_as(error)].all())
    assert not back[0].any()
    assert torch.isfinite(back).all()


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e9])
def test_a_weight_that_no_scale_can_hold_is_refused(type: str, value: float) -> None:
    w = weight()
    w[9, 100] = value
    with pytest.raises(CheckpointError, match="not finite, or too large"):
        gguf_types.quantize(w, type)


# ------------------------------------------------------------------------------------------------ the choice of types
def table(config: ModelConfig, kind: str) -> dict[str, str]:
    """The types that are not the kind's own, by the layers' short names."""
    found = types_of(expected_shapes(config), config, kind)
    return {name.removesuffix(".weight"): type for name, type in found.items() if type != MIXES[kind].type}


def test_the_types_are_those_that_llama_cpp_chose() -> None:
    """What llama_model_quantize of llama.cpp (llama-cpp-python 0.3.36) chose for models of these sizes."""
    nine = ModelConfig(512, 9, 8, 4, 64, 768, 266)
    more = [0 + 3, 6, 0, 7, 8]  # with one layer in the first eighth, and two in the last
    expected = {f"layers.{i}.{part}": "Q6_K" for i in more for part in ("attention.wv", "feed_forward.w_down")}
    assert table(nine, "q4_k") == {**expected, "output": "Q6_K"}
    assert table(nine, "q4_0") == {"output": "Q6_K"}
    assert table(nine, "q8_0") == {}
    tied = dataclasses.replace(nine, tie_embeddings=True)
    assert table(tied, "q4_0") == {"tok_embeddings": "Q6_K"}
    seventy = table(ModelConfig(256, 80, 4, 2, 64, 256, 266), "q4_k")
    values = [seventy[f"layers.{i}.attention.wv"] for i in range(80)]
    assert [i for i, type in enumerate(values) if type == "Q6_K"] == [*range(10), *range(12, 70, 3), *range(70, 80)]
    assert set(values) == {"Q6_K", "Q5_K"}
    odd = types_of(
        expected_shapes(ModelConfig(576, 3, 9, 3, 64, 1536, 266)), ModelConfig(576, 3, 9, 3, 64, 1536, 266), "q4_k"
    )
    assert odd["layers.0.attention.wq.weight"] == "Q5_0"
    assert odd["output.weight"] == "Q8_0"
    assert {odd[f"layers.{i}.feed_forward.w_down.weight"] for i in range(3)} == {"Q4_K", "Q6_K"}


# ------------------------------------------------------------------------------------------------------------ files
@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("wide") / "wide.gguf", WIDE, quantization="BF16")


@pytest.mark.parametrize("kind", MIXES)
def test_a_file_is_read_by_the_gguf_package_and_by_us(source: Path, tmp_path: Path, kind: str) -> None:
    proof = convert(source, tmp_path / "out.gguf", "gguf", quantize=kind)
    assert proof.warnings == []
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert int(reader.fields["general.file_type"].parts[-1][0]) == MIXES[kind].file_type
    checkpoint, original = open_checkpoint(tmp_path / "out.gguf"), open_checkpoint(source)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    for name in checkpoint.shapes:
        tensor = theirs[checkpoint.file_name(name)]
        assert tuple(reversed(tensor.shape.tolist())) == checkpoint.shapes[name]
        assert torch.equal(dequantized(tensor.data, tensor.tensor_type.name), checkpoint.tensor(name))
        expected = "F32" if len(checkpoint.shapes[name]) == 1 else types_of(WIDE_SHAPES, WIDE, kind)[name]
        assert checkpoint.stored(name) == expected
        if expected in ("Q8_0", "Q4_0"):
            again = gguf.quants.quantize(original.tensor(name).float().numpy(), gguf.GGMLQuantizationType[expected])
            assert np.array_equal(again, tensor.data)
    before, after = (llama.load_model(path, dtype="float32", device="cpu")(TOKENS) for path in (source, proof.path))
    assert 0 < (before - after).square().mean() < 0.2 * before.var()
    assert convert(source, tmp_path / "again.gguf", "gguf", quantize=kind).sha256 == proof.sha256


WIDE_SHAPES = expected_shapes(WIDE)


def test_an_adapter_is_merged_before_a_file_is_quantized(tmp_path: Path) -> None:
    base = tiny.write_gguf(tmp_path / "base.gguf", quantization="F32")
    lora_base = convert(base, tmp_path / "hf", "hf").path
    path, _ = test_adapters.simple(lora_base, tmp_path / "adapter")
    merged = convert(base, tmp_path / "merged.gguf", "gguf", adapters=path).path
    files = [convert(base, tmp_path / "a.gguf", "gguf", quantize="q4_0", adapters=path).path,
             convert(merged, tmp_path / "b.gguf", "gguf", quantize="q4_0").path]  # fmt: skip
    a, b = ({tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors} for file in files)
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_quantizing_twice_is_a_warning(source: Path, tmp_path: Path) -> None:
    first = convert(source, tmp_path / "a.gguf", "gguf", quantize="q8_0").path
    second = convert(first, tmp_path / "b.gguf", "gguf", quantize="q8_0")
    assert second.warnings == [
        "the source is already quantized (Q8_0); quantizing the original would lose less accuracy"
    ]
    one, two = (open_checkpoint(path) for path in (first, second.path))
    assert all(torch.equal(one.tensor(name), two.tensor(name)) for name in one.shapes)


def test_what_can_not_be_written_is_refused(source: Path, tmp_path: Path) -> None:
    for options, says in (
        ({"to": "hf", "quantize": "q8_0"}, "--quantize q8_0 needs --to gguf"),
        ({"to": "gguf", "quantize": "q3_k"}, "unknown quantization of GGUF files 'q3_k'; known: q8_0, q4_0, q4_k"),
        ({"to": "gguf", "quantize": "q8_0", "dtype": torch.float16}, "no --dtype"),
    ):
        with pytest.raises(UsageError, match=says):
            convert(source, tmp_path / "out", options.pop("to"), **options)
    narrow = tiny.write_gguf(tmp_path / "narrow.gguf", dataclasses.replace(tiny.CONFIG, hidden_dim=90))
    with pytest.raises(
        CheckpointError, match=r"w_down.weight has rows of 90 weights.*multiples of 32.*without --quantize"
    ):
        convert(narrow, tmp_path / "out", "gguf", quantize="q8_0")
    assert not (tmp_path / "out").exists()
