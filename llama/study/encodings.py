"""Ways to tell attention where a token stands, behind one small interface, so that they can be compared.

An encoding may act in three places, and each acts in one: it adds to the embedding (`embed`), turns queries and keys
(`turn`), or adds to the scores (`bias`). `scores` below is attention's first half with all three in place:

    none        nowhere
    sinusoidal  embed: x + the fixed table of Attention Is All You Need (arXiv:1706.03762)
    learned     embed: x + one trained vector a position; there are as many as were trained, and no more
    rope        turn: q and k by the angles position * inv_freq (arXiv:2104.09864)
    alibi       bias: minus slope * distance (arXiv:2108.12409)

Everything is float64 and for one head. Letters: N tokens, C model dim, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ContextLengthError, UsageError
from .measures import frequencies, sinusoids, turn


class Encoding:
    """Position is nowhere: the base of the others, and the encoding `none`."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """What enters the first layer for embeddings x (N, C) at positions (N,)."""
        return x

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys (N, D) as they enter the product; values never pass through here."""
        return x

    def bias(self, positions: Tensor) -> Tensor:
        """What is added to the scores: (N, N), or a zero that broadcasts."""
        return torch.zeros((), dtype=torch.float64)


class Sinusoidal(Encoding):
    """Added: a fixed vector a position, nothing trained; any position has one."""

    def __init__(self, base: float = 10000.0):
        self.base = base

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + sinusoids(positions, x.shape[-1], self.base)


class Learned(Encoding):
    """Added: a trained vector a position; table (length, C). Raises ContextLengthError beyond the table."""

    def __init__(self, table: Tensor):
        self.table = table.double()

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        if len(positions) and int(positions.max()) >= len(self.table):
            raise ContextLengthError(
                f"position {int(positions.max())} has no trained vector; the table ends at {len(self.table) - 1}"
            )
        return x + self.table[positions]


class Rotary(Encoding):
    """Turned: q and k by position * inv_freq, in any scaling of the library."""

    def __init__(self, dim: int, theta: float = 10000.0, scaling: Mapping[str, Any] | None = None, **lengths: int):
        self.inv_freq = frequencies(dim, theta, scaling, **lengths)  # (D/2,)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        return turn(x, positions, self.inv_freq)


class Alibi(Encoding):
    """Biased: a score loses `slope` a position of distance; head h of H has slope 2^(-8h/H)."""

    def __init__(self, slope: float = 0.5):
        self.slope = slope

    def bias(self, positions: Tensor) -> Tensor:
        return -self.slope * (positions[:, None] - positions[None, :]).abs().double()  # (N, N)


def scores(encoding: Encoding, x: Tensor, wq: Tensor, wk: Tensor, positions: Tensor) -> Tensor:
    """q_m . k_n / sqrt(D), plus the bias, for embeddings x (N, C) and projections wq, wk (D, C): (N, N), row m."""
    h = encoding.embed(x.double(), positions)  # (N, C)
    q = encoding.turn(h @ wq.double().T, positions)  # (N, D)
    k = encoding.turn(h @ wk.double().T, positions)  # (N, D)
    return q @ k.T / q.shape[-1] ** 0.5 + encoding.bias(positions)


def attend(encoding: Encoding, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, positions: Tensor) -> Tensor:
    """softmax(scores) v over all tokens, no mask: (N, D)."""
    v = encoding.embed(x.double(), positions) @ wv.double().T  # (N, D): never turned
    return scores(encoding, x, wq, wk, positions).softmax(-1) @ v


def additive_terms(x: Tensor, p: Tensor, wq: Tensor, wk: Tensor) -> dict[str, Tensor]:
    """The four terms of (W_q(x_m + p_m)) . (W_k(x_n + p_n)), each (N, N); their sum is the whole product.

    Only the last two parts of a token's embedding, p_m . p_n, know positions alone, and W_q^T W_k stands between them.
    """
    parts = {"content": x.double(), "position": p.double()}
    return {
        f"{a}-{b}": (left @ wq.double().T) @ (right @ wk.double().T).T
        for a, left in parts.items()
        for b, right in parts.items()
    }


# name -> makes it, for embeddings of width `dim`, heads of width `head_dim` and frequencies of base `theta`
ENCODINGS: dict[str, Callable[[int, int, float], Encoding]] = {
    "none": lambda dim, head_dim, theta: Encoding(),
    "sinusoidal": lambda dim, head_dim, theta: Sinusoidal(theta),
    "learned": lambda dim, head_dim, theta: Learned(
        torch.randn(512, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ),
    "rope": lambda dim, head_dim, theta: Rotary(head_dim, theta),
    "alibi": lambda dim, head_dim, theta: Alibi(),
}


def make(name: str, dim: int, head_dim: int, theta: float = 10000.0) -> Encoding:
    """The encoding of that name."""
    if name not in ENCODINGS:
        raise UsageError(f"unknown position encoding {name!r}; known: {', '.join(ENCODINGS)}")
    return ENCODINGS[name](dim, head_dim, theta)
