"""Read and write files and standard input as text. A source may be missing, endless, a pipe or a terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import stat
import sys
from pathlib import Path

from ...errors import UsageError
from ...system.temporary import check_writable, write_atomically
from . import terminal

LARGEST_INPUT = 2**28  # bytes read from standard input, which may be endless
PATIENCE = 1.0  # seconds without input from a pipe, after which the command reports that it waits


def write_file(path: Path, text: str) -> None:
    """Write a text to a file, completely or not at all. If that fails, raises UsageError, which names the file."""
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def check_file(option: str, path: Path) -> None:
    """Raise UsageError if write_file would fail; called before the content of the file is computed."""
    if str(path) == "-" or path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: expected a file in an existing folder")
    try:
        if path.is_file() or not path.exists():  # not a pipe
            check_writable(path.resolve().parent)
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot write there ({error.strerror or error}); choose another") from None


def read_text(path: Path) -> str:
    """Read a file or a pipe as UTF-8; '-' is standard input. Raises UsageError, which names the source."""
    if str(path) == "-":
        return _read_stdin()
    if path.is_char_device():
        raise UsageError(f"{path} is a device, which may be endless; expected a file")
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        hint = "; expected the name of a file, not a text" if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"{path}: {error.strerror or error}{hint}") from None


def _read_stdin(required: bool = True) -> str:
    if sys.stdin is None:
        raise UsageError("standard input is closed; pass the text as an argument")
    data = sys.stdin.buffer.read(LARGEST_INPUT + 1)
    if len(data) > LARGEST_INPUT:
        raise UsageError(f"standard input has more than {LARGEST_INPUT >> 20} MiB or is endless; use a file")
    if required and not data:
        raise UsageError("standard input is empty; pass the text as an argument")
    return decode(data, "standard input")


def _read_piped() -> str:
    """Read standard input if it is a pipe or a file, and report this on stderr; otherwise return ''.

    A file that was already read in part is left alone: a shell's loop around this command may be reading it.
    """
    text = ""
    with contextlib.suppress(OSError):  # standard input is closed
        about = os.fstat(0)
        if stat.S_ISFIFO(about.st_mode):
            if os.name == "posix" and not select.select([0], [], [], PATIENCE)[0]:
                terminal.info("waiting for standard input, a pipe; < /dev/null leaves it out")
            text = _read_stdin(required=False)
        elif stat.S_ISREG(about.st_mode) and (at := os.lseek(0, 0, os.SEEK_CUR)) < about.st_size:
            if at:
                terminal.info("standard input is not part of the prompt, since a part of the file was read before")
            else:
                text = _read_stdin(required=False)
    if text:
        terminal.info(f"standard input ({len(text):,} characters) ends the prompt; < /dev/null leaves it out")
    return text


def decode(data: bytes, source: str) -> str:
    """Decode UTF-8 with or without a byte order mark. Raises UsageError, which names the source and the wrong byte."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        raise UsageError(f"{source} is not UTF-8: {found}; convert it to UTF-8") from None


def read_prompt(args: argparse.Namespace) -> str:
    """Read the parts of a prompt: an argument or --prompt, files, standard input. Blank lines separate the parts.

    Standard input stands at the place of '-'. Without '-', it comes last, if it is a pipe or a file. The last line end
    of each part (\\n or \\r\\n) is dropped, since editors and `echo` add one.

    Raises UsageError if there is no part, rather than wait for input at a terminal.
    """
    given: str | None = args.prompt
    files: list[str] = args.file
    if given is None and not files:
        if sys.stdin is not None and sys.stdin.isatty():
            raise UsageError(f'no prompt: run clearllama {args.command} "your text", or clearllama chat')
        given = "-"
    parts = [read_text(Path(name)) for name in (["-", *files] if given == "-" else files)]
    if "-" not in (given, *files) and sys.stdin is not None:
        parts.append(_read_piped())
    if given is not None and os.path.isfile(given):
        hint = "--file reads the file of this name, -m loads a model"
        terminal.info(f"the prompt is the text {given!r:.80}; {hint}")
    if given not in (None, "-"):  # in an argument, bytes outside the locale's encoding are lone surrogates
        parts.insert(0, decode(given.encode(errors="surrogateescape"), "the prompt"))
    parts = [re.sub(r"\r?\n\Z", "", part) for part in parts]
    return "\n\n".join(part for part in parts if part)
