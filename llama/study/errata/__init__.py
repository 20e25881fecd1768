"""The errata of the five notes: each mistake as a proof that runs, and the lines that look wrong and are right.

base.py says what an erratum is, note000.py to note004.py hold them note by note, quiz.py judges a reader's repair.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from importlib import import_module

from ...errors import UsageError
from .base import Erratum

NOTES = ("note000", "note001", "note002", "note003", "note004")


class Registry(Mapping[str, Erratum]):
    """id -> Erratum, E01 to E55 and then OK1 to OK12. The notes' files are imported when something is asked for."""

    @functools.cached_property
    def _entries(self) -> dict[str, Erratum]:
        found = [erratum for note in NOTES for erratum in import_module(f".{note}", __name__).ERRATA]
        return {erratum.id: erratum for erratum in sorted(found, key=lambda erratum: _place(erratum.id))}

    def __getitem__(self, id: str) -> Erratum:
        return self._entries[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _place(id: str) -> tuple[str, int, str]:
    """E15 before E15b before E16, OK2 before OK10."""
    letters, number, rest = re.fullmatch(r"([A-Z]+)(\d+)(\w*)", id).groups()  # type: ignore[union-attr]
    return letters, int(number), rest


ERRATA = Registry()


def find(id: str) -> Erratum:
    """The erratum of that id, in either case. Raises UsageError on an unknown one."""
    known = {name.lower(): name for name in ERRATA}
    if id.lower() not in known:
        raise UsageError(f"unknown erratum {id!r:.40}; known: E01 to E55, E15b, OK1 to OK12")
    return ERRATA[known[id.lower()]]
