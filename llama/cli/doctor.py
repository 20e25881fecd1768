"""Check this machine and run a self-test.

Show the versions of the dependencies and the C++ kernels, and run a small random model in each way that this machine
runs models. On a GPU, also run batches, drafts and the compiled step, and measure the speed. Each
line is ok, note (it works, but slower or without a feature) or FAIL, with a remedy. No network is used. Exit code 1 if
a check failed.
"""

from __future__ import annotations

import argparse
import getpass
import platform
import re
from pathlib import Path

from .. import __version__
from .common import tables, terminal

OPTIONS = [
    ("--no-self-test", bool, "show versions and kernels only"),
    ("--report", bool, "leave out your names and home folder, for a bug report"),
    ("--json", bool, "write one JSON object: clearllama, ok, findings"),
]
NEEDS_TORCH = False  # it is imported in another process, since that may fail


def run(args: argparse.Namespace) -> int:
    from ..tools.doctor import examine

    if not args.no_self_test:
        terminal.info("checking this machine; the first time, compiling the C++ kernels can take a minute")
    findings = examine(not args.no_self_test)
    if args.report:
        findings = (
            one._replace(item=anonymous(one.item), message=anonymous(one.message), remedy=anonymous(one.remedy))
            for one in findings
        )
    return tables.report(findings, args.json, {"clearllama": __version__})


def anonymous(text: str) -> str:
    """The text without the home folder, the user's name and the host's name."""
    text = text.replace(str(Path.home()), "~")
    for name, word in ((getpass.getuser(), "USER"), (platform.node(), "HOST")):
        text = re.sub(rf"\b{re.escape(name)}\b", word, text) if name else text
    return text
