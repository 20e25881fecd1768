"""List the models on this machine.

These are the default model, and the complete models in the hub's cache, which other programs share. Each line shows
the name that --model accepts, the size, the format and, from the file system, the date of the last use.
"""

from __future__ import annotations

import argparse
import time

from . import inspect
from .common import tables, terminal

OPTIONS = [("--json", bool, "write one JSON object, with paths and sizes in bytes")]
NEEDS_TORCH = False


def run(args: argparse.Namespace) -> None:
    from ..hub import local

    found = local.found()
    rows = [
        (model.name, inspect.text("_bytes", model.bytes), model.format, time.strftime("%F", time.localtime(model.used)))
        for model in found
    ]
    if not found:
        terminal.info("there is no model yet; clearllama pull downloads the default model")
    facts = {"models": [{**model._asdict(), "path": str(model.path)} for model in found]}
    terminal.show(args, facts, tables.table([("name", "size", "format", "last use"), *rows]) if rows else "")
