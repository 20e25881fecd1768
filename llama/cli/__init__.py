"""The command `clearllama`: one file a subcommand. torch is imported only after the arguments are parsed."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from .. import __version__
from ..errors import LlamaError
from . import bench, chat, generate, inspect, pull

COMMANDS = (generate, chat, inspect, pull, bench)


class Parser(argparse.ArgumentParser):
    """argparse, with usage errors on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {_one_line(message)} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; importing torch is left to the subcommands."""
    parser = Parser(
        prog="clearllama",
        description="Run, inspect and study LLaMA models.",
        epilog="'clearllama COMMAND --help' shows the options of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"clearllama {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 failure, 2 usage, 130 Ctrl-C, 141 closed pipe, 143 SIGTERM."""
    if sys.stdout is None:
        print("clearllama: error: standard output is closed; redirect it to a file or a terminal", file=sys.stderr)
        return 1
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that can't show a character gets \uXXXX, not a traceback
            stream.reconfigure(errors="backslashreplace")
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\nclearllama: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        _drop_stdout()
        return 141
    except Exception as error:
        if args.debug:
            raise
        message = describe(error)
        if isinstance(error, OSError):
            _drop_stdout()
        print(f"clearllama: error: {message}", file=sys.stderr)
        return error.exit_code if isinstance(error, LlamaError) else 1


def describe(error: BaseException) -> str:
    """An error as one printable line."""
    if isinstance(error, LlamaError):
        return _one_line(str(error))
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error):
        return f"out of memory ({_one_line(str(error))[:200]}); use a smaller model, dtype or --max-seq-len"
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    return f"unexpected {type(error).__name__}: {_one_line(str(error))[:300]}; --debug shows where"


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " if c in "\r\n\t" else repr(c)[1:-1] for c in text)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(143)  # an exception, so that temporary files are cleared on the way out


def _drop_stdout() -> None:
    """Point stdout at nothing, or Python would complain about the same failure again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
