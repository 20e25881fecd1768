"""The CUDA kernels against the formulas in float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llama.cache import KVCache
from llama.engine import triton_kernels as kernels
from llama.engine.fused import FusedRunner, packed
from llama.engine.linears import BlockLinear, make_embedding
from llama.engine.triton_kernels import BlockSizes, Splits, Weight
from llama.errors import UsageError
from llama.model import Transformer
from llama.quant.blocks import BlockFormat
from llama.quant.rounding import quantize
from llama.quant.schemes import SCHEMES, scheme_for
from llama.rope import precompute_freqs_cis

from . import tiny

pytest.importorskip("triton")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.triton]
SLOW = pytest.mark.slow
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter truncates to bfloat16
TINY = dataclasses.replace(tiny.CONFIG, dim=24, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=40, vocab_size=30)

if DEVICE.type == "cpu":  # Triton 3.6 reads a loop's bounds in a way that numpy 2.4 rejects; later versions do not
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_bounds(tensor: Any, scope: Any) -> None:
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_bounds


TIED_WITH_BIASES = {"attention_bias": True, "mlp_bias": True, "tie_embeddings": True, "n_kv_heads": 1}


def error(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm())


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def a_weight(rows: int, columns: int, scheme: str | None, bias: bool = False) -> tuple[Weight, Tensor, Tensor]:
    """Return a weight for the kernels, the same weight as (N, K) float64, and its bias or zeros."""
    values, added = noise(rows, columns, seed=1), noise(rows, seed=2)
    if scheme is None:
        weight = Weight(values, None, None, added if bias else None, rows, columns, 16, columns)
    else:
        blocks = quantize(values.cpu(), SCHEMES[scheme].format)
        values = blocks.weight
        weight = BlockLinear(blocks, added.cpu() if bias else None).to(DEVICE).packed
    return weight, values.double().to(DEVICE), added.double() if bias else torch.zeros(rows, device=DEVICE)


def normed(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()


@pytest.mark.parametrize(
    "scheme", [None, "int8", "int8-sym", "int8-row", "int4", "int4-g64", "int4-sym", "int4-sym-g128"]
)
@pytest.mark.parametrize(("rows", "columns"), [(6, 96), (9, 200), (4, 2100), (3, 33), (5, 24)])
def test_linear_multiplies_the_weight_by_x(rows: int, columns: int, scheme: str | None) -> None:
    weight, values, bias = a_weight(rows, columns, scheme, bias=True)
    x, norm, residual = noise(columns), noise(columns, seed=3).abs(), noise(rows, seed=4)
    empty = torch.full((rows,), torch.nan, device=DEVICE)
    y = values @ x.double() + bias
    limit = 1e-4 if weight.bits == 4 else 1e-5  # 4 bits are read as floats above 1; the sum of the ones is subtracted
    assert error(kernels.linear(weight, x, empty.clone()), y) < limit
    of_norm = values @ normed(x, norm, 0.01) + bias
    assert error(kernels.linear(weight, x, empty.clone(), norm=norm, eps=0.01), of_norm) < limit
    added = kernels.linear(weight, x, residual.clone(), residual=residual)
    assert error(added, y + residual) < limit
    in_place = residual.clone()
    assert torch.equal(kernels.linear(weight, x, in_place, residual=in_place), added)


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_swiglu_gates_the_second_half_of_the_rows_by_the_first(scheme: str | None) -> None:
    weight, values, _ = a_weight(10, 64, scheme)
    x = noise(64)
    y = values @ x.double()
    gated = kernels.linear(weight, x, torch.full((5,), torch.nan, device=DEVICE), gated=True)
    assert error(gated, F.silu(y[:5]) * y[5:]) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("format", [*{s.format: s for s in SCHEMES.values()}, BlockFormat(4, 16, True)], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(3, 96), (2, 2100), (5, 33)])
def test_an_unpacked_weight_is_the_dequantized_weight(
    rows: int, columns: int, format: BlockFormat, dtype: torch.dtype
) -> None:
    layer = BlockLinear(quantize(noise(rows, columns).cpu(), format)).to(DEVICE)
    assert kernels.unpacks(layer.packed)
    assert torch.equal(kernels.unpack(layer.packed, dtype), layer.weight.to(dtype))


@pytest.mark.parametrize(
    ("scheme", "blocks"),
    [
        *((None, blocks) for blocks in (BlockSizes(2, 32, 1), BlockSizes(4, 64, 2, 2), BlockSizes(8, 256, 4))),
        *((scheme, BlockSizes(4, 32, 1, stages)) for scheme in ("int8", "int4") for stages in (1, 2)),
    ],
)
def test_block_sizes_change_only_the_rounding(scheme: str | None, blocks: BlockSizes) -> None:
    weight, values, _ = a_weight(11, 100, scheme)
    x = noise(100)
    y = kernels.linear(weight, x, torch.empty(11, device=DEVICE), blocks=blocks)
    assert error(y, values @ x.double()) < (1e-4 if weight.bits == 4 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("position", [0, pytest.param(5, marks=SLOW), pytest.param(63, marks=SLOW), 64, 99])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(4, 2, 8), (3, 1, 12), (2, 2, 32)])
def test_attention_sees_the_keys_up_to_its_position(
    heads: int, kv: int, dim: int, position: int, dtype: torch.dtype
) -> None:
    q, k, v = noise(heads, dim, dtype=dtype), noise(kv, 100, dim, dtype=dtype, seed=1), noise(kv, 100, dim, dtype=dtype)
    k[:, position + 1 :], v[:, position + 1 :] = torch.nan, torch.nan  # reading them would show in the result
    splits = Splits.empty(heads, kv, dim, DEVICE)
    for part in splits:
        part.fill_(torch.nan)
    y = kernels.attend(q, k, v, torch.tensor([position], device=DEVICE), splits, torch.empty_like(q))
    group = heads // kv
    seen, values = (x[:, : position + 1].double().repeat_interleave(group, 0) for x in (k, v))  # (H, S, D)
    weights = (torch.einsum("hd,hsd->hs", q.double(), seen) / dim**0.5).softmax(-1)
    assert error(y, torch.einsum("hs,hsd->hd", weights, values)) < (1e-5 if dtype == torch.float32 else 3e-3)


def test_fewer_heads_have_more_splits() -> None:
    assert [Splits.empty(8, kv, 8, DEVICE).top.shape[1] for kv in (1, 2, 8, 32, 512)] == [64, 64, 32, 8, 1]


@pytest.mark.parametrize("position", [0, 7])
def test_queries_and_keys_are_rotated_and_values_are_not(position: int) -> None:
    heads, kv, dim, width, slots = 4, 2, 8, 24, 12
    weight, values, bias = a_weight((heads + 2 * kv) * dim, width, None, bias=True)
    x, norm = noise(width), noise(width, seed=3).abs()
    freqs_cis = precompute_freqs_cis(dim, slots).to(DEVICE)
    q = torch.full((heads, dim), torch.nan, device=DEVICE)
    k, v = (torch.full((kv, slots, dim), 7.0, device=DEVICE) for _ in range(2))
    tables = freqs_cis.real.contiguous(), freqs_cis.imag.contiguous()
    kernels.qkv(weight, x, norm, 1e-5, tables, torch.tensor([position], device=DEVICE), q, k, v)
    y = (values @ normed(x, norm, 1e-5) + bias).view(-1, dim)
    pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * freqs_cis[position].to(torch.complex128)
    rotated = torch.view_as_real(pairs).flatten(-2)
    assert error(q, rotated[:heads]) < 1e-5
    assert error(k[:, position], rotated[heads : heads + kv]) < 1e-5
    assert error(v[:, position], y[heads + kv :]) < 1e-5
    others = [slot for slot in range(slots) if slot != position]
    assert bool((k[:, others] == 7).all())
    assert bool((v[:, others] == 7).all())


def test_the_tokens_of_a_prompt_are_rotated_by_their_positions() -> None:
    heads, kv, dim, slots, first = 3, 1, 12, 9, 4
    qkv = noise(2, (heads + 2 * kv) * dim)
    freqs_cis = precompute_freqs_cis(dim, slots).to(DEVICE)
    k, v = (torch.full((kv, slots, dim), 7.0, device=DEVICE) for _ in range(2))
    q = kernels.rotate(qkv, (freqs_cis.real.contiguous(), freqs_cis.imag.contiguous()), first, k, v, heads)
    parts = qkv.view(2, -1, dim)
    pairs = torch.view_as_complex(parts.unflatten(-1, (-1, 2)).contiguous()) * freqs_cis[first : first + 2, None]
    rotated = torch.view_as_real(pairs).flatten(-2)  # (T, H + 2 KV, D)
    assert error(q, rotated[:, :heads]) < 1e-6
    assert error(k[:, first : first + 2], rotated[:, heads:-kv].transpose(0, 1)) < 1e-6
    assert torch.equal(v[:, first : first + 2], parts[:, -kv:].transpose(0, 1))
    assert bool((k[:, :first] == 7).all())
    assert bool((v[:, first + 2 :] == 7).all())


def test_the_norm_and_swiglu_of_a_prompt() -> None:
    x, norm = noise(3, 50), noise(50, seed=1)
    assert error(kernels.rms_norm(x, norm, 0.01), normed(x, norm, 0.01)) < 1e-6
    wide = noise(2, 2 * 1100)
    assert error(kernels.swiglu(wide), F.silu(wide[:, :1100].double()) * wide[:, 1100:].double()) < 1e-6


# ------------------------------------------------------------------------------------------------ the complete decoder
def a_model(config: Any, scheme: str | None) -> Transformer:
    """Return a random model with the layers that run on a GPU."""
    model = tiny.model(config, rope="real", attention="sdpa")
    for name, linear in [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)] if scheme else []:
        format = scheme_for(name, SCHEMES[scheme]).format
        model.set_submodule(name, BlockLinear(quantize(linear.weight, format), linear.bias))
    if scheme and config.tie_embeddings:
        model.set_submodule("tok_embeddings", make_embedding(model.output, torch.float32))
    return model.to(DEVICE)


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({}, None),
        (TIED_WITH_BIASES, "int4"),
        ({"qkv_bias": True, "no_rope_layers": (0,)}, None),
        *(pytest.param({}, scheme, marks=SLOW) for scheme in ("int8", "int4")),
        *(pytest.param(TIED_WITH_BIASES, scheme, marks=SLOW) for scheme in (None, "int8")),
    ],
    ids=["plain", "tied-int4", "no-rope", "plain-int8", "plain-int4", "tied", "tied-int8"],
)
def test_the_fused_decoder_computes_the_logits_of_the_plain_model(changes: dict[str, Any], scheme: str | None) -> None:
    config = dataclasses.replace(TINY, n_layers=1 if scheme else 2, **changes)
    plain, fused = a_model(config, scheme), tiny.fused(a_model(config, scheme))
    assert isinstance(fused.runner, FusedRunner)
    fused.runner.splits = Splits.empty(config.n_heads, 64, config.head_dim, DEVICE)  # a few, of 9 ms each
    tokens = tiny.random_tokens(9, config).to(DEVICE)
    expected = plain(tokens)
    cache = fused.new_cache(20)
    parts = [fused(tokens[:, first:last], cache=cache) for first, last in ((0, 4), (4, 7), (7, 8))]
    assert error(torch.cat(parts, 1), expected[:, :8]) < 1e-5
    step = fused.runner.step_for(cache, torch.tensor([8], device=DEVICE))
    step.tokens.copy_(tokens[:, 8:])
    cache.place_next()
    assert error(step.next_logits(fused, cache)[0], expected[0, 8]) < 2e-5
    plain_cache: KVCache = plain.new_cache(20)
    plain(tokens, cache=plain_cache)
    assert error(cache.k[..., :9, :], plain_cache.k[..., :9, :]) < 1e-5
    assert error(cache.v[..., :9, :], plain_cache.v[..., :9, :]) < 1e-5


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_the_layers_of_a_fused_model_can_be_multiplied_one_by_one(scheme: str | None) -> None:
    """Batches and 8-bit caches call each layer. A strided view of a joined weight would have to be dequantized."""
    model = tiny.fused(a_model(dataclasses.replace(TINY, **TIED_WITH_BIASES), scheme))
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear | BlockLinear)]
    assert len(layers) == 7 * TINY.n_layers + 1
    assert all(kernels.supports(packed(layer)) for layer in layers)


def test_batches_repeated_positions_and_8_bit_caches_run_without_the_kernels() -> None:
    plain, fused = a_model(TINY, None), tiny.fused(a_model(TINY, None))
    rows = tiny.random_tokens(4, TINY, batch=3).to(DEVICE)
    torch.testing.assert_close(fused(rows), plain(rows))
    positions = torch.tensor([0, 1, 1], device=DEVICE)  # the third token overwrites the second
    caches = [model.new_cache(8) for model in (plain, fused)]
    torch.testing.assert_close(fused(rows[:1, :3], positions, caches[1]), plain(rows[:1, :3], positions, caches[0]))
    plain.runner.cache_kind = fused.runner.cache_kind = "int8"
    caches = [model.new_cache(8) for model in (plain, fused)]
    torch.testing.assert_close(fused(rows[:1], cache=caches[1]), plain(rows[:1], cache=caches[0]))


def test_weights_and_models_that_the_kernels_do_not_support_are_rejected() -> None:
    linear = torch.nn.Linear(8, 6)
    assert kernels.supports(packed(linear))
    linear.weight = torch.nn.Parameter(linear.weight[::2])
    assert not kernels.supports(packed(linear))
    small_groups = BlockLinear(quantize(torch.ones(4, 64), BlockFormat(4, 16, True))).packed
    assert (kernels.supports(small_groups), kernels.unpacks(small_groups)) == (False, True)
    with pytest.raises(UsageError, match="real"):
        tiny.fused(tiny.model(TINY))
    with pytest.raises(UsageError, match="head_dim"):
        tiny.fused(tiny.model(dataclasses.replace(TINY, head_dim=6), rope="real"))
