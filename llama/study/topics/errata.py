"""The errata of the notes as one report: a line and a verdict each. `clearllama study errata` shows more of them."""

from __future__ import annotations

from ..errata import ERRATA
from ..errata.base import KINDS, passes
from ..report import Report, Table, holds
from .base import Topic


def report() -> Report:
    """Every proof, run."""
    kinds = [erratum.kind for erratum in ERRATA.values()]
    return Report(
        "errata",
        "which sentences of the notes are wrong, and how does one see it?",
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
