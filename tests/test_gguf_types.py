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

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(3, 260, (1, 20), generator=torch.Generator().manual_seed(1))
WIDE = ModelConfig(256, 5, 4, 2, 64, 512, 320, norm_eps=2**-17, max_seq_len=256)
NORMAL = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
OUTLIERS = torch.tensor([5, 300])
WEIGHTS = {
    "normal": 0.05 * NORMAL,
    "zero": torch.zeros(8, 512),
    "positive": NORMAL.abs(),
    "negative": -NORMAL.abs(),
    "large": 1e5 * NORMAL,
    "outliers": (1e-2 * NORMAL).index_fill(1, OUTLIERS, 50),
    "beside zeros": torch.zeros(8, 512).index_fill(1, OUTLIERS, 3),
    "halves": (torch.arange(512) % 32 * 0.5).expand(8, 512).clone().index_fill(1, torch.arange(0, 512, 32), 127),
    "tiny": 1e-38 * NORMAL,
    "tiny outliers": torch.zeros(8, 512).index_fill(1, OUTLIERS, 1e-39),
    "tiny blocks": torch.cat((1e-39 * NORMAL[:, :256], NORMAL[:, 256:]), 1),
}


def dequantized(raw: Any, type: str) -> Tensor:
    raw = raw.numpy() if isinstance(raw, Tensor) else np.array(raw)
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type]))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_every_group_is_quantized_as_by_llama_cpp(type: str, kind: str) -> None:
    """The bytes of the package where it can quantize; otherwise an error of at most a step. Tiny groups become 0."""
    w = WEIGHTS[kind]
    raw = gguf_types.quantize(w, type)
    block, size = gguf_types.block_of(type)
    assert raw.shape == (8, 512 // block * size)
    back = dequantized(raw, type)
    assert torch.equal(READERS[type](raw.numpy()).weight, back)  # both readers agree on the bytes
    if type in ("Q8_0", "Q4_0", "Q5_0") and "tiny" not in kind:
        assert np.array_equal(raw.numpy(), gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType[type]))
    steps = {"Q8_0": 127, "Q4_0": 8, "Q5_0": 16, "Q4_K": 7, "Q6_K": 30}[type]
    largest = w.unflatten(1, (-1, block)).abs().amax(-1, keepdim=True)
    error = (back - w).unflatten(1, (-1, block)).abs()
    assert bool((error <= torch.where(largest < 1e-15, 1e-15, 1.02 * largest / steps)).all())
    assert not back[:, :256].any() or "tiny" not in kind
    assert not back[w == 0].any() or kind == "halves"
    for start in (0, 3):  # rows are independent of the piece in which they are quantized
        assert torch.equal(gguf_types.quantize(w[start : start + 2], type), raw[start : start + 2])


# llama.cpp's own quantizer has on these weights: Q4_K 0.0713, Q6_K 0.0177
ERRORS = {"Q8_0": 0.0055, "Q4_0": 0.088, "Q5_0": 0.044, "Q4_K": 0.072, "Q6_K": 0.0178}


@pytest.mark.parametrize("type", TYPES)
def test_the_error_is_at_most_that_of_llama_cpp(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = 0.05 * torch.randn(64, 1024, generator=torch.Generator().manual_seed(3))
    raw = gguf_types.quantize(w, type)
    assert (dequantized(raw, type) - w).norm() / w.norm() < ERRORS[type]
    monkeypatch.setattr(gguf_types, "PIECE", 5000)
    assert torch.equal(gguf_types.quantize(w.bfloat16(), type), gguf_types.quantize(w.bfloat16().float(), type))
    assert torch.equal(gguf_types.quantize(w, type), raw)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("value", [math.nan, 1e9, -3e38])
def test_a_weight_that_no_scale_can_hold_is_refused(type: str, value: float) -> None:
    w = NORMAL.clone()
    w[5, 100] = value
    with pytest.raises(CheckpointError, match="not finite, or too large"):
        gguf_types.quantize(w, type)


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
    assert table(dataclasses.replace(nine, tie_embeddings=True), "q4_0") == {"tok_embeddings": "Q6_K"}
    seventy = table(ModelConfig(256, 80, 4, 2, 64, 256, 266), "q4_k")
    down = [i for i in range(80) if f"layers.{i}.feed_forward.w_down" in seventy]
    assert down == [*range(10), *range(12, 70, 3), *range(70, 80)]
    odd = ModelConfig(576, 3, 9, 3, 64, 1536, 266)
    types = types_of(expected_shapes(odd), odd, "q4_k")
    assert types["layers.0.attention.wq.weight"] == "Q5_0"
    assert types["output.weight"] == "Q8_0"
    assert {types[f"layers.{i}.feed_forward.w_down.weight"] for i in range(3)} == {"Q4_K", "Q6_K"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("wide") / "wide.gguf", WIDE, quantization="BF16")


@pytest.mark.parametrize("kind", MIXES)
def test_a_file_is_read_by_the_gguf_package_and_by_us(source: Path, tmp_path: Path, kind: str) -> None:
    proof = convert(source, tmp_path / "out.gguf", "gguf", quantize=kind)
    assert proof.warnings == []
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert int(reader.fields["general.file_type"].parts[-1][0]) == MIXES[kind].file_type
    checkpoint, types = open_checkpoint(tmp_path / "out.gguf"), types_of(expected_shapes(WIDE), WIDE, kind)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    for name in checkpoint.shapes:
        tensor = theirs[checkpoint.file_name(name)]
        assert tuple(reversed(tensor.shape.tolist())) == checkpoint.shapes[name]
        assert torch.equal(dequantized(tensor.data, tensor.tensor_type.name), checkpoint.tensor(name))
        assert checkpoint.stored(name) == types.get(name, "F32")
    before, after = (llama.load_model(path, dtype="float32", device="cpu")(TOKENS) for path in (source, proof.path))
    assert 0 < (before - after).square().mean() < 0.2 * before.var()


def test_what_can_not_be_written_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown quantization of GGUF files 'q3_k'; known: q8_0, q4_0, q4_k"):
        convert(source, tmp_path / "out", "gguf", quantize="q3_k")
    narrow = tiny.write_gguf(tmp_path / "narrow.gguf", dataclasses.replace(tiny.CONFIG, hidden_dim=90))
    with pytest.raises(CheckpointError, match="rows of 90 weights, no multiple of 32"):
        convert(narrow, tmp_path / "out", "gguf", quantize="q8_0")
