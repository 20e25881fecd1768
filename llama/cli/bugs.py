"""clearllama study bugs: list the exercises, show one with its evidence and repair, or ask them."""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import streams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..study.bugs.base import Bug

WIDTH = 100  # columns of running text
TRIES = 3
REJECTED = 10  # lines that are not expressions, before the quiz moves on
LONGEST_LINE = 4096  # characters of one line; the rest is read as the next line
NAMES = ("bugs", "errata")  # the topic, and its former name

# options that `study bugs` uses; other options of `study` are rejected
OWN = ("command", "topic", "exercise", "quiz", "seed", "checks", "json", "quiet", "debug", "run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `study` that belong to the topic bugs."""
    parser.add_argument(
        "exercise", nargs="?", metavar="EXERCISE", help="with TOPIC bugs: show one exercise, by number or name"
    )
    group = parser.add_argument_group("common bugs (TOPIC bugs)")
    group.add_argument(
        "--quiz",
        nargs="?",
        const="",
        metavar="EXERCISE",
        help="ask you to predict and to repair the bug of EXERCISE, or of all exercises",
    )
    group.add_argument("--seed", type=int, metavar="N", help="with --quiz: shuffle the exercises (default: in order)")
    parse = parser.parse_known_args

    def parse_all(*arguments: Any, **options: Any) -> Any:
        """Accept EXERCISE after an option: argparse of Python 3.11 leaves it in the rest."""
        args, rest = parse(*arguments, **options)
        if args.topic in NAMES and args.exercise is None and len(rest) == 1 and not rest[0].startswith("-"):
            args.exercise = rest.pop()
        return args, rest

    parser.parse_known_args = parse_all  # type: ignore[method-assign]


def refuse_elsewhere(args: argparse.Namespace) -> None:
    """Raise UsageError if arguments of the topic bugs are passed to another topic, or without a topic."""
    own = {"--quiz": args.quiz, "--seed": args.seed, f"{args.exercise!r:.40}": args.exercise}
    for name, value in own.items():
        if value is not None and args.topic not in NAMES:
            raise UsageError(f"{name} belongs to the topic bugs: clearllama study bugs")


def run(args: argparse.Namespace) -> int:
    from ..study import bugs

    for name, value in vars(args).items():
        if name not in OWN and value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"study bugs does not accept {option}; it accepts: EXERCISE, --quiz, --seed, --checks, --json"
            )
    if args.quiz is None and args.seed is not None:
        raise UsageError("--seed needs --quiz: clearllama study bugs --quiz --seed N")
    if args.quiz is not None:
        return _quiz(args)
    return _list(args) if args.exercise is None else _one(args, bugs.find(args.exercise))


# ------------------------------------------------------------------------------------------------ list and exercise
def _list(args: argparse.Namespace) -> int:
    from ..study import bugs, report
    from ..study.topics import find

    if args.checks or args.json:
        checked = find("bugs").report()
        if args.json:
            streams.write_json({"exercises": [_row(bug) for bug in bugs.BUGS.values()], **report.as_dict(checked)})
        else:
            streams.write(report.text(checked, checks=True))
        return 0 if checked.passed else 1
    for theme, entries in bugs.BUGS.themes.items():
        streams.write(f"{theme}\n")
        for bug in entries:
            streams.write(f"  {bugs.number(bug):>2}  {bug.name:<16}  {bug.code}\n")
    streams.info(args, "clearllama study bugs 1 shows the first exercise; --quiz asks them one by one")
    return 0


def _row(bug: Bug) -> dict[str, Any]:
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


def _one(args: argparse.Namespace, bug: Bug) -> int:
    from ..study import bugs, report

    checked = report.Report(bug.name, bug.line, bug.checks())
    if args.json:
        checks = report.as_dict(checked)["checks"]
        streams.write_json({**_row(bug), "checks": checks, "passed": checked.passed})
        return 0 if checked.passed else 1
    number, count = bugs.number(bug), len(bugs.BUGS)
    streams.write(f"bugs {number} of {count}, {bug.name}: {bugs.theme(bug)}\n")
    _write(("line", bug.line), ("predict", bug.predict))
    _write_evidence(bug)
    _write(("find", bug.ask), ("repair", bug.right), ("why", bug.why))
    if args.checks:
        streams.write("\n" + "".join(f"{line}\n" for line in report.check_lines(checked.checks)))
    if not checked.passed:
        streams.write("FAIL\n")
    more = f"clearllama study bugs {number + 1} shows the next exercise; " if number < count else ""
    streams.info(args, f"{more}clearllama study bugs --quiz {bug.name} asks for the repair")
    return 0 if checked.passed else 1


def _write(*parts: tuple[str, str]) -> None:
    """Write labelled texts."""
    for label, text in parts:
        for line in textwrap.wrap(text, WIDTH - 2, initial_indent=f"{label:<9}", subsequent_indent=" " * 9):
            streams.write(f"  {line}\n")


def _write_evidence(bug: Bug) -> None:
    from ..study.report import Table, table_lines

    table = Table("evidence", ("", "this line", "right"), bug.evidence())
    streams.write("\n" + "".join(f"{line}\n" for line in table_lines(table)) + "\n")


# ------------------------------------------------------------------------------------------------------------ quiz
def _quiz(args: argparse.Namespace) -> int:
    from ..study.bugs import theme
    from ..study.bugs.quiz import SPELLING

    if args.json or args.checks:
        option = "--json" if args.json else "--checks"
        raise UsageError(f"--quiz is interactive and does not accept {option}; leave one of the two out")
    if sys.stdin is None:
        raise UsageError("standard input is closed; the quiz reads its answers from standard input")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # invalid bytes become text that is not an expression
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    questions = _questions(args)
    streams.write(
        "Each exercise has two steps. First, predict the effect of the bug in your own words; this is not scored.\n"
    )
    streams.write(f"Then type the correct expression; it may contain {SPELLING}.\n")
    streams.write("An empty line skips a step; the end of the input ends the quiz.\n")
    right = done = 0
    for number, bug in enumerate(questions, 1):
        streams.write(f"\n{number} of {len(questions)}, {bug.name}: {theme(bug)}\n")
        verdict = _ask(bug, args.seed or 0)
        if verdict is None:
            break
        done, right = done + 1, right + verdict
    streams.write(f"\nscore: {right} of {done}{'' if done == len(questions) else f', {len(questions) - done} left'}\n")
    return 0


def _questions(args: argparse.Namespace) -> Sequence[Bug]:
    """The exercises of the quiz, in the order of the questions."""
    import numpy as np

    from ..study.bugs import BUGS, find

    if args.seed is not None and args.seed < 0:
        raise UsageError(f"--seed must be 0 or more, got {args.seed}")
    word = args.quiz or args.exercise
    if word is not None:
        bug = find(word)
        if args.quiz and args.exercise and find(args.exercise) != bug:
            raise UsageError(
                f"expected one exercise, found two: {args.exercise} and {args.quiz}; name one, or none for all"
            )
        return [bug]
    every = list(BUGS.values())
    order = range(len(every)) if args.seed is None else np.random.default_rng(args.seed).permutation(len(every))
    return [every[i] for i in order]


def _ask(bug: Bug, seed: int) -> bool | None:
    """Ask one exercise: True if repaired, False if the repair was shown, None at the end of the input."""
    from ..study.bugs.quiz import judge

    _write(("line", bug.line), ("predict", bug.predict))
    if _read() is None:
        return None
    _write_evidence(bug)
    _write(("repair", f"write {bug.ask}"))
    _write(("names", "; ".join(f"{name}: {number.meaning}" for name, number in bug.names.items())))
    tries = rejected = 0
    while tries < TRIES and rejected < REJECTED:
        line = _read()
        if line is None:
            return None
        if not line.strip():
            break
        try:
            verdict = judge(bug, line, seed)
        except UsageError as error:  # not an expression: this does not count as a try
            rejected += 1
            streams.write(f"  rejected: {streams.one_line(str(error))}\n")
            continue
        if verdict.right:
            _write(("right", bug.why))
            return True
        tries += 1
        at = ", ".join(f"{name} = {value:.6g}" for name, value in verdict.values.items())
        streams.write(
            f"  no ({tries} of {TRIES}): at {at} this is {verdict.computed:.9g}, not {verdict.expected:.9g}\n"
        )
    _write(("answer", bug.right), ("why", bug.why))
    return False


def _read() -> str | None:
    """Read the next line; None at the end of the input."""
    try:
        if sys.stdin.isatty():
            return input("> ")
        return sys.stdin.readline(LONGEST_LINE) or None
    except EOFError:
        streams.write("\n")
        return None
