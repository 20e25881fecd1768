"""clearllama chat: a conversation at the terminal. The KV cache is kept, so each turn pays for its new part only."""

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
/help          this list
/clear         forget the conversation; the system message stays
/system TEXT   set the system message and forget the conversation; without TEXT, remove it
/save FILE     write the conversation to a JSON file that does not exist yet
/exit          leave, as Ctrl-D does
Ctrl-C stops an answer; what was said so far stays in the conversation."""

LONGEST_TURN = 2**24  # bytes of one line from a pipe


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Talk to an instruct model; /help lists the commands. Piped lines are taken as turns.",
        allow_abbrev=False,
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    arguments.add_chat_format(parser)
    arguments.add_sampling_options(parser, max_new_tokens=1024, fallback="temperature 0.6, top-p 0.9")
    arguments.add_draft_options(parser)
    arguments.add_session_options(parser)
    arguments.add_model_options(parser)
    ranks.add_options(parser)
    arguments.add_debug(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if sys.stdin is None:
        raise UsageError("standard input is closed, and chat reads its turns from it")
    options = arguments.sampling_options(args)
    drafts.check_draft(args)
    sessions.check_session(args)
    llm = loading.load(args)
    options["draft"] = drafts.load_draft(args, llm.model)
    if args.chat_format != "auto":
        llm.chat_format = args.chat_format
    if llm.chat_template is None and llm.chat_format is None:
        raise TemplateError(
            "this model has no chat template, so it can't chat; clearllama generate continues text, and --chat-format"
            " names a built-in format"
        )
    if llm.chat_format is not None:
        streams.say(args, f"messages are written in the format {llm.chat_format}")
    if not llm.sampling and "temperature" not in options:
        options = {"temperature": 0.6, "top_p": 0.9, **options}
    streams.say(args, "/help lists the commands, /exit or Ctrl-D leaves")
    session = sessions.load_session(args, llm.model)
    if args.system is not None and session is not None and session.messages:
        raise UsageError("the session goes on with its own conversation: leave --system out, or set it with /system")
    chat = Chat(llm, args.system, session)
    if chat.messages:
        streams.say(args, f"the conversation goes on behind its {len(chat.messages)} messages; /clear begins a new one")
    with sessions.saving(args, chat.session, llm.model):
        return converse(args, chat, options)


def converse(args: argparse.Namespace, chat: Chat, options: dict[str, Any]) -> int:
    """Turn after turn, until the input ends or /exit."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    while True:
        try:
            line = read_turn()
        except EOFError:
            if sys.stdin.isatty():
                streams.write("\n")
            return 0
        except KeyboardInterrupt:  # at the prompt: drop the line
            streams.write("\n")
            continue
        if not line:
            continue
        try:
            if line.startswith("/"):
                if not chat.command(line):
                    return 0
            else:
                chat.answer(args, line, options)
        except ParallelError:  # no turn can follow
            raise
        except (LlamaError, MemoryError, RuntimeError) as error:  # the turn failed, the conversation goes on
            if args.debug:
                raise
            hint = "; /clear forgets the conversation" if isinstance(error, ContextLengthError) else ""
            streams.tell(f"clearllama: error: {streams.describe(error)}{hint}")


def read_turn() -> str:
    """The next line. Raises EOFError at the end, UsageError where a pipe's line has no end or is not UTF-8."""
    if sys.stdin.isatty():
        return input("> ").strip()
    line = sys.stdin.buffer.readline(LONGEST_TURN + 1)
    if not line:
        raise EOFError
    if len(line) > LONGEST_TURN:
        raise UsageError(f"a line of standard input holds more than {LONGEST_TURN // 2**20} MiB, or has no end")
    try:
        return line.decode().strip()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"a line of standard input is not UTF-8: byte {error.start} is 0x{line[error.start]:02x}; convert it first"
        ) from None


class Chat:
    """The messages of one conversation and the cache that holds them."""

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
        """The session's, so that they are saved with it."""
        return self.session.messages

    def begin(self) -> None:
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})

    def clear(self) -> None:
        self.session.forget()
        self.begin()

    def answer(self, args: argparse.Namespace, text: str, options: dict[str, Any]) -> None:
        """One turn. On an error the message is taken back; on Ctrl-C the part of the answer that was shown stays."""
        turn = [*self.messages, {"role": "user", "content": text}]
        stream = self.llm.stream_chat(turn, session=self.session, **options)
        said, completion = "", None
        try:
            for piece in stream:
                streams.write(piece.text)
                said += piece.text
                completion = piece.completion
        except KeyboardInterrupt:
            stream.close()
        streams.write("\n")
        self.session.messages = [*turn, {"role": "assistant", "content": said}]
        if completion is None:
            streams.say(args, "stopped")
        else:
            answers.say_stats(args, completion.stats, completion.finish_reason)

    def command(self, line: str) -> bool:
        """Carry out a /command; False ends the conversation."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name == "/clear":
            self.clear()
            streams.tell("the conversation is forgotten")
        elif name == "/system":
            self.system = rest or None
            self.clear()
            done = "set" if self.system else "removed"
            streams.tell(f"the system message is {done}, the conversation is forgotten")
        elif name == "/save":
            streams.tell(streams.one_line(self.save(rest)))
        else:
            streams.tell(HELP if name == "/help" else f"unknown command {name}\n{HELP}")
        return True

    def save(self, name: str) -> str:
        """Write the messages, never over another file; returns what happened."""
        if not name:
            return "usage: /save FILE"
        try:
            path = Path(name).expanduser()
            text = json.dumps(self.messages, ensure_ascii=False, indent=1)
            write_atomically(path, text.encode(), new=True)
        except FileExistsError:
            return f"{path} exists already; choose another name"
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: ~nobody; ValueError: a NUL in the name
            return f"{name} was not written: {getattr(error, 'strerror', None) or error}"
        return f"{len(self.messages)} messages are in {path}"
