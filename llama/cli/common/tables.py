"""Format tables and reports of findings for stdout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from . import terminal

if TYPE_CHECKING:
    from ...tools.doctor import Finding


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows of texts in columns, two spaces apart."""
    cells = [[terminal.one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in cells)
    return "".join(line.rstrip() + "\n" for line in lines)


def report(findings: Iterable[Finding], as_json: bool, facts: dict[str, Any]) -> int:
    """Print each finding as soon as it is known, then a summary; or print one JSON object. Returns the exit code.

    facts  the other entries of the JSON object, except "ok"
    """
    found = []
    for finding in findings:
        found.append(finding)
        if not as_json:
            status = "FAIL" if finding.status == "fail" else finding.status
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            line = f"{status:<5} {finding.group:<9} {finding.item}: {finding.message}{remedy}"
            terminal.write(terminal.one_line(line) + "\n")
    counts = Counter(finding.status for finding in found)
    if as_json:
        terminal.write_json({**facts, "ok": not counts["fail"], "findings": [finding._asdict() for finding in found]})
    else:
        shown = ", ".join(
            f"{counts[x]} {x.replace('fail', 'FAILED')}" for x in ("fail", "ok", "warn", "note") if counts[x]
        )
        passed = "no damage found, but not all could be checked" if counts["warn"] else "all checks passed"
        terminal.write(f"{shown}\n" if counts["fail"] else f"{passed}: {shown}\n")
    return 1 if counts["fail"] else 0
