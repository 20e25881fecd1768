"""clearllama perplexity: how well a model predicts a text."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ..errors import UsageError
from . import arguments, loading, ranks, streams


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "perplexity",
        help="how well a model predicts a text",
        description="Perplexity of a text, read in windows that follow each other without overlap; every token but the"
        " first of a window is predicted from all before it in the window. For perplexity by position: study ppl.",
        allow_abbrev=False,
    )
    parser.add_argument("text", type=Path, metavar="FILE", help="a text file, UTF-8; '-' reads standard input")
    parser.add_argument("--window", type=int, metavar="N", help="tokens of a window (default: the model's context)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments.add_model_options(parser)
    ranks.add_options(parser)
    arguments.add_debug(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.window is not None and args.window < 2:
        raise UsageError(f"--window must be at least 2 tokens, got {args.window}")
    text = streams.read_stdin() if str(args.text) == "-" else streams.read_text(args.text)
    from tqdm import tqdm

    from ..tools.evaluate import nats, windows

    llm = loading.load(args)
    model = llm.model
    window = min(args.window or model.max_seq_len, model.max_seq_len)
    if args.window is not None and args.window > window:
        raise UsageError(f"--window {args.window} is longer than the context of {window}; stretch it: --rope-scaling")
    tokens, parts = windows(llm.tokenizer, text, window)
    if not parts:
        raise UsageError(f"{args.text} has {tokens} tokens; perplexity needs at least 2")
    with tqdm(total=sum(map(len, parts)), unit="tok", unit_scale=True, leave=False, disable=args.quiet or None) as bar:
        total = sum(nats(model, parts, bar.update))
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
            f"perplexity {facts['perplexity']:.4f} over {predicted:,} tokens, windows: {len(parts)} of {window:,};"
            f" {facts['bits_per_byte']:.4f} bits a byte\n"
        )
    return 0
