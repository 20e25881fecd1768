"""clearllama pull: fetch a model, a named one or one of the Hugging Face hub."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ..hub.named import DEFAULT
from . import arguments, streams

if TYPE_CHECKING:
    from ..hub.repository import HubId


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "pull",
        help="fetch a model",
        description="Fetch a model and print its path. A named one goes into the cache folder (CLEARLLAMA_CACHE). A"
        " repository of the Hugging Face hub goes into the hub's own cache (HF_HOME), and of it the files that are read"
        " here; afterwards -m ORG/NAME finds it there. Access tokens are taken from HF_TOKEN or 'hf auth login'.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name",
        nargs="?",
        default=DEFAULT,
        metavar="NAME",
        help="a known name, or ORG/NAME[@REVISION] on the Hugging Face hub, or ORG/NAME/FOLDER or ORG/NAME/FILE.gguf"
        f" of it (default: {DEFAULT})",
    )
    parser.add_argument("--meta", action="store_true", help="of a repository take Meta's own files, in original/")
    parser.add_argument("--force", action="store_true", help="fetch it even if it is here")
    arguments.add_debug(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..hub import named as hub
    from ..hub import repository

    wanted = None if args.name in hub.MODELS else repository.hub_id(args.name)
    with contextlib.nullcontext() if wanted is None else _leaving_at_once(wanted):
        path = hub.pull(args.name, force=args.force, check=True, meta=args.meta, quiet=args.quiet)
    streams.out(f"{path}\n")
    return 0


@contextlib.contextmanager
def _leaving_at_once(wanted: HubId) -> Iterator[None]:
    """The library waits for the files it is at before it lets an interrupt through, which can be hours: just end."""
    from ..hub import repository

    before = repository.unfinished(wanted)

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for path in repository.unfinished(wanted) - before:
            with contextlib.suppress(OSError):
                path.unlink()
        streams.tell(f"\nclearllama: interrupted; clearllama pull {wanted} goes on: files that are complete are kept")
        os._exit(128 + number)

    numbers = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
    previous = {number: signal.getsignal(number) for number in numbers}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
