"""Check this machine and run a self-test.

Show the versions of the dependencies and the state of the C++ kernels. Then run a small random model in each dtype and
quantization on the CPU and the best device. On a GPU, also run batches, drafts and the compiled step, and measure the
speed. Each line begins with ok, note (it works, but slower or without a feature) or FAIL; a remedy follows if one is
needed. No network is used. Exit code 1 if a check failed.
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
    ("--report", bool, "anonymize a bug report: leave out the names of user and host, and the home folder"),
    ("--json", bool, "write one JSON object: clearllama, ok, findings"),
]
NEEDS_TORCH = False  # a child process imports torch, since the import may fail


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
