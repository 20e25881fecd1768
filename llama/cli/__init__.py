"""The command `clearllama`: one file per subcommand. torch is imported only after the arguments are parsed."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from .. import __version__
from ..errors import LlamaError
from .common import arguments, ranks, terminal
from .common.parser import Parser, add, first_sentence

COMMANDS = (  # names of modules in this folder
    *("generate", "chat", "serve", "inspect", "plan", "convert", "quantize", "pull", "list", "rm", "verify"),
    *("doctor", "bench", "perplexity", "study", "tokenize", "trace", "steer", "explain", "completion"),
)
OPTION = re.compile(r"-[A-Za-z](?=[^A-Za-z= ])|--?[A-Za-z][^= ]*(?=\Z|=)")  # the name in -n5, --n=5 or -name
SPIN_COUNT = 1000  # steps of a busy loop, about 5 microseconds, before an OpenMP thread sleeps
GREETING = """clearllama runs, inspects and explains LLaMA models. Three examples:

  clearllama generate "Why is the sky blue?"
  clearllama chat
  clearllama trace "The capital of France is" --html trace.html

The first run downloads a small model. clearllama --help lists all commands.
"""


def build_parser(names: Iterable[str] = COMMANDS) -> Parser:
    """The parser of these commands; the description of a command is its module's docstring. Does not import torch."""
    parser = Parser(
        prog="clearllama",
        description=f"Run and study LLaMA models (version {__version__}); COMMAND --help shows its options.",
    )
    parser.add_argument("--version", action="version", version=f"clearllama {__version__}", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parser.commands = commands.choices
    for name in names:
        module: Any = import_module(f".{name}", __name__)
        command = commands.add_parser(name, help=first_sentence(module.__doc__), description=module.__doc__)
        command.set_defaults(run=module.run, needs_torch=getattr(module, "NEEDS_TORCH", True))
        add(command, [*module.OPTIONS, *arguments.EVERY])
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. A wrong command or option ends the program with one line, which names a similar name."""
    first, *others = words
    if first == "help":
        first, *others = [*others[:1], "--help"]
    if first == "run":
        named = bool(others) and not others[0].startswith("-")
        asked = named and len(others) > 1 and not others[1].startswith("-")
        if asked or sys.stdin is None or not sys.stdin.isatty():  # as in Ollama, answer once
            first, others = "generate", [*["--model"] * named, *others]
    own = arguments.SYNONYMS.get(first)
    first = own if own in (*COMMANDS, "--version") else first
    parser = build_parser([first] if first in COMMANDS else COMMANDS)
    command = parser.commands.get(first, parser)
    if command is parser and first not in parser._option_string_actions:
        if answer := arguments.ANSWER.get(first):
            parser.error(f"{first}: {answer}")
        near = _similar(first, [*COMMANDS, "--help", "--version"])
        parser.error(f"expected a command first, as in clearllama generate TEXT, got {first!r:.80}{near}")
    args, rest = parser.parse_known_args([first, *spelled(others, first, command)])
    if rest:
        path = next(filter(os.path.exists, others), None)
        if path and "--model" in command._option_string_actions and args.model == command.get_default("model"):
            hint = f"; to use a model, add -m: -m {path}"
        elif "prompt" in args:
            prompt = " ".join([args.prompt or "", *rest])
            hint = f'; put the prompt in quotes: "{prompt:.80}"'
        else:
            hint = "; type messages in the chat, or use clearllama generate TEXT -m MODEL" if first == "chat" else ""
        command.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    return args


def spelled(words: Sequence[str], name: str, command: Parser) -> list[str]:
    """The words, with options spelled as in the parser of the command. An unknown option ends the program.

    -NAME becomes --NAME, --A_B becomes --A-B, and options of other programs become ours. Letters after one dash are
    one name: -hf is not -h with a value. But -n5 is -n 5.
    """
    known, own, unknown = command._option_string_actions, [*words], {}
    for at, word in enumerate(words[: words.index("--")] if "--" in words else words):
        match = OPTION.match(word)
        if not match or match[0] in known:
            continue
        forms = match[0].replace("_", "-"), f"-{match[0]}".replace("_", "-")
        found = [form for option in forms for form in (option, arguments.SYNONYMS.get(option)) if form in known]
        if found:
            value = word[match.end() :]
            own[at] = f"{found[0]}={value}" if value[:1] not in ("", "=") else found[0] + value
        else:
            unknown[match[0]] = _hint(match[0], name, known)
    if unknown:
        hint = next(iter(unknown.values()))
        same = [option for option in unknown if unknown[option] == hint]
        command.error(f"unrecognized arguments: {', '.join(same):.80}{hint}")
    return own


def _hint(option: str, command: str, known: Iterable[str]) -> str:
    """The end of the message about an unknown option: a remedy or a similar option, or ''."""
    if answer := arguments.ANSWER.get(option):
        return f"; {answer}"
    if name := arguments.SYNONYMS.get(option):
        return f"; other commands call it {name}, but {command} does not have it"
    return _similar(option, known)


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
        terminal.error("standard output is closed; redirect it to a file or a terminal")
        return 1
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # characters outside the encoding become \uXXXX instead of an error
            stream.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if argv is None else argv
    args = argparse.Namespace(debug=False)
    try:
        if not words:
            terminal.write(GREETING)
            return 0
        try:
            args = parse(words)
        finally:
            terminal.write_raw("")  # flush: the text of --help may still be in the buffer
        terminal.show_log(args.quiet)
        if "RANK" in os.environ and not args.debug:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # errors are reported here, without C++ stacks
        if args.needs_torch:
            with terminal.note("clearllama: loading PyTorch"):
                _import_torch(args)
        _handle(signal.SIGINT, signal.default_int_handler)
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name):  # Windows has no SIGHUP
                _handle(getattr(signal, name), _exit_on_signal)
        return ranks.run(args, words)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore a second interrupt
        terminal.write_stderr("\nclearllama: interrupted")
        return 130
    except BrokenPipeError:  # the reader of stdout has closed it
        _drop_stdout()
        return 141
    except Exception as error:
        if args.debug:
            raise
        if isinstance(error, OSError):
            _drop_stdout()
        terminal.error(with_options(terminal.describe(error), args))
        return error.exit_code if isinstance(error, LlamaError) else 1


def with_options(message: str, args: argparse.Namespace) -> str:
    """Replace a parameter's name at the start of a message by the option: top_p becomes --top-p."""
    options = {name: arguments.option(name) for name in vars(args)}
    name, _, rest = message.partition(" ")
    if name in options and ("_" in name or rest.startswith("must ")):
        message = f"{options[name]} {rest}"
    if message.startswith("--"):  # then the other parameters that the message names are options, too
        return re.sub(r"(?<![\w/.'\"-])\w+_\w+\b", lambda word: options.get(word[0], word[0]), message)
    return message


def _import_torch(args: argparse.Namespace) -> None:
    """Import torch and the library, which takes about a second, and set the number of threads."""
    # By default PyTorch's OpenMP threads wait in a busy loop for milliseconds. A second program on the same cores then
    # makes each loop wait for a thread that is not running: a prompt takes ten times as long.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    _handle(signal.SIGINT, signal.SIG_DFL)  # an exception inside the import may be lost or leave a module half imported
    alone = "torch" not in sys.modules
    if alone:  # the import makes 250,000 objects that live until the exit: exclude them from every garbage collection
        gc.disable()
    if "chat_format" in args and not getattr(args, "raw", False):
        from ..chat import template
        from ..system.child import ChildError

        with contextlib.suppress(ChildError):  # the first rendering of a template reports the error
            template.CHILD.start()  # the child starts on another core during the import
    from .. import loader, text  # noqa: F401
    from ..engine import runtime

    runtime.set_threads(getattr(args, "threads", None))
    if alone:
        gc.freeze()
        gc.enable()


def _handle(number: int, handler: Any) -> None:
    """Set the handler of a signal, unless the signal is ignored (nohup)."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # an exception, so that temporary files are removed


def _drop_stdout() -> None:
    """Redirect stdout to the null device. Otherwise Python would report the same failure again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
