"""A context to be stretched: the settings that the topics on frequencies share, and an example of every scaling.

Everything here asks the library (llama.rope_scaling); formulas.py says the same a second time, to judge it.
Letters: D head_dim, theta the base, L = context the trained length, s = factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..rope_scaling import BY_LENGTH, inverse_frequencies, reach
from .measures import turns
from .topics.base import check_head_dim, check_range

# Parameters that Llama 3.1's files give beside the factor.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(frozen=True)
class Stretch:
    """Heads of head_dim entries, trained at base theta on `context` tokens, to be used on `factor` times as many.

    The limits keep a report under a second and every formula in the range that it was made for: YaRN's ramp, for one,
    turns round where its last fast pair would lie behind the last pair of the head. Raises UsageError outside.
    """

    head_dim: int = 128
    theta: float = 10000.0
    context: int = 2048
    factor: float = 4.0

    def __post_init__(self) -> None:
        check_head_dim(self.head_dim, 4, 1024)
        check_range("--rope-theta", self.theta, 100.0, 1e12)
        check_range("--context", self.context, 16, 2**20)
        check_range("--rope-factor", self.factor, 1.0, 1024.0)

    @property
    def wanted(self) -> int:
        """Tokens of the stretched context, rounded down."""
        return int(self.context * self.factor)

    @property
    def settings(self) -> dict[str, float]:
        """The settings under the names that options have."""
        return {"head_dim": self.head_dim, "theta": self.theta, "context": self.context, "factor": self.factor}

    def scaling(self, kind: str) -> Mapping[str, Any]:
        """An example of a kind of llama.rope_scaling.SCALINGS, with the parameters that a model's file would hold."""
        trained = {"original_max_position_embeddings": self.context}
        pairs, s = self.head_dim // 2, self.factor
        examples: dict[str, dict[str, Any]] = {
            "default": {},
            "linear": {"factor": s},
            "ntk": {"factor": s},
            "dynamic": {"factor": s},
            "yarn": {"factor": s, **trained},
            "longrope": {"short_factor": [1.0] * pairs, "long_factor": searched(pairs, s), **trained},
            "llama3": {"factor": s, **LLAMA3, **trained},
            "proportional": {"partial_rotary_factor": 0.5},
        }
        if kind == "divisors":  # what a GGUF file of Llama 3.1 stores
            return {"rope_type": kind, "divisors": self.divisors("llama3").tolist()}
        if kind not in examples:
            raise UsageError(f"no example of the scaling {kind!r}; known: {', '.join((*examples, 'divisors'))}")
        return {"rope_type": kind, **examples[kind]}

    def stretched(self, kind: str) -> tuple[Tensor, float]:
        """Frequencies at the wanted length (D/2,) float64, radians a position, and the factor of cos and sin."""
        # dynamic reads the trained length from max_seq_len, longrope its factor
        file_says = self.context if kind == "dynamic" else self.wanted
        inv_freq, attention_factor = inverse_frequencies(
            self.head_dim,
            self.theta,
            self.scaling(kind),
            seq_len=self.wanted if kind in BY_LENGTH else None,
            max_seq_len=file_says,
        )
        return inv_freq.double(), attention_factor

    def frequencies(self, kind: str = "default") -> Tensor:
        """Frequencies at the wanted length: (D/2,) float64, radians a position."""
        return self.stretched(kind)[0]

    def divisors(self, kind: str) -> Tensor:
        """By how much the kind divides each frequency: (D/2,) float64; infinite for a pair that it stops."""
        return self.frequencies() / self.frequencies(kind)

    def reach(self, kind: str) -> int:
        """Positions that the library lets a model of this kind be used for.

        Files of longrope, llama3 and divisors state the stretched context, the others the trained one.
        """
        stated = self.wanted if kind in ("longrope", "llama3", "divisors") else self.context
        return reach(stated, self.scaling(kind))

    def short(self) -> Tensor:
        """Which pairs don't finish a turn within the trained context, unscaled: (D/2,) bool."""
        return turns(self.frequencies(), self.context) < 1

    def unseen(self, kind: str) -> int:
        """Pairs that meet angles at the wanted length which training never showed them.

        A pair that finished a turn has seen every angle. A millionth is allowed for rounding.
        """
        met = self.wanted * self.frequencies(kind)  # (D/2,) radians
        return int((self.short() & (met > self.context * self.frequencies() * (1 + 1e-6))).sum())

    def some_pairs(self) -> list[int]:
        """A few pairs over the whole range: the quarters, and the first that doesn't finish a turn."""
        last = self.head_dim // 2 - 1
        first_short = torch.nonzero(self.short()).flatten().tolist()[:1]
        return sorted({0, (last + 1) // 4, (last + 1) // 2, 3 * (last + 1) // 4, last, *first_short})


def searched(pairs: int, factor: float) -> list[float]:
    """An invented list in the shape of LongRoPE's searched ones: 1 at the fast end, the factor from 5/8 on: (D/2,)."""
    return [factor ** min(1.0, (i / (0.625 * max(pairs - 1, 1))) ** 2) for i in range(pairs)]
