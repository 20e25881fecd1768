"""clearllama chat: a conversation at the terminal. It keeps the KV cache, so a turn computes only its new tokens."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import spelling
from ..errors import ContextLengthError, LlamaError, TemplateError, UsageError
from . import answers, arguments, drafts, history, loading, ranks, sessions, streams, terminal, turns

if TYPE_CHECKING:
    from ..generation.answer import Completion
    from ..generation.session import Session
    from ..text import Llama

Message = dict[str, Any]

ALIASES = {"/quit": "/exit", "/bye": "/exit"}


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "chat",
        help="have a conversation with a model",
        description="Have a conversation with an instruct model; /help lists the commands of the chat. If the input is"
        ' a pipe, each line, or each block between """ and """, is one message; the answers are written with'
        " an empty line between them.",
        usage="%(prog)s [options]",
        allow_abbrev=False,
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    arguments.add_chat_format(parser)
    parser.add_argument(
        "--drop-oldest",
        action="store_true",
        help="drop the oldest turns without asking if the context is full; the system message is kept",
    )
    parser.add_argument(
        "--no-history", action="store_true", help="do not read or write the file that keeps the input of earlier chats"
    )
    arguments.add_output_options(
        parser,
        json="one JSON object per answer, as generate does: prompt, text, tokens, prompt_tokens, finish_reason,"
        " logprobs, stats",
    )
    arguments.add_model_options(parser)
    arguments.add_sampling_options(parser, max_new_tokens=1024, fallback="temperature 0.6, top-p 0.9")
    arguments.add_session_options(parser)
    arguments.add_draft_options(parser)
    arguments.add_steer_options(parser)
    arguments.add_rope_options(parser)
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
    session = sessions.load_session(args, llm)
    begun = session is not None and has_turns(session.messages)
    if args.system is not None and begun:
        raise UsageError(
            f"--system can't change the conversation in {args.load_session}; leave --system out, or begin a new"
            " conversation with /system TEXT"
        )
    source = keyboard(args) if sys.stdin.isatty() else terminal.Pipe()
    source.typed = ranks.first(args, lambda: source.typed)
    chat = Chat(args, llm, options, source, session)
    streams.info(args, "/help lists the commands, /exit or Ctrl-D leaves")
    if begun:
        streams.info(args, f"continuing the conversation of {counted(chat.messages)}; /clear starts a new one")
    with sessions.saving(args, lambda: chat.session, llm.model):
        return converse(args, chat)


def keyboard(args: argparse.Namespace) -> terminal.Keyboard:
    """The keyboard, with the history of earlier chats unless --no-history is set."""

    def warn(message: str) -> None:
        streams.info(args, message)

    return terminal.Keyboard(history.History(None, warn) if args.no_history else history.open_history(warn))


def converse(args: argparse.Namespace, chat: Chat) -> int:
    """Answer turns until the input ends or the user leaves. Returns 1 if a turn from a pipe failed."""
    failed = False
    while True:
        try:
            turn = ranks.first(args, lambda: turns.read_turn(chat.source.read))
        except EOFError:
            if chat.source.typed:
                streams.write_stderr("")
            return int(failed)
        except KeyboardInterrupt:  # while typing: discard the turn
            streams.write_stderr("")
            continue
        except UsageError as error:
            if not chat.source.typed:
                raise
            streams.error(streams.describe(error))
            continue
        if not turn.text:
            continue
        chat.source.remember(turn.entered)
        try:
            if turn.command:
                chat.command(turn.text)
                if chat.left:
                    return int(failed)
            else:
                chat.ask(turn.text)
        except KeyboardInterrupt:  # before the answer began
            streams.info(args, f"{'' if turn.command else chat.label}stopped; the conversation is unchanged")
        except (LlamaError, MemoryError, RuntimeError) as error:  # the turn failed; the conversation continues
            if args.debug or (args.world is not None and not isinstance(error, LlamaError)):
                raise
            failed = not chat.source.typed
            message = streams.describe(error)
            if args.json and not turn.command:
                streams.write_json({"prompt": turn.text, "error": message})
            streams.error(("" if turn.command else chat.label) + message)


def has_turns(messages: Sequence[Message]) -> bool:
    """Whether messages hold more than a system message."""
    return any(message["role"] != "system" for message in messages)


def counted(items: Sequence[object], noun: str = "message") -> str:
    """A number with its noun: '1 message'."""
    return f"{len(items)} {noun}{'s' * (len(items) != 1)}"


class Chat:
    """One conversation: its messages and its KV cache, and where its turns come from."""

    def __init__(
        self,
        args: argparse.Namespace,
        llm: Llama,
        options: dict[str, Any],
        source: terminal.Source,
        session: Session | None = None,
    ):
        from ..generation.session import Session

        self.args, self.llm, self.options, self.source = args, llm, options, source
        self.session, self.system = Session() if session is None else session, args.system
        self.questions = self.answers = 0  # asked and answered so far
        self.left = False  # whether the user has left
        self.resume(self.session)

    @property
    def messages(self) -> list[Message]:
        """The messages of the session, which saves them with the cache."""
        return self.session.messages

    @property
    def label(self) -> str:
        """The number of the last question, if it comes from a pipe: 'turn 2: '."""
        return "" if self.source.typed else f"turn {self.questions}: "

    def resume(self, session: Session) -> None:
        """Continue a session. The system message of its conversation, if it has one, is used from now on."""
        self.session = session
        own = next((message["content"] for message in session.messages[:1] if message["role"] == "system"), None)
        if has_turns(session.messages):
            self.system = own
            return
        if self.system is None:
            self.system = own
        session.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def restart(self) -> str:
        """Forget the conversation. Returns what happened: empty if there was none."""
        had = has_turns(self.messages)
        self.session.forget()
        self.resume(self.session)
        return "started a new conversation" if had else ""

    # ------------------------------------------------------------------------------------------------- questions
    def ask(self, text: str) -> None:
        """Answer one message. An error leaves the conversation unchanged; Ctrl-C keeps the part of the answer shown."""
        self.complete([*self.messages, {"role": "user", "content": text}], self.options)

    def complete(self, messages: list[Message], options: dict[str, Any]) -> None:
        """Write the answer to messages that end with a question. They and the answer become the conversation."""
        self.questions += 1
        messages, prompt = ranks.first(self.args, lambda: self.fit(messages))
        answer, completion = "", None
        separator = "\n" if self.answers and not self.source.typed else ""
        bar = answers.PromptBar(self.args)
        stream = self.llm.stream_ids(prompt, continues=False, session=self.session, progress=bar, **options)
        with bar, contextlib.closing(stream), self.source.hidden() as poll:
            with contextlib.suppress(KeyboardInterrupt):
                for piece in stream:
                    if not self.args.json:
                        streams.write(separator + piece.text)
                        separator = ""
                    answer += piece.text
                    completion = piece.completion
                    poll()
            self.answers += 1
            self.session.messages = [*messages, {"role": "assistant", "content": answer}]
            if self.args.json:
                streams.write_json({"prompt": messages[-1]["content"], **fields(answer, completion)})
            else:
                streams.write(separator + "\n")
        if completion is None:
            streams.info(self.args, f"{self.label}stopped")
        else:
            answers.show_stats(self.args, completion.stats, completion.finish_reason, self.label)

    def encode(self, messages: list[Message]) -> list[int]:
        """The prompt ids of messages, ending with the start of an answer."""
        from ..chat import encode_chat

        return encode_chat(self.llm.tokenizer, self.llm.chat_template, messages, format=self.llm.chat_format)

    def fit(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """The messages and their prompt ids, without the oldest turns if the context is full and the user agrees.

        The context counts as full if less than an eighth of it is left for the answer. Then as few turns as possible
        are dropped to leave a quarter. Raises ContextLengthError if none are dropped and the prompt does not fit.
        """
        prompt, context = self.encode(messages), self.llm.model.max_seq_len

        def is_roomy(prompt: list[int], share: int) -> bool:
            return len(prompt) + min(self.options["max_new_tokens"], context // share) <= context

        questions = [at for at, message in enumerate(messages) if message["role"] == "user"]
        if is_roomy(prompt, 8) or len(questions) < 2:
            return messages, prompt
        system = messages[: int(messages[0]["role"] == "system")]
        shorter = [[*system, *messages[at:]] for at in questions]
        encoded = {len(shorter) - 1: self.encode(shorter[-1])}

        def fits(number: int) -> bool:
            encoded[number] = self.encode(shorter[number])
            return is_roomy(encoded[number], 4)

        dropped = bisect_left(range(len(shorter) - 1), True, lo=1, key=fits)
        if len(encoded[dropped]) >= context:  # the last question alone is too long
            return messages, prompt
        oldest = f"the {dropped} oldest turns" if dropped > 1 else "the oldest turn"
        rest = " and keep the system message" if system else ""
        size = f"{len(prompt):,} tokens, but the context of {context:,} must hold prompt and answer"
        if self.args.drop_oldest or self.source.ask(f"The conversation has {size}. Drop {oldest}{rest}?"):
            fewer = f"{len(prompt) - len(encoded[dropped]):,} tokens"
            kept = "; the system message is kept" if system else ""
            streams.info(self.args, f"{self.label}dropped {oldest} ({fewer}){kept}")
            return shorter[dropped], encoded[dropped]
        if len(prompt) >= context:
            raise ContextLengthError(
                f"the conversation has {size}; --drop-oldest drops the oldest turns, /clear starts a new conversation"
            )
        return messages, prompt

    # -------------------------------------------------------------------------------------------------- commands
    def command(self, line: str) -> None:
        """Run a /command. Raises UsageError for an unknown one or a wrong argument."""
        name, _, rest = line.partition(" ")
        name, rest = ALIASES.get(name, name), rest.strip()
        if name not in COMMANDS:
            meant = spelling.did_you_mean(spelling.nearest(name, [*COMMANDS, *ALIASES], 1, 0.6))
            raise UsageError(
                f"unknown command {name}; {meant}/help lists the commands; type // to begin a message with a slash"
            )
        command = COMMANDS[name]
        if rest and not command.argument:
            raise UsageError(f"{name} takes no argument, got {rest!r:.80}")
        if not rest and command.required:
            raise UsageError(f"{name} needs the name of a file: {name} {command.argument}")
        if reply := command.run(self, rest):
            streams.write_stderr("\n".join(map(streams.one_line, reply.split("\n"))))

    def help(self, rest: str) -> str:
        """The text of /help."""
        return HELP

    def leave(self, rest: str) -> str:
        """End the chat."""
        self.left = True
        return ""

    def clear(self, rest: str) -> str:
        """Start a new conversation with the same system message."""
        return self.restart() or "there is no conversation yet"

    def set_system(self, text: str) -> str:
        """Set or remove the system message and start a new conversation."""
        if not text and self.system is None:
            return "there is no system message to remove"
        self.system = text or None
        done = "set the system message" if text else "removed the system message"
        # Answers to the old system message do not belong to a conversation with the new one.
        return f"{done} and {restarted}" if (restarted := self.restart()) else done

    def retry(self, rest: str) -> str:
        """Answer the last question again."""
        messages = self.messages[: self.last_question() + 1]
        options = {name: value for name, value in self.options.items() if name != "seed"}
        self.complete(messages, options)
        if {**self.llm.sampling, **options}.get("temperature", 0) == 0:
            return "the temperature is 0, so the answer is the same each time"
        return ""

    def undo(self, rest: str) -> str:
        """Remove the last question and its answer, also from the cache."""
        del self.messages[self.last_question() :]
        self.trim()
        left = [message for message in self.messages if message["role"] == "user"]
        return f"removed the last question and its answer; {counted(left, 'question')} left"

    def last_question(self) -> int:
        """The index of the last user message. Raises UsageError if there is none."""
        for at in reversed(range(len(self.messages))):
            if self.messages[at]["role"] == "user":
                return at
        raise UsageError("there is no question yet; type a message first")

    def trim(self) -> None:
        """Remove tokens that do not belong to the messages from the cache, so that they are not saved."""
        if not has_turns(self.messages):  # some templates need a question
            self.restart()
            return
        self.session.reuse(self.llm.model, self.encode(self.messages), self.llm.tokenizer)
        self.session.give_back(self.session.tokens, nonfinite=False)

    def save(self, name: str) -> str:
        """Save the session. A file is replaced only if the user agrees and it is a session."""
        from ..generation.session import check_target

        path = path_of(name)
        if os.path.lexists(path):
            check_target(path)
            if not self.source.ask(f"{path} exists. Replace it?"):
                raise UsageError(f"{path} exists and was not replaced; name another file")
        size = self.session.save(path, self.llm.model)
        return f"{path}: saved {sessions.contents(self.session)}, {size / 1e6:,.1f} MB"

    def load(self, name: str) -> str:
        """Continue the conversation of a file."""
        from ..generation.session import Session, check_model

        path = path_of(name)
        check_model(self.llm.model)
        session = Session.load(path, self.llm.model, self.llm.tokenizer)
        self.resume(session)
        return f"{path}: loaded {sessions.contents(session)}"


def path_of(name: str) -> Path:
    """The path of a typed name, which may begin with ~. Raises UsageError if it can't be one."""
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # an unknown user
        raise UsageError(f"{name}: {error}") from None
    if "\0" in name:
        raise UsageError(f"{name}: the name of a file can't contain NUL")
    try:
        path.exists()
    except OSError as error:  # too long, or in a folder without permission
        raise UsageError(f"{path}: {error.strerror or error}") from None
    return path


def fields(answer: str, completion: Completion | None) -> dict[str, Any]:
    """The JSON fields of an answer. If completion is None, it was interrupted: most fields are unknown."""
    if completion is not None:
        return answers.as_dict(completion)
    unknown = dict.fromkeys(("text", "tokens", "prompt_tokens", "finish_reason", "logprobs", "stats"))
    return {**unknown, "text": answer, "finish_reason": "interrupted"}


@dataclass(frozen=True)
class Command:
    """A chat command: the function that runs it and returns a message, its line in /help, and its argument."""

    run: Callable[[Chat, str], str]
    help: str
    argument: str = ""
    required: bool = False


COMMANDS = {
    "/help": Command(Chat.help, "show this list"),
    "/retry": Command(Chat.retry, "answer the last question again, with another random seed"),
    "/undo": Command(Chat.undo, "remove the last question and its answer"),
    "/clear": Command(Chat.clear, "start a new conversation with the same system message"),
    "/system": Command(
        Chat.set_system, "set the system message and start a new conversation; without TEXT, remove it", "TEXT"
    ),
    "/save": Command(Chat.save, "save the conversation; --load-session FILE also continues it", "FILE", True),
    "/load": Command(Chat.load, "continue a saved conversation", "FILE", True),
    "/exit": Command(Chat.leave, "leave (also Ctrl-D)"),
}

HELP = "\n".join(
    [
        *(f"{f'{name} {command.argument}':14} {command.help}" for name, command in COMMANDS.items()),
        'Paste a message of several lines, or put it between """ and """. Type // to begin a message with a slash.',
        "Ctrl-C stops an answer; the part shown so far stays in the conversation.",
    ]
)
