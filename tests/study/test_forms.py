"""The forms of the rotation agree on random tensors and in a model; a wrong pairing changes the results.

The reference is the formula in numpy's float64, not one of the forms.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llama import rope
from llama.model import Transformer
from llama.rope import FORMS, Rope, to_layout
from llama.rope_scaling import inverse_frequencies

from .. import tiny
from . import by_hand
from .by_hand import gaussians

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = [(1, 1, 1, 1, 2), (2, 5, 4, 2, 4), (1, 9, 3, 1, 16), (3, 4, 8, 8, 64), (2, 7, 6, 2, 128)]  # B, T, H, KV, D


def turned_by(form: str, q: Tensor, k: Tensor, positions: Tensor, base: float = 1e4) -> tuple[Tensor, Tensor]:
    """Rotate q and k (B, T, .., D) in the interleaved layout by a form, at positions (T,) or (B, T)."""
    table = Rope(form, q.shape[-1], 8192, base)
    if table.layout == "half":
        q, k = rope.interleaved_to_half(q), rope.interleaved_to_half(k)
    return tiny.rotate(table, q, k, positions, int(positions.max()) + 1)


def by_formula(x: Tensor, positions: Tensor, base: float = 1e4) -> np.ndarray[Any, Any]:
    """Rotate x (B, T, H, D) pair by pair, by the library's float32 angles and otherwise in float64."""
    d, at = x.shape[-1], positions.expand(x.shape[0], -1).numpy()  # (B, T)
    angles = (at[..., None].astype(np.float32) * inverse_frequencies(d, base)[0].numpy()).astype(
        np.float64
    )  # (B, T, D/2)
    out, entries = np.empty(x.shape), x.double().numpy()
    for i in range(d // 2):
        c, s = np.cos(angles[..., i])[..., None], np.sin(angles[..., i])[..., None]  # (B, T, 1)
        out[..., 2 * i] = entries[..., 2 * i] * c - entries[..., 2 * i + 1] * s
        out[..., 2 * i + 1] = entries[..., 2 * i] * s + entries[..., 2 * i + 1] * c
    return out


# ------------------------------------------------------------------------------------------------- random tensors
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("per_row", [False, True], ids=["shared", "per row"])
def test_every_form_equals_the_formula(form: str, size: tuple[int, ...], per_row: bool) -> None:
    batch, tokens, heads, kv, d = size
    q, k = gaussians(1, batch, heads, tokens, d).float(), gaussians(2, batch, tokens, kv, d).float()
    q = q.transpose(1, 2)  # (B, T, H, D), not contiguous
    positions = torch.from_numpy(by_hand.rng(3).integers(0, 8192, (batch, tokens) if per_row else (tokens,)))
    for x, turned in zip((q, k), turned_by(form, q, k, positions), strict=True):
        assert turned.shape == x.shape
        np.testing.assert_allclose(turned.numpy(), by_formula(x, positions), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 2**-6), (torch.float16, 2**-9), (torch.float64, 4e-6)])
def test_the_dtype_is_preserved_and_the_rotation_is_float32(form: str, dtype: torch.dtype, atol: float) -> None:
    """The result is rounded once, by at most half a step of the dtype below 8; float64 has float32's precision."""
    q, k = gaussians(1, 2, 9, 4, 32).to(dtype), gaussians(2, 2, 9, 2, 32).to(dtype)
    for x, turned in zip((q, k), turned_by(form, q, k, torch.arange(9)), strict=True):
        assert turned.dtype == dtype
        expected = by_formula(x, torch.arange(9))
        assert float(np.abs(expected).max()) < 8
        np.testing.assert_allclose(turned.double().numpy(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("heads", "d", "width"), [(1, 2, 9), (3, 8, 1), (4, 64, 5)])
def test_permuting_the_rows_of_a_weight_permutes_its_output(heads: int, d: int, width: int) -> None:
    weight, bias, x = gaussians(1, heads * d, width), gaussians(2, heads * d), gaussians(3, 5, width)
    made = (x @ weight.T + bias).unflatten(-1, (heads, d))  # (T, heads, D)
    half = x @ rope.to_half_layout(weight, d).T + rope.to_half_layout(bias, d)
    torch.testing.assert_close(half.unflatten(-1, (heads, d)), rope.interleaved_to_half(made), rtol=0, atol=1e-13)
    theirs = weight.view(heads, d // 2, 2, width).transpose(1, 2).reshape(heads * d, width)  # transformers' script
    assert torch.equal(rope.to_half_layout(weight, d), theirs)
    assert torch.equal(rope.to_interleaved_layout(theirs, d), weight)


# ------------------------------------------------------------------------------------------------ a complete model
def model_in(form: str, right: bool = True, **changes: Any) -> Transformer:
    """The tiny model in a form; if not `right`, its weights are in the other layout."""
    config = dataclasses.replace(tiny.CONFIG, **changes)
    net = Transformer(config, rope=form).requires_grad_(False).eval()
    target = net.rope.layout
    if not right:
        target = "interleaved" if target == "half" else "half"
    state = tiny.weights(config)
    net.load_state_dict({n: to_layout(n, t, config.head_dim, "interleaved", target) for n, t in state.items()})
    return net


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_heads": 6, "n_kv_heads": 2, "head_dim": 24, "rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_seq_len": 16},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_seq_len": 16},
        {"attention_bias": True},
    ],
    ids=str,
)
def test_a_model_has_the_same_logits_in_every_form(form: str, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(tiny.CONFIG, **changes)
    tokens = tiny.random_tokens(50, config, batch=2)
    definition = tiny.model(config)(tokens)
    logits = model_in(form, **changes)(tokens)
    assert float(definition.std()) > 0.5
    torch.testing.assert_close(logits, definition, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_has_numpys_logits_in_every_form(form: str) -> None:
    tokens = tiny.random_tokens(12)
    expected = by_hand.llama(tiny.weights(), tiny.CONFIG, tokens[0].tolist())
    np.testing.assert_allclose(model_in(form)(tokens)[0].numpy(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_cached_keys_are_interleaved_in_every_form(form: str) -> None:
    """So a model in another form can continue with the same cache."""
    tokens = tiny.random_tokens(20)
    first, second = model_in(form), model_in("complex")
    cache, own = first.new_cache(), second.new_cache()
    first(tokens[:, :19], cache=cache)
    second(tokens[:, :19], cache=own)
    torch.testing.assert_close(tiny.contents(cache), tiny.contents(own), rtol=0, atol=1e-5)
    torch.testing.assert_close(second(tokens[:, 19:], cache=cache), second(tokens)[:, 19:], rtol=0, atol=1e-4)


# ------------------------------------------------------------------------------------------------- the wrong pairing
@pytest.mark.parametrize("form", FORMS)
def test_the_wrong_pairing_changes_all_logits_but_the_first(form: str) -> None:
    """Measured: the first is correct; later logits differ by 0.9 of their norm, and 1 top token in 10 agrees."""
    tokens = tiny.random_tokens(60)
    right, wrong = model_in(form)(tokens)[0], model_in(form, right=False)(tokens)[0]  # (T, V)
    torch.testing.assert_close(wrong[0], right[0], rtol=0, atol=1e-4)  # at position 0 all angles are 0
    off = (wrong - right).norm(dim=-1) / right.norm(dim=-1)  # (T,)
    assert float(off[1:].mean()) > 0.7
    assert float(off[1:].min()) > 0.1
    assert float((wrong - right).abs().max()) > 3
    same = float((wrong.argmax(-1) == right.argmax(-1)).float()[1:].mean())
    assert same < 0.3
