"""clearllama verify: check that a downloaded checkpoint is complete and undamaged."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError
from . import arguments, streams

if TYPE_CHECKING:
    from ..tools.verify import Finding, Progress


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "verify",
        help="check that a checkpoint is complete and undamaged",
        description="Check the file sizes, the checksums, the JSON files, the tokenizer, and whether the tensors match"
        " the configuration. The checksums are those of checklist.chk, those of the Hugging Face hub, and the CRC-32 of"
        " every record in .pth and .bin files. A checkpoint that can't be opened is checked as far as possible. Exit"
        " code 1 if a check failed.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="a folder in Meta's or Hugging Face's format, or a .gguf file")
    parser.add_argument(
        "--tensors", action="store_true", help="also read every weight and report NaN, infinity and all-zero matrices"
    )
    arguments.add_output_options(parser, json="one JSON object: path, format, ok, findings")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..tools.verify import format_of, verify

    path = locate(args.path)
    findings = []
    with _bar(args.quiet) as (progress, clear):
        for finding in verify(path, args.tensors, progress):
            findings.append(finding)
            if not args.json:
                clear()
                streams.write(streams.one_line(_line(finding)) + "\n")
    counts: Counter[str] = Counter(finding.status for finding in findings)
    if args.json:
        report = {"path": str(path), "format": format_of(path), "ok": not counts["fail"]}
        streams.write_json({**report, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        streams.write(_summary(counts) + "\n")
    return 1 if counts["fail"] else 0


def locate(name: str) -> Path:
    """The path of a file, a folder or a pulled model, which may be incomplete."""
    from ..hub import models as hub
    from ..hub import repository

    path = Path(name)
    if path.exists() or path.is_symlink():
        return path
    found = hub.find(name) or hub.from_meta(name)
    if found is None and (wanted := repository.hub_id(name)) and (root := repository.snapshot(wanted)):
        found = root / wanted.path
    if found is None:
        raise CheckpointError(
            f"there is no file or folder {name!r}, and no downloaded model of that name; {hub.EXPECTED}"
        )
    return found


def _line(finding: Finding) -> str:
    status = "FAIL" if finding.status == "fail" else finding.status
    return f"{status:<5} {finding.check:<9} {finding.item}: {finding.message}"


def _summary(counts: Counter[str]) -> str:
    warnings = f"{counts['warn']} warning{'s' * (counts['warn'] != 1)}"
    if counts["fail"]:
        return f"{counts['fail']} FAILED, {counts['ok']} ok, {warnings}"
    return f"nothing failed: {counts['ok']} ok, {warnings}"


@contextlib.contextmanager
def _bar(quiet: bool) -> Iterator[tuple[Progress, Callable[[], None]]]:
    """Show a progress bar if stderr is a terminal. Yields the functions that update it and that clear its line."""
    if quiet or not sys.stderr.isatty():
        yield lambda what, done, total: None, lambda: None
        return
    from tqdm import tqdm

    with tqdm(unit_scale=True, leave=False) as bar:

        def show(what: str, done: int, total: int) -> None:
            if bar.desc != f"{what}: ":
                bar.reset(total)
                bar.set_description(what, refresh=False)
            bar.update(done - bar.n)

        yield show, bar.clear
