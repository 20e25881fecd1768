"""Download a model and print its path.

The default model goes into the cache folder (CLEARLLAMA_CACHE). A repository on the hub goes into the hub's cache
(HF_HOME), without the files that clearllama does not read. Other commands download -m ORG/NAME on first use; pull also
updates an older copy. The access token comes from HF_TOKEN or 'hf auth login'.
"""

from __future__ import annotations

import argparse

from .common import arguments, terminal

OPTIONS = [
    *arguments.checkpoint("ORG/NAME[:QUANT][@REVISION] on the hub; also ORG/NAME/FOLDER or ORG/NAME/FILE.gguf"),
    ("--force", bool, "download again even if the cache has the model"),
]
NEEDS_TORCH = False


def run(args: argparse.Namespace) -> None:
    from ..hub import models as hub

    terminal.write_raw(f"{hub.pull(args.model, force=args.force, quiet=args.quiet)}\n")
