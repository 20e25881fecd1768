"""Note 001: why sinusoids, the two styles of RoPE, the base, and longer contexts. One test per claim."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llama
from llama import rope, rope_scaling
from llama.errors import ContextLengthError
from llama.rope_scaling import inverse_frequencies
from llama.study import encodings, measures

from .. import tiny
from . import by_hand
from .by_hand import LAW, bases, gaussians, positions, rng, seeds

pytestmark = pytest.mark.usefixtures("one_thread")

factors = st.sampled_from([1.5, 2.0, 4.0, 8.0, 32.0])
heads = st.sampled_from([4, 6, 8, 64, 128])  # the base grows by factor^(D / (D - 2)), so D is above 2


def float64(kind: str, dim: int, base: float, **parameters: float) -> np.ndarray:
    """The library's frequencies before rounding to float32."""
    start = rope_scaling.Base(dim, base, max_seq_len=2048)
    return rope_scaling.SCALINGS[kind](start, parameters)[0].numpy()


# ------------------------------------------------------------------------------------------------------- sinusoids
def triangle(angles: np.ndarray) -> np.ndarray:
    """A triangle wave with the period and the range of the sine."""
    return 2 / math.pi * np.arcsin(np.sin(angles))


@pytest.mark.parametrize("d", [4, 8, 16])
def test_001_01_the_sum_formula_links_positions_and_the_period_does_not(d: int) -> None:
    """E14: a triangle wave also gives distinct encodings, but none is a linear function of an earlier one."""
    angles = np.outer(np.arange(500), by_hand.frequencies(d))
    waves = np.concatenate((triangle(angles), triangle(angles + math.pi / 2)), 1)  # (N, d)
    ours = measures.sinusoids(torch.arange(500), d).numpy()
    for table in (ours, waves):
        assert len({row.tobytes() for row in table}) == 500
    assert by_hand.linear_residual(ours[:-3], ours[3:]) < 1e-12
    assert by_hand.linear_residual(waves[:-3], waves[3:]) > 0.05


@LAW
@given(k=st.integers(1, 50), d=st.sampled_from([8, 16, 32]))
def test_001_02_a_linear_probe_predicts_the_neighbours_encoding(k: int, d: int) -> None:
    ours = measures.sinusoids(torch.arange(400), d).numpy()
    half = by_hand.rng(k).permutation(400 - k)
    fitted, *_ = np.linalg.lstsq(ours[half[:200]], ours[half[:200] + k], rcond=None)
    unseen = half[200:]
    assert float(np.abs(ours[unseen] @ fitted - ours[unseen + k]).max()) < 1e-9


@LAW
@given(seed=seeds, position=positions)
def test_001_03_the_encoding_is_added_and_changes_nothing_else(seed: int, position: int) -> None:
    encoding, at = encodings.make("sinusoidal", 16, 16), torch.tensor([position])
    x, q = gaussians(seed, 1, 16), gaussians(seed + 1, 1, 16)
    np.testing.assert_allclose((encoding.embed(x, at) - x)[0], by_hand.sinusoid(position, 16), rtol=0, atol=1e-11)
    assert torch.equal(encoding.turn(q, at), q)
    assert float(encoding.bias(at)) == 0


@LAW
@given(form=st.sampled_from(list(rope.FORMS)), start=st.integers(0, 2000), base=bases)
def test_001_05_a_stored_and_a_computed_table_are_equal(form: str, start: int, base: float) -> None:
    at = torch.arange(start, start + 4)
    stored = rope.Rope(form, 16, 4096, base)
    fresh = rope.FORMS[form].make_table(rope.freqs_cis_at(at, inverse_frequencies(16, base)[0]))
    for a, b in zip(tiny.rows(stored, at, start + 4), fresh, strict=True):
        assert torch.equal(a, b)
    d = 16
    assert torch.equal(measures.sinusoids(at, d, base), measures.sinusoids(torch.arange(start + 4), d, base)[start:])


def test_001_05_positions_have_no_weights() -> None:
    model = tiny.model()
    assert sum(p.numel() for p in model.parameters()) == tiny.CONFIG.n_params
    c = tiny.CONFIG  # all weights of the model, by the shapes of the paper; none is for positions
    attention = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    block = attention + 3 * c.dim * c.hidden_dim + 2 * c.dim
    assert tiny.CONFIG.n_params == 2 * c.vocab_size * c.dim + c.n_layers * block + c.dim


def test_001_06_a_learned_table_has_one_vector_per_position_and_a_limit() -> None:
    table = gaussians(0, 50, 16)
    learned, x = encodings.Learned(table), gaussians(1, 1, 16)
    assert learned.table.numel() == 50 * 16
    assert torch.equal(learned.embed(x, torch.tensor([49])), x + table[49])
    with pytest.raises(ContextLengthError, match="position 50"):
        learned.embed(x, torch.tensor([50]))
    with pytest.raises(IndexError):
        table[torch.tensor([50])]
    assert bool(measures.sinusoids(torch.tensor([10**6]), 16).isfinite().all())  # the fixed encoding has no end


# ---------------------------------------------------------------------------------------------------- RoPE's styles
@LAW
@given(seed=seeds, together=positions, m=st.integers(0, 500), n=st.integers(0, 500))
def test_001_08_a_common_shift_keeps_scores_and_another_rotation_does_not(
    seed: int, together: int, m: int, n: int
) -> None:
    """E22: "invariant under rotation" is true of R_p for a position p, not of other rotations."""
    d = 16
    q, k, inv_freq = gaussians(seed, 1, d), gaussians(seed + 1, 1, d), inverse_frequencies(d)[0]
    at_m, at_n, at_p = (torch.tensor([p]) for p in (m, n, together))

    def score(q: torch.Tensor, k: torch.Tensor) -> float:
        return float((measures.turn(q, at_m, inv_freq) * measures.turn(k, at_n, inv_freq)).sum())

    plain = score(q, k)
    assert abs(score(measures.turn(q, at_p, inv_freq), measures.turn(k, at_p, inv_freq)) - plain) < 1e-9
    other, _ = np.linalg.qr(rng(seed).standard_normal((d, d)))  # orthogonal, but not an R_p
    other = torch.from_numpy(other)
    assert float((q @ other).norm()) == pytest.approx(float(q.norm()))
    if abs(m - n) > 2:
        assert abs(score(q @ other, k @ other) - plain) > 1e-3


@LAW
@given(seed=seeds, m=positions, n=positions)
def test_001_09_rotation_by_absolute_positions_gives_relative_scores(seed: int, m: int, n: int) -> None:
    m, n = max(m, n), min(m, n)
    q, k = gaussians(seed, 1, 1, 1, 32).float(), gaussians(seed + 1, 1, 1, 1, 32).float()
    table = llama.precompute_freqs_cis(32, m + 1)
    absolute = rope.apply_rotary_emb(q, q, table[m : m + 1])[0] * rope.apply_rotary_emb(k, k, table[n : n + 1])[0]
    relative = rope.apply_rotary_emb(q, q, table[m - n : m - n + 1])[0] * k
    # In float32 the angle of pair 0 at position m is exact to m * 2^-24; q and k have a length of about 6.
    assert float(absolute.sum() - relative.sum()) == pytest.approx(0, abs=2e-5 + 40 * m * 2**-22)


@LAW
@given(seed=seeds, m=st.integers(1, 500), d=st.sampled_from([4, 8, 64, 128]), base=bases)
def test_001_10_the_two_styles_are_one_rotation_of_reordered_entries(seed: int, m: int, d: int, base: float) -> None:
    x, inv_freq = gaussians(seed, 1, d), inverse_frequencies(d, base)[0]
    interleaved = measures.turn(x, torch.tensor([m]), inv_freq)  # GPT-J and the paper: neighbours
    angles = m * inv_freq.double()
    cos, sin = torch.cat((angles.cos(),) * 2), torch.cat((angles.sin(),) * 2)  # (D,)

    def half(x: torch.Tensor) -> torch.Tensor:  # GPT-NeoX: entry i with entry i + D/2
        return x * cos + rope.rotate_half(x) * sin

    reordered = rope.half_to_interleaved(half(rope.interleaved_to_half(x)))
    assert float((reordered - interleaved).abs().max()) < 1e-13
    assert float((half(x) - interleaved).abs().max()) > 1e-3


# ------------------------------------------------------------------------------------------------------- the base
def test_001_12_the_two_decays_change_in_opposite_directions_with_the_base() -> None:
    """E15: a larger base decays faster over the dimensions and more slowly over the distance."""
    distances = torch.arange(1, 4097)
    slowest = [float(measures.frequencies(128, base)[-1]) for base in (1e4, 1e6)]
    over_distance = [
        float(measures.decay_bound(measures.frequencies(128, base), distances).mean()) for base in (1e4, 1e6)
    ]
    assert slowest == pytest.approx([1.15e-4, 1.24e-6], rel=1e-2)
    assert over_distance == pytest.approx([5.59, 9.17], rel=1e-2)


@LAW
@given(half=st.integers(1, 128), base=st.floats(2, 1e7))
def test_001_13_the_line_that_computes_the_frequencies(half: int, base: float) -> None:
    dim = 2 * half
    as_written = 1.0 / (base ** (np.arange(0, dim, 2).astype(np.float64) / dim))
    np.testing.assert_allclose(inverse_frequencies(dim, base)[0].numpy(), as_written, rtol=1e-7)


@pytest.mark.parametrize(("base", "mean", "below_half"), [(1e4, 5.59, 16), (5e5, 8.56, 34), (1e6, 9.17, 35)])
def test_001_14_a_larger_base_decays_later(base: float, mean: float, below_half: int) -> None:
    w = by_hand.frequencies(128, base)
    distances = np.arange(4097)
    sums = np.cumsum(np.exp(1j * np.outer(distances, w)), -1)  # (N, D/2): S_1 .. S_(D/2)
    bound = np.abs(sums).mean(-1)
    ours = measures.decay_bound(measures.frequencies(128, base), torch.arange(4097)).numpy()
    np.testing.assert_allclose(ours, bound, rtol=0, atol=1e-2)
    assert ours[1:].mean() == pytest.approx(mean, rel=1e-2)
    assert int(np.argmax(ours < ours[0] / 2)) == below_half


@LAW
@given(seed=seeds, m=positions, n=positions, d=st.sampled_from([2, 8, 64]), base=bases)
def test_001_15_the_score_as_the_real_part_of_a_sum_over_pairs(seed: int, m: int, n: int, d: int, base: float) -> None:
    q, k, inv_freq = gaussians(seed, 1, d), gaussians(seed + 1, 1, d), inverse_frequencies(d, base)[0]
    products = measures.turn(q, torch.tensor([m]), inv_freq) * measures.turn(k, torch.tensor([n]), inv_freq)
    a, b = (x[0].numpy()[0::2] + 1j * x[0].numpy()[1::2] for x in (q, k))
    expected = (a * b.conj() * np.exp(1j * (m - n) * np.float64(inv_freq.numpy()))).sum().real
    assert abs(float(products.sum()) - expected) < 1e-9


@pytest.mark.parametrize(("base", "length", "unfinished"), [(1e4, 2048, 23), (1e4, 4096, 18), (5e5, 8192, 29)])
def test_001_16_some_pairs_never_complete_a_turn_in_training(base: float, length: int, unfinished: int) -> None:
    """LLaMA 1, 2 and 3: the number of 64 pairs that do not cover the complete circle."""
    inv_freq = measures.frequencies(128, base)
    assert int((measures.turns(inv_freq, length) < 1).sum()) == unfinished
    assert int((2 * math.pi / by_hand.frequencies(128, base) > length).sum()) == unfinished
    arc = measures.seen_arc(inv_freq, length)
    angles = (length - 1) * by_hand.frequencies(128, base)
    np.testing.assert_allclose(arc.numpy(), np.minimum(angles, 2 * math.pi), rtol=1e-6)


# ----------------------------------------------------------------------------------- beyond the trained length: PI
@LAW
@given(length=st.integers(2, 400), factor=st.sampled_from([2, 4, 8]), base=bases)
def test_001_18_interpolation_divides_every_position(length: int, factor: int, base: float) -> None:
    plain = inverse_frequencies(16, base)[0]
    scaled = inverse_frequencies(16, base, {"rope_type": "linear", "factor": float(factor)})[0]
    at = torch.arange(factor * length)
    # Dividing a float32 by a power of two does not round, so the two forms agree bit for bit.
    assert torch.equal(rope.freqs_cis_at(at, scaled), rope.freqs_cis_at(at / factor, plain))
    assert float(at[-1] / factor) == length - 1 / factor  # counted from 0, slightly beyond the trained length - 1
    assert float((at[-1] + 1) / factor) == length


def test_001_19_only_the_slow_pairs_reach_angles_unseen_in_training() -> None:
    """E55: by position 2,048, 41 of the 64 pairs of LLaMA 1 have completed a turn, pair 0 326 of them."""
    inv_freq = measures.frequencies(128)
    turns = measures.turns(inv_freq, 2048)
    assert int((turns >= 1).sum()) == 41
    assert float(turns[0]) == pytest.approx(326, abs=0.5)
    seen = np.outer(np.arange(2048), by_hand.frequencies(128)) % (2 * math.pi)  # (N, D/2)
    later = (np.arange(2048, 8192)[:, None] * by_hand.frequencies(128)) % (2 * math.pi)
    new = (later > seen.max(0)).mean(0)  # fraction of the later angles beyond the largest seen
    assert new[:30].max() < 0.01
    assert new[-15:].min() > 0.3


def test_001_20_interpolation_reduces_the_distance_between_neighbours() -> None:
    step = [
        float(inverse_frequencies(128, 1e4, scaling)[0][0])
        for scaling in (None, {"rope_type": "linear", "factor": 4.0})
    ]
    assert step == [1.0, 0.25]
    x = torch.tensor([[1.0, 0.0]]).double()
    chords = [float((measures.turn(x, torch.tensor([1]), torch.tensor([w])) - x).norm()) for w in step]
    assert chords == pytest.approx([2 * math.sin(0.5), 2 * math.sin(0.125)], rel=1e-12)


# ------------------------------------------------------------------------------ beyond the trained length: NTK-aware
@LAW
@given(dim=heads, base=bases, factor=factors)
def test_001_23_ntk_aware_divides_pair_i_by_a_power_of_the_factor(dim: int, base: float, factor: float) -> None:
    """E21: only pair 0 is unchanged, only the last pair is divided by the full factor."""
    divisor = float64("default", dim, base) / float64("ntk", dim, base, factor=factor)
    i = np.arange(dim // 2)
    np.testing.assert_allclose(divisor, factor ** (2 * i / (dim - 2)), rtol=1e-12)
    assert divisor[0] == 1
    assert divisor[-1] == pytest.approx(factor, rel=1e-13)
    assert bool(np.all(np.diff(divisor) > 0))


def test_001_24_the_first_pair_is_the_fastest() -> None:
    waves = measures.wavelengths(measures.frequencies(128))
    assert float(waves[0]) == pytest.approx(6.28, abs=5e-3)
    assert bool((waves.diff() > 0).all())


def test_001_25_the_last_pair_is_the_slowest() -> None:
    """E16: the low frequencies have a large i."""
    waves = measures.wavelengths(measures.frequencies(128))
    assert int(waves.argmax()) == 63
    assert float(waves[63]) == pytest.approx(2 * math.pi * 1e4 ** (126 / 128), rel=1e-6)
    assert float(waves[63]) == pytest.approx(54410, abs=1)


def test_001_26_a_clock_distinguishes_43200_seconds() -> None:
    """E17: three hands are three pairs, so D = 6; their periods are not a geometric series, unlike RoPE's."""
    hands = 2 * math.pi / np.array([60.0, 3600.0, 43200.0])  # radians a second
    at = torch.arange(43200)
    faces = measures.turn(torch.tensor([[1.0, 0.0] * 3]).expand(43200, 6), at, torch.from_numpy(hands))
    assert len({tuple(row) for row in faces.round(decimals=6).tolist()}) == 43200
    later = measures.turn(torch.tensor([[1.0, 0.0] * 3]), torch.tensor([43200]), torch.from_numpy(hands))
    torch.testing.assert_close(later, faces[:1], rtol=0, atol=1e-9)
    np.testing.assert_allclose(measures.wavelengths(measures.frequencies(6, 60.0)), 2 * math.pi * np.array(
        [1, 60 ** (1 / 3), 60 ** (2 / 3)]), rtol=1e-6)  # fmt: skip
    assert (2 * math.pi / hands)[1:] / (2 * math.pi / hands)[:-1] == pytest.approx([60, 12])


@LAW
@given(factor=factors)
def test_001_27_interpolation_slows_every_hand_equally(factor: float) -> None:
    divisor = float64("default", 6, 1e4) / float64("linear", 6, 1e4, factor=factor)
    assert divisor.tolist() == pytest.approx([factor] * 3, rel=1e-14)
    assert 360 / 60 / divisor[0] == pytest.approx(6 / factor)  # degrees of the second hand per second


def test_001_28_the_stretched_clock() -> None:
    """E18: the radices are multiplied by 1, 1.5 and 2, the periods of the hands by 1, 1.5 and 3."""
    radix = np.array([60, 60 * 1.5, 12 * 2])
    assert radix.prod() == 129600
    assert (np.cumprod(radix) / np.cumprod([60, 60, 12])).tolist() == [1, 1.5, 3]
    divisor = float64("default", 6, 1e4) / float64("ntk", 6, 1e4, factor=3.0)
    assert divisor.tolist() == pytest.approx([1, 1.732, 3], rel=1e-3)


@LAW
@given(dim=heads, base=bases, factor=factors)
def test_001_30_the_base_is_chosen_for_the_last_pair(dim: int, base: float, factor: float) -> None:
    larger = base * factor ** (dim / (dim - 2))
    np.testing.assert_allclose(float64("ntk", dim, base, factor=factor), by_hand.frequencies(dim, larger), rtol=1e-12)
    last, interpolated = (float64(kind, dim, base, factor=factor)[-1] for kind in ("ntk", "linear"))
    assert last == pytest.approx(interpolated, rel=1e-13)


def test_001_30_the_base_for_four_times_the_length() -> None:
    ours = inverse_frequencies(128, 1e4, {"rope_type": "ntk", "factor": 4.0})[0]
    torch.testing.assert_close(ours, inverse_frequencies(128, 40889.94)[0], rtol=1e-6, atol=0)


@LAW
@given(dim=heads, base=bases, factor=factors)
def test_001_31_why_the_exponent_is_d_over_d_minus_2(dim: int, base: float, factor: float) -> None:
    larger = base * factor ** (dim / (dim - 2))
    assert larger ** (-(dim - 2) / dim) == pytest.approx(base ** (-(dim - 2) / dim) / factor, rel=1e-12)
    assert float64("ntk", dim, base, factor=factor)[-1] == pytest.approx(base ** (-(dim - 2) / dim) / factor, rel=1e-12)
