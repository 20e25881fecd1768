"""The linear layers of a GPU: the order of the quantized weights, and layers that are views of a joined one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from llama.engine.fused import join, tensors
from llama.engine.linears import BlockLinear
from llama.errors import UsageError
from llama.quant.blocks import Blocks
from llama.quant.rounding import quantize
from llama.quant.schemes import SCHEMES

pytestmark = pytest.mark.usefixtures("one_thread")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(weight: Tensor, scheme: str) -> Blocks:
    return quantize(weight, SCHEMES[scheme].format)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("rows", "columns"), [(5, 96), (3, 200), (4, 33)])
def test_quantized_weights_are_stored_in_the_order_of_the_kernels(scheme: str, rows: int, columns: int) -> None:
    blocks = quantized(noise(rows, columns), scheme)
    weight = BlockLinear(blocks).packed
    for n in range(rows):
        for k in range(columns):
            group, inside = (k // weight.group, k % weight.group) if weight.scale.shape[1] > 1 else (0, k)
            if weight.bits == 8:
                stored = int(weight.data[n, k])
            else:
                words = weight.group // 8  # word w holds inputs w, w + words, w + 2 words, ... from bit 0 up
                stored = int(weight.data[n, group * words + inside % words]) >> 4 * (inside // words) & 15
            assert stored == int(blocks.quants[n, k])
    assert torch.equal(weight.scale.float(), blocks.scale)
    assert (weight.offset is None) == (blocks.offset is None)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_multiplies_by_the_dequantized_weight(scheme: str) -> None:
    blocks = quantized(noise(6, 200), scheme)
    layer = BlockLinear(blocks, noise(6, seed=1))
    torch.testing.assert_close(layer.weight, blocks.weight, rtol=1e-6, atol=1e-6)
    index = torch.tensor([[5, 0], [2, 2]])
    torch.testing.assert_close(layer.rows(index), blocks.weight[index], rtol=1e-6, atol=1e-6)
    x = noise(2, 3, 200, seed=2)
    expected = x.double() @ blocks.weight.double().T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_cast_of_the_model_does_not_change_the_scales() -> None:
    layer = BlockLinear(quantized(noise(6, 96), "int4"), noise(6))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    for cast in (nn.Module.bfloat16, nn.Module.double, lambda module: module.to("cpu", torch.float16)):
        cast(nn.Sequential(layer))
        assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())
        assert all(buffer.dtype == before[name].dtype for name, buffer in layer.named_buffers())


def test_scales_are_stored_in_16_bits_only_if_that_is_exact() -> None:
    blocks = quantized(noise(4, 64), "int8")
    assert BlockLinear(blocks).scale.dtype == torch.float16
    finer = blocks._replace(scale=blocks.scale * (1 + 2**-15))
    assert BlockLinear(finer).scale.dtype == torch.float32
    torch.testing.assert_close(BlockLinear(finer).weight, finer.weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
@pytest.mark.parametrize("sizes", [(6, 2, 2), (4, 4)])
def test_joined_layers_become_views_of_one_layer_with_the_same_outputs(
    scheme: str | None, sizes: tuple[int, ...]
) -> None:
    layers: list[nn.Module] = []
    for seed, size in enumerate(sizes):
        linear = nn.Linear(64, size).requires_grad_(False)
        linear.weight.copy_(noise(size, 64, seed=seed))
        linear.bias.copy_(noise(size, seed=10 + seed))
        layers.append(linear if scheme is None else BlockLinear(quantized(linear.weight, scheme), linear.bias))
    x = noise(3, 64, seed=5)
    before = [layer(x) for layer in layers]
    one = join(layers)
    torch.testing.assert_close(one(x), torch.cat(before, -1))
    assert one.out_features == sum(sizes)
    for layer, y in zip(layers, before, strict=True):
        torch.testing.assert_close(layer(x), y)
        assert all(tensor.is_contiguous() for _, tensor in tensors(layer))  # otherwise no kernel multiplies by it
    for name, joined in tensors(one):
        parts = [dict(tensors(layer))[name] for layer in layers]
        assert {part.untyped_storage().data_ptr() for part in parts} == {joined.untyped_storage().data_ptr()}
    layers[0].bias.fill_(9)
    assert int((one.bias == 9).sum()) == sizes[0]


def test_layers_of_different_kinds_are_not_joined() -> None:
    blocks = [quantized(noise(4, 64), scheme) for scheme in ("int8", "int4")]
    with pytest.raises(UsageError, match="require the same quantization"):
        join([BlockLinear(block) for block in blocks])
    with pytest.raises(UsageError, match="require the same quantization"):
        join([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
