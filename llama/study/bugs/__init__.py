"""Bugs that people write in position encodings, as exercises: predict, look at the evidence, repair the line.

One file per theme. base.py defines a bug, quiz.py checks a reader's answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module

from ...errors import UsageError
from .base import Bug

# file -> theme, in the order of the exercises
THEMES = {
    "sinusoids": "The table of sinusoids",
    "frequencies": "Frequencies",
    "rotation": "The rotation of queries and keys",
    "attention": "Attention around the rotation",
    "longer": "Longer contexts",
}


class Registry(Mapping[str, Bug]):
    """name -> Bug, by theme. The themes' files are imported on the first access."""

    @cached_property
    def themes(self) -> dict[str, tuple[Bug, ...]]:
        """Theme -> its bugs, in the order of the exercises."""
        return {title: import_module(f".{file}", __name__).BUGS for file, title in THEMES.items()}

    @cached_property
    def _bugs(self) -> dict[str, Bug]:
        return {bug.name: bug for bugs in self.themes.values() for bug in bugs}

    def __getitem__(self, name: str) -> Bug:
        return self._bugs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bugs)

    def __len__(self) -> int:
        return len(self._bugs)


BUGS = Registry()


def number(bug: Bug) -> int:
    """The number of an exercise, from 1."""
    return list(BUGS).index(bug.name) + 1


def theme(bug: Bug) -> str:
    """The theme of an exercise."""
    return next(title for title, bugs in BUGS.themes.items() if bug in bugs)


def find(word: str) -> Bug:
    """Return the bug of this name or number. Raises UsageError if there is none."""
    names = list(BUGS)
    if word.isascii() and word.isdigit() and len(word) < 4 and 1 <= int(word) <= len(names):
        return BUGS[names[int(word) - 1]]
    if word.lower() not in BUGS:
        raise UsageError(f"unknown exercise {word!r:.40}; expected 1 to {len(names)} or a name: {', '.join(names)}")
    return BUGS[word.lower()]
