"""Quantities that describe rotations: pure functions in float64, each named after its formula.

inv_freq is what `llama.inverse_frequencies` returns: (D/2,), radians per position. So all results are about the
frequencies that the model uses. Letters: N positions, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..rope_scaling import inverse_frequencies

# Parameters of the llama3 scaling in Llama 3.1's files, in addition to the factor.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def frequencies(dim: int, theta: float = 10000.0, scaling: Mapping[str, Any] | None = None) -> Tensor:
    """`inverse_frequencies` without the attention factor: (D/2,), the library's float32 values as float64."""
    return inverse_frequencies(dim, theta, scaling)[0].double()


def stretching(kind: str, factor: float) -> dict[str, Any]:
    """The scaling `kind` that multiplies the context by `factor`, in the form that a model's file has."""
    return {"rope_type": kind, "factor": factor, **(LLAMA3 if kind == "llama3" else {})}


def turn(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotate vectors x (.., N, D) to positions (N,): `apply_rotary_emb` in float64, as a reference for float32."""
    return rotated(x, positions.double()[:, None] * inv_freq.double())


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs of vectors x (.., N, D) by angles (N, D/2) in float64."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())  # (.., N, D/2)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)  # (.., N, D)


def wavelengths(inv_freq: Tensor) -> Tensor:
    """Positions that each pair needs for one full turn: (D/2,); infinite for a pair that doesn't turn."""
    return 2 * math.pi / inv_freq.double()


def turns(inv_freq: Tensor, length: float) -> Tensor:
    """Full turns of each pair within `length` positions: (D/2,)."""
    return length * inv_freq.double() / (2 * math.pi)


def seen_arc(inv_freq: Tensor, length: int) -> Tensor:
    """Arc that each pair covers over positions 0 .. length - 1, in radians, at most 2 pi: (D/2,)."""
    return ((length - 1) * inv_freq.double()).clamp(max=2 * math.pi)


def mean_cosine(inv_freq: Tensor, distances: Tensor) -> Tensor:
    """Mean over pairs of cos(distance * inv_freq), the score of q = k with pairs of equal length: (N,)."""
    return torch.cos(distances.double()[:, None] * inv_freq.double()).mean(-1)


def decay_bound(inv_freq: Tensor, distances: Tensor) -> Tensor:
    """RoFormer's bound on the score at each distance, section 3.4.3: the mean over n of |S_n|, (N,).

    S_n is the sum of e^(j * distance * inv_freq) over the first n pairs, with j^2 = -1 and n = 1 .. D/2.
    """
    angles = distances.double()[:, None] * inv_freq.double()  # (N, D/2)
    return torch.polar(torch.ones_like(angles), angles).cumsum(-1).abs().mean(-1)


def sinusoids(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """The sinusoidal table of arXiv:1706.03762: entry 2i is sin(t * base^(-2i/d)), entry 2i + 1 its cosine: (N, d).

    Raises UsageError on an odd width, where the last sine would have no cosine.
    """
    if dim < 2 or dim % 2:
        raise UsageError(f"the width of a sinusoidal table must be even and at least 2, got {dim}")
    angles = positions.double()[:, None] * base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # (N, d/2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # (N, d)


def diagonal_spread(scores: Tensor) -> float:
    """Largest difference between two scores of the same distance, for scores (N, N); 0 if only distance matters."""
    n = scores.shape[0]
    diagonals = [scores.diagonal(offset) for offset in range(1 - n, n)]
    return max(float(d.max() - d.min()) for d in diagonals)


def softmax_jacobian(scores: Tensor) -> Tensor:
    """Derivatives dp_i / dx_j = p_i (i == j) - p_i p_j of p = softmax(x), x (.., N): (.., N, N).

    The diagonal p_i (1 - p_i) is computed as the sum of p_i p_j over all other j: near p_i = 1, 1 - p_i rounds to 0.
    """
    p = scores.double().softmax(-1)  # (.., N)
    apart = 1 - torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)  # (N, N): 1 where i != j
    moved = p.unsqueeze(-1) * p.unsqueeze(-2) * apart  # (.., N, N): p_i p_j where i != j, else 0
    return torch.diag_embed(moved.sum(-1)) - moved
