"""Check that a checkpoint is complete and undamaged.

List the files, compare checksums, and open the checkpoint, whose tensors must match the configuration. The checksums
come from the Hugging Face hub, from checklist.chk, and from the records (CRC-32) of .pth and .bin files. Exit code 1 if
a check failed.
"""

from __future__ import annotations

import argparse

from .common import arguments, tables

OPTIONS = [
    *arguments.checkpoint("folder, .gguf file or downloaded model; folders are in Meta's or Hugging Face's format"),
    ("--json", bool, "write one JSON object: path, ok, findings"),
]


def run(args: argparse.Namespace) -> int:
    from ..hub import resolve
    from ..tools.verify import verify

    path = resolve(args.model, fetch=False)
    return tables.report(verify(path), args.json, {"path": str(path)})
