"""Perplexity against context length: what each way to stretch a context costs, and how far it reaches."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..figure import LINES, MARKERS, Data, Figure
from ..perplexity import Measurement, measure
from ..report import Check, Report, Table, above, below
from .base import Topic

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Answer = TypeVar("Answer")


@lru_cache(maxsize=1)
def _measured(**setting: Any) -> Measurement:
    """One measurement for report and figure alike."""
    return measure(**setting)


def _of(answer: Callable[[Measurement], Answer]) -> Callable[..., Answer]:
    """An answer that takes what `measure` takes: its signature is that one, so the options are written once."""

    @wraps(measure)
    def measured(**setting: Any) -> Answer:
        return answer(_measured(**setting))

    return measured


def _report(found: Measurement) -> Report:
    """Perplexity by bucket of positions under each method, and the claims that hold the methods side by side."""
    curves = {method: found.perplexity(method) for method in found.methods}
    ends = sorted({end for curve in curves.values() for end in curve})
    return Report(
        "ppl",
        "how far does each way to stretch a context reach, on a real model?",
        says=(
            "Perplexity per token; compare down a column only, since each bucket holds another part of the text.",
            "Buckets end at these multiples of the trained length:",
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


def _checks(curves: dict[str, dict[float, float]]) -> list[Check]:
    """The claims about the methods that were measured; each compares two methods in the same buckets."""

    def at(method: str, end: float) -> float:
        return curves[method][end]

    def has(end: float, *methods: str) -> bool:
        return all(method in curves and end in curves[method] for method in methods)

    checks = []
    if has(1.25, "none", "yarn:4"):
        checks.append(
            below("001-33", "unchanged, 1 to 1.25x: against yarn:4", at("none", 1.25) / at("yarn:4", 1.25), 2)
        )
    if has(4, "none", "yarn:4"):
        checks.append(above("001-33", "unchanged, 3 to 4x: against yarn:4", at("none", 4) / at("yarn:4", 4), 2))
    if has(1, "none", "linear:4"):
        checks.append(above("001-21", "PI untrained, within 1x: against none", at("linear:4", 1) / at("none", 1), 1.2))
    if has(1, "linear:4") and has(4, "linear:4"):
        checks.append(below("001-34", "PI does not blow up: 4x against 1x", at("linear:4", 4) / at("linear:4", 1), 1.5))
    if has(2, "ntk:4", "linear:4"):
        checks.append(below("001-35", "NTK-aware x4 against PI x4, 1.5 to 2x", at("ntk:4", 2) / at("linear:4", 2), 1))
    if has(4, "ntk:4", "yarn:4"):
        checks.append(above("E21", "NTK-aware x4, 3 to 4x: against YaRN x4", at("ntk:4", 4) / at("yarn:4", 4), 1))
    if has(4, "ntk:16") and has(1, "ntk:16"):
        checks.append(below("E21", "NTK-aware x16 holds: 4x against 1x", at("ntk:16", 4) / at("ntk:16", 1), 2))
    if has(4, "yarn:4") and has(1, "yarn:4"):
        checks.append(below("E21", "YaRN x4 holds: 4x against 1x", at("yarn:4", 4) / at("yarn:4", 1), 1.5))
    return checks


def _data(found: Measurement) -> Data:
    """One row a method and bucket."""
    rows = [(method, end, ppl) for method in found.methods for end, ppl in found.perplexity(method).items()]
    return {
        "method": np.array([row[0] for row in rows]),
        "end": np.array([row[1] for row in rows]),
        "perplexity": np.array([row[2] for row in rows]),
    }


def _spoken(method: str) -> str:
    """A method as people call it: "PI x4" for "linear:4"."""
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
            label=_spoken(method),
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
            "Right of the line lies what training never saw. Unchanged frequencies fail there; PI is even but poor from"
            " the first token; NTK-aware x4 falls behind YaRN x4 before 4x; YaRN x4 holds (001-32..35, E21).",
            _of(_data),
            draw,
        ),
    ),
)
