"""clearllama perplexity: how well a model predicts a text."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import integer
from ..errors import UsageError
from . import arguments, loading, streams

if TYPE_CHECKING:
    from ..text import Llama


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "perplexity",
        description="Measure the perplexity of a text, in consecutive windows without overlap. Each token of a window,"
        " except the first, is predicted from the tokens before it in the window. 'clearllama study ppl' shows the"
        " perplexity by position.",
        usage="%(prog)s [options] FILE",
    )
    parser.add_argument("text", type=Path, metavar="FILE", help="a text file, UTF-8; '-' reads standard input")
    parser.add_argument("--window", type=int, metavar="N", help="tokens per window (default: the model's context)")
    arguments.add_output_options(parser, json="one JSON object")
    arguments.add_model_options(parser)
    arguments.add_rope_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    text = streams.read_stdin() if str(args.text) == "-" else streams.read_text(args.text)
    llm = loading.load(args)
    facts, parts = split(args, llm, text, args.text, llm.model.max_seq_len)
    total, predicted = sum(nats(args, llm, parts, "perplexity")), facts["predicted"]
    facts["nats_per_token"] = total / predicted
    facts["bits_per_byte"] = total / math.log(2) / len(text.encode())
    facts["perplexity"] = math.exp(total / predicted)
    if args.json:
        streams.write_json(facts)
    else:
        streams.write(
            f"perplexity {facts['perplexity']:.4f} over {predicted:,} tokens, {len(parts)} windows of"
            f" {facts['window']:,}; {facts['bits_per_byte']:.4f} bits per byte\n"
        )
    return 0


# ------------------------------------------------------------------------------------- shared with bench --quality
def split(
    args: argparse.Namespace, llm: Llama, text: str, path: Path, default: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Split a text into windows of --window tokens: (facts about the text, the windows)."""
    from ..tools.evaluate import windows

    longest = llm.model.max_seq_len
    window = min(default, longest) if args.window is None else integer("--window", args.window, 2, longest)
    tokens, parts = windows(llm.tokenizer, text, window)
    if not parts:
        raise UsageError(f"{path} has {tokens} tokens; perplexity needs at least 2")
    predicted = sum(len(part) - 1 for part in parts)
    facts = {"model": args.model, "text": str(path), "tokens": tokens, "predicted": predicted, "window": window}
    return facts, parts


def nats(args: argparse.Namespace, llm: Llama, parts: list[list[int]], label: str) -> list[float]:
    """-log p of each window in nats, with a progress bar."""
    from ..tools import evaluate

    with streams.progress(args.quiet, "tok") as show:
        return evaluate.nats(llm.model, parts, lambda done, total: show(label, done, total))
