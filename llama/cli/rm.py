"""Remove a downloaded model.

NAME is the default model, which is in the cache folder, or a model in the hub's cache, which other programs may also
use. There, ORG/NAME removes the whole repository, and ORG/NAME:QUANT or ORG/NAME/FILE.gguf removes one of its GGUF
models. Other files are never removed. A symbolic link out of the cache is not followed.
"""

from __future__ import annotations

import argparse
import shutil
import sys

from ..errors import UsageError
from . import inspect
from .common import terminal

OPTIONS = [
    ("name NAME", str, "the model (as 'clearllama list' names it)"),
    ("-y --yes", bool, "do not ask"),
]
NEEDS_TORCH = False


def run(args: argparse.Namespace) -> int:
    from ..hub import local

    paths, size, shared = local.removable(args.name)
    more = "; other programs use this cache of the hub, too" if shared else ""
    what = f"{paths[0]} ({inspect.text('_bytes', size)}){more}"
    if args.yes:
        terminal.info(f"removing {what}")
    elif sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"to remove {what}, add --yes")
    else:
        terminal.write_stderr(f"remove {what}? [y/N]")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return 1
    for path in paths:
        path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
    return 0
