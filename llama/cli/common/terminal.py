"""Output of the command: text or JSON on stdout; log, bars and errors on stderr. A stream may be closed or full."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import LlamaError
from ...errors import one_line as one_line

# The two spellings of an option in a message of the library: dtype='float32' (--dtype float32)
SPELLINGS = re.compile(r"(?:llm\.)?(\w+)((?: = |=)\S+|\(\w*\))? \((--([\w-]+)(?: [^()]*)?)\)")
LOG = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]  # progress(what, done, total)


# -------------------------------------------------------------------------------------------------------------- stderr
def show_log(quiet: bool) -> None:
    """Show the library's log on stderr, one line for each record; with --quiet, show only errors."""
    log, handler = logging.getLogger("llama"), logging.Handler()
    handler.emit = lambda record: write_stderr(one_line(as_options(record.getMessage())))  # type: ignore[method-assign]
    log.handlers = [handler]
    log.setLevel(logging.ERROR if quiet else logging.INFO)


def info(line: str) -> None:
    """Write a progress line to the log."""
    LOG.info("clearllama: %s", line)


def error(message: str) -> None:
    """Write an error line to stderr."""
    write_stderr(f"clearllama: error: {message}")


def write_stderr(text: str) -> None:
    """Write a text and a newline to stderr. A failure is ignored, so that the output on stdout is still written."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def note(text: str) -> Iterator[None]:
    """Show a text on stderr while the block runs, if stderr is a terminal and the log is shown."""

    def show(text: str) -> None:
        if LOG.isEnabledFor(logging.INFO) and sys.stderr.isatty():
            with contextlib.suppress(OSError):
                print(text, end="\r", file=sys.stderr, flush=True)

    show(text)
    yield
    show(" " * len(text))


@contextlib.contextmanager
def progress(unit: str, **settings: Any) -> Iterator[Progress]:
    """Yield a function that draws a bar on stderr for each `what`, if stderr is a terminal and the log is shown.

    settings  for tqdm, such as leave=False to remove a bar when it is complete
    """
    bars: dict[str, Any] = {}

    def show(what: str, done: int, total: int) -> None:
        if not (LOG.isEnabledFor(logging.INFO) and sys.stderr.isatty()):
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


def as_options(message: str) -> str:
    """The message with the command's spelling of each option only, without Python's spelling."""
    return SPELLINGS.sub(lambda x: x[3] if x[2] or x[1].replace("_", "-") == x[4] else x[0], message)


def describe(error: BaseException) -> str:
    """Describe an error in one printable line."""
    message = as_options(one_line(str(error)))
    if isinstance(error, LlamaError):
        return message
    if isinstance(error, MemoryError) or re.search("allocate memory|out of memory", message):
        return f"out of memory ({message[:200] or 'Python'}); use a smaller model, dtype or --max-seq-len"
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    return f"unexpected {type(error).__name__}: {message[:300]}; --debug shows the traceback"


# -------------------------------------------------------------------------------------------------------------- stdout
# Control characters of a terminal: C0 with ESC, DEL, C1, and Unicode's bidirectional controls, which change the order
# in which a line is shown. The marks U+200E, U+200F and U+061C are allowed: they affect only their neighbours.
CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def write(text: str, faint: bool = False) -> None:
    """Write a text to stdout and flush. On a terminal, control characters are escaped; a pipe gets the text itself.

    faint  write the text in the terminal's faint style
    """
    if sys.stdout.isatty():
        text = CONTROLS.sub(lambda found: found[0] if found[0] in "\n\t" else repr(found[0])[1:-1], text)
    write_raw(f"\x1b[2m{text}\x1b[22m" if faint else text)


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
