"""Weights of few bits: a file's blocks taken apart are its numbers, rounding errs by half a step, packing loses nothing."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from llama.checkpoint.blocks import READERS
from llama.checkpoint.tiles import pack, unpack, unpack_rows
from llama.errors import UsageError
from llama.quant import SCHEMES, pick_scheme, quantize


def random_blocks(name: str, rows: int, blocks: int) -> np.ndarray:
    """Random bytes as blocks of a type, with sane float16 scales in front. (rows, bytes)."""
    kind = gguf.GGMLQuantizationType[name]
    size = gguf.constants.GGML_QUANT_SIZES[kind][1]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    scales = rng.uniform(-0.1, 0.1, (rows, blocks, 2)).astype(np.float16).view(np.uint8)
    width = 2 if name in ("Q4_0", "Q8_0") else 4
    raw[:, :, :width] = scales[:, :, :width]
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", READERS)
def test_scale_times_quant_plus_offset_is_the_weight(name: str) -> None:
    raw = random_blocks(name, rows=6, blocks=3)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    np.testing.assert_allclose(READERS[name](raw).weight.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", [(48, 576), (37, 200), (16, 128)])
def test_packing_loses_nothing(name: str, shape: tuple[int, int]) -> None:
    scheme = SCHEMES[name]
    blocks = quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)), scheme)
    kind = (scheme.bits, scheme.group, scheme.offset)
    back = unpack(pack(blocks), *shape, *kind)
    assert torch.equal(back.quants, blocks.quants)
    torch.testing.assert_close(back.weight, blocks.weight, rtol=0, atol=0)
    ids = torch.tensor([0, shape[0] - 1, 5])
    torch.testing.assert_close(unpack_rows(pack(blocks), ids, shape[1], *kind), blocks.weight[ids], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "most"), [("int8", 0.006), ("int8-row", 0.012), ("int4", 0.085), ("int4-sym", 0.1)])
def test_rounding_errs_by_no_more_than_so_many_bits_must(name: str, most: float) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    error = float((quantize(weight, SCHEMES[name]).weight - weight).norm() / weight.norm())
    assert most / 3 < error < most


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(UsageError, match="'int3'"):
        pick_scheme("int3")
