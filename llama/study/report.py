"""The report of a topic: tables, and one or two sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..system.documents import plain

Value = int | float | str


@dataclass(frozen=True)
class Table:
    """A small table: a title, the names of the columns (with units), and rows of numbers or strings."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]


@dataclass(frozen=True)
class Report:
    """The answer of a topic: tables, one or two sentences, and the settings by name."""

    tables: Sequence[Table]
    says: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


def text(topic: str, question: str, report: Report) -> str:
    """A report as text for a terminal of 100 columns."""
    lines = [f"{topic}: {question}"]
    if report.settings:
        names = {"theta": "base θ"}
        lines.append("  " + ", ".join(f"{names.get(key, key)} {value}" for key, value in report.settings.items()))
    lines += [f"  {line}" for line in _wrapped(report.says)]
    for table in report.tables:
        lines += ["", *table_lines(table)]
    return "\n".join(lines) + "\n"


def _wrapped(prose: str) -> list[str]:
    return textwrap.wrap(prose, 98, break_on_hyphens=False)


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


def as_dict(topic: str, question: str, report: Report) -> dict[str, Any]:
    """A report for JSON; numbers that are not finite become strings."""
    tables = [
        {
            "title": table.title,
            "columns": table.columns,
            "rows": [[plain(value) for value in row] for row in table.rows],
        }
        for table in report.tables
    ]
    about = {"topic": topic, "question": question, "settings": report.settings, "says": _wrapped(report.says)}
    return {**about, "tables": tables}


def show(value: Value) -> str:
    """Format a value: at most six significant digits, and from 1,000 on with thousands separators."""
    if isinstance(value, float) and 1000 <= abs(value) < 1e9:
        return f"{float(f'{value:.6g}'):,.2f}".rstrip("0").rstrip(".")
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
