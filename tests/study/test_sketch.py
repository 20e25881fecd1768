"""Pictures in characters: the marks are where the numbers are."""

from __future__ import annotations

import numpy as np
import pytest

from llama.study import sketch, topics
from llama.study.sketch import HEIGHT, WIDTH, bars, curves, shades

from .test_topics_attention import columns

LINE = {"x": np.arange(WIDTH), "y": np.arange(WIDTH) / (WIDTH - 1)}


def area(lines: list[str]) -> list[str]:
    """The area of a plot, row by row from the top."""
    return [line.split("|", 1)[1].ljust(WIDTH) for line in lines if "|" in line]


def test_a_straight_line_is_a_diagonal() -> None:
    rows = area(curves(LINE, "x", "y"))
    assert len(rows) == HEIGHT
    for column in range(WIDTH):
        marked = [row for row in range(HEIGHT) if rows[row][column] != " "]
        assert marked == [HEIGHT - 1 - round(column / (WIDTH - 1) * (HEIGHT - 1))]


def test_the_axes_name_the_limits() -> None:
    lines = curves({"x": np.array([2.0, 32.0]), "y": np.array([-5.0, 1500.0])}, "x", "y")
    assert lines[0] == "y"
    assert lines[1].startswith("1,500 |")
    assert lines[HEIGHT].lstrip().startswith("-5 |")
    assert lines[-1].split() == ["2", "x", "32"]


def test_logarithmic_axes_leave_out_what_has_no_logarithm() -> None:
    data = {"x": 10.0 ** np.arange(-1, 5), "y": np.array([3.0, 1.0, 10.0, 100.0, 1000.0, 0.0])}
    lines = curves({**data, "x": np.array([0.0, *data["x"][1:]])}, "x", "y", log="xy")
    rows = area(lines)
    marked = [(row, column) for row in range(HEIGHT) for column in range(WIDTH) if rows[row][column] == "o"]
    assert marked == [(0, 71), (4, 47), (7, 24), (11, 0)]  # four points of a power of x: evenly spaced
    assert "x (log scale)" in lines[-1]
    assert curves({"x": np.array([1.0]), "y": np.array([0.0])}, "x", "y", log="y") == []


def test_curves_have_marks_in_order_and_a_legend() -> None:
    data = {"x": np.tile([0, 1], 3), "y": np.array([0, 0, 1, 1, 2, 2]), "name": np.repeat(["a", "b", "c"], 2)}
    lines = curves(data, "x", "y", "name")
    rows = area(lines)
    assert lines[0] == "y: o a, x b, + c"
    assert [row[0] for row in (rows[11], rows[5], rows[0])] == ["o", "x", "+"]
    numbers = {**data, "name": np.repeat([0, 1, 2], 2)}
    assert curves(numbers, "x", "y", "name", most=2)[0] == "y: o name 0, x name 2"
    both = {"x": np.array([0, 1]), "first": np.array([0, 0]), "second": np.array([1, 1])}
    assert curves(both, "x", ("first", "second"))[0] == "first and second: o first, x second"


def test_greys_go_from_the_smallest_to_the_largest_value() -> None:
    values = np.arange(100.0)
    data = {"r": np.repeat(np.arange(10), 10), "c": np.tile(np.arange(10), 10), "v": values}
    lines = shades(data, "r", "c", "v")
    assert lines[0] == "v: ' ' is 0, '@' is 99; r downwards, c to the right"
    assert lines[-1].split() == ["0", "9"]
    assert [line[0] for line in lines[1:-1]] == [*"0        9"]
    cells = "".join(line[2:].ljust(10) for line in lines[1:-1])
    assert [sketch.GREYS.index(cell) for cell in cells] == sorted(sketch.GREYS.index(cell) for cell in cells)
    assert cells[0] == " "
    assert cells[-1] == "@"


def test_of_a_large_map_rows_and_columns_are_drawn_in_equal_steps() -> None:
    """So the diagonals of a score that depends on the distance stay diagonals."""
    m, n = np.meshgrid(np.arange(32), np.arange(32), indexing="ij")
    lines = shades({"m": m.ravel(), "n": n.ravel(), "v": np.cos(m - n).ravel()}, "m", "n", "v", rows=16, columns=16)
    assert lines[0].endswith("m downwards in steps of 2, n to the right in steps of 2")
    grid = [line[3:].ljust(16) for line in lines[1:-1]]
    assert len(grid) == 16
    assert all(grid[row][column] == grid[0][column - row] for row in range(16) for column in range(row, 16))
    assert (lines[1].split()[0], lines[16].split()[0], lines[17].split()) == ("0", "30", ["0", "30"])


def test_maps_stand_side_by_side() -> None:
    data = {
        "p": np.repeat(["left", "right"], 4),
        "r": np.tile([0, 0, 1, 1], 2),
        "c": np.tile([0, 1], 4),
        "v": np.array([0.0, 1, 1, 0, 1, 0, 0, 1]),
    }
    assert shades(data, "r", "c", "v", ("p",))[1:] == [
        "  left     right",
        "0    @@@   @@@",
        "1 @@@         @@@",
        "  0    1   0    1",
    ]


def test_bars_are_as_long_as_their_values() -> None:
    data = {"name": np.array(["a", "bb"]), "v": np.array([1.0, 4.0])}
    assert bars(data, ("name",), "v") == ["v", f"a   {'#' * 10} 1", f"bb  {'#' * 40} 4"]


WITHOUT = ("ppl", "heads", "bugs", "pairing", "trained", "bands", "variants", "others", "needle")


@pytest.mark.parametrize("name", [name for name in topics.TOPICS if name not in WITHOUT])
def test_a_topic_has_a_picture_that_fits(name: str) -> None:
    figure = next(figure for figure in topics.find(name).figures if figure.sketch is not None)
    assert figure.sketch is not None
    lines = figure.sketch(figure.data())
    assert 4 <= len(lines) <= 20
    assert max(map(columns, lines)) <= 100
