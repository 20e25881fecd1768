"""Bugs in the frequencies ω_i = θ^(-2i/d)."""

from __future__ import annotations

import math

import numpy as np

from ..measures import frequencies as library
from ..measures import turns, wavelengths
from .base import Bug, Row, frequencies
from .quiz import Number

DIM = Number("dimension of a head, even", 4, 128, 4)


def _how_many() -> list[Row]:
    wrong = [10000 ** (-2 * i / 8) for i in range(8)]
    right = library(8).tolist()
    return [
        ("frequencies for the 4 pairs of d = 8", len(wrong), len(right)),
        ("smallest of them", min(wrong), min(right)),
    ]


def _index() -> list[Row]:
    wrong, right = [10000 ** (-2 * (i - 1) / 8) for i in range(4)], library(8).tolist()
    return [(f"d = 8: frequency of pair {i}", wrong[i], right[i]) for i in range(4)]


def _slowest() -> list[Row]:
    w = library(128)
    wave, turned = wavelengths(w), turns(w, 2048)
    return [
        ("d = 128: tokens for one turn", float(wave[0]), float(wave[-1])),
        ("turns in 2,048 tokens", float(turned[0]), float(turned[-1])),
    ]


def _falling() -> list[Row]:
    wrong, right = np.linspace(1, float(library(128)[-1]), 64), library(128).numpy()
    return [
        ("d = 128: frequency of pair 1", float(wrong[1]), float(right[1])),
        ("step from pair 62 to 63", float(wrong[63] - wrong[62]), float(right[63] - right[62])),
        ("pairs that turn by less than 0.01 per token", int((wrong < 0.01).sum()), int((right < 0.01).sum())),
    ]


def _lowest() -> list[Row]:
    return [(f"d = {d}", 1 / 10000, float(library(d)[-1])) for d in (8, 64, 512)]


def _radix() -> list[Row]:
    wrong, right = 10000 ** (2 / 128) * 2 * math.pi, wavelengths(library(128))
    return [
        ("d = 128: period of pair 1 / period of pair 0", wrong, float(right[1] / right[0])),
        ("longest period / shortest, as a power of 10", 63 * math.log10(wrong), math.log10(right[63] / right[0])),
    ]


def _speed() -> list[Row]:
    w = library(6)
    return [(f"d = 6, i = 0, pos = {pos}", float(pos * w[0]), float(w[0])) for pos in (0, 1, 5)]


def _base() -> list[Row]:
    periods = [wavelengths(library(6, base)) for base in (60.0, 60.0**3)]
    rows = [[float(60 * wave / waves[0]) for wave in waves] for waves in periods]
    return [(f"period of hand {i}, in seconds", rows[0][i], rows[1][i]) for i in range(3)]


def _ratio(d: float) -> float:
    w = frequencies(int(d))
    return float(w[0] / w[1])


BUGS = (
    Bug(
        name="how-many",
        line="w = [theta**(-2*i/d) for i in range(d)]  # so the smallest is theta**(-2*(d-1)/d)",
        predict="How many frequencies does a head of dimension 8 need, and how many does the line make?",
        evidence=_how_many,
        ask="the smallest frequency of a head of dimension d",
        names={"theta": Number("the base", 10000, 500000, 10000), "d": DIM},
        truth=lambda theta, d: float(frequencies(int(d), theta).min()),
        wrong="theta**(-2*(d-1)/d)",
        right="theta**(-2*(d/2-1)/d)",
        why="A frequency belongs to a pair of entries, and a head of d entries has d/2 pairs. range(d) makes twice as"
        " many, and half of them are slower than any pair of the head.",
    ),
    Bug(
        name="pair-index",
        line="w = 10000 ** (-2*(i - 1)/d)  # for i in range(d // 2), as in a formula that counts pairs from 1",
        predict="The fastest pair should rotate by 1 radian per position. By how much does it rotate here for d = 8?",
        evidence=_index,
        ask="w, the frequency of pair i",
        names={"i": Number("pair, from 0", 0, 7, 1), "d": Number("dimension of a head, even", 16, 128, 16)},
        truth=lambda i, d: float(library(int(d))[int(i)]),
        wrong="10000 ** (-2*(i - 1)/d)",
        right="10000 ** (-2*i/d)",
        why="The paper of RoPE counts pairs from 1, so its exponent has i - 1; Python's range counts from 0. Each pair"
        " gets the frequency of the pair before it, and the first one a frequency above 1. A model that is trained with"
        " this code works, but it reads no other checkpoint correctly.",
    ),
    Bug(
        name="slowest",
        line="slowest = inv_freq[0]  # the lowest frequency has the smallest i",
        predict="After how many tokens does the pair of the lowest frequency finish its first turn?",
        evidence=_slowest,
        ask="the index i, from 0, of the pair with the lowest frequency",
        names={"d": Number("dimension of a head, even", 4, 128, 2)},
        truth=lambda d: float(np.argmin(frequencies(int(d)))),
        wrong="0",
        right="d/2 - 1",
        why="Pair 0 is the fastest. A scaling that starts from this line slows down the pairs that tell neighbours"
        " apart, and leaves the pairs that have to be slowed down as they are.",
    ),
    Bug(
        name="falling",
        line="w = linspace(1, 1/10000, d/2)  # w[i] = 1 - (1 - 1/10000) * i / (d/2 - 1)",
        predict="How many of the 64 pairs of a head turn by less than 0.01 radians per token?",
        evidence=_falling,
        ask="w, the frequency of pair i for the base 10000",
        names={"i": Number("pair, from 0", 1, 15, 1), "d": Number("dimension of a head", 32, 128, 32)},
        truth=lambda i, d: float(library(int(d))[int(i)]),
        wrong="1 - (1 - 1/10000) * i / (d/2 - 1)",
        right="10000 ** (-2*i/d)",
        why="The frequencies fall by a constant factor, 10000^(-2/d), not by a constant difference. Evenly spaced"
        " frequencies leave almost no slow pairs, and only slow pairs can tell distant positions apart.",
    ),
    Bug(
        name="lowest",
        line="the lowest frequency is 1/10000, whatever the dimension d",
        predict="What is the lowest frequency of a head of dimension 8?",
        evidence=_lowest,
        ask="the lowest frequency of a head of dimension d for the base 10000",
        names={"d": DIM},
        truth=lambda d: float(library(int(d)).min()),
        wrong="1/10000",
        right="10000 ** (-(d-2)/d)",
        why="The last exponent is (d-2)/d, which is below 1. A wide head comes close to 1/10000; a narrow one has no"
        " slow pair at all.",
    ),
    Bug(
        name="radix",
        line="radix = 10000**(2/d) * 2 * pi  # positions written in digits, one per pair",
        predict="At d = 128, how many times longer is the period of pair 63 than that of pair 0?",
        evidence=_radix,
        ask="the radix: the period of a pair divided by the period of the pair before it",
        names={"d": Number("width of the table, even", 8, 128, 8)},
        truth=_ratio,
        wrong="10000**(2/d) * 2 * pi",
        right="10000**(2/d)",
        why="2 pi is the period of pair 0, and a ratio of two periods does not contain it. With the factor of 2 pi in"
        " every digit, the slowest of 64 pairs would need 10^54 times as long as the fastest.",
    ),
    Bug(
        name="speed",
        line="speed = pos / 10000**(2*i/d)  # radians per position",
        predict="How fast does pair 0 rotate at position 0, and how fast at position 5?",
        evidence=_speed,
        ask="the speed of pair i, in radians per position",
        names={
            "pos": Number("position", 2, 50, 1),
            "i": Number("pair, from 0", 0, 2, 1),
            "d": Number("width of the table", 6, 24, 6),
        },
        truth=lambda pos, i, d: float((pos + 1) * frequencies(int(d))[int(i)] - pos * frequencies(int(d))[int(i)]),
        wrong="pos / 10000**(2*i/d)",
        right="10000**(-2*i/d)",
        why="This is the angle at a position, not the speed. The speed is the frequency: the angle that is added at"
        " every step, the same along the whole text.",
    ),
    Bug(
        name="clock-base",
        line="theta = 60  # three hands of a clock as three pairs, d = 6; each is 60 times slower than the one before",
        predict="The first hand needs 60 seconds per turn. How many do the second and the third need?",
        evidence=_base,
        ask="the base of p pairs, d = 2p, in which each pair is r times slower than the one before",
        names={"r": Number("ratio of neighbouring hands", 2, 60, 1), "p": Number("pairs", 2, 5, 1)},
        truth=lambda r, p: float(np.prod(np.full(int(p), r))),
        wrong="r",
        right="r ** p",
        why="Neighbouring pairs differ by theta^(2/d), which is theta^(1/3) for three pairs. A ratio of 60 needs a base"
        " of 60^3 = 216,000.",
    ),
)
