"""Facts about an answer: the statistics on stderr and the JSON object."""

from __future__ import annotations

import argparse
import contextlib
import math
from typing import TYPE_CHECKING, Any

from . import streams

if TYPE_CHECKING:
    from ..text import Completion, Stats


DELAY = 1.5  # seconds of a prompt before its bar appears


def prompt_bar(args: argparse.Namespace) -> contextlib.AbstractContextManager[streams.Progress]:
    """A bar for a long prompt. It is removed when the answer begins."""
    return streams.progress(args.quiet, "tok", leave=False, delay=DELAY)


def show_stats(args: argparse.Namespace, stats: Stats, finish_reason: str, label: str = "") -> None:
    """Write token counts, speed and seed of an answer to stderr, after a label."""

    def speed(tps: float | None) -> str:
        return f" ({tps:,.0f} tok/s)" if tps else ""

    prompt = f"{stats.prompt_tokens} prompt token{'s' * (stats.prompt_tokens != 1)}{speed(stats.prefill_tps)}"
    if args.load_session is not None and stats.cached_tokens:
        prompt += f", {stats.cached_tokens} of them from the session"
    new = f"{stats.new_tokens} new{speed(stats.decode_tps)}"
    if args.draft is not None:
        new += f", {stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens accepted"
    streams.info(args, f"{label}{prompt}, {new}, finish: {finish_reason}, seed {stats.seed}")


def as_dict(completion: Completion | None, text: str = "") -> dict[str, Any]:
    """The JSON fields of an answer. Of an interrupted one (None), only its text is known."""
    if completion is None:
        unknown = dict.fromkeys(("text", "tokens", "prompt_tokens", "finish_reason", "logprobs", "stats"))
        return {**unknown, "text": text, "finish_reason": "interrupted"}
    logprobs = completion.logprobs
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "prompt_tokens": completion.stats.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "logprobs": logprobs and [x if math.isfinite(x) else None for x in logprobs],  # JSON has no infinity
        "stats": completion.stats.as_dict(),
    }
