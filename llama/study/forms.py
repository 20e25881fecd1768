"""Two more forms of the rotation (llama/rope.py), for study: the notation of RoFormer and of the proofs.

elementwise  x * cos + quarter_turn(x) * sin: the formula of `half` with Meta's pairs, the paper's equation 34
matrix       R_m x with the block-diagonal rotation matrix, the paper's equation 15: D/2 times the work
"""

from __future__ import annotations

import torch
from torch import Tensor


def quarter_turn(x: Tensor) -> Tensor:
    """(.., D) -> (.., D): every pair (x[2i], x[2i + 1]) = (a, b) becomes (-b, a)."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)  # two of (.., D/2)
    return torch.stack((-b, a), dim=-1).flatten(-2)  # (.., D)


def apply_elementwise(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, T, H, D) as  x * cos + quarter_turn(x) * sin;  cos and sin are (T, D/2)."""
    cos, sin = (part.repeat_interleave(2, -1).unsqueeze(-2) for part in (cos, sin))  # (T, 1, D): each angle twice
    return (x.float() * cos + quarter_turn(x.float()) * sin).type_as(x)  # (B, T, H, D)


def rotation_matrix(cos: Tensor, sin: Tensor) -> Tensor:
    """R_m from the cos and sin (.., D/2) of one position's angles: (.., D, D).

    Block-diagonal: pair i of a head is rotated by the block [[cos, -sin], [sin, cos]] in rows and columns 2i, 2i + 1.
    """
    blocks = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2)  # (.., D/2, 2, 2)
    same_pair = torch.eye(cos.shape[-1], dtype=cos.dtype, device=cos.device)  # (D/2, D/2)
    placed = torch.einsum("...iab,ij->...iajb", blocks, same_pair)  # (.., D/2, 2, D/2, 2): 0 where i is not j
    return placed.flatten(-2).flatten(-3, -2)  # (.., D, D)


def apply_matrix(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, T, H, D) as R_m x, with one matrix for each token; cos and sin are (T, D/2)."""
    rotation = rotation_matrix(cos, sin).unsqueeze(-3)  # (T, 1, D, D)
    return (rotation @ x.float().unsqueeze(-1)).squeeze(-1).type_as(x)  # (B, T, H, D)
