"""The prompt of a command: an argument, files and standard input, separated by blank lines."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from pathlib import Path

from ..errors import UsageError
from . import streams


def add_prompt_options(parser: argparse.ArgumentParser, what: str = "prompt") -> None:
    """Add PROMPT, --prompt and --file. `what` is the word for it in the help."""
    parser.add_argument(
        "text", nargs="?", metavar="PROMPT", help=f"the {what}; without PROMPT, or if it is '-', standard input is read"
    )
    parser.add_argument("--prompt", "-p", metavar="PROMPT", help="the prompt, as an option instead of an argument")
    parser.add_argument(
        "--file",
        "-f",
        action="append",
        metavar="FILE",
        help=f"read the {what} from FILE; '-' is standard input; may be repeated. PROMPT and files are joined in this"
        " order, separated by blank lines (docs/guides/prompts.md)",
    )


def read_prompt(args: argparse.Namespace) -> str:
    """Read all parts of the prompt. Raises UsageError if there is none, rather than wait at a terminal."""
    if args.text is not None and args.prompt is not None:
        raise UsageError("the prompt was given twice, as an argument and with --prompt; give it once")
    given: str | None = args.text if args.text is not None else args.prompt
    files: list[str] = args.file or []
    if given is None and not files:
        if sys.stdin is not None and sys.stdin.isatty():
            raise UsageError(f'no prompt: run clearllama {args.command} "your text", or clearllama chat')
        given = "-"
    if [given, *files].count("-") > 1:
        raise UsageError("standard input was named twice; give '-' once")
    if "-" not in (given, *files) and has_input():
        streams.info(args, "standard input is not part of the prompt; to read it, add -f -")
    parts = [] if given is None else [streams.read_stdin() if given == "-" else decoded(given)]
    for name in files:
        parts.append(streams.read_stdin() if name == "-" else streams.read_text(Path(name)).removesuffix("\n"))
    return "\n\n".join(part for part in parts if part)


def has_input() -> bool:
    """Whether standard input is a pipe, or a file that is not empty."""
    try:
        status = os.fstat(0)
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_size > 0)


def decoded(text: str) -> str:
    """An argument as text. Raises UsageError if its bytes are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:  # Python decodes bytes outside the locale's encoding to lone surrogates
        return streams.decode(os.fsencode(text), "the prompt")  # the bytes may be valid UTF-8 in another locale
    return text
