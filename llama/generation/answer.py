"""Answers: new ids become text, stop strings end it, and statistics describe it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from ..generate import Token
from ..sampling import SamplingParams
from ..tokenizer import Decoder, Tokenizer
from .batch import Request

FinishReason = Literal["stop", "length"]


SHOWN = 60  # characters of a text in the repr of its object


def shortened(text: str) -> str:
    """The beginning of a text, for a repr."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


@dataclass(frozen=True)
class Stats:
    """Counts and times of a generation. Times are in seconds; speeds in tokens per second, or None if not measured.

    drafted_tokens were proposed by a draft (speculative.py); accepted_tokens of them are part of the answer.
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
        """The first token is not counted, since it comes from the prefill."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s and self.new_tokens > 1 else None

    def as_dict(self) -> dict[str, Any]:
        speeds = {"prefill_tps": self.prefill_tps, "decode_tps": self.decode_tps}
        two_digits = {key: None if value is None else round(value, 2) for key, value in speeds.items()}
        times = {"prefill_s": round(self.prefill_s, 4), "decode_s": round(self.decode_s, 4)}
        return {**dataclasses.asdict(self), **times, **two_digits}


@dataclass(frozen=True)
class Piece:
    """A part of streamed text: complete characters, possibly none. The last piece has the Completion.

    token   the new token of this piece, if any; its text may come with a later piece
    prompt  the tokens of the prompt with log-probabilities, if requested; sent before the first new token

    str(piece) is the text.
    """

    text: str
    completion: Completion | None = None
    token: Token | None = None
    prompt: list[Token] | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Completion:
    """A finished generation. str(completion) is the text.

    text           the new text only, cut before a stop string
    tokens         the new ids only, without the final stop id, but including those of a stop string
    finish_reason  "stop" (a stop id or stop string) or "length" (max_new_tokens, or the context is full)
    logprobs       natural log-probability of each of `tokens` in the model's own distribution, if requested
    top_logprobs   for each of `tokens` {id: log-probability} of the most probable tokens, if requested
    prompt_logprobs  log-probability of each id of the prompt, None for the first id, if requested
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    logprobs: list[float] | None
    stats: Stats
    top_logprobs: list[Mapping[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return (
            f"Completion({shortened(self.text)!r}, {len(self.tokens):,} tokens, finish_reason={self.finish_reason!r})"
        )


@lru_cache(1024)
def failures(stop: str) -> list[int]:
    """For each prefix of a stop string, the length of its longest proper prefix that is also a suffix of it.

    This is the table of Knuth, Morris and Pratt (1977), with which a search never goes back in the text.
    """
    table = [0] * len(stop)
    for i in range(1, len(stop)):
        length = table[i - 1]
        while length and stop[length] != stop[i]:
            length = table[length - 1]
        table[i] = length + (stop[length] == stop[i])
    return table


class StopText:
    """Cuts a stream of text at its first stop string. Delays only text that may be the beginning of one.

    The result does not depend on how the stream is divided into pieces: a complete stop string waits
    while one that began earlier may still be completed. The time for a character does not depend on the text before it.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = [(stop, failures(stop)) for stop in stops]
        self.matched = [0] * len(stops)  # characters of each stop string at the end of the text
        self.buffer = ""  # text that is delayed
        self.first: int | None = None  # where in the buffer the first complete stop string begins
        self.found = False

    def feed(self, text: str) -> str:
        """Add text; return the text that is certain to be before any stop string."""
        for character in text:
            self.buffer += character
            self._match(character)
        pending = len(self.buffer) - max(self.matched, default=0)
        if self.first is not None and self.first <= pending:
            return self.end()
        out, self.buffer = self.buffer[:pending], self.buffer[pending:]
        self.first = None if self.first is None else self.first - pending
        return out

    def _match(self, character: str) -> None:
        for number, (stop, table) in enumerate(self.stops):
            length = self.matched[number]
            while length and stop[length] != character:
                length = table[length - 1]
            length += stop[length] == character
            if length == len(stop):
                start = len(self.buffer) - length
                self.first = start if self.first is None else min(self.first, start)
                length = table[length - 1]
            self.matched[number] = length

    def end(self) -> str:
        """The delayed text before the first complete stop string, or all of it if there is none."""
        out, self.buffer, self.found = self.buffer[: self.first], "", self.first is not None
        return out


class AtLeast:
    """Excludes ids that would end an answer from its first `count` tokens (see `sampling.Constraint`)."""

    def __init__(self, count: int, n_vocab: int, stop_ids: Sequence[int]):
        self.left = count
        self.every = torch.ones(n_vocab, dtype=torch.bool)  # (V,)
        self.early = self.every.clone()  # (V,)
        self.early[[id for id in stop_ids if 0 <= id < n_vocab]] = False

    def allowed(self) -> Tensor:
        return self.early if self.left > 0 else self.every

    def advance(self, id: int) -> None:
        self.left -= 1


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt with checked options: the request for the batch, and a function that begins its answer."""

    request: Request
    begin: Callable[[], Answer]


class Answer:
    """An answer in progress: call `feed` with each token until it is `done`, then `end`.

    A stop string that names a control token, which has no text, stops at its id. Time is measured from construction,
    when the prefill starts, and at each token.

    continues  True: the answer's text is what the new ids append to the prompt's text. False: it is a separate text, as
               in a chat; if the vocabulary adds a space before every text, the first space is dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str],
        stop_ids: Sequence[int] = (),
        *,
        continues: bool,
    ):
        self.prompt_tokens = len(prompt)
        self.ids: list[int] = []
        self.done = False
        self._decoder, self._stop_text = Decoder(tokenizer, prompt if continues else ()), StopText(stops)
        self._stop_ids = {*stop_ids, *(tokenizer.control[stop] for stop in stops if stop in tokenizer.control)}
        self._scores: list[float] = []
        self._tops: list[Mapping[int, float]] = []
        self._prompt_scores: list[float | None] | None = None
        self._texts: list[str] = []
        self._started = self._last = time.perf_counter()
        self._first: float | None = None

    def score(self, prompt: Sequence[Token]) -> None:
        """Add the tokens of the prompt, with their log-probabilities."""
        self._prompt_scores = [token.logprob for token in prompt]

    def feed(self, token: Token) -> str:
        """Add a token; return the text that is certain now, which may be empty."""
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last
        if token.stop or token.id in self._stop_ids:
            self.done = True
            return ""
        self.ids.append(token.id)
        if token.logprob is not None:
            self._scores.append(token.logprob)
        if token.top:
            self._tops.append(token.top)
        self._texts.append(self._stop_text.feed(self._decoder.feed(token.id)))
        self.done = self._stop_text.found
        return self._texts[-1]

    def end(
        self, params: SamplingParams, *, cached: int = 0, logprobs: bool = False, drafted: int = 0, accepted: int = 0
    ) -> Piece:
        """The last piece of text, with the completion. `done` is False if the length ended the answer."""
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
        full = "".join([*self._texts, text])
        return Piece(text, Completion(full, self.ids, finish, scores, stats, self._tops or None, self._prompt_scores))
