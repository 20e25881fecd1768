"""The list of faults is complete: every row has a case, and every silent row a planted defect."""

from __future__ import annotations

import re
from pathlib import Path

from .planted import DEFECTS
from .rows import GROUPS, ROWS, SILENT

MARK = re.compile(r'"([A-Z]\d\d)"')  # row("A03"), or an entry in a table of cases


def test_every_row_has_a_case() -> None:
    tests = Path(__file__).parents[1].glob("**/test_*.py")
    named = {row for path in tests for row in MARK.findall(path.read_text())}
    assert set(ROWS) - named == set()
    assert {row[0] for row in ROWS} == set(GROUPS)


def test_every_silent_row_has_a_defect() -> None:
    assert set(ROWS) >= SILENT
    assert SILENT - {defect.row for defect in DEFECTS} == set()


def test_every_defect_matches_its_file_exactly_once() -> None:
    root = Path(__file__).parents[2]
    for defect in DEFECTS:
        assert (root / defect.file).read_text().count(defect.old) == 1, f"{defect.row} {defect.what}"
        assert defect.row in ROWS
