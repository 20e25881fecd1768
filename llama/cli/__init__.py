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
from ..system.limits import check_import
from . import (
    bench,
    chat,
    convert,
    doctor,
    explain,
    generate,
    inspect,
    perplexity,
    plan,
    pull,
    quantize,
    ranks,
    streams,
    study,
    trace,
    verify,
)
from .streams import describe, one_line, tell

COMMANDS = (
    generate,
    chat,
    inspect,
    plan,
    convert,
    quantize,
    pull,
    verify,
    doctor,
    bench,
    perplexity,
    study,
    trace,
    explain,
)

ENDING = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}


PROMPTED = ("generate", "trace")  # what takes a prompt on the command line


class Parser(argparse.ArgumentParser):
    """argparse, with usage errors on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {one_line(message)} (see {self.prog} --help)\n")


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
    """Run one command; returns the exit code: 0, 1 failure, 2 usage, 129, 130, 143 signals, 141 closed pipe."""
    if sys.stderr is None:  # print() would turn to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (for the life of the process)
    if sys.stdout is None:
        print("clearllama: error: standard output is closed; redirect it to a file or a terminal", file=sys.stderr)
        return 1
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that can't show a character gets \uXXXX, not a traceback
            stream.reconfigure(errors="backslashreplace")
    if os.environ.get("TERM") == "dumb":
        os.environ.setdefault("TQDM_DISABLE", "1")  # it can't go back to the beginning of a line
    parser = build_parser()
    try:
        args, rest = parser.parse_known_args(argv)
        if rest:
            hint = "; a prompt of several words needs quotes, one that begins with - goes behind --"
            parser.error(f"unrecognized arguments: {' '.join(rest)}" + hint * (args.command in PROMPTED))
    except SystemExit as left:  # --help, --version and usage errors; the text may still be in the buffer
        try:
            streams.out("")
        except OSError as error:
            _drop_stdout()
            if isinstance(error, BrokenPipeError):
                return 141
            tell(f"clearllama: error: {describe(error)}")
            return 1
        raise left
    streams.listen(args.quiet)
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup it is, and stays so
            signal.signal(number, _unwind)
    try:
        if "RANK" in os.environ and not args.debug:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what fails is said in one line, without its stack
        if args.run not in (pull.run, doctor.run):  # which need none of it, or ask a process of their own
            _import_quietly()
        code = ranks.run(args, sys.argv[1:] if argv is None else argv)
        if code == 0:  # else what failed was told, here or by a rank
            streams.out("")
        return code
    except KeyboardInterrupt:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one finds nothing to end
        tell("\nclearllama: interrupted")
        signal.signal(signal.SIGINT, previous)
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        _drop_stdout()
        return 141
    except Exception as error:
        if args.debug:
            raise
        if isinstance(error, OSError):
            _drop_stdout()
        tell(f"clearllama: error: {describe(error)}")
        return error.exit_code if isinstance(error, LlamaError) else 1


def _import_quietly() -> None:
    """Import torch, which takes a second. A signal inside it would be lost or leave it half imported: just end."""

    check_import()

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        if number == signal.SIGINT:
            os.write(2, b"\nclearllama: interrupted\n")
        os._exit(128 + number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, leave)
    from .. import loader, text  # noqa: F401

    for number, handler in previous.items():
        signal.signal(number, handler)


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # an exception, so that temporary files are cleared on the way out


def _drop_stdout() -> None:
    """Point stdout at nothing, or Python would complain about the same failure again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
