"""The Bug class: a wrong line that people write, what it causes, and the exercise to repair it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..report import Check, Value, below, holds
from .quiz import Number, judge

Array = NDArray[Any]
Row = tuple[str, Value, Value]  # a quantity, its value by the wrong line, its value by the right one


@dataclass(frozen=True)
class Bug:
    """A wrong line and its exercise.

    name      one or two words for the command line, which do not say what is wrong
    line      the wrong line, as code or as a formula
    predict   a question to answer before the evidence is shown
    evidence  runs the wrong line and the right one: rows of numbers
    ask       the quantity that the repaired expression must compute
    names     variables of the expression, in addition to pi and the functions of quiz.py
    truth     computes that quantity in another way, with the drawn numbers as keyword arguments
    wrong     the expression of the wrong line
    right     a right expression
    why       what the evidence shows
    """

    name: str
    line: str
    predict: str
    evidence: Callable[[], Sequence[Row]]
    ask: str
    names: Mapping[str, Number]
    truth: Callable[..., float]
    wrong: str
    right: str
    why: str

    @property
    def code(self) -> str:
        """The wrong line without its comment."""
        return self.line.split("  # ")[0]

    def checks(self) -> tuple[Check, ...]:
        """The right expression equals the truth, the wrong one does not, and the evidence shows a difference."""
        right, wrong = judge(self, self.right), judge(self, self.wrong)
        return (
            below("", "right line: relative error", right.error, 1e-6),
            holds("", "wrong line: has another value", not wrong.right),
            holds("", "evidence: the two lines differ", any(left != right for _, left, right in self.evidence())),
        )


def row(what: str, measure: Callable[[Any], Value], wrong: Any, right: Any) -> Row:
    """A row of evidence: the same measure of what the wrong and the right line give."""
    return what, measure(wrong), measure(right)


def frequencies(dim: int, base: float = 10000.0) -> Array:
    """base^(-2i/d) for i = 0 .. d/2 - 1, in numpy: (d/2,)."""
    return np.array([base ** (-2 * i / dim) for i in range(dim // 2)])


def table(count: int, dim: int, sine: Callable[..., float], cosine: Callable[..., float] | None = None) -> Array:
    """A table whose entry (pos, 2i) is sin(sine(pos, i)) and entry (pos, 2i + 1) cos(cosine(pos, i)): (N, d).

    Without `cosine`, both have the same angle.
    """
    pairs = [(sine, math.sin), (cosine or sine, math.cos)]
    return np.array([[f(at(pos, i)) for i in range(dim // 2) for at, f in pairs] for pos in range(count)])


def sinusoids(count: int, dim: int) -> Array:
    """The right table: (N, d)."""
    return table(count, dim, lambda pos, i: pos / 10000 ** (2 * i / dim))


def residual(rows: Array, shift: int) -> float:
    """Largest error of the best linear map from row t to row t + shift of a table (N, d)."""
    before, after = rows[:-shift], rows[shift:]
    return float(np.abs(before @ np.linalg.lstsq(before, after, rcond=None)[0] - after).max())


def rotation(angle: float) -> Array:
    """[[cos, -sin], [sin, cos]]: a counter-clockwise rotation."""
    return np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
