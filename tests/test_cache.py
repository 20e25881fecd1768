"""The KV cache in 8 bits: its rounding error is bounded, and it works like the cache in the model's dtype."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from llama.attention import reference, sdpa
from llama.cache import FIRST_SLOTS, KVCache, QuantizedKV, hadamard, quantize_kv
from llama.engine import kernels
from llama.errors import UsageError
from llama.generate import prefill
from llama.model import Transformer
from llama.rope import FORMS, to_layout

from . import tiny


def int8_model(**options: str):
    """Return a model whose caches are in 8 bits."""
    net = tiny.model(dataclasses.replace(tiny.CONFIG, max_seq_len=4000), **options)
    net.cache_kind = "int8"
    return net


def test_the_rounding_error_is_at_most_half_a_step_of_each_heads_scale() -> None:
    x = torch.randn(2, 3, 5, 16) * torch.logspace(-6, 4, 5)[:, None]
    quantized = quantize_kv(x)
    largest = x.abs().amax(-1, keepdim=True)
    assert bool(((quantized.dequantize(torch.float32) - x).abs() <= largest / 254 * 1.0001).all())
    assert quantized.values.abs().amax(-1).eq(127).all()  # the largest entry is exact
    assert torch.equal(quantize_kv(torch.zeros(1, 1, 1, 4)).dequantize(torch.float32), torch.zeros(1, 1, 1, 4))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_values_stay_nonfinite(bad: float) -> None:
    x = torch.randn(1, 1, 2, 8)
    x[0, 0, 1, 3] = bad
    dequantized = quantize_kv(x).dequantize(torch.float32)
    assert bool(torch.isfinite(dequantized[0, 0, 0]).all())
    assert not bool(torch.isfinite(dequantized[0, 0, 1]).all())


def test_a_cache_in_8_bits_stores_keys_and_values_at_any_position() -> None:
    cache = KVCache(1, 2, 8, max_len=3000, batch=2, kind="int8")
    k, v = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8)
    keys, values = cache.layers[0].update(k, v, cache.place(3))
    cache.commit()
    assert isinstance(keys, QuantizedKV)
    largest = hadamard(k).abs().max()
    torch.testing.assert_close(keys.dequantize(torch.float32), hadamard(k), rtol=0, atol=float(largest) / 254 * 1.001)
    torch.testing.assert_close(values.dequantize(torch.float32), v, rtol=0, atol=float(v.abs().max()) / 254 * 1.001)
    rows = cache.place(1, torch.tensor([[3], [1]]))  # each row of the batch at its own position
    one = torch.randn(2, 2, 1, 8)
    keys, _ = cache.layers[0].update(one, one, rows)
    got = hadamard(keys.dequantize(torch.float32))  # its own inverse
    for found, stored in ((got[0, :, 3], one[0, :, 0]), (got[1, :, 1], one[1, :, 0]), (got[1, :, 2], k[1, :, 2])):
        torch.testing.assert_close(found, stored, rtol=0, atol=0.03)
    torch.testing.assert_close(cache.layers[0].floats()[0][:, :, :4], got, rtol=0, atol=1e-6)
    cache.commit()
    before = tiny.contents(cache, 3)
    cache.place(FIRST_SLOTS + 5, torch.arange(3, FIRST_SLOTS + 8))  # grows
    assert cache.slots > FIRST_SLOTS
    torch.testing.assert_close(tiny.contents(cache, 3), before, rtol=0, atol=0)


@pytest.mark.parametrize("attention", ["sdpa", "reference", pytest.param("kernel", marks=pytest.mark.skipif(
    not kernels.ready(), reason="needs the C++ kernels"))])  # fmt: skip
def test_logits_differ_only_by_the_rounding_error(attention: str) -> None:
    net, exact = int8_model(attention=attention), tiny.model()
    tokens = tiny.random_tokens(60)[0].tolist()
    cache, own = net.new_cache(), exact.new_cache()
    assert (cache.kind, own.kind) == ("int8", "model")
    got = [prefill(net, tokens[:50], cache)] + [prefill(net, [token], cache) for token in tokens[50:]]
    want = [prefill(exact, tokens[:50], own)] + [prefill(exact, [token], own) for token in tokens[50:]]
    error = float((torch.stack(got) - torch.stack(want)).norm() / torch.stack(want).norm())
    assert 1e-5 < error < 0.02  # not 0; an entry is off by up to 1/254 of the largest of its head


@pytest.mark.parametrize("D", [2, 12, 16, 48, 64, 96, 128])
def test_the_hadamard_rotation_changes_no_product_and_spreads_large_entries(D: int) -> None:
    matrix, n = hadamard(torch.eye(D)), D & -D
    torch.testing.assert_close(matrix @ matrix, torch.eye(D), rtol=0, atol=1e-6)  # its own inverse
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=0)  # so q and k keep their products
    assert matrix.abs().unique().tolist() == pytest.approx([n**-0.5] if n == D else [0, n**-0.5])


@pytest.mark.parametrize("form", FORMS)
def test_large_biases_of_keys_cost_the_other_entries_no_precision(form: str) -> None:
    """As in Qwen2.5: biases above 100 in the pairs that turn slowly. The second layer has no RoPE."""
    config = dataclasses.replace(tiny.WIDE, qkv_bias=True, rope_theta=1e6, no_rope_layers=(1,))
    state, tokens, logits, keys = tiny.weights(config), tiny.random_tokens(60), {}, {}
    for layer in range(config.n_layers):
        state[f"layers.{layer}.attention.wk.bias"].view(-1, 32)[:, -4:] += torch.tensor([150.0, -90.0, 60.0, 120.0])
    net = Transformer(config, rope=form).requires_grad_(False)
    net.load_state_dict({n: to_layout(n, x, 32, "interleaved", net.rope.layout) for n, x in state.items()})
    for net.cache_kind in ("model", "int8"):
        cache = net.new_cache()
        steps = [tokens[:, :40], *tokens[:, 40:].split(1, dim=1)]
        logits[cache.kind] = torch.cat([net(ids, cache=cache) for ids in steps], dim=1)
        keys[cache.kind] = cache.layers[0].floats()[0][:, :, :60]
    torch.testing.assert_close(keys["int8"], keys["model"], rtol=0, atol=0.15)  # with a scale for 150, up to 0.6
    assert float((logits["int8"] - logits["model"]).norm() / logits["model"].norm()) < 0.02


def test_attention_uses_the_dequantized_values() -> None:
    q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    quantized_k, quantized_v = quantize_kv(k), quantize_kv(v)
    # The cache holds rotated keys; hadamard is its own inverse.
    expected = reference(q, hadamard(quantized_k.dequantize(torch.float32)), quantized_v.dequantize(torch.float32))
    for attend in (sdpa, reference):
        torch.testing.assert_close(attend(q, quantized_k, quantized_v), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["model", "int8"])
@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_a_cache_that_grew_while_generating_can_be_used_without_inference_mode(
    kind: str, made_in_inference_mode: bool
) -> None:
    model = tiny.model(dataclasses.replace(tiny.CONFIG, max_seq_len=4000))
    model.cache_kind = kind
    text = tiny.random_tokens(FIRST_SLOTS + 30)
    with torch.inference_mode(made_in_inference_mode):
        cache = model.new_cache()
    prefill(model, text[0, :-1].tolist(), cache)
    whole = model.new_cache()
    expected = prefill(model, text[0].tolist(), whole)
    with torch.no_grad():
        found = model(text[:, -1:], cache=cache)[0, -1]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_positions_of_a_pass_may_be_in_any_order_but_leave_no_gap() -> None:
    model, text = tiny.model(), tiny.random_tokens(4)
    cache, order = model.new_cache(), torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        torch.testing.assert_close(model(text[:, order], order, cache), model(text)[:, order], rtol=0, atol=1e-5)
    assert cache.length == 4
    with pytest.raises(ValueError, match="position 6 leaves a gap: the next free one is 5"):
        model(text[:, :2], torch.tensor([6, 4]), cache)


def test_logits_with_a_fixed_cache_equal_those_with_a_growing_one() -> None:
    net, tokens = tiny.model(), tiny.random_tokens(12)[0].tolist()
    grown = net.new_cache(40)
    want = [prefill(net, tokens[:5], grown)] + [prefill(net, [token], grown) for token in tokens[5:]]
    net.make_cache = tiny.cache_maker(True)
    fixed = net.new_cache(40)
    assert fixed.fixed
    got = [prefill(net, tokens[:5], fixed)] + [prefill(net, [token], fixed) for token in tokens[5:]]
    assert fixed.visible == 40  # attention saw all slots, through a mask
    torch.testing.assert_close(torch.stack(got), torch.stack(want), rtol=0, atol=1e-5)


def test_sizes_and_lengths_must_be_integers_in_range() -> None:
    model = tiny.model()
    for sizes in ((-1,), (1.5,), ("a",), (True,), (8, 0), (8, -1), (8, 1.0)):
        with pytest.raises(UsageError, match=r"^(max_len|batch) of a KV cache must be an integer of at least 1, got"):
            model.new_cache(*sizes)  # type: ignore[arg-type]
    cache = model.new_cache(8, batch=3)
    prefill(model, [1, 2], model.new_cache(8))
    cache.place(2)
    cache.commit()
    for length in (1.5, True, -1, 3):
        with pytest.raises(UsageError, match="must be an integer from 0 to 2, got"):
            cache.trim(length)  # type: ignore[arg-type]
