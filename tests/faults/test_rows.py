"""The list of faults is complete: every row has a case, and every silent one a defect that proves its case."""

from __future__ import annotations

import re
from pathlib import Path

from .planted import DEFECTS
from .rows import GROUPS, ROWS, SILENT

MARK = re.compile(r'"([A-Z]\d\d)"')  # row("A03"), or an entry of a table of cases


def test_every_row_has_a_case() -> None:
    tests = Path(__file__).parents[1].rglob("test_*.py")
    marked = {row for path in tests for row in MARK.findall(path.read_text())}
    assert marked - set(ROWS) == set()
    assert set(ROWS) - marked == set()
    assert {row[0] for row in ROWS} == set(GROUPS)


def test_every_silent_row_has_a_defect() -> None:
    assert set(ROWS) >= SILENT
    assert SILENT - {defect.row for defect in DEFECTS} == set()
