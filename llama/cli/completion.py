"""--print-completion: a script that completes commands, options and paths in a shell, made by shtab."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")
PATHS = (
    "PATH",
    "PATH_OR_NAME",
    "SRC",
    "FILE",
    "NAME|FILE",
    "ngram|MODEL",
    "PATH[:SCALE]",
)  # metavars of arguments that may be paths


class PrintCompletion(argparse.Action):
    """Print the script of a shell and exit, as --version does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.exit(
                1,
                "clearllama: error: --print-completion needs shtab, which is not installed:"
                " pip install 'clearllama[completion]'\n",
            )
        for action in _actions(parser):
            if action.type is Path or action.metavar in PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        sys.stdout.write(shtab.complete(parser, str(values)) + "\n")
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
