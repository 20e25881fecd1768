"""Scaled dot-product attention with grouped heads: the function that runs, and the formula it is tested against.

Letters: B batch, T new tokens, S keys, H query heads, KV key/value heads, D head_dim.
Query head h reads key/value head h // (H / KV): grouped-query attention, arXiv:2305.13245.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import KeysOrValues, QuantizedKV, hadamard


def causal_mask(positions: Tensor, key_positions: Tensor) -> Tensor:
    """The one mask rule: a query sees the keys at its own position and before.

    positions (T,) or (B, T) of the queries, key_positions (S,) or (B, S). Returns bool (T, S), or (B, 1, T, S) if the
    rows of the batch differ. Prefill, a later chunk, decoding and the verification of a draft all use this rule.
    """
    mask = key_positions.unsqueeze(-2) <= positions.unsqueeze(-1)  # (T, S) or (B, T, S)
    return mask.unsqueeze(1) if mask.dim() == 3 else mask


def dequantized(q: Tensor, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (B, H, T, D), and k and v (B, KV, S, D) as floats. If k is quantized, rotate q like its keys."""
    if isinstance(k, QuantizedKV):
        return hadamard(q.float()).type_as(q), k.dequantize(q.dtype), v.dequantize(q.dtype)
    return q, k, v


def sdpa(q: Tensor, k: KeysOrValues, v: KeysOrValues, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v by PyTorch's fused kernels.

    q (B, H, T, D); k, v (B, KV, S, D); mask bool, True where a query sees a key, broadcast to (B, H, T, S), or None
    if every query sees every key. Returns (B, H, T, D).

    is_causal is never used: PyTorch's triangular mask starts at the top left, so with T queries and S > T cached keys
    the first query would see the first key only.
    """
    q, k, v = dequantized(q, k, v)
    if q.shape[2] == 1:  # one query: the heads of a group become queries of one head, so keys are not repeated
        y = F.scaled_dot_product_attention(q.reshape(*k.shape[:2], -1, q.shape[-1]), k, v, mask)  # (B, KV, H / KV, D)
        return y.reshape(q.shape)  # (B, H, 1, D)
    repeats = q.shape[1] // k.shape[1]  # H / KV, the query heads of a group
    if q.is_cuda and mask is not None and repeats > 1:  # no fused CUDA kernel takes both a mask and enable_gqa
        k, v, repeats = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1), 1  # (B, H, S, D)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=repeats > 1)  # (B, H, T, D)


def reference_scores(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """The scores q k^T / sqrt(D), -inf where a query does not see a key, in float32: (B, H, T, S)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, D)
    scores = (q.float() @ k.float().transpose(-2, -1)) / q.shape[-1] ** 0.5  # (B, H, T, S)
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def reference_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """The attention weights, the softmax of the scores: (B, H, T, S)."""
    return reference_scores(q, k, mask).softmax(dim=-1)


def reference(q: Tensor, k: KeysOrValues, v: KeysOrValues, mask: Tensor | None = None) -> Tensor:
    """`sdpa` written out: the formula that the fused kernels are tested against."""
    x, k, v = dequantized(q.float(), k, v)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (B, H, S, D)
    return (reference_weights(x, k, mask) @ v.float()).type_as(q)  # (B, H, T, D)


AttentionFunction = Callable[[Tensor, KeysOrValues, KeysOrValues, Tensor | None], Tensor]
ATTENTION: dict[str, AttentionFunction] = {"sdpa": sdpa, "reference": reference}


class Attend(nn.Module):
    """An attention function as a module, to be replaced with `set_submodule` or watched with a forward hook.

    engine/cpu_attention.py has the functions that the loader chooses on a CPU.
    """

    def __init__(self, function: AttentionFunction):
        super().__init__()
        self.function = function

    def forward(self, q: Tensor, k: KeysOrValues, v: KeysOrValues, mask: Tensor | None = None) -> Tensor:
        return self.function(q, k, v, mask)  # (B, H, T, D)
