"""The input of a chat: a keyboard or a pipe."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

from ..errors import UsageError
from . import streams
from .history import History

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]

LONGEST_TURN = 2**24  # bytes of a turn read from a pipe
LFLAG, CC = 3, 6  # indices of the local flags and the control characters in the result of tcgetattr

# What keys that are not characters send, such as arrows: CSI sequences, SS3 sequences, Alt with a key.
KEYS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|[^\x1b])?", re.DOTALL)


class Source(Protocol):
    """Where turns come from."""

    typed: bool  # whether a person types the turns and can answer questions

    def read(self, first: bool) -> str:
        """The next line without its line break, or several pasted lines. `first` as in turns.read_turn.

        Raises EOFError at the end, UsageError for a line that is too long or not UTF-8.
        """

    def ask(self, question: str) -> bool:
        """Ask the user. Returns whether the answer is yes; False if there is no user."""

    def remember(self, entered: str) -> None:
        """Add a turn to the history."""

    def hidden(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Hide what is typed inside the block. The function it yields must be called from time to time."""


class Pipe:
    """Lines of standard input, which is a pipe or a file."""

    typed = False

    def __init__(self) -> None:
        self._size = 0

    def read(self, first: bool) -> str:
        self._size = 0 if first else self._size
        line = sys.stdin.buffer.readline(LONGEST_TURN + 1 - self._size)
        self._size += len(line)
        if not line:
            raise EOFError
        if self._size > LONGEST_TURN:
            raise UsageError(
                f"a message on standard input has more than {LONGEST_TURN // 2**20} MiB or is endless; shorten it"
            )
        return streams.decode(line, "a line of standard input").rstrip("\r\n")

    def ask(self, question: str) -> bool:
        return False

    def remember(self, entered: str) -> None:
        pass

    @contextlib.contextmanager
    def hidden(self) -> Iterator[Callable[[], None]]:
        yield lambda: None


class Keyboard:
    """Lines typed at a terminal, with line editing and history if Python has readline."""

    typed = True

    def __init__(self, history: History):
        self.history = history
        self._ahead = ""  # typed during the last answer
        # input() uses it only if the output is a terminal, too.
        self._readline: Any = _start_readline(history) if sys.stdout.isatty() else None

    def read(self, first: bool) -> str:
        ahead, self._ahead = self._ahead, ""
        if ahead and self._readline is None:
            streams.write_stderr(f"clearllama: discarded input, typed during the answer: {streams.one_line(ahead)}")
        elif ahead:
            self._readline.set_startup_hook(lambda: self._readline.insert_text(ahead))
        try:
            return self._line("> " if first else "... ")
        finally:
            if self._readline is not None:
                self._readline.set_startup_hook()

    def ask(self, question: str) -> bool:
        while True:
            try:
                answer = self._line(f"{question} [y/n] ").strip().lower()
            except (EOFError, KeyboardInterrupt):
                streams.write_stderr("")
                return False
            if answer in ("y", "yes", "n", "no"):
                return answer[0] == "y"

    def remember(self, entered: str) -> None:
        if self.history.add(entered) and self._readline is not None:
            self._readline.add_history(entered)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[Callable[[], None]]:
        """Offer what is typed for editing at the next prompt, so that text pasted too early is not sent."""
        if termios is None:
            yield lambda: None
            return
        with hide_typing(sys.stdin.fileno()) as typed:
            try:
                yield typed.poll
            finally:
                typed.poll()
                self._ahead += typed_text(bytes(typed.data), sys.stdin.encoding)

    def _line(self, prompt: str) -> str:
        try:
            if sys.stdout.isatty():
                line = input(prompt)
            else:  # the prompt is not part of the output
                sys.stderr.write(prompt)
                sys.stderr.flush()
                if not (line := sys.stdin.readline()):
                    raise EOFError
                line = line.rstrip("\r\n")
            return streams.decode(line.encode(errors="surrogateescape"), "the line")
        except UnicodeDecodeError as error:
            raise UsageError(f"the line is not {error.encoding}; check the encoding of the terminal") from None


def _start_readline(history: History) -> Any:
    """The module readline, set up for a chat; None if Python lacks it."""
    try:
        import readline
    except ImportError:
        return None
    if "libedit" not in (readline.__doc__ or "") and os.environ.get("TERM", "dumb") != "dumb":
        readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted text is one line; Python turns it off
    readline.set_auto_history(False)  # a block of several lines is one entry
    for entry in history.entries:
        readline.add_history(entry)
    return readline


# ------------------------------------------------------------------------------------------- typing during an answer
class Typed:
    """A terminal whose input is read without being shown. `data` is what was typed."""

    def __init__(self, terminal: int):
        self.terminal, self.data = terminal, bytearray()
        self._before = termios.tcgetattr(terminal)

    def hide(self) -> None:
        """Turn off the terminal's echo and line editing. Line editing keeps only 4,095 bytes of a line."""
        if not self._in_foreground():
            return
        hidden = [*self._before[:CC], [*self._before[CC]]]
        hidden[LFLAG] = (hidden[LFLAG] & ~(termios.ECHO | termios.ICANON)) | termios.NOFLSH  # Ctrl-C discards nothing
        hidden[CC][termios.VMIN] = hidden[CC][termios.VTIME] = 0  # read() does not wait
        termios.tcsetattr(self.terminal, termios.TCSANOW, hidden)

    def show(self) -> None:
        """Restore the terminal."""
        if self._in_foreground():
            termios.tcsetattr(self.terminal, termios.TCSANOW, self._before)

    def poll(self) -> None:
        """Read what was typed. The terminal's buffer has 4 KB; if it is full, Ctrl-C is delayed, too."""
        with contextlib.suppress(OSError):  # the terminal is gone
            while self._in_foreground() and select.select([self.terminal], [], [], 0)[0]:
                if not (data := os.read(self.terminal, 2**16)):
                    return
                self.data += data

    def suspend(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTSTP: leave a usable terminal to the shell, and stop."""
        self.show()
        previous = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # returns after SIGCONT
        signal.signal(signal.SIGTSTP, previous)
        self.hide()  # also if the signal did not stop the process, for example without a shell

    def resume(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGCONT. The shell may have changed the terminal."""
        self.hide()

    def _in_foreground(self) -> bool:
        """Whether this process may use the terminal. In the background, a read or a change would stop it."""
        try:
            return os.tcgetpgrp(self.terminal) == os.getpgrp()
        except OSError:  # not the controlling terminal of this process
            return True


@contextlib.contextmanager
def hide_typing(terminal: int) -> Iterator[Typed]:
    """Don't show what is typed at a terminal inside the block, even if the process is stopped and continued.

    The terminal is restored at the end of the block, also after an exception.
    """
    typed = Typed(terminal)
    handlers = {signal.SIGTSTP: typed.suspend, signal.SIGCONT: typed.resume}
    previous = {number: signal.getsignal(number) for number in handlers}
    try:
        for number, handler in handlers.items():
            if previous[number] is not signal.SIG_IGN:
                signal.signal(number, handler)
        typed.hide()
        yield typed
    finally:
        try:
            typed.show()
        finally:  # a second Ctrl-C may have interrupted the first call
            typed.show()
        for number, old in previous.items():
            signal.signal(number, old)


def typed_text(data: bytes, encoding: str) -> str:
    """The text of typed bytes. Backspace and Ctrl-U edit the line; other keys without a character are left out.

    >>> typed_text(b"helo\\x7fl\\x1b[Ao\\n", "utf-8")
    'hello'
    """
    text: list[str] = []
    for character in KEYS.sub("", data.decode(encoding, errors="ignore").replace("\r", "\n")):
        if character in "\x7f\b":
            del text[-1:]
        elif character == "\x15":
            while text and text[-1] != "\n":
                text.pop()
        elif character in "\n\t" or not streams.is_control(character):
            text.append(character)
    return "".join(text).strip("\n")
