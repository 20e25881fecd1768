"""What comes of a prompt: how new ids become text, where the text ends, and what it cost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..generate import Token
from ..sampling import SamplingParams
from ..tokenizer import Decoder, Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Stats:
    """What a generation cost. Times in seconds; speeds in tokens per second, None where nothing was timed.

    drafted_tokens were guessed by a draft, and accepted_tokens of them are what the model itself would have said.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    prefill_s: float
    decode_s: float
    seed: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def prefill_tps(self) -> float | None:
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s else None

    @property
    def decode_tps(self) -> float | None:
        """The first token comes out of the prefill, so it is not counted here."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s and self.new_tokens > 1 else None

    def as_dict(self) -> dict[str, Any]:
        speeds = {"prefill_tps": self.prefill_tps, "decode_tps": self.decode_tps}
        rounded = {key: None if value is None else round(value, 2) for key, value in speeds.items()}
        times = {"prefill_s": round(self.prefill_s, 4), "decode_s": round(self.decode_s, 4)}
        return {**dataclasses.asdict(self), **times, **rounded}


@dataclass(frozen=True)
class Piece:
    """A bit of streamed text: whole characters, possibly none. The last piece carries the Completion."""

    text: str
    completion: Completion | None = None


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    text           the new text only, cut before a stop string
    tokens         the new ids only, without the stop id that ended them; those of a stop string are among them
    finish_reason  "stop" (a stop id or stop string) or "length" (max_new_tokens, or the context is full)
    logprobs       natural log-probability of each of `tokens` in the model's own distribution, if asked for
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    logprobs: list[float] | None
    stats: Stats


class StopText:
    """Cuts a stream of text at the first stop string in it, and holds back only what may still become one.

    Where pieces of the stream break makes no difference: while a stop that began earlier may still complete, a later
    one waits.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = stops
        self.held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that is certain now."""
        self.held += text
        first, pending = self._first(), self._pending()
        if first < len(self.held) and first <= pending:
            return self._cut(first)
        out, self.held = self.held[:pending], self.held[pending:]
        return out

    def end(self) -> str:
        """What was held back and became no stop string."""
        first = self._first()
        if first < len(self.held):
            return self._cut(first)
        out, self.held = self.held, ""
        return out

    def _cut(self, at: int) -> str:
        out, self.held, self.found = self.held[:at], "", True
        return out

    def _first(self) -> int:
        """Where the first whole stop string begins; the end where there is none."""
        return min((at for stop in self.stops if (at := self.held.find(stop)) >= 0), default=len(self.held))

    def _pending(self) -> int:
        """Where the first unfinished stop string begins; the end where there is none."""
        lengths = (n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
        return len(self.held) - max(lengths, default=0)


class Answer:
    """An answer as it comes: `feed` it tokens while it is not `done`, then `end` it.

    Times are taken at birth, which is when the prompt begins to be fed, and at each token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tokens: int, stops: Sequence[str]):
        self.prompt_tokens = prompt_tokens
        self.ids: list[int] = []
        self.done = False
        self._decoder, self._stop_text = Decoder(tokenizer), StopText(stops)
        self._scores: list[float] = []
        self._texts: list[str] = []
        self._started = self._last = time.perf_counter()
        self._first: float | None = None

    def feed(self, token: Token) -> str:
        """The text that is certain with this token; "" where none is."""
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last
        if token.stop:
            self.done = True
            return ""
        self.ids.append(token.id)
        if token.logprob is not None:
            self._scores.append(token.logprob)
        self._texts.append(self._stop_text.feed(self._decoder.feed(token.id)))
        self.done = self._stop_text.found
        return self._texts[-1]

    def end(
        self, params: SamplingParams, *, cached: int = 0, logprobs: bool = False, drafted: int = 0, accepted: int = 0
    ) -> Piece:
        """The last piece of text, with the completion; `done` now says whether anything but the length ended it."""
        text = ""
        if not self._stop_text.found:
            text = self._stop_text.feed(self._decoder.end()) + self._stop_text.end()
            self.done = self.done or self._stop_text.found
        first = self._last if self._first is None else self._first
        stats = Stats(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=cached,
            new_tokens=len(self.ids),
            prefill_s=first - self._started,
            decode_s=self._last - first,
            seed=params.seed if params.seed is not None else 0,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
        )
        finish: FinishReason = "stop" if self.done else "length"
        scores = self._scores if logprobs else None
        return Piece(text, Completion("".join([*self._texts, text]), self.ids, finish, scores, stats))
