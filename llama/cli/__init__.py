"""The command `clearllama`: one file per subcommand. torch is imported only after the arguments are parsed."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from .. import __version__
from ..errors import LlamaError
from . import arguments, completion, ranks, streams

COMMANDS = {  # name, also of the module, which is imported when the command is used -> its line in the help
    "generate": "answer or continue a prompt",
    "chat": "have a conversation with a model",
    "serve": "serve a model over an OpenAI-compatible HTTP API",
    "inspect": "describe a checkpoint without reading its weights",
    "plan": "compute whether a model fits on some GPUs, and how fast it can be at best",
    "convert": "write a checkpoint in another format",
    "quantize": "quantize a checkpoint to 4 or 8 bits and save it",
    "pull": "download a model",
    "verify": "check that a checkpoint is complete and undamaged",
    "doctor": "check this machine and run a self-test",
    "evaluate": "score a model on the tasks of lm-evaluation-harness",
    "bench": "measure speed and memory, or the quality loss of quantization",
    "perplexity": "measure how well a model predicts a text",
    "study": "answer questions about RoPE with numbers and figures",
    "trace": "show what a model computes on a text",
    "steer": "make a control vector from two prompts",
    "explain": "follow one token through one block, step by step",
}

SPIN_COUNT = 1000  # steps of a busy loop, about 5 microseconds, before an OpenMP thread sleeps
# (command, option that was removed) -> what to do instead
REMOVED = {
    **dict.fromkeys(
        [("plan", f"--{name}") for name in ("gpu-flops", "gpu-link", "gpu-network", "gpus-per-host")]
        + [("plan", f"--{name}-parallel") for name in ("tensor", "pipeline")],
        "plan divides the bytes evenly over the GPUs, and computes with their bandwidth only",
    ),
    ("perplexity", "--tensor-parallel"): "perplexity runs in one process",
    ("study", "--checks"): "the tests of the repository check the numbers of a topic",
    ("study", "--seed"): "the quiz asks in one order",
    ("evaluate", "--include-path"): "name the task's .yaml file or its folder in --tasks",
    **dict.fromkeys([("inspect", "--context"), ("inspect", "--batch")], "plan computes the memory of a run"),
    ("pull", "--meta"): "Meta's own files are in the folder original: clearllama pull ORG/NAME/original",
    ("doctor", "--seconds"): "the self-test ends after 5 minutes",
    ("verify", "--checksums"): "sha256sum -c FILE compares a list of your own",
    ("verify", "--tensors"): "a run names the first weight that is not finite; verify compares checksums",
    ("bench", "--profile"): "run llama.generate under torch.profiler",
    ("convert", "--modelfile"): "for Ollama, write a Modelfile with the line FROM ./FILE.gguf and a TEMPLATE",
}


class Parser(argparse.ArgumentParser):
    """argparse with usage errors on one line, and without abbreviations of options."""

    def __init__(self, **settings: Any):
        super().__init__(**{**settings, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {streams.one_line(message)} (see {self.prog} --help)\n")


class Subparsers(argparse._SubParsersAction):  # type: ignore[type-arg]
    """argparse's table of the commands, each with its line of COMMANDS."""

    def add_parser(self, name: str, **settings: Any) -> Any:
        return super().add_parser(name, **{**settings, "help": COMMANDS[name]})


def build_parser(names: Collection[str] = COMMANDS) -> Parser:
    """The parser, with the options of these commands; the others only have a name. Does not import torch."""
    parser = Parser(
        prog="clearllama",
        description="Run, inspect and study LLaMA models.",
        epilog="'clearllama COMMAND --help' shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"clearllama {__version__}")
    about = "print a script that completes commands, options and paths in a shell"
    action = completion.PrintCompletion
    parser.add_argument("--print-completion", action=action, choices=completion.SHELLS, help=about)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, action=Subparsers)
    for name in COMMANDS:
        if name in names:
            import_module(f".{name}", __name__).add_parser(commands)
        else:
            commands.add_parser(name)
    return parser


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands, by name."""
    (action,) = (one for one in parser._actions if isinstance(one, Subparsers))
    commands: dict[str, argparse.ArgumentParser] = action.choices
    return commands


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. A wrong command or option ends the program with one line that names a similar one."""
    first = next(iter(words), "")
    parser = build_parser([first])
    if first and first not in COMMANDS and first.partition("=")[0] not in parser._option_string_actions:
        near = _similar(first, COMMANDS)
        parser.error(f"expected a command first, as in clearllama generate TEXT, got {first!r:.80}{near}")
    args, rest = parser.parse_known_args(words)
    if rest:
        command = commands_of(parser)[args.command]
        option = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
        if option is None:
            hint = "; a prompt of several words needs quotes" if hasattr(args, "prompt") else ""
        else:
            removed = REMOVED.get((args.command, option))
            hint = f"; {removed}" if removed else _similar(option, command._option_string_actions)
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
        if "RANK" in os.environ and not args.debug:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # errors are reported here, without C++ stacks
        if args.command not in ("pull", "doctor"):  # these need no torch, or import it in a process of their own
            _import_torch(args)
            from ..engine import runtime

            runtime.set_threads(getattr(args, "threads", None))
        _handle_signals(_exit_on_signal, signal.default_int_handler)
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
    # By default PyTorch's OpenMP threads wait in a busy loop for milliseconds. A second program on the same cores then
    # makes each loop wait for a thread that is not running: a prompt takes ten times as long.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    alone = "torch" not in sys.modules
    if alone:  # the import makes 250,000 objects that live until the exit: exclude them from every garbage collection
        gc.disable()
    _handle_signals(_leave, _leave)
    if args.command in ("generate", "chat") and not getattr(args, "raw", False):
        from ..chat import template
        from ..system.child import ChildError

        with contextlib.suppress(ChildError):  # the first rendering reports it
            template.CHILD.start()  # on another core meanwhile
    from .. import loader, text  # noqa: F401

    if alone:
        gc.freeze()
        gc.enable()


Handler = Callable[[int, FrameType | None], Any]


def _handle_signals(end: Handler, interrupt: Handler) -> None:
    """Set `end` for SIGTERM and SIGHUP, and `interrupt` for SIGINT. Ignored signals stay ignored (nohup)."""
    hangup = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none
    for number, handler in ((signal.SIGTERM, end), (hangup, end), (signal.SIGINT, interrupt)):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    if number == signal.SIGINT:
        os.write(2, b"\nclearllama: interrupted\n")
    os._exit(128 + number)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # an exception, so that temporary files are removed


def _drop_stdout() -> None:
    """Redirect stdout to the null device, or Python would report the same failure again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
