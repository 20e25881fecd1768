"""Inverse frequencies of RoPE under every scaling this package knows: one function a kind, one registry.

RoPE turns pair i of a head by the angle  position * inv_freq[i],  with  inv_freq[i] = theta^(-2i/D)  (RoFormer,
arXiv:2104.09864). A scaling changes these D/2 numbers, and may multiply cos and sin by an attention factor; it
changes nothing else. So it is a function of numbers, not a class. Everything is computed in float64 and rounded
to float32 once, at the end.

The kinds and their parameters are those of transformers' modeling_rope_utils.py, besides `ntk` and `divisors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .config import LARGEST_SIZE, ModelConfig
from .errors import ConfigError, UsageError


@dataclass(frozen=True)
class Base:
    """What a scaling starts from: dim is D; seq_len the length the frequencies are for, max_seq_len the trained one."""

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


# (what it starts from, the scaling's parameters) -> (inv_freq (D/2,) float64, factor for cos and sin)
Scaling = Callable[[Base, Mapping[str, Any]], tuple[Tensor, float]]


def default(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """No scaling: theta^(-2i/D)."""
    return base.inv_freq(), 1.0


def linear(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Position interpolation (arXiv:2306.15595): every position counts 1/factor."""
    return base.inv_freq() / _number(scaling, "factor"), 1.0


def ntk(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """NTK-aware interpolation (bloc97, 2023): a larger base, so that the slowest pair is stretched by factor."""
    return base.inv_freq(stretch=_number(scaling, "factor") ** (base.dim / (base.dim - 2))), 1.0


def dynamic(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """NTK by length (emozilla, 2023): no change up to the trained length, a base that grows with the length after."""
    trained = float(base.max_seq_len) if base.max_seq_len else _trained_length(base, scaling)  # as transformers has it
    factor, length = _number(scaling, "factor"), max(base.seq_len or 0, trained)
    return base.inv_freq(stretch=(factor * length / trained - (factor - 1)) ** (base.dim / (base.dim - 2))), 1.0


def yarn(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): fast pairs stay, slow ones are interpolated, a ramp lies between; attention sharpens.

    Pairs that turn more than beta_fast times within the old context are fast, less than beta_slow times slow.
    """
    trained = _trained_length(base, scaling)
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
    return inv_freq, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    def sharpness(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1

    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return sharpness(_number(scaling, "mscale")) / sharpness(_number(scaling, "mscale_all_dim"))
    return sharpness(1)


def longrope(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """LongRoPE (arXiv:2402.13753): one searched divisor a pair, a short list up to the trained length, a long after."""
    trained = _trained_length(base, scaling)
    if trained <= 1:
        raise ConfigError(f"rope scaling longrope: the trained length must be above 1, got {trained:g}")
    factor = (base.max_seq_len or trained) / trained if scaling.get("factor") is None else _number(scaling, "factor")
    divide = _divisors(base, scaling, "long_factor" if (base.seq_len or 0) > trained else "short_factor")
    if scaling.get("attention_factor") is not None:
        return base.inv_freq() / divide, _number(scaling, "attention_factor")
    return base.inv_freq() / divide, math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0


def llama3(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Llama 3.1: waves that turn often within the old context stay, slow ones are interpolated, a ramp lies between.

    Source: apply_scaling in meta-llama/llama-models models/llama3/model.py, with its constants as parameters.
    """
    inv_freq, factor, trained = base.inv_freq(), _number(scaling, "factor"), _trained_length(base, scaling)
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if low >= high:
        raise ConfigError(f"rope scaling llama3: low_freq_factor must be below high_freq_factor, got {low} and {high}")
    turns = trained * inv_freq / (2 * math.pi)  # (D/2,) full turns within the old context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / factor, 1.0


def proportional(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Only the first partial_rotary_factor of the pairs turn; the others carry no position."""
    part = _number(scaling, "partial_rotary_factor", default=1)
    inv_freq = base.inv_freq() / _number(scaling, "factor", default=1)
    inv_freq[int(part * base.dim // 2) :] = 0
    return inv_freq, 1.0


def divisors(base: Base, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """One divisor for each pair, as GGUF files store them in the tensor `rope_freqs.weight`."""
    return base.inv_freq() / _divisors(base, scaling, "divisors"), 1.0


SCALINGS: dict[str, Scaling] = {
    "default": default,
    "linear": linear,
    "ntk": ntk,
    "dynamic": dynamic,
    "yarn": yarn,
    "longrope": longrope,
    "llama3": llama3,
    "proportional": proportional,
    "divisors": divisors,
}
# kind -> the parameters it takes
PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),  # as transformers, it counts from the model's context
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "proportional": ("factor", "partial_rotary_factor"),
    "divisors": ("divisors",),
}  # fmt: skip
LARGEST_HEAD = 2**16  # entries; a larger number in a file is damage and must not size anything
BY_LENGTH = ("dynamic", "longrope")  # their frequencies depend on seq_len


def kind_of(scaling: Mapping[str, Any] | None) -> str:
    """The kind that a scaling names, "default" for none. Raises ConfigError on an unknown one."""
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ConfigError(f"unknown rope scaling {kind!r:.60}; known: {', '.join(SCALINGS)}")
    return kind


def with_rope(config: ModelConfig, scaling: Mapping[str, Any] | None = None, theta: float | None = None) -> ModelConfig:
    """The same model under another scaling and base; None leaves that part as it is, rope_type "default" takes any off.

    A new scaling starts from the plain frequencies, so the context becomes the length those were trained for: that
    of the replaced scaling's original_max_position_embeddings, where it has one. scaling may carry a rope_theta, as
    transformers 5 writes it. Raises UsageError on bad values, and on parameters that the kind does not take.
    """
    changes: dict[str, Any] = {}
    try:
        if scaling is not None:
            scaling, theta = _asked_for(scaling, theta)
            changes["rope_scaling"] = None if kind_of(scaling) == "default" else scaling
            changes["max_seq_len"] = min(int(trained_length(config)), config.max_seq_len)
        if theta is not None:
            changes["rope_theta"] = theta
        changed = replace(config, **changes)
        length = changed.max_seq_len
        inverse_frequencies(
            changed.head_dim, changed.rope_theta, changed.rope_scaling, seq_len=length, max_seq_len=length
        )
    except ConfigError as error:
        raise UsageError(str(error)) from None
    return changed


def _asked_for(scaling: Mapping[str, Any], theta: float | None) -> tuple[dict[str, Any], float | None]:
    """A wish, checked more strictly than a file is: a slip in it must not pass for a setting."""
    wish = {key: value for key, value in scaling.items() if value is not None}
    if wish.get("type", wish.get("rope_type")) != wish.get("rope_type", wish.get("type")):
        raise ConfigError(f"rope scaling {_short(wish)}: type and rope_type contradict each other; give one")
    inner = wish.pop("rope_theta", theta)
    if theta is not None and inner != theta:
        raise ConfigError(f"rope theta was given twice, as {inner!r:.40} and {theta!r:.40}; give it once")
    kind = kind_of(wish)
    odd = [key for key in wish if key not in ("rope_type", "type", *PARAMETERS[kind])]
    if odd:
        takes = ", ".join(PARAMETERS[kind]) or "nothing"
        raise ConfigError(f"rope scaling {kind} does not take {', '.join(odd)!r:.80}; it takes: {takes}")
    if kind == "yarn" and _number(wish, "beta_fast", default=32) < _number(wish, "beta_slow", default=1):
        raise ConfigError(f"rope scaling {_short(wish)}: beta_fast must not be below beta_slow")
    return wish, inner


def trained_length(config: ModelConfig) -> float:
    """The length in tokens that a model's plain frequencies were trained for."""
    scaling = config.rope_scaling or {}
    return _trained_length(Base(config.head_dim, config.rope_theta, max_seq_len=config.max_seq_len), scaling)


def reach(max_seq_len: int, scaling: Mapping[str, Any] | None) -> int:
    """Positions a model can be used for: its context, or what these scalings stretch the trained length to.

    Files differ in whether max_position_embeddings is the length before or after stretching, so the larger holds.
    """
    stretching = ("linear", "ntk", "dynamic", "yarn", "llama3")
    if scaling is None or kind_of(scaling) not in stretching or scaling.get("factor") is None:
        return max_seq_len
    if kind_of(scaling) == "llama3" and scaling.get("original_max_position_embeddings") is not None:
        return max_seq_len  # the official files: theirs is the stretched length, and not factor times the old one
    own = kind_of(scaling) == "yarn"
    trained = _trained_length(Base(2, 1.0, max_seq_len=max_seq_len), scaling) if own else float(max_seq_len)
    return max(max_seq_len, int(min(trained * _number(scaling, "factor"), LARGEST_SIZE)))


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
    seq_len      length the frequencies are for; used by the kinds in BY_LENGTH
    max_seq_len  the model's context (Hugging Face's max_position_embeddings): the trained length, unless the
                 scaling has an original_max_position_embeddings of its own

    Returns (inv_freq (dim/2,) float32, attention_factor). Raises ConfigError on an unknown kind or a bad parameter.
    """
    if isinstance(theta, bool) or not isinstance(theta, int | float) or abs(theta) > 1e300:
        raise ConfigError(f"rope theta must be a finite number above 0, got {str(theta)[:40]} ({type(theta).__name__})")
    if dim < 2 or dim % 2:
        raise ConfigError(f"RoPE rotates pairs, so dim must be even and at least 2; got {dim}")
    if not (math.isfinite(theta) and theta > 0):
        raise ConfigError(f"rope theta must be a finite number above 0, got {theta}")
    kind = kind_of(scaling)
    if not isinstance(dim, int) or dim > LARGEST_HEAD:
        raise ConfigError(f"RoPE: a head of {dim} entries is beyond anything known; at most {LARGEST_HEAD}")
    if dim == 2 and kind in ("ntk", "dynamic"):
        raise ConfigError(f"rope scaling {kind} stretches the base by factor^(D / (D - 2)), so D must be above 2")
    if theta == 1 and kind == "yarn":
        raise ConfigError("rope scaling yarn divides by log(theta), so theta must not be 1")
    try:
        inv_freq, attention_factor = SCALINGS[kind](Base(dim, theta, seq_len, max_seq_len), scaling or {})
    except (OverflowError, ZeroDivisionError) as error:
        raise ConfigError(f"rope scaling {_short(scaling or {})}: numbers out of range ({error})") from None
    if not bool(torch.isfinite(inv_freq).all()):
        raise ConfigError(f"rope scaling {_short(scaling or {})} gives frequencies that are not finite")
    return inv_freq.float(), attention_factor


def _number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The finite number above 0 under `key`, or the default where there is none."""
    value = default if scaling.get(key) is None else scaling[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:  # false for NaN too
        raise ConfigError(f"rope scaling {_short(scaling)}: {key!r} must be a finite number above 0, got {value!r:.40}")
    return float(value)


def _trained_length(base: Base, scaling: Mapping[str, Any]) -> float:
    """The length the unscaled frequencies were trained for."""
    key = "original_max_position_embeddings"
    if scaling.get(key) is None and base.max_seq_len is not None:
        return float(base.max_seq_len)
    return _number(scaling, key)


def _divisors(base: Base, scaling: Mapping[str, Any], key: str) -> Tensor:
    """The list of D/2 finite numbers above 0 under `key`: (D/2,) float64."""
    values = scaling.get(key)
    if not isinstance(values, list | tuple) or any(
        isinstance(v, bool) or not isinstance(v, int | float) for v in values
    ):
        raise ConfigError(f"rope scaling {_short(scaling)}: {key!r} must be a list of numbers")
    if len(values) != base.dim // 2:
        raise ConfigError(f"rope scaling {key}: expected {base.dim // 2} numbers, one for each pair, got {len(values)}")
    divide = torch.tensor(values, dtype=torch.float64)  # (D/2,)
    if not bool((torch.isfinite(divide) & (divide > 0)).all()):
        raise ConfigError(f"rope scaling {key}: every number must be finite and above 0")
    return divide


def _short(scaling: Mapping[str, Any]) -> dict[str, Any]:
    return {key: "[...]" if isinstance(value, list | tuple) else str(value)[:40] for key, value in scaling.items()}
