"""A figure of the study: data as a table, and a function that draws it. matplotlib is imported only to draw.

Data is tidy: columns of one length, so that the same table is drawn, written as CSV, and recomputed by a test.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..system.temporary import own_temporary

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Data = Mapping[str, np.ndarray]  # column -> (rows,) numbers or words

# Lines that can be told apart without colour: each has a dash pattern of its own, and MARKERS go with them.
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

STYLE: Any = {
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "clearllama",  # the same data gives the same bytes
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Figure:
    """A picture and where its numbers come from.

    name     one word; also the name of its file
    caption  the claim that the picture shows, with what to look at; printed below it
    data     makes the table, from the library
    draw     draws the table on an empty matplotlib figure; names every axis with its unit
    size     inches
    """

    name: str
    caption: str
    data: Callable[..., Data]
    draw: Callable[[Data, Canvas], None]
    size: tuple[float, float] = (7.0, 4.0)

    def _repr_png_(self) -> bytes:
        """The picture of the default settings: what a notebook shows for a figure that ends a cell."""
        file = io.BytesIO()
        _draw(self, self.data(), file)
        return file.getvalue()


def check(file: Path) -> None:
    """Raise UsageError unless a figure can be written to this file."""
    if file.suffix.lower() not in _KINDS:
        raise UsageError(f"{file}: a figure is written as {', '.join(_KINDS)}; give a file with one of these endings")
    if not file.parent.is_dir():
        raise UsageError(f"{file}: there is no folder {file.parent}; make it first")
    if file.is_dir():
        raise UsageError(f"{file}: that is a folder; name a file in it")
    if not os.access(file.parent, os.W_OK):
        raise UsageError(f"{file}: the folder {file.parent} may not be written to; name a file elsewhere")
    if file.suffix.lower() in (".png", ".svg") and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "drawing needs matplotlib, which is not installed: pip install 'clearllama[study]'; --figure FILE.csv"
            " writes the numbers without it"
        )


def save(figure: Figure, file: Path, **options: Any) -> None:
    """Write a figure as .png or .svg, or its data as .csv or .json; an existing file is replaced in one rename."""
    check(file)
    data = figure.data(**options)
    if len({len(column) for column in data.values()}) != 1:
        raise ValueError(f"figure {figure.name}: columns of different length")
    write, target = _KINDS[file.suffix.lower()], file.resolve()  # what a link points to, not the link
    if target.exists() and not target.is_file():  # a pipe, say
        write(figure, data, target)
        return
    try:
        with own_temporary(target.parent, ".figure") as work:
            write(figure, data, work / target.name)
            os.replace(work / target.name, target)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from None


def _draw(figure: Figure, data: Data, file: Path | io.BytesIO) -> None:
    """As the file's ending says; into memory as PNG."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=figure.size, layout="constrained")
        figure.draw(data, canvas)
        canvas.supxlabel(_wrapped(figure.caption, figure.size[0]), fontsize=8, x=0.02, ha="left")
        kind = file.suffix[1:].lower() if isinstance(file, Path) else "png"
        canvas.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})


def _wrapped(text: str, inches: float) -> str:
    return "\n".join(textwrap.wrap(text, int(inches * 15.5)))


def _csv(figure: Figure, data: Data, file: Path) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(data)
        writer.writerows(zip(*(column.tolist() for column in data.values()), strict=True))


def _json(figure: Figure, data: Data, file: Path) -> None:
    columns = {name: column.tolist() for name, column in data.items()}
    file.write_text(json.dumps({"name": figure.name, "caption": figure.caption, "data": columns}) + "\n")


_KINDS = {".png": _draw, ".svg": _draw, ".csv": _csv, ".json": _json}
