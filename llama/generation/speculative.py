"""Speculative decoding (arXiv:2211.17192, arXiv:2302.01318): draft several tokens, verify them in one pass.

A decoding step mostly reads the weights, so a pass over a few tokens costs little more than a pass over one. A draft
proposes the next tokens, and one pass of the model computes the model's distribution p at each of them. A drafted token
x, drawn from the draft's distribution q, is accepted with probability min(1, p(x) / q(x)). The first rejected token is
replaced by a draw from max(p - q, 0), normalized, and the drafted tokens after it are dropped. The distribution of
the output does not change, since the probability that x is chosen is

    q(x) min(1, p(x) / q(x))  +  P(rejected) max(p(x) - q(x), 0) / sum(max(p - q, 0))
  =     min(q(x), p(x))       +              max(p(x) - q(x), 0)                        =  p(x),

because P(rejected) = 1 - sum(min(p, q)) = sum(max(p - q, 0)). So the draft affects only the speed. In greedy decoding
p is 1 at one token, and exactly that token is accepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import takewhile, zip_longest
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..cache import KVCache
from ..engine.nonfinite import locate
from ..errors import NumericalError, UsageError
from ..generate import Progress, prefill, room_for
from ..model import Transformer
from ..sampling import (
    Chooser,
    Constraint,
    SamplingParams,
    Token,
    check_extreme,
    extreme,
    history_of,
    probs,
    sample,
)
from .prefix import shared_prefix

DRAFT_TOKENS = 10  # default maximum of drafted tokens in one pass
# The cost of each further token in a pass, as a share of a pass over a single token: 0.10 to 0.15 on a CPU.
ROW_COST = 0.12
# The running estimate of the share of accepted tokens: its first value, the weight of the newest token, and how fast
# the estimate recovers while nothing is drafted. The speed hardly depends on these three.
FIRST_RATE, WEIGHT, RECOVERY = 0.5, 0.2, 0.01
SHORTEST, LONGEST = 2, 4  # lengths of the n-grams to look up; a single token has too many continuations


ACQUIRING = Lock()  # so that no two threads find the same draft idle and both reserve it


class DraftToken(NamedTuple):
    """A drafted id and the distribution q (V,) it was drawn from. None: it was not drawn, so q is 1 at this id."""

    id: int
    q: Tensor | None


# Logits (V,) and the ids before them -> a token, drawn with the sampling parameters of the answer
DraftPick = Callable[[Tensor, Sequence[int]], DraftToken]


# ----------------------------------------------------------------------------------------- the rule, and its loop
def acceptance(p: Tensor, drafted: DraftToken) -> float:
    """The probability that a drafted token is accepted: min(1, p(x) / q(x)), for p (V,)."""
    x, q = drafted
    return float(p[x]) if q is None else min(1.0, float(p[x] / q[x]))


def residual(p: Tensor, drafted: DraftToken) -> Tensor:
    """The distribution (V,) of the token that replaces a rejected one: max(p - q, 0), normalized."""
    x, q = drafted
    if q is None:
        q = torch.zeros_like(p)  # (V,)
        q[x] = 1
    rest = (p - q).clamp(min=0)  # (V,)
    total = rest.sum()  # ()
    return torch.where(total > 0, rest / total, p)  # if p exceeds q nowhere, p and q are equal up to rounding


def speculate(  # the parameters of generate.generate
    model: Transformer,
    prompt: Sequence[int],
    params: SamplingParams,
    draft: Draft,
    *,
    stop_ids: Collection[int] = (),
    n_vocab: int | None = None,
    cache: KVCache | None = None,
    constraint: Constraint | None = None,
    progress: Progress | None = None,
) -> Iterator[Token]:
    """`generate.generate` with a draft: the same tokens if greedy, otherwise the same distribution of tokens.

    Arguments, stops and errors are those of `generate`; a draft that does not fit the model raises UsageError. The same
    seed gives the same tokens again, but not the tokens without a draft. Afterwards `draft.drafted` and
    `draft.accepted` count the drafted and the accepted tokens. When the generator ends or is closed, the cache holds
    only the prompt and yielded tokens.
    """
    check_rope(model)
    end = len(prompt) + room_for(model, prompt, params, cache)
    cache = model.new_cache(end) if cache is None else cache
    chooser = Chooser(prompt, params, cache.device, stop_ids, n_vocab, constraint, diagnose=partial(locate, model))
    tokens, generator = chooser.text, chooser.generator

    def pick(logits: Tensor, text: Sequence[int]) -> DraftToken:
        logits, name = logits[:n_vocab], f"the draft model for new token {len(text) - len(prompt) + 1}"
        check_extreme(float(extreme(logits)), name, text, partial(locate, draft.model or model))
        q = probs(logits, params, history_of(text, len(prompt), params, n_vocab, logits.device))
        return DraftToken(int(sample(q, generator)), q)

    if draft.model is not None:
        check_match(draft.model, model, n_vocab and max(n_vocab, *(id + 1 for id in tokens)))
    draft.start(model, tokens)
    try:
        if len(tokens) == end:
            return
        logits = prefill(model, tokens[cache.length :], cache, progress=progress)[None]  # (1, V)
        drafted = list[DraftToken]()
        while True:
            for row, token in zip_longest(logits, drafted):  # the logits after tokens[-1], and after each drafted token
                p = chooser.probs(row)
                if token is None:  # all drafted tokens were accepted: draw from the last distribution
                    id, accepted = int(sample(p, generator)), False
                else:
                    accepted = float(torch.rand((), generator=generator, device=p.device)) < acceptance(p, token)
                    id = token.id if accepted else int(sample(residual(p, token), generator))
                    draft.learn(accepted)
                if not accepted:
                    cache.trim(len(tokens))  # drop the drafted tokens from the rejected one on
                chosen = chooser.append(id, row)
                yield chosen
                if chosen.stop or len(tokens) == end:
                    return
                if not accepted:
                    break
            limit = min(draft.length(), end - len(tokens) - 1)  # a pass yields the accepted tokens and one more
            proposed = draft.propose(tokens, limit, pick) if limit else []
            drafted = [*takewhile(lambda token: n_vocab is None or token.id < n_vocab, proposed)]
            draft.drafted += len(drafted)
            fed = torch.tensor([[tokens[-1], *(token.id for token in drafted)]], device=cache.device)  # (1, T)
            with torch.inference_mode():
                logits = model(fed, cache=cache)[0]  # (T, V)
    except NumericalError:
        draft.forget()
        raise
    finally:
        cache.trim(min(cache.length, len(tokens)))  # drop tokens that were fed but not yielded
        draft.busy = False


# --------------------------------------------------------------------------------------------------------- drafts
class Draft(ABC):
    """Proposes tokens, and decides how many are worth proposing. It serves one text at a time.

    model     the draft model, if there is one
    most      maximum of drafted tokens in one pass
    cost      cost of a drafted token, in passes of the model over a single token
    drafted   number of tokens drafted since `start`; `accepted`: how many of them were accepted
    """

    cost = ROW_COST
    model: Transformer | None = None

    def __init__(self, most: int = DRAFT_TOKENS):
        checks.integer("draft_tokens", most)
        self.most, self.rate, self.drafted, self.accepted, self.busy = most, FIRST_RATE, 0, 0, False

    def start(self, model: Transformer, prompt: Sequence[int]) -> None:
        """Begin a text of a model. Raises UsageError while another stream uses the draft."""
        with ACQUIRING:
            if self.busy:
                raise UsageError(
                    "this draft is in use by another stream; finish or close that stream, or create a second draft"
                )
            self.busy = True
        self.rate, self.drafted, self.accepted = FIRST_RATE, 0, 0

    @abstractmethod
    def propose(self, tokens: list[int], limit: int, pick: DraftPick) -> list[DraftToken]:
        """Up to `limit` tokens that may follow `tokens`, the prompt and the answer so far."""

    def forget(self) -> None:
        """Drop the state that is kept between texts, since it may hold NaN."""
        self.rate = FIRST_RATE

    def length(self) -> int:
        """How many tokens to draft. The n-th pays if the chance that all n are accepted exceeds its cost."""
        length, chance = 0, self.rate
        while length < self.most and chance > self.cost:
            length, chance = length + 1, chance * self.rate
        if length == 0:  # the text may become more predictable, so try again later
            self.rate += RECOVERY * (1 - self.rate)
        return length

    def learn(self, accepted: bool) -> None:
        """Record whether a drafted token was accepted."""
        self.accepted += accepted
        self.rate += WEIGHT * (accepted - self.rate)


class NGramDraft(Draft):
    """Proposes the tokens that followed the last few tokens at their previous occurrence; for copying and editing."""

    def start(self, model: Transformer, prompt: Sequence[int]) -> None:
        super().start(model, prompt)
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the position after its last occurrence
        self._indexed = 0  # positions that are in the table

    def propose(self, tokens: list[int], limit: int, pick: DraftPick) -> list[DraftToken]:
        for at in range(self._indexed, len(tokens)):  # index each position once: a step costs the same in a long text
            for n in range(SHORTEST, min(LONGEST, at) + 1):
                self._after[tuple(tokens[at - n : at])] = at
        self._indexed = len(tokens)
        for n in range(LONGEST, SHORTEST - 1, -1):
            if at := self._after.get(tuple(tokens[-n:]), 0):
                period = len(tokens) - at  # at the end of the text, the proposal starts over
                return [DraftToken(tokens[at + i % period], None) for i in range(limit)]
        return []


class ModelDraft(Draft):
    """A smaller model with the same vocabulary. Its KV cache is kept, so a chat's next turn feeds only its new part."""

    model: Transformer

    def __init__(self, model: Transformer, most: int = DRAFT_TOKENS):
        super().__init__(most)
        self.model, self.cache = model, model.new_cache()
        self._cached: list[int] = []  # ids in the cache

    def start(self, model: Transformer, prompt: Sequence[int]) -> None:
        super().start(model, prompt)
        # Decoding reads every weight once. A draft as large as the model never pays, but it is allowed.
        self.cost = ROW_COST + min(self.model.config.n_params / model.config.n_params, 0.3)

    def forget(self) -> None:
        super().forget()
        self.cache, self._cached = self.model.new_cache(), []

    def propose(self, tokens: list[int], limit: int, pick: DraftPick) -> list[DraftToken]:
        shared = shared_prefix(self._cached, tokens)
        self.cache.trim(shared)  # drop rejected tokens
        self._cached, text, drafted = tokens[:shared], list(tokens), list[DraftToken]()
        for _ in range(min(limit, self.cache.max_len - len(tokens) + 1)):  # not beyond the draft's context
            drafted.append(pick(prefill(self.model, text[self.cache.length :], self.cache), text))
            text.append(drafted[-1].id)
        self._cached = text[: self.cache.length]
        return drafted


def check_rope(model: Transformer) -> None:
    """Raise UsageError if the rotation of a token depends on the length of the text."""
    if model.rope.by_length:
        raise UsageError("a draft needs RoPE frequencies that do not depend on the length of the text: leave draft out")


def check_match(draft: Transformer, model: Transformer, n_vocab: int | None = None) -> None:
    """Raise UsageError if two models differ in the number of ids, or are on different devices.

    n_vocab  the number of ids in use. Further rows of an embedding are padding, whose number may differ.
    A model whose weights are not read yet is on the device "meta", which fits every device.
    """
    ours, theirs = ((m.config.vocab_size, str(m.norm.weight.device)) for m in (draft, model))
    padded = n_vocab is not None and min(ours[0], theirs[0]) >= n_vocab
    if not padded and ours[0] != theirs[0]:
        found = f"the draft has {ours[0]} token ids, the model {theirs[0]}: use a smaller model of the same family"
        raise UsageError(f"the draft model must have the same vocabulary as the model; {found}")
    if len({ours[1], theirs[1], "meta"}) > 2:
        raise UsageError(f"the draft must be on the device of the model, {theirs[1]}, but it is on {ours[1]}")


def make_draft(draft: str | Transformer | Draft | None, most: int | None = None) -> Draft | None:
    """A draft, given as "ngram" or as its model; None and a Draft are returned unchanged. Raises UsageError."""
    if draft is None or isinstance(draft, Draft):
        if most is not None:
            raise UsageError("leave draft_tokens (--draft-tokens) out: it needs a draft that is 'ngram' or a model")
        return draft
    most = DRAFT_TOKENS if most is None else most
    if isinstance(draft, Transformer):
        return ModelDraft(draft, most)
    if draft != "ngram":
        raise UsageError(f"unknown draft {checks.shown(draft)}; expected 'ngram' or a loaded model")
    return NGramDraft(most)
