"""The class Topic, and the checks of its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from ...checks import integer, number
from ...errors import UsageError
from ..figure import Figure
from ..report import Report

Result = TypeVar("Result")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Topic:
    """A question and its answer.

    report    computes the answer; its keyword arguments, all with defaults, are the options of the topic
    figures   pictures of the answer, the main one first; each figure's `data` takes some of the same options
    """

    report: Callable[..., Report]
    figures: tuple[Figure, ...] = ()

    def figure(self, name: str | None = None) -> Figure:
        """The figure of that name, or the main one. Raises UsageError if there is none."""
        found = [figure for figure in self.figures if name in (None, figure.name)]
        if not found:
            raise UsageError(f"unknown figure {name!r}; known: {', '.join(f.name for f in self.figures) or 'none'}")
        return found[0]


def options_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments of a report function or of a figure's data function."""
    return tuple(inspect.signature(function).parameters)


def answering(compute: Callable[..., Result], answer: Callable[[Result], Answer]) -> Callable[..., Answer]:
    """A function with the options of `compute`. It passes the result of `compute` to `answer`."""

    @wraps(compute)
    def answered(**options: Any) -> Answer:
        return answer(compute(**options))

    return answered


def check_range(option: str, value: float, least: float, most: float) -> None:
    """Raise UsageError unless least <= value <= most; if `least` is an int, value must be one too."""
    if isinstance(least, int):
        integer(f"{option} of this topic", value, least, int(most))
    else:
        number(f"{option} of this topic", value, least, most)


def check_head_dim(value: int, least: int, most: int) -> None:
    """`check_range` for --head-dim, which must also be even."""
    check_range("--head-dim", value, least, most)
    if value % 2:
        raise UsageError(f"--head-dim must be even, since RoPE rotates pairs of entries; got {value}")
