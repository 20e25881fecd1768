"""Llama: a model with its tokenizer; text in, text out."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, overload

from .chat import encode_chat
from .engine.nonfinite import locate
from .errors import LlamaError, NumericalError, UsageError
from .generate import generate
from .generation.answer import Answer, Completion, Piece, Stats, StopText
from .generation.batch import Batch, Ended, Request, Started, TokenEvent
from .generation.session import Session
from .generation.speculative import Draft, make_draft, speculate
from .model import Transformer
from .sampling import LARGEST_SEED, SamplingParams
from .tokenizer import Tokenizer, token_ids

__all__ = ["Completion", "Llama", "Piece", "Session", "Stats", "StopText"]

BATCH_SIZE = 16  # answers in progress at once

MOST_STOPS, LONGEST_STOP = 256, 1000  # stop strings, and characters of one


class Llama:
    """A model and its tokenizer, created by `llama.load`.

    Sampling options of all methods, with defaults: max_new_tokens=256, temperature=0.0 (greedy), top_k=0, top_p=1.0,
    min_p=0.0, repetition_penalty=1.0, seed=None; sampling.SamplingParams describes them. Further options: stop=[...],
    strings that end the text; logprobs=True; draft="ngram", or draft=a smaller Llama or Transformer with the same
    vocabulary, which is faster if the draft predicts the text well; draft_tokens, the maximum number of drafted tokens
    per pass (generation/speculative.py).

    Threads may call it at once, and each gets the answer it would get alone. A Session or a Draft serves one stream at
    a time; a second stream raises UsageError.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        chat_template: str | None = None,
        *,
        chat_format: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        adapters: Sequence[str] = (),
        warnings: Sequence[str] = (),
    ):
        self.model, self.tokenizer, self.chat_template = model, tokenizer, chat_template
        self.chat_format = chat_format
        self.sampling = dict(sampling or {})
        self.adapters, self.warnings = tuple(adapters), tuple(warnings)

    @overload
    def generate(self, prompt: str, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompt: Sequence[str], **options: Any) -> list[Completion]: ...
    def generate(self, prompt: str | Sequence[str], **options: Any) -> Completion | list[Completion]:
        """Continue raw text; a begin-of-text id is added if the model was trained with one.

        A list of prompts returns a list of completions, the same as one by one. batch_size of them (default: 16) run at
        once; with a draft or a session, they run one after the other. The first error ends all of them; its message
        gives the number of the prompt.
        """
        if isinstance(prompt, str):
            return _last(self.stream(prompt, **options))
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise UsageError(f"prompt must be a string or a list of strings, got {type(prompt).__name__}")
        for number, one in enumerate(prompt):
            if not isinstance(one, str):
                with _named(number, prompt):
                    raise UsageError(f"a prompt must be a string, got {type(one).__name__}")
        batch_size = options.pop("batch_size", BATCH_SIZE)
        if any(options.get(name) is not None for name in ("draft", "draft_tokens", "session")):
            one_by_one = []
            for number, one in enumerate(prompt):
                with _named(number, prompt):
                    one_by_one.append(_last(self.stream(one, **options)))
            return one_by_one
        options = {name: value for name, value in options.items() if name not in ("draft", "draft_tokens", "session")}
        pairs = []
        for number, one in enumerate(prompt):
            with _named(number, prompt):
                pairs.append((self.tokenizer.encode_prompt(one), options))
        done: list[Completion | None] = [None] * len(pairs)
        for number, piece in self.stream_batch(pairs, batch_size=batch_size):
            if isinstance(piece, LlamaError):
                with _named(number, prompt):
                    raise piece
            done[number] = piece.completion
        return [completion for completion in done if completion is not None]

    def stream(self, prompt: str, **options: Any) -> Generator[Piece]:
        """`generate` as a stream of pieces, whose texts joined are the completion's text."""
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

        The model's template formats them, or the built-in format named by `chat_format`. tools are JSON schemas of
        functions that the assistant may call; its calls are part of the text.
        """
        return _last(self.stream_chat(messages, tools=tools, **options))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Generator[Piece]:
        """`chat` as a stream of pieces."""
        prompt = encode_chat(self.tokenizer, self.chat_template, messages, format=self.chat_format, tools=tools)
        return self.stream_ids(prompt, continues=False, **options)

    def stream_ids(
        self,
        prompt: Sequence[int],
        *,
        stop: str | Sequence[str] | None = None,
        logprobs: bool = False,
        session: Session | None = None,
        draft: str | Llama | Transformer | Draft | None = None,
        draft_tokens: int | None = None,
        continues: bool = True,
        **sampling: Any,
    ) -> Generator[Piece]:
        """Prompt ids in, pieces of text out; the methods above use it.

        session    keeps the KV cache for the next call; a speculative.Draft as `draft` also keeps its own
        continues  True: the text is what the new ids append to the prompt's text. False: it is a separate text, as in a
                   chat, without the space that SentencePiece adds before every text

        Invalid options raise UsageError here, not at the first piece.
        """
        if not isinstance(session, Session | None):
            raise UsageError(f"session must be a Session, got {type(session).__name__}")
        params = self._params(sampling)
        guesses = make_draft(draft.model if isinstance(draft, Llama) else draft, draft_tokens)
        prompt = token_ids(prompt)
        begin = partial(Answer, self.tokenizer, prompt, _check_stops(stop), continues=continues)
        return self._stream(prompt, params, begin, logprobs, session, guesses)

    def _stream(
        self,
        prompt: list[int],
        params: SamplingParams,
        begin: Callable[[], Answer],
        logprobs: bool,
        session: Session | None,
        draft: Draft | None,
    ) -> Generator[Piece]:
        cache = None if session is None else session.reuse(self.model, prompt, self.tokenizer)
        cached = 0 if cache is None else cache.length
        answer = begin()
        plain = partial(generate, diagnose=partial(locate, self.model))
        tokens = (plain if draft is None else partial(speculate, draft=draft))(
            self.model,
            prompt,
            params,
            stop_ids=self.tokenizer.stop_ids,
            n_vocab=self.tokenizer.n_vocab,
            cache=cache,
            logprobs=logprobs,
        )
        nonfinite = False
        try:
            for token in tokens:
                if text := answer.feed(token):
                    yield Piece(text)
                if answer.done:
                    break
        except NumericalError:
            nonfinite = True
            raise
        finally:
            tokens.close()  # type: ignore[attr-defined]
            if session is not None:
                session.give_back(prompt + answer.ids, nonfinite)
        drafted, accepted = (0, 0) if draft is None else (draft.drafted, draft.accepted)
        yield answer.end(params, cached=cached, logprobs=logprobs, drafted=drafted, accepted=accepted)

    def stream_batch(
        self, prompts: Iterable[tuple[Sequence[int], Mapping[str, Any]]], *, batch_size: int = BATCH_SIZE
    ) -> Iterator[tuple[int, Piece | LlamaError]]:
        """Answers to many prompts at once, each as from `stream_ids`: (number of the prompt, its next piece).

        prompts are pairs of ids and options (those of the class, without draft), read whenever a slot is free. At most
        batch_size answers are in progress; the next prompt uses the slot of an answer that ended (generation/batch.py).
        There is a piece for each token, so its text may be empty. A prompt that can't be run, or whose logits are not
        finite, yields its error instead of its last piece; invalid options raise UsageError.
        """
        settings: dict[int, tuple[Callable[[], Answer], SamplingParams, bool]] = {}  # by the number of the prompt

        def request(number: int, prompt: Sequence[int], options: Mapping[str, Any]) -> Request:
            sampling, prompt = dict(options), token_ids(prompt)
            stops, logprobs = _check_stops(sampling.pop("stop", None)), sampling.pop("logprobs", False)
            begin = partial(Answer, self.tokenizer, prompt, stops, continues=sampling.pop("continues", True))
            params = self._params(sampling)
            settings[number] = begin, params, logprobs
            return Request(prompt, params, logprobs)

        requests: Iterable[Request] = (request(number, *pair) for number, pair in enumerate(prompts))
        if isinstance(prompts, Sequence):
            requests = list(requests)
        stop_ids, n_vocab = self.tokenizer.stop_ids, self.tokenizer.n_vocab
        batch = Batch(self.model, requests, slots=batch_size, stop_ids=stop_ids, n_vocab=n_vocab)
        answers: dict[int, tuple[Answer, int]] = {}
        for event in batch:
            number = event.number
            match event:
                case Started():
                    begin, _, _ = settings[number]
                    answers[number] = begin(), event.cached
                case TokenEvent():
                    answer = answers[number][0]
                    text = answer.feed(event.token)
                    if not event.token.stop:
                        yield number, Piece(text)
                    if answer.done:
                        batch.finish(number)
                case Ended():
                    _, params, logprobs = settings.pop(number)
                    if event.error is not None:
                        answers.pop(number, None)
                        yield number, event.error
                    else:
                        answer, cached = answers.pop(number)
                        yield number, answer.end(params, cached=cached, logprobs=logprobs)

    def _params(self, sampling: Mapping[str, Any]) -> SamplingParams:
        """The sampling options, with a seed. Raises UsageError for an unknown option."""
        known = {f.name for f in dataclasses.fields(SamplingParams)}
        if unknown := sampling.keys() - known:
            raise UsageError(
                f"unknown option {sorted(unknown)[0]!r}; known:"
                f" {', '.join(sorted(known | {'stop', 'logprobs', 'draft', 'draft_tokens'}))}"
            )
        params = SamplingParams(**{**self.sampling, **sampling})
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbelow(LARGEST_SEED))
        return params


@contextmanager
def _named(number: int, prompts: Sequence[object]) -> Iterator[None]:
    """Prefix an error with the prompt it is about: number counts from 0, the message from 1."""
    try:
        yield
    except LlamaError as error:
        raise type(error)(f"prompt {number + 1} of {len(prompts)}: {error}") from error


def _last(pieces: Iterator[Piece]) -> Completion:
    for piece in pieces:
        if piece.completion is not None:
            return piece.completion
    raise RuntimeError("a stream ended without its completion")


def _check_stops(stop: str | Sequence[str] | None) -> list[str]:
    if not isinstance(stop, str | Sequence | None):
        raise UsageError(f"stop must be a string or a list of strings, got {stop!r:.80}")
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if len(stops) > MOST_STOPS or any(isinstance(text, str) and len(text) > LONGEST_STOP for text in stops):
        raise UsageError(
            f"expected at most {MOST_STOPS} stop strings of at most {LONGEST_STOP} characters, since each new token is"
            f" compared with all of them; got {len(stops)}, the longest with {max(map(len, stops))} characters"
        )
    for text in stops:
        if not isinstance(text, str) or not text:
            raise UsageError(f"a stop string must be a non-empty string, got {text!r}")
    return stops
