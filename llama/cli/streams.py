"""Input and output of the command. A stream may be closed, full, endless, or a terminal."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import json
import logging
import os
import re
import stat
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import LlamaError, UsageError
from ..errors import one_line as one_line
from ..system.temporary import check_writable, write_atomically

LARGEST_INPUT = 2**28  # bytes read from standard input, which may be endless

Progress = Callable[[str, int, int], None]  # progress(what, done, total)


# -------------------------------------------------------------------------------------------------------------- stderr
def info(args: argparse.Namespace, line: str) -> None:
    """Write a progress line to stderr, unless --quiet is set. Control characters are escaped."""
    if not args.quiet:
        write_stderr(f"clearllama: {one_line(line)}")


def error(message: str) -> None:
    """Write an error line to stderr."""
    write_stderr(f"clearllama: error: {message}")


def write_stderr(text: str) -> None:
    """Write a text and a newline to stderr. Failures are ignored: they must not cost the output on stdout."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(quiet: bool, unit: str, **settings: Any) -> Iterator[Progress]:
    """Yield a function that draws a bar on stderr for each `what`, if stderr is a terminal.

    settings  for tqdm, such as leave=False to remove a bar when it is complete
    """
    bars: dict[str, Any] = {}

    def show(what: str, done: int, total: int) -> None:
        if quiet or not sys.stderr.isatty():
            return
        if what not in bars:
            from tqdm import tqdm

            bars[what] = tqdm(desc=what, initial=done, total=total, unit=unit, dynamic_ncols=True, **settings)
        bars[what].update(done - bars[what].n)
        if done == total:
            bars.pop(what).close()

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()


class LogHandler(logging.Handler):
    """Write the library's log records to stderr, each as one line."""

    def emit(self, record: logging.LogRecord) -> None:
        write_stderr(one_line(record.getMessage()))


def show_log(quiet: bool) -> None:
    """Show the library's log on stderr; with --quiet only errors."""
    log = logging.getLogger("llama")
    log.handlers = [LogHandler()]
    log.setLevel(logging.ERROR if quiet else logging.INFO)


def describe(error: BaseException) -> str:
    """Describe an error in one printable line."""
    message = one_line(str(error))
    if isinstance(error, LlamaError):
        return message
    refused = getattr(error, "errno", None) == errno.ENOMEM or "allocate memory" in message
    if isinstance(error, MemoryError) or refused or "out of memory" in message:
        return f"out of memory ({message[:200] or 'Python'}); use a smaller model, dtype or --max-seq-len"
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    return f"unexpected {type(error).__name__}: {message[:300]}; --debug shows the traceback"


# -------------------------------------------------------------------------------------------------------------- stdout
# Characters that change the direction of the text after them, so that a line reads differently from how it was written.
# The marks U+200E, U+200F and U+061C and the joiners affect only their neighbours; right-to-left text and emoji need
# them.
BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def _is_control(character: str) -> bool:
    """Whether a terminal would act on a character: C0 with ESC, DEL, C1, and Unicode's bidirectional controls."""
    return unicodedata.category(character) == "Cc" or character in BIDI


def write(text: str) -> None:
    """Write a text to stdout and flush. On a terminal, control characters are escaped; a pipe gets the text itself."""
    if sys.stdout.isatty():
        text = "".join(c if c in "\n\t" or not _is_control(c) else repr(c)[1:-1] for c in text)
    write_raw(text)


def write_raw(text: str) -> None:
    """Write a text to stdout unchanged and flush. An OSError names standard output as its file."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        error.filename = "standard output"
        raise


def write_json(value: Any) -> None:
    """Write a value as one line of JSON, escaped to ASCII where stdout is not UTF-8.

    With --json, a command writes one value to stdout and nothing else.
    """
    ascii_only = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    text = json.dumps(value, ensure_ascii=ascii_only, allow_nan=False)
    if sys.stdout.isatty():  # JSON escapes the control characters below U+0020, but not the others
        text = "".join(f"\\u{ord(c):04x}" if _is_control(c) else c for c in text)
    write_raw(text + "\n")


# ------------------------------------------------------------------------------------------------------- files, stdin
def write_file(path: Path, text: str) -> None:
    """Write a text to a file, completely or not at all. Raises UsageError, naming the file, if that fails."""
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def check_file(option: str, path: Path) -> None:
    """Raise UsageError if write_file would fail, before anything is computed for the file."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: expected a file in an existing folder")
    try:
        if path.is_file() or not path.exists():  # not a pipe
            check_writable(path.resolve().parent)
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot write there ({error.strerror or error}); choose another") from None


def read_text(path: Path) -> str:
    """Read a text file or a pipe as UTF-8. Raises UsageError, naming the file, if that fails."""
    if path.is_char_device():
        raise UsageError(f"{path} is a device, which may be endless; expected a file")
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def read_stdin() -> str:
    """Read all of stdin as UTF-8."""
    if sys.stdin is None:
        raise UsageError("standard input is closed; pass the text as an argument")
    data = sys.stdin.buffer.read(LARGEST_INPUT + 1)
    if len(data) > LARGEST_INPUT:
        raise UsageError(f"standard input has more than {LARGEST_INPUT >> 20} MiB or is endless; use a file")
    if not data:
        raise UsageError("standard input is empty; pass the text as an argument")
    return decode(data, "standard input")


def decode(data: bytes, source: str) -> str:
    """Decode UTF-8 with or without a byte order mark. Raises UsageError, which names the source and the wrong byte."""
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        raise UsageError(f"{source} is not UTF-8: {found}; convert it to UTF-8") from None


def read_prompt(args: argparse.Namespace) -> str:
    """The parts of a prompt, separated by blank lines: an argument or --prompt, then files; '-' is standard input.

    One line end at the end of each part is dropped, since editors and `echo` add it: \\n or \\r\\n.

    Raises UsageError if there is none, rather than wait at a terminal.
    """
    if args.text is not None and args.prompt is not None:
        raise UsageError("the prompt was given twice, as an argument and with --prompt; give it once")
    given: str | None = args.text if args.text is not None else args.prompt
    files: list[str] = args.file or []
    if given is None and not files:
        if sys.stdin is not None and sys.stdin.isatty():
            raise UsageError(f'no prompt: run clearllama {args.command} "your text", or clearllama chat')
        given = "-"
    named = [given, *files].count("-")
    if named > 1:
        raise UsageError("standard input was named twice; give '-' once")
    if named == 0 and _has_input():
        info(args, "standard input is not part of the prompt; to read it, add -f -")
    parts = [read_stdin() if name == "-" else read_text(Path(name)) for name in files]
    if given is not None:
        parts.insert(0, read_stdin() if given == "-" else _decoded(given))
    parts = [re.sub(r"\r?\n\Z", "", part) for part in parts]
    return "\n\n".join(part for part in parts if part)


def _has_input() -> bool:
    """Whether standard input is a pipe, or a file that is not empty."""
    try:
        status = os.fstat(0)
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_size > 0)


def _decoded(text: str) -> str:
    """An argument as text. Raises UsageError if its bytes are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:  # Python decodes bytes outside the locale's encoding to lone surrogates
        return decode(os.fsencode(text), "the prompt")  # the bytes may be valid UTF-8 in another locale
    return text
