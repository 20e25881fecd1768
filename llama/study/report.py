"""The report of a topic: statements with computed and expected values, tables, and prose."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Value = bool | int | float | complex | str


@dataclass(frozen=True)
class Check:
    """One statement and whether it holds. Made by `equal`, `below`, `above` and `holds`.

    claim      ids of docs/evidence/claims.md that the statement belongs to, separated by spaces; not shown as text
    what       the statement, in a few words
    computed   the value that was measured
    expected   a value that was derived in another way, or a bound
    relation   "=" within the tolerance, "<" or ">"
    """

    claim: str
    what: str
    computed: Value
    expected: Value
    relation: Literal["=", "<", ">"] = "="
    tolerance: float = 0.0

    @property
    def passed(self) -> bool:
        """False for NaN on either side, whatever the relation."""
        a, b = self.computed, self.expected
        if isinstance(a, str) or isinstance(b, str) or isinstance(a, bool) or isinstance(b, bool):
            return type(a) is type(b) and a == b
        if self.relation == "=":
            return abs(a - b) <= self.tolerance
        if isinstance(a, complex) or isinstance(b, complex):
            raise TypeError("complex numbers have no order")
        return a < b if self.relation == "<" else a > b


def equal(claim: str, what: str, computed: Value, expected: Value, tolerance: float = 0.0) -> Check:
    """computed = expected, to within an absolute tolerance."""
    return Check(claim, what, computed, expected, "=", tolerance)


def below(claim: str, what: str, computed: float, bound: float) -> Check:
    """computed < bound."""
    return Check(claim, what, computed, bound, "<")


def above(claim: str, what: str, computed: float, bound: float) -> Check:
    """computed > bound."""
    return Check(claim, what, computed, bound, ">")


def holds(claim: str, what: str, computed: bool) -> Check:
    """The statement is true."""
    return Check(claim, what, bool(computed), True)


@dataclass(frozen=True)
class Table:
    """A small table: a title, the names of the columns (with units), and rows of numbers or strings."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]


@dataclass(frozen=True)
class Report:
    """The answer of a topic. `says` is prose, in lines of at most 98 characters: the claim, then the conclusion."""

    topic: str
    question: str
    checks: Sequence[Check] = ()
    tables: Sequence[Table] = ()
    says: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True when every check holds. A report without checks proves nothing and does not pass."""
        return bool(self.checks) and all(check.passed for check in self.checks)


def wrapped(prose: str) -> tuple[str, ...]:
    """Wrap prose for `Report.says`, so that an indented line fits a terminal of 100 columns."""
    return tuple(textwrap.wrap(prose, 98, break_on_hyphens=False))


def text(report: Report, checks: bool = False, picture: Sequence[str] = ()) -> str:
    """A report as text for a terminal: prose, tables, a picture and the verdict; the list of checks on request."""
    lines = [f"{report.topic}: {report.question}"]
    if report.settings:
        names = {"theta": "base θ"}
        lines.append("  " + ", ".join(f"{names.get(key, key)} {value}" for key, value in report.settings.items()))
    lines += [f"  {line}" for line in report.says]
    for table in report.tables:
        lines += ["", *table_lines(table)]
    if picture:
        lines += ["", *(f"  {line}" for line in picture)]
    failed = [check for check in report.checks if not check.passed]
    if shown := report.checks if checks else failed:
        lines += ["", *check_lines(shown)]
    if report.checks:
        count = len(report.checks) - len(failed)
        lines += ["", f"{'PASS' if report.passed else 'FAIL'}: {count} of {len(report.checks)} checks"]
    return "\n".join(lines) + "\n"


def table_lines(table: Table) -> list[str]:
    """The lines of a table, with its title: the first column is aligned left if it has text, the others right."""
    cells = [list(table.columns), *([show(value) for value in row] for row in table.rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.columns))]
    left = any(isinstance(row[0], str) for row in table.rows)
    return [
        f"  {table.title}",
        *(
            "    "
            + "  ".join(
                cell.ljust(width) if left and column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ),
    ]


def check_lines(checks: Sequence[Check]) -> list[str]:
    """One line per check: PASS or FAIL, the statement, and the two values."""
    relations = {"=": "expected", "<": "below", ">": "above"}
    lines = []
    for check in checks:
        word = "PASS" if check.passed else "FAIL"
        values = "" if isinstance(check.computed, bool) and check.passed else f": {show(check.computed)}"
        if values:
            within = f"within {check.tolerance:.0e} of".replace("e-0", "e-")
            values += f", {within if check.tolerance else relations[check.relation]} {show(check.expected)}"
        lines.append(f"  {word}  {check.what}{values}")
    return lines


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
        "checks": [
            {
                "claim": check.claim,
                "what": check.what,
                "computed": plain(check.computed),
                "relation": check.relation,
                "expected": plain(check.expected),
                "tolerance": check.tolerance,
                "passed": check.passed,
            }
            for check in report.checks
        ],
        **({"passed": report.passed} if report.checks else {}),
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
