"""Quantized weights of a file on a GPU: which stay packed, with which values and bytes. No GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from llama.checkpoint import Checkpoint, open_checkpoint
from llama.engine import triton_kernels
from llama.engine.linears import BlockLinear, gpu_format
from llama.engine.quantized_weight import QuantizedWeight
from llama.quant.blocks import READERS
from llama.quant.schemes import SCHEMES
from llama.tools.quantize import quantize
from llama.weights import Storage, dequantization_warning, joins_equal, memory_footprint, read_weight

from . import tiny

CUDA = torch.device("cuda")
STORAGE = Storage(torch.bfloat16, None, keep_blocks=True, layout="interleaved")


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loader choose as if Triton and a GPU were here; nothing is launched."""
    monkeypatch.setattr(triton_kernels, "ready", lambda: True)


@pytest.mark.parametrize("type", READERS)
def test_a_type_stays_packed_if_the_kernel_for_one_row_supports_its_layer(type: str) -> None:
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    raw = np.random.default_rng(0).integers(0, 48, (4, 2 * size), np.uint8)
    blocks = READERS[type](raw)
    assert (gpu_format(blocks) is not None) == triton_kernels.supports(BlockLinear(blocks).packed)
    assert (gpu_format(blocks) is None) == (type in ("Q2_K", "Q3_K", "Q6_K", "IQ1_M", "IQ2_XS", "IQ2_S", "NVFP4"))


def sources(folder: Path, kind: str) -> Checkpoint:
    """A checkpoint that stores its matrices in a type of GGUF or a scheme."""
    config = replace(tiny.WIDE, tie_embeddings=False)
    path = tiny.write_gguf(folder / "x.gguf", config, quantization="F32" if kind in SCHEMES else kind)
    return open_checkpoint(quantize(path, folder / "saved", kind).path if kind in SCHEMES else path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "int4", "int8"])
def test_packed_weights_have_the_values_of_the_file_and_the_counted_bytes(tmp_path: Path, kind: str) -> None:
    checkpoint, total, packed = sources(tmp_path, kind), 0, []
    for name, shape in checkpoint.shapes.items():
        weight = read_weight(checkpoint, name, CUDA, STORAGE) if len(shape) == 2 and "embed" not in name else None
        if weight is None:
            total += 2 * int(np.prod(shape))
            continue
        assert isinstance(weight, QuantizedWeight), name
        layer = BlockLinear(weight.blocks())
        torch.testing.assert_close(layer.weight, checkpoint.tensor(name).float(), rtol=1e-6, atol=1e-7)
        total += sum(buffer.nbytes for buffer in layer.buffers())
        packed.append(name)
    assert len(packed) == 7 * checkpoint.config.n_layers + 1
    assert memory_footprint(checkpoint, checkpoint.shapes, CUDA, STORAGE) == pytest.approx(total, rel=0.06)
    assert dequantization_warning(checkpoint, lambda name: CUDA, STORAGE) == []
    assert joins_equal(checkpoint)


def test_weights_without_a_kernel_are_dequantized_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = sources(tmp_path, "Q4_1")
    monkeypatch.setattr(triton_kernels, "ready", lambda: False)
    [line] = dequantization_warning(checkpoint, lambda name: CUDA, STORAGE)
    assert line.startswith("on the GPU, weights stored as Q4_1 are dequantized to bfloat16, because ")
    assert memory_footprint(checkpoint, checkpoint.shapes, CUDA, STORAGE) == 2 * checkpoint.config.n_params
    assert dequantization_warning(checkpoint, lambda name: torch.device("cpu"), STORAGE) == []
