"""clearllama inspect: describe a checkpoint from its headers, without reading its weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ..hub import default_model
from . import arguments, streams, tables

LONGEST = 100  # characters of a list on one line
UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3}


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "inspect",
        description="Show the family, architecture, RoPE settings, files, tokenizer, stop ids and memory of a"
        " checkpoint, and every mismatch between its configuration and its tensors. Weights are not read. Exit code 1"
        " on a mismatch.",
    )
    parser.add_argument(
        "model", nargs="?", default=default_model(), metavar="PATH_OR_NAME", help="a checkpoint (default: %(default)s)"
    )
    arguments.add_tokenizer_option(parser)
    arguments.add_output_options(parser, json="one JSON object, with sizes in bytes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..checkpoint import open_checkpoint
    from ..hub import resolve
    from ..tools.model_facts import model_facts

    checkpoint = open_checkpoint(resolve(args.model, args.quiet), args.tokenizer)
    facts = model_facts(checkpoint)
    if args.json:
        streams.write_json(facts)
    else:
        streams.write(tables.table(row for name, value in facts.items() for row in rows(name, value)))
    return 1 if facts["mismatches"] else 0


def rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """A fact as a row of the table, or as a row for each entry of a long one."""
    lines = [text(name, value)]
    if isinstance(value, dict):
        lines = [f"{key}{':' * (' ' in key)} {text(name, entry)}".strip() for key, entry in value.items()]
        if len(joined := ", ".join(lines)) <= LONGEST:
            lines = [joined]
    elif isinstance(value, list | tuple):
        lines = list(map(str, value))
    for i, line in enumerate(lines or [""]):
        yield "" if i else name.replace("_", " "), line or "none"


def text(name: str, value: Any) -> str:
    """A single value as text, with thousands separators and the unit. A MB has 1,000,000 bytes."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("_bytes"):
        unit, size = next(((unit, size) for unit, size in UNITS.items() if value >= size), ("bytes", 1))
        return f"{value / size:,.{int(size > 1)}f} {unit}"
    if isinstance(value, int | float):
        return f"{value:,.15g}" + " tokens" * (name in ("max_seq_len", "sliding_window"))
    return "none" if value is None else str(value)
