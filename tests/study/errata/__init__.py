"""The errata of the five notes: a proof for each mistake, and for each line that looks wrong but is right.

base.py defines an erratum, note000.py to note004.py contain the entries of each note. docs/evidence/claims.md lists
them.
"""

from __future__ import annotations

import re
from importlib import import_module

from .base import Erratum

NOTES = ("note000", "note001", "note002", "note003", "note004")


def _order(id: str) -> tuple[str, int, str]:
    """Sort key: E15 before E15b before E16, OK2 before OK10."""
    letters, number, rest = re.fullmatch(r"([A-Z]+)(\d+)(\w*)", id).groups()  # type: ignore[union-attr]
    return letters, int(number), rest


_FOUND: list[Erratum] = [erratum for note in NOTES for erratum in import_module(f".{note}", __name__).ERRATA]
ERRATA = {erratum.id: erratum for erratum in sorted(_FOUND, key=lambda erratum: _order(erratum.id))}
