"""The rotation as a matrix, for proofs (RoFormer, arXiv:2104.09864, equation 15)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_matrix(cos: Tensor, sin: Tensor) -> Tensor:
    """R_m from the cos and sin (.., D/2) of one position's angles: (.., D, D).

    Block-diagonal: pair i of a head is rotated by the block [[cos, -sin], [sin, cos]] in rows and columns 2i, 2i + 1.
    """
    blocks = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2)  # (.., D/2, 2, 2)
    same_pair = torch.eye(cos.shape[-1], dtype=cos.dtype, device=cos.device)  # (D/2, D/2)
    placed = torch.einsum("...iab,ij->...iajb", blocks, same_pair)  # (.., D/2, 2, D/2, 2): 0 where i is not j
    return placed.flatten(-2).flatten(-3, -2)  # (.., D, D)
