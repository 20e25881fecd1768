"""All C++ operators at the edges of their inputs, against float64. tests/test_sanitized.py runs this with sanitizers.

Every tensor has a memory block of its own size, so reading beyond its end is noticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from llama.engine import kernels
from llama.quant.tiles import scales_of, unpack

from .test_kernels import KINDS, attention, causal, layer, normal, product, random_blocks

OUT = (1, 15, 16, 17, 33)
WIDTHS = (1, 15, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)
WRONG = (torch.nan, torch.inf, -torch.inf)


def products() -> None:
    """linear_blocks: 1 to 17 rows, for every kind of weight and dtype of x."""
    shapes = itertools.cycle(itertools.product(OUT, WIDTHS))
    for kind, rows in itertools.product(KINDS, range(1, 18)):
        n, k = next(shapes)
        blocks = random_blocks(n, k, *kind)
        linear = layer(blocks)
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2**-6)):  # ties may be rounded differently
            x = normal(rows, k).to(dtype)
            room = bound * (x.double().abs() @ blocks.weight.double().abs().T)
            gap = (linear(x).double() - torch.from_numpy(product(x, blocks))).abs()
            assert bool((gap <= room).all()), (kind, rows, n, k, dtype)
            x[rows // 2, k - 1] = WRONG[rows % 3]
            y = linear(x)
            finite = y.isfinite().all(1)
            assert finite.tolist() == [row != rows // 2 for row in range(rows)], (kind, rows, n, k, dtype)


def quantization() -> None:
    """quantize_to_tiles: every weight is at most half a step from its quantized value."""
    for kind, n, k in itertools.product(KINDS, OUT, WIDTHS):
        for dtype in (torch.float32, torch.bfloat16):
            weight = normal(n, k, seed=n + k).to(dtype)
            tiles = kernels.quantize_to_tiles(weight, (1.0,), *kind)
            blocks = unpack(tiles, n, k, *kind)
            steps = blocks.scale.repeat_interleave(blocks.group or k, 1)[:, :k].double()
            gap = (blocks.weight.double() - weight.double()).abs()
            # Rounding the scale and the offset to float16 moves the ends of the range.
            room = steps * 0.5 + weight.double().abs().amax(1, keepdim=True) * 2**-9
            assert bool((gap <= room).all()), (kind, n, k, dtype)
            kernels.quantize_to_tiles(weight, (1.0, 0.9, 0.8), *kind)
            weight[n - 1, k - 1] = WRONG[n % 3]
            scales = scales_of(kernels.quantize_to_tiles(weight, (1.0,), *kind), k, *kind)
            assert int((~scales[:, :, 0].isfinite()).sum()) == 1, (kind, n, k, dtype)


def bfloat16_products() -> None:
    """linear_bf16: 1 to 17 rows, with and without a bias, and a weight that is not aligned."""
    for rows, n, k in itertools.product(range(1, 18), OUT, (1, 31, 32, 33, 64, 65, 97)):
        x, store, bias = normal(rows, k).bfloat16(), normal(n * k + 1, seed=1).bfloat16(), normal(n, seed=2).bfloat16()
        weight = store[1:].view(n, k)
        y = kernels.linear_bf16(x, weight, bias if rows % 2 else None).double()
        exact = x.double() @ weight.double().T + (bias.double() if rows % 2 else 0)
        room = exact.abs() * 2**-8 + (x.double().abs() @ weight.double().abs().T) * 1e-6
        assert bool(((y - exact).abs() <= room).all()), (rows, n, k)
        x[0, k - 1] = WRONG[n % 3]
        assert not bool(kernels.linear_bf16(x, weight, None)[0].isfinite().any())


def masks(t: int, s: int, batch: int) -> Iterator[Tensor | None]:
    """No mask, the causal mask, a mask for each text, in which one query sees nothing."""
    yield None
    if s >= t:
        yield causal(t, s)
    mask = torch.rand(batch, 1, t, s, generator=torch.Generator().manual_seed(s)) < 0.4
    mask[-1, 0, t // 2] = False
    yield mask


def attentions() -> None:
    """Attend: every head_dim, few and many keys, in all dtypes, in memory blocks that end with the last key."""
    sizes = itertools.cycle((1, 15, 16, 17, 31, 33, 255, 257))
    heads = itertools.cycle(((1, 1), (3, 1), (6, 2), (8, 2), (3, 3)))
    for d, t in itertools.product(range(16, 257, 16), (1, 2, 5)):
        s, (h, kv), batch = next(sizes), next(heads), 2
        q = normal(batch, h, t, d)
        k, v = (normal(batch, s, kv, d, seed=seed).transpose(1, 2) for seed in (1, 2))  # keys `kv` rows apart
        k8, v8 = ((x * 30).round().clamp(-127, 127).to(torch.int8) for x in (k, v))
        scales = [torch.rand(batch, kv, s, generator=torch.Generator().manual_seed(seed)) / 30 for seed in (3, 4)]
        k64, v64 = (x.double() * scale[..., None] for x, scale in zip((k8, v8), scales, strict=True))
        for mask in masks(t, s, batch):
            where = (d, t, h, kv, s, mask is None)
            torch.testing.assert_close(
                kernels.attend(q, k, v, mask).double(), attention(q, k, v, mask), rtol=1e-5, atol=2e-6, msg=str(where)
            )
            low = [x.bfloat16() for x in (q, k, v)]
            torch.testing.assert_close(
                kernels.attend(*low, mask).double(), attention(*low, mask), rtol=2**-8, atol=1e-5, msg=str(where)
            )
            for dtype, bound in ((torch.float32, 3e-4), (torch.bfloat16, 2**-8)):
                y = kernels.attend(q.to(dtype), k8, v8, mask, *scales).double()
                expected = attention(q.to(dtype), k64, v64, mask)
                assert float((y - expected).norm()) <= bound * float(expected.norm()), where
        q[0, 0, t - 1, d - 1] = WRONG[s % 3]
        y = kernels.attend(q, k, v, None)
        assert bool(y[0, 0, t - 1].isnan().all()), where
        y[0, 0, t - 1] = 0
        assert bool(y.isfinite().all()), where
        empty = kernels.attend(q, k[:, :, :0], v[:, :, :0], None)
        assert torch.equal(empty, torch.zeros(batch, h, t, d))


CHECKS = (products, quantization, bfloat16_products, attentions)


def main() -> None:
    """Run all checks."""
    assert kernels.ready()
    for check in CHECKS:
        check()


if __name__ == "__main__":
    main()
