'''Have a conversation with an instruct model.

/help lists the commands of the chat. The chat keeps the KV cache, so a turn computes only its new tokens. If the
context is full, the oldest turns are dropped. In input from a pipe, each line is one message, and so is each block
between """ and """; the answers are written with an empty line between them.
'''

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LlamaError, TemplateError, UsageError
from ..sampling import OPTIONS as SAMPLING
from ..sampling import SamplingParams
from .common import arguments, loading, output, ranks, terminal, turns

if TYPE_CHECKING:
    from ..generation.session import Session
    from ..text import Llama

Message = dict[str, Any]

HELP = '''/help         show this list
/retry        answer the last question again, with another random seed
/undo         remove the last question and its answer
/clear        start a new conversation with the same system message
/system TEXT  start a new conversation with this system message, or with none
/set NAME X   change an option from the next answer on, as in /set temperature 0.2
/save FILE    save the conversation in a new file
/load FILE    continue a saved conversation, as --load-session FILE does
/exit         leave (also Ctrl-D)
Put a message of several lines between """ and """; with the extra chat, you can
paste it. Type // to begin a message with a slash. Lines typed during an answer
are the next messages. Ctrl-C stops an answer; the part shown so far stays in
the conversation. Tab completes commands and files. -n 2000, when the chat is
started, allows longer answers.'''


OPTIONS = [
    ("--system TEXT", str, "the system message"),
    ("--no-history", bool, "neither read nor write the history of your input"),
    ("--json", bool, "write one JSON object per answer (keys: generate --json)"),
    *arguments.generation(max_new_tokens=1024, fallback="temperature 0.6, top-p 0.9", argument=True),
]


def run(args: argparse.Namespace) -> int:
    if sys.stdin is None:
        raise UsageError("chat reads from standard input, but standard input is closed")
    options = arguments.sampling_options(args)
    output.check_options(args)
    llm, read_weights = loading.prepare(args)
    loading.set_chat_form(args, llm)
    if llm.chat_template is None and llm.chat_format is None:
        raise TemplateError("this model has no chat template: use clearllama generate, or name a --chat-format")
    output.check_model(args, llm, [0], {**options, "thoughts": llm.thoughts([0])})
    options["draft"] = loading.load_draft(args, llm)
    read_weights()
    if llm.chat_format is not None:
        terminal.info(f"chat format: {llm.chat_format}")
    if not llm.sampling and "temperature" not in options:
        options = {"temperature": 0.6, "top_p": 0.9, **options}
    session = output.load_session(args, llm)
    if session is not None and session.messages:
        terminal.info(f"continuing the conversation of {len(session.messages)} messages; /clear starts a new one")
    chat = Chat(args, llm, options, session)
    if not chat.piped:
        terminal.info("/help lists the commands, /exit or Ctrl-D leaves")
    with output.saving(args, lambda: chat.session, llm.model):
        return converse(args, chat)


def history_file(args: argparse.Namespace) -> Path | None:
    """The file of the input history; None with --no-history, or if the file can't be written."""
    import platformdirs

    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the home folder is not known
        if not args.no_history:
            folder = platformdirs.user_state_path("clearllama").expanduser()
            folder.mkdir(0o700, parents=True, exist_ok=True)
            os.close(os.open(folder / "chat-history", os.O_RDWR | os.O_CREAT, 0o600))  # fails for a folder, too
            return folder / "chat-history"
    return None


def converse(args: argparse.Namespace, chat: Chat) -> int:
    """Answer turns until the input ends or the user leaves. Returns 1 if a turn from a pipe failed."""
    read: Callable[[], str] = partial(turns.read_lines, turns.piped_line)
    if not chat.piped and (args.world is None or args.world.rank == 0):
        read = turns.line_editor(re.findall(r"^/\w+", HELP, re.MULTILINE), history_file(args))
    failed = False
    while not chat.left:
        text, is_command = "", False
        try:
            text, is_command = ranks.first(args, lambda: turns.parse_turn(read()))
            with turns.no_echo():
                if is_command:
                    chat.command(text)
                elif text:
                    chat.answer([*chat.session.messages, {"role": "user", "content": text}], chat.options)
        except EOFError:
            break
        except KeyboardInterrupt:  # Ctrl-C while typing, or before the answer began: the turn is discarded
            terminal.write_stderr("")
        except BrokenPipeError:  # the reader is gone, so no turn can follow
            raise
        except Exception as error:  # the conversation continues, unless the input can't be read
            unknown = not isinstance(error, LlamaError)
            if args.debug or (not text and chat.piped) or (unknown and (not text or args.world is not None)):
                raise
            failed = chat.piped
            message = terminal.describe(error)
            if args.json and text and not is_command:
                terminal.write_json({"prompt": text, "error": message})
            terminal.error(message)
    if not chat.piped:
        terminal.write_stderr("")
    return int(failed)


def system_of(messages: list[Message]) -> list[Message]:
    """The system message, if there is one."""
    return [message for message in messages[:1] if message["role"] == "system"]


class Chat:
    """One conversation: its session holds the messages and the KV cache."""

    def __init__(self, args: argparse.Namespace, llm: Llama, options: dict[str, Any], session: Session | None):
        from ..generation.session import Session

        self.args, self.llm, self.options = args, llm, options
        self.piped = ranks.first(args, lambda: not sys.stdin.isatty())  # turns are read from a pipe or a file
        self.separator = ""  # written before the text of the next answer
        self.left = False  # whether the user has left
        self.session = Session() if session is None else session
        if args.system is not None:
            self.session.messages = [{"role": "system", "content": args.system}]

    # ------------------------------------------------------------------------------------------------- questions
    def answer(self, messages: list[Message], options: dict[str, Any]) -> None:
        """Write the answer to messages that end with a question. Messages and answer become the conversation.

        An error leaves the conversation unchanged; after Ctrl-C, the shown part of the answer is kept.
        """
        messages, prompt = ranks.first(self.args, lambda: self.fit(messages))
        more = {"continues": False, "thoughts": self.llm.thoughts(prompt), **options}
        stream = partial(self.llm.stream_ids, prompt, session=self.session, **more)
        answer = output.write(self.args, messages[-1]["content"], stream, self.separator)
        self.separator = "\n" if self.piped else ""
        self.session.messages = [*messages, answer]

    def fit(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """The messages and their prompt ids, without the oldest turns if the context is full.

        The context counts as full if the room after the prompt is less than max_new_tokens and less than an eighth of
        the context. Then as few of the oldest turns as possible are dropped, so that the room is max_new_tokens or a
        quarter of the context. The last question is never dropped. If this question alone is too long, nothing is
        dropped, and the model refuses the prompt.
        """
        prompt, context = self.llm.encode_chat(messages), self.llm.model.max_seq_len

        def is_roomy(prompt: list[int], share: int) -> bool:
            return len(prompt) + min(self.options["max_new_tokens"], context // share) <= context

        starts = [at for at, message in enumerate(messages) if message["role"] == "user"][1:]
        if is_roomy(prompt, 8) or not starts:
            return messages, prompt
        for start in starts:
            shorter = [*system_of(messages), *messages[start:]]
            fewer = self.llm.encode_chat(shorter)
            if is_roomy(fewer, 4):
                break
        if len(fewer) >= context:
            return messages, prompt
        count = starts.index(start) + 1
        turns = f"{count} oldest turn{'s' * (count > 1)}"
        terminal.write_stderr(f"clearllama: dropped the {turns}, the context is full")  # also with --quiet
        return shorter, fewer

    # -------------------------------------------------------------------------------------------------- commands
    def command(self, line: str) -> None:
        """Run a /command. Raises UsageError for an unknown one or a wrong argument."""
        from ..generation.session import Session

        line = re.sub(r"^/set (?=system\b)", "/", line)  # Ollama's name
        name, _, rest = line.removeprefix("/").partition(" ")
        match f"/{name}", rest.strip():
            case "/help" | "/?", "":
                reply = HELP
            case "/retry", "":
                if not {**self.llm.sampling, **self.options}.get("temperature", 0):
                    terminal.info("temperature is 0: the seed has no effect; --temperature 0.7 varies answers")
                other_seed = {name: value for name, value in self.options.items() if name != "seed"}
                self.answer(self.session.messages[: self.last_question() + 1], other_seed)
                reply = ""
            case "/undo", "":
                reply = self.undo()
            case "/clear", "":
                reply = self.restart(system_of(self.session.messages))
            case "/system", text:
                # Answers to the old system message do not belong to a conversation with the new one.
                reply = self.restart([{"role": "system", "content": text}] if text else [])
            case "/save", file if file:
                path = Path(os.path.expanduser(file))
                if os.path.lexists(path):
                    raise UsageError(f"{path}: File exists; name another file (--save-session replaces a file)")
                reply = output.save_session(self.session, path, self.llm.model)
            case "/load", file if file:
                loaded = Session.load(os.path.expanduser(file), self.llm.model)
                # a session saved by generate has no messages
                loaded.messages = loaded.messages or system_of(self.session.messages)
                self.session, reply = loaded, output.describe_loaded(file, loaded)
            case "/save" | "/load" as command, "":
                raise UsageError(f"{command} needs a file: {command} FILE")
            case "/exit" | "/quit" | "/bye", "":
                self.left, reply = True, ""
            case "/set", setting:
                reply = self.set(setting.removeprefix("parameter "))  # as Ollama says
            case _:
                raise UsageError(
                    f"unknown command {line!r:.80}; /help lists the commands; // begins a message with a slash"
                )
        if reply:
            terminal.write_stderr("\n".join(map(terminal.one_line, reply.split("\n"))))

    def set(self, setting: str) -> str:
        """Change an option, given as "temperature 0.2". Raises UsageError for a wrong name or value."""
        name, _, value = setting.replace("_", "-").partition(" ")
        option = arguments.SYNONYMS.get(f"--{name}", name).removeprefix("--").replace("-", "_")
        names = [name for name, field in SAMPLING.items() if field.metadata["range"]]
        try:
            changed: dict[str, Any] = {option: int(value) if value.isdecimal() else float(value)}
        except ValueError:
            changed = {}
        if not changed.keys() & names:
            raise UsageError(f"expected /set NAME NUMBER, got /set {setting:.80}; the names are {', '.join(names)}")
        SamplingParams(**changed)  # checks the range
        self.options = {**self.options, **changed}
        return f"from the next answer on, {option} is {changed[option]}"

    def restart(self, system: list[Message]) -> str:
        """Start a new conversation."""
        self.session.forget()
        self.session.messages = system
        return f"started a new conversation {'with' if system else 'without'} a system message"

    def undo(self) -> str:
        """Remove the last question and its answer, also from the cache."""
        del self.session.messages[self.last_question() :]
        if self.session.messages == system_of(self.session.messages):  # some templates need a question
            self.restart(system_of(self.session.messages))
        else:
            self.session.reuse(self.llm.model, self.llm.encode_chat(self.session.messages))
            self.session.give_back(self.session.tokens, nonfinite=False)
        return "removed the last question and its answer"

    def last_question(self) -> int:
        """The index of the last user message. Raises UsageError if there is none."""
        roles = [message["role"] for message in self.session.messages]
        if "user" not in roles:
            raise UsageError("there is no question yet; type a message first")
        return len(roles) - 1 - roles[::-1].index("user")
