"""Note 001: why sinusoids, the two styles of RoPE, the base, and longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama.rope_scaling import SCALINGS, Base, inverse_frequencies
from llama.study import measures
from llama.study.report import Check, above, below, equal

from .base import (
    Array,
    Erratum,
    Table,
    fit_residual,
    frequencies,
    library_table,
    name_of,
    outcome,
    rotated,
    sinusoid_table,
    worst,
)


def _divisors(scaling: dict[str, object], dim: int, theta: float = 10000.0, **lengths: int) -> Array:
    """Factors by which a scaling of the library divides the frequencies: (D/2,)."""
    scaled = measures.frequencies(dim, theta, scaling, **lengths)
    return (measures.frequencies(dim, theta) / scaled).numpy()


# ------------------------------------------------------------------------------------------------------------- E14
def _e14_printed(count: int, dim: int) -> Array:
    angles = np.arange(count)[:, None] * frequencies(dim)  # (N, d/2)
    table = np.empty((count, dim))
    table[:, 0::2] = 2 / np.pi * np.arcsin(np.sin(angles))  # a triangle wave of the same period
    table[:, 1::2] = 2 / np.pi * np.arcsin(np.cos(angles))  # the same wave, a quarter period ahead
    return table


def _e14(wrong: Table, right: Table) -> Sequence[Check]:
    angles = 3 * frequencies(8)
    shift = np.zeros((8, 8))  # the sum-angle formula, one block per pair
    for i, angle in enumerate(angles):
        block = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
        shift[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = block
    table = right(128, 8)
    return (
        equal("E14", "triangle wave, t to t + 3: residual", fit_residual(wrong(128, 8), 3), 0.19, 0.01),
        below("001-01 E14", "sine and cosine, t to t + 3: residual", fit_residual(table, 3), 1e-12),
        below("E14", "the sum-angle formula as this map: error", worst(table[:-3] @ shift.T, table[3:]), 1e-12),
    )


E14 = Erratum(
    id="E14",
    kind="B",
    where="note 001, line 9, why sine and cosine encode relative positions",
    matter="relative positions come from the sum-angle formula, not from periodicity",
    printed="sine and cosine are periodic, and the periodicity lets the model learn relative positions",
    right="sin(a + b) and cos(a + b) are linear in sin a and cos a, so encoding t + k is a linear map of encoding t",
    why="A triangle wave has the same periods, but no linear map takes its encoding of t to its encoding of t + 3.",
    wrong_form=_e14_printed,
    right_form=library_table,
    prove=_e14,
)


# ------------------------------------------------------------------------------------------------------------- E15
def _e15(wrong: Callable[[float], float], right: Callable[[float], float]) -> Sequence[Check]:
    distances = np.arange(1, 4097)[:, None]
    small, large = right(1e4), right(1e6)
    by_hand = [
        float(np.abs(np.cumsum(np.exp(1j * distances * frequencies(128, base)), -1)).mean()) for base in (1e4, 1e6)
    ]
    return (
        equal("E15", "frequency of the slowest pair, base 1e4", wrong(1e4), 1.15e-4, 1e-6),
        equal("E15", "frequency of the slowest pair, base 1e6", wrong(1e6), 1.24e-6, 1e-8),
        below("E15", "over the dimension: ratio of base 1e6 to base 1e4", wrong(1e6) / wrong(1e4), 0.02),
        equal("001-14 E15", "mean bound over distances 1 to 4096, base 1e4", small, 5.59, 0.01),
        equal("001-14 E15", "mean bound over distances 1 to 4096, base 1e6", large, 9.17, 0.01),
        above("E15", "over distance: ratio of base 1e6 to base 1e4", large / small, 1.5),
        below("E15", "right form minus numpy", worst([small, large], by_hand), 1e-4),
    )


E15 = Erratum(
    id="E15",
    kind="B",
    where="note 001, lines 52 and 59, on the long-range decay",
    matter="'decay over the dimension' contradicts 'a larger base decays more slowly'",
    printed="the decay is over the hidden dimension, not over position; the larger the base, the slower the decay",
    right="over the dimension a larger base decays faster; over distance, which line 52 rules out, it decays more"
    " slowly",
    why="The slowest of 64 pairs rotates by 1.15e-4 per position with base 1e4 and by 1.24e-6 with base 1e6: the decay"
    " is faster. The bound on the score, averaged over distances, rises from 5.59 to 9.17: the decay is slower. Only"
    " the second effect is why long contexts use a larger base.",
    wrong_form=lambda base: float(measures.frequencies(128, base)[-1]),
    right_form=lambda base: float(measures.decay_bound(measures.frequencies(128, base), torch.arange(1, 4097)).mean()),
    prove=_e15,
)


# ------------------------------------------------------------------------------------------------------------ E15b
def _e15b(wrong: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor]) -> Sequence[Check]:
    distances = torch.arange(0, 4097)
    bound = measures.decay_bound(measures.frequencies(128), distances)
    by_hand = np.cos((distances.numpy()[:, None] - 500) * frequencies(128)).mean(-1)
    scores = right(distances)
    return (
        equal("E15b", "by the sentence alone: distance of the highest score", int(wrong(distances).argmax()), 0),
        equal("E15b", "steps out of 4096 at which the bound rises", int((bound.diff() > 0).sum()), 2020),
        equal("E15b", "key built for distance 500: distance of the highest score", int(scores.argmax()), 500),
        equal("E15b", "its score at 0 minus its score at 1000", float(scores[0] - scores[1000]), 0.0, 1e-12),
        below("E15b", "its score at 0 (at 500 it is 1)", float(scores[0]), 0.35),
        below("E15b", "right form minus numpy", worst(scores, by_hand), 1e-4),
    )


def _e15b_right(distances: Tensor) -> Tensor:
    """Scores, by distance, of a query and a key rotated by 500; all pairs have equal weight."""
    w = measures.frequencies(128)
    q = torch.tensor([1.0, 0.0] * 64, dtype=torch.float64) / 8  # (D,), of length 1
    key = measures.turn(q[None], torch.tensor([500]), w)  # (1, D): parallel to the query at distance 500
    return measures.turn(q.expand(len(distances), -1), distances, w) @ key[0]


E15b = Erratum(
    id="E15b",
    kind="C",
    where="note 001, line 52, on the long-range decay",
    matter="only a bound decays; a key can be built that scores highest 500 tokens away",
    printed="RoPE has a long-range decay",
    right="a bound on the score falls on average, although it rises at 2020 of 4096 steps; the score itself need not"
    " fall",
    why="The weights can rotate a key by any distance before RoPE does. The key here scores highest at distance"
    " 500, and equally at 0 and 1000. The decay does not prevent a model from attending to distant tokens.",
    wrong_form=lambda distances: measures.mean_cosine(measures.frequencies(128), distances),
    right_form=_e15b_right,
    prove=_e15b,
)


# ------------------------------------------------------------------------------------------------------------- E16
def _e16(wrong: Callable[[int], int], right: Callable[[int], int]) -> Sequence[Check]:
    lengths = measures.wavelengths(measures.frequencies(128))
    return (
        equal("001-24 E16", "wavelength of the pair with small i", float(lengths[wrong(128)]), 6.28, 0.01),
        equal("001-25 E16", "wavelength of the pair with large i", float(lengths[right(128)]), 54410, 1.0),
        equal("E16", "longest wavelength", float(2 * np.pi / frequencies(128).min()), float(lengths[right(128)]), 0.01),
    )


E16 = Erratum(
    id="E16",
    kind="A",
    where="note 001, line 97, the definition of 'low frequency'",
    matter="low frequencies are assigned to small i; they belong to large i",
    printed="low frequency: i is small (the later dimensions), theta_i is small, the period long",
    right="low frequency: i is large",
    why="The line before correctly assigns small i to the high frequencies. Scaling by this line stretches the fast"
    " pairs, which distinguish neighbours, and leaves the slow pairs, which need stretching, unchanged.",
    wrong_form=lambda dim: 0,
    right_form=lambda dim: dim // 2 - 1,
    prove=_e16,
)


# ------------------------------------------------------------------------------------------------------------- E17
def _e17(wrong: tuple[int, float], right: tuple[int, float]) -> Sequence[Check]:
    literal, printed = outcome(_e17_periods, *wrong), _e17_periods(6, wrong[1])
    periods = outcome(_e17_periods, *right)
    return (
        equal("E17", "dimension 3, literally", name_of(literal), "ConfigError"),
        below("E17", "3 pairs, base 60: error of periods 60, 234.9, 919.6 s", worst(printed, [60, 234.9, 919.6]), 0.1),
        below("E17", "3 pairs, base 60^3: error of periods 60, 60^2, 60^3 s", worst(periods, [60, 3600, 216000]), 0.1),
        equal("E17", "error of a clock's hour hand, s", worst(periods, [60, 3600, 43200]), 172800.0, 0.1),
    )


def _e17_periods(dim: int, base: float) -> Array:
    """Seconds per turn of each pair, where the fastest takes 60."""
    lengths = measures.wavelengths(measures.frequencies(dim, base)).numpy()
    return np.asarray(60 * lengths / lengths[0])


E17 = Erratum(
    id="E17",
    kind="B",
    where="note 001, line 99, the clock",
    matter="a clock is not a RoPE of dimension 3, base 60: three pairs are d = 6, base 60^3",
    printed="a 12-hour clock is in essence a RoPE of dimension 3 with base 60",
    right="3 hands are 3 pairs, d = 6; neighbours differ by base^(2/d), so a ratio of 60 needs base 60^3 = 216000, and"
    " the hour hand, 12 times slower than the minute hand, does not fit such a series",
    why="With base 60 and three pairs, the hands take 60, 235 and 920 seconds per turn. With base 60^3 they take 60,"
    " 3600 and 216000, but the hour hand of a clock takes 43200.",
    wrong_form=(3, 60.0),
    right_form=(6, 60.0**3),
    prove=_e17,
)


# ------------------------------------------------------------------------------------------------------------- E18
Hands = Callable[[Array], Array]  # periods of the hands, s -> periods after stretching, s


def _e18(wrong: Hands, right: Hands) -> Sequence[Check]:
    hands = np.array([60.0, 3600.0, 43200.0])
    ntk = _divisors({"rope_type": "ntk", "factor": 3.0}, 6)
    linear = _divisors({"rope_type": "linear", "factor": 3.0}, 6)
    return (
        equal("E18", "range of the clock, hours 'slowed 2 times', s", float(wrong(hands)[-1]), 86400.0),
        equal("001-28 E18", "range of the clock, a round of 24 longer hours, s", float(right(hands)[-1]), 129600.0),
        below("E18", "periods over the old ones: error of 1, 1.5, 3", worst(right(hands) / hands, [1, 1.5, 3]), 1e-12),
        below("E18", "NTK-aware divisors for factor 3: error of 1, 1.732, 3", worst(ntk, [1, 3**0.5, 3]), 1e-5),
        below("E18", "PI divisors for factor 3: error of 3, 3, 3", worst(linear, [3, 3, 3]), 1e-5),
    )


E18 = Erratum(
    id="E18",
    kind="B",
    where="note 001, line 103, the clock for NTK-aware scaling",
    matter="1, 1.5 and 2 multiply the radices; the periods grow by 1, 1.5 and 3",
    printed="seconds are unchanged, minutes slowed 1.5 times, hours slowed 2 times",
    right="a minute has 60 seconds, an hour 90 minutes and a round 24 hours, so the hands turn 1, 1.5 and 3 times"
    " slower",
    why="If the hours were slowed 2 times, the clock would cover 86400 seconds instead of the 129600 that the note"
    " computes. The factors multiply, as in NTK-aware scaling: 1, 1.732, 3.",
    wrong_form=lambda periods: periods * np.array([1.0, 1.5, 2.0]),
    right_form=lambda periods: periods * np.cumprod([1.0, 1.5, 2.0]),
    prove=_e18,
)


# ------------------------------------------------------------------------------------------------------------- E19
Interpolated = Callable[[float, float, float], float]  # (position, L_train, L_test) -> the position used instead


def _e19_right(position: float, trained: float, tested: float) -> float:
    """The angle of pair 0, whose frequency is 1, under the library's linear scaling."""
    scaling = {"rope_type": "linear", "factor": tested / trained}
    return position * float(inverse_frequencies(8, scaling=scaling)[0][0])


def _e19(wrong: Interpolated, right: Interpolated) -> Sequence[Check]:
    return (
        equal("E19", "position 8192 'shrunk by a factor' 2048/8192", wrong(8192, 2048, 8192), 32768.0),
        equal("001-18 E19", "position 8192, scaled by the library", right(8192, 2048, 8192), 2048.0, 1e-3),
        below("E19", "right form minus 8192 * 2048 / 8192", abs(right(8192, 2048, 8192) - 8192 * 2048 / 8192), 1e-3),
    )


E19 = Erratum(
    id="E19",
    kind="B",
    where="note 001, line 103, on the last dimension",
    matter="'shrunk by a factor L_train/L_test' reads as a division, which enlarges it",
    printed="the position is shrunk by a factor of L_train / L_test",
    right="the position is multiplied by L_train / L_test",
    why="The ratio is below 1. Dividing by it maps position 8192 to 32768 instead of 2048.",
    wrong_form=lambda position, trained, tested: position / (trained / tested),
    right_form=_e19_right,
    prove=_e19,
)


# ------------------------------------------------------------------------------------------------------------- E20
NewBase = Callable[[float, float, int], float]  # (s, base, d) -> the new base


def _e20_right(factor: float, base: float, dim: int) -> float:
    """The base of the library's NTK-aware frequencies, computed from the last of them."""
    last = float(measures.frequencies(dim, base, {"rope_type": "ntk", "factor": factor})[-1])
    return last ** (-dim / (dim - 2))


def _e20(wrong: NewBase, right: NewBase) -> Sequence[Check]:
    last, by_hand = float(measures.frequencies(128, wrong(4, 1e4, 128))[-1]), float(frequencies(128)[-1])
    return (
        equal("E20", "the base 500000 for s = 4 divides the last pair by", by_hand / last, 47.0, 0.1),
        equal("001-30 E20", "base of the library for s = 4", right(4, 1e4, 128), 40889.94, 0.5),
        equal("E20", "10000 * 4^(128/126)", right(4, 1e4, 128), 10000 * 4 ** (128 / 126), 0.5),
        equal(
            "001-30 E20",
            "the library's base divides the last pair by",
            by_hand / float(frequencies(128, right(4, 1e4, 128))[-1]),
            4.0,
            1e-4,
        ),
    )


E20 = Erratum(
    id="E20",
    kind="B",
    where="note 001, line 87, the heading 'NTK-Aware: RoPE-ABF'",
    matter="NTK-aware scaling and ABF both raise the base, but by different rules",
    printed="NTK-aware, also called RoPE-ABF (adjusted base frequency)",
    right="NTK-aware computes the base from the factor, base * s^(d/(d-2)); ABF sets a base by hand, such as 500000,"
    " and continues training (Xiong and others, 2023)",
    why="For s = 4, NTK-aware gives 40890. A base of 500000 corresponds to s = 47. Used for s = 4 without further"
    " training, it rotates the slow pairs 12 times slower than intended.",
    wrong_form=lambda factor, base, dim: 500000.0,
    right_form=_e20_right,
    prove=_e20,
)


def _e20_solve(base: float, s: float, d: float) -> float:
    """Find the base by bisection on its logarithm."""
    low, high = math.log(base), math.log(base) + 2 * math.log(s)
    last = -(d - 2) / d  # exponent of the last frequency
    for _ in range(60):
        middle = (low + high) / 2
        if math.exp(middle) ** last > base**last / s:
            low = middle
        else:
            high = middle
    return math.exp(low)


# ------------------------------------------------------------------------------------------------------------- E21
Divisor = Callable[[int, float, int], Array]  # (d, s, L) -> divisor of each pair


def _e21_printed(dim: int, factor: float, length: int) -> Array:
    turns = length * frequencies(dim) / (2 * np.pi)
    return np.where(turns >= 1, 1.0, factor)  # high frequencies: unchanged; low: interpolated


def _e21_right(dim: int, factor: float, length: int) -> Array:
    return _divisors({"rope_type": "ntk", "factor": factor}, dim)


def _e21(wrong: Divisor, right: Divisor) -> Sequence[Check]:
    printed, divisor = wrong(128, 4.0, 2048), right(128, 4.0, 2048)
    angle = frequencies(128)[41] / divisor[41]  # of pair 41, per position
    return (
        equal("E21", "unchanged pairs, as printed", int((np.abs(printed - 1) < 1e-6).sum()), 41),
        equal("E21", "unchanged pairs, in fact", int((np.abs(divisor - 1) < 1e-6).sum()), 1),
        equal("E21", "pairs divided by 4", int((np.abs(divisor - 4) < 1e-5).sum()), 1),
        above("E21", "largest error of 'unchanged, or interpolated'", worst(printed, divisor), 1.4),
        equal("E21", "divisor of pair 41", float(divisor[41]), 2.46, 0.01),
        equal("E21", "divisor of pair 62", float(divisor[62]), 3.91, 0.01),
        equal("E21", "pair 41 at position 8192, scaled, in radians", float(8192 * angle), 9.10, 0.01),
        equal("E21", "pair 41 at position 2048, unscaled, in radians", float(2048 * frequencies(128)[41]), 5.61, 0.01),
        below(
            "001-23 E21", "divisors minus s^(2i/(d-2))", worst(divisor, [4 ** (2 * i / 126) for i in range(64)]), 1e-5
        ),
    )


E21 = Erratum(
    id="E21",
    kind="B",
    where="note 001, lines 87 to 91 and 121, what NTK-aware scaling does and how far it reaches",
    matter="only pair 0 is unchanged and only the last divided by s; the middle is divided less",
    printed="high frequencies are unchanged, low ones are interpolated; so it reaches 8k from 2k with s = 4",
    right="pair i is divided by s^(2i/(d-2)): by 1 at i = 0, by s at the last pair, and by values between for the"
    " others",
    why="Pairs 41 to 62 never completed a turn in training and are divided by less than 4. At position 8192 pair 41"
    " reaches 9.10 radians, while training reached 5.61. A factor of 4 therefore does not reach 4 times the length.",
    wrong_form=_e21_printed,
    right_form=_e21_right,
    prove=_e21,
)


# ------------------------------------------------------------------------------------------------------------- E22
Moved = Callable[[Array], Array]  # vectors (N, D) -> vectors (N, D)


def _e22_printed(x: Array) -> Array:
    rotation, _ = np.linalg.qr(np.random.default_rng(22).standard_normal((x.shape[-1],) * 2))
    rotation[:, 0] *= np.linalg.det(rotation)  # an arbitrary rotation
    return np.asarray(x @ rotation.T)


def _e22_right(x: Array) -> Array:
    at = torch.full((len(x),), 17)
    return measures.turn(torch.from_numpy(x), at, measures.frequencies(x.shape[-1])).numpy()


def _e22(wrong: Moved, right: Moved) -> Sequence[Check]:
    rng = np.random.default_rng(122)
    q, k = rng.standard_normal((6, 8)), rng.standard_normal((6, 8))
    steps = np.arange(6)
    scores = rotated(q, steps) @ rotated(k, steps).T
    change = {form: worst(rotated(form(q), steps) @ rotated(form(k), steps).T, scores) for form in (wrong, right)}
    return (
        above("E22", "score change under an arbitrary rotation of q and k", change[wrong], 1.0),
        below("001-08 E22", "score change under the rotation R_17 of q and k", change[right], 1e-6),
        below("E22", "R_17 minus numpy", worst(right(q), rotated(q, np.full(6, 17))), 1e-6),
    )


E22 = Erratum(
    id="E22",
    kind="B",
    where="note 001, line 41, the advantages of RoPE",
    matter="'rotation invariance' means invariance to a common shift of the positions",
    printed="it keeps rotation invariance",
    right="the scores do not change when all positions grow by the same number",
    why="Rotating q and k by the matrix of 17 positions changes no score. Another rotation of the same space does,"
    " because RoPE rotates in fixed planes.",
    wrong_form=_e22_printed,
    right_form=_e22_right,
    prove=_e22,
)


# ------------------------------------------------------------------------------------------------------------- E23
Stretch = Callable[[float, float], float]  # (factor, length / trained length) -> stretch of the last pair


def _e23_right(factor: float, ratio: float) -> float:
    scaling: dict[str, object] = {"rope_type": "dynamic", "factor": factor}
    return float(_divisors(scaling, 128, seq_len=int(2048 * ratio), max_seq_len=2048)[-1])


def _e23(wrong: Stretch, right: Stretch) -> Sequence[Check]:
    by_hand = frequencies(128)[-1] / frequencies(128, 10000 * 13 ** (128 / 126))[-1]
    return (
        equal("E23", "stretch at 4 times the length, as 'factor 4' suggests", wrong(4, 4), 4.0),
        equal("E23", "stretch at 4 times the length, dynamic with factor 4", right(4, 4), 13.0, 1e-3),
        equal("E23", "f^2 - f + 1 by the formula of the base", float(by_hand), right(4, 4), 1e-3),
        equal("E23", "stretch at 4 times the length, dynamic with factor 1", right(1, 4), 4.0, 1e-3),
        equal("E23", "stretch at 2.5 times the length, dynamic with factor 1", right(1, 2.5), 2.5, 1e-3),
    )


E23 = Erratum(
    id="E23",
    kind="C",
    where="note 001, line 121, the third remark on the figure ('ROPE-aware' there is a typo for NTK-aware)",
    matter="dynamic NTK with factor f stretches by f^2 - f + 1 at f times the length, not by f",
    printed="NTK-aware reaches 8k, with lower perplexity than PI",
    right="true; to compare dynamic NTK with it, use factor 1: the stretch is then the ratio of the lengths",
    why="The rule is f n/L - (f - 1), so factor 4 stretches by 13 at n = 4L. A figure that gives all methods 'factor"
    " 4' compares a stretch of 13 with one of 4.",
    wrong_form=lambda factor, ratio: float(factor),
    right_form=_e23_right,
    prove=_e23,
)


# ------------------------------------------------------------------------------------------------------------- E51
Extended = Callable[[int, int, int], Array]  # (positions, width, trained length) -> table


def _e51_printed(count: int, dim: int, trained: int) -> Array:
    return sinusoid_table(trained, dim)[np.arange(count) % trained]  # periodic: the trained rows repeat


def _e51(wrong: Extended, right: Extended) -> Sequence[Check]:
    table, printed, ours = sinusoid_table(2048, 512), wrong(2048, 512, 512), right(2048, 512, 512)
    slow = measures.wavelengths(measures.frequencies(512)) > 512
    return (
        above("E51", "error up to position 2047 if the rows up to 511 repeated", worst(printed, table), 1.5),
        equal("E51", "columns that leave the seen range if the rows repeated", _e51_outside(printed), 0),
        equal("E51", "columns out of 512 that leave it by more than 0.05", _e51_outside(ours), 221),
        equal("E51", "pairs out of 256 with a wavelength above 512", int(slow.sum()), 133),
        below("E51", "right form minus numpy", worst(ours, table), 1e-12),
    )


def _e51_outside(table: Array) -> int:
    """Number of columns with a value, from row 512 on, outside the range of the first 512 rows."""
    seen, new = table[:512], table[512:]
    outside = (new.max(0) > seen.max(0) + 0.05) | (new.min(0) < seen.min(0) - 0.05)
    return int(outside.sum())


E51 = Erratum(
    id="E51",
    kind="B",
    where="note 001, line 21, and note 000, line 51, on texts longer than in training",
    matter="periodic functions do not extrapolate when half of them never completed a period",
    printed="because the functions are periodic, the encoding naturally extrapolates to texts longer than in training",
    right="the formula is defined everywhere, but its values leave the range seen in training",
    why="At d = 512 and a training length of 512, 133 of 256 pairs have a longer wavelength than that, and 221 of 512"
    " columns take values never seen. Line 83 of the same note makes this point about RoPE.",
    wrong_form=_e51_printed,
    right_form=lambda count, dim, trained: library_table(count, dim),
    prove=_e51,
)


# ------------------------------------------------------------------------------------------------------------- E55
def _e55(wrong: Callable[[int, int], int], right: Callable[[int, int], int]) -> Sequence[Check]:
    w = measures.frequencies(128)
    return (
        equal("E55", "pairs out of distribution beyond 2048, by the sentence alone", wrong(128, 2048), 64),
        equal("001-16 E55", "pairs that did not complete a turn in 2048 tokens", right(128, 2048), 23),
        equal("E55", "pairs that reach a new angle, by comparing all angles", _e55_by_hand(128, 2048), 23),
        equal("E55", "turns of pair 0 in 2048 tokens", float(measures.turns(w, 2048)[0]), 326.0, 0.1),
    )


def _e55_by_hand(dim: int, length: int) -> int:
    """Number of pairs with an angle beyond `length` that is more than two steps from every earlier angle."""
    found = 0
    for w in frequencies(dim):
        seen = np.sort(np.arange(length) * w % (2 * np.pi))
        seen = np.concatenate((seen[-1:] - 2 * np.pi, seen, seen[:1] + 2 * np.pi))  # wrap around
        new = np.arange(length, 4 * length) * w % (2 * np.pi)
        after = np.searchsorted(seen, new)
        nearest = np.minimum(np.abs(seen[after] - new), np.abs(new - seen[after - 1]))
        found += bool(nearest.max() > 2 * w)
    return found


E55 = Erratum(
    id="E55",
    kind="C",
    where="note 001, line 83, on position L + 1",
    matter="beyond the trained length only the slow pairs reach unseen angles",
    printed="position L + 1 was not trained, so it is out of distribution",
    right="true of the 23 of 64 pairs that did not complete a turn in 2048 tokens; the other 41 covered the whole"
    " circle",
    why="Pair 0 has completed 326 turns and reaches no new angle. This is why by-parts scaling, YaRN and llama3 leave"
    " the fast pairs unchanged.",
    wrong_form=lambda dim, length: dim // 2,
    right_form=lambda dim, length: int((measures.seen_arc(measures.frequencies(dim), length) < 2 * math.pi).sum()),
    prove=_e55,
)


# ------------------------------------------------------------------------------------------------------------- OK9
Listed = Callable[[int, int], Array]  # (L, s) -> positions


def _ok9(tempting: Listed, printed: Listed) -> Sequence[Check]:
    scaled = measures.frequencies(8, 10000.0, {"rope_type": "linear", "factor": 4.0})
    angles = torch.outer(torch.arange(1, 33).double(), scaled)  # (4L, D/2)
    return (
        equal("OK9", "number of positions, L = 8", len(printed(8, 4)), 32),
        equal("001-18 OK9", "last position", float(printed(8, 4)[-1]), 8.0),
        below("OK9", "angles of the list minus linear scaling", worst(angles, _ok9_angles(printed(8, 4))), 1e-6),
        equal("OK9", "number of positions if the list ended at L/4", len(tempting(8, 4)), 8),
    )


def _ok9_angles(positions: Array) -> Array:
    return np.outer(positions, frequencies(8))


OK9 = Erratum(
    id="OK9",
    kind="OK",
    where="note 001, line 83, the list of interpolated positions",
    matter="the list of interpolated positions is complete: 4L entries, ending at L",
    printed="[1/4, 2/4, 3/4, 1, ..., L/4, (L+1)/4, ..., L]",
    right="as printed: the 4L positions divided by 4; L/4 is a quarter of the way through the list, not its end",
    why="Counted from 0, as in code, the last entry is L - 1/4, slightly beyond the trained L - 1.",
    wrong_form=lambda length, factor: np.arange(1, length + 1) / factor,
    right_form=lambda length, factor: np.arange(1, length * factor + 1) / factor,
    prove=_ok9,
)


# ------------------------------------------------------------------------------------------------------------ OK11
Clock = Callable[[int, int, int], int]  # (seconds per minute, minutes per hour, hours per round) -> seconds


def _ok11(tempting: Clock, printed: Clock) -> Sequence[Check]:
    return (
        equal("001-26 OK11", "60 * 60 * 12", printed(60, 60, 12), 43200),
        equal("001-28 OK11", "60 * (60 * 1.5) * (2 * 12)", printed(60, 90, 24), 129600),
        equal("OK11", "seconds until all hands are back at 0", _ok11_by_hand(60, 60, 12), printed(60, 60, 12)),
        equal("OK11", "the same with 90 minutes and 24 hours", _ok11_by_hand(60, 90, 24), printed(60, 90, 24)),
        above("OK11", "error of a day of two rounds, s", tempting(60, 60, 12) - _ok11_by_hand(60, 60, 12), 1e4),
    )


def _ok11_by_hand(seconds: int, minutes: int, hours: int) -> int:
    """Count the steps until all hands are back at the start."""
    hands, steps = [0, 0, 0], 0
    while True:
        steps += 1
        for i, size in enumerate((seconds, minutes, hours)):
            hands[i] = (hands[i] + 1) % size
            if hands[i]:
                break
        if hands == [0, 0, 0]:
            return steps


OK11 = Erratum(
    id="OK11",
    kind="OK",
    where="note 001, lines 99 and 103, the number of seconds that a clock covers",
    matter="43200 and 129600 seconds are right: a 12-hour clock covers half a day",
    printed="60 * 60 * 12 = 43200 s; 60 * (60 * 1.5) * (2 * 12) = 129600 s",
    right="as printed; 86400 would be a 24-hour clock",
    why="The note says 'in a day' and means one round of a 12-hour clock.",
    wrong_form=lambda seconds, minutes, hours: seconds * minutes * hours * 2,
    right_form=lambda seconds, minutes, hours: seconds * minutes * hours,
    prove=_ok11,
)


# ------------------------------------------------------------------------------------------------------------ OK12
Scaled = Callable[[], Array]
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _ok12(tempting: Scaled, printed: Scaled) -> Sequence[Check]:
    paper = _ok12_by_parts(128, 500000.0, 8192, 8.0, 1.0, 4.0)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    code = measures.frequencies(128, 10000.0, yarn).numpy()
    ratio = _ok12_by_parts(128, 10000.0, 4096, 4.0, 1.0, 32.0) / code
    apart = np.maximum(ratio, 1 / ratio)
    return (
        below("OK12", "llama3 over the paper's by-parts, minus 1", worst(printed() / paper, np.ones(64)), 1e-14),
        above("OK12", "YaRN code with the same 1 and 4 over it, minus 1", worst(tempting() / paper, np.ones(64)), 0.1),
        equal("OK12", "largest factor between YaRN's code and paper", float(apart.max()), 1.733, 0.002),
        equal("OK12", "pair with the largest factor", int(apart.argmax()), 34),
    )


def _ok12_by_parts(dim: int, base: float, length: int, factor: float, alpha: float, beta: float) -> Array:
    """The YaRN paper's NTK-by-parts: a ramp that is linear in the number of turns of a pair."""
    w = frequencies(dim, base)
    keep = np.clip((length * w / (2 * np.pi) - alpha) / (beta - alpha), 0, 1)
    return np.asarray((1 - keep) * w / factor + keep * w)


OK12 = Erratum(
    id="OK12",
    kind="OK",
    where="not in the notes: llama3 scaling compared with the methods that note 001 lists",
    matter="llama3 scaling follows the YaRN paper's by-parts rule; the YaRN code does not",
    printed="llama3 scaling with low 1 and high 4 is NTK-by-parts of the YaRN paper with alpha = 1, beta = 4",
    right="as stated; the ramp of the YaRN code is linear in the pair index, that of the paper in the number of turns",
    why="YaRN's code and paper differ by a factor of up to 1.733, at pair 34 (d = 128, 4096 tokens, factor 4)."
    " Checkpoints were made with the code, so the library follows the code.",
    wrong_form=lambda: SCALINGS["yarn"](
        Base(128, 500000.0), {**LLAMA3, "rope_type": "yarn", "beta_slow": 1.0, "beta_fast": 4.0}
    )[0].numpy(),
    right_form=lambda: SCALINGS["llama3"](Base(128, 500000.0), LLAMA3)[0].numpy(),
    prove=_ok12,
)


ERRATA = (E14, E15, E15b, E16, E17, E18, E19, E20, E21, E22, E23, E51, E55, OK9, OK11, OK12)
