"""Bugs in the rotation of queries and keys."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..forms import rotation_matrix
from .base import Array, Bug, Row, rotation, row
from .quiz import Number

ENTRY = Number("an entry", -2, 2)
M, N = Number("position of the query", 5, 9, 1), Number("position of the key", 0, 4, 1)
OMEGA = Number("frequency of the pair", 0.1, 0.5)
Q, K = np.array([0.8, -1.1]), np.array([1.3, 0.4])  # a query and a key of one pair, before the rotation


def _score(q1: float, q2: float, k1: float, k2: float, m: float, n: float, w: float) -> float:
    """The product of the two vectors, each rotated by its own position."""
    return float((rotation(m * w) @ [q1, q2]) @ (rotation(n * w) @ [k1, k2]))


def _true(m: int, n: int) -> float:
    """The score of Q and K at a frequency of 0.3."""
    return _score(float(Q[0]), float(Q[1]), float(K[0]), float(K[1]), m, n, 0.3)


def _direction() -> list[Row]:
    rows: list[Row] = []
    for distance in (0, 4, -4):
        a = 0.3 * distance
        wrong = (Q @ K) * math.cos(a) + (Q[1] * K[0] - Q[0] * K[1]) * math.sin(a)
        rows.append((f"w = 0.3: score at m - n = {distance}", float(wrong), _true(7 + distance, 7)))
    return rows


def _conjugate() -> list[Row]:
    q, k = complex(*Q), complex(*K)
    rows: list[Row] = []
    for m, n in ((7, 3), (12, 8)):
        turned = q * np.exp(0.3j * m), k * np.exp(0.3j * n)
        rows.append((f"w = 0.3: score at m = {m}, n = {n}", float((turned[0] * turned[1]).real), _true(m, n)))
    return rows


def _last_row() -> list[Row]:
    x, y = Q
    rows: list[Row] = []
    for m in (3, 300):
        angle = torch.tensor([m / 1000], dtype=torch.float64)  # the last of the 4 pairs of d = 8
        right = rotation_matrix(angle.cos(), angle.sin()).numpy() @ Q
        cos, sin = math.cos(m / 1000), math.sin(m / 1000)
        wrong = np.array([x * cos - x * sin, y * cos + y * sin])
        rows.append((f"d = 8, m = {m}: the last entry", float(wrong[1]), float(right[1])))
        rows.append(row(f"m = {m}: length of the pair / its length before", _length, wrong, right))
    return rows


def _length(pair: Array) -> float:
    return round(float(np.linalg.norm(pair) / np.linalg.norm(Q)), 9)


def _moved() -> list[Row]:
    return [
        (f"m = {m}, w = {w}", m * w, float(np.linalg.norm(rotation(m * w) @ [1, 0] - [1, 0])))
        for m, w in ((1, 0.1), (6, 0.1), (6, 1.0), (44, 1.0))
    ]


BUGS = (
    Bug(
        name="direction",
        line="q.k = (q1*k1 + q2*k2) * cos((m-n)*w) + (q2*k1 - q1*k2) * sin((m-n)*w)",
        predict="At which of the distances m - n = 0, 4, -4 is the score wrong, and what does it equal there?",
        evidence=_direction,
        ask="q.k, with (q1, q2) rotated by m*w and (k1, k2) by n*w",
        names={"q1": ENTRY, "q2": ENTRY, "k1": ENTRY, "k2": ENTRY, "m": M, "n": N, "w": OMEGA},
        truth=_score,
        wrong="(q1*k1 + q2*k2) * cos((m-n)*w) + (q2*k1 - q1*k2) * sin((m-n)*w)",
        right="(q1*k1 + q2*k2) * cos((m-n)*w) - (q2*k1 - q1*k2) * sin((m-n)*w)",
        why="The rotation between q and k is R(m)^T R(n) = R(n - m). With R(m - n) the sine term has the other sign,"
        " and the line computes the score of the mirrored distance. At distance 0 nothing shows.",
    ),
    Bug(
        name="complex-product",
        line="score = (q * k).real  # q = (q1 + j q2) e^(j m w), k = (k1 + j k2) e^(j n w)",
        predict="Both positions grow by 5. Does the score change?",
        evidence=_conjugate,
        ask="the score at m = n = 0, which must be the dot product of (q1, q2) and (k1, k2)",
        names={"q1": ENTRY, "q2": ENTRY, "k1": ENTRY, "k2": ENTRY},
        truth=lambda q1, q2, k1, k2: float(np.dot([q1, q2], [k1, k2])),
        wrong="q1*k1 - q2*k2",
        right="q1*k1 + q2*k2",
        why="The conjugate of k is missing: score = (q * k.conj()).real. Without it the angles are added, so the score"
        " depends on m + n instead of m - n.",
    ),
    Bug(
        name="last-row",
        line="out[d-1] = x[d-1] * cos(a) + x[d-1] * sin(a)  # and out[d-2] = x[d-2] * cos(a) - x[d-2] * sin(a)",
        predict="The last pair of d = 8 has the frequency 0.001. How large is the error at position 3, and at 300?",
        evidence=_last_row,
        ask="out[d-1], where x = x[d-2], y = x[d-1], and a is the angle of the last pair",
        names={"x": ENTRY, "y": ENTRY, "a": Number("angle", 0.2, 1.4)},
        truth=lambda x, y, a: float((rotation(a) @ [x, y])[1]),
        wrong="y*cos(a) + y*sin(a)",
        right="y*cos(a) + x*sin(a)",
        why="The two entries of the last pair are not swapped in the sine column, so the pair is stretched instead of"
        " rotated. It is the slowest pair: a short text shows an error of a few thousandths, a long one a wrong entry"
        " and a pair of another length.",
    ),
    Bug(
        name="moved",
        line="moved = m * w  # a pair of length 1 moves further, the larger its angle",
        predict="Pairs with w = 1 and w = 0.1: which of them is further from its start at position 6?",
        evidence=_moved,
        ask="the distance from the start of a pair of length 1 that is rotated by m*w, less than a full turn",
        names={"m": Number("position", 1, 6, 1), "w": Number("frequency of the pair", 0.3, 1.0)},
        truth=lambda m, w: abs(complex(math.cos(m * w), math.sin(m * w)) - 1),
        wrong="m * w",
        right="2 * sin(m * w / 2)",
        why="The straight distance between two points of a circle is 2 sin(angle / 2). A pair that has almost finished"
        " a turn is nearly back at its start, so fast pairs do not always change more.",
    ),
)
