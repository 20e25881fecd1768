"""The judge of the quiz: a small calculator, and random numbers to hold an expression against.

An expression is read as Python's syntax tree and walked; nothing of it is ever executed. What is not a number, a
known name, + - * / ** %, a minus sign or one of six functions is refused with one line.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ...errors import UsageError
from .base import Quiz

LONGEST = 200  # characters of an expression
DEEPEST = 40  # levels of its tree
LARGEST = 1e100  # any number on the way

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
SPELLING = "numbers, the names given, pi, + - * / ** %, and sin cos exp log sqrt of one number"


def parse(text: str) -> ast.expr:
    """The syntax tree of an expression. Raises UsageError on what is not one."""
    text = text.strip()
    if len(text) > LONGEST:
        raise UsageError(f"an expression may have {LONGEST} characters, this one has more")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's advice on odd literals is for programs
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UsageError(f"that is not an expression (a product is written 2*t); it may hold {SPELLING}") from None


def evaluate(text: str, values: Mapping[str, float]) -> float:
    """The number that an expression stands for, all in float64.

    Raises UsageError, in one line, on anything but arithmetic, on unknown names, on more than LONGEST characters or
    DEEPEST levels, and where the result is not a real number or passes LARGEST.
    """
    return _value(parse(text), {"pi": math.pi, **values}, DEEPEST)


def _value(node: ast.expr, values: Mapping[str, float], levels: int) -> float:
    if levels == 0:
        raise UsageError(f"an expression may be nested {DEEPEST} levels deep, this one goes deeper")
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
            raise UsageError("a power is written **, not ^")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _value(left, values, levels - 1), _value(right, values, levels - 1)
            return _bounded(lambda: OPERATORS[type(op)](a, b))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            a = _value(argument, values, levels - 1)
            return _bounded(lambda: FUNCTIONS[name](a))
    raise UsageError(f"an expression may hold {SPELLING}; this holds something else")


def _bounded(compute: Callable[[], float]) -> float:
    """A result within the bounds, or a refusal."""
    try:
        result = compute()
    except OverflowError:
        result = math.inf
    except ZeroDivisionError:
        raise UsageError("that divides by zero") from None
    except ValueError:
        raise UsageError("that is the root or the logarithm of a number that has none") from None
    if isinstance(result, complex):
        raise UsageError("that is not a real number: a broken power of a number below 0")
    if not abs(result) <= LARGEST:
        raise UsageError(f"that passes {LARGEST:.0e}, the largest number taken here")
    return result


@dataclass(frozen=True)
class Verdict:
    """What the judge says of an expression; values, given and expected are those of the first number it misses."""

    right: bool
    values: Mapping[str, float]
    given: float
    expected: float


def judge(quiz: Quiz, text: str, seed: int = 0, draws: int = 7) -> Verdict:
    """Hold an expression against the truth on several draws of its names. Raises UsageError as `evaluate` does."""
    rng = np.random.default_rng(seed)
    for _ in range(draws):
        values = {name: number.draw(rng) for name, number in quiz.names.items()}
        given, expected = evaluate(text, values), float(quiz.truth(**values))
        if not abs(given - expected) <= 1e-9 + 1e-6 * abs(expected):
            return Verdict(False, values, given, expected)
    return Verdict(True, values, given, expected)
