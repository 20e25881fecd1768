"""clearllama pull: fetch a named model into the cache folder."""

from __future__ import annotations

import argparse
import sys

from ..hub import DEFAULT
from . import common


def add_parser(commands: common.Subparsers) -> None:
    parser = commands.add_parser(
        "pull",
        help="fetch a model",
        description="Fetch a named model into the cache folder (CLEARLLAMA_CACHE) and print its path.",
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", default=DEFAULT, metavar="NAME", help=f"default: {DEFAULT}")
    parser.add_argument("--force", action="store_true", help="fetch it even if it is here and its sha256 is right")
    common.add_debug(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import hub

    path = hub.pull(args.name, force=args.force, check=True)
    sys.stdout.write(f"{path}\n")
    return 0
