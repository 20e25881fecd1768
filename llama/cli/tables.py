"""Tables and reports of findings, as text for stdout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from . import streams

if TYPE_CHECKING:
    from ..tools.doctor import Finding


def table(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> str:
    """Rows of texts in columns, two spaces apart. right: the indices of columns that are aligned to the right."""
    columns = list(zip(*([streams.one_line(cell) for cell in row] for row in rows), strict=True))
    for i, column in enumerate(columns):
        width = max(map(len, column))
        columns[i] = tuple(cell.rjust(width) if i in right else cell.ljust(width) for cell in column)
    return "".join("  ".join(row).rstrip() + "\n" for row in zip(*columns, strict=True))


def report(
    findings: Iterable[Finding], as_json: bool, keys: dict[str, str], facts: Callable[[], dict[str, Any]]
) -> int:
    """Print each finding as soon as it is known, and a summary; or one JSON object. Returns the exit code.

    keys   attribute of a finding -> its key in the JSON object
    facts  the other entries of the JSON object, of which "ok" is filled in here
    """
    found = []
    for finding in findings:
        found.append(finding)
        if not as_json:
            status = "FAIL" if finding.status == "fail" else finding.status
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            line = f"{status:<5} {finding.group:<9} {finding.item}: {finding.message}{remedy}"
            streams.write(streams.one_line(line) + "\n")
    counts = Counter(finding.status for finding in found)
    if as_json:
        listed = [{key: getattr(finding, name) for name, key in keys.items()} for finding in found]
        streams.write_json({**facts(), "ok": not counts["fail"], "findings": listed})
    else:
        others = ", ".join(f"{counts[status]} {status}" for status in ("ok", "warn", "note") if counts[status])
        streams.write(f"{counts['fail']} FAILED: {others}\n" if counts["fail"] else f"nothing failed: {others}\n")
    return 1 if counts["fail"] else 0
