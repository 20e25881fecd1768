"""clearllama pull: download a model, by name or from the Hugging Face hub."""

from __future__ import annotations

import argparse

from ..hub import default_model
from . import arguments, streams


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "pull",
        description="Download a model and print its path. A named model goes into the cache folder (CLEARLLAMA_CACHE)."
        " From a repository on the hub, only the files that clearllama reads go into the hub's cache (HF_HOME)."
        " Other commands download -m ORG/NAME on first use; pull also updates an older copy. The access token comes"
        " from HF_TOKEN or 'hf auth login'.",
    )
    parser.add_argument(
        "name",
        nargs="?",
        default=default_model(),
        metavar="NAME",
        help="ORG/NAME[:QUANT][@REVISION], ORG/NAME/FOLDER or ORG/NAME/FILE.gguf on the Hugging Face hub; or a named"
        " model (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="download the model again even if it is in the cache")
    arguments.add_output_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..hub import models as hub

    streams.write_raw(f"{hub.pull(args.name, force=args.force, quiet=args.quiet)}\n")
    return 0
