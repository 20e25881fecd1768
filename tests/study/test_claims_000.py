"""Note 000: position encoding, the proof of RoPE, and the worked example with Meta's functions. One test per claim."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llama
from llama import attention, rope
from llama.config import ModelConfig
from llama.rope_scaling import inverse_frequencies
from llama.study import encodings, forms, measures
from llama.study.topics.example import XK, XQ

from .. import meta_code, tiny
from . import by_hand
from .by_hand import LAW, bases, even_dims, gaussians, positions, seeds
from .watch import watch

pytestmark = pytest.mark.usefixtures("one_thread")

FREQS_CIS = llama.precompute_freqs_cis(8, 5)  # (T, D/2): the table of the worked example


def score(q: torch.Tensor, k: torch.Tensor, m: int, n: int, inv_freq: torch.Tensor) -> float:
    """The score of q (D,) at position m and k (D,) at position n, by the library's rotation in float64."""
    rotated = [measures.turn(x[None], torch.tensor([at]), torch.as_tensor(inv_freq))[0] for x, at in ((q, m), (k, n))]
    return float(rotated[0] @ rotated[1])


# -------------------------------------------------------------------------------- embeddings, attention, and order
def test_000_01_an_embedding_maps_each_id_to_a_row_of_numbers() -> None:
    model, tokens = tiny.model(), tiny.random_tokens(9, batch=3)
    embedded = model.tok_embeddings(tokens)  # (B, N, C)
    assert embedded.shape == (3, 9, tiny.CONFIG.dim)
    one_hot = torch.nn.functional.one_hot(tokens, tiny.CONFIG.vocab_size).float()  # (B, N, V)
    torch.testing.assert_close(embedded, one_hot @ model.tok_embeddings.weight, rtol=0, atol=1e-6)


@LAW
@given(seed=seeds)
def test_000_03_without_positions_attention_ignores_the_order(seed: int) -> None:
    n, d = 6, 8
    x, wq, wk, wv = (gaussians(seed + i, *s) for i, s in enumerate([(n, d), (d, d), (d, d), (d, d)]))
    order = torch.from_numpy(by_hand.rng(seed).permutation(n))
    at = torch.arange(n)
    x, wq, wk, wv = x / 2, wq / d**0.5, wk / d**0.5, wv / d**0.5
    none, rotary = encodings.make("none", d, d), encodings.make("rope", d, d)
    permuted = encodings.attend(none, x[order], wq, wk, wv, at)
    torch.testing.assert_close(permuted, encodings.attend(none, x, wq, wk, wv, at)[order], rtol=0, atol=1e-14)
    q, k, v = (x @ w.T for w in (wq, wk, wv))  # the model's attention, with one head and no mask
    plain = attention.reference(q[None, None], k[None, None], v[None, None])[0, 0]
    again = attention.reference(q[None, None, order], k[None, None, order], v[None, None, order])[0, 0]
    torch.testing.assert_close(again, plain[order], rtol=0, atol=1e-5)
    if not torch.equal(order, at):
        with_rope = encodings.attend(rotary, x[order], wq, wk, wv, at)
        assert float((with_rope - encodings.attend(rotary, x, wq, wk, wv, at)[order]).abs().max()) > 1e-4


@pytest.mark.parametrize("form", rope.FORMS)
def test_000_05_counting_from_1_or_from_0_gives_the_same_logits(form: str) -> None:
    """OK7: scores depend on differences alone; only "position 0 is unchanged" requires counting from 0."""
    model, tokens = tiny.model(rope=form), tiny.random_tokens(10)
    from_0, from_1 = watch(model, tokens), watch(model, tokens, torch.arange(1, 11))
    torch.testing.assert_close(from_1.logits, from_0.logits, rtol=0, atol=2e-5)
    assert not torch.allclose(from_1.q[0], from_0.q[0], atol=1e-2)


def test_000_06_added_positions_change_q_k_and_v_and_rotation_does_not_change_v() -> None:
    x, w = gaussians(0, 1, 16), gaussians(1, 16, 16)
    here, there = torch.tensor([3]), torch.tensor([30])
    added, rotary = encodings.make("sinusoidal", 16, 16), encodings.make("rope", 16, 16)
    for encoding, moves in ((added, (True, True, True)), (rotary, (True, True, False))):
        q_and_v = [
            (encoding.turn(encoding.embed(x, at) @ w.T, at), encoding.embed(x, at) @ w.T) for at in (here, there)
        ]
        (q, v), (q_later, v_later) = q_and_v
        assert (not torch.equal(q, q_later), not torch.equal(q, q_later), not torch.equal(v, v_later)) == moves
    # The same in the model: the inputs of attention for a text, and for the same text 40 positions later.
    model, tokens = tiny.model(), tiny.random_tokens(7)
    first, later = watch(model, tokens), watch(model, tokens, torch.arange(40, 47))
    assert torch.equal(first.v[0], later.v[0])
    assert not torch.allclose(first.q[0], later.q[0], atol=1e-2)
    assert not torch.allclose(first.k[0], later.k[0], atol=1e-2)


@LAW
@given(seed=seeds, tokens=st.integers(1, 9))
def test_000_07_weights_are_a_softmax_over_the_visible_keys(seed: int, tokens: int) -> None:
    q, k = gaussians(seed, tokens, 8), gaussians(seed + 1, tokens, 8)
    at = torch.arange(tokens)
    for mask in (None, attention.causal_mask(at, at)):
        weights = attention.reference_weights(q[None, None], k[None, None], mask)[0, 0]  # (T, T)
        torch.testing.assert_close(weights.sum(-1), torch.ones(tokens), rtol=0, atol=1e-6)
        for m in range(tokens):
            visible = tokens if mask is None else m + 1  # E06: in a decoder token m has m + 1 weights
            expected = by_hand.softmax(np.array([q[m].numpy() @ k[n].numpy() / 8**0.5 for n in range(visible)]))
            np.testing.assert_allclose(weights[m, :visible].numpy(), expected, rtol=0, atol=1e-6)
            assert not bool(weights[m, visible:].any())


@LAW
@given(seed=seeds, tokens=st.integers(1, 9))
def test_000_08_the_output_is_the_weighted_sum_of_the_values(seed: int, tokens: int) -> None:
    q, k, v = (gaussians(seed + i, tokens, 8) for i in range(3))
    at = torch.arange(tokens)
    expected = by_hand.attention(q.numpy(), k.numpy(), v.numpy(), lambda m, n: n <= m)
    for attend in tiny.FUNCTIONS.values():
        out = attend(*(x.float()[None, None] for x in (q, k, v)), attention.causal_mask(at, at))[0, 0]
        np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=2e-6)


# --------------------------------------------------------------------------------------- encodings that are added
@pytest.mark.parametrize(("d", "expected"), [(4, 0.0444064), (8, 0.185977), (16, 1.014725), (128, 1.952596)])
def test_000_09_every_position_has_a_distinct_vector(d: int, expected: float) -> None:
    table = measures.sinusoids(torch.arange(8192), d)  # (N, d)
    # |p_m - p_n|^2 = d - 2 sum_i cos((m - n) w_i), so the smallest distance is among the distances to row 0.
    from_first = (table[1:] - table[0]).norm(dim=-1)  # (N - 1,)
    distance = np.arange(1, 8192)
    by_angle = np.sqrt(d - 2 * np.cos(np.outer(distance, by_hand.frequencies(d))).sum(-1))
    np.testing.assert_allclose(from_first.numpy(), by_angle, rtol=0, atol=1e-7)
    assert float(from_first.min()) == pytest.approx(expected, rel=1e-4)
    rows = torch.from_numpy(by_hand.rng(0).choice(8192, 300, replace=False))
    apart = torch.cdist(table[rows], table[rows], compute_mode="donot_use_mm_for_euclid_dist")
    assert float((apart + 9 * torch.eye(300)).min()) >= expected - 1e-4


@LAW
@given(seed=seeds)
def test_000_10_scores_with_added_positions_do_not_depend_on_the_distance_alone(seed: int) -> None:
    d, n = 16, 12
    x = gaussians(seed, 1, d).expand(n, d)  # one repeated word: all differences come from the positions
    wq, wk = gaussians(seed + 1, d, d) / 4, gaussians(seed + 2, d, d) / 4
    added = encodings.scores(encodings.make("sinusoidal", d, d), x, wq, wk, torch.arange(n))
    rotary = encodings.scores(encodings.make("rope", d, d), x, wq, wk, torch.arange(n))
    assert measures.diagonal_spread(added) > 0.05
    assert measures.diagonal_spread(rotary) < 1e-12


def test_000_11_sinusoids_are_not_trained() -> None:
    model, tokens = tiny.model().train(), tiny.random_tokens(12)
    before = measures.sinusoids(torch.arange(12), 64)
    rows = [row.clone() for row in model.rope.table]
    with torch.enable_grad():
        model.requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(tokens).square().mean().backward()
        optimizer.step()
    assert not torch.equal(model.tok_embeddings.weight, tiny.model().tok_embeddings.weight)
    assert torch.equal(measures.sinusoids(torch.arange(12), 64), before)
    assert all(torch.equal(a, b) for a, b in zip(model.rope.table, rows, strict=True))
    assert not [name for name, _ in model.named_parameters() if "rope" in name or "pos" in name]


def test_000_13_a_sinusoid_is_added_once_and_rope_rotates_in_every_layer() -> None:
    config = dataclasses.replace(tiny.CONFIG, n_layers=3)
    seen = watch(tiny.model(config), tiny.random_tokens(5))
    assert seen.steps == ["look up"] + ["rotate", "attend"] * 3
    # The sinusoid changes the embedding and nothing else, RoPE changes q and k and nothing else.
    x, at = gaussians(0, 4, 16), torch.arange(1, 5)
    added, rotary = encodings.make("sinusoidal", 16, 16), encodings.make("rope", 16, 16)
    assert torch.equal(added.turn(x, at), x)
    assert torch.equal(rotary.embed(x, at), x)
    assert not torch.equal(added.embed(x, at), x)
    assert not torch.equal(rotary.turn(x, at), x)


@LAW
@given(seed=seeds)
def test_000_14_projecting_the_sum_is_the_sum_of_the_projections(seed: int) -> None:
    d, n = 16, 7
    x, wq, wk = gaussians(seed, n, d), gaussians(seed + 1, d, d), gaussians(seed + 2, d, d)
    at = torch.arange(5, 5 + n)
    p = torch.from_numpy(np.stack([by_hand.sinusoid(t, d) for t in range(5, 5 + n)]))
    q = encodings.make("sinusoidal", d, d).embed(x, at) @ wq.T
    torch.testing.assert_close(q, x @ wq.T + p @ wq.T, rtol=0, atol=1e-12)
    terms = encodings.additive_terms(x, p, wq, wk)
    assert len(terms) == 4
    total = encodings.scores(encodings.make("sinusoidal", d, d), x, wq, wk, at) * d**0.5
    torch.testing.assert_close(sum(terms.values()), total, rtol=0, atol=1e-11)


@LAW
@given(d=even_dims, base=bases, start=positions)
def test_000_15_the_sinusoidal_table(d: int, base: float, start: int) -> None:
    """E01, E02: the exponent contains the pair index t, not the position; the pairs are 2t and 2t + 1 from 0."""
    ours = measures.sinusoids(torch.arange(start, start + 5), d, base).numpy()
    for row, position in enumerate(range(start, start + 5)):
        np.testing.assert_allclose(ours[row], by_hand.sinusoid(position, d, base), rtol=0, atol=1e-11)


@LAW
@given(d=even_dims, position=st.integers(0, 1000), k=st.integers(-1000, 1000))
def test_000_16_the_vector_k_positions_later_is_a_linear_function(d: int, position: int, k: int) -> None:
    """One block-diagonal matrix serves all positions; its blocks depend on k alone."""
    ours = measures.sinusoids(torch.tensor([position, position + k]), d).numpy()
    # The entries are (sin, cos), so the matrix that increases the angle is the transpose of the usual rotation.
    np.testing.assert_allclose(ours[1], by_hand.rotation(k, by_hand.frequencies(d)).T @ ours[0], rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------------- RoPE in the plane: the proof
@LAW
@given(seed=seeds, m=positions, n=positions, shift=st.integers(0, 4096), base=bases)
def test_000_19_scores_depend_on_the_distance_alone(seed: int, m: int, n: int, shift: int, base: float) -> None:
    q, k = gaussians(seed, 64) / 2, gaussians(seed + 1, 64) / 2
    inv_freq, _ = inverse_frequencies(64, base)
    moved = score(q, k, m + shift, n + shift, inv_freq)
    assert abs(moved - score(q, k, m, n, inv_freq)) < 1e-9
    # The right-hand side: g is a function of the distance, and not a constant.
    assert abs(moved - score(q, k, m - n, 0, inv_freq)) < 1e-9
    assert abs(moved - score(q, k, m - n + 1, 0, inv_freq)) > 1e-6


def test_000_19_scores_in_float32_change_by_rounding_only() -> None:
    """At D = 128, for vectors of length about 8 and shifts up to 4,096."""
    q, k = (gaussians(seed, 1, 1, 1, 128).float() / 2**0.5 for seed in (0, 1))
    table, shifts = llama.precompute_freqs_cis(128, 4200), torch.arange(4097)
    at_m, at_n = (
        rope.apply_rotary_emb(x.expand(4097, 1, 1, 128), x.expand(4097, 1, 1, 128), table[shifts + at][:, None])[0]
        for x, at in ((q, 37), (k, 5))
    )
    scores = (at_m * at_n).sum(-1).flatten()  # (shifts,)
    assert float(q.norm()) == pytest.approx(8, abs=1)
    moved = float((scores - scores[0]).abs().max())
    assert 0 < moved < 4e-4


@LAW
@given(seed=seeds, m=positions, n=positions, theta=st.floats(0.001, 3))
def test_000_20_the_solution_in_the_plane(seed: int, m: int, n: int, theta: float) -> None:
    """f_q = (W_q x) e^(im theta), f_k likewise; g = Re[(W_q x_m) (W_k x_n)* e^(i(m - n) theta)]."""
    x_m, x_n = gaussians(seed, 2), gaussians(seed + 1, 2)
    wq, wk = gaussians(seed + 2, 2, 2), gaussians(seed + 3, 2, 2)
    ours = score(wq @ x_m, wk @ x_n, m, n, torch.tensor([theta]))
    theta = float(torch.tensor([theta]))  # rounded to float32, as in the library
    q, k = complex(*(wq @ x_m).tolist()), complex(*(wk @ x_n).tolist())
    g = (q * k.conjugate() * complex(math.cos((m - n) * theta), math.sin((m - n) * theta))).real
    assert abs(ours - g) < 1e-12 * (1 + abs(q) * abs(k)) * (1 + (m + n) * theta)


@LAW
@given(seed=seeds)
def test_000_21_the_real_part_of_q_times_the_conjugate_of_k_is_their_product(seed: int) -> None:
    q, k = gaussians(seed, 2), gaussians(seed + 1, 2)
    a, b = (torch.view_as_complex(x) for x in (q, k))
    assert torch.view_as_real(b.conj().resolve_conj()).tolist() == [k[0].item(), -k[1].item()]
    assert float((a * b.conj()).real) == pytest.approx(float(q @ k), abs=1e-14)


@LAW
@given(m=st.integers(0, 300), n=st.integers(0, 300), base=bases)
def test_000_22_the_table_follows_eulers_formula(m: int, n: int, base: float) -> None:
    m, n = max(m, n), min(m, n)
    table = llama.precompute_freqs_cis(16, 301, base).to(torch.complex128)
    expected = np.array([math.cos(m * w) + 1j * math.sin(m * w) for w in by_hand.frequencies(16, base)])
    np.testing.assert_allclose(table[m].numpy(), expected, rtol=0, atol=3e-5)
    np.testing.assert_allclose(table[m].abs().numpy(), 1, rtol=0, atol=2e-7)
    np.testing.assert_allclose((table[m] * table[n].conj()).numpy(), table[m - n].numpy(), rtol=0, atol=5e-5)


@LAW
@given(seed=seeds)
def test_000_23_a_pair_is_read_as_a_complex_number_and_back(seed: int) -> None:
    x = gaussians(seed, 1, 3, 2, 8).float()
    ones = torch.ones(3, 4, dtype=torch.complex64)
    assert all(torch.equal(out, x) for out in rope.apply_rotary_emb(x, x, ones))
    quarter, _ = rope.apply_rotary_emb(x, x, 1j * ones)  # i (a + ib) = -b + ia: a is the first entry, b the second
    assert torch.equal(quarter[..., 0::2], -x[..., 1::2])
    assert torch.equal(quarter[..., 1::2], x[..., 0::2])


@LAW
@given(seed=seeds, angle=st.floats(-7, 7))
def test_000_24_the_complex_product_is_the_rotation_matrix(seed: int, angle: float) -> None:
    q = gaussians(seed, 2)
    q = q / q.norm()
    at, inv_freq = torch.tensor([1]), torch.tensor([angle], dtype=torch.float64)
    by_product = measures.turn(q[None], at, inv_freq)[0]
    by_matrix = forms.rotation_matrix(inv_freq.cos(), inv_freq.sin()) @ q
    a, b = q.tolist()
    written_out = [a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)]
    assert float((by_product - by_matrix).abs().max()) < 1e-15
    assert by_product.tolist() == pytest.approx(written_out, abs=1e-15)


@LAW
@given(seed=seeds, m=positions, d=even_dims, base=bases)
def test_000_25_rotation_preserves_lengths_and_angles(seed: int, m: int, d: int, base: float) -> None:
    angles = m * torch.from_numpy(by_hand.frequencies(d, base))
    matrix = forms.rotation_matrix(angles.cos(), angles.sin())
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(d, dtype=torch.float64), rtol=0, atol=1e-14)
    assert float(torch.linalg.det(matrix)) == pytest.approx(1, abs=1e-12)
    q = gaussians(seed, 1, 1, 1, d).float()
    row = rope.freqs_cis_at(torch.tensor([m]), inverse_frequencies(d, base)[0])
    rotated, _ = rope.apply_rotary_emb(q, q, row)
    assert float(rotated.norm()) == pytest.approx(float(q.norm()), rel=1e-6)


@LAW
@given(seed=seeds, n=positions)
def test_000_26_keys_are_rotated_like_queries(seed: int, n: int) -> None:
    q, k = gaussians(seed, 1, 1, 3, 16).float(), gaussians(seed + 1, 1, 1, 2, 16).float()
    row = rope.freqs_cis_at(torch.tensor([n]), inverse_frequencies(16)[0])
    _, rotated = rope.apply_rotary_emb(q, k, row)
    as_query, _ = rope.apply_rotary_emb(k, k, row)
    assert torch.equal(rotated, as_query)
    angles = np.float64(np.float32(n) * inverse_frequencies(16)[0].numpy())  # rounded as in the library
    expected = k[0, 0].double().numpy() @ by_hand.rotation(1, angles).T
    np.testing.assert_allclose(rotated[0, 0].numpy(), expected, rtol=0, atol=2e-6)


@LAW
@given(seed=seeds, m=positions, n=positions, theta=st.floats(0.001, 3))
def test_000_27_g_written_out_in_real_numbers(seed: int, m: int, n: int, theta: float) -> None:
    (q1, q2), (k1, k2) = gaussians(seed, 2).tolist(), gaussians(seed + 1, 2).tolist()
    angle = (m - n) * theta
    g = (complex(q1, q2) * complex(k1, k2).conjugate() * np.exp(1j * angle)).real
    real = (q1 * k1 + q2 * k2) * math.cos(angle) - (q2 * k1 - q1 * k2) * math.sin(angle)
    assert abs(g - real) < 1e-13 * (1 + abs(g))


@LAW
@given(seed=seeds, m=positions, n=positions)
def test_000_28_the_product_of_the_rotated_vectors_equals_g(seed: int, m: int, n: int) -> None:
    q, k = gaussians(seed, 2), gaussians(seed + 1, 2)
    (q1, q2), (k1, k2) = q.tolist(), k.tolist()
    theta = float(inverse_frequencies(2)[0])  # 1: the only pair of D = 2
    real = (q1 * k1 + q2 * k2) * math.cos((m - n) * theta) - (q2 * k1 - q1 * k2) * math.sin((m - n) * theta)
    assert abs(score(q, k, m, n, torch.tensor([theta])) - real) < 1e-10


@LAW
@given(seed=seeds, m=st.integers(0, 40), n=st.integers(0, 40))
def test_000_29_the_matrix_between_q_and_k_is_r_of_n_minus_m(seed: int, m: int, n: int) -> None:
    """E09: with m - n, as printed, the sign of the sine is wrong; both agree only where the sine term is 0."""
    q, k = gaussians(seed, 2), gaussians(seed + 1, 2)
    w = by_hand.frequencies(2)
    true = score(q, k, m, n, torch.tensor([1.0]))
    right = q.numpy() @ by_hand.rotation(n - m, w) @ k.numpy()
    printed = q.numpy() @ by_hand.rotation(m - n, w) @ k.numpy()
    assert abs(true - right) < 1e-12
    wrong_by = 2 * math.sin(m - n) * float(q[1] * k[0] - q[0] * k[1])
    assert abs(abs(true - printed) - abs(wrong_by)) < 1e-12


# ------------------------------------------------------------------------------------------- RoPE in D dimensions
def test_000_31_the_models_q_and_k_are_r_times_w_times_x() -> None:
    """E12: pairs are entries of q and k, head by head; rotating the embedding gives something else."""
    model, tokens = tiny.model(), tiny.random_tokens(6)
    seen, at = watch(model, tokens, torch.arange(20, 26)), range(20, 26)
    w = by_hand.frequencies(16)
    block = model.layers[0]
    x = block.attention_norm(model.tok_embeddings(tokens))[0].double().numpy()  # (T, C)
    for weight, out in ((block.attention.wq.weight, seen.q[0]), (block.attention.wk.weight, seen.k[0])):
        for head in range(out.shape[1]):
            projected = x @ weight.double().numpy()[16 * head : 16 * head + 16].T  # (T, D)
            np.testing.assert_allclose(out[0, head].numpy(), by_hand.rotated(projected, at, w), rtol=0, atol=2e-5)
            rotated_embedding = by_hand.rotated(x, at, by_hand.frequencies(64)) @ weight.double().numpy()[:16].T
            assert float(np.abs(rotated_embedding - out[0, 0].numpy()).max()) > 0.5


@LAW
@given(seed=seeds, m=st.integers(0, 200), d=even_dims, base=bases)
def test_000_32_r_is_block_diagonal_and_equals_apply_rotary_emb(seed: int, m: int, d: int, base: float) -> None:
    """000-30: neighbouring entries are a pair."""
    inv_freq, _ = inverse_frequencies(d, base)
    row = rope.freqs_cis_at(torch.tensor([m]), inv_freq)  # (1, D/2)
    matrix = forms.rotation_matrix(row.real, row.imag)[0]  # (D, D)
    expected = by_hand.rotation(m, by_hand.frequencies(d, base))
    np.testing.assert_allclose(matrix.numpy(), expected, rtol=0, atol=2e-5)
    assert not bool(matrix[torch.from_numpy(np.kron(np.eye(d // 2), np.ones((2, 2))) == 0)].any())
    x = gaussians(seed, 1, 1, 1, d).float()
    rotated, _ = rope.apply_rotary_emb(x, x, row)
    torch.testing.assert_close(rotated.flatten(), matrix @ x.flatten(), rtol=0, atol=2e-6)


@LAW
@given(d=even_dims, base=bases)
def test_000_33_there_are_half_as_many_angles_as_entries(d: int, base: float) -> None:
    """E03: t runs over 1 .. d/2. 003-21: theta_i is w_(i-1), counted from 0."""
    inv_freq, _ = inverse_frequencies(d, base)
    expected = [base ** (-2 * (t - 1) / d) for t in range(1, d // 2 + 1)]
    assert inv_freq.tolist() == pytest.approx(expected, rel=1e-7)


@LAW
@given(seed=seeds, start=st.integers(0, 1000))
def test_000_34_scores_of_projected_embeddings(seed: int, start: int) -> None:
    """q_m . k_n = x_m^T W_q^T R_(n-m) W_k x_n; as printed (E10), without the transpose, the number differs."""
    d, n = 8, 5
    x, wq, wk = gaussians(seed, n, d), gaussians(seed + 1, d, d), gaussians(seed + 2, d, d)
    at = torch.arange(start, start + n)
    ours = encodings.scores(encodings.make("rope", d, d), x, wq, wk, at).numpy() * d**0.5
    w = np.float64(inverse_frequencies(d)[0].numpy())
    rows, q, k = x.numpy(), wq.numpy(), wk.numpy()
    gaps = []
    for a in range(n):
        for b in range(n):
            between = by_hand.rotation(b - a, w)
            assert abs(ours[a, b] - rows[a] @ q.T @ between @ k @ rows[b]) < 1e-9
            gaps.append(abs(ours[a, b] - rows[a] @ q @ between @ k @ rows[b]))
    assert max(gaps) > 0.1


@LAW
@given(m=st.integers(0, 50), n=st.integers(0, 50), d=even_dims)
def test_000_35_r_m_transposed_times_r_n(m: int, n: int, d: int) -> None:
    w = torch.from_numpy(by_hand.frequencies(d))
    r_m, r_n, between = (forms.rotation_matrix((at * w).cos(), (at * w).sin()) for at in (m, n, n - m))
    assert float((r_m.T @ r_n - between).abs().max()) < 1e-14


def test_000_36_project_rotate_then_compare() -> None:
    """q and k are rotated once, before the cache and before key heads are repeated; v is not rotated."""
    model, tokens = tiny.model(), tiny.random_tokens(6)
    cache = model.new_cache()
    seen = watch(model, tokens, cache=cache)
    assert seen.steps == ["look up"] + ["rotate", "cache", "attend"] * tiny.CONFIG.n_layers
    q, k = seen.before[0]
    assert (q.shape[2], k.shape[2]) == (tiny.CONFIG.n_heads, tiny.CONFIG.n_kv_heads)
    _, rotated = rope.apply_rotary_emb(q, k, llama.precompute_freqs_cis(16, 6))
    assert torch.equal(cache.k[0, :, :, :6], rotated.transpose(1, 2))
    block = model.layers[0]
    v = block.attention.wv(block.attention_norm(model.tok_embeddings(tokens))).unflatten(-1, (-1, 16))
    assert torch.equal(cache.v[0, :, :, :6], v.transpose(1, 2))


# ---------------------------------------------------------------------------------------------- the worked example
def test_000_38_two_query_heads_share_one_key_head() -> None:
    """E04: the 2 is the number of query heads per key head."""
    config = ModelConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, hidden_dim=16, vocab_size=320)
    seen = watch(tiny.model(config), tiny.random_tokens(5, batch=2))
    q, k = seen.before[0]
    assert (q.shape, k.shape) == (XQ.shape, XK.shape) == ((2, 5, 2, 8), (2, 5, 1, 8))
    assert config.n_heads // config.n_kv_heads == 2
    assert config.rope_theta == 10000.0


def test_000_39_the_query_counts_up() -> None:
    assert XQ.shape == (2, 5, 2, 8)
    for b, t, h, e in np.ndindex(2, 5, 2, 8):
        assert XQ[b, t, h, e] == ((b * 5 + t) * 2 + h) * 8 + e


def test_000_40_the_key_counts_up() -> None:
    """E11: five rows per sample, none repeated."""
    assert XK.shape == (2, 5, 1, 8)
    for b, t, e in np.ndindex(2, 5, 8):
        assert XK[b, t, 0, e] == (b * 5 + t) * 8 + e


def test_000_41_the_four_frequencies() -> None:
    assert inverse_frequencies(8)[0].tolist() == pytest.approx([1, 0.1, 0.01, 0.001], rel=5e-8)


@LAW
@given(length=st.integers(1, 60), more=st.integers(0, 60), d=even_dims, base=bases)
def test_000_42_a_longer_table_begins_with_the_shorter_one(length: int, more: int, d: int, base: float) -> None:
    longer = llama.precompute_freqs_cis(d, length + more, base)
    assert torch.equal(longer[:length], llama.precompute_freqs_cis(d, length, base))


def test_000_43_angles_are_an_outer_product() -> None:
    angles = np.unwrap(np.angle(FREQS_CIS.numpy()), axis=0)  # (T, D/2) computed from the table
    np.testing.assert_allclose(angles, np.outer([0, 1, 2, 3, 4], [1, 0.1, 0.01, 0.001]), rtol=0, atol=1e-6)


def test_000_44_from_angle_to_cos_and_sin() -> None:
    assert FREQS_CIS.dtype == torch.complex64
    assert FREQS_CIS.shape == (5, 4)
    for t, i in np.ndindex(5, 4):
        angle = t * 10.0**-i
        assert complex(FREQS_CIS[t, i]) == pytest.approx(complex(math.cos(angle), math.sin(angle)), abs=1e-7)
    assert FREQS_CIS.abs().flatten().tolist() == pytest.approx([1] * 20, abs=1e-7)


def test_000_45_the_table_must_have_one_row_per_token() -> None:
    """E53: the first rows fit only a text that begins at 0; with cached tokens, later rows are needed."""
    for rows in (1, 4, 6):
        with pytest.raises(ValueError, match="5 tokens"):
            rope.apply_rotary_emb(XQ, XK, llama.precompute_freqs_cis(8, rows))
    model, tokens = tiny.model(), tiny.random_tokens(8)
    full, cache = watch(model, tokens), model.new_cache()
    model(tokens[:, :7], cache=cache)
    step = watch(model, tokens[:, 7:], cache=cache)
    assert torch.equal(step.freqs_cis[0], llama.precompute_freqs_cis(16, 8)[7:])
    torch.testing.assert_close(step.q[0], full.q[0][:, :, 7:], rtol=0, atol=1e-5)
    by_first_row, _ = rope.apply_rotary_emb(*step.before[0], llama.precompute_freqs_cis(16, 1))
    keys = step.k[0][:, 0]  # (B, S, D): the first key head
    wrong, right = ((q[:, 0] @ keys.mT) / 4 for q in (by_first_row.transpose(1, 2), step.q[0]))
    assert float((wrong - right).abs().max()) > 0.5


def test_000_46_pairs_become_complex_numbers() -> None:
    pairs = XQ.unflatten(-1, (-1, 2))
    paired = torch.view_as_complex(pairs)
    assert (pairs.shape, paired.shape) == ((2, 5, 2, 4, 2), (2, 5, 2, 4))
    assert complex(paired[0, 1, 1, 2]) == 28 + 29j
    # In the library: multiplying pair 2 by 1 and the other pairs by 0 leaves pair 2 unchanged, as one complex number.
    only = torch.zeros(5, 4, dtype=torch.complex64)
    only[1, 2] = 1
    out, _ = rope.apply_rotary_emb(XQ, XK, only)
    assert out[0, 1, 1].tolist() == [0, 0, 0, 0, 28, 29, 0, 0]


def test_000_47_one_table_for_every_sample_and_head() -> None:
    out, _ = rope.apply_rotary_emb(XQ, XK, FREQS_CIS)
    broadcast = FREQS_CIS.view(1, 5, 1, 4)
    paired = torch.view_as_complex(XQ.unflatten(-1, (-1, 2)))
    assert torch.equal(torch.view_as_real(paired * broadcast).flatten(3), out)
    for wrong in (FREQS_CIS[:, :3], FREQS_CIS.T, FREQS_CIS[:4], FREQS_CIS[:, None]):
        with pytest.raises(ValueError, match="5 tokens"):
            rope.apply_rotary_emb(XQ, XK, wrong)


def test_000_48_one_element_computed_by_hand() -> None:
    expected = 27.708604844975795 + 29.27854534543996j
    assert (28 + 29j) * complex(math.cos(0.01), math.sin(0.01)) == pytest.approx(expected, rel=1e-15)
    assert complex(FREQS_CIS[1, 2]) == pytest.approx(0.99995 + 0.009999833j, abs=1e-8)
    out = measures.turn(XQ[0, :, 1], torch.arange(5), inverse_frequencies(8)[0])
    assert complex(*out[1, 4:6].tolist()) == pytest.approx(expected, rel=1e-9)


@LAW
@given(a=st.floats(-1e3, 1e3, width=32), b=st.floats(-1e3, 1e3, width=32))
def test_000_49_a_complex_number_becomes_two_entries_again(a: float, b: float) -> None:
    x = torch.tensor([a, b]).view(1, 1, 1, 2)
    out, _ = rope.apply_rotary_emb(x, x, torch.ones(1, 1, dtype=torch.complex64))
    assert out.flatten().tolist() == [a, b]


def test_000_50_the_output_has_the_shape_of_the_input() -> None:
    xq_out, xk_out = rope.apply_rotary_emb(XQ, XK, FREQS_CIS)
    assert (xq_out.shape, xk_out.shape) == (XQ.shape, XK.shape)
    assert [round(x, 4) for x in xq_out[0, 1, 1, 4:6].tolist()] == [27.7086, 29.2785]


def test_000_51_all_240_numbers() -> None:
    for x, out in zip((XQ, XK), rope.apply_rotary_emb(XQ, XK, FREQS_CIS), strict=True):
        heads_first = x.double().transpose(1, 2).numpy()  # (B, H, T, D)
        expected = by_hand.rotated(heads_first, range(5), by_hand.frequencies(8)).swapaxes(1, 2)
        assert float(np.abs(out.double().numpy() - expected).max()) < 1.2e-5


@LAW
@given(seed=seeds, d=even_dims, base=bases, form=st.sampled_from(list(rope.FORMS)))
def test_000_52_position_0_is_unchanged_bit_for_bit(seed: int, d: int, base: float, form: str) -> None:
    x = gaussians(seed, 2, 1, 3, d).float()
    table = rope.Rope(form, d, 8, base)
    entries = rope.interleaved_to_half(x) if table.layout == "half" else x
    q, k = rope.RotaryEmb(form)(entries, entries, table.freqs_cis(torch.tensor([0]), 1))
    assert torch.equal(q, x)
    assert torch.equal(k, x)


@LAW
@given(seed=seeds, m=positions)
def test_000_53_a_pair_moves_by_twice_the_sine_of_half_its_angle(seed: int, m: int) -> None:
    """E08: the angle falls with the pair index; the distance that a pair moves need not."""
    x, inv_freq = gaussians(seed, 1, 8), inverse_frequencies(8)[0]
    moved = (measures.turn(x, torch.tensor([m]), inv_freq) - x).view(4, 2).norm(dim=-1)
    angles = m * np.float64(inv_freq.numpy())
    np.testing.assert_allclose(
        moved.numpy(), 2 * np.abs(np.sin(angles / 2)) * x.view(4, 2).norm(dim=-1).numpy(), rtol=0, atol=1e-10
    )
    assert bool(np.all(np.diff(angles) <= 0))


def test_000_53_the_earlier_entry_does_not_always_change_more() -> None:
    ones = torch.tensor([1.0, 0.0] * 4)[None]  # four pairs of length 1

    def change(m: int) -> list[float]:
        rotated = measures.turn(ones, torch.tensor([m]), inverse_frequencies(8)[0])
        return (rotated - ones).view(4, 2).norm(dim=-1).tolist()

    assert change(6) == pytest.approx([0.282, 0.591, 0.06, 0.006], abs=5e-4)
    assert change(44)[:2] == pytest.approx([0.018, 1.617], abs=5e-4)
    _, xk_out = rope.apply_rotary_emb(XQ, XK, FREQS_CIS)
    by_entry = (xk_out - XK)[0, 4, 0].abs().tolist()
    assert by_entry[:2] == pytest.approx([27.94, 78.79], abs=5e-3)  # the second entry changed more than the first


def test_000_54_the_rotation_is_the_same_for_every_sample_and_head() -> None:
    xq_out, xk_out = rope.apply_rotary_emb(XQ, XK, FREQS_CIS)
    for x, out in ((XQ, xq_out), (XK, xk_out)):
        before, after = (y.double().unflatten(-1, (-1, 2)).numpy() for y in (x, out))
        angles = np.arctan2(after[..., 1], after[..., 0]) - np.arctan2(before[..., 1], before[..., 0])
        for b, t, h, i in np.ndindex(*angles.shape):
            if before[b, t, h, i].any():
                off = (angles[b, t, h, i] - t * 10.0**-i + math.pi) % (2 * math.pi) - math.pi
                assert abs(off) < 1e-5


def test_000_55_metas_own_functions_are_the_reference() -> None:
    folder = meta_code.unpacked("meta-llama3==0.0.1")
    names = ("precompute_freqs_cis", "reshape_for_broadcast", "apply_rotary_emb")
    meta = by_hand.functions_of(folder / "llama" / "model.py", *names)
    theirs = meta["apply_rotary_emb"](XQ, XK, meta["precompute_freqs_cis"](8, 5))
    ours = rope.apply_rotary_emb(XQ, XK, FREQS_CIS)
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).abs().max()) < 1.2e-5
    x = gaussians(0, 2, 33, 4, 128).float()
    for theta in (1e4, 5e5):
        far = meta["precompute_freqs_cis"](128, 33, theta)
        for a, b in zip(rope.apply_rotary_emb(x, x[:, :, :2], far), meta["apply_rotary_emb"](x, x[:, :, :2], far),
                        strict=True):  # fmt: skip
            assert torch.equal(a, b)
        np.testing.assert_allclose(llama.precompute_freqs_cis(128, 33, theta).numpy(), far.numpy(), rtol=0, atol=1e-5)
