"""Check this machine and run a self-test.

Show the versions of the dependencies and the C++ kernels, and run a small random model in each way that this machine
runs models. Each line is ok, note (it works, but slower or without a feature) or FAIL, with a remedy. No network is
used. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse

from .. import __version__
from .common import tables

OPTIONS = [
    ("--no-self-test", bool, "show versions and kernels only"),
    ("--json", bool, "write one JSON object: clearllama, ok, findings"),
]
NEEDS_TORCH = False  # it is imported in another process, since that may fail


def run(args: argparse.Namespace) -> int:
    from ..tools.doctor import examine

    return tables.report(examine(not args.no_self_test), args.json, {"clearllama": __version__})
