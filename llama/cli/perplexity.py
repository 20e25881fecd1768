"""Measure the perplexity of a text.

The text is divided into consecutive windows. Each token of a window, except the first, is predicted from the tokens
before it in the window. 'clearllama study ppl' shows the perplexity by position.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path

from ..checks import integer
from ..errors import UsageError
from .common import arguments, files, loading, terminal

OPTIONS = [
    ("text FILE", Path, "a text file, UTF-8; '-' reads standard input"),
    ("--window N", int, "tokens per window (default: the model's context)"),
    ("--json", bool, "write one JSON object"),
    *arguments.model(),
]


def run(args: argparse.Namespace) -> None:
    from ..tools.perplexity import nats, windows

    text = files.read_text(args.text)
    llm, read_weights = loading.prepare(args)
    longest = llm.model.max_seq_len
    window = longest if args.window is None else integer("--window", args.window, 2, longest)
    tokens, parts = windows(llm.tokenizer, text, window)
    if not parts:
        raise UsageError(f"{args.text} has {tokens} tokens; perplexity needs at least 2")
    read_weights()
    with terminal.progress("tok") as show:
        found = nats(llm.model, parts, progress=partial(show, "perplexity"))
    predicted = sum(values.numel() for values in found)
    total = sum(float(values.double().sum()) for values in found)
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
    line = "perplexity {perplexity:.4f} over {predicted:,} tokens, {parts} of {window:,}; {bits_per_byte:.4f}"
    count = f"{len(parts)} window{'s' * (len(parts) != 1)}"
    terminal.show(args, facts, line.format(**facts, parts=count) + " bits per byte\n")
