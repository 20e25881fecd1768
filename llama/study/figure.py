"""A figure of the study: a function that computes a table and one that draws it. Only drawing imports matplotlib.

A table is a mapping of columns of equal length, so that it can be drawn, written as CSV and recomputed by a test.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import UsageError
from ..system.temporary import write_atomically

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

Axes: TypeAlias = "matplotlib.axes.Axes"
Canvas: TypeAlias = "matplotlib.figure.Figure"
Data = Mapping[str, np.ndarray]  # column -> (rows,) numbers or strings

# Line styles that differ in their dashes as well as in colour, so that a black-and-white print is readable.
LINES: list[dict[str, Any]] = [
    {"color": "#000000", "linestyle": "-"},
    {"color": "#b2182b", "linestyle": "--"},
    {"color": "#2166ac", "linestyle": "-."},
    {"color": "#d6760b", "linestyle": ":"},
    {"color": "#1b7837", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
    {"color": "#762a83", "linestyle": (0, (1, 3))},
    {"color": "#666666", "linestyle": (0, (8, 3))},
    {"color": "#8c510a", "linestyle": (0, (3, 1, 1, 1))},
    {"color": "#01665e", "linestyle": (0, (10, 2, 2, 2))},
    {"color": "#c51b7d", "linestyle": (0, (2, 1))},
]
COLOURS = {"q": "#2166ac", "k": "#bf5600", "v": "#1b7837"}  # of queries, keys and values, the same in every picture
THIN: dict[str, Any] = {"color": "#8c8c8c", "linewidth": 0.8}  # the style of lines behind the data
MARKERS = ["o", "s", "^", "D", "v", "x", "+", "*", "P", "<"]
FORMATS = (".png", ".svg", ".csv")

STYLE: Any = {
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "clearllama",  # a fixed salt: the same data produces the same bytes
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
    """Raise UsageError if the file's ending is not in FORMATS, or if its format needs matplotlib, which is missing."""
    if file.suffix.lower() not in FORMATS:
        raise UsageError(f"{file}: expected a file name ending in {', '.join(FORMATS)}")
    if file.suffix.lower() != ".csv" and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "drawing needs matplotlib, which is not installed: pip install 'clearllama[study]';"
            " --figure FILE.csv writes the numbers without matplotlib"
        )


def save(figure: Figure, file: Path, **options: Any) -> None:
    """Write a figure as .png or .svg, or its data as .csv; an existing file is replaced in one rename."""
    check(file)
    data, kind = figure.data(**options), file.suffix.lower().removeprefix(".")
    if kind == "csv":
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(data)
        writer.writerows(zip(*(column.tolist() for column in data.values()), strict=True))
        content = text.getvalue().encode()
    else:
        content = image(figure, data, kind)
    try:
        write_atomically(file, content)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from None


def columns(names: Sequence[str], rows: Iterable[Sequence[object]]) -> Data:
    """The data of a figure, from its rows."""
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def pair_colour(pair: int, pairs: int) -> str:
    """The purple of pair number `pair` among `pairs`: strong for fast pairs and pale for slow ones."""
    part = pair / max(pairs - 1, 1)
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in ((63, 153), (0, 112), (125, 171)))


def draw_lines(
    axes: Axes, data: Data, x: str, y: str, line: str, names: Iterable[str], markevery: tuple[int, int] | None = None
) -> None:
    """Plot column y over column x, one curve for each name in the column `line`, in the styles of LINES.

    markevery  (n, k) marks every k-th point, and starts n points later on each further curve; None marks no point
    """
    for number, name in enumerate(names):
        rows, style = data[line] == name, dict(LINES[number % len(LINES)])
        if markevery is not None:
            first, every = markevery
            style |= {"marker": MARKERS[number], "markersize": 4, "markevery": (number * first, every)}
        axes.plot(data[x][rows], data[y][rows], label=name, **style)


def legend_above(canvas: Canvas, axes: Axes, columns: int, title: str | None = None) -> None:
    """Draw the legend of some axes above all axes of the figure."""
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=columns, title=title)


def image(figure: Figure, data: Data, kind: str, *, caption: bool = True) -> bytes:
    """The content of an image file of kind "png" or "svg", with or without the caption below the picture."""
    import matplotlib.figure

    with matplotlib.rc_context(STYLE):
        canvas = matplotlib.figure.Figure(figsize=figure.size, layout="constrained")
        figure.draw(data, canvas)
        if caption:
            words = "\n".join(textwrap.wrap(figure.caption, int(figure.size[0] * 15.5)))
            canvas.supxlabel(words, fontsize=8, x=0.02, ha="left")
        file = io.BytesIO()
        canvas.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return file.getvalue()
