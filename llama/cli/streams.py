"""Input and output of the command. A stream may be closed, full, endless, or a terminal."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
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
    refused = "Cannot allocate memory" in message or getattr(error, "errno", None) == errno.ENOMEM
    if isinstance(error, LlamaError):
        return message + (_limit_hint() if refused else "")
    if isinstance(error, MemoryError) or refused or "can't allocate memory" in message or "out of memory" in message:
        detail = f" ({message[:200]})" if message else ""
        return f"out of memory{detail}; use a smaller model, dtype or --max-seq-len{_limit_hint()}"
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    return f"unexpected {type(error).__name__}: {message[:300]}; --debug shows the traceback"


def _limit_hint() -> str:
    """Name the limit on the address space, the likely cause when memory is refused; empty without a limit."""
    try:
        import resource
    except ImportError:  # Windows
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"; this shell limits the address space to {limit // 2**20:,} MiB (ulimit -v): raise the limit"


# -------------------------------------------------------------------------------------------------------------- stdout
# Characters that change the direction of the text after them, so that a line reads differently from how it was written.
# The marks U+200E, U+200F and U+061C and the joiners affect only their neighbours; right-to-left text and emoji need
# them.
BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def is_control(character: str) -> bool:
    """Whether a terminal would act on a character: C0 with ESC, DEL, C1, and Unicode's bidirectional controls."""
    return unicodedata.category(character) == "Cc" or character in BIDI


def write(text: str) -> None:
    """Write a text to stdout and flush. On a terminal, control characters are escaped; a pipe gets the text itself."""
    if sys.stdout.isatty():
        text = "".join(c if c in "\n\t" or not is_control(c) else repr(c)[1:-1] for c in text)
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
    """Write a value as one line of JSON. With --json, a command writes one value to stdout and nothing else."""
    write_raw(json_text(value) + "\n")


def json_text(value: Any) -> str:
    """A value as JSON for stdout: escaped to ASCII where stdout is not UTF-8."""
    ascii_only = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    text = json.dumps(value, ensure_ascii=ascii_only, allow_nan=False)
    if sys.stdout.isatty():  # JSON escapes the control characters below U+0020, but not the others
        text = "".join(f"\\u{ord(c):04x}" if is_control(c) else c for c in text)
    return text


# --------------------------------------------------------------------------------------------------------------- files
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
    if path.exists() and not path.is_file():  # a pipe
        return
    try:
        check_writable(path.resolve().parent)
    except OSError as error:
        raise UsageError(
            f"{option} {path}: cannot create a file there ({error.strerror or error}); choose another"
        ) from None


def read_file(path: Path, expected: str) -> bytes:
    """Read a file or a pipe. Raises UsageError, naming what was `expected`, for a device or an unreadable file."""
    try:
        if stat.S_ISCHR(path.stat().st_mode):
            raise UsageError(f"{path} is a device, which may be endless; expected {expected}")
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; expected {expected}") from None


def read_text(path: Path) -> str:
    """Read a text file or a pipe as UTF-8."""
    return decode(read_file(path, "a text file"), str(path))


def decode(data: bytes, source: str) -> str:
    """Decode UTF-8. Raises UsageError, which names the source and the first wrong byte."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert it to UTF-8"
        ) from None


# --------------------------------------------------------------------------------------------------------------- stdin
def read_stdin_bytes() -> bytes:
    """Read all of stdin. Raises UsageError if there are more than LARGEST_INPUT bytes."""
    pieces, size = [], 0
    while piece := sys.stdin.buffer.read(2**20):
        pieces.append(piece)
        size += len(piece)
        if size > LARGEST_INPUT:
            raise UsageError(
                f"standard input has more than {LARGEST_INPUT // 2**20} MiB or is endless, which is too long for"
                " any context; shorten it, or put many prompts into a file (--prompts FILE)"
            )
    return b"".join(pieces)


def read_stdin() -> str:
    """Read all of stdin as UTF-8, without the newline that `echo` adds."""
    if sys.stdin is None:
        raise UsageError("no prompt: no argument was given and standard input is closed")
    data = read_stdin_bytes()
    if not data:
        raise UsageError("no prompt: standard input is empty; pass the text as an argument")
    return decode(data, "standard input").removesuffix("\n")
