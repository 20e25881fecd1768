"""clearllama study bugs: list the exercises, show one with its evidence and repair, or ask you to predict the bugs."""

from __future__ import annotations

import argparse
import random
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import streams, tables

if TYPE_CHECKING:
    from ..study.bugs.base import Bug
    from ..study.topics.base import Topic

NAMES = ("bugs", "errata")  # the topic, and its former name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `study` that belong to the topic bugs."""
    parser.add_argument("exercise", nargs="?", metavar="EXERCISE", help="with TOPIC bugs: an exercise to show")
    group = parser.add_argument_group("common bugs (TOPIC bugs)")
    group.add_argument("--quiz", action="store_true", help="ask for a prediction of each bug before it is shown")
    group.add_argument("--seed", type=int, metavar="N", help="with --quiz: shuffle the exercises (default: in order)")


def run(args: argparse.Namespace, topic: Topic) -> int:
    from ..study import bugs, report

    if args.seed is not None and not args.quiz:
        raise UsageError("--seed needs --quiz")
    chosen = list(bugs.BUGS.values()) if args.exercise is None else [bugs.find(args.exercise)]
    if args.quiz:
        return quiz(args, chosen)
    if args.exercise is not None:
        return show(args, chosen[0])
    if args.checks or args.json:
        checked = topic.report()
        if args.json:
            streams.write_json({"exercises": [facts(bug) for bug in chosen], **report.as_dict(checked)})
        else:
            streams.write(report.text(checked, checks=True))
        return 0 if checked.passed else 1
    for theme, entries in bugs.BUGS.themes.items():
        rows = [("", str(bugs.number(bug)), bug.name, bug.code) for bug in entries]
        streams.write(f"{theme}\n{tables.table(rows, right=[1])}")
    streams.info(args, "clearllama study bugs 1 shows the first exercise; --quiz asks them one by one")
    return 0


def facts(bug: Bug) -> dict[str, Any]:
    """An exercise for --json."""
    from ..study import bugs
    from ..study.report import plain

    return {
        "number": bugs.number(bug),
        "name": bug.name,
        "theme": bugs.theme(bug),
        "line": bug.line,
        "predict": bug.predict,
        "ask": bug.ask,
        "names": {name: number.meaning for name, number in bug.names.items()},
        "evidence": [
            {"what": what, "line": plain(wrong), "right": plain(right)} for what, wrong, right in bug.evidence()
        ],
        "repair": bug.right,
        "why": bug.why,
    }


def show(args: argparse.Namespace, bug: Bug) -> int:
    """Show one exercise with its evidence and repair."""
    from ..study import report

    checked = report.Report(bug.name, bug.line, bug.checks())
    if args.json:
        streams.write_json({**facts(bug), **{key: report.as_dict(checked)[key] for key in ("checks", "passed")}})
    else:
        streams.write(question(bug) + answer(bug))
        if args.checks or not checked.passed:
            streams.write("\n" + "".join(f"{line}\n" for line in report.check_lines(checked.checks)))
        streams.info(args, f"clearllama study bugs {bug.name} --quiz asks for a prediction first")
    return 0 if checked.passed else 1


def quiz(args: argparse.Namespace, chosen: list[Bug]) -> int:
    """Ask for a prediction of each bug, then show its evidence and repair."""
    if args.json or args.checks:
        raise UsageError(f"--quiz does not accept {'--json' if args.json else '--checks'}: leave one of the two out")
    if args.seed is not None:
        random.Random(args.seed).shuffle(chosen)
    streams.write("Predict the effect of each bug in your own words, then press Enter to see it.\n\n")
    for bug in chosen:
        streams.write(question(bug))
        try:
            input("> " if sys.stdin.isatty() else "")
        except EOFError:
            break
        streams.write(answer(bug) + "\n")
    return 0


def question(bug: Bug) -> str:
    """The line with the bug, and what to predict."""
    from ..study import bugs

    title = f"bugs {bugs.number(bug)} of {len(bugs.BUGS)}, {bug.name}: {bugs.theme(bug)}\n"
    return title + labelled(line=bug.line, predict=bug.predict)


def answer(bug: Bug) -> str:
    """What the line computes, and its repair."""
    from ..study.report import Table, table_lines

    table = "\n".join(table_lines(Table("evidence", ("", "this line", "right"), bug.evidence())))
    return f"\n{table}\n\n" + labelled(find=bug.ask, repair=bug.right, why=bug.why)


def labelled(**texts: str) -> str:
    """Texts with their labels, wrapped to 100 columns."""
    lines = (f"  {label:<9}{text}" for label, text in texts.items())
    return "".join(textwrap.fill(line, 100, subsequent_indent=" " * 11) + "\n" for line in lines)
