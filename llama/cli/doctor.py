"""Show the versions of the dependencies and the C++ kernels, then run a self-test.

The self-test is a small random model in each way that this machine runs models. Each line is ok, note (it works, but
slower or without a feature) or FAIL, with a remedy. No network is used. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse

from .. import __version__
from .common import arguments, tables


def add_options(parser: argparse.ArgumentParser) -> None:
    arguments.add(parser, ("--no-self-test", None, "show versions and kernels only"))
    arguments.add_output_options(parser, json="one JSON object: clearllama, ok, findings")


def run(args: argparse.Namespace) -> int:
    from ..tools.doctor import examine

    return tables.report(examine(not args.no_self_test), args.json, {"clearllama": __version__})
