"""A figure of the study: a function that computes a table and one that draws it. Only drawing imports matplotlib.

A table is a mapping of columns of equal length, so that it can be drawn, written as CSV and recomputed by a test.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..system.temporary import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Data = Mapping[str, np.ndarray]  # column -> (rows,) numbers or strings

# Line styles that differ in their dashes as well as in colour, so that a black-and-white print is readable.
LINES: list[dict[str, Any]] = [
    {"color": "#000000", "linestyle": "-"},
    {"color": "#b2182b", "linestyle": "--"},
    {"color": "#2166ac", "linestyle": "-."},
    {"color": "#e08214", "linestyle": ":"},
    {"color": "#1b7837", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
    {"color": "#762a83", "linestyle": (0, (1, 3))},
    {"color": "#666666", "linestyle": (0, (8, 3))},
    {"color": "#8c510a", "linestyle": (0, (3, 1, 1, 1))},
    {"color": "#01665e", "linestyle": (0, (10, 2, 2, 2))},
    {"color": "#c51b7d", "linestyle": (0, (2, 1))},
]
MARKERS = ["o", "s", "^", "D", "v", "x", "+", "*", "P", "<"]
FORMATS = (".png", ".svg", ".csv", ".json")

STYLE: Any = {
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "clearllama",  # the same data produces the same bytes
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Figure:
    """A picture and the source of its numbers.

    name     one word; also the name of its file
    caption  the claim that the picture shows, and what to look at; printed below the picture
    data     computes the table with the library
    draw     draws the table on an empty matplotlib figure; every axis has a label with its unit
    size     inches
    """

    name: str
    caption: str
    data: Callable[..., Data]
    draw: Callable[[Data, Canvas], None]
    size: tuple[float, float] = (7.0, 4.0)

    def _repr_png_(self) -> bytes:
        """The picture at the default settings; a notebook displays it when a figure is the last value of a cell."""
        return image(self, self.data(), "png")


def check(file: Path) -> None:
    """Raise UsageError unless a figure can be written to this file."""
    if file.suffix.lower() not in FORMATS:
        raise UsageError(f"{file}: expected a file name ending in {', '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise UsageError(f"{file}: there is no folder {file.parent}; create it first")
    if file.is_dir():
        raise UsageError(f"{file} is a folder; expected a file name")
    if not os.access(file.parent, os.W_OK):
        raise UsageError(f"{file}: no permission to write to the folder {file.parent}; choose another folder")
    if file.suffix.lower() in (".png", ".svg") and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "drawing needs matplotlib, which is not installed: pip install 'clearllama[study]';"
            " --figure FILE.csv writes the numbers without matplotlib"
        )


def save(figure: Figure, file: Path, **options: Any) -> None:
    """Write a figure as .png or .svg, or its data as .csv or .json; an existing file is replaced in one rename."""
    check(file)
    data = figure.data(**options)
    if len({len(column) for column in data.values()}) != 1:
        raise ValueError(f"figure {figure.name}: columns of different length")
    kind = file.suffix.lower().removeprefix(".")
    if kind == "csv":
        content = _csv(data).encode()
    elif kind == "json":
        content = _json(figure, data).encode()
    else:
        content = image(figure, data, kind)
    try:
        write_atomically(file, content)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from None


def draw_lines(
    axes: Axes, data: Data, x: str, y: str, line: str, names: Iterable[str], markevery: tuple[int, int] | None = None
) -> None:
    """Plot column y over column x, one line for each name in the column `line`, with LINES in order.

    markevery  (n, k) marks every k-th point, and starts n points later on each further line; None marks none
    """
    for number, name in enumerate(names):
        rows = data[line] == name
        marks: dict[str, Any] = {}
        if markevery is not None:
            marks = {
                "marker": MARKERS[number % len(MARKERS)],
                "markersize": 4,
                "markevery": (number * markevery[0], markevery[1]),
            }
        axes.plot(data[x][rows], data[y][rows], label=name, **marks, **LINES[number % len(LINES)])


def image(figure: Figure, data: Data, kind: str, *, caption: bool = True) -> bytes:
    """The content of an image file of kind "png" or "svg", with or without the caption below the picture."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=figure.size, layout="constrained")
        figure.draw(data, canvas)
        if caption:
            canvas.supxlabel(_wrapped(figure.caption, figure.size[0]), fontsize=8, x=0.02, ha="left")
        file = io.BytesIO()
        canvas.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return file.getvalue()


def _wrapped(text: str, inches: float) -> str:
    return "\n".join(textwrap.wrap(text, int(inches * 15.5)))


def _csv(data: Data) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(data)
    writer.writerows(zip(*(column.tolist() for column in data.values()), strict=True))
    return text.getvalue()


def _json(figure: Figure, data: Data) -> str:
    columns = {name: column.tolist() for name, column in data.items()}
    return json.dumps({"name": figure.name, "caption": figure.caption, "data": columns}) + "\n"
