"""Log-likelihoods of many continuations in batches. A context is fed once for all of its continuations.

The cache has a row for each context and a row for each continuation of a batch. The contexts are fed first; their keys
and values are copied to the rows of the continuations, which are fed next. A context stays in its row, so the next
batch only feeds what follows the prefix that both share, such as worked examples.

Letters: B rows, T tokens of a step, t tokens of a pass, N predictions, C model dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache import KVCache
from ..engine.nonfinite import locate
from ..errors import ContextLengthError, NumericalError
from ..generation.prefix import shared_prefix
from ..model import Transformer
from .evaluate import Progress, predictions

CHUNK = 2048  # tokens of all rows in one pass, which bounds the memory
MOST_TOKENS = 2**15  # tokens in the rows of a batch; batches of longer texts have fewer rows
SIMILAR = 16  # contexts that begin with this many equal ids are fed one after the other

Ids = tuple[int, ...]


class Likelihood(NamedTuple):
    """log p of a continuation in nats, and whether greedy decoding would produce it."""

    logprob: float
    greedy: bool


@torch.inference_mode()
def log_likelihoods(
    model: Transformer,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> list[Likelihood]:
    """log p(continuation | context) of pairs (context, continuation) of ids, each with at least one id.

    A pair that is longer than the model's context is truncated at its start. At most batch_size continuations are fed
    at once. If the RoPE frequencies depend on the length (rope_scaling.BY_LENGTH), the pairs are fed one by one.

    Raises ContextLengthError if a continuation is longer than the context, NumericalError if a result is not finite.
    """
    numbers: dict[Ids, list[int]] = {}  # context -> numbers of its pairs
    for number, (context, continuation) in enumerate(pairs):
        if len(continuation) > model.max_seq_len:
            raise ContextLengthError(
                f"a continuation has {len(continuation)} tokens, but the context of the model is {model.max_seq_len};"
                " use a shorter one, or extend the context (--rope-scaling)"
            )
        start = max(0, len(context) + len(continuation) - model.max_seq_len - 1)
        numbers.setdefault(tuple(context[start:]), []).append(number)
    longest = max((len(context) + len(pairs[i][1]) - 1 for context in numbers for i in numbers[context]), default=1)
    size = 1 if model.rope.by_length else max(1, min(batch_size, MOST_TOKENS // longest))
    cache = model.new_cache(longest, batch=2 * size, fixed=False)
    held: list[Ids] = [()] * size  # the context in each of the first rows
    found, done = [Likelihood(0.0, True)] * len(pairs), 0
    for batch in batches(numbers, size):
        contexts = [context for context, _ in batch]
        rows = [(row, number) for row, (_, part) in enumerate(batch) for number in part]
        texts = [(*contexts[row], *pairs[number][1][:-1]) for row, number in rows]
        cache.reserve(max(map(len, texts)))
        if model.rope.by_length:  # a context would be rotated otherwise than with its continuation
            T = len(texts[0])
        else:
            T = max(len(pairs[number][1]) for _, number in rows)
            new = max(len(ids) - 1 - shared_prefix(old, ids) for old, ids in zip(held, contexts, strict=False))
            for _ in feed(model, cache, 0, [ids[:-1] for ids in contexts], new):
                pass
            held[: len(contexts)] = contexts
            for target, (row, _) in enumerate(rows, size):
                cache.copy_row(row, target, len(contexts[row]) - 1)
        continuations = [pairs[number][1] for _, number in rows]
        results = score(model, continuations, texts, T, feed(model, cache, size, texts, T))
        for (_, number), text, result in zip(rows, texts, results, strict=True):
            if not math.isfinite(result.logprob):
                raise NumericalError(f"the log-likelihood of a text is not finite; {locate(model, text)}")
            found[number] = result
        done += len(rows)
        progress(done, len(pairs))
    return found


def batches(numbers: dict[Ids, list[int]], size: int) -> Iterator[list[tuple[Ids, list[int]]]]:
    """Divide pairs into batches of at most `size`: contexts, each with some of its numbers.

    Contexts with the same beginning follow each other, and those of similar length; the longest come first.
    """
    length: dict[Ids, int] = {}
    for context in numbers:
        length[context[:SIMILAR]] = max(len(context), length.get(context[:SIMILAR], 0))
    batch: list[tuple[Ids, list[int]]] = []
    for context in sorted(numbers, key=lambda ids: (-length[ids[:SIMILAR]], ids[:SIMILAR], -len(ids), ids)):
        for start in range(0, len(numbers[context]), size):
            part = numbers[context][start : start + size]
            if sum(len(others) for _, others in batch) + len(part) > size:
                yield batch
                batch = []
            batch.append((context, part))
    if batch:
        yield batch


def feed(model: Transformer, cache: KVCache, row: int, texts: Sequence[Sequence[int]], T: int) -> Iterator[Tensor]:
    """Feed the last T ids of texts into the rows from `row` on, which hold the ids before them: (B, t, C) of each pass.

    A text with fewer than T ids is padded at its end, where none of its own queries sees the padding.
    """
    B, device = len(texts), cache.device
    starts = [max(0, len(text) - T) for text in texts]
    ids = [[*text[start:], *[0] * (T - len(text))] for text, start in zip(texts, starts, strict=True)]
    tokens = torch.tensor(ids, device=device)  # (B, T)
    positions = torch.tensor(starts, device=device)[:, None] + torch.arange(T, device=device)  # (B, T)
    if len(set(starts)) == 1:
        positions = positions[0]  # (T,): one mask for all rows
    rows, length = cache.rows(row, row + B, max(starts)), T if model.rope.by_length else None
    size = max(1, CHUNK // B)
    for first in range(0, T, size):
        part = slice(first, first + size)
        yield model.hidden(tokens[:, part], positions[..., part], rows, length)


def score(
    model: Transformer,
    continuations: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    T: int,
    passes: Iterator[Tensor],
) -> list[Likelihood]:
    """The log-likelihood of each continuation, from the passes of `feed` over the last T ids of the texts."""
    targets = torch.full((len(texts), T), -1)  # (B, T): the id that each fed token predicts; -1 if it is not needed
    for row, (text, ids) in enumerate(zip(texts, continuations, strict=True)):
        end = min(len(text), T)
        targets[row, end - len(ids) : end] = torch.tensor(ids)
    logprobs, is_greedy, first = [0.0] * len(texts), [True] * len(texts), 0
    for h in passes:
        wanted = targets[:, first : first + h.shape[1]]  # (B, t)
        first += h.shape[1]
        rows, columns = (wanted >= 0).nonzero(as_tuple=True)  # (N,) each
        if len(rows):
            places = rows.to(h.device), columns.to(h.device)
            values, best = predictions(model, h[places], wanted[rows, columns].to(h.device))
            for row, value, is_best in zip(rows.tolist(), values.tolist(), best.tolist(), strict=True):
                logprobs[row] += value
                is_greedy[row] &= is_best
    return [Likelihood(*one) for one in zip(logprobs, is_greedy, strict=True)]
