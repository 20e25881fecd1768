"""Recall of facts in a long text beside perplexity, under the methods that stretch a context."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from ...errors import UsageError
from ..figure import THIN, Canvas, Data, Figure, columns, draw_lines, legend_above
from ..needle import Found, Recall, measure
from ..report import Report, Table, Value
from ..results import rows as stored_rows
from .base import Topic, answering
from .ppl import label

STORED, STORED_MODEL = "needle-smollm2.csv", "smollm2-135m-instruct"


def stored() -> Found:
    """The results in the package, as `clearllama study needle -m MODEL --figure FILE.csv` writes them."""
    answers = []
    for method, *integers, nats, right, text in stored_rows(STORED):
        answers.append(Recall(method, *map(int, integers), *map(float, (nats, right, text))))
    return Found(STORED_MODEL, answers)


_measured = lru_cache(maxsize=1)(measure)  # a report and its figures share one measurement


def _found(
    model: str | None = None,
    text: Path | None = None,
    length: int | None = None,
    methods: Sequence[str] | None = None,
    dtype: str | None = None,
    progress: Callable[[str, int, int], object] = lambda method, done, total: None,
) -> Found:
    """A measurement of a model, or the stored results if nothing is set."""
    if model is not None:
        return _measured(model, text, length, methods, dtype, progress)
    if (text, length, methods, dtype) != (None, None, None, None):
        raise UsageError("study needle shows stored results; to measure with these options, name a model (--model)")
    return stored()


def _means(table: Data) -> Data:
    """By method and tokens read: recall of the facts within the first trained length, and perplexity of the text."""
    rows = []
    for method in dict.fromkeys(table["method"].tolist()):
        for read in np.unique(table["read"]):
            asked = (table["method"] == method) & (table["read"] == read) & (table["at"] < table["trained"])
            right, nats = table["right"][asked], float(table["text"][asked].mean())
            numbers = f"{(right == 1).sum()}/{len(right)}"
            rows.append((label(method), read / table["trained"][0], float(right.mean()), numbers, math.exp(nats)))
    return columns(("method", "read", "recall", "numbers", "perplexity"), rows)


def _report(found: Found) -> Report:
    """Recall and perplexity by method and length."""
    means = _means(_data(found))
    names, lengths = (dict.fromkeys(means[column].tolist()) for column in ("method", "read"))

    def rows(column: str, digits: int = 0) -> list[tuple[Value, ...]]:
        values = {name: means[column][means["method"] == name].tolist() for name in names}
        return [(name, *(round(x, digits) if digits else x for x in row)) for name, row in values.items()]

    heads = ("method", *(f"{length:.3g}x" for length in lengths))
    return Report(
        (
            Table("digits that are right if the true digits before are given, share", heads, rows("recall", 2)),
            Table("numbers that the model writes completely right", heads, rows("numbers")),
            Table("perplexity of the text before that length", heads, rows("perplexity", 1)),
        ),
        "Facts such as 'The magic number of Lima is 29305.' stand in a text. A column's number says how many"
        " trained lengths the model has read when it is asked for the facts of the first one. A guessed digit is right"
        " in 1 of 10 cases. Without -m MODEL, the results are those stored in the package.",
        {"model": found.model, "trained": found.answers[0].trained},
    )


def _data(found: Found) -> Data:
    """One row per answer."""
    return columns(Recall._fields, found.answers)


def draw(table: Data, canvas: Canvas) -> None:
    """Perplexity of the text, and recall below it, over the tokens read."""
    means = _means(table)
    upper, lower = canvas.subplots(2, 1)
    for axes, column, title in (
        (upper, "perplexity", "perplexity of the text"),
        (lower, "recall", "digits that are right (share)"),
    ):
        draw_lines(axes, means, "read", column, "method", dict.fromkeys(means["method"].tolist()), markevery=(0, 1))
        axes.axvline(1, **THIN)
        axes.set(xlabel="tokens read (trained lengths)", ylabel=title)
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter("{x:g}")
    lower.axhline(0.1, **THIN, linestyle=":")
    lower.set_ylim(0, 1.03)
    legend_above(canvas, upper, 3)


def draw_depth(table: Data, canvas: Canvas) -> None:
    """Draw one panel per method, with a square for each answer."""
    names = list(dict.fromkeys(table["method"].tolist()))
    grid = canvas.subplots(-(-len(names) // 2), 2, sharex=True, sharey=True, squeeze=False)
    trained = table["trained"][0]
    for axes in grid.flat[len(names) :]:
        axes.axis("off")
    for axes, name in zip(grid.flat, names, strict=False):
        rows = table["method"] == name
        x, y, right = table["read"][rows] / trained, table["at"][rows] / trained, table["right"][rows]
        image = axes.scatter(x, y, c=right, cmap="Greys", vmin=0, vmax=1, marker="s", s=32, edgecolors="#8c8c8c")
        axes.axvline(1, **THIN)
        axes.set_title(label(name))
        axes.set_xlabel("tokens read (trained lengths)")
        axes.tick_params(labelbottom=True)
    canvas.supylabel("position of the fact (trained lengths)", fontsize="medium")
    canvas.colorbar(image, ax=list(grid.flat), label="digits that are right (share)", location="bottom", shrink=0.6)


NEEDLE = "Perplexity of the text, and recall of the facts within the first trained length. Dotted: chance."
DEPTH = (
    "Each square is a question, filled if all digits are right. Across: when it was asked. Up: where its fact stands."
)
TOPIC = Topic(
    answering(_found, _report),
    (
        Figure("needle", NEEDLE, answering(_found, _data), draw, size=(5.4, 5.8)),
        Figure("depth", DEPTH, answering(_found, _data), draw_depth, size=(5.6, 7.4)),
    ),
)
