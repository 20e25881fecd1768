"""--print-completion: a script that completes commands, options and paths in a shell, made by shtab."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")
PATHS = ("PATH", "PATH_OR_NAME", "SRC", "FILE", "NAME|FILE", "ngram|MODEL", "PATH[:SCALE]")  # metavars of paths


class PrintCompletion(argparse.Action):
    """Print the script of a shell and exit, as --version does."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        from . import build_parser, commands_of

        try:
            import shtab
        except ImportError:
            parser.exit(1, "clearllama: error: --print-completion needs shtab: pip install 'clearllama[completion]'\n")
        every = build_parser()
        for command in commands_of(every).values():
            for action in command._actions:
                if action.type is Path or action.metavar in PATHS:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
        sys.stdout.write(shtab.complete(every, values) + "\n")
        parser.exit()
