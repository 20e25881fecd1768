"""Recall of facts at known places of a long text, under the methods that stretch a context.

Facts such as "The magic number of Lima is 29305." stand at equal distances in a text, each of them once. A model reads
the text. At some lengths it is asked for every fact that it has read. The cache drops each question after its answer,
so one pass over the text serves all questions. The perplexity of the text between two lengths comes from the same pass.

The design is that of "needle in a haystack" (Kamradt, 2023) and of the passkeys of arXiv:2305.16300, with several keys
in one text (as in RULER, arXiv:2404.06654). Letters: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache import KVCache
from ..checkpoint import open_checkpoint
from ..errors import UsageError
from ..loader import build
from ..model import Transformer
from ..rope_scaling import trained_length
from ..sampling import logprob_of
from ..tokenizer import Tokenizer
from ..tools.perplexity import next_logprobs, start_ids
from .perplexity import read_text, scalings, source, tiny_folder

PLACES = [
    "London", "Paris", "Rome", "Cairo", "Tokyo", "Lima", "Oslo", "Delhi", "Berlin", "Madrid", "Athens",
    "Vienna", "Dublin", "Lisbon", "Moscow", "Prague", "Boston", "Denver", "Dallas", "Havana", "Quebec", "Sydney",
    "Nairobi", "Tunis", "Beirut", "Baghdad", "Tehran", "Kabul", "Manila", "Seoul", "Hanoi", "Jakarta",
]  # fmt: skip
FACT = "\nThe magic number of {} is {}.\n"
QUESTION = "\nThe magic number of {} is"
DIGITS = 5
PER_LENGTH = 8  # number of facts in each stretch of one trained length
EDGES = (0.5, 1, 1.25, 1.5, 1.75, 2, 3, 4)  # when the model is asked, as multiples of the trained length
METHODS = ("none", "linear:2", "ntk:2", "ntk:4", "yarn:2")


class Recall(NamedTuple):
    """The answer to one question.

    method   how the context was extended
    trained  the trained length
    read     tokens that the model had read
    at       position of the fact
    nats     mean of -log p of the number's tokens
    right    share of these tokens that are the model's most probable token, given the true tokens before. The share
             is 1 exactly if greedy decoding writes the whole number
    text     mean of -log p of the text's own tokens, from the previous length at which the model was asked up to `read`
    """

    method: str
    trained: int
    read: int
    at: int
    nats: float
    right: float
    text: float


@dataclass(frozen=True)
class Found:
    """The answers of a model."""

    model: str
    answers: Sequence[Recall]


@dataclass(frozen=True)
class Haystack:
    """A text with facts.

    ids    (T,)
    plain  (T,), False for the tokens of a fact
    facts  for each fact: place, number, its first position, and the position after its last
    """

    ids: Tensor
    plain: Tensor
    facts: tuple[tuple[str, str, int, int], ...]


def haystack(tokenizer: Tokenizer, text: str, length: int, every: int) -> Haystack:
    """A text of `length` tokens with a fact in the middle of each block of `every` tokens.

    Raises UsageError if there are more facts than places, or if the text is too short.
    """
    draw = random.Random(0)
    count = length // every
    if count > len(PLACES):
        raise UsageError(f"length (--length) must be at most {len(PLACES) * every} for this model, got {length}")
    own = tokenizer.encode(text)
    ids = start_ids(tokenizer)
    plain, facts, used = [True] * len(ids), [], 0
    for i, place in enumerate(PLACES[:count]):
        upto = i * every + every // 2 - len(ids)
        number = "".join(draw.choice("0123456789") for _ in range(DIGITS))
        fact = tokenizer.encode(FACT.format(place, number))
        if len(fact) > every // 2:
            raise UsageError(
                f"a fact has {len(fact)} tokens, at most {every // 2} fit; use a model that was trained for at least"
                f" {2 * PER_LENGTH * len(fact)} tokens"
            )
        ids += own[used : used + upto] + fact
        plain += [True] * upto + [False] * len(fact)
        facts.append((place, number, len(ids) - len(fact), len(ids)))
        used += upto
    rest = length - len(ids)
    if used + rest > len(own):
        raise UsageError(
            f"the text has {len(own)} tokens, but {used + rest} are needed; use a longer text (--text) or a smaller"
            " length (--length)"
        )
    return Haystack(torch.tensor(ids + own[used : used + rest]), torch.tensor(plain + [True] * rest), tuple(facts))


def question(tokenizer: Tokenizer, place: str, number: str) -> tuple[list[int], int]:
    """The ids of a question with its answer, and the index of the first token of the number."""
    asked = tokenizer.encode(QUESTION.format(place))
    ids = tokenizer.encode(f"{QUESTION.format(place)} {number}")
    start = next(i for i, id in enumerate(ids) if i >= len(asked) or id != asked[i])
    while not tokenizer.token_bytes(ids[start]).strip():  # a token that is only a space is not part of the number
        start += 1
    return ids, start


@torch.inference_mode()
def answer(net: Transformer, cache: KVCache, ids: Sequence[int], start: int) -> tuple[float, float]:
    """`nats` and `right` (see Recall) of ids[start:], read after the cached text. The cache keeps its length."""
    read = cache.length
    h = net.hidden(torch.tensor([ids], device=cache.device), cache=cache)  # (B, T, C)
    cache.trim(read)
    logits = net.output(h[:, start - 1 : -1])[0].float()  # (T', V): each row predicts the next token
    wanted = torch.tensor(ids[start:], device=logits.device)  # (T',)
    nats = -logprob_of(logits, wanted).double().mean()
    return float(nats), float((logits.argmax(-1) == wanted).double().mean())


def lengths(trained: int, length: int) -> list[int]:
    """The lengths at which the model is asked: each edge that is not just before the end of the text, and the end."""
    return [read for read in (round(edge * trained) for edge in EDGES) if read + trained // 8 < length] + [length]


@torch.inference_mode()
def measure(
    model: str,
    text: Path | None = None,
    length: int | None = None,
    methods: Sequence[str] | None = None,
    dtype: str | None = None,
    progress: Callable[[str, int, int], object] = lambda method, done, total: None,
) -> Found:
    """Read a text of `length` tokens under each method, and ask for its facts.

    text      by default the book that is included with tiny-kjv
    length    by default 1.75 times the trained length
    progress  called with the method, the number of completed tokens and that of all tokens of the run

    Raises UsageError if the text is too short or the length out of range.
    """
    folder, text = source(model, text or tiny_folder() / "held-out.txt")
    checkpoint = open_checkpoint(folder)
    trained = int(trained_length(checkpoint.config))
    length = trained * 7 // 4 if length is None else length
    if length < trained // 2:
        raise UsageError(f"length (--length) must be at least half the trained length, {trained // 2}, got {length}")
    tokenizer = checkpoint.tokenizer()
    hay = haystack(tokenizer, read_text(text).decode(), length, trained // PER_LENGTH)
    asked = [(question(tokenizer, place, number), at, end) for place, number, at, end in hay.facts]
    room = length + max(len(ids) for (ids, _), *_ in asked)
    answers = []
    for method, scaling in scalings(methods or METHODS).items():
        net = build(checkpoint, None, dtype, max_seq_len=room, fast=True, rope_scaling=scaling)
        cache = net.new_cache(room)
        first = 0
        for end in lengths(trained, length):
            found = []
            for start in range(first, end, 256):
                part = slice(start, min(start + 256, end))
                found.append(_logprobs(net, cache, hay, part))
                progress(method, part.stop, length)
            text_nats = float(-torch.cat(found).double().mean())
            answers += [
                Recall(method, trained, end, at, *answer(net, cache, ids, start), text_nats)
                for (ids, start), at, known in asked
                if known <= end
            ]
            first = end
    return Found(model, answers)


def _logprobs(net: Transformer, cache: KVCache, hay: Haystack, part: slice) -> Tensor:
    """Read a part of the text into the cache. Returns log p of the next tokens, except those of facts."""
    h = net.hidden(hay.ids[None, part].to(cache.device), cache=cache)  # (B, T, C)
    following = slice(part.start + 1, part.stop + 1)
    wanted = hay.ids[None, following].to(h.device)  # (B, T); (B, T - 1) at the end of the text
    return next_logprobs(net, h[:, : wanted.shape[1]], wanted)[0, hay.plain[following]]
