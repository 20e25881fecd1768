"""docs/evidence/reliability.md: its texts are those of scripts/reliability.py, rows.py and planted.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..faults.planted import DEFECTS
from ..faults.rows import ROWS
from . import reliability

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "reliability.md"


def test_the_page_has_the_present_texts() -> None:
    """If this fails after a change of a text: python scripts/reliability.py --keep"""
    text = PAGE.read_text()
    assert reliability.page(*reliability.results(text)) == text
    for defect in DEFECTS:
        assert f"| {defect.row} | {ROWS[defect.row]} | {defect.what} | " in text


def test_results_are_read_back_from_a_page() -> None:
    found = {"A01": reliability.Tally(3, 1234, 2, 1, ["test_a"]), "B02": reliability.Tally(7, 7, 5, 0, [*"vwxyz"])}
    caught = {reliability.label(DEFECTS[0]): "yes", reliability.label(DEFECTS[1]): "**no**"}
    text = reliability.page(found, caught, "2000-01-01 with Python 3")
    assert "| A Meta's .pth checkpoints | 27 | 3 | 1,234 | 2 | 1 | 0 |" in text
    assert "| 7 | 7 | 5 | 0 | 2 |" in text
    assert reliability.page(*reliability.results(text)) == text


@pytest.mark.parametrize("old", ["an empty file", "must not change the folder", "tensors may overlap"])
def test_a_stale_text_is_found(old: str) -> None:
    stale = PAGE.read_text().replace(old, "something else")
    assert stale != reliability.page(*reliability.results(stale))
