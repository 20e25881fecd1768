"""Check that a checkpoint is complete and undamaged.

List the files, compare checksums, and open the checkpoint: its tensors must match the
configuration. The checksums are those of the Hugging Face hub, of checklist.chk, and the CRC-32 of every record in
.pth and .bin files. Exit code 1 if a check failed.
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
