"""Inverse frequencies of RoPE under every scaling this package knows: one function a kind, one registry.

RoPE turns pair i of a head by the angle  position * inv_freq[i],  with  inv_freq[i] = theta^(-2i/D)  (RoFormer,
arXiv:2104.09864). A scaling changes these D/2 numbers, and may multiply cos and sin by an attention factor; it
changes nothing else. So it is a function of numbers, not a class. Everything is computed in float64 and rounded
to float32 once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError

# (unscaled inv_freq (D/2,) float64, the scaling's parameters) -> (scaled inv_freq, attention factor)
Scaling = Callable[[Tensor, Mapping[str, Any]], tuple[Tensor, float]]


def _number(scaling: Mapping[str, Any], key: str, low: float = 0.0) -> float:
    """The finite number under `key`, which must lie above `low`."""
    value = scaling.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= low:
        raise ConfigError(f"rope scaling {dict(scaling)}: {key!r} must be a finite number above {low:g}, got {value!r}")
    return float(value)


def default(inv_freq: Tensor, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """No scaling: theta^(-2i/D)."""
    return inv_freq, 1.0


def linear(inv_freq: Tensor, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Position interpolation (arXiv:2306.15595): every position counts 1/factor."""
    return inv_freq / _number(scaling, "factor"), 1.0


def llama3(inv_freq: Tensor, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Llama 3.1: waves that turn often within the old context stay, slow ones are interpolated, a ramp lies between.

    Source: apply_scaling in meta-llama/llama-models models/llama3/model.py, with its constants as parameters.
    """
    factor, old_context = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if low >= high:
        raise ConfigError(f"rope scaling llama3: low_freq_factor must be below high_freq_factor, got {low} and {high}")
    turns = old_context * inv_freq / (2 * math.pi)  # (D/2,) full turns within the old context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / factor, 1.0


def divisors(inv_freq: Tensor, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """One divisor for each pair, as GGUF files store them in the tensor `rope_freqs.weight`."""
    divide = torch.as_tensor(scaling.get("divisors"), dtype=torch.float64)
    if divide.shape != inv_freq.shape:
        raise ConfigError(f"rope scaling divisors: expected {len(inv_freq)}, one for each pair, got {divide.numel()}")
    if not bool((torch.isfinite(divide) & (divide > 0)).all()):
        raise ConfigError("rope scaling divisors: every divisor must be a finite number above 0")
    return inv_freq / divide, 1.0


SCALINGS: dict[str, Scaling] = {"default": default, "linear": linear, "llama3": llama3, "divisors": divisors}


def inverse_frequencies(
    dim: int,
    theta: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    *,
    seq_len: int | None = None,
    max_seq_len: int | None = None,
) -> tuple[Tensor, float]:
    """Angle in radians that each pair turns per position, and the factor for cos and sin.

    dim          D, entries of a head that are rotated; even
    theta        base of the frequencies
    scaling      None, or {"rope_type": one of SCALINGS, ...its parameters}; "type" is the older spelling
    seq_len      length the frequencies are for; used by kinds that depend on it
    max_seq_len  context the model was trained for (Hugging Face's max_position_embeddings)

    Returns (inv_freq (dim/2,) float32, attention_factor). Raises ConfigError on an unknown kind or a bad parameter.
    """
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ConfigError(f"rope theta must be a number, got {theta!r} ({type(theta).__name__})")
    if dim < 2 or dim % 2:
        raise ConfigError(f"RoPE rotates pairs, so dim must be even and at least 2; got {dim}")
    if not (math.isfinite(theta) and theta > 0):
        raise ConfigError(f"rope theta must be a finite number above 0, got {theta}")
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ConfigError(f"unknown rope scaling {kind!r}; known: {', '.join(SCALINGS)}")
    inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # (D/2,)
    inv_freq, attention_factor = SCALINGS[kind](inv_freq, scaling)
    return inv_freq.float(), attention_factor
