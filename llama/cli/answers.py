"""Facts about an answer: the statistics on stderr and the JSON object."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from . import streams

if TYPE_CHECKING:
    from ..text import Completion, Stats


def show_stats(args: argparse.Namespace, stats: Stats, finish_reason: str) -> None:
    """Write token counts, speed and seed of an answer to stderr."""

    def speed(tps: float | None) -> str:
        return f" ({tps:,.0f} tok/s)" if tps else ""

    prompt = f"{stats.prompt_tokens} prompt tokens{speed(stats.prefill_tps)}"
    if args.load_session is not None and stats.cached_tokens:
        prompt += f", {stats.cached_tokens} of them from the session"
    new = f"{stats.new_tokens} new{speed(stats.decode_tps)}"
    if args.draft is not None:
        new += f", {stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens accepted"
    streams.info(args, f"{prompt}, {new}, finish: {finish_reason}, seed {stats.seed}")


def as_dict(completion: Completion) -> dict[str, Any]:
    """The JSON fields that every answer has, with and without --prompts."""
    logprobs = completion.logprobs
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "prompt_tokens": completion.stats.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "logprobs": logprobs and [x if math.isfinite(x) else None for x in logprobs],  # JSON has no infinity
        "stats": completion.stats.as_dict(),
    }
