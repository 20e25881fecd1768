"""clearllama study errata: the list, one erratum with its proof, and the quiz."""

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
REFUSALS = 10  # lines that are no expression, before the quiz goes on by itself
LONGEST_LINE = 4096  # characters read at once from a pipe

# what `study errata` looks at; any other option of `study` is refused
OWN = ("command", "topic", "erratum", "quiz", "seed", "json", "quiet", "debug", "run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `study` that belong to the topic errata."""
    parser.add_argument("erratum", nargs="?", metavar="ERRATUM", help="on the topic errata: one of them, such as E33")
    group = parser.add_argument_group("mistakes in the notes (TOPIC errata)")
    group.add_argument(
        "--quiz", nargs="?", const="", metavar="ERRATUM", help="mend the broken lines, all of them or one"
    )
    group.add_argument("--seed", type=int, metavar="N", help="with --quiz: shuffle the lines (default: in order)")
    parse = parser.parse_known_args

    def parse_all(*given: Any, **options: Any) -> Any:
        """argparse of Python 3.11 leaves over a second optional word that stands behind an option."""
        args, rest = parse(*given, **options)
        if args.topic == "errata" and args.erratum is None and len(rest) == 1 and not rest[0].startswith("-"):
            args.erratum = rest.pop()
        return args, rest

    parser.parse_known_args = parse_all  # type: ignore[method-assign]


def refuse_elsewhere(args: argparse.Namespace) -> None:
    """Raise UsageError where arguments of errata are given to another topic, or to none."""
    given = {"--quiz": args.quiz, "--seed": args.seed, f"{args.erratum!r:.40}": args.erratum}
    for name, value in given.items():
        if value is not None and args.topic != "errata":
            raise UsageError(f"{name} belongs to the topic errata: clearllama study errata")


def run(args: argparse.Namespace) -> int:
    from ..study import errata

    for name, value in vars(args).items():
        if name not in OWN and value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"study errata does not take {option}; it takes: ERRATUM, --quiz, --seed, --json")
    if args.quiz is None and args.seed is not None:
        raise UsageError("--seed shuffles the lines of the quiz: clearllama study errata --quiz --seed N")
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
        streams.say(args, "clearllama study errata E33 shows one; --quiz is an exercise")
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
    says = [line for label, text in parts.items() for line in _labelled(label, text)]
    report = reports.Report(erratum.id, erratum.matter, erratum.proof(), says=says)
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
            streams.say(args, f"clearllama study errata --quiz {erratum.id} asks for the right form")
    return 0 if report.passed else 1


def _labelled(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 2, initial_indent=f"{label:<9}", subsequent_indent=" " * 9)


# ------------------------------------------------------------------------------------------------------------ quiz
def _quiz(args: argparse.Namespace) -> int:
    from ..study.errata.quiz import SPELLING

    if args.json:
        raise UsageError("the quiz is a conversation; --json is for the list and for one erratum")
    if sys.stdin is None:
        raise UsageError("standard input is closed, and the quiz reads its answers from it")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text are no expression either
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    questions = _questions(args)
    streams.write(f"Mend the line. An answer may hold {SPELLING}.\n")
    streams.write("An empty line shows the answer, the end of the input ends the quiz.\n")
    right = done = 0
    for place, erratum in enumerate(questions, 1):
        streams.write(f"\n{erratum.id} ({place} of {len(questions)}): {erratum.where}\n")
        verdict = _ask(erratum, args.seed or 0)
        if verdict is None:
            break
        done, right = done + 1, right + verdict
    streams.write(f"\nscore: {right} of {done}{'' if done == len(questions) else f', {len(questions) - done} left'}\n")
    return 0


def _questions(args: argparse.Namespace) -> Sequence[Erratum]:
    """The errata that are asked, in their order."""
    import numpy as np

    from ..study.errata import ERRATA, find

    if args.seed is not None and args.seed < 0:
        raise UsageError(f"--seed must be 0 or more, got {args.seed}")
    wanted = args.quiz or args.erratum
    if wanted is not None:
        erratum = find(wanted)
        if args.quiz and args.erratum and find(args.erratum) != erratum:
            raise UsageError(f"two errata are named, {args.erratum} and {args.quiz}; the quiz takes one or all")
        if erratum.quiz is None:
            having = ", ".join(id for id, one in ERRATA.items() if one.quiz is not None)
            raise UsageError(f"{erratum.id} cannot be mended with one expression; these can: {having}")
        return [erratum]
    every = [erratum for erratum in ERRATA.values() if erratum.quiz is not None]
    order = range(len(every)) if args.seed is None else np.random.default_rng(args.seed).permutation(len(every))
    return [every[i] for i in order]


def _ask(erratum: Erratum, seed: int) -> bool | None:
    """One line: True if it was mended, False if the answer had to be shown, None at the end of the input."""
    from ..study.errata.quiz import judge

    quiz = erratum.quiz
    if quiz is None:
        return False
    names = "; ".join(f"{name}: {number.meaning}" for name, number in quiz.names.items())
    for label, text in (("printed", quiz.line), ("wanted", quiz.ask), ("names", names)):
        streams.write("".join(f"  {line}\n" for line in _labelled(label, text)))
    tries = refusals = 0
    while tries < TRIES and refusals < REFUSALS:
        line = _read()
        if line is None:
            return None
        if not line.strip():
            break
        try:
            verdict = judge(quiz, line, seed)
        except UsageError as error:  # no expression: this costs no try
            refusals += 1
            streams.write(f"  refused: {streams.one_line(str(error))}\n")
            continue
        if verdict.right:
            streams.write("".join(f"  {text}\n" for text in _labelled("right", erratum.why)))
            return True
        tries += 1
        at = ", ".join(f"{name} = {value:.6g}" for name, value in verdict.values.items())
        streams.write(f"  no ({tries} of {TRIES}): at {at} that is {verdict.given:.9g}, not {verdict.expected:.9g}\n")
    for label, text in (("answer", quiz.answer), ("why", erratum.why)):
        streams.write("".join(f"  {text}\n" for text in _labelled(label, text)))
    return False


def _read() -> str | None:
    """The next line; None at the end of the input."""
    try:
        if sys.stdin.isatty():
            return input("> ")
        return sys.stdin.readline(LONGEST_LINE) or None
    except EOFError:
        streams.write("\n")
        return None
