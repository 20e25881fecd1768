"""Position encodings with one common interface, so that they can be compared.

An encoding changes one of three things: the embeddings (`embed`), the queries and keys (`turn`) or the attention
scores (`bias`). `scores` below computes the scores of one head and calls all three methods:

    none        changes nothing
    sinusoidal  embed: x + the fixed table of Attention Is All You Need (arXiv:1706.03762)
    learned     embed: x + one trained vector per position; positions beyond the trained ones have no vector
    rope        turn: q and k are rotated by the angles position * inv_freq (arXiv:2104.09864)
    alibi       bias: -slope * distance (arXiv:2108.12409)

All computations are in float64 and for one head. Letters: N tokens, C model dim, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import ContextLengthError
from .measures import frequencies, sinusoids, turn


class Encoding:
    """The encoding `none`, which ignores positions; the base class of the others."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Input of the first layer for embeddings x (N, C) at positions (N,)."""
        return x

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """The queries or keys x (N, D) that the score uses; values are never passed here."""
        return x

    def bias(self, positions: Tensor) -> Tensor:
        """Term added to the scores: (N, N), or a zero that broadcasts."""
        return torch.zeros((), dtype=torch.float64)


class Sinusoidal(Encoding):
    """Adds a fixed vector to each embedding; defined for every position."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + sinusoids(positions, x.shape[-1])


class Learned(Encoding):
    """Adds row `position` of a trained table (length, C) to each embedding. Raises ContextLengthError beyond it."""

    def __init__(self, table: Tensor):
        self.table = table.double()

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        if len(positions) and int(positions.max()) >= len(self.table):
            raise ContextLengthError(
                f"position {int(positions.max())} has no trained vector; the table ends at {len(self.table) - 1}"
            )
        return x + self.table[positions]


class Rotary(Encoding):
    """Rotates q and k by position * inv_freq."""

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        return turn(x, positions, frequencies(x.shape[-1]))


class Alibi(Encoding):
    """Subtracts slope * distance from each score. Head h of H has slope 2^(-8h/H)."""

    def __init__(self, slope: float):
        self.slope = slope

    def bias(self, positions: Tensor) -> Tensor:
        return -self.slope * (positions[:, None] - positions[None, :]).abs().double()  # (N, N)


def scores(encoding: Encoding, x: Tensor, wq: Tensor, wk: Tensor, positions: Tensor) -> Tensor:
    """Scores q_m . k_n / sqrt(D) plus the bias: (N, N), a row for each m. Embeddings x (N, C); wq and wk (D, C)."""
    h = encoding.embed(x.double(), positions)  # (N, C)
    q = encoding.turn(h @ wq.double().T, positions)  # (N, D)
    k = encoding.turn(h @ wk.double().T, positions)  # (N, D)
    return q @ k.T / q.shape[-1] ** 0.5 + encoding.bias(positions)


def attend(encoding: Encoding, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, positions: Tensor) -> Tensor:
    """softmax(scores) v over all tokens, no mask: (N, D)."""
    v = encoding.embed(x.double(), positions) @ wv.double().T  # (N, D): values are not rotated
    return scores(encoding, x, wq, wk, positions).softmax(-1) @ v


def additive_terms(x: Tensor, p: Tensor, wq: Tensor, wk: Tensor) -> dict[str, Tensor]:
    """The four terms of (W_q(x_m + p_m)) . (W_k(x_n + p_n)), each (N, N); their sum is the product.

    Only the position-position term depends on positions alone, and it is p_m W_q^T W_k p_n, not p_m . p_n.
    """
    parts = {"content": x.double(), "position": p.double()}
    return {
        f"{a}-{b}": (left @ wq.double().T) @ (right @ wk.double().T).T
        for a, left in parts.items()
        for b, right in parts.items()
    }


# name -> constructor, called with the embedding width
ENCODINGS: dict[str, Callable[[int], Encoding]] = {
    "none": lambda dim: Encoding(),
    "sinusoidal": lambda dim: Sinusoidal(),
    "learned": lambda dim: Learned(
        torch.randn(512, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ),
    "rope": lambda dim: Rotary(),
    "alibi": lambda dim: Alibi(0.5),
}
