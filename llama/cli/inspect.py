"""clearllama inspect: describe a checkpoint from its headers, without reading its weights."""

from __future__ import annotations

import argparse
from typing import Any

from ..checks import integer
from ..config import LARGEST_SIZE
from ..hub import default_model
from . import arguments, streams, tables

BOUNDS = {"context": LARGEST_SIZE, "batch": 4096}  # what a configuration and `generate --batch-size` accept
LONGEST = 100  # characters of a list on one line


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
    context = "tokens per sequence in the KV cache (default: the model's context)"
    parser.add_argument("--context", type=int, metavar="N", help=context)
    batch = "number of sequences in the KV cache (default: 1)"
    parser.add_argument("--batch", type=int, default=1, metavar="N", help=batch)
    arguments.add_tokenizer_option(parser)
    arguments.add_output_options(parser, json="one JSON object, with sizes in bytes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name, most in BOUNDS.items():
        if getattr(args, name) is not None:
            integer(f"--{name}", getattr(args, name), 1, most)
    from ..checkpoint import open_checkpoint
    from ..hub import resolve
    from ..tools.model_facts import model_facts

    checkpoint = open_checkpoint(resolve(args.model, args.quiet), args.tokenizer)
    facts = model_facts(checkpoint, args.context, args.batch)
    if args.json:
        streams.write_json(facts)
    else:
        rows = []
        for name, value in facts.items():
            first, *more = lines(name, value)
            rows += [(name.replace("_", " "), first), *(("", line) for line in more)]
        streams.write(tables.table(rows))
    return 1 if facts["mismatches"] else 0


def lines(name: str, value: Any) -> list[str]:
    """A fact as text: one line, or a line for each entry of a long one."""
    if isinstance(value, dict):
        cells = [f"{key}{':' * (' ' in key)} {text(name, entry)}".strip() for key, entry in value.items()]
        return cells if len(", ".join(cells)) > LONGEST else [", ".join(cells) or "none"]
    if isinstance(value, list | tuple):
        return [str(entry) for entry in value] or ["none"]
    return [text(name, value)]


def text(name: str, value: Any) -> str:
    """A single value as text, with thousands separators and the unit."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int) and name.endswith("_bytes"):
        return bytes_text(value)
    if isinstance(value, int | float):
        return f"{value:,.15g}" + " tokens" * (name in ("max_seq_len", "sliding_window"))
    return str(value)


def bytes_text(count: int) -> str:
    """A number of bytes with a unit: 1500000 -> '1.5 MB'. A MB has 1,000,000 bytes, as in the sizes of downloads."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"
