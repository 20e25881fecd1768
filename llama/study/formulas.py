"""A second implementation of frequencies, scalings and bfloat16 rounding, in numpy's float64, from the papers.

The topics compare llama.rope_scaling and llama.rope with it. For independence, this file imports nothing from the
library, and writes a formula in another way where there are two: NTK-aware as a divisor of each frequency instead of
a new base, YaRN's ramp by counting pairs instead of solving for one, Llama 3's by wavelength instead of turns.

Letters: D head_dim, theta the base, L = context the trained length, s = factor; i = 0 .. D/2 - 1 the pair.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def frequencies(head_dim: int, theta: float) -> Array:
    """theta^(-2i/D), radians a position: (D/2,) (RoFormer, arXiv:2104.09864, section 3.2.2)."""
    return np.exp(-np.log(theta) * np.arange(0, head_dim, 2) / head_dim)


def turns(head_dim: int, theta: float, length: float) -> Array:
    """Full turns of each pair within `length` positions: (D/2,)."""
    return length / (2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))


def by_parts(turn: Array, alpha: float, beta: float, factor: float) -> Array:
    """Divisors by NTK-by-parts (YaRN, section 3.2): pairs of beta turns or more stay, those below alpha are divided.

    Returns (D/2,).
    """
    keep = np.clip((turn - alpha) / (beta - alpha), 0, 1)  # the paper's gamma
    return 1 / (keep + (1 - keep) / factor)


def yarn_ramp(head_dim: int, theta: float, context: int, factor: float, truncate: bool = True) -> Array:
    """Divisors by YaRN's reference code: a ramp over the pair's index, not over its turns as in the paper: (D/2,).

    Without `truncate` the ramp may begin and end between two pairs.
    """
    # D entries and not D/2, since the reference code clamps at the number of entries of the head.
    turn = context / (2 * np.pi * theta ** (2 * np.arange(head_dim) / head_dim))  # (D,)
    low = max(float((turn >= 32).sum()) - 1, 0)  # the last pair of 32 turns or more
    high = min(float((turn > 1).sum()), head_dim - 1)  # the first pair of at most one
    if not truncate:  # the turns fall by the same ratio from pair to pair, so an index is a logarithm to that base
        per_pair = np.log(turn[0] / turn[1])
        low = max(np.log(turn[0] / 32) / per_pair, 0)
        high = min(np.log(turn[0]) / per_pair, head_dim - 1)
    slow = np.clip((np.arange(head_dim // 2) - low) / ((high - low) or 0.001), 0, 1)
    return 1 / (1 - slow + slow / factor)


def llama3_waves(head_dim: int, theta: float, context: int, factor: float) -> Array:
    """Divisors by Llama 3.1: waves shorter than L/4 stay, those longer than L are divided, with a ramp between.

    Returns (D/2,).
    """
    wave = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)  # (D/2,) positions
    smooth = (context / wave - 1) / (4 - 1)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wave < context / 4, 1.0, np.where(wave > context, factor, between))


def divisors(kind: str, head_dim: int, theta: float, context: int, factor: float) -> Array:
    """Divisor of each frequency at int(s L) positions under an example of a scaling kind: (D/2,).

    `stretch.Stretch.scaling` has the same examples. Raises KeyError on an unknown kind.
    """
    i = np.arange(head_dim // 2)
    along = i / (head_dim / 2 - 1)  # 0 at the fastest pair, 1 at the slowest
    length = int(context * factor) / context
    by_kind: dict[str, Callable[[], Array]] = {
        "default": lambda: np.ones(len(i)),
        "linear": lambda: np.full(len(i), float(factor)),
        "ntk": lambda: factor**along,
        "dynamic": lambda: (factor * length - factor + 1) ** along,
        "yarn": lambda: yarn_ramp(head_dim, theta, context, factor),
        "longrope": lambda: np.exp(np.log(factor) * np.minimum(1, (8 / 5 * along) ** 2) * (length > 1)),
        "llama3": lambda: llama3_waves(head_dim, theta, context, factor),
        "proportional": lambda: np.where(i < head_dim // 4, 1.0, np.inf),
        "divisors": lambda: llama3_waves(head_dim, theta, context, factor),
    }
    return by_kind[kind]()


def attention_factor(kind: str, context: int, factor: float) -> float:
    """Factor of cos and sin: 0.1 ln s + 1 in YaRN, sqrt(1 + ln s / ln L) in LongRoPE, else 1."""
    stretched = int(context * factor) / context
    if kind == "yarn":
        return float(1 + np.log(factor) / 10)
    return float(np.sqrt(np.log(context * stretched) / np.log(context))) if kind == "longrope" else 1.0


def yarn_sharpness(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """YaRN's factor of cos and sin for a file that has mscale and mscale_all_dim (as DeepSeek-V2's does)."""
    grown = np.log(factor) / 10
    return float((1 + mscale * grown) / (1 + mscale_all_dim * grown))


def unseen(kind: str, head_dim: int, theta: float, context: int, factor: float) -> int:
    """Number of pairs that do not finish a turn within L and meet new angles within s L: their divisor is below s."""
    divided = divisors(kind, head_dim, theta, context, factor)
    enough = int(context * factor) / context / (1 + 1e-6)
    return int(((turns(head_dim, theta, context) < 1) & (divided < enough)).sum())


def bfloat16(x: npt.ArrayLike) -> Array:
    """Round numbers to bfloat16, ties to even: float32 with the lower 16 of its 32 bits rounded away."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)
