'''The turns of a chat, typed at a terminal or read from a pipe: messages of one or more lines, and /commands.

A line is one turn; text pasted at a terminal is one, too. Lines between """ and """ are one message.
'''

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..errors import UsageError
from . import streams

QUOTED = re.compile(r'\s*"""(.*)"""\s*', re.DOTALL)
BEGUN = re.compile(r'\s*"""(?!.*""")')  # quotes that the first line opens and does not close
LONGEST_LINE = 2**24  # bytes of a line in a pipe


def is_complete(text: str) -> bool:
    """Whether a text is a complete turn. If its first line opens quotes, the turn ends with a line that closes them."""
    return bool(QUOTED.fullmatch(text) or not BEGUN.match(text))


def parse_turn(entered: str) -> tuple[str, bool]:
    """The message without its quotes, or the command with its slash; and whether it is a command."""
    line, quoted = entered.strip(), QUOTED.fullmatch(entered)
    if quoted or "\n" in line:  # a slash at the start of a pasted text is part of the text
        text = quoted[1] if quoted else entered
        return re.sub(r"\A\s*\n", "", text).rstrip(), False  # no empty lines around it; its indentation is kept
    if line.startswith("//"):
        return line[1:], False
    return line, line.startswith("/")


def read_lines(read_line: Callable[[str], str]) -> str:
    """A turn of one or more lines. `read_line` gets a prompt and returns a line."""
    lines = [read_line("> ")]
    while not is_complete("\n".join([lines[0], *lines[1:][-1:]])):  # the first and the last line decide
        try:
            lines.append(read_line("... "))
        except EOFError:
            raise UsageError('the message that begins with """ has no end; expected """') from None
    return "\n".join(lines)


def piped_line(prompt: str) -> str:
    """The next line of standard input, which is a pipe or a file. Raises EOFError at the end."""
    line = sys.stdin.buffer.readline(LONGEST_LINE + 1)
    if not line:
        raise EOFError
    if len(line) > LONGEST_LINE:
        raise UsageError(f"a line of standard input has more than {LONGEST_LINE >> 20} MiB or is endless")
    return streams.decode(line, "a line of standard input").rstrip("\r\n")


# -------------------------------------------------------------------------------------------------------- a terminal
def line_editor(commands: Sequence[str], history: Path | None) -> Callable[[], str]:
    """A function that reads a turn: with prompt_toolkit if it is installed, else with readline. Tab completes commands.

    history  the folder of the input history, or None
    """
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import FileHistory
        from prompt_toolkit.output import create_output
    except ImportError:
        return partial(read_lines, _readline(commands, history))
    if history is not None:
        history /= "chat-history"
        history.touch(0o600)
    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=Condition(lambda: not is_complete(session.default_buffer.text)),
        prompt_continuation="... ",
        history=None if history is None else FileHistory(str(history)),
        completer=WordCompleter([*commands], sentence=True),
        complete_while_typing=False,
        output=create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
        enable_suspend=True,
    )
    return session.prompt


def _readline(commands: Sequence[str], history: Path | None) -> Callable[[str], str]:
    """An editor for one line, with readline if Python has it."""
    save: Callable[[], object] = bool
    with contextlib.suppress(ImportError):  # Windows has no readline
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one turn
        readline.parse_and_bind("tab: complete")
        readline.set_completer_delims("\n")
        readline.set_completer(lambda text, n: [*(name for name in commands if name.startswith(text)), None][n])
        if history is not None:
            path = history / "chat-history.readline"
            with contextlib.suppress(FileNotFoundError):
                readline.read_history_file(path)
            readline.set_history_length(1000)
            save = partial(readline.write_history_file, path)

    def read_line(prompt: str) -> str:
        with contextlib.redirect_stdout(sys.stdout if sys.stdout.isatty() else sys.stderr):
            line = input(prompt)
        save()
        return line

    return read_line
