"""clearllama doctor: what this machine has for the program, and whether the program computes rightly on it."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from ..errors import UsageError
from . import arguments, streams

if TYPE_CHECKING:
    from ..tools.facts import Finding

MOST_SECONDS = 3600


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this machine has, and test that the program computes rightly on it",
        description="Versions against the floors of the package, processor, memory and its limits, devices, C++"
        " kernels, compiler, cache folders; then a self-test on a random model of 0.4 million parameters. Each line"
        " is ok, note (it runs, but slower or without something) or FAIL, with what to do. No network is touched. Exit"
        " code 1 if anything failed.",
        allow_abbrev=False,
    )
    parser.add_argument("--no-self-test", action="store_true", help="say what there is, and compute nothing")
    parser.add_argument(
        "--seconds",
        type=float,
        default=10,
        metavar="S",
        help="for the self-test; what is not done by then is not run (10)",
    )
    parser.add_argument("--json", action="store_true", help="one object: clearllama, ok, findings")
    arguments.add_debug(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import __version__
    from ..tools.doctor import examine

    if not 0 < args.seconds <= MOST_SECONDS:
        raise UsageError(f"--seconds must lie above 0 and not above {MOST_SECONDS}, got {args.seconds:g}")
    findings = []
    for finding in examine(not args.no_self_test, args.seconds):
        findings.append(finding)
        if not args.json:
            streams.write(streams.one_line(_line(finding)) + "\n")
    counts: Counter[str] = Counter(finding.status for finding in findings)
    if args.json:
        found = [finding.as_dict() for finding in findings]
        streams.write_json({"clearllama": __version__, "ok": not counts["fail"], "findings": found})
    else:
        notes = f"{counts['note']} note{'s' * (counts['note'] != 1)}"
        failed = f"{counts['fail']} FAILED" if counts["fail"] else "nothing failed"
        streams.write(f"{failed}: {counts['ok']} ok, {notes}\n")
    return 1 if counts["fail"] else 0


def _line(finding: Finding) -> str:
    status = "FAIL" if finding.status == "fail" else finding.status
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return f"{status:<4}  {finding.group:<9} {finding.item}: {finding.message}{remedy}"
