"""Bugs in scalings for contexts longer than the trained one."""

from __future__ import annotations

import numpy as np
import torch

from ...rope_scaling import inverse_frequencies
from ..measures import frequencies as library
from .base import Array, Bug, Row, frequencies
from .quiz import Number

DIM = Number("dimension of a head", 32, 128, 32)


def _divisors(kind: str, factor: float, **lengths: int) -> Array:
    """Divisors of the 64 pairs of a head under a scaling of the library: (64,)."""
    scaled, _ = inverse_frequencies(128, 10000.0, {"rope_type": kind, "factor": factor}, **lengths)
    return (library(128) / scaled.double()).numpy()


def _interpolated() -> list[Row]:
    divisor = float(_divisors("linear", 4.0)[0])
    return [
        (f"trained 2,048, text 8,192: position {pos:,} becomes", pos / (2048 / 8192), round(pos / divisor, 3))
        for pos in (1, 100, 8192)
    ]


def _base() -> list[Row]:
    right = float(library(128)[-1] / _divisors("ntk", 4.0)[-1]) ** (-128 / 126)  # the base of the last frequency
    bases = (500000.0, right)
    last = [float(library(128)[-1] / library(128, base)[-1]) for base in bases]
    return [("s = 4, d = 128: new base", bases[0], bases[1]), ("divisor of the last pair", last[0], last[1])]


def _middle() -> list[Row]:
    divisors, w = _divisors("ntk", 4.0), library(128)
    rows: list[Row] = [(f"s = 4: divisor of pair {i}", 1.0, round(float(divisors[i]), 6)) for i in (0, 20, 41, 62)]
    angle = float(8192 * w[41])
    return [*rows, ("radians of pair 41 at 8,192 (trained to 5.61)", angle, angle / float(divisors[41]))]


def _dynamic() -> list[Row]:
    return [
        (
            f"factor {f}: divisor of the last pair at {f} times the length",
            float(f),
            round(float(_divisors("dynamic", float(f), seq_len=2048 * f, max_seq_len=2048)[-1]), 5),
        )
        for f in (2, 4, 8)
    ]


def _solved(theta: float, s: float, d: float) -> float:
    """The base for which the last frequency is divided by s, by bisection on its logarithm."""
    low, high = np.log(theta), np.log(theta) + 2 * np.log(s)
    for _ in range(60):
        middle = (low + high) / 2
        slow_enough = np.exp(-middle * (d - 2) / d) <= np.exp(-np.log(theta) * (d - 2) / d) / s
        low, high = (low, middle) if slow_enough else (middle, high)
    return float(np.exp(low))


def _ntk(i: float, s: float, d: float) -> float:
    base = 10000.0 * s ** (d / (d - 2))
    return float(frequencies(int(d))[int(i)] / frequencies(int(d), base)[int(i)])


def _stretched(f: float) -> float:
    """The divisor of the last pair of the library at f times the length, with factor f."""
    dynamic = {"rope_type": "dynamic", "factor": f}
    scaled, _ = inverse_frequencies(128, 10000.0, dynamic, seq_len=int(1000 * f), max_seq_len=1000)
    return round(float(library(128)[-1] / scaled[-1].to(torch.float64)), 5)


BUGS = (
    Bug(
        name="interpolation",
        line="pos = pos / (L_train / L_test)  # shrink the positions by L_train / L_test",
        predict="Trained on 2,048 tokens, used on 8,192: which position does the last token get?",
        evidence=_interpolated,
        ask="the position to use instead of pos, so that L_test is mapped to L_train",
        names={
            "pos": Number("position in the long text", 1, 8000, 1),
            "L_train": Number("trained length", 1024, 4096, 1024),
            "L_test": Number("length of the text", 8192, 32768, 8192),
        },
        truth=lambda pos, L_train, L_test: float(np.interp(pos, [0, L_test], [0, L_train])),
        wrong="pos / (L_train / L_test)",
        right="pos * L_train / L_test",
        why="The ratio is below 1, so a division by it enlarges the positions: in this example, the model meets"
        " positions 16 times as far as intended.",
    ),
    Bug(
        name="new-base",
        line="theta = 500000  # NTK-aware scaling raises the base",
        predict="For 4 times the length, the last pair should be 4 times slower. How much slower is it here?",
        evidence=_base,
        ask="the new base for which the last pair, i = d/2 - 1, is exactly s times slower",
        names={"theta": Number("the old base", 10000, 20000, 1000), "s": Number("factor", 2, 16, 1), "d": DIM},
        truth=_solved,
        wrong="500000",
        right="theta * s ** (d / (d - 2))",
        why="NTK-aware scaling computes the base from the factor: 40,890 for a factor of 4. A base of 500,000 fits a"
        " factor of 47; models that have it were trained further with it.",
    ),
    Bug(
        name="middle-pairs",
        line="divisor = 1  # NTK-aware scaling leaves the fast pairs unchanged",
        predict="For a factor of 4, by how much are the pairs 0, 20, 41 and 62 of 64 divided?",
        evidence=_middle,
        ask="the divisor of the frequency of pair i, if the new base is theta * s**(d/(d-2))",
        names={"i": Number("pair, from 0", 1, 15, 1), "s": Number("factor", 2, 8, 1), "d": DIM},
        truth=_ntk,
        wrong="1",
        right="s ** (2*i / (d-2))",
        why="Only pair 0 is unchanged, and only the last is divided by s. Pairs 41 to 62 never finished a turn in"
        " training and are divided by less than 4, so they meet new angles: a factor of 4 does not reach 4 times the"
        " length.",
    ),
    Bug(
        name="dynamic-factor",
        line="stretch = f  # dynamic NTK with factor f, at f times the trained length",
        predict="Dynamic NTK stretches by f * n / L - (f - 1) at n tokens. How much is that for f = 4 at n = 4 L?",
        evidence=_dynamic,
        ask="the factor by which the last pair is slowed down at n = f * L",
        names={"f": Number("factor", 2, 8, 1)},
        truth=_stretched,
        wrong="f",
        right="f**2 - f + 1",
        why="The factor is multiplied by the growth of the text, so factor 4 stretches by 13 at 4 times the length. To"
        " compare it with other methods use factor 1, for which the stretch equals the growth.",
    ),
)
