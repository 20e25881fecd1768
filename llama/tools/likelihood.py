"""Log-likelihoods of many continuations in batches. A context is fed once for all of its continuations.

The rows of the cache hold contexts. They are fed first, one row each; then their keys and values are copied to further
rows, and every row is fed one continuation:

    row 0   context A, continuation 0
    row 1   context B, continuation 0
    row 2   (copied) context A, continuation 1

A row keeps its context, so the next batch only feeds what follows the prefix that both share, such as worked examples.
Of the contexts of a batch that begin alike, the first is fed before the others, which copy its prefix.

Letters: B rows, T tokens of a step, t tokens of a pass, C model dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
SIMILAR = 16  # contexts that begin with this many equal ids begin alike

Ids = tuple[int, ...]
Texts = dict[Ids, list[int]]  # continuations of a context, without their last id -> numbers of the pairs


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

    A pair that is longer than the model's context is truncated at its start. At most batch_size texts are fed at once;
    pairs that differ only in their last id share a text. If the RoPE frequencies depend on the length
    (rope_scaling.BY_LENGTH), the texts are fed one by one.

    Raises ContextLengthError if a continuation is longer than the context, NumericalError if a result is not finite.
    """
    by_context: dict[Ids, Texts] = {}
    for number, (context, continuation) in enumerate(pairs):
        if len(continuation) > model.max_seq_len:
            raise ContextLengthError(
                f"a continuation has {len(continuation)} tokens, but the context of the model is {model.max_seq_len};"
                " use a shorter one, or extend the context (--rope-scaling)"
            )
        start = max(0, len(context) + len(continuation) - model.max_seq_len - 1)
        texts = by_context.setdefault(tuple(context[start:]), {})
        texts.setdefault(tuple(continuation[:-1]), []).append(number)
    longest = max((len(context) + len(ids) for context, texts in by_context.items() for ids in texts), default=1)
    size = 1 if model.rope.by_length else max(1, min(batch_size, MOST_TOKENS // longest))
    cache = model.new_cache(longest, batch=size, fixed=False)
    held: list[Ids] = [()] * size  # the context in each row, without its last id
    found, done = [Likelihood(0.0, True)] * len(pairs), 0
    for batch in batches(by_context, size):
        leaders: dict[Ids, Ids] = {}  # beginning -> the first context with it
        for context, _ in batch:
            leaders.setdefault(context[:SIMILAR], context)
        batch.sort(key=lambda one: one[0] not in leaders.values())
        contexts = [context for context, _ in batch]
        rows = [(context, texts[0]) for context, texts in batch]
        rows += [(context, text) for context, texts in batch for text in texts[1:]]
        fed = [(*context, *ids) for context, (ids, _) in rows]
        cache.reserve(max(map(len, fed)))
        if model.rope.by_length:  # a context would be rotated otherwise than with its continuation
            T = len(fed[0])
        else:
            T = 1 + max(len(ids) for _, (ids, _) in rows)
            feed_contexts(model, cache, held, 0, contexts[: len(leaders)])
            for row, context in enumerate(contexts[len(leaders) :], len(leaders)):
                leader = contexts.index(leaders[context[:SIMILAR]])
                if shared_prefix(held[leader], context) > shared_prefix(held[row], context):
                    copy(cache, held, leader, row)
            feed_contexts(model, cache, held, len(leaders), contexts[len(leaders) :])
            for row, (context, _) in enumerate(rows[len(contexts) :], len(contexts)):
                copy(cache, held, contexts.index(context), row)
        asked = []  # (row, column of the step, id that is predicted there, number of the pair)
        for row, (context, (ids, numbers)) in enumerate(rows):
            first = len(context) - 1 - max(0, len(fed[row]) - T)
            asked += [(row, first + i, id, n) for n in numbers for i, id in enumerate((*ids, pairs[n][1][-1]))]
        start = 0
        for h in feed(model, cache, 0, fed, T):
            here = [one for one in asked if start <= one[1] < start + h.shape[1]]
            if here:
                places = torch.tensor([one[:3] for one in here], device=h.device)
                values, best = predictions(model, h[places[:, 0], places[:, 1] - start], places[:, 2])
                for (*_, n), value, is_best in zip(here, values.tolist(), best.tolist(), strict=True):
                    found[n] = Likelihood(found[n].logprob + value, found[n].greedy and is_best)
            start += h.shape[1]
        for text, (_, (_, numbers)) in zip(fed, rows, strict=True):
            if not all(math.isfinite(found[n].logprob) for n in numbers):
                raise NumericalError(f"the log-likelihood of a text is not finite; {locate(model, text)}")
            done += len(numbers)
        progress(done, len(pairs))
    return found


def batches(by_context: Mapping[Ids, Texts], size: int) -> Iterator[list[tuple[Ids, list[tuple[Ids, list[int]]]]]]:
    """Divide texts into batches of at most `size`: contexts, each with some of its texts.

    Contexts with the same beginning follow each other, and those of similar length; the longest come first.
    """
    length: dict[Ids, int] = {}
    for context in by_context:
        length[context[:SIMILAR]] = max(len(context), length.get(context[:SIMILAR], 0))
    batch: list[tuple[Ids, list[tuple[Ids, list[int]]]]] = []
    for context in sorted(by_context, key=lambda ids: (-length[ids[:SIMILAR]], ids[:SIMILAR], -len(ids), ids)):
        texts = list(by_context[context].items())
        for part in (texts[start : start + size] for start in range(0, len(texts), size)):
            if sum(len(others) for _, others in batch) + len(part) > size:
                yield batch
                batch = []
            batch.append((context, part))
    if batch:
        yield batch


def feed_contexts(model: Transformer, cache: KVCache, held: list[Ids], row: int, contexts: Sequence[Ids]) -> None:
    """Feed contexts without their last ids into the rows from `row` on."""
    T = max((len(ids) - 1 - shared_prefix(held[row + i], ids) for i, ids in enumerate(contexts)), default=0)
    for _ in feed(model, cache, row, [ids[:-1] for ids in contexts], T) if T else ():
        pass
    held[row : row + len(contexts)] = contexts


def copy(cache: KVCache, held: list[Ids], source: int, target: int) -> None:
    """Copy a context from one row to another."""
    cache.copy_row(source, target, len(held[source]) - 1)
    held[target] = held[source]


def feed(model: Transformer, cache: KVCache, row: int, texts: Sequence[Ids], T: int) -> Iterator[Tensor]:
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
