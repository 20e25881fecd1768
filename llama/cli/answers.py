"""Facts about an answer: the statistics on stderr and the JSON object."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any

from . import streams

if TYPE_CHECKING:
    from ..text import Completion, Stats


class PromptBar:
    """A progress bar on stderr for long prompts. Pass it as `progress`, and use it as a context manager.

    It appears only on a terminal, without --quiet, after DELAY seconds, and is removed when the prompt is done. One
    object can be used for several prompts, one after another.
    """

    DELAY = 1.5  # seconds after the first chunk

    def __init__(self, args: argparse.Namespace):
        self._shown = not args.quiet and sys.stderr.isatty()
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._shown and self._bar is None and done < total:
            from tqdm import tqdm

            settings = {"desc": "prompt", "unit": "tok", "leave": False, "delay": self.DELAY, "dynamic_ncols": True}
            self._bar = tqdm(total=total, initial=done, **settings)
        elif self._bar is not None:
            self._bar.update(done - self._bar.n)
        if done == total:
            self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def __enter__(self) -> PromptBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


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
