"""The errata of the five notes: a proof for each mistake, and for each line that looks wrong but is right.

base.py defines an erratum, note000.py to note004.py contain the entries of each note, quiz.py checks a reader's answer.
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
    """id -> Erratum, E01 to E55 and then OK1 to OK12. The notes' files are imported on the first access."""

    @functools.cached_property
    def _entries(self) -> dict[str, Erratum]:
        found = [erratum for note in NOTES for erratum in import_module(f".{note}", __name__).ERRATA]
        return {erratum.id: erratum for erratum in sorted(found, key=lambda erratum: _order(erratum.id))}

    def __getitem__(self, id: str) -> Erratum:
        return self._entries[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _order(id: str) -> tuple[str, int, str]:
    """Sort key: E15 before E15b before E16, OK2 before OK10."""
    letters, number, rest = re.fullmatch(r"([A-Z]+)(\d+)(\w*)", id).groups()  # type: ignore[union-attr]
    return letters, int(number), rest


ERRATA = Registry()


def find(id: str) -> Erratum:
    """Return the erratum with this id, upper or lower case. Raises UsageError if there is none."""
    known = {name.lower(): name for name in ERRATA}
    if id.lower() not in known:
        raise UsageError(f"unknown erratum {id!r:.40}; known: E01 to E55, E15b, OK1 to OK12")
    return ERRATA[known[id.lower()]]
