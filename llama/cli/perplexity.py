"""clearllama perplexity: how well a model predicts a text."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from ..checks import integer
from ..errors import UsageError
from . import arguments, loading, streams

if TYPE_CHECKING:
    from ..model import Transformer
    from ..tokenizer import Tokenizer


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "perplexity",
        help="measure how well a model predicts a text",
        description="Measure the perplexity of a text, in consecutive windows without overlap. Each token of a window,"
        " except the first, is predicted from the tokens before it in the window. 'clearllama study ppl' shows the"
        " perplexity by position.",
        usage="%(prog)s [options] FILE",
        allow_abbrev=False,
    )
    parser.add_argument("text", type=Path, metavar="FILE", help="a text file, UTF-8; '-' reads standard input")
    parser.add_argument("--window", type=int, metavar="N", help="tokens per window (default: the model's context)")
    arguments.add_output_options(parser, json="one JSON object")
    arguments.add_model_options(parser)
    arguments.add_rope_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_window(args)
    text = streams.read_stdin() if str(args.text) == "-" else streams.read_text(args.text)
    llm = loading.load(args)
    window = window_size(args, llm.model, llm.model.max_seq_len)
    tokens, parts = split(llm.tokenizer, text, window, str(args.text))
    total = sum(nats(args, llm.model, parts))
    predicted = sum(len(part) - 1 for part in parts)
    facts = {
        "model": args.model,
        "text": str(args.text),
        "tokens": tokens,
        "predicted": predicted,
        "window": window,
        "nats_per_token": total / predicted,
        "bits_per_byte": total / math.log(2) / len(text.encode()),
        "perplexity": math.exp(total / predicted),
    }
    if args.json:
        streams.write_json(facts)
    else:
        streams.write(
            f"perplexity {facts['perplexity']:.4f} over {predicted:,} tokens, {len(parts)} windows of {window:,};"
            f" {facts['bits_per_byte']:.4f} bits per byte\n"
        )
    return 0


# ------------------------------------------------------------------------------------- shared with bench --quality
def check_window(args: argparse.Namespace) -> None:
    """Check --window before a model is loaded."""
    if args.window is not None:
        integer("--window", args.window, 2)


def window_size(args: argparse.Namespace, model: Transformer, default: int) -> int:
    """Tokens per window: --window or the default, at most the context. Raises UsageError if --window exceeds it."""
    if args.window is not None and args.window > model.max_seq_len:
        raise UsageError(
            f"--window {args.window} exceeds the context of {model.max_seq_len}; lower it, or extend the context with"
            " --rope-scaling"
        )
    return min(args.window or default, model.max_seq_len)


def split(tokenizer: Tokenizer, text: str, window: int, source: str) -> tuple[int, list[list[int]]]:
    """Split a text into windows. Returns its number of tokens and the windows. Raises UsageError if it is too short."""
    from ..tools.evaluate import windows

    tokens, parts = windows(tokenizer, text, window)
    if not parts:
        raise UsageError(f"{source} has {tokens} token{'s' * (tokens != 1)}; perplexity needs at least 2")
    return tokens, parts


def nats(args: argparse.Namespace, model: Transformer, parts: list[list[int]], label: str | None = None) -> list[float]:
    """-log p of each window in nats, with a progress bar on stderr."""
    from tqdm import tqdm

    from ..tools.evaluate import nats as nats_of

    total = sum(map(len, parts))
    with tqdm(total=total, desc=label, unit="tok", unit_scale=True, leave=False, disable=args.quiet or None) as bar:
        return nats_of(model, parts, bar.update)
