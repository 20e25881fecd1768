"""Layers without RoPE (SmolLM3; arXiv:2305.19466) for runners whose code rotates every layer.

A rotation by zero angles is the identity, bit for bit, so such a runner passes other rows of freqs_cis to these layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rope import FreqsCis


def unrotated(freqs_cis: FreqsCis) -> FreqsCis:
    """Rows of the same shapes that rotate nothing: cos is 1 and sin is 0."""
    if isinstance(freqs_cis, Tensor):
        return torch.ones_like(freqs_cis)
    cos, sin = freqs_cis
    return torch.ones_like(cos), torch.zeros_like(sin)
