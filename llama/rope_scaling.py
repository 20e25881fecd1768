"""Inverse frequencies of RoPE under every supported scaling: one function per kind, one registry.

RoPE rotates pair i of a head by the angle  position * inv_freq[i],  with  inv_freq[i] = theta^(-2i/D)  (RoFormer,
arXiv:2104.09864). A scaling changes these D/2 numbers, and may multiply cos and sin by an attention factor. It
changes nothing else, so each scaling is a function. Everything is computed in float64, then rounded to float32.

The kinds and their parameters are those of transformers' modeling_rope_utils.py; `ntk` and `divisors` are additions.
The factor of `dynamic` is relative to the model's context, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import checks
from .config import LARGEST_HEAD_DIM, LARGEST_SIZE, ModelConfig
from .errors import ConfigError


@dataclass(frozen=True)
class Base:
    """The input of a scaling: number of rotated entries, base, length of the text, and the model's context."""

    dim: int
    theta: float
    seq_len: int | None = None
    max_seq_len: int | None = None

    def inv_freq(self, stretch: float = 1.0) -> Tensor:
        """(theta * stretch)^(-2i/D) for each pair i: (D/2,) float64."""
        theta = self.theta * stretch
        if not math.isfinite(theta):
            raise OverflowError(f"a base of {self.theta:g} times {stretch:g}")
        return theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)


# (base, the scaling's parameters) -> (inv_freq (D/2,) float64, factor of cos and sin)
Scaling = Callable[[Base, Mapping[str, Any]], tuple[Tensor, float]]

SCALINGS: dict[str, Scaling] = {}
PARAMETERS: dict[str, tuple[str, ...]] = {}  # kind -> the names of its parameters
STRETCHING: list[str] = []  # kinds that multiply the context by `factor`
BY_LENGTH: list[str] = []  # kinds whose frequencies depend on seq_len


def register(*parameters: str, stretches: bool = False, by_length: bool = False) -> Callable[[Scaling], Scaling]:
    """Add a kind of scaling, which has the name of its function; `parameters` are those it accepts."""

    def add(function: Scaling) -> Scaling:
        SCALINGS[function.__name__], PARAMETERS[function.__name__] = function, (*parameters, "partial_rotary_factor")
        STRETCHING.extend([function.__name__] * stretches)
        BY_LENGTH.extend([function.__name__] * by_length)
        return function

    return add


@register()
def default(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """No scaling: theta^(-2i/D)."""
    return base.inv_freq(), 1.0


@register("factor", stretches=True)
def linear(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Position interpolation (arXiv:2306.15595): positions are divided by factor."""
    return base.inv_freq() / _number(scaling, "factor"), 1.0


@register("factor", stretches=True)
def ntk(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """NTK-aware interpolation (bloc97, 2023): a larger base slows down the slowest pair by factor."""
    return base.inv_freq(stretch=_number(scaling, "factor") ** (base.dim / (base.dim - 2))), 1.0


@register("factor", stretches=True, by_length=True)
def dynamic(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Dynamic NTK (emozilla, 2023): no change up to the trained length; beyond it, the base grows with the length."""
    trained = float(base.max_seq_len) if base.max_seq_len else _trained_length(None, scaling)  # as in transformers
    factor, length = _number(scaling, "factor"), max(base.seq_len or 0, trained)
    return base.inv_freq(stretch=(factor * length / trained - (factor - 1)) ** (base.dim / (base.dim - 2))), 1.0


@register(
    *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "truncate"),
    stretches=True,
)
def yarn(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): fast pairs stay, slow pairs are interpolated, others in part; attention is sharper.

    Fast pairs make more than beta_fast full turns within the trained context, slow pairs fewer than beta_slow.
    """
    trained = _trained_length(base.max_seq_len, scaling)
    given = scaling.get("factor") is not None or base.max_seq_len is None
    factor = _number(scaling, "factor") if given else (base.max_seq_len or 0) / trained

    def pair_that_turns(times: float) -> float:
        return base.dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base.theta))

    low = pair_that_turns(_number(scaling, "beta_fast", default=32))
    high = pair_that_turns(_number(scaling, "beta_slow", default=1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, base.dim - 1)
    pairs = torch.arange(base.dim // 2, dtype=torch.float64)
    slow = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)  # (D/2,): 0 keep, 1 interpolate
    inv_freq = (1 - slow) * base.inv_freq() + slow * base.inv_freq() / factor

    def sharpness(weight: float = 1) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1

    if scaling.get("attention_factor") is not None:
        return inv_freq, _number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return inv_freq, sharpness(_number(scaling, "mscale")) / sharpness(_number(scaling, "mscale_all_dim"))
    return inv_freq, sharpness()


@register(
    *("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"), by_length=True
)
def longrope(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """LongRoPE (arXiv:2402.13753): a list of divisors for texts up to the trained length, one for longer texts."""
    trained = _trained_length(base.max_seq_len, scaling)
    if trained <= 1:
        raise ConfigError(f"rope scaling longrope: the trained length must be above 1, got {trained:g}")
    factor = (base.max_seq_len or trained) / trained if scaling.get("factor") is None else _number(scaling, "factor")
    divide = _divisors(base, scaling, "long_factor" if (base.seq_len or 0) > trained else "short_factor")
    if scaling.get("attention_factor") is not None:
        return base.inv_freq() / divide, _number(scaling, "attention_factor")
    return base.inv_freq() / divide, math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0


@register("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", stretches=True)
def llama3(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Llama 3.1: pairs with many full turns in the trained context stay, slow pairs are interpolated, others in part.

    Source: apply_scaling in meta-llama/llama-models models/llama3/model.py, with its constants as parameters.
    """
    inv_freq, factor = base.inv_freq(), _number(scaling, "factor")
    trained = _trained_length(base.max_seq_len, scaling)
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if low >= high:
        raise ConfigError(f"rope scaling llama3: low_freq_factor must be below high_freq_factor, got {low} and {high}")
    turns = trained * inv_freq / (2 * math.pi)  # (D/2,) full turns within the trained context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / factor, 1.0


@register("factor")
def proportional(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Only a share of the pairs, partial_rotary_factor, rotates: the first ones. The others carry no position."""
    part = _number(scaling, "partial_rotary_factor", default=1)
    inv_freq = base.inv_freq() / _number(scaling, "factor", default=1)
    inv_freq[int(part * base.dim // 2) :] = 0
    return inv_freq, 1.0


@register("divisors")
def divisors(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """One divisor per pair, as GGUF files store them in the tensor `rope_freqs.weight`."""
    return base.inv_freq() / _divisors(base, scaling, "divisors"), 1.0


def kind_of(scaling: Mapping[str, Any] | None) -> str:
    """The kind of a scaling, "default" for None. Raises ConfigError for an unknown kind."""
    checks.instance("rope scaling", scaling, Mapping | None, "a mapping with a rope_type", ConfigError)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ConfigError(f"unknown rope scaling {kind!r:.60}; known: {', '.join(SCALINGS)}")
    return kind


def rotated_entries(dim: int, scaling: Mapping[str, Any] | None) -> int:
    """How many of the D entries of a head rotate. With `proportional` all do, some of them by the angle 0."""
    part = _number(scaling or {}, "partial_rotary_factor", 1)
    return dim if kind_of(scaling) == "proportional" else int(dim * part)


def trained_length(config: ModelConfig) -> float:
    """The length in tokens that a model's unscaled frequencies were trained for."""
    return _trained_length(config.max_seq_len, config.rope_scaling or {})


def reach(config: ModelConfig) -> int:
    """Number of positions a model can use: its context, or the trained length extended by a scaling, if that is larger.

    In some files max_position_embeddings is the length before the scaling, in others the length after the scaling. For
    llama3, a value above original_max_position_embeddings is the length after the scaling; in Llama 3.2 that is not
    factor * original. A sliding window is a limit: up to its length, full attention computes the same.
    """
    context, window = stretched(config.max_seq_len, config.rope_scaling), config.sliding_window
    return context if window is None else min(context, window)


def stretched(max_seq_len: int, scaling: Mapping[str, Any] | None) -> int:
    """The result of `reach` for a model without a sliding window."""
    if scaling is None or kind_of(scaling) not in STRETCHING or scaling.get("factor") is None:
        return max_seq_len
    own = kind_of(scaling) in ("yarn", "llama3")
    trained = _trained_length(max_seq_len, scaling) if own else float(max_seq_len)
    if kind_of(scaling) == "llama3" and max_seq_len > trained:
        return max_seq_len
    return max(max_seq_len, int(min(trained * _number(scaling, "factor"), LARGEST_SIZE)))


def inverse_frequencies(
    dim: int,
    theta: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    *,
    seq_len: int | None = None,
    max_seq_len: int | None = None,
) -> tuple[Tensor, float]:
    """Return the angle in radians by which each pair rotates per position, and a factor for cos and sin.

    dim          D, number of rotated entries of a head; even
    theta        base of the frequencies
    scaling      None, or {"rope_type": one of SCALINGS, ...its parameters}; "type" is the older spelling
    seq_len      length of the text; only the kinds in BY_LENGTH use it
    max_seq_len  the model's context (Hugging Face's max_position_embeddings): the trained length, unless the
                 scaling has its own original_max_position_embeddings

    Returns (inv_freq (dim/2,) float32, attention_factor). Raises ConfigError for an unknown kind or a bad parameter.
    """
    checks.number("rope theta", theta, 0, 1e300, ConfigError, above=True)
    if checks.integer("dim, the rotated entries of a head,", dim, 2, LARGEST_HEAD_DIM, ConfigError) % 2:
        raise ConfigError(f"dim must be even, got {dim}: RoPE rotates pairs of entries")
    checks.integer("seq_len", 0 if seq_len is None else seq_len, 0, error=ConfigError)
    checks.integer("max_seq_len", 1 if max_seq_len is None else max_seq_len, error=ConfigError)
    kind, rotated = kind_of(scaling), rotated_entries(dim, scaling)
    if checks.integer("dim times partial_rotary_factor", rotated, 2, dim, ConfigError) % 2:
        raise ConfigError(f"dim times partial_rotary_factor must be even, got {rotated}")
    try:
        inv_freq, attention_factor = SCALINGS[kind](Base(rotated, theta, seq_len, max_seq_len), scaling or {})
    except (OverflowError, ZeroDivisionError) as error:
        raise ConfigError(f"rope scaling {kind}: numbers out of range ({error})") from None
    if not bool(torch.isfinite(inv_freq).all()):
        raise ConfigError(f"rope scaling {kind} gives frequencies that are not finite")
    return torch.nn.functional.pad(inv_freq.float(), (0, (dim - rotated) // 2)), attention_factor


def _number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The finite number above 0 under `key`, or the default if there is none."""
    value = default if scaling.get(key) is None else scaling[key]
    return checks.number(f"rope scaling {kind_of(scaling)}: {key!r}", value, 0, 1e300, ConfigError, above=True)


def _trained_length(max_seq_len: int | None, scaling: Mapping[str, Any]) -> float:
    """The length that the unscaled frequencies were trained for: as in the scaling, else the model's context."""
    key = "original_max_position_embeddings"
    if scaling.get(key) is None and max_seq_len is not None:
        return float(max_seq_len)
    return _number(scaling, key)


def _divisors(base: Base, scaling: Mapping[str, Any], key: str) -> Tensor:
    """The list of D/2 finite numbers above 0 under `key`: (D/2,) float64."""
    values, pairs = scaling.get(key), base.dim // 2
    if not isinstance(values, list | tuple) or len(values) != pairs:
        raise ConfigError(f"rope scaling {kind_of(scaling)}: {key!r}: expected {pairs} numbers, one per pair")
    for value in values:
        checks.number(f"a number of rope scaling {key!r}", value, 0, 1e300, ConfigError, above=True)
    return torch.tensor(values, dtype=torch.float64)  # (D/2,)
