"""Perplexity by position: the cost and the reach of each method to stretch a context, on a real model."""

from __future__ import annotations

from functools import lru_cache

from ..figure import THIN, Canvas, Data, Figure, columns, draw_lines, legend_above
from ..perplexity import Measurement, measure
from ..report import Report, Table
from .base import Topic, answering

LABELS = {"none": "unchanged", "linear": "PI", "ntk": "NTK-aware", "dynamic": "dynamic NTK", "yarn": "YaRN"}

_measured = lru_cache(maxsize=1)(measure)  # a report and its figure share one measurement


def label(method: str) -> str:
    """The usual name of a method: "PI x4" for "linear:4"."""
    kind, _, factor = method.partition(":")
    return LABELS.get(kind, kind) + (f" x{factor}" if factor else "")


def _report(found: Measurement) -> Report:
    """Perplexity by bucket of positions under each method."""
    curves = {method: found.perplexity(method) for method in found.nats}
    ends = sorted({end for curve in curves.values() for end in curve})
    windows, length = next(iter(found.nats.values())).shape
    return Report(
        [
            Table(
                f"windows: {windows} of {length} tokens, trained for {found.trained}",
                ("method", *(f"..{end:.3g}x" for end in ends)),
                [(method, *(round(curve[end], 3) for end in ends)) for method, curve in curves.items()],
            )
        ],
        "Compare within a column only: each bucket is another part of the text. Buckets end at"
        " these multiples of the trained length:",
        {"model": found.model, "dtype": found.dtype},
    )


def _data(found: Measurement) -> Data:
    """One row per method and bucket."""
    rows = [(method, end, ppl) for method in found.nats for end, ppl in found.perplexity(method).items()]
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
    axes.axvline(1, **THIN)
    axes.set(xlabel="position, up to (trained lengths)", ylabel="perplexity")
    legend_above(canvas, axes, 3)


CAPTION = "Perplexity by position. Positions to the right of the line did not occur in training."
TOPIC = Topic(answering(_measured, _report), (Figure("ppl", CAPTION, answering(_measured, _data), draw),))
