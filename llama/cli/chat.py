"""clearllama chat: a conversation at the terminal. The KV cache stays, so a turn computes only its new tokens."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ContextLengthError, LlamaError, ParallelError, TemplateError, UsageError
from ..system.temporary import write_atomically
from . import answers, arguments, drafts, loading, ranks, sessions, streams

if TYPE_CHECKING:
    from ..generation.session import Session

HELP = """\
/help          show this list
/clear         start a new conversation with the same system message
/system TEXT   set the system message and start a new conversation; without TEXT, remove it
/save FILE     write the conversation to a new JSON file
/exit          leave (also Ctrl-D)
Ctrl-C stops an answer; the part shown so far stays in the conversation."""

LONGEST_TURN = 2**24  # bytes of a line read from a pipe


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "chat",
        help="have a conversation with a model",
        description="Have a conversation with an instruct model; /help lists its commands. From a pipe, each line is"
        " one turn.",
        usage="%(prog)s [options]",
        allow_abbrev=False,
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    arguments.add_chat_format(parser)
    arguments.add_output_options(parser)
    arguments.add_sampling_options(parser, max_new_tokens=1024, fallback="temperature 0.6, top-p 0.9")
    arguments.add_model_options(parser)
    arguments.add_draft_options(parser)
    arguments.add_session_options(parser)
    ranks.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if sys.stdin is None:
        raise UsageError("chat reads from standard input, but standard input is closed")
    options = arguments.sampling_options(args)
    drafts.check_draft(args)
    sessions.check_session(args)
    llm = loading.load(args)
    options["draft"] = drafts.load_draft(args, llm.model)
    if args.chat_format != "auto":
        llm.chat_format = args.chat_format
    if llm.chat_template is None and llm.chat_format is None:
        raise TemplateError(
            "this model has no chat template: use clearllama generate to continue text, or name a built-in format with"
            " --chat-format"
        )
    if llm.chat_format is not None:
        streams.info(args, f"chat format: {llm.chat_format}")
    if not llm.sampling and "temperature" not in options:
        options = {"temperature": 0.6, "top_p": 0.9, **options}
    streams.info(args, "/help lists the commands, /exit or Ctrl-D leaves")
    session = sessions.load_session(args, llm)
    if args.system is not None and session is not None and session.messages:
        raise UsageError("the session continues its own conversation: leave --system out, or use /system")
    chat = Chat(llm, args.system, session)
    if chat.messages:
        streams.info(args, f"continuing the conversation of {len(chat.messages)} messages; /clear starts a new one")
    with sessions.saving(args, chat.session, llm.model):
        return converse(args, chat, options)


def converse(args: argparse.Namespace, chat: Chat, options: dict[str, Any]) -> int:
    """Answer turns until the input ends or the user leaves. Returns 1 if a turn failed and the input is no terminal."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    failed = False
    while True:
        try:
            line = read_turn()
        except EOFError:
            if sys.stdin.isatty():
                streams.write("\n")
            return int(failed)
        except KeyboardInterrupt:  # while typing: discard the line
            streams.write("\n")
            continue
        if not line:
            continue
        try:
            if line.startswith("/"):
                if not chat.command(line):
                    return int(failed)
            else:
                chat.answer(args, line, options)
        except ParallelError:  # a process is gone, so no turn can follow
            raise
        except (LlamaError, MemoryError, RuntimeError) as error:  # the turn failed; the conversation continues
            if args.debug:
                raise
            failed = not sys.stdin.isatty()
            hint = "; /clear starts a new conversation" if isinstance(error, ContextLengthError) else ""
            streams.error(streams.describe(error) + hint)


def read_turn() -> str:
    """Read the next line. Raises EOFError at the end, UsageError for an endless line or one that is not UTF-8."""
    if sys.stdin.isatty():
        return input("> ").strip()
    line = sys.stdin.buffer.readline(LONGEST_TURN + 1)
    if not line:
        raise EOFError
    if len(line) > LONGEST_TURN:
        raise UsageError(f"a line of standard input has more than {LONGEST_TURN // 2**20} MiB or is endless")
    return streams.decode(line, "a line of standard input").strip()


class Chat:
    """One conversation: its messages and its KV cache."""

    def __init__(self, llm: Any, system: str | None, session: Session | None = None):
        from ..generation.session import Session

        self.llm, self.system = llm, system
        self.session = Session() if session is None else session
        if self.messages and self.messages[0]["role"] == "system":
            self.system = self.messages[0]["content"]
        elif not self.messages:
            self.begin()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the session, which saves them with the cache."""
        return self.session.messages

    def begin(self) -> None:
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})

    def clear(self) -> None:
        self.session.forget()
        self.begin()

    def answer(self, args: argparse.Namespace, text: str, options: dict[str, Any]) -> None:
        """Answer one message. An error leaves the conversation unchanged; Ctrl-C keeps the part of the answer shown."""
        turn = [*self.messages, {"role": "user", "content": text}]
        stream = self.llm.stream_chat(turn, session=self.session, **options)
        answer, completion = "", None
        try:
            for piece in stream:
                streams.write(piece.text)
                answer += piece.text
                completion = piece.completion
        except KeyboardInterrupt:
            stream.close()
        streams.write("\n")
        self.session.messages = [*turn, {"role": "assistant", "content": answer}]
        if completion is None:
            streams.info(args, "stopped")
        else:
            answers.show_stats(args, completion.stats, completion.finish_reason)

    def command(self, line: str) -> bool:
        """Run a /command. Returns False if it ends the conversation."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name == "/clear":
            self.clear()
            streams.write_stderr("started a new conversation")
        elif name == "/system":
            self.system = rest or None
            self.clear()
            action = "set" if self.system else "removed"
            streams.write_stderr(f"{action} the system message and started a new conversation")
        elif name == "/save":
            streams.write_stderr(streams.one_line(self.save(rest)))
        else:
            streams.write_stderr(HELP if name == "/help" else f"unknown command {name}\n{HELP}")
        return True

    def save(self, name: str) -> str:
        """Write the messages to a new file. Returns a line that reports the result."""
        if not name:
            return "usage: /save FILE"
        try:
            path = Path(name).expanduser()
            text = json.dumps(self.messages, ensure_ascii=False, indent=1)
            write_atomically(path, text.encode(), new=True)
        except FileExistsError:
            return f"{path} already exists; choose another name"
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: unknown ~user; ValueError: NUL in the name
            return f"{name} was not written: {getattr(error, 'strerror', None) or error}"
        return f"wrote {len(self.messages)} messages to {path}"
