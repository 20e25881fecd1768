"""Print a script that completes commands and options in a shell.

For bash, add this line to ~/.bashrc: eval "$(clearllama completion bash)"
"""

from __future__ import annotations

import argparse
import re

from .. import checks
from ..errors import LlamaError
from .common import terminal

OPTIONS = [("shell SHELL", str, "the shell: bash, zsh, tcsh, fish or powershell")]
NEEDS_TORCH = False


def run(args: argparse.Namespace) -> None:
    try:
        import shtab
    except ImportError:
        raise LlamaError("completion needs shtab: pip install 'clearllama[completion]'") from None
    from . import build_parser

    shell, parser = checks.choice("SHELL", args.shell, shtab.SUPPORTED_SHELLS), build_parser()
    for action in (action for command in parser.commands.values() for action in command._actions):
        if re.search("FILE|PATH|SRC|DST", str(action.metavar)):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    terminal.write(shtab.complete(parser, shell) + "\n")
