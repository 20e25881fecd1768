"""Checking the answer to an exercise: a small calculator, and random values to compare an expression at.

An expression is parsed into Python's syntax tree, which is then walked; no part of it is executed. Anything except
numbers, known names, signs, + - * / ** % and five functions is rejected with a one-line message.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import UsageError

if TYPE_CHECKING:
    from .base import Bug

LONGEST = 200  # characters in an expression
DEEPEST = 40  # levels of its tree
LARGEST = 1e100  # absolute value of any intermediate result

FUNCTIONS: dict[str, Callable[[float], float]] = {
    "sin": math.sin,
    "cos": math.cos,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
}
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.Mod: operator.mod,
}
SPELLING = "numbers, the names listed, pi, + - * / ** %, and sin cos exp log sqrt of one number"


def parse(text: str) -> ast.expr:
    """Parse an expression into a syntax tree. Raises UsageError if the text is not an expression."""
    text = text.strip()
    if len(text) > LONGEST:
        raise UsageError(f"an expression may have at most {LONGEST} characters, this one has {len(text)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's warnings about odd literals do not help here
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UsageError(f"not an expression (write a product as 2*t); an expression may contain {SPELLING}") from None


def evaluate(text: str, values: Mapping[str, float]) -> float:
    """Return the value of an expression, computed in float64.

    Raises UsageError with a one-line message for anything but arithmetic, for unknown names, for more than LONGEST
    characters or DEEPEST levels, and for a result that is not a real number or exceeds LARGEST.
    """
    return _value(parse(text), {"pi": math.pi, **values}, DEEPEST)


def _value(node: ast.expr, values: Mapping[str, float], levels: int) -> float:
    if levels == 0:
        raise UsageError(f"an expression may be nested {DEEPEST} levels deep, this one is nested deeper")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(lambda: float(number))
        case ast.Name(id=name) if name in values:
            return float(values[name])
        case ast.Name(id=name):
            raise UsageError(f"unknown name {name!r}; known: {', '.join(values)}")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values, levels - 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, values, levels - 1)
        case ast.BinOp(op=ast.BitXor()):
            raise UsageError("^ is not an operator here; a power is written **")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _value(left, values, levels - 1), _value(right, values, levels - 1)
            return _bounded(lambda: OPERATORS[type(op)](a, b))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            a = _value(argument, values, levels - 1)
            return _bounded(lambda: FUNCTIONS[name](a))
    raise UsageError(f"an expression may contain {SPELLING}; this one contains something else")


def _bounded(compute: Callable[[], float]) -> float:
    """Return the result. Raises UsageError if it is not a real number within the bounds."""
    try:
        result = compute()
    except OverflowError:
        result = math.inf
    except ZeroDivisionError:
        raise UsageError("the expression divides by zero") from None
    except ValueError:
        raise UsageError(
            "the expression takes the root of a negative number, or the logarithm of a number that is not positive"
        ) from None
    if isinstance(result, complex):
        raise UsageError("the result is not a real number: a fractional power of a negative number")
    if not abs(result) <= LARGEST:
        raise UsageError(f"a result exceeds {LARGEST:.0e}, the largest value allowed")
    return result


@dataclass(frozen=True)
class Number:
    """A random number of an exercise: low to high, in steps or, with step 0, uniformly distributed."""

    meaning: str
    low: float
    high: float
    step: float = 0.0

    def draw(self, rng: np.random.Generator) -> float:
        """Draw one value."""
        if not self.step:
            return float(rng.uniform(self.low, self.high))
        return self.low + self.step * int(rng.integers(round((self.high - self.low) / self.step) + 1))


@dataclass(frozen=True)
class Verdict:
    """Whether an expression is right, with its result at the first values where it is not, or at the last ones."""

    right: bool
    values: Mapping[str, float]
    computed: float
    expected: float

    @property
    def error(self) -> float:
        """The error of the result, relative to the expected value where that exceeds 1e-3."""
        return abs(self.computed - self.expected) / max(abs(self.expected), 1e-3)


def judge(bug: Bug, text: str, seed: int = 0, draws: int = 7) -> Verdict:
    """Compare an expression with the truth for several draws of its variables. Raises UsageError as `evaluate` does."""
    rng = np.random.default_rng(seed)
    for _ in range(draws):
        values = {name: number.draw(rng) for name, number in bug.names.items()}
        computed, expected = evaluate(text, values), float(bug.truth(**values))
        if not abs(computed - expected) <= 1e-9 + 1e-6 * abs(expected):
            return Verdict(False, values, computed, expected)
    return Verdict(True, values, computed, expected)
