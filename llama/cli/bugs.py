"""clearllama study bugs BUG: what a wrong line computes, and the right line."""

from __future__ import annotations

import argparse
import textwrap

from . import streams


def run(args: argparse.Namespace) -> int:
    from ..study import bugs
    from ..study.report import Table, plain, table_lines

    bug = bugs.find(args.bug)
    evidence = bug.evidence()
    table = "\n".join(table_lines(Table("effect", ("", "wrong line", "right line"), evidence)))
    rows = [{"what": what, "wrong": plain(wrong), "right": plain(right)} for what, wrong, right in evidence]
    texts = {key: getattr(bug, key) for key in ("name", "wrong", "question", "right", "why")}
    before = labelled(wrong=bug.wrong, predict=bug.question)
    text = f"{bug.name}\n{before}\n{table}\n\n{labelled(right=bug.right, why=bug.why)}\n"
    streams.show(args, {"bugs": [{**texts, "evidence": rows}]}, text)
    return 0


def labelled(**texts: str) -> str:
    """Texts with their labels, wrapped to 100 columns."""
    lines = (f"  {label:<9}{text}" for label, text in texts.items())
    return "".join(textwrap.fill(line, 100, subsequent_indent=" " * 11) + "\n" for line in lines)
