"""clearllama bench --quality: perplexity of a text with quantized weights, compared with float32 weights."""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

from . import arguments, loading, perplexity, streams

SHIPPED = Path("held-out.txt")  # next to the model of the study
GOALS = {8: 0.5, 4: 6.0}  # bits -> largest acceptable rise of perplexity in percent
WINDOW = 512


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench --quality`."""
    group = parser.add_argument_group(
        "quality",
        "measure the perplexity with float32 weights and with each scheme of --quantize (default: int8,int4), and"
        " compare them; the scheme none leaves the weights unquantized",
    )
    group.add_argument(
        "--quality",
        nargs="?",
        const=SHIPPED,
        type=Path,
        metavar="FILE",
        help="the text, UTF-8 (default: the last book of the King James Bible, which comes with the package)",
    )
    group.add_argument("--window", type=int, metavar="N", help=f"tokens per window (default: {WINDOW})")


def run(args: argparse.Namespace) -> int:
    """Measure and write the results. Raises UsageError for a text that is too short or a bad option."""
    perplexity.check_window(args)
    schemes = [entry.strip() for entry in (args.quantize or "int8,int4").split(",")]
    from .. import loader
    from ..checkpoint import open_checkpoint
    from ..hub import resolve
    from ..quant.schemes import pick_scheme
    from ..study.perplexity import tiny_folder

    for scheme in schemes:
        if scheme != "none":
            pick_scheme(scheme)
    path = tiny_folder() / SHIPPED if args.quality == SHIPPED else args.quality
    text = streams.read_text(path)
    scaling = arguments.rope_scaling(args)
    exact = loader.load_model(
        args.model,
        adapters=args.adapter,
        device=args.device,
        dtype="float32",
        rope=args.rope,
        max_seq_len=args.max_seq_len,
        rope_scaling=scaling,
        rope_theta=args.rope_theta,
        gpu_layers=args.gpu_layers,
    )
    window = perplexity.window_size(args, exact, WINDOW)
    tokens, parts = perplexity.split(
        open_checkpoint(resolve(args.model, args.quiet), args.tokenizer).tokenizer(), text, window, str(path)
    )
    predicted = sum(len(part) - 1 for part in parts)
    streams.info(
        args,
        f"measuring {1 + len(schemes)} models on {path.name}: {tokens:,} tokens in {len(parts)} windows of {window}",
    )
    base = perplexity.nats(args, exact, parts, "float32")
    del exact
    facts: dict[str, Any] = {
        "model": args.model,
        "text": str(path),
        "tokens": tokens,
        "predicted": predicted,
        "window": window,
        "float32": math.exp(sum(base) / predicted),
        "schemes": [],
    }
    if not args.json:
        streams.write(f"{'weights':<14} {'perplexity':>10}    change, standard error and goal in %\n")
        streams.write(f"{'float32':<14} {facts['float32']:>10.4f}\n")
    for scheme in schemes:
        own = {"quantize": None if scheme == "none" else scheme, "compile": False}
        model = loading.load(argparse.Namespace(**{**vars(args), **own})).model
        found = compare(base, perplexity.nats(args, model, parts, scheme), predicted)
        goal = None if scheme == "none" else GOALS[pick_scheme(scheme).format.bits]
        facts["schemes"].append(
            {
                "quantize": own["quantize"],
                "dtype": loading.dtype_name(model),
                **found,
                "goal_percent": goal,
                "met": goal and found["change_percent"] <= goal,
            }
        )
        del model
        if not args.json:
            streams.write(_row(scheme, facts["schemes"][-1]))
    if args.json:
        streams.write_json(facts)
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


def _row(scheme: str, facts: dict[str, Any]) -> str:
    error = "" if facts["stderr_percent"] is None else f" ± {facts['stderr_percent']:.2f}"
    line = f"{scheme:<14} {facts['perplexity']:>10.4f}    {facts['change_percent']:+.2f}{error}"
    if facts["goal_percent"] is None:
        return f"{line}\n"
    return f"{line}   at most +{facts['goal_percent']:g}: {'met' if facts['met'] else 'missed'}\n"
