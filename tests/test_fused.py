"""The layers of a GPU: integers in the kernels' order, and layers that are views of one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from llama.engine import linears as quant
from llama.engine.fused import join
from llama.engine.linears import SCHEMES, BlockLinear
from llama.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("rows", "columns"), [(5, 96), (3, 200), (4, 33)])
def test_integers_lie_as_the_kernels_read_them(scheme: str, rows: int, columns: int) -> None:
    blocks = quant.quantize(noise(rows, columns), SCHEMES[scheme])
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
def test_a_layer_multiplies_by_the_rounded_weight(scheme: str) -> None:
    blocks = quant.quantize(noise(6, 200), SCHEMES[scheme])
    layer = BlockLinear(blocks, noise(6, seed=1))
    torch.testing.assert_close(layer.weight, blocks.weight, rtol=1e-6, atol=1e-6)
    index = torch.tensor([[5, 0], [2, 2]])
    torch.testing.assert_close(layer.rows(index), blocks.weight[index], rtol=1e-6, atol=1e-6)
    x = noise(2, 3, 200, seed=2)
    expected = x.double() @ blocks.weight.double().T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_cast_of_the_model_leaves_the_scales() -> None:
    layer = BlockLinear(quant.quantize(noise(6, 96), SCHEMES["int4"]), noise(6))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    for cast in (nn.Module.bfloat16, nn.Module.double, lambda module: module.to("cpu", torch.float16)):
        cast(nn.Sequential(layer))
        assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())
        assert all(buffer.dtype == before[name].dtype for name, buffer in layer.named_buffers())


def test_scales_take_16_bits_where_nothing_is_lost() -> None:
    blocks = quant.quantize(noise(4, 64), SCHEMES["int8"])
    assert BlockLinear(blocks).scale.dtype == torch.float16
    finer = blocks._replace(scale=blocks.scale * (1 + 2**-15))
    assert BlockLinear(finer).scale.dtype == torch.float32
    torch.testing.assert_close(BlockLinear(finer).weight, finer.weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
@pytest.mark.parametrize("in_turn", [False, True])
def test_joined_layers_are_views_of_one_that_gives_what_they_give(scheme: str | None, in_turn: bool) -> None:
    sizes = (4, 4) if in_turn else (6, 2, 2)
    layers: list[nn.Module] = []
    for seed, size in enumerate(sizes):
        linear = nn.Linear(64, size).requires_grad_(False)
        linear.weight.copy_(noise(size, 64, seed=seed))
        linear.bias.copy_(noise(size, seed=10 + seed))
        kind = None if scheme is None else SCHEMES[scheme]
        layers.append(linear if kind is None else BlockLinear(quant.quantize(linear.weight, kind), linear.bias))
    x = noise(3, 64, seed=5)
    before = [layer(x) for layer in layers]
    one = join(layers, in_turn)
    expected = torch.stack(before, -1).flatten(-2) if in_turn else torch.cat(before, -1)
    torch.testing.assert_close(one(x), expected)
    assert one.out_features == sum(sizes)
    for layer, y in zip(layers, before, strict=True):
        torch.testing.assert_close(layer(x), y)
    for (name, whole), part in zip(quant_tensors(one), range(99), strict=False):
        assert part < 99
        pieces = [dict(quant_tensors(layer))[name] for layer in layers]
        assert {piece.untyped_storage().data_ptr() for piece in pieces} == {whole.untyped_storage().data_ptr()}
    layers[0].bias.fill_(9)
    assert int((one.bias == 9).sum()) == sizes[0]


def quant_tensors(layer: nn.Module) -> list[tuple[str, Tensor]]:
    return [*layer.named_parameters(), *layer.named_buffers()]


def test_layers_of_different_kinds_are_not_joined() -> None:
    blocks = [quant.quantize(noise(4, 64), SCHEMES[scheme]) for scheme in ("int8", "int4")]
    with pytest.raises(UsageError, match="of one kind"):
        join([BlockLinear(block) for block in blocks])
    with pytest.raises(UsageError, match="of one kind"):
        join([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
