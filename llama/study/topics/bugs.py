"""The common bugs as one report: their wrong lines. `clearllama study bugs NAME` shows the effect of one."""

from __future__ import annotations

from ..bugs import BUGS
from ..report import Report, Table
from .base import Topic


def report() -> Report:
    """List the bugs."""
    return Report([Table("common bugs", ("name", "wrong line"), [(bug.name, bug.wrong) for bug in BUGS.values()])])


TOPIC = Topic(report)
