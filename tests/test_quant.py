"""4-bit weights: the file's blocks taken apart are its numbers, and decoding from them is as exact as from bfloat16."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import llama
from llama.checkpoint.blocks import READERS
from llama.config import ModelConfig
from llama.errors import UsageError
from llama.loader import load_model
from llama.quant import FEW_ROWS, Int4Linear, runs_int4
from llama.runtime import PackedLinear
from llama.text import Llama

from . import tiny

needs_kernel = pytest.mark.skipif(
    not (runs_int4(64, 64) and torch.cpu._is_avx512_bf16_supported()), reason="the 4-bit kernel wants AVX-512"
)
WIDE = ModelConfig(128, 2, 4, 2, 32, 256, 320, norm_eps=2**-17, max_seq_len=256)


def random_blocks(name: str, rows: int, blocks: int) -> np.ndarray:
    """Random bytes as blocks of a type, with sane float16 scales in front. (rows, bytes)."""
    kind = gguf.GGMLQuantizationType[name]
    size = gguf.constants.GGML_QUANT_SIZES[kind][1]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    scales = rng.uniform(-0.1, 0.1, (rows, blocks, 2)).astype(np.float16).view(np.uint8)
    width = 2 if name == "Q4_0" else 4
    raw[:, :, :width] = scales[:, :, :width]
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", READERS)
def test_scale_times_quant_plus_offset_is_the_weight(name: str) -> None:
    raw = random_blocks(name, rows=6, blocks=3)
    blocks = READERS[name](raw)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert blocks.quants.shape == expected.shape
    assert blocks.quants.max() == 15
    weight = blocks.scale.repeat(32, 1) * blocks.quants + blocks.offset.repeat(32, 1)
    np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)


@needs_kernel
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_the_layer_multiplies_by_that_weight(name: str, rows: int) -> None:
    raw = random_blocks(name, rows=48, blocks=2 if name == "Q4_K" else 8)
    weight = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]))  # (48, N)
    plain = torch.nn.Linear(weight.shape[1], 48, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    plain.weight.copy_(weight)
    layer = Int4Linear(READERS[name](raw), wide=PackedLinear(plain.weight))
    x = torch.randn(2, rows, weight.shape[1]).bfloat16()[:1]
    expected = F.linear(x.float(), weight)
    assert float((layer(x).float() - expected).norm() / expected.norm()) < 0.02
    assert torch.equal(layer.weight, plain.weight)


@needs_kernel
def test_rows_may_lie_apart_in_memory(tmp_path: Path) -> None:
    model = llama.load(
        tiny.write_gguf(tmp_path / "x.gguf", WIDE, quantization="Q4_1"), device="cpu", dtype="bfloat16"
    ).model
    layer = model.layers[0].attention.wq
    x = torch.randn(3, 4, 128).bfloat16()
    for view in (x[:, -1], x[:, 1:2], x[0].mT.contiguous().mT, x[:1, :1].expand(2, 1, 128)):
        torch.testing.assert_close(layer(view), layer(view.contiguous()))
    with pytest.raises(UsageError, match="load_model"):
        model.float()


@needs_kernel
@pytest.mark.parametrize("form", ["complex", "half"])
def test_a_model_decodes_from_the_files_blocks(tmp_path: Path, form: str) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", WIDE, quantization="Q4_1")
    llm = llama.load(path, device="cpu", dtype="bfloat16", rope=form)
    assert isinstance(llm.model.layers[0].attention.wq, Int4Linear)
    exact = load_model(path, device="cpu", dtype="float32")
    tokens = tiny.random_tokens(20, WIDE)
    cache = llm.model.new_cache()
    steps = torch.cat([llm.model(tokens[:, i : i + 1], cache=cache) for i in range(20)], dim=1)
    expected = exact(tokens)
    assert float((steps - expected).norm() / expected.norm()) < 0.03


@needs_kernel
def test_it_is_as_exact_as_bfloat16_on_the_real_model(default_gguf: Path, default_llm: Llama) -> None:
    ids = default_llm.tokenizer.encode("The capital of France is Paris, and the capital of Italy is Rome.")
    tokens = torch.tensor([ids])
    expected = default_llm.model(tokens)

    def error(model: llama.Transformer) -> float:
        cache = model.new_cache()
        steps = torch.cat([model(tokens[:, i : i + 1], cache=cache) for i in range(len(ids))], dim=1)
        return float((steps - expected).norm() / expected.norm())

    from_blocks = error(llama.load(default_gguf, device="cpu", dtype="bfloat16").model)
    assert from_blocks < 1.25 * error(load_model(default_gguf, device="cpu", dtype="bfloat16")) < 0.05


def test_float32_uses_the_weights_as_dequantized(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", WIDE, quantization="Q4_1")
    llm = llama.load(path, device="cpu", dtype="float32")
    assert isinstance(llm.model.layers[0].attention.wq, torch.nn.Linear)
