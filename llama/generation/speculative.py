"""Speculative decoding (arXiv:2211.17192, arXiv:2302.01318): guess several tokens, check them in one pass.

A decoding step does little but read the weights, so a pass over a few tokens costs hardly more than one over a single
token. A draft guesses what comes next; one pass of the model gives its own distribution p at every guess; each guess x,
drawn from the draft's distribution q, is kept with probability min(1, p(x) / q(x)). The first that is not kept is
replaced by a draw from max(p - q, 0), normalized, and the guesses behind it are dropped. That changes nothing in what
is said, since the probability that x comes out is

    q(x) min(1, p(x) / q(x))  +  P(not kept) max(p(x) - q(x), 0) / sum(max(p - q, 0))
  =     min(q(x), p(x))       +              max(p(x) - q(x), 0)                        =  p(x),

because P(not kept) = 1 - sum(min(p, q)) = sum(max(p - q, 0)). So the draft decides about the speed alone. Greedy
decoding is the case in which p is 1 at one token: exactly that one is kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import takewhile, zip_longest
from threading import Lock
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from ..cache import KVCache
from ..engine.nonfinite import locate
from ..errors import NumericalError, UsageError
from ..generate import Token, check_finite, prefill, random_generator, room_for, seen_ids
from ..model import Transformer
from ..sampling import SamplingParams, probs, sample
from .prefix import shared_prefix

DRAFT_TOKENS = 10  # most guesses in one pass, unless told otherwise
# What one more token in a pass costs, in passes over a single token: 0.10 to 0.15 on a CPU.
ROW_COST = 0.12
# The share of guesses that are kept is estimated on the way: where the estimate starts, how much the last guess weighs
# in it, and how fast it comes back while nothing is guessed. The speed is flat around all three.
FIRST_RATE, WEIGHT, RETURN = 0.5, 0.2, 0.01
SHORTEST, LONGEST = 2, 4  # n-grams that are looked up; too many things follow a single token


TAKING = Lock()  # held while a stream looks whether a draft is free and takes it; threads may do so at once


class Guess(NamedTuple):
    """A drafted id and the distribution q (V,) it was drawn from; None where it was not drawn: q is 1 at the id."""

    id: int
    q: Tensor | None


Pick = Callable[[Tensor, Sequence[int]], Guess]  # from logits (V,) and the ids they follow, as the model's own tokens


# ----------------------------------------------------------------------------------------- the rule, and its loop
def acceptance(p: Tensor, guess: Guess) -> float:
    """The probability that a guess is kept: min(1, p(x) / q(x)), for p (V,)."""
    return float(p[guess.id]) if guess.q is None else min(1.0, float(p[guess.id] / guess.q[guess.id]))


def residual(p: Tensor, guess: Guess) -> Tensor:
    """The distribution (V,) of what replaces a guess: max(p - q, 0), normalized."""
    q = F.one_hot(torch.tensor(guess.id, device=p.device), len(p)) if guess.q is None else guess.q  # (V,)
    rest = (p - q).clamp(min=0)
    total = rest.sum()
    return rest / total if total > 0 else p  # p is nowhere above q only where they are equal up to rounding


def speculate(
    model: Transformer,
    prompt: Sequence[int],
    params: SamplingParams,
    draft: Draft,
    *,
    stop_ids: Collection[int] = (),
    n_vocab: int | None = None,
    cache: KVCache | None = None,
    logprobs: bool = False,
    chunk: int | None = None,
) -> Iterator[Token]:
    """`generate.generate` with a draft: the same tokens where it is greedy, else the same distribution of tokens.

    Arguments, stops and errors are those of `generate`; UsageError besides when the draft can't serve the model. The
    same seed gives the same tokens again, though others than without a draft. The draft is left with its counts. When
    the generator ends or is closed, the cache holds nothing but the prompt and tokens that were yielded.
    """
    tokens = list(prompt)  # and each new one
    end = len(tokens) + room_for(model, tokens, params, cache)
    cache = model.new_cache(end) if cache is None else cache
    generator = random_generator(params, cache.device)

    def distribution(logits: Tensor, text: Sequence[int], whose: str, by: Transformer) -> Tensor:
        check_finite(logits, f"{whose} {len(text) - len(prompt) + 1}", text, partial(locate, by))
        return probs(logits, params, seen_ids(text, params, n_vocab, logits.device))

    def pick(logits: Tensor, text: Sequence[int]) -> Guess:
        q = distribution(logits[:n_vocab], text, "the draft model for new token", draft.model or model)
        return Guess(int(sample(q, generator)), q)

    draft.start(model, tokens)
    try:
        if len(tokens) == end:
            return
        logits, guesses = prefill(model, tokens[cache.length :], cache, chunk)[None], list[Guess]()  # (1, V), none yet
        while True:
            for row, guess in zip_longest(logits[:, :n_vocab], guesses):  # after the last token, after each guess
                p = distribution(row, tokens, "new token", model)
                if guess is None:  # every guess was kept, and the pass has one more distribution to offer
                    id, kept = int(sample(p, generator)), False
                else:
                    kept = float(torch.rand((), generator=generator, device=p.device)) < acceptance(p, guess)
                    id = guess.id if kept else int(sample(residual(p, guess), generator))
                    draft.learn(kept)
                if not kept:
                    cache.trim(len(tokens))  # what was fed behind these was not said
                tokens.append(id)
                yield Token(id, float(row.log_softmax(-1)[id]) if logprobs else None, id in stop_ids)
                if id in stop_ids or len(tokens) == end:
                    return
                if not kept:
                    break
            limit = min(draft.length(), end - len(tokens) - 1)  # a pass says one token more than it keeps
            if model.rope.by_length and not _same_turns(model, len(tokens), len(tokens) + limit):
                limit = 0
            proposed = draft.propose(tokens, limit, pick) if limit else []
            guesses = [*takewhile(lambda guess: n_vocab is None or guess.id < n_vocab, proposed)]
            draft.drafted += len(guesses)
            fed = torch.tensor([[tokens[-1], *(guess.id for guess in guesses)]], device=cache.device)  # (1, T)
            with torch.inference_mode():
                logits = model(fed, cache=cache)[0]  # (T, V)
    except NumericalError:
        draft.forget()
        raise
    finally:
        cache.trim(min(cache.length, len(tokens)))  # a guess may be fed and its turn not come
        draft.busy = False


def _same_turns(model: Transformer, length: int, longer: int) -> bool:
    """Whether a token fed with others behind it, up to `longer`, is turned as if it were fed alone (rope.Rope)."""
    (ours, factor), (theirs, their_factor) = model.rope.frequencies(length), model.rope.frequencies(longer)
    return factor == their_factor and torch.equal(ours, theirs)


# --------------------------------------------------------------------------------------------------------- drafts
class Draft(ABC):
    """Guesses tokens, and how many are worth guessing. It serves one text at a time.

    model     what guesses, if it is a model
    most      most guesses in one pass
    cost      what a guess costs, in passes of the model over a single token
    drafted   how many were made since `start`, and `accepted` how many of them were kept
    """

    cost = ROW_COST
    model: Transformer | None = None

    def __init__(self, most: int = DRAFT_TOKENS):
        checks.integer("draft_tokens", most)
        self.most, self.rate, self.drafted, self.accepted, self.busy = most, FIRST_RATE, 0, 0, False

    def start(self, model: Transformer, prompt: Sequence[int]) -> None:
        """Begin a text of the model's. UsageError while another stream is using the draft."""
        with TAKING:
            if self.busy:
                raise UsageError(
                    "this draft is in use by another stream; finish or close that one, or make a second draft"
                )
            self.busy = True
        self.rate, self.drafted, self.accepted = FIRST_RATE, 0, 0

    @abstractmethod
    def propose(self, tokens: list[int], limit: int, pick: Pick) -> list[Guess]:
        """Up to `limit` guesses of what follows the prompt and the answer so far."""

    def forget(self) -> None:
        """Drop what is kept from one text to the next: it may hold what is not finite."""
        self.rate = FIRST_RATE

    def length(self) -> int:
        """How many tokens to guess: one more as long as the chance that it is kept, and all before it, is worth it."""
        length, chance = 0, self.rate
        while length < self.most and chance > self.cost:
            length, chance = length + 1, chance * self.rate
        if length == 0:  # the text may change, so try again some time
            self.rate += RETURN * (1 - self.rate)
        return length

    def learn(self, kept: bool) -> None:
        """What became of a guess."""
        self.accepted += kept
        self.rate += WEIGHT * (kept - self.rate)


class NGramDraft(Draft):
    """What followed the last few tokens when they last stood in the text: for copying, editing, quoting."""

    def start(self, model: Transformer, prompt: Sequence[int]) -> None:
        super().start(model, prompt)
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the position behind its last occurrence
        self._indexed = 0  # positions that have been entered

    def propose(self, tokens: list[int], limit: int, pick: Pick) -> list[Guess]:
        for at in range(self._indexed, len(tokens)):  # each once, so that a step costs no more in a long text
            for n in range(SHORTEST, min(LONGEST, at) + 1):
                self._after[tuple(tokens[at - n : at])] = at
        self._indexed = len(tokens)
        for n in range(LONGEST, SHORTEST - 1, -1):
            if at := self._after.get(tuple(tokens[-n:]), 0):
                period = len(tokens) - at  # where the text ends, the guess goes on with itself, as loops do
                return [Guess(tokens[at + i % period], None) for i in range(limit)]
        return []


class ModelDraft(Draft):
    """A smaller model with the same vocabulary. Its KV cache stays, so the next turn of a chat feeds its new part."""

    model: Transformer

    def __init__(self, model: Transformer, most: int = DRAFT_TOKENS):
        super().__init__(most)
        self.model, self.cache = model, model.new_cache()
        self._held: list[int] = []  # ids in the cache

    def start(self, model: Transformer, prompt: Sequence[int]) -> None:
        check_match(self.model, model)
        super().start(model, prompt)
        # Decoding reads every weight once. A draft as large as the model never pays, but who asks for it gets it.
        self.cost = ROW_COST + min(self.model.config.n_params / model.config.n_params, 0.3)

    def forget(self) -> None:
        super().forget()
        self.cache, self._held = self.model.new_cache(), []

    def propose(self, tokens: list[int], limit: int, pick: Pick) -> list[Guess]:
        shared = shared_prefix(self._held, tokens)
        self.cache.trim(shared)  # guesses that were not kept
        self._held, text, guesses = tokens[:shared], list(tokens), []
        for _ in range(min(limit, self.cache.max_len - len(tokens) + 1)):  # none beyond its own context
            guesses.append(pick(prefill(self.model, text[self.cache.length :], self.cache), text))
            text.append(guesses[-1].id)
        self._held = text[: self.cache.length]
        return guesses


def check_match(draft: Transformer, model: Transformer) -> None:
    """Raise UsageError where the ids of one model can't be those of the other, or the two lie on different devices."""
    ours, theirs = ((m.config.vocab_size, str(m.norm.weight.device)) for m in (draft, model))
    if ours != theirs:
        raise UsageError(
            f"a draft model shares the vocabulary and the device of its model, but this one has {ours[0]} ids on"
            f" {ours[1]} and its model {theirs[0]} on {theirs[1]}; take a smaller model of the same family"
        )


DRAFTS: dict[str, Callable[[int], Draft]] = {"ngram": NGramDraft}  # those that need no second model


def make_draft(draft: str | Transformer | Draft | None, most: int | None = None) -> Draft | None:
    """A draft by its name in DRAFTS, or by its model; None and what is a draft already stay. Raises UsageError."""
    if draft is None or isinstance(draft, Draft):
        if most is not None:
            raise UsageError("draft_tokens goes with the name or the model of a draft")
        return draft
    if not isinstance(draft, Transformer) and draft not in DRAFTS:
        raise UsageError(f"unknown draft {draft!r}; expected {', '.join(map(repr, DRAFTS))} or a model that is loaded")
    most = DRAFT_TOKENS if most is None else most
    return ModelDraft(draft, most) if isinstance(draft, Transformer) else DRAFTS[draft](most)
