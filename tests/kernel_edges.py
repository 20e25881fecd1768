"""All C++ operators at the edges of their inputs, against float64. tests/test_sanitized.py runs this with sanitizers.

Every tensor has a memory block of its own size, so reading beyond its end is noticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llama.cache import hadamard
from llama.checkpoint.weight import MemoryWeight
from llama.config import ModelConfig
from llama.engine import kernels
from llama.engine.cpu_runner import KernelRunner
from llama.engine.linears import make_linear
from llama.model import Runner, Transformer
from llama.quant.gguf_types import block_of
from llama.quant.groups import READERS
from llama.quant.schemes import pick_scheme
from llama.quant.tiles import pack, scales_of, unpack

from . import tiny
from .test_kernels import KINDS, PLAIN_KINDS, attention, causal, layer, normal, product, random_blocks

OUT = (1, 15, 16, 17, 33)
WIDTHS = (1, 15, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)
WRONG = (torch.nan, torch.inf, -torch.inf)


def products() -> None:
    """linear_blocks: 1 to 17 rows (with AMX 15), for every kind of weight and dtype of x."""
    shapes = itertools.cycle(itertools.product(OUT, WIDTHS))
    for kind, rows in itertools.product(KINDS, range(1, 16 if kernels.pick_form() == "amx" else 18)):
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
            x[rows // 2] = 1e-41  # 127 / 1e-41 is infinite
            assert bool(linear(x).isfinite().all()), (kind, rows, n, k, dtype)


def panels() -> None:
    """linear_blocks: up to 70 rows, which processors with AMX multiply in bfloat16 and others in integers."""
    shapes = itertools.cycle(itertools.product((1, 17, 33, 70), WIDTHS))
    for kind, rows in itertools.product(KINDS, (15, 16, 17, 31, 32, 48, 70, 300)):
        n, k = next(shapes)
        blocks = random_blocks(n, k, *kind)
        for dtype in (torch.float32, torch.bfloat16):
            x = normal(rows, k).to(dtype)
            exact = x.double() @ blocks.weight.double().T
            y = layer(blocks)(x)
            gap = (y.double() - exact).norm() / exact.norm().clamp(min=1e-9)
            assert float(gap) < 0.02, (kind, rows, n, k, dtype)
            x[rows // 2, k - 1] = WRONG[rows % 3]
            finite = layer(blocks)(x).isfinite().all(1)
            assert finite.tolist() == [row != rows // 2 for row in range(rows)], (kind, rows, n, k, dtype)


def quantization() -> None:
    """quantize_to_tiles: every weight is at most half a step from its quantized value."""
    for kind, n, k in itertools.product(PLAIN_KINDS, (4, 8, *OUT), WIDTHS):
        for dtype in (torch.float32, torch.bfloat16):
            weight = normal(n, k, seed=n + k).to(dtype)
            tiles = kernels.quantize_to_tiles(weight, (1.0,), *kind[:3])
            blocks = unpack(tiles, n, k, kind)
            steps = blocks.scale.repeat_interleave(blocks.group or k, 1)[:, :k].double()
            gap = (blocks.weight.double() - weight.double()).abs()
            # Rounding the scale and the offset to float16 moves the ends of the range.
            room = steps * 0.5 + weight.double().abs().amax(1, keepdim=True) * 2**-9
            assert bool((gap <= room).all()), (kind, n, k, dtype)
            kernels.quantize_to_tiles(weight, (1.0, 0.9, 0.8), *kind[:3])
            weight[n - 1, k - 1] = WRONG[n % 3]
            scales = scales_of(kernels.quantize_to_tiles(weight, (1.0,), *kind[:3]), k, kind)
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


def widened_products() -> None:
    """linear_bf16 without instructions for bfloat16: any number of rows, x and weight of any dtype."""
    if not kernels.widen():
        return
    halves, rows = (torch.bfloat16, torch.float16), (1, 2, 3, 6, 7, 16, 17, 40, 530)
    sizes = itertools.cycle(((17, 31), (49, 300), (1, 1), (48, 256), (33, 64), (100, 17)))
    dtypes = [*itertools.product((torch.float32, *halves), halves)]
    cases = [(m, *types, *next(sizes)) for m, types in itertools.product(rows, dtypes)]
    cases += [(m, *types, 7, 4103) for m, types in itertools.product((1, 2, 3, 4), dtypes)]  # rows above LONG inputs
    for m, x_dtype, dtype, n, k in cases:
        x, store, bias = normal(m, k).to(x_dtype), normal(n * k + 1, seed=1).to(dtype), normal(n, seed=2).to(x_dtype)
        weight = store[1:].view(n, k)
        exact = x.double() @ weight.double().T + bias.double()
        room = (x.double().abs() @ weight.double().abs().T) * 1e-6 + exact.abs() * torch.finfo(x_dtype).eps / 2 + 1e-7
        gap = (kernels.linear_bf16(x, weight, bias).double() - exact).abs()
        assert bool((gap <= room).all()), (m, n, k, x_dtype, dtype)
        x[m // 2, k - 1] = WRONG[m % 3]
        finite = kernels.linear_bf16(x, weight, None).isfinite().all(1)
        assert finite.tolist() == [row != m // 2 for row in range(m)], (m, n, k, x_dtype, dtype)


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
            expected = attention(*low, mask)
            gap = (kernels.attend(*low, mask).double() - expected).norm()
            assert float(gap) <= 2**-8 * float(expected.norm()), where  # weights and results are rounded to bfloat16
            for dtype, bound in ((torch.float32, 3e-4), (torch.bfloat16, 2**-8)):
                y = kernels.attend(q.to(dtype), k8, v8, mask, *scales).double()
                expected = attention(hadamard(q.to(dtype).double()), k64, v64, mask)  # rotated as the cached keys
                assert float((y - expected).norm()) <= bound * float(expected.norm()), where
        q[0, 0, t - 1, d - 1] = WRONG[s % 3]
        y = kernels.attend(q, k, v, None)
        assert bool(y[0, 0, t - 1].isnan().all()), where
        y[0, 0, t - 1] = 0
        assert bool(y.isfinite().all()), where
        empty = kernels.attend(q, k[:, :, :0], v[:, :, :0], None)
        assert torch.equal(empty, torch.zeros(batch, h, t, d))


def prompts() -> None:
    """Attend: more queries than a block, several chunks of keys, and none that a query sees."""
    heads = itertools.cycle(((1, 1), (3, 1), (6, 2), (3, 3)))
    for d, (t, s) in itertools.product((16, 48, 64, 128, 256), ((17, 17), (40, 300), (97, 600))):
        (h, kv), batch = next(heads), 2
        q, k, v = (
            x.bfloat16()
            for x in (normal(batch, h, t, d), normal(batch, kv, s, d, seed=1), normal(batch, kv, s, d, seed=2))
        )
        k8, v8 = ((x * 30).round().clamp(-127, 127).to(torch.int8) for x in (k, v))
        scales = [torch.rand(batch, kv, s, generator=torch.Generator().manual_seed(seed)) / 30 for seed in (3, 4)]
        k64, v64 = (x.double() * scale[..., None] for x, scale in zip((k8, v8), scales, strict=True))
        for mask in masks(t, s, batch):
            expected = attention(q, k, v, mask)
            gap = (kernels.attend(q, k, v, mask).double() - expected).norm() / expected.norm()
            assert float(gap) < 2**-8, (d, t, s, mask is None)  # weights and results are rounded to bfloat16
            expected = attention(hadamard(q.float()).bfloat16(), k64, v64, mask)  # rotated as the cached keys
            gap = (kernels.attend(q, k8, v8, mask, *scales).double() - expected).norm() / expected.norm()
            assert float(gap) < 2**-8, (d, t, s, mask is None)
        q[0, 0, t - 1, d - 1] = WRONG[s % 3]
        y = kernels.attend(q, k, v, causal(t, s))
        assert bool(y[0, 0, t - 1].isnan().all())
        y[0, 0, t - 1] = 0
        assert bool(y.isfinite().all())


def random_model(config: ModelConfig, schemes: Sequence[str | None], dtype: torch.dtype) -> Transformer:
    """A model whose linear layers take the schemes in turn (None: 16 bits), on the kernels."""
    net, kinds = tiny.model(config, attention="kernel").to(dtype), itertools.cycle(schemes)
    for name, linear in [(n, m) for n, m in net.named_modules() if isinstance(m, nn.Linear)]:
        scheme = next(kinds)
        format = torch.bfloat16 if scheme is None else pick_scheme(scheme).format
        weight = MemoryWeight(linear.weight.bfloat16(), name)
        net.set_submodule(name, make_linear(weight, torch.device("cpu"), format, linear.bias))
    net.runner = KernelRunner(net)
    return net


SIZES = ((72, 3, 1, 16, 100), (64, 4, 2, 48, 96), (33, 2, 2, 80, 65))  # C, H, KV, D, F


def layers() -> None:
    """All layers in one call, against model.py: sizes, formats, caches, numbers of tokens, biases, norms of heads."""
    dtypes = (torch.float32, torch.bfloat16) if kernels.widen() else (torch.bfloat16,)
    cases = itertools.product(SIZES, ((None,), ("int8",), ("int4", "int4", "int8", None)), dtypes, ("model", "int8"))
    for number, ((C, H, KV, D, F_), schemes, dtype, cache_kind) in enumerate(cases):
        skipped = (1,) * (number % 2)
        biases: dict[str, Any] = {
            "attention_bias": number % 4 == 1,
            "mlp_bias": number % 4 == 1,
            "qkv_bias": number % 4 == 2,
            "qk_norm": number % 3 == 0,
        }
        config = ModelConfig(C, 2, H, KV, D, F_, 50, norm_eps=1e-5, max_seq_len=90, no_rope_layers=skipped, **biases)
        net = random_model(config, schemes, dtype)
        net.cache_kind, runner, found = cache_kind, net.runner, []
        ids = torch.randint(0, 50, (2, 30), generator=torch.Generator().manual_seed(number))
        for net.runner in (runner, Runner()):
            cache = net.new_cache(40, batch=2)
            parts = [net(part, cache=cache) for part in ids.split([4, 1, 19, 1, 3, 2], 1)]
            rows = net.new_cache(40, batch=2, fixed=True)
            net(ids[:, :9], cache=rows)
            at = net(ids[:, 9:10], torch.tensor([[9], [4]]), rows)
            found.append(torch.cat([*parts, at, net(ids)], 1))
        bound = 1e-4 if schemes == (None,) and dtype == torch.float32 and cache_kind == "model" else 0.04
        gap = float((found[0] - found[1]).norm() / found[1].norm())
        assert gap < bound, (number, gap)


def embeddings() -> None:
    """rows_of_tiles: every format, rows in any order, the last column of a padded group."""
    for kind, (n, k) in itertools.product(KINDS, ((17, 33), (48, 256), (5, 200))):
        groups = random_blocks(n, k, *kind)
        ids = torch.tensor([n - 1, 0, n // 2, 0])
        found = kernels.rows_of_tiles(layer(groups).tiles, ids, (n, k), groups.format)
        assert torch.equal(found, unpack(layer(groups).tiles, n, k, groups.format).weight[ids]), (kind, n, k)


def packing() -> None:
    """pack_blocks: every type, a part of the rows, rows in another order, a part of the columns."""
    rng = np.random.default_rng(0)
    for name, rows in itertools.product(READERS, OUT):
        size = block_of(name)[1]
        whole = rng.integers(0, 256, (rows, 3 * size), dtype=np.uint8)
        for raw in (whole, whole[rows // 2 :, size:]):
            with np.errstate(invalid="ignore"):
                groups = READERS[name](raw)
            for order in (None, torch.from_numpy(rng.permutation(len(raw)))):
                expected = pack(groups if order is None else groups.rows(order))
                found = torch.empty_like(expected)
                kernels.pack_blocks(torch.from_numpy(raw), name, order, found)
                assert torch.equal(found, expected), (name, rows)


CHECKS = (
    products, panels, quantization, bfloat16_products, widened_products, attentions, prompts, layers, embeddings,
    packing,
)  # fmt: skip


TILES = (panels, bfloat16_products, prompts)  # what uses the tile registers of AMX


def main(checks: Iterable[Callable[[], None]] = CHECKS) -> None:
    """Run some checks, by default all."""
    assert kernels.ready()
    for check in checks:
        check()


if __name__ == "__main__":
    main()
