"""Note 004: absolute positions as rotating vectors, the clock, and code with four bugs. One test per claim."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llama import rope_scaling
from llama.rope_scaling import inverse_frequencies
from llama.study import encodings, measures

from . import by_hand
from .by_hand import LAW, bases, even_dims, gaussians, positions, seeds

pytestmark = pytest.mark.usefixtures("one_thread")


@LAW
@given(d=even_dims, base=bases)
def test_004_01_rope_has_the_frequencies_of_the_sinusoids_bit_for_bit(d: int, base: float) -> None:
    at = torch.arange(50)
    angles = at.double()[:, None] * rope_scaling.Base(d, base).inv_freq()  # RoPE's, before rounding to float32
    table = measures.sinusoids(at, d, base)
    assert torch.equal(table[:, 0::2], angles.sin())
    assert torch.equal(table[:, 1::2], angles.cos())
    assert torch.equal(rope_scaling.Base(d, base).inv_freq().float(), inverse_frequencies(d, base)[0])


@LAW
@given(pos=st.integers(0, 100_000), d=even_dims)
def test_004_03_sine_and_cosine_of_one_angle(pos: int, d: int) -> None:
    """E50: theta is this angle and grows with the position; the speed is the frequency."""
    row = measures.sinusoids(torch.tensor([pos]), d)[0]
    np.testing.assert_allclose(row, by_hand.sinusoid(pos, d), rtol=0, atol=1e-10)
    first = measures.sinusoids(torch.tensor([0]), d)[0]
    assert first.tolist() == [0, 1] * (d // 2)  # at position 0 every theta is 0, whatever its speed


@LAW
@given(pos=st.integers(0, 100_000), d=even_dims, base=bases)
def test_004_05_half_as_many_vectors_of_length_1(pos: int, d: int, base: float) -> None:
    pairs = measures.sinusoids(torch.tensor([pos]), d, base)[0].view(d // 2, 2)
    np.testing.assert_allclose(pairs.norm(dim=-1), 1, rtol=1e-12)
    assert float(pairs.square().sum()) == pytest.approx(d / 2, rel=1e-12)
    speeds = measures.frequencies(d, base)
    assert bool((speeds.diff() < 0).all())  # the lower the dimension, the faster


def test_004_05_sine_first_turns_clockwise() -> None:
    """E49: sin + i cos is i e^(-i theta), so when theta grows by 0.1, the vector rotates by -0.1."""
    table = measures.sinusoids(torch.arange(30), 2, 10000.0).numpy()  # frequency 1, positions 0 .. 29
    z = table[:, 0] + 1j * table[:, 1]
    np.testing.assert_allclose(z, 1j * np.exp(-1j * np.arange(30)), rtol=0, atol=1e-12)
    tenth = measures.sinusoids(torch.tensor([0.0, 0.1], dtype=torch.float64), 2).numpy()
    change = np.angle(complex(*tenth[1])) - np.angle(complex(*tenth[0]))
    assert change == pytest.approx(-0.1, abs=1e-12)


def test_004_06_six_dimensions_are_three_hands() -> None:
    speeds = measures.frequencies(6).tolist()
    assert speeds == pytest.approx([1, 0.0464, 0.00215], rel=3e-3)
    assert speeds == pytest.approx([1, 1e4 ** (-1 / 3), 1e4 ** (-2 / 3)], rel=1e-7)


@LAW
@given(m=st.integers(0, 2000), n=st.integers(0, 2000), d=even_dims, base=bases)
def test_004_10_the_product_of_two_encodings_is_a_sum_of_cosines(m: int, n: int, d: int, base: float) -> None:
    """E48: the cosine is even, so the product contains the distance but not the direction."""
    p_m, p_n = measures.sinusoids(torch.tensor([m, n]), d, base)
    expected = sum(math.cos((m - n) * w) for w in by_hand.frequencies(d, base))
    assert float(p_m @ p_n) == pytest.approx(expected, abs=1e-11)
    before, here, behind = measures.sinusoids(torch.tensor([2000 - n, 2000, 2000 + n]), d, base)
    assert float(here @ before) == pytest.approx(float(here @ behind), abs=1e-10)


@LAW
@given(seed=seeds, distance=st.integers(1, 6))
def test_004_10_rope_scores_depend_on_the_direction(seed: int, distance: int) -> None:
    q, k, inv_freq = gaussians(seed, 1, 16), gaussians(seed + 1, 1, 16), inverse_frequencies(16)[0]
    ahead, behind = (
        float((measures.turn(q, torch.tensor([50]), inv_freq) * measures.turn(k, torch.tensor([at]), inv_freq)).sum())
        for at in (50 + distance, 50 - distance)
    )
    a, b = (x[0].numpy()[0::2] + 1j * x[0].numpy()[1::2] for x in (q, k))
    sines = (2 * (a * b.conj()).imag * np.sin(distance * by_hand.frequencies(16))).sum()
    assert ahead - behind == pytest.approx(sines, abs=1e-6)
    assert abs(ahead - behind) > 1e-3


@LAW
@given(m=positions, n=positions, w=st.floats(1e-4, 1))
def test_004_11_the_two_thetas_are_angles(m: int, n: int, w: float) -> None:
    """E46: theta_1 and theta_2 are angles, not differences; the product depends on their difference."""
    one, two = m * w, n * w
    sum_of_products = math.cos(one) * math.cos(two) + math.sin(one) * math.sin(two)
    assert sum_of_products == pytest.approx(math.cos(one - two), abs=1e-12)
    units = measures.turn(torch.tensor([[1.0, 0.0]] * 2), torch.tensor([m, n]), torch.tensor([w], dtype=torch.float64))
    assert float(units[0] @ units[1]) == pytest.approx(sum_of_products, abs=1e-12)


@LAW
@given(seed=seeds, position=positions)
def test_004_13_the_position_vector_does_not_depend_on_the_word(seed: int, position: int) -> None:
    encoding, at = encodings.make("sinusoidal", 16, 16), torch.tensor([position])
    one, other = gaussians(seed, 1, 16), gaussians(seed + 1, 1, 16)
    added = encoding.embed(one, at) - one
    torch.testing.assert_close(added, encoding.embed(other, at) - other, rtol=0, atol=1e-14)
    batch = encoding.embed(torch.cat((one, other)), torch.cat((at, at)))
    torch.testing.assert_close(batch[:1] - one, added, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("d", "slowest"), [(2, 1), (4, 1e-2), (8, 1e-3), (64, 1.33e-4), (512, 1.04e-4)])
def test_004_14_the_slowest_frequency_depends_on_the_width(d: int, slowest: float) -> None:
    """E45: all frequencies are in (1/10000, 1], and none equals the lower bound."""
    speeds = measures.frequencies(d)
    assert float(speeds[-1]) == pytest.approx(slowest, rel=5e-3)
    assert float(speeds[0]) == 1
    assert float(speeds.min()) > 1e-4


def test_004_14_frequencies_fall_by_a_constant_ratio() -> None:
    """E44: the steps are not constant."""
    speeds = measures.frequencies(128).numpy()
    np.testing.assert_allclose(speeds[1:] / speeds[:-1], 0.8660, rtol=1e-4)
    steps = np.diff(speeds)
    assert (steps[0], steps[-1]) == pytest.approx((-0.134, -1.8e-5), rel=1e-2)


def test_004_15_512_dimensions_have_256_frequencies() -> None:
    assert len(set(measures.frequencies(512).tolist())) == 256
    table = measures.sinusoids(torch.arange(40), 512)
    angles = np.outer(np.arange(40), by_hand.frequencies(512))
    np.testing.assert_allclose(table[:, 0::2] ** 2 + table[:, 1::2] ** 2, 1, rtol=1e-12)
    np.testing.assert_allclose(table[:, 1::2], np.cos(angles), rtol=0, atol=1e-12)


def function_of_the_note(seq_len: int, d_model: int) -> torch.Tensor:
    """The note's function with its four mistakes fixed: arange, torch's sin and cos, and the range over d_model."""
    pe = torch.zeros((seq_len, d_model))
    pos = torch.arange(0, seq_len).unsqueeze(-1)  # (seq_len, 1)
    div_term = torch.exp(-1 * torch.arange(0, d_model, 2) * math.log(10000.0) / d_model)  # (d_model / 2,)
    pe[:, 0::2], pe[:, 1::2] = torch.sin(pos * div_term), torch.cos(pos * div_term)
    return pe


@LAW
@given(seq_len=st.integers(1, 200), d=even_dims)
def test_004_16_the_corrected_function_gives_the_table(seq_len: int, d: int) -> None:
    """E39, E40, E41."""
    ours = measures.sinusoids(torch.arange(seq_len), d)
    torch.testing.assert_close(ours.float(), function_of_the_note(seq_len, d), rtol=0, atol=5e-5)


@pytest.mark.parametrize("d", [1, 3, 15])
def test_004_16_an_odd_width_is_rejected(d: int) -> None:
    """E43: with its four mistakes fixed, the note's function still fails, with an error about shapes."""
    with pytest.raises(ValueError, match=f"even.*{d}"):
        measures.sinusoids(torch.arange(4), d)
    if d > 1:
        with pytest.raises(RuntimeError):
            function_of_the_note(4, d)


@LAW
@given(half=st.integers(1, 256), i=st.integers(0, 255))
def test_004_17_the_frequency_as_an_exponential(half: int, i: int) -> None:
    d, i = 2 * half, i % half
    as_exponential = math.exp(-(2 * i / d) * math.log(10000))
    assert 1 / 10000 ** (2 * i / d) == pytest.approx(as_exponential, rel=1e-14)
    assert float(measures.frequencies(d)[i]) == pytest.approx(as_exponential, rel=1e-7)


def test_004_17_the_printed_formula_gives_another_number() -> None:
    """E42: at i = 3, d = 16."""
    assert math.exp(2 * 3 / 16) * math.log(10000) == pytest.approx(13.401, rel=1e-4)
    assert float(measures.frequencies(16)[3]) == pytest.approx(0.031623, rel=1e-4)
