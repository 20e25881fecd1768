"""The errata of the notes as one report, one line and verdict each; `clearllama study errata` shows the details."""

from __future__ import annotations

from ..errata import ERRATA
from ..errata.base import KINDS, passes
from ..report import Report, Table, holds
from . import TOPICS
from .base import Topic


def report() -> Report:
    """Run every proof."""
    kinds = [erratum.kind for erratum in ERRATA.values()]
    return Report(
        "errata",
        TOPICS["errata"],
        tables=(
            Table(
                "classes",
                ("class", "meaning", "entries"),
                tuple((kind, meaning, kinds.count(kind)) for kind, meaning in KINDS.items()),
            ),
        ),
        checks=tuple(
            holds(id, f"{erratum.kind}: {erratum.matter}", passes(erratum.proof())) for id, erratum in ERRATA.items()
        ),
    )


TOPIC = Topic(report)
