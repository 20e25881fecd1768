"""clearllama study bugs: list the common bugs, show one with its effect, or ask for a prediction of each."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import streams

if TYPE_CHECKING:
    from ..study.bugs import Bug


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `study` that belong to the topic bugs."""
    parser.add_argument("bug", nargs="?", metavar="BUG", help="with TOPIC bugs: a bug to show")
    parser.add_argument("--quiz", action="store_true", help="with TOPIC bugs: ask for a prediction of each bug first")


def run(args: argparse.Namespace) -> int:
    """Show one bug, or ask for a prediction of each."""
    from ..study import bugs

    chosen = list(bugs.BUGS.values()) if args.bug is None else [bugs.find(args.bug)]
    if args.json:
        if args.quiz:
            raise UsageError("--quiz does not accept --json: leave one of the two out")
        streams.write_json({"bugs": [_facts(bug) for bug in chosen]})
        return 0
    if args.quiz:
        streams.write("Predict the effect of each bug in your own words, then press Enter to see it.\n\n")
    for bug in chosen:
        streams.write(f"{bug.name}\n" + _labelled(wrong=bug.wrong, predict=bug.question))
        if args.quiz:
            try:
                input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return 0
        streams.write(_effect(bug))
    return 0


def _facts(bug: Bug) -> dict[str, Any]:
    """A bug for --json."""
    from ..study.report import plain

    rows = [(what, plain(wrong), plain(right)) for what, wrong, right in bug.evidence()]
    texts = {key: getattr(bug, key) for key in ("name", "wrong", "question", "right", "why")}
    return {**texts, "evidence": [dict(zip(("what", "wrong", "right"), row, strict=True)) for row in rows]}


def _effect(bug: Bug) -> str:
    """What the wrong line computes, and the right line."""
    from ..study.report import Table, table_lines

    table = "\n".join(table_lines(Table("effect", ("", "wrong line", "right line"), bug.evidence())))
    return f"\n{table}\n\n" + _labelled(right=bug.right, why=bug.why) + "\n"


def _labelled(**texts: str) -> str:
    """Texts with their labels, wrapped to 100 columns."""
    lines = (f"  {label:<9}{text}" for label, text in texts.items())
    return "".join(textwrap.fill(line, 100, subsequent_indent=" " * 11) + "\n" for line in lines)
