"""Note 003: attention, why sqrt(d), the sinusoid as a number system, the derivation of RoPE. One test per claim."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llama import attention, rope
from llama.rope_scaling import inverse_frequencies
from llama.study import encodings, forms, measures

from .. import tiny
from . import by_hand
from .by_hand import LAW, bases, even_dims, gaussians, positions, rng, seeds

pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------------------------------------------- attention
@LAW
@given(seed=seeds, d=st.sampled_from([2, 8, 64]), queries=st.integers(1, 5), keys=st.integers(1, 7))
def test_003_02_attention_is_scores_softmax_weighted_sum(seed: int, d: int, queries: int, keys: int) -> None:
    """E36: d is the dimension of a head."""
    q, k, v = gaussians(seed, queries, d), gaussians(seed + 1, keys, d), gaussians(seed + 2, keys, d)
    expected = by_hand.attention(q.numpy(), k.numpy(), v.numpy())
    for attend in tiny.FUNCTIONS.values():
        out = attend(*(x.float()[None, None] for x in (q, k, v)))[0, 0]
        np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=3e-6)


def test_003_03_many_heads_are_a_loop_over_one() -> None:
    model = tiny.model()
    layer, x, at = model.layers[0].attention, gaussians(0, 1, 6, 64).float(), torch.arange(6)
    out = layer(x, model.rope.freqs_cis(at, 6), attention.causal_mask(at, at), at, None)[0]  # (T, C)
    w = {name: getattr(layer, name).weight.double().numpy() for name in ("wq", "wk", "wv", "wo")}
    inv_freq, hidden = by_hand.frequencies(16), x[0].double().numpy()
    expected = np.zeros((6, 64))
    for head in range(4):
        rows, shared = slice(16 * head, 16 * head + 16), slice(16 * (head // 2), 16 * (head // 2) + 16)
        q, k = (
            by_hand.rotated(hidden @ w[name][part].T, range(6), inv_freq)
            for name, part in (("wq", rows), ("wk", shared))
        )
        alone = by_hand.attention(q, k, hidden @ w["wv"][shared].T, lambda m, n: n <= m)  # (T, D)
        expected += alone @ w["wo"][:, rows].T  # concatenating and projecting is a sum over heads
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-5)


# --------------------------------------------------------------------------------------------------- why sqrt(d)
@LAW
@given(scores=st.lists(st.floats(-60, 60), min_size=1, max_size=8))
def test_003_05_the_jacobian_of_softmax(scores: list[float]) -> None:
    x = torch.tensor(scores, dtype=torch.float64)
    with torch.enable_grad():
        by_autograd = torch.autograd.functional.jacobian(lambda x: x.softmax(-1), x)
    p = by_hand.softmax(x.numpy())
    entry_by_entry = np.array(
        [[p[i] - p[i] ** 2 if i == j else -p[i] * p[j] for j in range(len(p))] for i in range(len(p))]
    )
    ours = measures.softmax_jacobian(x)
    assert float((ours - by_autograd).abs().max()) < 1e-6
    np.testing.assert_allclose(ours.numpy(), entry_by_entry, rtol=0, atol=1e-14)
    assert float(ours.sum(-1).abs().max()) < 1e-14  # weights that sum to 1 change by sums of 0


def test_003_06_the_jacobian_vanishes_when_one_score_dominates() -> None:
    jacobian = measures.softmax_jacobian(torch.tensor([0.0, 0.0, 50.0]))
    assert float(jacobian[0, 0]) == pytest.approx(math.exp(-50), rel=1e-12)  # 1.9e-22
    assert float(jacobian[0, 2]) == pytest.approx(-math.exp(-50), rel=1e-12)
    assert float(jacobian.abs().max()) < 4e-22  # p (1 - p) of the third is 2 e^-50; float64 makes it 0
    # The same by finite differences: a score larger by 1 changes no weight.
    pushed = torch.tensor([1.0, 0.0, 50.0]).double().softmax(-1) - torch.tensor([0.0, 0.0, 50.0]).double().softmax(-1)
    assert float(pushed.abs().max()) < 1e-21
    one_by_one = torch.tensor([1.0, 2.0, 3.0])
    assert float(measures.softmax_jacobian(one_by_one).abs().max()) > 0.2


@LAW
@given(level=st.floats(-200, 200), keys=st.integers(2, 9))
def test_003_06_the_jacobian_does_not_vanish_for_large_equal_scores(level: float, keys: int) -> None:
    """E37: large means large relative to the others."""
    jacobian = measures.softmax_jacobian(torch.full((keys,), level))
    assert float(jacobian.abs().max()) == pytest.approx((keys - 1) / keys**2, rel=1e-9)  # 0.222 for three


def signs(d: int) -> np.ndarray:
    """All vectors with entries 1 and -1, equally likely: independent entries of mean 0 and variance 1."""
    return np.array(list(itertools.product((-1.0, 1.0), repeat=d)))  # (2^d, d)


@pytest.mark.parametrize("d", [1, 2, 4, 6])
def test_003_07_the_mean_of_q_k_is_0(d: int) -> None:
    products = signs(d) @ signs(d).T  # every q with every k
    assert float(products.mean()) == 0
    drawn = (gaussians(0, 20000, d) * gaussians(1, 20000, d)).sum(-1)
    assert abs(float(drawn.mean())) < 5 * (d / 20000) ** 0.5  # five standard errors


@pytest.mark.parametrize("d", [1, 2, 4, 6])
def test_003_08_the_variance_of_q_k_is_d(d: int) -> None:
    """OK4: all entries of k may be equal, as long as the entries of q are independent."""
    products = signs(d) @ signs(d).T
    assert float((products**2).mean()) == d
    repeated = signs(d) @ np.stack([np.ones(d), -np.ones(d)]).T
    assert float((repeated**2).mean()) == d


@LAW
@given(
    values=st.lists(st.integers(-9, 9), min_size=2, max_size=4).filter(lambda v: len(set(v)) > 1), d=st.integers(1, 3)
)
def test_003_08_the_variance_is_d_whatever_the_distribution(values: list[int], d: int) -> None:
    """Equally likely entries from any set of numbers, normalized to mean 0 and variance 1: every q with every k."""
    entries = (np.array(values) - np.mean(values)) / np.std(values)
    every = np.array(list(itertools.product(entries, repeat=d)))  # (len^d, d)
    x, same = torch.from_numpy(every), torch.eye(d, dtype=torch.float64)
    scores = encodings.scores(encodings.Encoding(), x, same, same, torch.arange(len(x)))  # q.k / sqrt(d)
    assert float(scores.mean()) == pytest.approx(0, abs=1e-12)
    assert float(scores.var(correction=0)) == pytest.approx(1, rel=1e-12)
    assert float((every @ every.T).var()) == pytest.approx(d, rel=1e-12)


@pytest.mark.parametrize("d", [16, 64, 1024])
def test_003_08_the_variance_of_gaussians_too(d: int) -> None:
    products = (gaussians(d, 4000, d) * gaussians(d + 1, 4000, d)).sum(-1)
    # The fourth moment of q.k is 3 d^2 + 6 d, so the variance of 4,000 draws is exact to sqrt((2 + 6/d) / 4000).
    assert float(products.var()) == pytest.approx(d, rel=4 * ((2 + 6 / d) / 4000) ** 0.5)


@pytest.mark.parametrize(
    ("d", "raw", "scaled", "moves"),
    [(16, 0.628, 0.163, (0.290, 0.240)), (64, 0.819, 0.164, (0.194, 0.241)), (1024, 0.953, 0.163, (0.061, 0.241))],
)
def test_003_09_divided_by_sqrt_d_the_weights_stay_soft(
    d: int, raw: float, scaled: float, moves: tuple[float, float]
) -> None:
    """Largest of 32 weights and Frobenius norm of the Jacobian, averaged over 500 draws, raw and divided."""
    q, k = gaussians(d, 500, 1, 1, d).float(), gaussians(d + 1, 500, 1, 32, d).float()
    by_library = attention.reference_weights(q, k)[:, 0, 0].double()  # (draws, 32): divided
    scores = (q.double() @ k.double().mT)[:, 0, 0]  # (draws, 32)
    torch.testing.assert_close(by_library, (scores / d**0.5).softmax(-1), rtol=0, atol=1e-6)
    assert float((scores / d**0.5).var()) == pytest.approx(1, abs=0.05)
    largest = [float(s.softmax(-1).amax(-1).mean()) for s in (scores, scores / d**0.5)]
    assert largest == pytest.approx([raw, scaled], abs=0.03)
    norms = []
    for rows in (scores, scores / d**0.5):
        ours = torch.stack([measures.softmax_jacobian(row) for row in rows]).square().sum((1, 2)).sqrt()
        p = rows.softmax(-1)
        squares = p.square().sum(-1)  # |diag(p) - p p^T|^2 expanded
        torch.testing.assert_close(ours.square(), squares - 2 * p.pow(3).sum(-1) + squares**2, rtol=0, atol=1e-12)
        norms.append(float(ours.mean()))
    assert norms == pytest.approx(moves, abs=0.025)


# ------------------------------------------------------------------------------------------------------- sinusoids
@LAW
@given(seed=seeds)
def test_003_10_attention_alone_has_no_positions(seed: int) -> None:
    q, k, v = (gaussians(seed + i, 1, 2, 7, 8).float() for i in range(3))
    order = torch.from_numpy(rng(seed).permutation(7))
    for attend in tiny.FUNCTIONS.values():
        out = attend(q[:, :, order], k[:, :, order], v[:, :, order])
        torch.testing.assert_close(out, attend(q, k, v)[:, :, order], rtol=0, atol=2e-6)


@LAW
@given(t=st.integers(0, 100_000), i=st.integers(0, 255), half=st.integers(1, 256))
def test_003_11_one_entry_by_its_formula(t: int, i: int, half: int) -> None:
    d, i = 2 * half, i % half
    row = measures.sinusoids(torch.tensor([t]), d)[0]
    angle = t / 10000 ** (2 * i / d)
    assert float(row[2 * i]) == pytest.approx(math.sin(angle), abs=1e-10)
    assert float(row[2 * i + 1]) == pytest.approx(math.cos(angle), abs=1e-10)


@LAW
@given(d=st.sampled_from([4, 8, 64, 512]), base=bases)
def test_003_12_wavelengths_are_a_geometric_series(d: int, base: float) -> None:
    waves = measures.wavelengths(measures.frequencies(d, base)).numpy()
    assert waves[0] == pytest.approx(2 * math.pi, rel=1e-7)
    np.testing.assert_allclose(waves[1:] / waves[:-1], base ** (2 / d), rtol=2e-7)
    assert waves[-1] == pytest.approx(base ** ((d - 2) / d) * 2 * math.pi, rel=1e-7)


def test_003_12_the_last_wavelength_at_512() -> None:
    """OK3: not 10000 * 2 pi, which no pair reaches."""
    waves = measures.wavelengths(measures.frequencies(512))
    assert float(waves[-1]) == pytest.approx(60611.5, abs=0.1)
    assert float(waves.max()) < 20000 * math.pi


@LAW
@given(k=st.integers(-300, 300), d=st.sampled_from([2, 8, 64]), base=bases)
def test_003_16_one_matrix_shifts_every_encoding_by_k(k: int, d: int, base: float) -> None:
    t = torch.arange(300, 340)
    now, later = measures.sinusoids(t, d, base).numpy(), measures.sinusoids(t + k, d, base).numpy()
    np.testing.assert_allclose(later, now @ by_hand.rotation(k, by_hand.frequencies(d, base)), rtol=0, atol=1e-12)


@LAW
@given(t=st.integers(0, 1000), k=st.integers(-500, 500), w=st.floats(1e-4, 1))
def test_003_17_a_sine_and_its_cosine_rotate_clockwise(t: int, k: int, w: float) -> None:
    """OK1: the vector is (sin, cos), so the matrix with the minus sign below the diagonal is right."""
    c, s = math.cos(w * k), math.sin(w * k)
    at_t = np.array([math.sin(w * t), math.cos(w * t)])
    later = np.array([[c, s], [-s, c]]) @ at_t
    assert later == pytest.approx([math.sin(w * (t + k)), math.cos(w * (t + k))], abs=1e-12)
    # The angle of (sin, cos) is pi/2 - w t: as t grows, it rotates in the opposite direction to R_m.
    clockwise = np.array([math.cos(math.pi / 2 - w * t), math.sin(math.pi / 2 - w * t)])
    assert at_t == pytest.approx(clockwise, abs=1e-12)
    ours = forms.rotation_matrix(*torch.tensor([[c], [s]], dtype=torch.float64)).T
    assert later == pytest.approx((ours @ torch.from_numpy(at_t)).tolist(), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_003_18_in_the_complete_score_the_distance_is_in_one_term_of_four(seed: int) -> None:
    """E47: only p_m . p_n depends on the distance alone; with W_q^T W_k in between it no longer does."""
    d, n = 16, 24
    x, wq, wk = gaussians(seed, n, d), gaussians(seed + 9, d, d) / 4, gaussians(seed + 18, d, d) / 4
    p = measures.sinusoids(torch.arange(n), d)
    terms = encodings.additive_terms(x, p, wq, wk)
    total = encodings.scores(encodings.make("sinusoidal", d, d), x, wq, wk, torch.arange(n))
    alone, mixed = measures.diagonal_spread(p @ p.T), measures.diagonal_spread(terms["position-position"])
    assert alone < 1e-13
    assert mixed > 1
    assert measures.diagonal_spread(total * d**0.5) > mixed
    one_word = x[:1].expand(n, d)
    rotary = encodings.scores(encodings.make("rope", d, d), one_word, wq, wk, torch.arange(n))
    assert measures.diagonal_spread(rotary) < 1e-13


# ------------------------------------------------------------------------------------------------------------ RoPE
@LAW
@given(seed=seeds, m=positions, w=st.floats(1e-4, 1))
def test_003_19_a_query_is_rotated_counter_clockwise(seed: int, m: int, w: float) -> None:
    q = gaussians(seed, 2)
    inv_freq = torch.tensor([w], dtype=torch.float64)
    ours = measures.turn(q[None], torch.tensor([m]), inv_freq)[0]
    c, s = math.cos(w * m), math.sin(w * m)
    assert ours.tolist() == pytest.approx((np.array([[c, -s], [s, c]]) @ q.numpy()).tolist(), abs=1e-12)
    before, after = (math.atan2(float(x[1]), float(x[0])) for x in (q, ours))
    off = (after - before - w * m + math.pi) % (2 * math.pi) - math.pi
    assert abs(off) < 1e-9  # the angle has grown by w m: counter-clockwise


@LAW
@given(seed=seeds, m=positions, n=positions, d=st.sampled_from([2, 8, 32]))
def test_003_20_the_product_is_q_r_of_n_minus_m_k(seed: int, m: int, n: int, d: int) -> None:
    """OK2."""
    q, k, inv_freq = gaussians(seed, d), gaussians(seed + 1, d), inverse_frequencies(d)[0]
    q_m, k_n = (measures.turn(x[None], torch.tensor([at]), inv_freq)[0] for x, at in ((q, m), (k, n)))
    between = by_hand.rotation(n - m, np.float64(inv_freq.numpy()))
    assert float(q_m @ k_n) == pytest.approx(float(q.numpy() @ between @ k.numpy()), abs=1e-10)


@LAW
@given(seed=seeds, m=st.integers(0, 500), d=even_dims, base=bases)
def test_003_22_the_element_wise_form(seed: int, m: int, d: int, base: float) -> None:
    """E33: the last two entries of the second column are (-x_d, x_(d-1)); only this pair is wrong as printed."""
    x = gaussians(seed, 1, 1, 1, d).float()
    row = rope.freqs_cis_at(torch.tensor([m]), inverse_frequencies(d, base)[0])
    ours = forms.apply_elementwise(x, row.real, row.imag)
    cos, sin = (part.repeat_interleave(2, -1) for part in (row.real, row.imag))
    expected = by_hand.rotation(m, by_hand.frequencies(d, base)) @ x.double().flatten().numpy()
    np.testing.assert_allclose(ours.flatten().numpy(), expected, rtol=0, atol=2e-4)
    swapped = forms.quarter_turn(x).flatten()
    assert swapped.view(-1, 2).tolist() == [[-b, a] for a, b in x.view(-1, 2).tolist()]
    printed = swapped.clone()
    printed[-2:] = torch.stack((-x.flatten()[-2], x.flatten()[-1]))
    off = (x.flatten() * cos[0] + printed * sin[0] - ours.flatten()).abs()
    assert not bool(off[:-2].any())
    wrong_by = float((x.flatten()[-1] - x.flatten()[-2]).abs()) * abs(float(sin[0, -1]))
    assert off[-2:].tolist() == pytest.approx([wrong_by, wrong_by], abs=1e-6)
