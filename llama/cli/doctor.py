"""clearllama doctor: what this machine provides, and a self-test."""

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
        help="check this machine and run a self-test",
        description="Check versions, processor, memory limits, devices, C++ kernels, compiler and cache folders, then"
        " run a self-test on a random model of 0.4 million parameters. Each line is ok, note (it works, but slower or"
        " without a feature) or FAIL, with a remedy. No network is used. Exit code 1 if a check failed.",
        allow_abbrev=False,
    )
    parser.add_argument("--no-self-test", action="store_true", help="check the machine only")
    parser.add_argument(
        "--seconds",
        type=float,
        default=10,
        metavar="S",
        help="time limit of the self-test in seconds; tests that would exceed it are skipped (default: 10)",
    )
    arguments.add_output_options(parser, json="one JSON object: clearllama, ok, findings")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import __version__
    from ..tools.doctor import examine

    if not 0 < args.seconds <= MOST_SECONDS:
        raise UsageError(f"--seconds must be above 0 and at most {MOST_SECONDS}, got {args.seconds:g}")
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
