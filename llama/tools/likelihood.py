"""Log-likelihoods of many continuations in batches. Texts with a common prefix share its keys and values.

A multiple-choice question is one context with several continuations. The context is fed once, in one row of the cache.
Its keys and values are copied to the rows of the other continuations, so only the continuations are fed there:

    row 0   context, continuation 0     step 1
    row 1   (copied) continuation 1     step 2, together with row 2
    row 2   (copied) continuation 2

Letters: B rows of a step, T tokens of a step, N predictions, C model dim, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..engine.nonfinite import locate
from ..errors import ContextLengthError, NumericalError
from ..model import Transformer
from .evaluate import Progress

SHORTEST_PREFIX = 16  # tokens; a shorter prefix is fed again, since each step has a fixed cost
CHUNK = 2048  # tokens of all rows in one pass, which bounds the memory
MOST_TOKENS = 2**15  # tokens in the cache; batches of longer texts have fewer rows


class Likelihood(NamedTuple):
    """log p of a continuation in nats, and whether greedy decoding would produce it."""

    logprob: float
    greedy: bool


class Text(NamedTuple):
    """Ids to feed, and the requests that they answer: (number, continuation).

    ids leaves out the last id of the continuations, since nothing is predicted after it. Requests that differ only in
    their last id therefore share a text.
    """

    ids: tuple[int, ...]
    requests: list[tuple[int, Sequence[int]]]

    @property
    def first(self) -> int:
        """The position of the first prediction."""
        return len(self.ids) - max(len(continuation) for _, continuation in self.requests)

    def targets(self, position: int) -> list[tuple[int, int]]:
        """The ids whose log p is needed at a position: (number of the request, id)."""
        last = position - len(self.ids)
        return [(number, ids[last]) for number, ids in self.requests if -last <= len(ids)]


def log_likelihoods(
    model: Transformer,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> list[Likelihood]:
    """log p(continuation | context) of pairs (context, continuation) of ids, each with at least one id.

    A pair that is longer than the model's context is truncated at its start. batch_size is the number of texts to feed
    at once. If the RoPE frequencies depend on the length (rope_scaling.BY_LENGTH), the texts are fed one by one.

    Raises ContextLengthError if a continuation is longer than the context, NumericalError if a result is NaN.
    """
    texts: dict[tuple[int, ...], Text] = {}
    for number, (context, continuation) in enumerate(pairs):
        if len(continuation) > model.max_seq_len:
            raise ContextLengthError(
                f"a continuation has {len(continuation)} tokens, but the context of the model is {model.max_seq_len};"
                " use a shorter one, or extend the context (--rope-scaling)"
            )
        ids = (*context, *continuation)[-model.max_seq_len - 1 : -1]
        texts.setdefault(ids, Text(ids, [])).requests.append((number, continuation))
    found = [Likelihood(0.0, True)] * len(pairs)
    waiting, rows, done = in_order(list(texts.values())), None, 0
    while waiting:
        most = 1 if model.rope.by_length else batch_size
        size = max(1, min(most, MOST_TOKENS // max(len(text.ids) for text in waiting[:most])))
        if rows is None or rows.cache.batch < size:
            rows = Rows(model, size, longest=max(map(len, texts)))
        batch, waiting = waiting[:size], waiting[size:]
        rows.feed(batch, found)
        done += sum(len(text.requests) for text in batch)
        progress(done, len(pairs))
    return found


def in_order(texts: Sequence[Text]) -> list[Text]:
    """Sort texts: longest first, so that the texts of a batch have similar lengths, and similar texts together."""
    families: list[list[Text]] = []
    for text in sorted(texts):
        last = families[-1][-1].ids if families else ()
        if shared_prefix(last, text.ids) >= max(SHORTEST_PREFIX, min(len(last), len(text.ids)) / 2):
            families[-1].append(text)
        else:
            families.append([text])
    families.sort(key=lambda family: -max(len(text.ids) for text in family))
    return [text for family in families for text in family]


def shared_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The number of leading ids that are equal."""
    differences = itertools.compress(itertools.count(), map(operator.ne, one, other))  # 3 times as fast as a loop
    return next(differences, min(len(one), len(other)))


def prefixes(texts: Sequence[Text]) -> list[tuple[int | None, int]]:
    """For each text, the earlier text that shares the longest prefix with it, and the length of the prefix.

    (None, 0) if no prefix is worth copying. The ids from a text's first prediction on are always fed.
    """
    found: list[tuple[int | None, int]] = []
    for i, text in enumerate(texts):
        shared = [min(shared_prefix(other.ids, text.ids), text.first) for other in texts[:i]]
        longest = max(shared, default=0)
        found.append((shared.index(longest), longest) if longest >= SHORTEST_PREFIX else (None, 0))
    return found


def schedule(rest: Sequence[int], sources: Sequence[int | None]) -> list[list[int]]:
    """Divide texts into steps. The texts of a step are fed together, after their sources, and have similar lengths.

    rest     for each text, the number of ids to feed
    sources  for each text, the text whose prefix is copied; None if there is none
    """
    steps: list[list[int]] = []
    waiting: list[int] = list(range(len(rest)))
    done: set[int | None] = {None}
    while waiting:
        ready = [i for i in waiting if sources[i] in done]
        longest = max(rest[i] for i in ready)
        steps.append([i for i in ready if 2 * (rest[i] + SHORTEST_PREFIX) > longest])
        done.update(steps[-1])
        waiting = [i for i in waiting if i not in done]
    return steps


class Rows:
    """The rows of a KV cache into which batches are fed. They keep a batch, since the next may share a prefix."""

    def __init__(self, model: Transformer, rows: int, longest: int):
        self.model = model
        self.cache = model.new_cache(longest, batch=rows, fixed=False)
        self.ids: list[tuple[int, ...]] = []  # the ids in each row

    @torch.inference_mode()
    def feed(self, texts: Sequence[Text], found: list[Likelihood]) -> None:
        """Feed a batch, and add the log-probabilities to `found`, which has an entry for each request."""
        self.cache.reserve(max(len(text.ids) for text in texts))
        shared = prefixes(texts)
        rest = [len(text.ids) - length for text, (_, length) in zip(texts, shared, strict=True)]
        steps = schedule(rest, [source for source, _ in shared])
        order = [i for step in steps for i in step]  # row -> text
        first = texts[order[0]]
        if self.ids and not self.model.rope.by_length:  # the last batch may share a prefix, such as few-shot examples
            lengths = [min(shared_prefix(ids, first.ids), first.first) for ids in self.ids]
            row = lengths.index(max(lengths))
            if row > 0:
                self.cache.copy_row(row, 0, lengths[row])
            rest[order[0]] -= lengths[row]
        self.ids = [texts[i].ids for i in order]
        for step in steps:
            T = max(rest[i] for i in step)
            for i in step:
                if (source := shared[i][0]) is not None:
                    self.cache.copy_row(order.index(source), order.index(i), max(0, len(texts[i].ids) - T))
            self._step([texts[i] for i in step], order.index(step[0]), T, found)
        for text in texts:
            if not all(math.isfinite(found[number].logprob) for number, _ in text.requests):
                raise NumericalError(f"the log-likelihood of a text is not finite; {locate(self.model, text.ids)}")

    def _step(self, texts: Sequence[Text], row: int, T: int, found: list[Likelihood]) -> None:
        """Feed the last T ids of each text into the rows from `row` on, which hold the ids before them already.

        A text with fewer than T ids is padded at its end, where none of its own queries sees the padding.
        """
        B, device = len(texts), self.cache.device
        starts = [max(0, len(text.ids) - T) for text in texts]
        ids = [[*text.ids[start:], *[0] * (T - len(text.ids))] for text, start in zip(texts, starts, strict=True)]
        tokens = torch.tensor(ids, device=device)  # (B, T)
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(T, device=device)  # (B, T)
        if len(set(starts)) == 1:
            positions = positions[0]  # (T,): one mask for all rows
        cache = self.cache.rows(row, row + B, max(starts))
        length = T if self.model.rope.by_length else None
        size = max(1, CHUNK // B)
        for first in range(0, T, size):
            part = slice(first, min(first + size, T))
            h = self.model.hidden(tokens[:, part], positions[..., part], cache, length)  # (B, t, C)
            places, targets = [], []
            for i, (text, start) in enumerate(zip(texts, starts, strict=True)):
                for position in range(max(text.first, start + first), min(len(text.ids), start + part.stop)):
                    places.append((i, position - start - first))
                    targets.append(text.targets(position))
            for some in range(0, len(places), 256):  # in parts, since logits are large: V for each prediction
                self._score(h, places[some : some + 256], targets[some : some + 256], found)

    def _score(
        self, h: Tensor, places: list[tuple[int, int]], targets: list[list[tuple[int, int]]], found: list[Likelihood]
    ) -> None:
        """Add log p of targets (request, id), which are predicted at places (row, index) of h (B, t, C), to `found`."""
        rows, columns = torch.tensor(places, device=h.device).T  # (N,) each
        logits = self.model.output(h[rows, columns][None])[0].float()  # (N, V)
        total, best = logits.logsumexp(-1), logits.argmax(-1)  # (N,)
        asked = [(n, id, number) for n, of_place in enumerate(targets) for number, id in of_place]
        at, ids = torch.tensor([one[:2] for one in asked], device=logits.device).T
        values, equal = (logits[at, ids] - total[at]).tolist(), (best[at] == ids).tolist()
        for (_, _, number), value, is_best in zip(asked, values, equal, strict=True):
            found[number] = Likelihood(found[number].logprob + value, found[number].greedy and is_best)
