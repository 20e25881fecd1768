"""Remove a downloaded model.

NAME is the default model, which is in the cache folder, or ORG/NAME in the hub's cache: the whole repository, which
other programs may use too. Other files are never removed, nor is a symbolic link followed.
"""

from __future__ import annotations

import argparse
import shutil
import sys

from ..errors import UsageError
from . import inspect
from .common import terminal

OPTIONS = [
    ("name NAME", str, "the model (as 'clearllama list' names it, without a file)"),
    ("-y --yes", bool, "do not ask"),
]
NEEDS_TORCH = False


def run(args: argparse.Namespace) -> int:
    from ..hub import local

    path, size = local.removable(args.name)
    shared = "; other programs use this cache of the hub, too" if path.is_dir() else ""
    what = f"{path} ({inspect.text('_bytes', size)}){shared}"
    if args.yes:
        terminal.info(f"removing {what}")
    elif sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"to remove {what}, add --yes")
    else:
        terminal.write_stderr(f"remove {what}? [y/N]")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return 1
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return 0
