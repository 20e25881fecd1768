"""clearllama pull: download a model, by name or from the Hugging Face hub."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ..hub.named import DEFAULT
from . import arguments, signals, streams

if TYPE_CHECKING:
    from ..hub.repository import HubId


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "pull",
        help="download a model",
        description="Download a model and print its path. A named model goes into the cache folder (CLEARLLAMA_CACHE)."
        " From a repository on the Hugging Face hub, only the files that clearllama reads are downloaded, into its"
        " cache (HF_HOME); then use it with -m ORG/NAME. The access token comes from HF_TOKEN or 'hf auth login'.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name",
        nargs="?",
        default=DEFAULT,
        metavar="NAME",
        help="a known name, or on the Hugging Face hub: ORG/NAME[@REVISION], ORG/NAME/FOLDER or ORG/NAME/FILE.gguf"
        f" (default: {DEFAULT})",
    )
    parser.add_argument("--meta", action="store_true", help="download Meta's original files, in original/")
    parser.add_argument("--force", action="store_true", help="download again even if it is in the cache")
    arguments.add_output_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..hub import named as hub
    from ..hub import repository

    wanted = None if args.name in hub.MODELS else repository.hub_id(args.name)
    with contextlib.nullcontext() if wanted is None else _exiting_at_once(wanted):
        path = hub.pull(args.name, force=args.force, check=True, meta=args.meta, quiet=args.quiet)
    streams.write_raw(f"{path}\n")
    return 0


@contextlib.contextmanager
def _exiting_at_once(wanted: HubId) -> Iterator[None]:
    """Exit at once on a signal. huggingface_hub would first finish its current files, which can take hours."""
    from ..hub import repository

    before = repository.unfinished(wanted)

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for path in repository.unfinished(wanted) - before:
            with contextlib.suppress(OSError):
                path.unlink()
        streams.write_stderr(f"\nclearllama: interrupted; clearllama pull {wanted} resumes: complete files are kept")
        os._exit(128 + number)

    with signals.handled_by(leave):
        yield
