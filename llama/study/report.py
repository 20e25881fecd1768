"""The report of a topic: tables, and one or two sentences."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Value = bool | int | float | complex | str


@dataclass(frozen=True)
class Table:
    """A small table: a title, the names of the columns (with units), and rows of numbers or strings."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]


@dataclass(frozen=True)
class Report:
    """The answer of a topic. `says` is prose, in lines of at most 98 characters."""

    topic: str
    question: str
    tables: Sequence[Table] = ()
    says: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def wrapped(prose: str) -> tuple[str, ...]:
    """Wrap prose for `Report.says`, so that an indented line fits a terminal of 100 columns."""
    return tuple(textwrap.wrap(prose, 98, break_on_hyphens=False))


def text(report: Report) -> str:
    """A report as text for a terminal."""
    lines = [f"{report.topic}: {report.question}"]
    if report.settings:
        names = {"theta": "base θ"}
        lines.append("  " + ", ".join(f"{names.get(key, key)} {value}" for key, value in report.settings.items()))
    lines += [f"  {line}" for line in report.says]
    for table in report.tables:
        lines += ["", *table_lines(table)]
    return "\n".join(lines) + "\n"


def table_lines(table: Table) -> list[str]:
    """The lines of a table, with its title: columns of text are aligned left, the others right."""
    cells = [list(table.columns), *([show(value) for value in row] for row in table.rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.columns))]
    left = [all(isinstance(row[column], str) for row in table.rows) for column in range(len(widths))]
    return [
        f"  {table.title}",
        *(
            "    "
            + "  ".join(
                cell.ljust(width) if text else cell.rjust(width)
                for cell, width, text in zip(row, widths, left, strict=True)
            ).rstrip()
            for row in cells
        ),
    ]


def as_dict(report: Report) -> dict[str, Any]:
    """A report for JSON: complex numbers become [real, imaginary], numbers that are not finite become strings."""
    return {
        "topic": report.topic,
        "question": report.question,
        "settings": {key: plain(value) for key, value in report.settings.items()},
        "says": list(report.says),
        "tables": [
            {
                "title": table.title,
                "columns": list(table.columns),
                "rows": [[plain(value) for value in row] for row in table.rows],
            }
            for table in report.tables
        ],
    }


def show(value: Value) -> str:
    """Format a value: at most six significant digits, and from 1,000 on with thousands separators."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, complex):
        return f"{value.real:.6g}{value.imag:+.6g}j"
    if isinstance(value, float) and 1000 <= abs(value) < 1e9:
        return f"{float(f'{value:.6g}'):,.2f}".rstrip("0").rstrip(".")
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def plain(value: Any) -> Any:
    """Convert a value to one that JSON has."""
    if isinstance(value, complex):
        return [value.real, value.imag]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
