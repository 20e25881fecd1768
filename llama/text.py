"""What a user holds: a model with its tokenizer, that takes text and gives text."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload

from .chat import encode_chat
from .errors import UsageError
from .generate import generate
from .model import Transformer
from .sampling import LARGEST_SEED, SamplingParams
from .session import Session as Session
from .speculative import Draft, make_draft, speculate
from .tokenizer import Decoder, Tokenizer

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


class Llama:
    """A model and its tokenizer. Made by `llama.load`.

    Sampling options of all methods, with defaults: max_new_tokens=256, temperature=0.0 (greedy), top_k=0, top_p=1.0,
    min_p=0.0, repetition_penalty=1.0, seed=None; their ranges and order are sampling.SamplingParams'. Besides:
    stop=[...] strings that end the text, logprobs=True, and draft="ngram" or draft=a smaller Llama or Transformer with
    the same vocabulary, which makes it faster where the draft guesses well; draft_tokens is the most it guesses at once
    (speculative.py).
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        chat_template: str | None = None,
        *,
        chat_format: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        warnings: Sequence[str] = (),
    ):
        self.model, self.tokenizer, self.chat_template = model, tokenizer, chat_template
        self.chat_format = chat_format
        self.sampling = dict(sampling or {})
        self.warnings = tuple(warnings)

    @overload
    def generate(self, prompt: str, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompt: Sequence[str], **options: Any) -> list[Completion]: ...
    def generate(self, prompt: str | Sequence[str], **options: Any) -> Completion | list[Completion]:
        """Continue raw text, exactly as it stands (begin-of-text is added where the model was trained with it).

        A list of prompts gives a list of completions.
        """
        if isinstance(prompt, str):
            return _last(self.stream(prompt, **options))
        if not isinstance(prompt, Sequence) or not all(isinstance(p, str) for p in prompt):
            raise UsageError(f"prompt must be a string or a list of strings, got {type(prompt).__name__}")
        return [_last(self.stream(p, **options)) for p in prompt]

    def stream(self, prompt: str, **options: Any) -> Generator[Piece]:
        """`generate` piece by piece; the texts joined are the completion's text."""
        if not isinstance(prompt, str):
            raise UsageError(f"prompt must be a string, got {type(prompt).__name__}")
        return self.stream_ids(self.tokenizer.encode_prompt(prompt), **options)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Completion:
        """The assistant's answer to messages [{"role": "user", "content": "..."}, ...].

        They are written by the model's template, or by the built-in format that `chat_format` names. tools are JSON
        schemas of functions the assistant may call; its calls come as text.
        """
        return _last(self.stream_chat(messages, tools=tools, **options))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Generator[Piece]:
        """`chat` piece by piece."""
        prompt = encode_chat(self.tokenizer, self.chat_template, messages, format=self.chat_format, tools=tools)
        return self.stream_ids(prompt, **options)

    def stream_ids(
        self,
        prompt: Sequence[int],
        *,
        stop: str | Sequence[str] | None = None,
        logprobs: bool = False,
        session: Session | None = None,
        draft: str | Llama | Transformer | Draft | None = None,
        draft_tokens: int | None = None,
        **sampling: Any,
    ) -> Generator[Piece]:
        """What the methods above stand on: prompt ids in, pieces of text out.

        session keeps the KV cache for the next call; a draft that is a speculative.Draft keeps its own. Bad options are
        refused here, not at the first piece.
        """
        known = {f.name for f in dataclasses.fields(SamplingParams)}
        if unknown := sampling.keys() - known:
            raise UsageError(
                f"unknown option {sorted(unknown)[0]!r}; known:"
                f" {', '.join(sorted(known | {'stop', 'logprobs', 'draft', 'draft_tokens'}))}"
            )
        params = SamplingParams(**{**self.sampling, **sampling})
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbelow(LARGEST_SEED))
        guesses = make_draft(draft.model if isinstance(draft, Llama) else draft, draft_tokens)
        return self._stream(list(prompt), params, _check_stops(stop), logprobs, session, guesses)

    def _stream(
        self,
        prompt: list[int],
        params: SamplingParams,
        stops: list[str],
        logprobs: bool,
        session: Session | None,
        draft: Draft | None,
    ) -> Generator[Piece]:
        cache = None if session is None else session.reuse(self.model, prompt)
        cached = 0 if cache is None else cache.length
        decoder, stop_text = Decoder(self.tokenizer), StopText(stops)
        ids: list[int] = []
        scores: list[float] = []
        texts: list[str] = []
        finish: FinishReason = "length"
        started = time.perf_counter()
        first = last = started
        tokens = (generate if draft is None else partial(speculate, draft=draft))(
            self.model,
            prompt,
            params,
            stop_ids=self.tokenizer.stop_ids,
            n_vocab=self.tokenizer.n_vocab,
            cache=cache,
            logprobs=logprobs,
        )
        try:
            for token in tokens:
                last = time.perf_counter()
                first = last if first == started else first
                if token.stop:
                    finish = "stop"
                    break
                ids.append(token.id)
                if token.logprob is not None:
                    scores.append(token.logprob)
                texts.append(stop_text.feed(decoder.feed(token.id)))
                if texts[-1]:
                    yield Piece(texts[-1])
                if stop_text.found:
                    finish = "stop"
                    break
        finally:
            tokens.close()  # type: ignore[attr-defined]
            if session is not None and cache is not None:
                session.tokens = (prompt + ids)[: cache.length]  # the last id is not in the cache yet
                cache.trim(len(session.tokens))
                session.busy = False
        if not stop_text.found:
            texts.append(stop_text.feed(decoder.end()) + stop_text.end())
            finish = "stop" if stop_text.found else finish
        else:
            texts.append("")
        stats = Stats(
            prompt_tokens=len(prompt),
            cached_tokens=cached,
            new_tokens=len(ids),
            prefill_s=first - started,
            decode_s=last - first,
            seed=params.seed if params.seed is not None else 0,
            drafted_tokens=0 if draft is None else draft.drafted,
            accepted_tokens=0 if draft is None else draft.accepted,
        )
        completion = Completion("".join(texts), ids, finish, scores if logprobs else None, stats)
        yield Piece(texts[-1], completion)


def _last(pieces: Iterator[Piece]) -> Completion:
    for piece in pieces:
        if piece.completion is not None:
            return piece.completion
    raise RuntimeError("a stream ended without its completion")


def _check_stops(stop: str | Sequence[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    for text in stops:
        if not isinstance(text, str) or not text:
            raise UsageError(f"a stop string must be a string that is not empty, got {text!r}")
    return stops
