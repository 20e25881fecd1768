"""Check that a checkpoint is complete and undamaged.

List the files, compare checksums, and open the checkpoint: its tensors must match the
configuration. The checksums are those of the Hugging Face hub, of checklist.chk, and the CRC-32 of every record in
.pth and .bin files. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import CheckpointError
from . import arguments, tables


def add_options(parser: argparse.ArgumentParser) -> None:
    arguments.add(
        parser,
        ("path", "PATH", "a folder in Meta's or Hugging Face's format, or a .gguf file"),
    )
    arguments.add_output_options(parser, json="one JSON object: path, ok, findings")


def run(args: argparse.Namespace) -> int:
    from ..tools.verify import verify

    path = locate(args.path)
    return tables.report(verify(path), args.json, {"path": str(path)})


def locate(name: str) -> Path:
    """The path of a file, a folder or a pulled model, which may be incomplete."""
    from ..hub import models as hub
    from ..hub import repository

    path = Path(name)
    if path.exists() or path.is_symlink():
        return path
    found, wanted = hub.find(name) or hub.from_meta(name), repository.hub_id(name)
    if found is None and wanted and (root := repository.snapshot(wanted)):
        return root / wanted.path
    if found is None:
        raise CheckpointError(f"there is no file, folder or downloaded model {name!r}; {hub.EXPECTED}")
    return found
