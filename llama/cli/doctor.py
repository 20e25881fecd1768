"""clearllama doctor: what this machine provides, and a self-test."""

from __future__ import annotations

import argparse

from .. import __version__
from . import arguments, tables

KEYS = {"status": "status", "group": "group", "item": "item", "message": "told", "remedy": "remedy"}


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "doctor",
        description="Show the versions of the dependencies and the C++ kernels, then run a self-test: a small random"
        " model in each way that this machine runs models. Each line is ok, note (it works, but slower or without a"
        " feature) or FAIL, with a remedy. No network is used. Exit code 1 if a check failed.",
    )
    parser.add_argument("--no-self-test", action="store_true", help="show versions and kernels only")
    arguments.add_output_options(parser, json="one JSON object: clearllama, ok, findings")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..tools.doctor import examine

    return tables.report(examine(not args.no_self_test), args.json, KEYS, lambda: {"clearllama": __version__})
