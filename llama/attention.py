"""Scaled dot-product attention with grouped heads: one function in two implementations, chosen by name.

Letters: B batch, T new tokens, S keys, H query heads, KV key/value heads, G = H / KV, D head_dim.
Query head h reads key/value head h // G (GQA, arXiv:2305.13245).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import Keys, Rounded
from .engine import kernels


def causal_mask(positions: Tensor, key_positions: Tensor) -> Tensor:
    """Who may look where, by the one rule: a query sees the keys at its own position and before.

    positions (T,) or (B, T) of the queries, key_positions (S,) or (B, S). Returns bool (T, S), or (B, 1, T, S) where
    rows of the batch differ. Prefill, a chunk behind cached keys, decoding and checking a draft are all this rule.
    """
    mask = key_positions.unsqueeze(-2) <= positions.unsqueeze(-1)  # (T, S) or (B, T, S)
    return mask.unsqueeze(1) if mask.dim() == 3 else mask


def plain(x: Keys, dtype: torch.dtype) -> Tensor:
    """Keys or values as numbers, whatever the cache keeps them in."""
    return x.numbers(dtype) if isinstance(x, Rounded) else x


def sdpa(q: Tensor, k: Keys, v: Keys, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v by torch's fused kernels.

    q (B, H, T, D); k, v (B, KV, S, D); mask bool, True where a query may look, broadcast to (B, H, T, S), or None
    if every query sees every key. Returns (B, H, T, D).

    is_causal is never used: torch aligns that triangle top-left, so with T queries against S > T cached keys
    the first query would see the first key only.
    """
    k, v = plain(k, q.dtype), plain(v, q.dtype)
    if q.shape[2] == 1:  # one query: the G heads of a group are G queries of one head, so nothing is copied
        y = F.scaled_dot_product_attention(q.view(*k.shape[:2], -1, q.shape[-1]), k, v, mask).view(q.shape)
        few = not torch.compiler.is_compiling() and k.shape[2] < FEW_KEYS  # compiled code is for any number of keys
        if q.is_cpu and few:  # torch answers 0 where every score is NaN
            y = y + (0 * q).sum(-1, keepdim=True) + (0 * k).sum((1, 2, 3), keepdim=True)
        return y
    groups = q.shape[1] // k.shape[1]
    if q.is_cuda and mask is not None and groups > 1:  # of torch's kernels for CUDA none takes both a mask and groups
        k, v, groups = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1), 1
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=groups > 1)


def reference_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """The attention weights softmax(q k^T / sqrt(D)), written out, in float32: (B, H, T, S)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, D)
    scores = (q.float() @ k.float().transpose(-2, -1)) / q.shape[-1] ** 0.5  # (B, H, T, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1)


def reference(q: Tensor, k: Keys, v: Keys, mask: Tensor | None = None) -> Tensor:
    """`sdpa` written out: what the formula says and what the fused kernels are tested against."""
    k, v = plain(k, torch.float32), plain(v, torch.float32)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (B, H, S, D)
    return (reference_weights(q, k, mask) @ v.float()).type_as(q)  # (B, H, T, D)


def kernel(q: Tensor, k: Keys, v: Keys, mask: Tensor | None = None) -> Tensor:
    """`sdpa` on a CPU; few queries go to the C++ kernel, which reads keys and values once for all heads of a group.

    It shares the keys among the cores also where there are fewer heads than cores, and skips what nobody may see.
    """
    if q.shape[2] <= FEW_QUERIES and q.shape[3] % 16 == 0 and q.shape[3] <= 256 and q.dtype != torch.float16:
        if isinstance(k, Rounded) and isinstance(v, Rounded):
            return kernels.attend(q, k.values, v.values, mask, k.scale, v.scale)
        return kernels.attend(q, plain(k, q.dtype), plain(v, q.dtype), mask)
    return sdpa(q, k, v, mask)


FEW_QUERIES = 16
FEW_KEYS = 32  # two vectors of the widest kind: from one on, torch's kernel does see NaN
ATTENTION: dict[str, Callable[..., Tensor]] = {"sdpa": sdpa, "reference": reference, "kernel": kernel}
