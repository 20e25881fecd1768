'''The turns of a chat: a message of one or more lines, or a /command.

A line is one turn; text pasted at a terminal is one turn, too. Lines between """ and """ are one message.
'''

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UsageError

QUOTES = '"""'


@dataclass(frozen=True)
class Turn:
    """One turn.

    text     the message without quotes, or the command with its slash; empty if nothing was entered
    command  whether it is a command
    entered  what was typed, for the history
    """

    text: str
    command: bool
    entered: str


def read_turn(read: Callable[[bool], str]) -> Turn:
    """Read the next turn.

    read  returns the next line, or several pasted ones; the argument is True for the first line of a turn. Raises
          EOFError at the end

    Raises EOFError if there is no turn left, UsageError if the input ends inside a block.
    """
    entered = read(True)
    line = entered.strip()
    ends = len(line) >= 2 * len(QUOTES) and line.endswith(QUOTES)
    if line.startswith(QUOTES) and (ends or "\n" not in line):
        lines = [entered]
        while not ends:
            try:
                lines.append(read(False))
            except EOFError:
                raise UsageError(
                    f"the message that begins with {QUOTES} has no end; expected {QUOTES} at the end of a line"
                ) from None
            ends = lines[-1].rstrip().endswith(QUOTES)
        entered = "\n".join(lines)
        return Turn(_without_empty_ends(entered.strip()[3:-3]), False, entered)
    if "\n" in line:  # pasted, so a slash at its start is part of the text
        return Turn(_without_empty_ends(entered), False, entered)
    if line.startswith("//"):
        return Turn(line[1:], False, entered)
    return Turn(line, line.startswith("/"), entered)


def _without_empty_ends(text: str) -> str:
    """The text without empty lines at its start and at its end. The indentation of the first line is kept."""
    lines = text.split("\n")
    filled = [number for number, line in enumerate(lines) if line.strip()]
    return "\n".join(lines[filled[0] : filled[-1] + 1]).rstrip() if filled else ""
