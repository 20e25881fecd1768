"""Recall of facts in a long text beside perplexity, under the methods that stretch a context."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import UsageError
from ..figure import Data, Figure, draw_lines
from ..needle import Found, Recall, measure
from ..report import Check, Report, Table, above, below, wrapped
from ..results import table as stored_table
from . import TOPICS
from .base import Topic, columns
from .ppl import label as label_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

STORED, STORED_MODEL = "needle-smollm2.csv", "smollm2-135m-instruct"
NAMES = ("method", "trained", "read", "at", "nats", "right", "text")


def stored() -> Found:
    """The results in the package, as `clearllama study needle -m MODEL --figure FILE.csv` writes them."""
    rows = stored_table(STORED)
    answers = tuple(
        Recall(row["method"], int(row["read"]), int(row["at"]), *(float(row[name]) for name in NAMES[4:]))
        for row in rows
    )
    return Found(STORED_MODEL, int(rows[0]["trained"]), answers)


@lru_cache(maxsize=1)
def _measured(**setting: Any) -> Found:
    """`measure`, cached so that a report and its figures share one measurement."""
    return measure(**setting)


def _found(**setting: Any) -> Found:
    """A measurement of setting["model"], or the stored results if nothing is set."""
    given = {name: value for name, value in setting.items() if value is not None}
    if "model" in given:
        return _measured(**given)
    options = ", ".join(f"--{name}" for name in given if name != "progress")
    if options:
        raise UsageError(f"study needle shows stored results; to measure with {options}, add --model")
    return stored()


def report(
    model: str | None = None,
    text: Path | None = None,
    length: int | None = None,
    methods: Sequence[str] | None = None,
    dtype: str | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> Report:
    """Recall and perplexity by method and length."""
    found = _found(model=model, text=text, length=length, methods=methods, dtype=dtype, progress=progress)
    names = list(dict.fromkeys(answer.method for answer in found.answers))
    lengths = sorted({answer.read for answer in found.answers})
    recall = {(name, read): _mean(found, name, read, "right") for name in names for read in lengths}
    ppl = {(name, read): math.exp(_mean(found, name, read, "text")) for name in names for read in lengths}
    heads = ("method", *(f"{read / found.trained:.3g}x" for read in lengths))
    shared = [read for read in lengths if read >= found.trained] if found.trained in lengths else []
    return Report(
        "needle",
        TOPICS["needle"],
        settings={"model": found.model, "trained": found.trained, "facts": len({a.at for a in found.answers})},
        says=wrapped(
            "Facts such as 'The magic number of Lima is 29305.' stand in a text at equal distances. When the model has"
            " read as many trained lengths as the column says, it is asked for each fact so far. Later columns have"
            " more facts, so compare methods within a column"
            + (
                ". To compare lengths, use the second table, which has the same facts in all columns."
                if len(shared) > 1
                else "."
            )
            + " A guessed digit is right in 1 of 10 cases."
            + (" Stored results; -m MODEL measures another model." if model is None else "")
        ),
        tables=(
            Table(
                "digits that are right, share",
                heads,
                [(label_of(name), *(round(recall[name, read], 2) for read in lengths)) for name in names],
            ),
            *(
                Table(
                    f"the same of the {len(_first(found))} facts of the first trained length only",
                    ("method", *(f"{read / found.trained:.3g}x" for read in shared)),
                    [(label_of(name), *(round(_same(found, name, read), 2) for read in shared)) for name in names],
                )
                for _ in range(len(shared) > 1)
            ),
            Table(
                "perplexity of the text before that length",
                heads,
                [(label_of(name), *(round(ppl[name, read], 1) for read in lengths)) for name in names],
            ),
        ),
        checks=_checks(found, recall, ppl) if model is None else (),
    )


def _mean(found: Found, method: str, read: int, field: str) -> float:
    values = [getattr(answer, field) for answer in found.answers if (answer.method, answer.read) == (method, read)]
    return sum(values) / len(values)


def _first(found: Found) -> set[int]:
    """Positions of the facts for which the model is asked at the trained length."""
    return {answer.at for answer in found.answers if answer.read == found.trained}


def _same(found: Found, method: str, read: int) -> float:
    """Share of right digits at one length, for the facts of `_first` only."""
    chosen = [a.right for a in found.answers if (a.method, a.read) == (method, read) and a.at in _first(found)]
    return sum(chosen) / len(chosen)


def _checks(found: Found, recall: dict[tuple[str, int], float], ppl: dict[tuple[str, int], float]) -> tuple[Check, ...]:
    """Statements about the stored results."""
    trained, past, last = (round(edge * found.trained) for edge in (1, 1.25, 1.75))
    return (
        below("", "unchanged: perplexity at 1.25x / at 1x", ppl["none", past] / ppl["none", trained], 1.1),
        below(
            "",
            "unchanged: recall of the same facts at 1.25x / at 1x",
            _same(found, "none", past) / _same(found, "none", trained),
            0.7,
        ),
        below("", "unchanged: recall at 1.75x", recall["none", last], 0.15),
        below("", "PI x2: recall at 1x", recall["linear:2", trained], 0.2),
        below("", "NTK-aware x2 / YaRN x2: perplexity at 1.75x", ppl["ntk:2", last] / ppl["yarn:2", last], 1.05),
        below("", "NTK-aware x2 / YaRN x2: recall at 1.75x", recall["ntk:2", last] / recall["yarn:2", last], 0.7),
        above("", "YaRN x2 / unchanged: recall at 1.75x", recall["yarn:2", last] / recall["none", last], 2),
    )


def data(
    model: str | None = None,
    text: Path | None = None,
    length: int | None = None,
    methods: Sequence[str] | None = None,
    dtype: str | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> Data:
    """One row per answer."""
    found = _found(model=model, text=text, length=length, methods=methods, dtype=dtype, progress=progress)
    return columns(NAMES, [(a.method, found.trained, *(getattr(a, name) for name in NAMES[2:])) for a in found.answers])


def draw(table: Data, canvas: Canvas) -> None:
    upper, lower = canvas.subplots(2, 1)
    rows = []
    for method in dict.fromkeys(table["method"].tolist()):
        for read in np.unique(table["read"]):
            chosen = (table["method"] == method) & (table["read"] == read)
            recall, text = (float(table[name][chosen].mean()) for name in ("right", "text"))
            rows.append((label_of(method), read / table["trained"][0], recall, math.exp(text)))
    means = columns(("method", "read", "recall", "perplexity"), rows)
    names = list(dict.fromkeys(means["method"].tolist()))
    for axes, column, label in (
        (upper, "perplexity", "perplexity of the text"),
        (lower, "recall", "digits that are right (share)"),
    ):
        draw_lines(axes, means, "read", column, "method", names, markevery=(0, 1))
        axes.axvline(1, color="#999999", linewidth=0.8)
        axes.set_xlabel("tokens read (trained lengths)")
        axes.set_ylabel(label)
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter("{x:g}")
    lower.axhline(0.1, color="#999999", linewidth=0.8, linestyle=":")
    lower.set_ylim(0, 1.03)
    canvas.legend(*upper.get_legend_handles_labels(), loc="outside upper center", ncols=3)


def draw_depth(table: Data, canvas: Canvas) -> None:
    """Draw one panel per method, with a square for each answer."""
    names = list(dict.fromkeys(table["method"].tolist()))
    grid = canvas.subplots(-(-len(names) // 2), 2, sharex=True, sharey=True, squeeze=False)
    panels, rest = grid.flat[: len(names)], grid.flat[len(names) :]
    trained = table["trained"][0]
    for axes in rest:
        axes.axis("off")
    for axes, name in zip(panels, names, strict=True):
        rows = table["method"] == name
        image = axes.scatter(
            table["read"][rows] / trained,
            table["at"][rows] / trained,
            c=table["right"][rows],
            cmap="viridis",
            vmin=0,
            vmax=1,
            marker="s",
            s=32,
        )
        axes.axvline(1, color="#999999", linewidth=0.8)
        axes.set_title(label_of(name))
        axes.set_xlabel("tokens read (trained lengths)")
        axes.tick_params(labelbottom=True)
    canvas.supylabel("position of the fact (trained lengths)", fontsize="medium")
    canvas.colorbar(image, ax=list(grid.flat), label="digits that are right (share)", location="bottom", shrink=0.6)


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "needle",
            "Above: perplexity of the text. Below: facts so far that the model recalls; the dotted line is chance. A"
            " little past the trained length the unchanged model's perplexity is nearly as before, but its recall is"
            " not: most of the next tokens of a text depend on near tokens only.",
            data,
            draw,
            size=(5.4, 5.8),
        ),
        Figure(
            "depth",
            "Each square is a question. Across: after how many tokens it was asked. Up: where the fact stands. The top"
            " square of each column is the nearest fact. Past the trained length, the unchanged model first forgets"
            " what lies furthest back.",
            data,
            draw_depth,
            size=(5.6, 7.4),
        ),
    ),
)
