"""clearllama study errata: list all errata, show one with its proof, or run the quiz."""

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

    from ..study.errata.base import Erratum

WIDTH = 100  # columns of running text
TRIES = 3
REJECTED = 10  # lines that are not expressions, before the quiz moves on
LONGEST_LINE = 4096  # characters of one line; the rest is read as the next line

# options that `study errata` uses; other options of `study` are rejected
OWN = ("command", "topic", "erratum", "quiz", "seed", "json", "quiet", "debug", "run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `study` that belong to the topic errata."""
    parser.add_argument("erratum", nargs="?", metavar="ERRATUM", help="with TOPIC errata: show one entry, such as E33")
    group = parser.add_argument_group("mistakes in the notes (TOPIC errata)")
    group.add_argument(
        "--quiz", nargs="?", const="", metavar="ERRATUM", help="correct the wrong lines, all of them or one"
    )
    group.add_argument("--seed", type=int, metavar="N", help="with --quiz: shuffle the lines (default: in order)")
    parse = parser.parse_known_args

    def parse_all(*arguments: Any, **options: Any) -> Any:
        """Accept ERRATUM after an option: argparse of Python 3.11 leaves it in the rest."""
        args, rest = parse(*arguments, **options)
        if args.topic == "errata" and args.erratum is None and len(rest) == 1 and not rest[0].startswith("-"):
            args.erratum = rest.pop()
        return args, rest

    parser.parse_known_args = parse_all  # type: ignore[method-assign]


def refuse_elsewhere(args: argparse.Namespace) -> None:
    """Raise UsageError if arguments of the topic errata are passed to another topic, or without a topic."""
    own = {"--quiz": args.quiz, "--seed": args.seed, f"{args.erratum!r:.40}": args.erratum}
    for name, value in own.items():
        if value is not None and args.topic != "errata":
            raise UsageError(f"{name} belongs to the topic errata: clearllama study errata")


def run(args: argparse.Namespace) -> int:
    from ..study import errata

    for name, value in vars(args).items():
        if name not in OWN and value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"study errata does not accept {option}; it accepts: ERRATUM, --quiz, --seed, --json")
    if args.quiz is None and args.seed is not None:
        raise UsageError("--seed needs --quiz: clearllama study errata --quiz --seed N")
    if args.quiz is not None:
        return _quiz(args)
    return _list(args) if args.erratum is None else _one(args, errata.find(args.erratum))


# ------------------------------------------------------------------------------------------------- list and screen
def _list(args: argparse.Namespace) -> int:
    from ..study.errata import ERRATA
    from ..study.errata.base import KINDS, passes

    if not args.json:
        streams.write("class " + "; ".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items()) + "\n")
    rows: list[dict[str, Any]] = []
    for erratum in ERRATA.values():
        checks = erratum.proof()
        passed = passes(checks)
        rows.append(
            {
                "id": erratum.id,
                "class": erratum.kind,
                "where": erratum.where,
                "matter": erratum.matter,
                "checks": len(checks),
                "quiz": erratum.quiz is not None,
                "passed": passed,
            }
        )
        if not args.json:
            word = "PASS" if passed else "FAIL"
            streams.write(f"{word}  {erratum.id:<4}  {erratum.kind:<2}  {erratum.matter}\n")
    count = sum(row["passed"] for row in rows)
    if args.json:
        streams.write_json({"errata": rows, "passed": count == len(rows)})
    else:
        streams.write(f"{'PASS' if count == len(rows) else 'FAIL'}: {count} of {len(rows)}\n")
        streams.info(args, "clearllama study errata E33 shows one entry; --quiz starts an exercise")
    return 0 if count == len(rows) else 1


def _one(args: argparse.Namespace, erratum: Erratum) -> int:
    from ..study import report as reports
    from ..study.errata.base import KINDS

    parts = {
        "where": erratum.where,
        "class": f"{erratum.kind}, {KINDS[erratum.kind]}",
        "printed": erratum.printed,
        "right": erratum.right,
        "why": erratum.why,
    }
    lines = [line for label, text in parts.items() for line in _labelled(label, text)]
    report = reports.Report(erratum.id, erratum.matter, erratum.proof(), says=lines)
    if args.json:
        streams.write_json(
            {
                "id": erratum.id,
                **parts,
                "class": erratum.kind,
                "matter": erratum.matter,
                "checks": reports.as_dict(report)["checks"],
                "passed": report.passed,
            }
        )
    else:
        streams.write(reports.text(report))
        if erratum.quiz is not None:
            streams.info(args, f"clearllama study errata --quiz {erratum.id} asks for the right form")
    return 0 if report.passed else 1


def _labelled(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 2, initial_indent=f"{label:<9}", subsequent_indent=" " * 9)


# ------------------------------------------------------------------------------------------------------------ quiz
def _quiz(args: argparse.Namespace) -> int:
    from ..study.errata.quiz import SPELLING

    if args.json:
        raise UsageError("--quiz is interactive and has no JSON output; --json is for the list and for one erratum")
    if sys.stdin is None:
        raise UsageError("standard input is closed; the quiz reads its answers from standard input")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # invalid bytes become text that is not an expression
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    questions = _questions(args)
    streams.write(f"Correct the line. An answer may contain {SPELLING}.\n")
    streams.write("An empty line shows the answer; the end of the input ends the quiz.\n")
    right = done = 0
    for number, erratum in enumerate(questions, 1):
        streams.write(f"\n{erratum.id} ({number} of {len(questions)}): {erratum.where}\n")
        verdict = _ask(erratum, args.seed or 0)
        if verdict is None:
            break
        done, right = done + 1, right + verdict
    streams.write(f"\nscore: {right} of {done}{'' if done == len(questions) else f', {len(questions) - done} left'}\n")
    return 0


def _questions(args: argparse.Namespace) -> Sequence[Erratum]:
    """The errata of the quiz, in the order of the questions."""
    import numpy as np

    from ..study.errata import ERRATA, find

    if args.seed is not None and args.seed < 0:
        raise UsageError(f"--seed must be 0 or more, got {args.seed}")
    id = args.quiz or args.erratum
    if id is not None:
        erratum = find(id)
        if args.quiz and args.erratum and find(args.erratum) != erratum:
            raise UsageError(
                f"expected one erratum, found two: {args.erratum} and {args.quiz}; name one, or none for all"
            )
        if erratum.quiz is None:
            with_quiz = ", ".join(name for name, entry in ERRATA.items() if entry.quiz is not None)
            raise UsageError(
                f"{erratum.id} has no quiz, its answer is not one expression; entries with one: {with_quiz}"
            )
        return [erratum]
    every = [erratum for erratum in ERRATA.values() if erratum.quiz is not None]
    order = range(len(every)) if args.seed is None else np.random.default_rng(args.seed).permutation(len(every))
    return [every[i] for i in order]


def _ask(erratum: Erratum, seed: int) -> bool | None:
    """Ask one question: True if answered right, False if the answer was shown, None at the end of the input."""
    from ..study.errata.quiz import judge

    quiz = erratum.quiz
    if quiz is None:
        return False
    names = "; ".join(f"{name}: {number.meaning}" for name, number in quiz.names.items())
    for label, text in (("printed", quiz.line), ("find", quiz.ask), ("names", names)):
        streams.write("".join(f"  {line}\n" for line in _labelled(label, text)))
    tries = rejected = 0
    while tries < TRIES and rejected < REJECTED:
        line = _read()
        if line is None:
            return None
        if not line.strip():
            break
        try:
            verdict = judge(quiz, line, seed)
        except UsageError as error:  # not an expression: this does not count as a try
            rejected += 1
            streams.write(f"  rejected: {streams.one_line(str(error))}\n")
            continue
        if verdict.right:
            streams.write("".join(f"  {text}\n" for text in _labelled("right", erratum.why)))
            return True
        tries += 1
        at = ", ".join(f"{name} = {value:.6g}" for name, value in verdict.values.items())
        streams.write(
            f"  no ({tries} of {TRIES}): at {at} this is {verdict.computed:.9g}, not {verdict.expected:.9g}\n"
        )
    for label, text in (("answer", quiz.answer), ("why", erratum.why)):
        streams.write("".join(f"  {text}\n" for text in _labelled(label, text)))
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
