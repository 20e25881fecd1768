"""Bugs in the attention around the rotation."""

from __future__ import annotations

import math

import numpy as np
import torch

from ...attention import causal_mask, reference_weights
from ...rope import apply_rotary_emb, precompute_freqs_cis
from ...rope_scaling import inverse_frequencies
from .base import Bug, Row, rotation, row
from .quiz import Number

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def _divisor() -> list[Row]:
    q, k = np.random.default_rng(36).standard_normal((2, 20000, 64))  # a head of 512 / 8 entries
    scores = [(q * k).sum(-1) / math.sqrt(d) for d in (512, 64)]
    weights = [np.exp(x.reshape(-1, 100)) for x in scores]  # 100 keys per query
    return [
        row("hidden = 512, h = 8: variance of the scores", lambda x: float(x.var()), *scores),
        row("mean of the largest of 100 weights", lambda w: float((w.max(-1) / w.sum(-1)).mean()), *weights),
    ]


def _kv_heads() -> list[Row]:
    rows: list[Row] = [("32 query heads, g = 4, D = 128: rows of wk", 4 * 128, 32 // 4 * 128)]
    q = torch.ones(1, 32, 2, 4)  # (B, H, T, D)
    readers = []
    for kv in (4, 8):
        k = torch.zeros(1, kv, 2, 4)  # (B, KV, T, D)
        k[0, 0, 1] = 1.0
        readers.append(int((reference_weights(q, k)[0, :, 0, 1] > 0.6).sum()))
    return [*rows, ("query heads that read key head 0", readers[0], readers[1])]


def _own_key() -> list[Row]:
    at = torch.arange(5)
    masks = at[:, None] > at, causal_mask(at, at)  # (T, T) each
    even = torch.zeros(1, 1, 5, 4)
    weights = [reference_weights(even, even, mask)[0, 0] for mask in masks]
    return [
        row("number of scores of tokens 0 to 4", lambda mask: ", ".join(map(str, mask.sum(-1).tolist())), *masks),
        row("weights of token 0 that are NaN, of 5", lambda w: int(w[0].isnan().sum()), *weights),
    ]


def _cached_row() -> list[Row]:
    q, k = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[1.0, 0.0]]]])  # (B, T = 1, H, D)
    freqs_cis = precompute_freqs_cis(2, 16)  # (N, D/2), one pair of frequency 1
    rows: list[Row] = [("7 tokens cached: row used by token 7", 0, 7)]
    for key in (0, 6):
        turned = [apply_rotary_emb(q, k, freqs_cis[row : row + 1])[0] for row in (0, 7)]
        cached = apply_rotary_emb(q, k, freqs_cis[key : key + 1])[1]
        score = [float((x * cached).sum()) for x in turned]
        rows.append((f"its score with key {key}, for w = 1", score[0], score[1]))
    return rows


def _squared() -> list[Row]:
    factor = inverse_frequencies(128, 10000.0, YARN)[1]
    return [("YaRN for 4 times the length: factor of the scores", factor, _measured(factor))]


def _measured(a: float) -> float:
    """The score of a vector with itself, where cos and sin of its rotation are multiplied by a."""
    turned = a * rotation(1.2) @ [1, 0]
    return float(turned @ turned)


BUGS = (
    Bug(
        name="divisor",
        line="scores = q @ k.T / sqrt(hidden)  # in each of h heads",
        predict="Entries of q and k have variance 1. With 8 heads, what is the variance of the scores?",
        evidence=_divisor,
        ask="the divisor for which the scores of a head have variance 1",
        names={"hidden": Number("width of the model", 256, 1024, 256), "h": Number("heads", 2, 8, 2)},
        truth=lambda hidden, h: float(np.linalg.norm(np.ones((int(hidden), 1)) / h**0.5)),
        wrong="sqrt(hidden)",
        right="sqrt(hidden / h)",
        why="A head has hidden / h entries, and the variance of a dot product is the number of its terms. Divided by"
        " sqrt(hidden), the variance is 1/h, and the weights stay nearly uniform.",
    ),
    Bug(
        name="kv-heads",
        line="n_kv_heads = g  # each key head is shared by g query heads",
        predict="With 32 query heads and g = 4, how many key heads are there?",
        evidence=_kv_heads,
        ask="n_kv_heads, if each key head is shared by g of the query heads",
        names={"heads": Number("query heads", 8, 64, 8), "g": Number("query heads per key head", 2, 4, 2)},
        truth=lambda heads, g: float(len({head // int(g) for head in range(int(heads))})),
        wrong="g",
        right="heads / g",
        why="g counts the query heads of a group, not the groups. Read as the number of key heads, it changes the shape"
        " of wk and wv, and a checkpoint does not fit. If both numbers happen to be equal, nothing shows.",
    ),
    Bug(
        name="own-key",
        line="mask = m > n  # token m attends to the tokens n before it, so it has m scores",
        predict="What are the weights of the first token, m = 0?",
        evidence=_own_key,
        ask="the number of scores of token m in a decoder",
        names={"m": Number("token, counted from 0", 0, 30, 1)},
        truth=lambda m: float(np.tril(np.ones((32, 32)))[int(m)].sum()),
        wrong="m",
        right="m + 1",
        why="A token also attends to itself: the mask is m >= n. Without its own key, the first token has no key at"
        " all, and the softmax of nothing is NaN, which spreads through all later layers.",
    ),
    Bug(
        name="cached-row",
        line="freqs_cis = freqs_cis[:T]  # T new tokens: new token j uses row j",
        predict="The prompt had 7 tokens. As which position is the next token rotated?",
        evidence=_cached_row,
        ask="the row for new token j if `start` tokens are in the cache",
        names={"j": Number("new token, from 0", 0, 9, 1), "start": Number("tokens in the cache", 1, 50, 1)},
        truth=lambda j, start: float(len([0] * int(start) + [0] * int(j))),  # the tokens before it
        wrong="j",
        right="start + j",
        why="The first rows are right for a prompt and wrong for every token after it: a single new token would be"
        " rotated as position 0, so its distances to the cached keys have the wrong sign and size.",
    ),
    Bug(
        name="twice",
        line="cos, sin = cos * a, sin * a  # multiplies the scores by a",
        predict="YaRN for 4 times the length has a = 1.1386. By which factor do the scores grow?",
        evidence=_squared,
        ask="the factor by which the scores are multiplied",
        names={"a": Number("factor of cos and sin", 1.05, 2)},
        truth=_measured,
        wrong="a",
        right="a ** 2",
        why="Both q and k are rotated with the multiplied cos and sin, so a score contains the factor twice. Code that"
        " multiplies the scores instead must use the square.",
    ),
)
