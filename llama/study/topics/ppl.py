"""Perplexity by position: the cost and the reach of each method to stretch a context, on a real model."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from ..figure import LINES, MARKERS, Data, Figure
from ..perplexity import Measurement, measure
from ..report import Check, Report, Table
from ..sketch import curves
from . import TOPICS
from .base import Topic

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Answer = TypeVar("Answer")


@lru_cache(maxsize=1)
def _measured(**setting: Any) -> Measurement:
    """`measure`, cached so that a report and its figure share one measurement."""
    return measure(**setting)


def _of(answer: Callable[[Measurement], Answer]) -> Callable[..., Answer]:
    """Turn a function of a measurement into one with the arguments and the signature of `measure`."""

    @wraps(measure)
    def measured(**setting: Any) -> Answer:
        return answer(_measured(**setting))

    return measured


def _report(found: Measurement) -> Report:
    """Perplexity by bucket of positions under each method, and the claims that compare the methods."""
    curves = {method: found.perplexity(method) for method in found.methods}
    ends = sorted({end for curve in curves.values() for end in curve})
    return Report(
        "ppl",
        TOPICS["ppl"],
        says=(
            "Perplexity per token. Compare within a column only: each bucket is another part of the text. Buckets",
            "end at these multiples of the trained length:",
        ),
        tables=(
            Table(
                f"windows: {found.setting['windows']} of {found.setting['length']} tokens, trained for {found.trained}",
                ("method", *(f"..{end:.3g}x" for end in ends)),
                [(method, *(round(curve[end], 3) for end in ends)) for method, curve in curves.items()],
            ),
        ),
        checks=_checks(curves),
        settings={key: found.setting[key] for key in ("model", "text", "dtype")},
    )


# claim, statement, two (method, end of a bucket), and the bound on the ratio of their perplexities
CLAIMS: tuple[tuple[str, str, tuple[str, float], tuple[str, float], Literal["<", ">"], float], ...] = (
    ("001-33", "unchanged / yarn:4, at 1 to 1.25x", ("none", 1.25), ("yarn:4", 1.25), "<", 2),
    ("001-33", "unchanged / yarn:4, at 3 to 4x", ("none", 4), ("yarn:4", 4), ">", 2),
    ("001-21", "PI x4 without training / unchanged, up to 1x", ("linear:4", 1), ("none", 1), ">", 1.2),
    ("001-34", "PI x4 does not diverge: at 4x / at 1x", ("linear:4", 4), ("linear:4", 1), "<", 1.5),
    ("001-35", "NTK-aware x4 / PI x4, at 1.5 to 2x", ("ntk:4", 2), ("linear:4", 2), "<", 1),
    ("001-23", "NTK-aware x4 / YaRN x4, at 3 to 4x", ("ntk:4", 4), ("yarn:4", 4), ">", 1),
    ("001-23", "NTK-aware x16 reaches 4x: at 4x / at 1x", ("ntk:16", 4), ("ntk:16", 1), "<", 2),
    ("001-23", "YaRN x4 reaches 4x: at 4x / at 1x", ("yarn:4", 4), ("yarn:4", 1), "<", 1.5),
)


def _checks(curves: dict[str, dict[float, float]]) -> list[Check]:
    """The claims about the methods and buckets that were measured."""
    found = {(method, end): value for method, curve in curves.items() for end, value in curve.items()}
    return [
        Check(claim, what, found[one] / found[other], bound, relation)
        for claim, what, one, other, relation, bound in CLAIMS
        if one in found and other in found
    ]


def _data(found: Measurement) -> Data:
    """One row per method and bucket."""
    rows = [(method, end, ppl) for method in found.methods for end, ppl in found.perplexity(method).items()]
    return {
        "method": np.array([row[0] for row in rows]),
        "end": np.array([row[1] for row in rows]),
        "perplexity": np.array([row[2] for row in rows]),
    }


def label(method: str) -> str:
    """The usual name of a method: "PI x4" for "linear:4"."""
    kind, _, factor = method.partition(":")
    names = {"none": "unchanged", "linear": "PI", "ntk": "NTK-aware", "dynamic": "dynamic NTK", "yarn": "YaRN"}
    return f"{names.get(kind, kind)}{f' x{factor}' if factor else ''}"


def draw(table: Data, canvas: Canvas) -> None:
    axes = canvas.subplots()
    for index, method in enumerate(dict.fromkeys(table["method"].tolist())):
        rows = table["method"] == method
        style = LINES[index % len(LINES)]
        axes.plot(
            table["end"][rows],
            table["perplexity"][rows],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            label=label(method),
            **style,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = table["perplexity"].min(), table["perplexity"].max()
    ticks = [
        tick for power in range(6) for tick in (10**power, 2 * 10**power, 5 * 10**power) if low / 1.5 < tick < high
    ]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ends = sorted(set(table["end"].tolist()))
    axes.set_xticks(ends, [f"{end:g}" for end in ends])
    axes.minorticks_off()
    axes.axvline(1, color="#999999", linewidth=0.8)
    axes.set_xlabel("end of the bucket of positions (trained lengths)")
    axes.set_ylabel("perplexity per token")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


TOPIC = Topic(
    _of(_report),
    figures=(
        Figure(
            "ppl",
            "Positions to the right of the line did not occur in training. Unchanged frequencies fail there. PI is"
            " equally poor at all positions. NTK-aware x4 is worse than YaRN x4 before 4x. YaRN x4 works up to 4x.",
            _of(_data),
            draw,
            sketch=lambda data: curves(data, "end", "perplexity", "method", log="xy"),
        ),
    ),
)
