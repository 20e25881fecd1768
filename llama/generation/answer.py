"""Answers: new ids become text, stop strings end the text, and statistics describe the answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..chat.thoughts import Thoughts, ThoughtStream
from ..sampling import Constraint, Processor, Token
from ..tokenizer import Tokenizer
from .batch import Request

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Stats:
    """Counts and times of a generation. Times are in seconds; speeds in tokens per second, or None if not measured.

    drafted_tokens counts what a draft proposed (speculative.py), accepted_tokens how many of them the model accepted.
    reasoning_tokens counts those of new_tokens that are the thought, with its marks.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    prefill_s: float
    decode_s: float
    seed: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    reasoning_tokens: int = 0

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
    """A part of streamed text: complete characters, possibly none. Only the last piece has a completion.

    token      the new token of this piece, if any; its text may come with a later piece
    reasoning  a part of the thought, possibly empty, if the token belongs to the thought; None otherwise
    prompt     the tokens of the prompt with log-probabilities, if requested; sent before the first new token

    str(piece) is the text.
    """

    text: str
    completion: Completion | None = None
    token: Token | None = None
    reasoning: str | None = None
    prompt: list[Token] | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Completion:
    """A finished generation. str(completion) is the text.

    text           the new text, cut before a stop string, without the prompt and the thought
    tokens         the new ids, without the final stop id, but with the ids of a stop string
    finish_reason  "stop" (a stop id or stop string) or "length" (max_new_tokens, or the context is full)
    logprobs       natural log-probability of each of `tokens` in the model's own distribution, if requested
    top_logprobs   for each of `tokens` {id: log-probability} of the most probable tokens, if requested
    prompt_logprobs  log-probability of each id of the prompt, None for the first id, if requested
    reasoning      the thought of an answer in a chat, without its marks, or None
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    logprobs: list[float] | None
    stats: Stats
    top_logprobs: list[Mapping[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    reasoning: str | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = repr(self.text)
        text = text if len(text) <= 80 else f"{text[:76]}{text[-1]}..."  # str() returns the complete text
        return f"Completion({text}, {len(self.tokens):,} tokens, finish_reason={self.finish_reason!r})"


class StopText:
    """Cuts a stream of text at its first stop string. Delays only text in which a stop string may begin.

    The result does not depend on how the stream is divided into pieces: a complete stop string takes
    effect only when no stop string that began before it can still be completed.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = stops
        self.buffer = ""  # text that is delayed
        self.found = False

    def feed(self, text: str) -> str:
        """Add text; return the text that certainly comes before any stop string."""
        self.buffer += text
        start = next((i for i in range(len(self.buffer)) if self._begins(self.buffer[i:])), len(self.buffer))
        out, self.buffer = self.buffer[:start], self.buffer[start:]
        self.found = self.buffer.startswith(tuple(self.stops))
        return out

    def _begins(self, text: str) -> bool:
        """Whether a text begins with a stop string, or may if it continues."""
        return any(text.startswith(stop) or stop.startswith(text) for stop in self.stops)

    def end(self) -> str:
        """The delayed text before the first complete stop string, or all of it if there is none."""
        starts = [start for stop in self.stops if (start := self.buffer.find(stop)) >= 0]
        self.found = bool(starts)
        return self.buffer[: min(starts, default=None)]


def exclude_until(length: int, ids: Sequence[int]) -> Processor:
    """A processor (`SamplingParams`) that excludes `ids` while prompt and answer have fewer than `length` ids."""
    index = torch.tensor(ids, dtype=torch.long)

    def exclude(text: Tensor, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, index.to(logits.device), -torch.inf) if len(text) < length else logits

    return exclude


class ThinkingBudget:
    """Closes the thought after `left` tokens, at the end of a character. inner: constrains all other tokens."""

    def __init__(self, tokenizer: Tokenizer, thoughts: Thoughts, left: int, inner: Constraint | None):
        self.stream, self.left, self.inner = ThoughtStream(tokenizer, thoughts), left, inner
        self.closing = tokenizer.encode(thoughts.closing, parse_special=True)  # ids of the mark still to come
        self.n_vocab = tokenizer.n_vocab

    def allowed(self) -> Tensor | None:
        if self.stream.thinking and self.left <= 0 and not self.stream.decoder.is_partial:
            none = torch.zeros(self.n_vocab, dtype=torch.bool)  # (V,)
            return none.index_fill_(0, torch.tensor(self.closing[:1]), True)  # (V,)
        return None if self.inner is None else self.inner.allowed()

    def advance(self, id: int) -> None:
        if self.stream.thinking and self.left <= 0 and self.closing[:1] == [id]:
            del self.closing[0]
        self.left -= self.stream.thinking
        self.stream.feed(id)
        if self.inner is not None:
            self.inner.advance(id)


@dataclass(eq=False)
class Job(Request):
    """A request for a text.

    continues  True: the answer's text is what the new ids append to the prompt's text. False: it is a separate text, as
               in a chat; if the vocabulary adds a space before every text, the first space is dropped
    thoughts   whether the answer may begin with a thought
    """

    continues: bool = True
    thoughts: Thoughts = field(default_factory=Thoughts)


class Answer:
    """An answer in progress: call `feed` with each token until it is `done`, then `end`.

    Times are measured at construction, when the prefill starts, and at each token.
    `prompt` has the prompt's tokens if requested.
    """

    prompt: Sequence[Token] | None = None

    def __init__(self, tokenizer: Tokenizer, job: Job, cached: int = 0):
        self.job, self.cached = job, cached
        self.ids: list[int] = []
        self.done = False
        self._thoughts = ThoughtStream(tokenizer, job.thoughts, job.ids if job.continues else ())
        stops = job.params.stop
        self._stop_text = StopText(stops)  # a stop string that names a control token has no text; it stops at the id
        self._stop_names = {tokenizer.control[stop] for stop in stops if stop in tokenizer.control}
        self._tokens: list[Token] = []
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._started = self._last = time.perf_counter()
        self._first: float | None = None

    def feed(self, token: Token) -> Piece | None:
        """Add a token; return the text and thought that are now certain (possibly empty), or None for a stop id.

        Stop strings have no effect in a thought, since thoughts often repeat the question.
        """
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last
        named = token.id in self._stop_names and not self._thoughts.thinking
        if token.stop or named or token.id in self.job.params.stop_token_ids:
            self.done = True
            return None
        self.ids.append(token.id)
        self._tokens.append(token)
        thought, text = self._thoughts.feed(token.id)
        self._reasoning.append(thought or "")
        self._texts.append(self._stop_text.feed(text))
        self.done = self._stop_text.found
        return Piece(self._texts[-1], token=token, reasoning=thought)

    def end(self, drafted: int = 0, accepted: int = 0) -> Piece:
        """The last piece of text, with the completion. `done` is False if the length ended the answer."""
        text, (thought, rest) = "", self._thoughts.end()
        if not self._stop_text.found:
            text = self._stop_text.feed(rest) + self._stop_text.end()
            self.done = self.done or self._stop_text.found
        first = self._last if self._first is None else self._first
        stats = Stats(
            prompt_tokens=len(self.job.ids),
            cached_tokens=self.cached,
            new_tokens=len(self.ids),
            prefill_s=first - self._started,
            decode_s=self._last - first,
            seed=self.job.params.seed or 0,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            reasoning_tokens=self._thoughts.count,
        )
        finish: FinishReason = "stop" if self.done else "length"
        logprobs = [token.logprob for token in self._tokens if token.logprob is not None]
        scores = logprobs if self.job.params.scored else None
        tops = [token.top for token in self._tokens if token.top] or None
        full, reasoning = "".join([*self._texts, text]), "".join([*self._reasoning, thought]) or None
        prompt = None if self.prompt is None else [token.logprob for token in self.prompt]
        completion = Completion(full, self.ids, finish, scores, stats, tops, prompt, reasoning)
        return Piece(text, completion, reasoning=thought or None)
