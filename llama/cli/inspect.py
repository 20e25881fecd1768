"""Describe a checkpoint without reading its weights.

Show its family, architecture, RoPE settings, files, tokenizer, stop ids and memory, and every mismatch between its
configuration and its tensors. Exit code 1 on a mismatch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from .common import arguments, tables, terminal

LONGEST = 100  # characters of a list on one line
UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3, "bytes": 1}


OPTIONS = [
    *arguments.checkpoint("checkpoint, config.json or a name in configs/ (llama-3-8b)"),
    arguments.TOKENIZER,
    ("--json", bool, "write one JSON object, with sizes in bytes"),
]


def run(args: argparse.Namespace) -> int:
    from ..tools.families import architecture
    from ..tools.model_facts import architecture_facts, model_facts

    config, checkpoint = architecture(args.model, args.tokenizer, args.quiet)
    facts = architecture_facts(config) if checkpoint is None else model_facts(checkpoint)
    terminal.show(args, facts, tables.table(row for name, value in facts.items() for row in rows(name, value)))
    return 1 if facts.get("mismatches") else 0


def rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The row of a fact; a fact that is too long for one row has one row for each entry."""
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
        unit = next((unit for unit, size in UNITS.items() if value >= size), "bytes")
        return f"{value / UNITS[unit]:,.{int(unit != 'bytes')}f} {unit}"
    if isinstance(value, int | float):
        return f"{value:,.15g}" + " tokens" * (name in ("max_seq_len", "sliding_window"))
    return "none" if value is None else str(value)
