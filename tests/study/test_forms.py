"""The forms of the rotation agree on random tensors and in a model; a wrong pairing changes the results.

The reference is the formula in numpy's float64, not one of the forms.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import llama
from llama import rope
from llama.checkpoint.write import to_layout
from llama.model import Transformer
from llama.rope import FORMS, Rope
from llama.rope_scaling import inverse_frequencies

from .. import tiny
from . import by_hand
from .by_hand import LAW, gaussians, seeds
from .watch import watch

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = list(FORMS)
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
    angles = np.float64(at[..., None].astype(np.float32) * inverse_frequencies(d, base)[0].numpy())  # (B, T, D/2)
    out, entries = np.empty(x.shape), x.double().numpy()
    for i in range(d // 2):
        c, s = np.cos(angles[..., i])[..., None], np.sin(angles[..., i])[..., None]  # (B, T, 1)
        out[..., 2 * i] = entries[..., 2 * i] * c - entries[..., 2 * i + 1] * s
        out[..., 2 * i + 1] = entries[..., 2 * i] * s + entries[..., 2 * i + 1] * c
    return out


# ------------------------------------------------------------------------------------------------- random tensors
@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("per_row", [False, True], ids=["shared", "per row"])
def test_every_form_equals_the_formula(form: str, size: tuple[int, ...], per_row: bool) -> None:
    batch, tokens, heads, kv, d = size
    q, k = gaussians(1, batch, tokens, heads, d).float(), gaussians(2, batch, tokens, kv, d).float()
    positions = torch.from_numpy(by_hand.rng(3).integers(0, 8192, (batch, tokens) if per_row else (tokens,)))
    for x, turned in zip((q, k), turned_by(form, q, k, positions), strict=True):
        assert turned.shape == x.shape
        np.testing.assert_allclose(turned.numpy(), by_formula(x, positions), rtol=0, atol=1e-5)


@LAW
@given(
    seed=seeds,
    d=st.sampled_from([2, 6, 32, 128]),
    base=st.sampled_from([1e4, 5e5]),
    form=st.sampled_from([form for form in ALL if form != "complex"]),
)
def test_every_form_equals_the_complex_form(seed: int, d: int, base: float, form: str) -> None:
    q, k = gaussians(seed, 2, 3, 4, d).float(), gaussians(seed + 1, 2, 3, 2, d).float()
    positions = torch.from_numpy(by_hand.rng(seed).integers(0, 8192, (2, 3)))
    both = zip(turned_by(form, q, k, positions, base), turned_by("complex", q, k, positions, base), strict=True)
    for ours, definition in both:
        torch.testing.assert_close(ours, definition, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 2**-6), (torch.float16, 2**-9), (torch.float64, 4e-6)])
def test_the_dtype_is_preserved_and_the_rotation_is_float32(form: str, dtype: torch.dtype, atol: float) -> None:
    """The result is rounded once, by at most half a step of the dtype below 8; float64 has float32's precision."""
    q, k = gaussians(1, 2, 9, 4, 32).to(dtype), gaussians(2, 2, 9, 2, 32).to(dtype)
    for x, turned in zip((q, k), turned_by(form, q, k, torch.arange(9)), strict=True):
        assert turned.dtype == dtype
        expected = by_formula(x, torch.arange(9))
        assert float(np.abs(expected).max()) < 8
        np.testing.assert_allclose(turned.double().numpy(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("form", ALL)
def test_views_and_strides_do_not_matter(form: str) -> None:
    q, positions = gaussians(0, 2, 4, 6, 16).float(), torch.arange(6)
    strided = q.transpose(1, 2)  # (B, T, H, D) out of (B, H, T, D)
    assert not strided.is_contiguous()
    turned, _ = turned_by(form, strided, strided[:, :, :2], positions)
    expected, _ = turned_by(form, strided.contiguous(), strided[:, :, :2].contiguous(), positions)
    assert torch.equal(turned, expected)


@LAW
@given(seed=seeds, form=st.sampled_from(ALL), m=st.integers(0, 4000), n=st.integers(0, 4000))
def test_rotations_add_up(seed: int, form: str, m: int, n: int) -> None:
    """R_m R_n = R_(m + n), in every form; the error of a float32 angle near 8,000 is up to 8,000 * 2^-23."""
    x = gaussians(seed, 1, 1, 2, 16).float()
    one, _ = turned_by(form, x, x, torch.tensor([m]))
    both, _ = turned_by(form, one, one, torch.tensor([n]))
    at_once, _ = turned_by(form, x, x, torch.tensor([m + n]))
    torch.testing.assert_close(both, at_once, rtol=0, atol=5e-3)


# ------------------------------------------------------------------------------------------ pairings, permutations
@LAW
@given(seed=seeds, d=st.sampled_from([2, 4, 16, 128]))
def test_interleaved_to_half_follows_its_rule_and_has_an_inverse(seed: int, d: int) -> None:
    x = gaussians(seed, 3, d)
    half = rope.interleaved_to_half(x)
    for i in range(d // 2):
        assert torch.equal(half[:, i], x[:, 2 * i])  # the first entries of all pairs form the first half
        assert torch.equal(half[:, d // 2 + i], x[:, 2 * i + 1])
    assert torch.equal(rope.half_to_interleaved(half), x)
    assert torch.equal(rope.interleaved_to_half(rope.half_to_interleaved(x)), x)


@LAW
@given(seed=seeds, heads=st.integers(1, 4), d=st.sampled_from([2, 8, 64]), width=st.integers(1, 9))
def test_permuting_the_rows_of_a_weight_permutes_its_output(seed: int, heads: int, d: int, width: int) -> None:
    weight, x = gaussians(seed, heads * d, width), gaussians(seed + 1, 5, width)
    bias = gaussians(seed + 2, heads * d)
    made = (x @ weight.T + bias).unflatten(-1, (heads, d))  # (T, heads, D)
    half = x @ rope.to_half_layout(weight, d).T + rope.to_half_layout(bias, d)
    reordered = rope.interleaved_to_half(made)
    torch.testing.assert_close(half.unflatten(-1, (heads, d)), reordered, rtol=0, atol=1e-13)
    for tensor in (weight, bias):
        assert torch.equal(rope.to_interleaved_layout(rope.to_half_layout(tensor, d), d), tensor)
        assert torch.equal(rope.to_half_layout(rope.to_interleaved_layout(tensor, d), d), tensor)


def test_permuting_q_and_k_alike_changes_no_score() -> None:
    q, k = gaussians(0, 5, 64), gaussians(1, 7, 64)
    torch.testing.assert_close(rope.interleaved_to_half(q) @ rope.interleaved_to_half(k).T, q @ k.T, rtol=0, atol=1e-13)


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
    torch.testing.assert_close(cache.k, own.k, rtol=0, atol=1e-5)
    torch.testing.assert_close(second(tokens[:, 19:], cache=cache), second(tokens)[:, 19:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_each_row_has_its_own_positions_in_every_form(form: str) -> None:
    tokens, at = tiny.random_tokens(6, batch=2), torch.stack((torch.arange(6), torch.arange(90, 96)))
    logits = model_in(form)(tokens, at)
    for row in range(2):
        alone = model_in("complex")(tokens[row : row + 1], at[row])
        torch.testing.assert_close(logits[row : row + 1], alone, rtol=0, atol=1e-4)


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


def test_scores_of_the_wrong_pairing_are_another_function_of_the_distance() -> None:
    """They still depend only on the distance, which makes the mistake hard to notice."""
    q, k = gaussians(0, 1, 1, 1, 16).float(), gaussians(1, 1, 1, 1, 16).float()
    table = Rope("half", 16, 200, 1e4)

    def score(m: int, n: int, reordered: bool) -> float:
        a, b = (rope.interleaved_to_half(x) if reordered else x for x in (q, k))
        at_m, at_n = (tiny.rotate(table, x, x, torch.tensor([at]), at + 1)[0] for x, at in ((a, m), (b, n)))
        return float((at_m * at_n).sum())

    assert score(40, 30, False) == pytest.approx(score(140, 130, False), abs=1e-3)
    assert (
        score(40, 40, False)
        == pytest.approx(score(40, 40, True), abs=1e-4)
        == pytest.approx(float((q * k).sum()), abs=1e-4)
    )
    apart = [abs(score(30 + d, 30, False) - score(30 + d, 30, True)) for d in range(1, 60)]
    assert max(apart) > 1
    assert sum(gap > 0.1 for gap in apart) > 50


def test_in_heads_of_two_entries_both_pairings_agree() -> None:
    x = gaussians(0, 1, 5, 2, 2).float()
    assert torch.equal(rope.interleaved_to_half(x), x)
    by_half, _ = turned_by("half", x, x, torch.arange(5))
    by_neighbours, _ = turned_by("complex", x, x, torch.arange(5))
    torch.testing.assert_close(by_half, by_neighbours, rtol=0, atol=1e-6)


def test_the_wrong_pairing_changes_the_first_layers_scores() -> None:
    """The scores of the first layer are the first values that differ."""
    tokens = tiny.random_tokens(20)
    right, wrong = watch(model_in("complex"), tokens), watch(model_in("complex", right=False), tokens)
    for seen in (right, wrong):
        assert seen.q[0].shape == (1, 4, 20, 16)
    assert torch.equal(right.v[0], wrong.v[0])
    scores = [seen.q[0] @ seen.k[0].repeat_interleave(2, 1).mT / 4 for seen in (right, wrong)]  # (1, H, T, T)
    gap = (scores[0] - scores[1]).abs()
    assert float(gap.diagonal(dim1=-2, dim2=-1).max()) < 1e-5  # a token and itself: distance 0
    assert float(gap.tril(-1).max()) > 1


def test_to_half_layout_is_the_permutation_of_transformers() -> None:
    """transformers' conversion script writes it as view, transpose, reshape."""
    weight = gaussians(0, 4 * 16, 64)
    theirs = weight.view(4, 16 // 2, 2, 64).transpose(1, 2).reshape(4 * 16, 64)
    assert torch.equal(llama.rope.to_half_layout(weight, 16), theirs)
    assert torch.equal(llama.rope.to_interleaved_layout(theirs, 16), weight)
