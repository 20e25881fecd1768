"""Reading from stdin and files, writing to stdout and stderr: what may be closed, full, endless or a terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import stat
import sys
import unicodedata
from pathlib import Path
from typing import Any

from ..errors import LlamaError, UsageError


def say(args: argparse.Namespace, line: str) -> None:
    """A line on stderr, unless --quiet."""
    if not args.quiet:
        tell(f"clearllama: {line}")


def tell(text: str) -> None:
    """A text on stderr. A stderr that can't be written to must not cost the answer on stdout."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def describe(error: BaseException) -> str:
    """An error as one printable line."""
    if isinstance(error, LlamaError):
        return one_line(str(error))
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error):
        return f"out of memory ({one_line(str(error))[:200]}); use a smaller model, dtype or --max-seq-len"
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    return f"unexpected {type(error).__name__}: {one_line(str(error))[:300]}; --debug shows where"


def one_line(text: str) -> str:
    """A text without line breaks and control characters."""
    return "".join(c if c.isprintable() else " " if c in "\r\n\t" else repr(c)[1:-1] for c in text)


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
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """One JSON value on one line; escaped to ASCII where stdout is not UTF-8."""
    ascii_only = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    text = json.dumps(value, ensure_ascii=ascii_only, allow_nan=False)
    if sys.stdout.isatty():  # JSON escapes the control characters below U+0020 by itself, but not these
        text = "".join(f"\\u{ord(c):04x}" if obeyed(c) else c for c in text)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def write_file(path: Path, text: str) -> None:
    """A text into a file. Raises UsageError, naming the file, where that can't be done."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


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


def read_stdin() -> str:
    """All of stdin, as UTF-8, without the newline that `echo` adds."""
    if sys.stdin is None:
        raise UsageError("no prompt was given and standard input is closed")
    data = sys.stdin.buffer.read()
    if not data:
        raise UsageError("no prompt: standard input is empty; give the text as an argument")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert it first"
        ) from None
