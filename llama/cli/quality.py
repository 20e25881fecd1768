"""clearllama bench --quality: what weights of few bits cost, as perplexity of a text beside that of exact weights."""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import arguments, loading, streams

if TYPE_CHECKING:
    from ..model import Transformer

SHIPPED = Path("held-out.txt")  # beside the model of the study
GOALS = {8: 0.5, 4: 6.0}  # bits -> percent by which perplexity may rise at most
WINDOW = 512


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this way to run `bench`."""
    group = parser.add_argument_group(
        "quality",
        "perplexity in float32 against each scheme of --quantize (default: int8,int4) as it runs here; a third model,"
        " 'none', is the one without --quantize",
    )
    group.add_argument(
        "--quality",
        nargs="?",
        const=SHIPPED,
        type=Path,
        metavar="FILE",
        help="on a text file, UTF-8 (default: the last book of the King James Bible, which comes with the package)",
    )
    group.add_argument("--window", type=int, metavar="N", help=f"tokens of a window (default: {WINDOW})")


def run(args: argparse.Namespace) -> int:
    """Measure and write. Raises UsageError when the text is too short or an option makes no sense."""
    if args.window is not None and args.window < 2:
        raise UsageError(f"--window must be at least 2 tokens, got {args.window}")
    schemes = [entry.strip() for entry in (args.quantize or "int8,int4").split(",")]
    from .. import loader
    from ..engine import runtime
    from ..quant.schemes import pick_scheme
    from ..study.perplexity import tiny_folder
    from ..tools.evaluate import windows

    for scheme in schemes:
        if scheme != "none":
            pick_scheme(scheme)
    path = tiny_folder() / SHIPPED if args.quality == SHIPPED else args.quality
    text = streams.read_text(path)
    scaling = arguments.rope_scaling(args)
    runtime.set_threads(args.threads)
    exact = loader.load_model(
        args.model,
        device=args.device,
        dtype="float32",
        rope=args.rope,
        max_seq_len=args.max_seq_len,
        rope_scaling=scaling,
        rope_theta=args.rope_theta,
        gpu_layers=args.gpu_layers,
    )
    window = min(args.window or WINDOW, exact.max_seq_len)
    if args.window is not None and args.window > window:
        raise UsageError(f"--window {args.window} is longer than the context of {window}; stretch it: --rope-scaling")
    tokens, parts = windows(loader.load_tokenizer(args.model), text, window)
    if not parts:
        raise UsageError(f"{path} has {tokens} tokens; perplexity needs at least 2")
    predicted = sum(len(part) - 1 for part in parts)
    streams.say(
        args, f"{path.name}: {tokens:,} tokens in {len(parts)} windows of {window}, through {1 + len(schemes)} models"
    )
    base = _nats(args, exact, parts, "float32")
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
        found = compare(base, _nats(args, model, parts, scheme), predicted)
        goal = None if scheme == "none" else GOALS[pick_scheme(scheme).bits]
        facts["schemes"].append(
            {
                "quantize": own["quantize"],
                "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
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
    """Perplexity of the other model, and by how many percent it is above the exact one's, over the same windows.

    exact, other  -log p of each window, nats
    predicted     tokens they are about

    The standard error is that of the change, from how much it differs from window to window; None for one window.
    """
    rises = [theirs - ours for ours, theirs in zip(exact, other, strict=True)]
    ratio = math.exp(sum(rises) / predicted)
    error = statistics.stdev(rises) * len(rises) ** 0.5 / predicted if len(rises) > 1 else None
    return {
        "perplexity": math.exp(sum(other) / predicted),
        "change_percent": 100 * (ratio - 1),
        "stderr_percent": None if error is None else 100 * ratio * error,
    }


def _nats(args: argparse.Namespace, model: Transformer, parts: list[list[int]], what: str) -> list[float]:
    from tqdm import tqdm

    from ..tools.evaluate import nats

    total = sum(map(len, parts))
    with tqdm(total=total, desc=what, unit="tok", unit_scale=True, leave=False, disable=args.quiet or None) as bar:
        return nats(model, parts, bar.update)


def _row(scheme: str, facts: dict[str, Any]) -> str:
    error = "" if facts["stderr_percent"] is None else f" ± {facts['stderr_percent']:.2f}"
    line = f"{scheme:<14} {facts['perplexity']:>10.4f}    {facts['change_percent']:+.2f}{error}"
    if facts["goal_percent"] is None:
        return f"{line}\n"
    return f"{line}   at most +{facts['goal_percent']:g}: {'met' if facts['met'] else 'missed'}\n"
