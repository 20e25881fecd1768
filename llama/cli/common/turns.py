'''Read the turns of a chat, which are messages and /commands, from a terminal or a pipe.

A line is one turn. Lines between """ and """ are one turn. With prompt_toolkit, so is a text that is pasted at a
terminal.
'''

from __future__ import annotations

import contextlib
import glob
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import UsageError
from . import files

QUOTED = re.compile(r'\s*"""(.*)"""\s*', re.DOTALL)
BEGUN = re.compile(r'\s*"""(?!.*""")')  # the first line opens quotes and does not close them
LONGEST_LINE = 2**24  # bytes of a line in a pipe


def is_complete(text: str) -> bool:
    """Whether a text is a complete turn. If its first line opens quotes, the turn ends with a line that closes them."""
    return bool(QUOTED.fullmatch(text) or not BEGUN.match(text))


def parse_turn(entered: str) -> tuple[str, bool]:
    """Returns a turn and whether it is a command: a message without its quotes, or a command with its slash."""
    line, quoted = entered.strip(), QUOTED.fullmatch(entered)
    if quoted or "\n" in line:  # a slash at the start of a pasted text is part of the text
        text = quoted[1] if quoted else entered
        return re.sub(r"\A\s*\n", "", text).rstrip(), False  # drop empty lines around the text, keep its indentation
    if line.startswith("//"):
        return line[1:], False
    return line, line.startswith("/")


def read_lines(read_line: Callable[[str], str]) -> str:
    """Read a turn of one or more lines. `read_line` shows its argument as the prompt and returns a line."""
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
    return files.decode(line, "a line of standard input").rstrip("\r\n")


# -------------------------------------------------------------------------------------------------------- a terminal
def line_editor(commands: Sequence[str], history: Path | None) -> Callable[[], str]:
    """A function that reads a turn. Tab completes commands and files. With prompt_toolkit, a pasted text is one turn.

    history  the file of the input history, or None
    """

    def completed(line: str) -> list[str]:
        name, space, file = line.partition(" ")
        if not space:
            return [command for command in commands if command.startswith(line)]
        start = os.path.expanduser(file)
        found = sorted(glob.glob(f"{glob.escape(start)}*")) if name in ("/load", "/save") else []
        return [line + path[len(start) :] + "/" * os.path.isdir(path) for path in found]

    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import FileHistory
        from prompt_toolkit.output import create_output
    except ImportError:
        with contextlib.suppress(ImportError):  # Windows
            import readline

            readline.set_completer_delims("\n")
            readline.set_completer(lambda line, n: [*completed(line), None][n])
            readline.parse_and_bind("tab: complete")
        return partial(read_lines, _input)
    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=Condition(lambda: not is_complete(session.default_buffer.text)),
        prompt_continuation="... ",
        history=None if history is None else FileHistory(str(history)),
        completer=WordCompleter(lambda: completed(session.default_buffer.document.text_before_cursor), sentence=True),
        complete_while_typing=False,
        output=create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
        enable_suspend=True,
    )
    return session.prompt


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """Hide what the user types while an answer is written, since the terminal would show it within the answer.

    The typed lines are read as the next turns. NOFLSH keeps them when Ctrl-C stops the answer.
    """
    shown: Any = None
    with contextlib.suppress(Exception):  # Windows, or standard input is not a terminal
        import termios

        shown = termios.tcgetattr(sys.stdin)
        hidden = shown[3] & ~termios.ECHO | termios.NOFLSH
        termios.tcsetattr(sys.stdin, termios.TCSANOW, [*shown[:3], hidden, *shown[4:]])
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # the terminal may be gone, too
            termios.tcsetattr(sys.stdin, termios.TCSANOW, shown)


def _input(prompt: str) -> str:
    """A line, edited with readline if it was imported."""
    with contextlib.redirect_stdout(sys.stdout if sys.stdout.isatty() else sys.stderr):
        return input(prompt)
