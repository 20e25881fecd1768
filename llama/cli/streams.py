"""Input and output of the command. A stream may be closed, full, endless, or a terminal."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import json
import logging
import os
import re
import stat
import sys
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


def show_log(quiet: bool) -> None:
    """Show the library's log on stderr, each record as one line; with --quiet only errors."""
    log, handler = logging.getLogger("llama"), logging.StreamHandler(sys.stderr)
    handler.format = lambda record: one_line(record.getMessage())  # type: ignore[method-assign]
    log.handlers = [handler]
    log.setLevel(logging.ERROR if quiet else logging.INFO)


def describe(error: BaseException) -> str:
    """Describe an error in one printable line."""
    message = one_line(str(error))
    if isinstance(error, LlamaError):
        return message
    if isinstance(error, MemoryError) or re.search("allocate memory|out of memory", message):
        return f"out of memory ({message[:200] or 'Python'}); use a smaller model, dtype or --max-seq-len"
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    return f"unexpected {type(error).__name__}: {message[:300]}; --debug shows the traceback"


# -------------------------------------------------------------------------------------------------------------- stdout
# What a terminal acts on: C0 with ESC, DEL, C1, and Unicode's bidirectional controls, after which a line reads
# differently from how it was written. The marks U+200E, U+200F and U+061C affect only their neighbours.
CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def write(text: str) -> None:
    """Write a text to stdout and flush. On a terminal, control characters are escaped; a pipe gets the text itself."""
    if sys.stdout.isatty():
        text = CONTROLS.sub(lambda found: found[0] if found[0] in "\n\t" else repr(found[0])[1:-1], text)
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
        text = CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    write_raw(text + "\n")


def show(args: argparse.Namespace, facts: dict[str, Any], text: str) -> None:
    """Write the result of a command: the facts with --json, otherwise the text."""
    write_json(facts) if args.json else write(text)


# ------------------------------------------------------------------------------------------------------- files, stdin
def write_file(path: Path, text: str) -> None:
    """Write a text to a file, completely or not at all. Raises UsageError, naming the file, if that fails."""
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def check_file(option: str, path: Path) -> None:
    """Raise UsageError if write_file would fail, before anything is computed for the file."""
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


def _read_stdin() -> str:
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
    if "-" not in (given, *files):
        with contextlib.suppress(OSError):  # standard input is closed
            if stat.S_ISFIFO(os.fstat(0).st_mode):
                info(args, "standard input is not part of the prompt; to read it, add -f -")
    parts = [read_text(Path(name)) for name in (["-", *files] if given == "-" else files)]
    if given is not None and os.path.isfile(given):
        info(args, f"the prompt is the text {given!r:.80}; --file reads the file of this name, -m loads a model")
    if given not in (None, "-"):  # bytes outside the locale's encoding are lone surrogates in it
        parts.insert(0, decode(given.encode(errors="surrogateescape"), "the prompt"))
    parts = [re.sub(r"\r?\n\Z", "", part) for part in parts]
    return "\n\n".join(part for part in parts if part)
