"""A report that lists the wrong lines of all common bugs. `clearllama study bugs NAME` shows the effect of one."""

from __future__ import annotations

from ..bugs import BUGS
from ..report import Report, Table
from .base import Topic


def report() -> Report:
    """List the bugs."""
    return Report([Table("common bugs", ("name", "wrong line"), [(bug.name, bug.wrong) for bug in BUGS.values()])])


TOPIC = Topic(report)
