"""The command `clearllama`: one file per subcommand. torch is imported only after the arguments are parsed."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import NoReturn

from .. import __version__
from ..errors import LlamaError
from . import (
    arguments,
    bench,
    chat,
    completion,
    convert,
    doctor,
    evaluate,
    explain,
    generate,
    inspect,
    perplexity,
    plan,
    pull,
    quantize,
    ranks,
    serve,
    signals,
    steer,
    streams,
    study,
    trace,
    verify,
)

COMMANDS = (
    generate, chat, serve, inspect, plan, convert, quantize, pull, verify, doctor, evaluate, bench, perplexity, study,
    trace, steer, explain,
)  # fmt: skip

SPIN_COUNT = 1000  # steps of a busy loop, about 5 microseconds, before an OpenMP thread sleeps
PROMPTED = ("generate", "trace")  # commands with a prompt as argument
# Options that were removed -> what to do instead
REMOVED = dict.fromkeys(
    ("--gpu-flops", "--gpu-link", "--gpu-network", "--gpus-per-host", "--tensor-parallel", "--pipeline-parallel"),
    "; plan divides the bytes evenly over the GPUs, and computes with their bandwidth only",
)


class Parser(argparse.ArgumentParser):
    """argparse with usage errors on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {streams.one_line(message)} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands. Does not import torch."""
    parser = Parser(
        prog="clearllama",
        description="Run, inspect and study LLaMA models.",
        epilog="'clearllama COMMAND --help' shows the options of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"clearllama {__version__}")
    parser.add_argument(
        "--print-completion",
        action=completion.PrintCompletion,
        choices=completion.SHELLS,
        help="print a script that completes commands, options and paths in a shell",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands, by name."""
    (action,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    commands: dict[str, argparse.ArgumentParser] = action.choices
    return commands


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. A wrong command or option ends the program with one line that names a similar one."""
    parser = build_parser()
    commands, first = commands_of(parser), next(iter(words), "")
    if first and first not in commands and first.partition("=")[0] not in parser._option_string_actions:
        near = _similar(first, commands)
        parser.error(f"expected a command first, as in clearllama generate TEXT, got {first!r:.80}{near}")
    args, rest = parser.parse_known_args(words)
    if rest:
        command, wrong = commands[args.command], next((word for word in rest if word.startswith("-")), None)
        if wrong is None:
            hint = "; a prompt of several words needs quotes" * (args.command in PROMPTED)
        else:
            option = wrong.partition("=")[0]
            hint = REMOVED.get(option) or _similar(option, command._option_string_actions)
        command.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    return args


def _similar(name: str, known: Iterable[str]) -> str:
    """'; did you mean NAME?', or '' if no known name is similar."""
    near = difflib.get_close_matches(name.replace("_", "-"), known, 1, 0.75)
    return f"; did you mean {near[0]}?" if near else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    0 success, 1 failure, 2 usage error, 129, 130 and 143 signals, 141 closed pipe.
    """
    if sys.stderr is None:  # print(file=None) would write to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (stays open until the process ends)
    if sys.stdout is None:
        streams.error("standard output is closed; redirect it to a file or a terminal")
        return 1
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # characters outside the encoding become \uXXXX instead of an error
            stream.reconfigure(errors="backslashreplace")
    if os.environ.get("TERM") == "dumb":
        os.environ.setdefault("TQDM_DISABLE", "1")  # such a terminal cannot redraw a line
    words = sys.argv[1:] if argv is None else argv
    args = argparse.Namespace(debug=False)
    try:
        try:
            args = parse(words)
        finally:
            streams.write_raw("")  # the text of --help may still be in the buffer
        streams.show_log(args.quiet)
        for number in signals.ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, _exit_on_signal)
        if "RANK" in os.environ and not args.debug:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # errors are reported here, without C++ stacks
        if args.run not in (pull.run, doctor.run):  # these need no torch, or import it in a process of their own
            _import_torch(args)
            from ..engine import runtime

            runtime.set_threads(getattr(args, "threads", None))
        code = ranks.run(args, words)
        if code == 0:  # a failure was already reported, here or by a rank
            streams.write_raw("")
        return code
    except KeyboardInterrupt:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore a second interrupt
        streams.write_stderr("\nclearllama: interrupted")
        signal.signal(signal.SIGINT, previous)
        return 130
    except BrokenPipeError:  # the reader of stdout has closed it
        _drop_stdout()
        return 141
    except Exception as error:
        if args.debug:
            raise
        if isinstance(error, OSError):
            _drop_stdout()
        streams.error(with_options(streams.describe(error), args))
        return error.exit_code if isinstance(error, LlamaError) else 1


def with_options(message: str, args: argparse.Namespace) -> str:
    """Replace a parameter's name at the start of a message with its option: 'top_p must be' -> '--top-p must be'."""
    name, _, rest = message.partition(" ")
    if name in vars(args) and ("_" in name or rest.startswith("must ")):
        return f"{arguments.option(name)} {rest}"
    return message


def _import_torch(args: argparse.Namespace) -> None:
    """Import torch and the library, which takes about a second. A signal during the import exits at once.

    A Python handler could run inside the import, where its exception may be lost or leave a module half imported.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        if number == signal.SIGINT:
            os.write(2, b"\nclearllama: interrupted\n")
        os._exit(128 + number)

    # By default PyTorch's OpenMP threads wait in a busy loop for milliseconds. A second program on the same cores then
    # makes each loop wait for a thread that is not running: a prompt takes ten times as long.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    alone = "torch" not in sys.modules
    if alone:  # the import makes 250,000 objects that live until the exit: exclude them from every garbage collection
        gc.disable()
    with signals.handled_by(leave):
        if args.run in (generate.run, chat.run) and not getattr(args, "raw", False):
            from ..chat import template
            from ..system.child import ChildError

            with contextlib.suppress(ChildError):  # the first rendering reports it
                template.CHILD.start()  # on another core meanwhile
        from .. import loader, text  # noqa: F401
    if alone:
        gc.freeze()
        gc.enable()


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # an exception, so that temporary files are removed


def _drop_stdout() -> None:
    """Redirect stdout to the null device, or Python would report the same failure again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
