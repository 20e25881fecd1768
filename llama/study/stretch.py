"""The settings that the topics on frequencies share, and an example of every scaling.

All numbers here come from the library (llama.rope_scaling); formulas.py is the independent implementation they are
compared with. Letters: D head_dim, theta the base, L = context the trained length, s = factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..rope_scaling import BY_LENGTH, inverse_frequencies, stretched
from .measures import turns
from .topics.base import check_head_dim, check_range

# Parameters of the llama3 scaling in Llama 3.1's files, in addition to the factor.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(frozen=True)
class Stretch:
    """Heads of head_dim entries, trained at base theta on `context` tokens, to be used on `factor` times as many.

    Raises UsageError outside of its limits. They keep a report under a second and each formula in its valid range:
    YaRN's ramp, for example, would be reversed if its last fast pair came after the last pair of the head.
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
    def target(self) -> int:
        """Tokens of the stretched context, rounded down."""
        return int(self.context * self.factor)

    @property
    def settings(self) -> dict[str, float]:
        """The settings by option name."""
        return {"head_dim": self.head_dim, "theta": self.theta, "context": self.context, "factor": self.factor}

    def scaling(self, kind: str) -> Mapping[str, Any]:
        """An example of a kind of llama.rope_scaling.SCALINGS, with the parameters that a model's file has.

        Raises UsageError on an unknown kind.
        """
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
        if kind == "divisors":  # a GGUF file of Llama 3.1 stores these
            return {"rope_type": kind, "divisors": self.divisors("llama3").tolist()}
        if kind not in examples:
            raise UsageError(f"unknown scaling {kind!r}; known: {', '.join((*examples, 'divisors'))}")
        return {"rope_type": kind, **examples[kind]}

    def stretched(self, kind: str) -> tuple[Tensor, float]:
        """Frequencies at the target length (D/2,) float64, radians per position, and the factor of cos and sin."""
        # dynamic takes the trained length from max_seq_len, longrope its factor
        max_seq_len = self.context if kind == "dynamic" else self.target
        inv_freq, attention_factor = inverse_frequencies(
            self.head_dim,
            self.theta,
            self.scaling(kind),
            seq_len=self.target if kind in BY_LENGTH else None,
            max_seq_len=max_seq_len,
        )
        return inv_freq.double(), attention_factor

    def frequencies(self, kind: str = "default") -> Tensor:
        """Frequencies at the target length: (D/2,) float64, radians per position."""
        return self.stretched(kind)[0]

    def divisors(self, kind: str) -> Tensor:
        """Divisor of each frequency under a kind of scaling: (D/2,) float64; infinite for a pair that it stops."""
        return self.frequencies() / self.frequencies(kind)

    def reach(self, kind: str) -> int:
        """Number of positions up to which the library lets a model with this scaling run.

        Model files with longrope, llama3 or divisors have the stretched context as max_seq_len, the others the
        trained one.
        """
        max_seq_len = self.target if kind in ("longrope", "llama3", "divisors") else self.context
        return stretched(max_seq_len, self.scaling(kind))

    def short(self) -> Tensor:
        """Whether each pair stays below one turn within the trained context, unscaled: (D/2,) bool."""
        return turns(self.frequencies(), self.context) < 1

    def unseen(self, kind: str) -> int:
        """`unseen_of` under a kind of scaling."""
        return self.unseen_of(self.frequencies(kind))

    def unseen_of(self, inv_freq: Tensor) -> int:
        """Number of pairs that meet angles at the target length that did not occur in training: inv_freq (D/2,).

        A pair that finished a turn has seen every angle. A millionth is allowed for rounding.
        """
        met = self.target * inv_freq  # (D/2,) radians
        return int((self.short() & (met > self.context * self.frequencies() * (1 + 1e-6))).sum())

    def some_pairs(self) -> list[int]:
        """A few pairs over the range: the quarters, and the first that doesn't finish a turn."""
        last = self.head_dim // 2 - 1
        first_short = torch.nonzero(self.short()).flatten().tolist()[:1]
        return sorted({0, (last + 1) // 4, (last + 1) // 2, 3 * (last + 1) // 4, last, *first_short})


def searched(pairs: int, factor: float) -> list[float]:
    """A made-up list similar to LongRoPE's searched ones: 1 for the fastest pair, the factor from 5/8 on: (D/2,)."""
    return [factor ** min(1.0, (i / (0.625 * max(pairs - 1, 1))) ** 2) for i in range(pairs)]
