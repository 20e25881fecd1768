"""The exercises as one report: every right line against its truth. `clearllama study bugs NAME` shows one."""

from __future__ import annotations

from dataclasses import replace

from ..bugs import BUGS
from ..report import Report, Table
from . import TOPICS
from .base import Topic


def report() -> Report:
    """Check the lines and the evidence of every exercise."""
    return Report(
        "bugs",
        TOPICS["bugs"],
        tables=tuple(
            Table(theme, ("name", "wrong line"), [(bug.name, bug.code) for bug in bugs])
            for theme, bugs in BUGS.themes.items()
        ),
        checks=tuple(
            replace(check, what=f"{bug.name}: {check.what}") for bug in BUGS.values() for check in bug.checks()
        ),
    )


TOPIC = Topic(report)
