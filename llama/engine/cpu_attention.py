"""Attention on a CPU: the C++ kernels, and PyTorch's kernel with its handling of NaN corrected."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import AttentionFunction, dequantized, sdpa
from ..cache import KeysOrValues, QuantizedKV
from . import kernels

FEW_KEYS = 32  # two of the widest vectors; with fewer keys, PyTorch's kernel loses NaN


def cpu_sdpa(q: Tensor, k: KeysOrValues, v: KeysOrValues, mask: Tensor | None = None) -> Tensor:
    """`attention.sdpa`, but NaN in q or k gives NaN; PyTorch's own returns 0 for few keys whose scores are NaN."""
    q, k, v = dequantized(q, k, v)
    with kernels.all_threads():
        y = sdpa(q, k, v, mask)
    if q.shape[2] == 1 and k.shape[2] < FEW_KEYS:
        y = y + (0 * q).sum(-1, keepdim=True) + (0 * k).sum((1, 2, 3), keepdim=True)
    return y


def kernel_attention(q: Tensor, k: KeysOrValues, v: KeysOrValues, mask: Tensor | None = None) -> Tensor:
    """`attention.sdpa` with the C++ kernels, which read keys and values once for all query heads of a group.

    For few queries, the kernel divides the keys among the cores even if there are fewer heads than cores.
    """
    D = q.shape[3]
    known = D % 16 == 0 and D <= 256 and q.dtype in (torch.float32, torch.bfloat16)
    if not known or (torch.is_grad_enabled() and q.requires_grad):  # the kernels do not support autograd
        return cpu_sdpa(q, k, v, mask)
    if isinstance(k, QuantizedKV) and isinstance(v, QuantizedKV):
        return kernels.attend(q, k.values, v.values, mask, k.scale, v.scale)
    return kernels.attend(*dequantized(q, k, v), mask)


def pick_attention(device: torch.device, fast: bool = True) -> AttentionFunction:
    """The fastest attention function on a device. fast=False: PyTorch's kernels."""
    if device.type != "cpu":
        return sdpa
    return kernel_attention if fast and kernels.ready() else cpu_sdpa
