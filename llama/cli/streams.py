"""Reading from stdin and files, writing to stdout and stderr: what may be closed, full, endless or a terminal."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import stat
import sys
import unicodedata
from pathlib import Path
from typing import Any

from ..errors import LlamaError, UsageError
from ..errors import one_line as one_line
from ..system.limits import MIB, address_limit
from ..system.temporary import check_writable, write_atomically

LARGEST_INPUT = 2**28  # bytes that are read from a pipe, which may have no end


def say(args: argparse.Namespace, line: str) -> None:
    """A line on stderr, unless --quiet; what a file put into it can not steer a terminal."""
    if not args.quiet:
        tell(f"clearllama: {one_line(line)}")


def tell(text: str) -> None:
    """A text on stderr. A stderr that can't be written to must not cost the answer on stdout."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Teller(logging.Handler):
    """What the library has to say while it works, as lines of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(one_line(record.getMessage()))


def listen(quiet: bool) -> None:
    """Tell on stderr what the library says, or under --quiet nothing of it."""
    log = logging.getLogger("llama")
    log.handlers = [Teller()]
    log.setLevel(logging.ERROR if quiet else logging.INFO)


def describe(error: BaseException) -> str:
    """An error as one printable line."""
    told = one_line(str(error))
    refused = "Cannot allocate memory" in told or getattr(error, "errno", None) == errno.ENOMEM
    if isinstance(error, LlamaError):
        return told + (_limit() if refused else "")
    if isinstance(error, MemoryError) or refused or "can't allocate memory" in told or "out of memory" in told:
        return f"out of memory{f' ({told[:200]})' * bool(told)}; use a smaller model, dtype or --max-seq-len{_limit()}"
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    return f"unexpected {type(error).__name__}: {one_line(str(error))[:300]}; --debug shows where"


def _limit() -> str:
    """What to do about the limit that memory most likely ran out under, if there is one."""
    limit = address_limit()
    if limit is None:
        return ""
    return f"; the limit of this shell (ulimit -v) is {limit // MIB:,} MiB of addresses: raise it"


# They turn the order of what follows, so that a line reads otherwise than it was written. The marks U+200E, U+200F and
# U+061C and the joiners reach no further than their neighbours; right-to-left text and emoji need them.
BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def obeyed(character: str) -> bool:
    """True for what a terminal would act upon: C0 with ESC, DEL, C1, and Unicode's embeddings, overrides, isolates."""
    return unicodedata.category(character) == "Cc" or character in BIDI


def write(text: str) -> None:
    """Text to stdout at once. On a terminal, what it would obey is shown instead; a pipe gets the text as it is."""
    if sys.stdout.isatty():
        text = "".join(c if c in "\n\t" or not obeyed(c) else repr(c)[1:-1] for c in text)
    out(text)


def out(text: str) -> None:
    """Text to stdout as it is, at once. An OSError then names standard output as its file."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        error.filename = "standard output"
        raise


def write_json(value: Any) -> None:
    """One JSON value on one line; escaped to ASCII where stdout is not UTF-8."""
    ascii_only = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    text = json.dumps(value, ensure_ascii=ascii_only, allow_nan=False)
    if sys.stdout.isatty():  # JSON escapes the control characters below U+0020 by itself, but not these
        text = "".join(f"\\u{ord(c):04x}" if obeyed(c) else c for c in text)
    out(text + "\n")


def write_file(path: Path, text: str) -> None:
    """A text into a file, whole or not at all. Raises UsageError, naming the file, where that can't be done."""
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def check_file(option: str, path: Path) -> None:
    """Raise UsageError where write_file would fail, before anything is computed for it."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: expected a file in a folder that exists")
    if path.exists() and not path.is_file():  # a pipe
        return
    try:
        check_writable(path.resolve().parent)
    except OSError as error:
        raise UsageError(
            f"{option} {path}: a file can't be made there ({error.strerror or error}); name another"
        ) from None


def read_text(path: Path) -> str:
    """All of a text file or a pipe, which must be UTF-8."""
    try:
        if stat.S_ISCHR(path.stat().st_mode):
            raise UsageError(f"{path} is a device, which may have no end; expected a text file")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; expected a text file") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert it") from None


def read_input() -> bytes:
    """All of stdin. Raises UsageError where it does not end within LARGEST_INPUT bytes."""
    pieces, size = [], 0
    while piece := sys.stdin.buffer.read(2**20):
        pieces.append(piece)
        size += len(piece)
        if size > LARGEST_INPUT:
            raise UsageError(
                f"standard input holds more than {LARGEST_INPUT // 2**20} MiB, or has no end; no context holds that,"
                f" and many prompts can come from a file"
            )
    return b"".join(pieces)


def read_stdin() -> str:
    """All of stdin, as UTF-8, without the newline that `echo` adds."""
    if sys.stdin is None:
        raise UsageError("no prompt was given and standard input is closed")
    data = read_input()
    if not data:
        raise UsageError("no prompt: standard input is empty; give the text as an argument")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert it first"
        ) from None
