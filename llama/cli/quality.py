"""clearllama bench --quality: perplexity of a text with quantized weights, compared with float32 weights."""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

from . import loading, perplexity, streams, tables

SHIPPED = Path("held-out.txt")  # next to the model of the study
GOALS = {8: 0.5, 4: 6.0}  # bits -> largest acceptable rise of perplexity in percent
WINDOW = 512
COLUMNS = ("perplexity", "change_percent", "stderr_percent", "goal_percent", "met")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench --quality`."""
    group = parser.add_argument_group(
        "quality", "compare float32 weights with each scheme of the list --quantize (default: int8,int4)"
    )
    group.add_argument(
        "--quality",
        nargs="?",
        const=SHIPPED,
        type=Path,
        metavar="FILE",
        help="measure the perplexity of a text (default: the last book of the King James Bible, which is included)",
    )
    group.add_argument("--window", type=int, metavar="N", help=f"tokens per window (default: {WINDOW})")


def run(args: argparse.Namespace) -> int:
    """Measure each scheme and write the results."""
    from ..quant.schemes import pick_scheme
    from ..study.perplexity import tiny_folder

    names = (args.quantize or "int8,int4").split(",")
    schemes = {name: None if name == "none" else pick_scheme(name) for name in names}
    path = tiny_folder() / SHIPPED if args.quality == SHIPPED else args.quality
    text = streams.read_text(path)
    llm = loading.load(argparse.Namespace(**{**vars(args), "dtype": "float32", "quantize": None}))
    facts, parts = perplexity.split(args, llm, text, path, WINDOW)
    predicted = facts["predicted"]
    streams.info(args, f"{path.name}: {facts['tokens']:,} tokens in {len(parts)} windows of {facts['window']}")
    exact = perplexity.nats(args, llm, parts, "float32")
    facts |= {"float32": math.exp(sum(exact) / predicted), "schemes": []}
    rows: list[tuple[str, ...]] = [("weights", *COLUMNS), ("float32", f"{facts['float32']:.4f}", "", "", "", "")]
    for name, scheme in schemes.items():
        del llm  # so that memory holds one model
        llm = loading.load(argparse.Namespace(**{**vars(args), "quantize": scheme and name}))
        found = compare(exact, perplexity.nats(args, llm, parts, name), predicted)
        goal = scheme and GOALS[scheme.format.bits]
        found |= {"goal_percent": goal, "met": goal and found["change_percent"] <= goal}
        facts["schemes"].append({"quantize": scheme and name, "dtype": loading.dtype_name(llm.model), **found})
        cells = [found[column] for column in COLUMNS]
        texts = ("" if cell is None else f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in cells)
        rows.append((name, *texts))
    if args.json:
        streams.write_json(facts)
    else:
        streams.write(tables.table(rows, right=range(1, len(rows[0]))))
    return 0


def compare(exact: list[float], other: list[float], predicted: int) -> dict[str, Any]:
    """Perplexity of a model, and its change in percent from the exact model over the same windows.

    exact, other  -log p of each window in nats
    predicted     number of tokens predicted

    The standard error of the change is estimated from its variation between windows; None for one window.
    """
    rises = [theirs - ours for ours, theirs in zip(exact, other, strict=True)]
    ratio = math.exp(sum(rises) / predicted)
    error = statistics.stdev(rises) * len(rises) ** 0.5 / predicted if len(rises) > 1 else None
    return {
        "perplexity": math.exp(sum(other) / predicted),
        "change_percent": 100 * (ratio - 1),
        "stderr_percent": None if error is None else 100 * ratio * error,
    }
