"""Pictures as text: a figure's data drawn with characters, for a terminal. Nothing here needs matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .figure import Data
from .report import show

WIDTH, HEIGHT = 72, 12  # of the area of a plot, in characters
MARKS = "ox+*#@%&"
GREYS = " .:-=+*#%@"  # from the smallest value to the largest

Numbers = npt.NDArray[np.float64]


def curves(
    data: Data, x: str, y: str | Sequence[str], by: str | None = None, log: str = "", most: int = len(MARKS)
) -> list[str]:
    """Plot column y over column x, one curve per value of the column `by`, or one per column if y names several.

    log   "x", "y" or "xy": logarithmic axes; values that are not positive are left out
    most  largest number of curves; of more values of `by`, evenly spaced ones are drawn
    """
    names = [y] if isinstance(y, str) else list(y)
    series: list[tuple[str, Numbers, Numbers]] = []
    for name in names:
        chosen = list(dict.fromkeys(data[by].tolist())) if by else [name]
        if len(chosen) > most:
            chosen = [chosen[round(i * (len(chosen) - 1) / (most - 1))] for i in range(most)]
        for value in chosen:
            rows = data[by] == value if by else np.ones(len(data[x]), dtype=bool)
            label = f"{by} {value}" if by and not isinstance(value, str) else str(value)
            series.append((label, data[x][rows].astype(float), data[name][rows].astype(float)))
    usable = [(label, *_usable(across, up, log)) for label, across, up in series]
    usable = [entry for entry in usable if len(entry[1])]
    if not usable:
        return []
    low_x, high_x = _limits([across for _, across, _ in usable])
    low_y, high_y = _limits([up for *_, up in usable])
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for mark, (_, across, up) in zip(MARKS, usable, strict=False):
        columns = np.rint((across - low_x) / (high_x - low_x) * (WIDTH - 1)).astype(int)
        for column in np.unique(columns):
            height = (float(up[columns == column].mean()) - low_y) / (high_y - low_y)
            grid[HEIGHT - 1 - round(height * (HEIGHT - 1))][column] = mark
    top, bottom = (show(float(f"{_back(value, 'y' in log):.3g}")) for value in (high_y, low_y))
    margin = max(len(top), len(bottom))
    lines = [
        f"{(top if row == 0 else bottom if row == HEIGHT - 1 else ''):>{margin}} |{''.join(cells)}".rstrip()
        for row, cells in enumerate(grid)
    ]
    left, right = (show(float(f"{_back(value, 'x' in log):.4g}")) for value in (low_x, high_x))
    axis = f"{x}{' (log scale)' if 'x' in log else ''}"
    lines.append(f"{'':{margin}} +{'-' * WIDTH}")
    lines.append(f"{'':{margin}}  {left}{axis:^{WIDTH - len(left) - len(right)}}{right}")
    title = f"{' and '.join(names) if len(names) < 3 else 'value'}{' (log scale)' if 'y' in log else ''}"
    legend = ", ".join(f"{mark} {label}" for mark, (label, *_) in zip(MARKS, usable, strict=False))
    return [*(textwrap.wrap(f"{title}: {legend}", 98) if len(usable) > 1 else [title]), *lines]


def _usable(across: Numbers, up: Numbers, log: str) -> tuple[Numbers, Numbers]:
    """The points of a curve, as logarithms where an axis has them."""
    kept = np.isfinite(across) & np.isfinite(up)
    if "x" in log:
        kept &= across > 0
    if "y" in log:
        kept &= up > 0
    across, up = across[kept], up[kept]
    return (np.log10(across) if "x" in log else across), (np.log10(up) if "y" in log else up)


def _limits(values: Sequence[Numbers]) -> tuple[float, float]:
    """The smallest and the largest value; if they are equal, one more."""
    low, high = min(float(x.min()) for x in values), max(float(x.max()) for x in values)
    return low, high if high > low else low + 1


def _back(value: float, log: bool) -> float:
    return 10**value if log else value


def shades(
    data: Data, row: str, column: str, value: str, panel: Sequence[str] = (), rows: int = 16, columns: int = 32
) -> list[str]:
    """Draw maps of a value over rows and columns with ten greys, one map per combination of the columns in `panel`.

    Of more than `rows` rows or `columns` columns, every second, third, ... is drawn. The maps share one scale. The
    first and the last row and column have their values beside them.
    """
    low, high = _limits([data[value].astype(float)])
    keys = list(zip(*(data[name].tolist() for name in panel), strict=True)) if panel else [()] * len(data[row])
    maps, ends = [], set()
    for key in dict.fromkeys(keys):
        mine = np.array([other == key for other in keys])
        down, along = (list(dict.fromkeys(data[name][mine].tolist())) for name in (row, column))
        step = -(-len(down) // rows), -(-len(along) // columns)
        down, along = down[:: step[0]], along[:: step[1]]
        entries = zip(*(data[name][mine].tolist() for name in (row, column, value)), strict=True)
        cells = {(r, c): float(v) for r, c, v in entries}
        wide = 3 if len(along) <= 8 else 1  # characters per cell
        title = " ".join(str(part) for part in key)
        picture = ["".join(_grey(cells.get((r, c), math.nan), low, high) * wide for c in along) for r in down]
        first, last = show(along[0]), show(along[-1])
        width = max(len(title), len(along) * wide)
        below = first + last.rjust(len(along) * wide - len(first))
        maps.append([line.ljust(width) for line in (title, *picture, below)])
        ends.add((show(down[0]), show(down[-1]), len(down)))
    (top, bottom, height) = ends.pop() if len(ends) == 1 else ("", "", 0)
    wanted = max(len(one) for one in maps)
    maps = [one + [" " * len(one[0])] * (wanted - len(one)) for one in maps]
    margin = max(len(top), len(bottom))
    beside = {1: top, height: bottom}
    lines = [
        f"{beside.get(number, ''):>{margin}} {'   '.join(parts)}".rstrip()
        for number, parts in enumerate(zip(*maps, strict=True))
    ]
    steps = [f" in steps of {by}" if by > 1 else "" for by in step]
    scale = f"{value}: '{GREYS[0]}' is {show(float(f'{low:.3g}'))}, '{GREYS[-1]}' is {show(float(f'{high:.3g}'))};"
    return [f"{scale} {row} downwards{steps[0]}, {column} to the right{steps[1]}", *(lines if panel else lines[1:])]


def _grey(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return "?"
    return GREYS[min(int((value - low) / (high - low) * len(GREYS)), len(GREYS) - 1)]


def bars(data: Data, label: Sequence[str], value: str) -> list[str]:
    """Draw one bar per row, named by the columns in `label`."""
    names = [" ".join(parts) for parts in zip(*(data[name].tolist() for name in label), strict=True)]
    largest, wide = float(data[value].max()), max(map(len, names))
    return [
        value,
        *(
            f"{name:<{wide}}  {'#' * max(round(40 * number / largest), 1)} {show(float(f'{number:.4g}'))}"
            for name, number in zip(names, data[value].tolist(), strict=True)
        ),
    ]
