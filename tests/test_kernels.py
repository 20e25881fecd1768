"""The C++ kernels: every form against a computation in float64, and the behaviour if they can't be built."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llama.cache import hadamard
from llama.engine import kernels
from llama.engine.linears import TileLinear
from llama.errors import UsageError
from llama.quant.groups import GroupedWeight, GroupFormat
from llama.quant.tiles import pack
from llama.system.temporary import own_temporary

from . import tiny
from .forked import Forked
from .patience import PATIENCE, until

needs_kernels = pytest.mark.skipif(not kernels.ready(), reason="the C++ kernels can't be built here")

# Every format that a scheme or a file can have. `--quantize` writes the plain ones.
PLAIN_KINDS = [GroupFormat(*kind) for kind in ((8, 32, False), (8, 16, False), (8, 32, True), (8, 0, False))]
PLAIN_KINDS += [GroupFormat(4, group, offset) for group in (16, 32, 64, 128) for offset in (False, True)]
KINDS = [
    *PLAIN_KINDS,
    GroupFormat(5, 32, False),
    GroupFormat(5, 32, True),
    GroupFormat(4, 16, False, codebook=True),
    GroupFormat(4, 32, False, codebook=True),
    GroupFormat(4, 32, False, codebook=True, levels=True),
    GroupFormat(2, 16, True, levels=True),
    GroupFormat(3, 16, False, levels=True),
    GroupFormat(4, 32, True, levels=True),
    GroupFormat(5, 32, True, levels=True),
    GroupFormat(6, 16, False, levels=True),
]
VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)


def random_blocks(
    rows: int,
    columns: int,
    bits: int,
    group: int,
    offset: bool,
    codebook: bool = False,
    levels: bool = False,
    seed: int = 0,
) -> GroupedWeight:
    """Random quants, with scales and offsets, or their factors, that are exact in float16."""
    if codebook or levels:
        return random_narrow_blocks(rows, columns, GroupFormat(bits, group, offset, codebook, levels))
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group) if group else 1
    quants = torch.randint(2**bits, (rows, columns), generator=generator).to(torch.uint8)
    scale = (0.5 + torch.rand(rows, groups, generator=generator)).half().float() / 2**bits
    shift = (torch.randn(rows, groups, generator=generator) - 0.5).half().float()
    return GroupedWeight(quants, scale, shift if offset else None, bits, group)


def random_narrow_blocks(rows: int, columns: int, format: GroupFormat) -> GroupedWeight:
    """`random_blocks` with a codebook, or with all integers that two levels of scales can have in a file."""
    bits, group, offset, codebook, levels = format
    plain = random_blocks(rows, columns, bits, group, False)
    generator, values, factors = torch.Generator().manual_seed(1), VALUES if codebook else None, None
    scale, shift = plain.scale / (16 if codebook else 1), None
    if levels:
        low, high = (0, 16) if bits == 2 else (0, 64) if offset else (-128, 128) if bits == 6 else (-32, 32)
        size = rows, -(-columns // group), 1 + offset
        integers = torch.randint(low, high, size, generator=generator)
        factors = (0.5 + torch.rand(rows, -(-columns // 256), size[2], generator=generator)).half().float()
        factors /= torch.tensor([1.0, -1.0][: size[2]]) * (high - low) * (8 if codebook else 1)
        numbers = integers * factors.repeat_interleave(256 // group, 1)[:, : size[1]]
        scale, shift = numbers[..., 0], numbers[..., 1] if offset else None
    return GroupedWeight(plain.quants, scale, shift, bits, group, values, factors)


def layer(blocks: GroupedWeight, bias: Tensor | None = None) -> TileLinear:
    rows, columns = blocks.quants.shape
    return TileLinear(pack(blocks), (rows, columns), blocks.format, bias)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(x: Tensor, blocks: GroupedWeight) -> np.ndarray:
    """The kernel's formula in float64: x (M, K) rounded to 8 bits, times the quants, group by group -> (M, N)."""
    rows, columns = blocks.quants.shape
    group = blocks.group or columns
    width = blocks.group or 64  # inputs that share a scale of x
    floats = x.float().numpy()  # (M, K) float32, since the kernel computes the scale in float32
    y = np.zeros((len(floats), rows))
    integers = blocks.simple  # the kernel's own unpacking is not used
    middle = 0 if blocks.offset is not None else 2 ** (integers.bits - 1)
    for first in range(0, columns, width):
        part = floats[:, first : first + width]
        largest = np.abs(part).max(1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
        q = np.rint(part * inverse).astype(np.float64)
        scale_x = largest.astype(np.float64) / 127
        weight = integers.quants[:, first : first + width].numpy().astype(np.float64) - middle
        at = first // group
        y += scale_x * (q @ weight.T) * blocks.scale[:, at].double().numpy()
        if blocks.offset is not None:
            y += scale_x * q.sum(1, keepdims=True) * blocks.offset[:, at].double().numpy()
    return y


def distance(found: Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found.double().numpy() - expected) / (np.linalg.norm(expected) or 1))


# ------------------------------------------------------------------------------------------------- 4 and 8 bits
@needs_kernels
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(16, 128), (48, 512), (1, 1), (5, 7), (33, 200), (31, 129)])
def test_the_product_follows_its_formula(kind: GroupFormat, rows: int, columns: int) -> None:
    blocks = random_blocks(rows, columns, *kind)
    for dtype, bound in (
        (torch.float32, 1e-5),
        (torch.bfloat16, 2**-8),
        (torch.float16, 2**-10),
    ):  # ties may be rounded differently
        x = normal(13, columns).to(dtype)  # from 16 rows on, processors with AMX multiply in bfloat16
        assert distance(layer(blocks)(x), product(x, blocks)) < bound, dtype


@needs_kernels
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_products_do_not_overflow(kind: GroupFormat, sign: int) -> None:
    """AVX2 adds products in 16 bits."""
    blocks = random_blocks(32, 512, *kind)
    top = len(blocks.values) - 1 if blocks.values else 2**blocks.bits - 1
    for quants in (torch.full_like(blocks.quants, top), torch.zeros_like(blocks.quants)):
        extreme = blocks._replace(quants=quants)
        for rows in (1, 2, 6, 13):
            x = torch.full((rows, 512), float(sign))
            assert distance(layer(extreme)(x), product(x, extreme)) < 1e-5


@needs_kernels
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_error_of_the_product_is_below_one_and_a_half_percent(kind: GroupFormat) -> None:
    blocks = random_blocks(64, 1024, *kind)
    x = normal(20, 1024)
    assert distance(layer(blocks)(x), (x.double() @ blocks.weight.double().T).numpy()) < 0.015


@needs_kernels
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_does_not_depend_on_the_other_rows(kind: GroupFormat) -> None:
    blocks = layer(random_blocks(40, 192, *kind))
    x = normal(30, 192)
    alone, together = torch.cat([blocks(row[None]) for row in x]), blocks(x)
    for count in range(1, 31):  # with AMX, 16 rows and more are multiplied in bfloat16
        expected = together if count >= 16 and kernels.pick_form() == "amx" else alone
        assert torch.equal(blocks(x[:count]), expected[:count]), count


@needs_kernels
def test_x_may_have_any_shape_dtype_and_strides() -> None:
    bias = normal(24, seed=1)
    linear = layer(random_blocks(24, 96, 4, 32, True), bias)
    full = normal(5, 6, 7, 192)
    for x in (full[..., :96], full[..., ::2], full[:, 2, :, 96:], full[0, 0, 0, :96], full[:0, 0, :, :96]):
        y = linear(x)
        assert y.shape == (*x.shape[:-1], 24)
        assert torch.equal(y, linear(x.contiguous()))
    across = normal(96, 8).T
    torch.testing.assert_close(linear(across), linear(across.contiguous()), rtol=0, atol=0)
    assert torch.equal(linear(full[0, 0, :1, :96].expand(3, 96)), linear(full[0, 0, :1, :96]).expand(3, 24))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        typed = layer(random_blocks(24, 96, 4, 32, True), bias.to(dtype))
        assert typed(across.to(dtype)).dtype == dtype
        assert distance(typed(across.to(dtype)), linear(across).double().numpy()) < 0.02
    unbiased = layer(random_blocks(24, 96, 4, 32, True))
    assert torch.equal(linear(across), unbiased(across) + bias)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_nonfinite_input_affects_its_own_row_only(kind: GroupFormat, wrong: float) -> None:
    linear = layer(random_blocks(20, 130, *kind))
    x = normal(14, 130)
    expected = linear(x)
    for column in (0, 77, 129):
        broken = x.clone()
        broken[3, column] = wrong
        y = linear(broken)
        assert not bool(torch.isfinite(y[3]).any())
        assert torch.equal(y[[0, 1, 2, *range(4, 14)]], expected[[0, 1, 2, *range(4, 14)]])


@needs_kernels
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_zeros_and_huge_and_tiny_numbers(kind: GroupFormat) -> None:
    blocks = random_blocks(20, 130, *kind)
    linear, x = layer(blocks), normal(3, 130)
    assert torch.equal(linear(torch.zeros(3, 130)), torch.zeros(3, 20))
    for factor in (2.0**100, 2.0**-100):  # the product is exactly linear in the scale of x
        assert torch.equal(linear(x * factor), linear(x) * factor)
    tiniest = linear(torch.full((3, 130), 1e-44))  # too small to be scaled: the result is 0, not garbage
    assert float(tiniest.abs().max()) < 1e-40


@needs_kernels
def test_padding_rows_of_a_tile_are_not_written() -> None:
    linear = layer(random_blocks(17, 64, 4, 32, True))
    y = torch.full((4, 20), 7.0)
    y[:, :17] = linear(normal(4, 64))
    assert torch.equal(y[:, 17:], torch.full((4, 3), 7.0))
    assert linear(normal(4, 64)).shape == (4, 17)


# ----------------------------------------------------------------------------------------------------- bfloat16
@needs_kernels
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 9])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (65, 100), (3, 33), (1, 1), (130, 31)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_bf16_against_float64(rows: int, n: int, k: int, with_bias: bool) -> None:
    x, weight = normal(rows, k).bfloat16(), normal(n, k, seed=1).bfloat16()
    bias = normal(n, seed=2).bfloat16() if with_bias else None
    y = kernels.linear_bf16(x, weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    room = exact.abs() * 2**-8 + (x.abs().double() @ weight.abs().double().T) * 1e-6  # rounded once, summed in float32
    assert bool(((y.double() - exact).abs() <= room).all())
    # multiplied as 16 rows or more are
    together = (rows > 4 and kernels.has_tiles()) or (rows > 6 and kernels.widen())
    others = (torch.cat((x[r:], x, x[:r])) for r in range(rows)) if together else x.split(1)
    assert torch.equal(y, torch.stack([kernels.linear_bf16(other, weight, bias)[0] for other in others]))


@needs_kernels
def test_linear_bf16_accepts_unaligned_weights_and_propagates_nan() -> None:
    store = normal(40 * 64 + 1, seed=1).bfloat16()
    x = normal(2, 3, 64).bfloat16()
    odd = store[1:].view(40, 64)  # unaligned, as in a mapped file
    assert torch.equal(kernels.linear_bf16(x, odd, None), kernels.linear_bf16(x, odd.clone(), None))
    x[1, 2, 63] = torch.nan
    y = kernels.linear_bf16(x, odd, None)
    assert bool(y[1, 2].isnan().all())
    assert int(y.isnan().sum()) == 40


# ---------------------------------------------------------------------------------------------------- attention
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """PyTorch's attention in float64; a query without visible keys returns zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    y = F.scaled_dot_product_attention(q.double(), k, v, mask)
    if mask is None:
        return y
    seen = mask.any(-1, keepdim=True)
    return torch.where(seen, y, 0.0)


def heads(batch: int, h: int, kv: int, t: int, s: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(batch, h, t, d), normal(batch, kv, s, d, seed=1), normal(batch, kv, s, d, seed=2)


def causal(t: int, s: int) -> Tensor:
    """The last t of s positions: (t, s)."""
    return torch.ones(t, s, dtype=torch.bool).tril(s - t)


@needs_kernels
@pytest.mark.parametrize("d", range(16, 257, 16))
def test_attention_for_every_head_dim(d: int) -> None:
    q, k, v = heads(1, 4, 2, 3, 70, d)
    torch.testing.assert_close(
        kernels.attend(q, k, v, causal(3, 70)).double(), attention(q, k, v, causal(3, 70)), rtol=1e-5, atol=2e-6
    )
    low = [x.bfloat16() for x in (q, k, v)]
    exact = attention(*low)
    assert float((kernels.attend(*low, None).double() - exact).norm()) < 2**-8 * float(exact.norm())


@needs_kernels
@pytest.mark.parametrize("s", [1, 2, 15, 16, 17, 31, 255, 256, 257, 271, 272, 273, 511, 512, 513, 800])
@pytest.mark.parametrize(("h", "kv"), [(3, 3), (6, 2), (8, 1)])
def test_attention_for_any_number_of_keys_and_heads(s: int, h: int, kv: int) -> None:
    for t in (1, min(s, 5)):
        q, k, v = heads(2, h, kv, t, s, 64)
        for mask in (None, causal(t, s)):
            torch.testing.assert_close(
                kernels.attend(q, k, v, mask).double(), attention(q, k, v, mask), rtol=1e-5, atol=2e-6
            )


@needs_kernels
def test_a_mask_for_each_row_of_the_batch() -> None:
    q, k, v = heads(3, 4, 2, 5, 300, 32)
    mask = torch.rand(3, 1, 5, 300, generator=torch.Generator().manual_seed(3)) < 0.3
    mask[1, 0, 2] = False  # a query without visible keys
    mask[2, 0, :, :256] = False  # a complete piece of work without visible keys
    expected = attention(q, k, v, mask)
    torch.testing.assert_close(kernels.attend(q, k, v, mask).double(), expected, rtol=1e-5, atol=2e-6)
    assert torch.equal(kernels.attend(q, k, v, mask)[1, :, 2], torch.zeros(4, 32))
    across = mask.transpose(2, 3).contiguous().transpose(2, 3)  # the same mask, stored in another order
    assert torch.equal(kernels.attend(q, k, v, across), kernels.attend(q, k, v, mask))
    one = mask[1:2].expand(3, 1, 5, 300)
    torch.testing.assert_close(kernels.attend(q, k, v, one).double(), attention(q, k, v, one), rtol=1e-5, atol=2e-6)
    empty = torch.zeros(5, 300, dtype=torch.bool)
    assert torch.equal(kernels.attend(q, k, v, empty), torch.zeros(3, 4, 5, 32))


@needs_kernels
def test_keys_and_values_may_have_any_strides() -> None:
    q, k, v = normal(2, 4, 6, 64).transpose(1, 2), normal(2, 3, 400, 64, seed=1), normal(2, 400, 3, 64, seed=2)
    views = q[:, :, 1:3], k[:, :, :270], v.transpose(1, 2)[:, :, :270]
    assert torch.equal(kernels.attend(*views, None), kernels.attend(*(x.contiguous() for x in views), None))


@needs_kernels
def test_masked_keys_and_values_do_not_leak() -> None:
    q, k, v = heads(1, 2, 1, 2, 300, 32)
    mask = causal(2, 300)
    mask[:, 40:50] = False
    expected = kernels.attend(q, k, v, mask)
    for wrong in (torch.nan, torch.inf):
        k[:, :, 45], v[:, :, 45] = wrong, wrong
        assert torch.equal(kernels.attend(q, k, v, mask), expected)
    k[:, :, 299] = torch.nan  # only the last token sees it
    y = kernels.attend(q, k, v, mask)
    assert torch.equal(y[:, :, 0], expected[:, :, 0])
    assert bool(y[:, :, 1].isnan().all())


@needs_kernels
def test_a_nonfinite_value_reaches_every_query_that_sees_it() -> None:
    q, k, v = heads(1, 4, 2, 1, 20, 16)
    v[0, 1, 7, 3] = torch.nan
    y = kernels.attend(q, k, v, None)
    assert bool(y[0, 2:, 0, 3].isnan().all())
    assert int(y.isnan().sum()) == 2


@needs_kernels
@pytest.mark.parametrize("d", [32, 64, 128])
def test_a_nonfinite_query_or_key_does_not_reach_the_queries_that_do_not_see_it(d: int) -> None:
    """Several queries are computed at once if D is 64 or 128."""
    for wrong in (torch.nan, torch.inf, -torch.inf):
        q, k, v = heads(1, 3, 1, 5, 40, d)
        expected = kernels.attend(q, k, v, causal(5, 40))
        k[0, 0, 38, d - 1] = wrong  # the last two tokens see it
        y = kernels.attend(q, k, v, causal(5, 40))
        assert torch.equal(y[:, :, :3], expected[:, :, :3])
        q, k, v = heads(1, 3, 1, 5, 40, d)
        q[0, 1, 2, 0] = wrong
        y = kernels.attend(q, k, v, causal(5, 40))
        assert bool(y[0, 1, 2].isnan().all())
        y[0, 1, 2] = expected[0, 1, 2]
        assert torch.equal(y, expected)


@needs_kernels
@pytest.mark.parametrize("factor", [1e-3, 1.0, 30.0])
def test_scores_of_any_magnitude(factor: float) -> None:
    q, k, v = heads(1, 2, 2, 4, 300, 64)
    y = kernels.attend(q * factor, k * factor, v, None)
    torch.testing.assert_close(y.double(), attention(q * factor, k * factor, v), rtol=1e-4, atol=2e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_in_8_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q = normal(2, 6, 3, 64).to(dtype)
    k, v = (torch.randint(-127, 128, (2, 2, 400, 64), generator=generator).to(torch.int8) for _ in range(2))
    k_scale, v_scale = (torch.rand(2, 2, 400, generator=generator) / 50 for _ in range(2))
    k, v, k_scale, v_scale = (
        k[:, :, :290],
        v[:, :, :290],
        k_scale[:, :, :290],
        v_scale[:, :, :290],
    )  # views of a larger cache
    mask = causal(3, 290)
    y = kernels.attend(q, k, v, mask, k_scale, v_scale)
    exact = hadamard(q.double()), k.double() * k_scale[..., None], v.double() * v_scale[..., None]
    expected = attention(*exact, mask)
    assert y.dtype == dtype
    # Queries are rounded to 15 bits and weights to 16 bits, relative to the largest of each.
    assert distance(y, expected.numpy()) < (3e-4 if dtype == torch.float32 else 2**-8)


# ------------------------------------------------------------------------------------- the forms, and the build
def samples() -> list[Tensor]:
    """Sample results of all kernels."""
    out = []
    for kind in KINDS:
        linear = layer(random_blocks(37, 200, *kind))
        out += [linear(normal(14, 200)), linear(normal(3, 200).bfloat16())]
    for kind in PLAIN_KINDS:
        out.append(kernels.quantize_to_tiles(normal(37, 200), (1.0, 0.9, 0.8), *kind[:3]))
        out.append(kernels.quantize_to_tiles(normal(37, 200).bfloat16(), (1.0,), *kind[:3]))
    out.append(kernels.linear_bf16(normal(7, 100).bfloat16(), normal(30, 100, seed=1).bfloat16(), None))
    q, k, v = heads(2, 6, 2, 3, 300, 80)
    out.append(kernels.attend(q, k, v, causal(3, 300)))
    out.append(kernels.attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), None))
    scales = torch.rand(2, 2, 300, generator=torch.Generator().manual_seed(0))
    out.append(kernels.attend(q, (k * 20).to(torch.int8), (v * 20).to(torch.int8), None, scales, scales))
    return out


SAMPLE = """
import sys, torch
from llama.engine import kernels
from tests.test_kernels import samples
torch.save(samples(), sys.argv[1])
"""


@pytest.fixture
def run(forked: Forked) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run code in a new process, since a process uses only one form of the kernels."""

    def start(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[bytes]:
        root = str(Path(__file__).parent.parent)
        return forked.run(args, None, env=env, code=f"import sys; sys.path.insert(0, {root!r})\n{code}")

    return start


Python = Callable[..., "subprocess.CompletedProcess[bytes]"]


@needs_kernels
def test_every_form_computes_the_same(run: Python, tmp_path: Path) -> None:
    if not torch.cpu._is_avx2_supported():
        pytest.skip("this processor has no AVX2")
    done = run(SAMPLE, str(tmp_path / "samples"), CLEARLLAMA_KERNELS="avx2")
    assert (done.returncode, done.stderr) == (0, b"")
    for found, expected in zip(torch.load(tmp_path / "samples"), samples(), strict=True):
        if found.dtype == torch.uint8:
            assert torch.equal(found, expected)
        else:
            worst = float((found.double() - expected.double()).norm() / expected.double().norm())
            assert worst < (1e-5 if found.dtype == torch.float32 else 2e-3)


WIDENED = """
import sys, torch, llama
from tests import kernel_edges
torch.set_grad_enabled(False)
kernel_edges.widened_products()
for dtype, path in zip((torch.bfloat16, torch.float16), sys.argv[1:], strict=True):
    kept, float32 = llama.load_model(path, fast=True), llama.load_model(path, dtype="float32")
    assert kept.layers[0].attention.wq.weight.dtype == kept.tok_embeddings.weight.dtype == dtype
    ids = torch.arange(40).view(2, 20) * 7 % 320
    found, expected = kept(ids), float32(ids)
    assert found.dtype == expected.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < 1e-5
"""


@needs_kernels
def test_weights_in_16_bits_keep_their_bytes_and_float32_computes_with_them(run: Python, tmp_path: Path) -> None:
    """On processors without bfloat16: products against float64, and a model against one with float32 weights."""
    if not torch.cpu._is_avx2_supported():
        pytest.skip("this processor has no AVX2")
    config = dataclasses.replace(tiny.CONFIG, tie_embeddings=True)
    files = [tiny.write_gguf(tmp_path / f"{kind}.gguf", config, quantization=kind) for kind in ("BF16", "F16")]
    done = run(WIDENED, *map(str, files), CLEARLLAMA_KERNELS="avx2")
    assert (done.returncode, done.stderr) == (0, b"")


TILES = """
from llama.engine import kernels
kernels.FORMS["amx"] = f"{kernels.AVX512} -include {sys.argv[1]}"
from tests import kernel_edges  # builds the kernels
for check in (kernel_edges.panels, kernel_edges.prompts):
    check()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tile_registers_of_amx_are_used_as_their_manual_says(run: Python, tmp_path: Path) -> None:
    """The instructions are replaced by plain C++, which ends the process if they are used wrongly."""
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("the rest of this form needs AVX-512")
    done = run(
        TILES, str(Path(__file__).with_name("fake_amx.h")), CLEARLLAMA_KERNELS="amx", CLEARLLAMA_CACHE=str(tmp_path)
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_the_form_for_amx_can_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARLLAMA_CACHE", str(tmp_path))
    library = tmp_path / "kernels.so"
    kernels._build("amx", library)
    assert library.stat().st_size > 0


LOGITS = """
import sys, torch, llama
torch.set_grad_enabled(False)
model = llama.load(sys.argv[1], device="cpu", dtype="bfloat16").model
torch.save(model(torch.arange(12)[None]).float(), sys.argv[2])
"""


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("kernels") / "small.gguf", tiny.WIDE, quantization="Q4_1")


@pytest.mark.parametrize(
    ("env", "lines"),
    [
        ({"CLEARLLAMA_KERNELS": "off"}, []),  # requested, so nothing is logged
        ({"CXX": "/bin/false"}, ["/bin/false could not build kernels.cpp: exit code 1"]),
        ({"CXX": "/bin/true"}, ["/bin/true could not build kernels.cpp: exit code 0"]),
    ],
)
def test_without_kernels_the_results_are_right_and_one_line_is_logged(
    run: Python, tmp_path: Path, small_gguf: Path, env: dict[str, str], lines: list[str]
) -> None:
    env = {"CLEARLLAMA_CACHE": str(tmp_path), "CLEARLLAMA_KERNELS": "auto", **env}
    done = run(LOGITS, str(small_gguf), str(tmp_path / "logits"), **env)
    assert done.returncode == 0, done.stderr
    logged = done.stderr.decode().splitlines()
    assert len(logged) == len(lines)
    for line, expected in zip(logged, lines, strict=True):
        assert line.startswith("clearllama: the C++ kernels are not available, so PyTorch's slower operators run: ")
        assert expected in line
    from llama.loader import load_model

    exact = load_model(small_gguf, device="cpu", dtype="float32")(torch.arange(12)[None])
    found = torch.load(tmp_path / "logits")
    assert float((found - exact).norm() / exact.norm()) < 0.03


def test_an_unknown_form_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARLLAMA_KERNELS", "sse9")
    forms = "amx, avx512, avx2, neon_bf16, neon"
    with pytest.raises(UsageError, match=f"CLEARLLAMA_KERNELS is 'sse9'; expected auto, off, {forms}$"):
        kernels.pick_form()


@pytest.fixture
def compiler(tmp_path: Path) -> tuple[str, Path]:
    """A slow compiler that records each call and copies the existing library. Returns its command and the record."""
    form = kernels.pick_form()
    if form is None or not kernels.ready():
        pytest.skip("the C++ kernels can't be built here")
    calls, script = tmp_path / "calls", tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\necho call >> {calls}\nwhile [ "$1" != -o ]; do shift; done\nsleep 0.3\ncp {kernels.built(form)} "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script), calls


READY = """
from concurrent.futures import ThreadPoolExecutor
from llama.engine import kernels
assert all(ThreadPoolExecutor(4).map(lambda i: kernels.ready(), range(8)))
"""


def test_threads_build_the_library_once(run: Python, tmp_path: Path, compiler: tuple[str, Path]) -> None:
    script, calls = compiler
    cache = tmp_path / "cache"
    log = "import logging; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
    for expected in (
        rb"clearllama: compiling the C\+\+ kernels, which can take a minute; later runs reuse them\n",
        b"",
    ):
        done = run(log + READY, CLEARLLAMA_CACHE=str(cache), CXX=script)
        assert (done.returncode, bool(re.fullmatch(expected, done.stderr))) == (0, True), done.stderr
    sources = list(kernels.SOURCE.parent.glob("*.cpp"))
    assert len(calls.read_text().splitlines()) == len(sources) + 1  # the linker
    [library] = (cache / "kernels").iterdir()
    assert library.suffix == ".so"


WITHOUT_PLATFORMDIRS = """
import sys
sys.modules["platformdirs"] = None
from llama.engine import kernels
assert not kernels.ready()
"""


def test_without_platformdirs_and_a_named_folder_there_are_no_kernels(run: Python) -> None:
    done = run(WITHOUT_PLATFORMDIRS, CLEARLLAMA_CACHE="")
    assert done.returncode == 0
    assert b"the C++ kernels are not available" in done.stderr
    assert b"platformdirs" in done.stderr


JUNK = """
from llama.engine import kernels
assert not kernels.ready()
"""


@needs_kernels
@pytest.mark.parametrize(
    ("writes", "message"),
    [
        (b': > "$2"', "file too short"),
        (b'echo junk > "$2"', "file too short"),
        (b'head -c 5000 /dev/zero > "$2"', "invalid ELF header"),
        (b'cp LIBRARY "$2"', "lacks linear_tiles, rows_of_tiles, "),
        (b"printf '\\377error \\300\\n' >&2; exit 1", "could not build kernels.cpp: \ufffderror \ufffd"),
    ],
    ids=["empty", "text", "zeros", "another library", "not UTF-8"],
)
def test_what_does_not_load_is_not_kept(run: Python, tmp_path: Path, writes: bytes, message: str) -> None:
    script = tmp_path / "compiler"
    other = Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"
    writes = writes.replace(b"LIBRARY", os.fsencode(other))
    script.write_bytes(b'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n' + writes)
    script.chmod(0o755)
    env = {"CLEARLLAMA_CACHE": str(tmp_path / "cache"), "CLEARLLAMA_KERNELS": "auto", "CXX": str(script)}
    done = run(JUNK, **env)
    [line] = done.stderr.decode().splitlines()
    assert (done.returncode, message in line) == (0, True), line
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_a_kept_library_that_does_not_load_is_built_again(
    run: Python, tmp_path: Path, compiler: tuple[str, Path]
) -> None:
    folder = tmp_path / "cache" / "kernels"
    env = {"CLEARLLAMA_CACHE": str(tmp_path / "cache"), "CXX": compiler[0]}
    code = "from llama.engine import kernels; print(kernels._location(kernels.pick_form()))"
    folder.mkdir(0o700, parents=True)
    Path(run(code, **env).stdout.decode().strip()).write_bytes(b"junk")
    done = run(READY, **env)
    assert (done.returncode, done.stderr) == (0, b"")
    [library] = folder.iterdir()
    assert library.stat().st_size > 10_000


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\necho 'In file x:' >&2\necho 'fatal error: x.o: No space left on device' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(RuntimeError, match="No space left on device"):
        kernels._build("avx2", tmp_path / "x.so")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_build_that_is_interrupted_or_killed_leaves_no_process(tmp_path: Path, number: int) -> None:
    """A compiler starts other programs. Ctrl-C ends them all, and so does the death of the process."""
    script, started, cache = tmp_path / "compiler", tmp_path / "started", tmp_path / "cache"
    begun = f"echo $! > {started}.new\nmv {started}.new {started}\n"
    script.write_text(f'#!/bin/sh\n: > "$TMPDIR/part.s"\nsleep 1000 &\n{begun}wait\n')
    script.chmod(0o755)
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whatever the tests' process ignores
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})\n"
        "from llama.engine import kernels; kernels.load('avx2')"
    )
    env = {**os.environ, "CLEARLLAMA_CACHE": str(cache), "CXX": str(script)}
    build = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=-3)
    until(lambda: started.exists() or build.poll() is not None)
    build.send_signal(number)
    assert build.wait(PATIENCE) != 0
    stat = Path(f"/proc/{started.read_text().strip()}/stat")
    until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")  # perhaps not yet reaped
    with own_temporary(cache / "kernels", ".build") as work:
        assert [*work.parent.iterdir()] == [work]


@needs_kernels
@pytest.mark.parametrize("size", [0, 4096, -4096, -33, -1])
def test_a_truncated_library_is_built_again(run: Python, tmp_path: Path, size: int) -> None:
    """Loading it would end the process with SIGBUS."""
    built = kernels.built(kernels.pick_form() or "")
    assert built is not None
    script, folder = tmp_path / "compiler", tmp_path / "cache" / "kernels"
    script.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {built} "$2"\n')
    script.chmod(0o755)
    folder.mkdir(0o700, parents=True)
    (folder / built.name).write_bytes(built.read_bytes()[:size])
    done = run(READY, CLEARLLAMA_CACHE=str(tmp_path / "cache"), CXX=str(script))
    assert (done.returncode, done.stderr) == (0, b"")
    assert [path.name for path in folder.iterdir()] == [built.name]
    assert built.read_bytes() in (folder / built.name).read_bytes()


@pytest.mark.slow  # builds twice
def test_two_processes_may_build_at_the_same_time(tmp_path: Path, compiler: tuple[str, Path]) -> None:
    script, _ = compiler
    env = {**os.environ, "CLEARLLAMA_CACHE": str(tmp_path / "cache"), "CXX": script}
    both = [subprocess.Popen([sys.executable, "-c", READY], env=env, stderr=subprocess.PIPE) for _ in range(2)]
    assert [(process.communicate()[1], process.returncode) for process in both] == [(b"", 0)] * 2
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 1
