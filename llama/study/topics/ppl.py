"""Perplexity by position: the cost and the reach of each method to stretch a context, on a real model."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from ..figure import Data, Figure, draw_lines
from ..perplexity import Measurement, measure
from ..report import Report, Table, wrapped
from . import TOPICS
from .base import Topic, columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Answer = TypeVar("Answer")
LABELS = {"none": "unchanged", "linear": "PI", "ntk": "NTK-aware", "dynamic": "dynamic NTK", "yarn": "YaRN"}

_measured = lru_cache(maxsize=1)(measure)  # a report and its figure share one measurement


def _of(answer: Callable[[Measurement], Answer]) -> Callable[..., Answer]:
    """Turn a function of a measurement into one with the arguments and the signature of `measure`."""

    @wraps(measure)
    def measured(**setting: Any) -> Answer:
        return answer(_measured(**setting))

    return measured


def label(method: str) -> str:
    """The usual name of a method: "PI x4" for "linear:4"."""
    kind, _, factor = method.partition(":")
    return LABELS.get(kind, kind) + (f" x{factor}" if factor else "")


def _report(found: Measurement) -> Report:
    """Perplexity by bucket of positions under each method."""
    curves = {method: found.perplexity(method) for method in found.methods}
    ends = sorted({end for curve in curves.values() for end in curve})
    return Report(
        "ppl",
        TOPICS["ppl"],
        says=wrapped(
            "Perplexity per token. Compare within a column only: each bucket is another part of the text. Buckets end"
            " at these multiples of the trained length:"
        ),
        tables=(
            Table(
                f"windows: {found.setting['windows']} of {found.setting['length']} tokens, trained for {found.trained}",
                ("method", *(f"..{end:.3g}x" for end in ends)),
                [(method, *(round(curve[end], 3) for end in ends)) for method, curve in curves.items()],
            ),
        ),
        settings={key: found.setting[key] for key in ("model", "text", "dtype")},
    )


def _data(found: Measurement) -> Data:
    """One row per method and bucket."""
    rows = [(method, end, ppl) for method in found.methods for end, ppl in found.perplexity(method).items()]
    return columns(("method", "end", "perplexity"), rows)


def draw(table: Data, canvas: Canvas) -> None:
    """Perplexity over position, one line per method."""
    axes = canvas.subplots()
    draw_lines(axes, table, "end", "perplexity", "method", dict.fromkeys(table["method"].tolist()), (0, 1))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = table["perplexity"].min(), table["perplexity"].max()
    ticks = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low / 1.5 < tick < high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ends = sorted(set(table["end"].tolist()))
    axes.set_xticks(ends, [f"{end:g}" for end in ends])
    axes.minorticks_off()
    axes.axvline(1, color="#999999", linewidth=0.8)
    axes.set_xlabel("position, up to (trained lengths)")
    axes.set_ylabel("perplexity per token")
    lines, methods = axes.get_legend_handles_labels()
    axes.legend(lines, [label(method) for method in methods], loc="center left", bbox_to_anchor=(1.0, 0.5))


TOPIC = Topic(
    _of(_report),
    figures=(
        Figure(
            "ppl",
            "Perplexity by position. Positions to the right of the line did not occur in training.",
            _of(_data),
            draw,
        ),
    ),
)
