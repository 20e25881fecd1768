"""Log-likelihoods of many continuations in batches. Texts with a common prefix share its keys and values.

A multiple-choice question is one context with several continuations. The context is fed once, in one row of the cache.
Its keys and values are copied to the rows of the other continuations, so only the continuations are fed there:

    row 0   context, continuation 0     step 1
    row 1   (copied) continuation 1     step 2, together with row 2
    row 2   (copied) continuation 2

Letters: B rows of a step, T tokens of a step, N predictions, C model dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..engine.nonfinite import locate
from ..errors import ContextLengthError, NumericalError, UsageError
from ..model import Transformer

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


class Prediction(NamedTuple):
    """The row and index of a hidden state in a step, and the ids whose log p is needed: (number of the request, id)."""

    row: int
    place: int
    targets: list[tuple[int, int]]


def log_likelihoods(
    model: Transformer,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int,
    progress: Callable[[int], object] | None = None,
) -> list[Likelihood]:
    """log p(continuation | context) of pairs (context, continuation) of ids, each with at least one id.

    A pair that is longer than the model's context is truncated at its start. batch_size is the number of texts to feed
    at once. progress is called after each batch with its number of pairs. If the RoPE frequencies depend on the length
    (rope_scaling.BY_LENGTH), the texts are fed one by one.

    Raises ContextLengthError if a continuation is longer than the context, NumericalError if a result is NaN.
    """
    texts: dict[tuple[int, ...], Text] = {}
    for number, (context, continuation) in enumerate(pairs):
        if not context or not continuation:
            raise UsageError(f"pair {number + 1}: expected at least one id of context and one of continuation")
        if len(continuation) > model.max_seq_len:
            raise ContextLengthError(
                f"a continuation has {len(continuation)} tokens, but the context of the model is {model.max_seq_len};"
                " use a shorter one, or extend the context (--rope-scaling)"
            )
        ids = (*context, *continuation)[-model.max_seq_len - 1 : -1]
        texts.setdefault(ids, Text(ids, [])).requests.append((number, continuation))
    found = [Likelihood(0.0, True)] * len(pairs)
    waiting, rows = in_order(list(texts.values())), None
    longest = max(map(len, texts), default=0)
    while waiting:
        size = batch_rows(waiting, 1 if model.rope.by_length else batch_size)
        if rows is None or rows.cache.batch < size:
            rows = Rows(model, size, longest)
        batch, waiting = waiting[:size], waiting[size:]
        rows.feed(batch, found)
        if progress is not None:
            progress(sum(len(text.requests) for text in batch))
    return found


def in_order(texts: Sequence[Text]) -> list[Text]:
    """Sort texts: longest first, so that the texts of a batch have similar lengths, and similar texts together."""
    families: list[list[Text]] = []
    for text in sorted(texts):
        if families:
            shared = shared_prefix(families[-1][-1].ids, text.ids)
            if shared >= SHORTEST_PREFIX and 2 * shared >= min(len(families[-1][-1].ids), len(text.ids)):
                families[-1].append(text)
                continue
        families.append([text])
    families.sort(key=lambda family: -max(len(text.ids) for text in family))
    return [text for family in families for text in family]


def batch_rows(texts: Sequence[Text], most: int) -> int:
    """The size of the next batch: a power of two if `most` texts do not fit into MOST_TOKENS."""
    rows = min(most, len(texts))
    fit = MOST_TOKENS // max(len(text.ids) for text in texts[:rows])
    return rows if fit >= rows else 1 << max(0, fit.bit_length() - 1)


def shared_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The number of leading ids that are equal, by bisection: comparing slices is faster than comparing single ids."""
    low, high = 0, min(len(one), len(other))
    if one[:SHORTEST_PREFIX] != other[:SHORTEST_PREFIX]:
        high = min(high, SHORTEST_PREFIX - 1)
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def prefixes(texts: Sequence[Text]) -> list[tuple[int | None, int]]:
    """For each text, the earlier text that shares the longest prefix with it, and the length of the prefix.

    (None, 0) if no prefix is worth copying. The ids from a text's first prediction on are always fed.
    """
    found: list[tuple[int | None, int]] = []
    for i, text in enumerate(texts):
        best: tuple[int | None, int] = (None, SHORTEST_PREFIX - 1)
        for j in range(i):
            length = min(shared_prefix(texts[j].ids, text.ids), text.first)
            if length > best[1]:
                best = (j, length)
        found.append((None, 0) if best[0] is None else best)
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
        if self.model.rope.by_length:  # then the keys of a prefix depend on the length of the text
            sources, shared = [None], [0]
        else:
            sources, shared = map(list, zip(*prefixes(texts), strict=True))
        rest = [len(text.ids) - length for text, length in zip(texts, shared, strict=True)]
        steps = schedule(rest, sources)
        row_of = {i: row for row, i in enumerate(i for step in steps for i in step)}
        first = texts[steps[0][0]]
        if self.ids and not self.model.rope.by_length:  # the last batch may share a prefix, such as few-shot examples
            lengths = [min(shared_prefix(ids, first.ids), first.first) for ids in self.ids]
            row = max(range(len(lengths)), key=lengths.__getitem__)
            if row > 0:
                self.cache.copy_row(row, 0, lengths[row])
            rest[steps[0][0]] -= lengths[row]
        self.ids = [texts[i].ids for step in steps for i in step]
        for step in steps:
            T = max(rest[i] for i in step)
            for i in step:
                if (source := sources[i]) is not None:
                    self.cache.copy_row(row_of[source], row_of[i], max(0, len(texts[i].ids) - T))
            self._step([texts[i] for i in step], row_of[step[0]], T, found)
        for text in texts:
            for number, _ in text.requests:
                if not math.isfinite(found[number].logprob):
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
            predictions = []
            for i, (text, start) in enumerate(zip(texts, starts, strict=True)):
                for position in range(max(text.first, start + first), min(len(text.ids), start + part.stop)):
                    predictions.append(Prediction(i, position - start - first, text.targets(position)))
            self._score(h, predictions, found)

    def _score(self, h: Tensor, predictions: Sequence[Prediction], found: list[Likelihood]) -> None:
        """Add log p of the targets of predictions from h (B, t, C) to `found`."""
        for start in range(0, len(predictions), 256):  # in parts, since logits are large: V for each prediction
            part = predictions[start : start + 256]
            rows, places = torch.tensor([(p.row, p.place) for p in part], device=h.device).T
            logits = self.model.output(h[rows, places][None])[0].float()  # (N, V)
            total, best = logits.logsumexp(-1), logits.argmax(-1)  # (N,)
            targets = [(i, id, number) for i, p in enumerate(part) for number, id in p.targets]
            at, ids = torch.tensor([target[:2] for target in targets], device=logits.device).T
            values, equal = (logits[at, ids] - total[at]).tolist(), (best[at] == ids).tolist()
            for (_, _, number), value, is_best in zip(targets, values, equal, strict=True):
                found[number] = Likelihood(found[number].logprob + value, found[number].greedy and is_best)
