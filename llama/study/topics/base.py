"""What a topic is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError
from ..figure import Figure
from ..report import Report


@dataclass(frozen=True)
class Topic:
    """A question and its answer.

    report    computes the answer; its keyword arguments, all with defaults, are the options the topic takes
    figures   pictures of it, the main one first; each figure's `data` takes a subset of the same options
    """

    report: Callable[..., Report]
    figures: tuple[Figure, ...] = ()

    def figure(self, name: str | None = None) -> Figure:
        """The figure of that name, or the main one."""
        found = [figure for figure in self.figures if name in (None, figure.name)]
        if not found:
            raise UsageError(f"no figure {name!r} here; there is: {', '.join(f.name for f in self.figures) or 'none'}")
        return found[0]


def options_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the keyword arguments that a report or a figure's data takes."""
    return tuple(inspect.signature(function).parameters)


def check_range(option: str, value: float, least: float, most: float) -> None:
    """Raise UsageError unless least <= value <= most; where `least` is an int, value must be one too."""
    kind = int if isinstance(least, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:  # NaN fails too
        raise UsageError(f"this topic takes a {option} from {_limit(least)} to {_limit(most)}, got {_given(value)}")


def check_head_dim(value: int, least: int, most: int) -> None:
    """`check_range` for --head-dim, and UsageError for an odd one."""
    check_range("--head-dim", value, least, most)
    if value % 2:
        raise UsageError(f"this topic takes an even --head-dim, since RoPE turns pairs of entries; got {value}")


def _limit(value: float) -> str:
    """1024 as 1,024 and 1000000000000.0 as 1e12."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}".replace("e+", "e")


def _given(value: Any) -> str:
    """A refused value: as it is, but for floats too long to read."""
    return _limit(value) if isinstance(value, float) and abs(value) >= 1e6 else f"{value!r:.40}"
