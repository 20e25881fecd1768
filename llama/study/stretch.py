"""The settings of the topics on frequencies, and an example of every scaling.

Letters: D head_dim, theta the base, L = context the trained length, s = factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..rope_scaling import BY_LENGTH, inverse_frequencies
from .measures import turns
from .topics.base import check_head_dim, check_range

# Parameters of the llama3 scaling in Llama 3.1's files, in addition to the factor.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(frozen=True)
class Stretch:
    """Heads of head_dim entries, trained at base theta on `context` tokens, to be used on `factor` times as many.

    Raises UsageError outside of its limits, within which each formula is valid: YaRN's ramp, for example, would be
    reversed if its last fast pair came after the last pair of the head.
    """

    head_dim: int = 128
    theta: float = 10000.0
    context: int = 2048
    factor: float = 4.0

    def __post_init__(self) -> None:
        check_head_dim(self.head_dim, 4, 1024)
        check_range("--rope-theta", self.theta, 100.0, 1e12)
        check_range("--context", self.context, 16, 2**20)
        check_range("--rope-factor", self.factor, 1.01, 1024.0)

    @property
    def target(self) -> int:
        """Tokens of the stretched context, rounded down."""
        return int(self.context * self.factor)

    @property
    def settings(self) -> dict[str, float]:
        """The settings by option name."""
        return asdict(self)

    def scaling(self, kind: str) -> Mapping[str, Any]:
        """An example of a kind of scaling, with the parameters that a model's file has."""
        more: dict[str, Any] = {"factor": self.factor}
        if kind in ("yarn", "llama3"):
            more["original_max_position_embeddings"] = self.context
        return {"rope_type": kind, **more, **(LLAMA3 if kind == "llama3" else {})}

    def stretched(self, kind: str = "default") -> tuple[Tensor, float]:
        """Frequencies at the target length (D/2,) float64, radians per position, and the factor of cos and sin."""
        inv_freq, attention_factor = inverse_frequencies(
            self.head_dim,
            self.theta,
            self.scaling(kind) if kind != "default" else None,
            seq_len=self.target if kind in BY_LENGTH else None,
            max_seq_len=self.context,
        )
        return inv_freq.double(), attention_factor

    def frequencies(self, kind: str = "default") -> Tensor:
        """Frequencies at the target length: (D/2,) float64, radians per position."""
        return self.stretched(kind)[0]

    def slow(self) -> Tensor:
        """Whether each pair stays below one turn within the trained context, unscaled: (D/2,) bool."""
        return turns(self.frequencies(), self.context) < 1

    def unseen(self, inv_freq: Tensor) -> int:
        """Number of pairs that meet new angles at the target length under the frequencies inv_freq (D/2,).

        A pair that finished a turn has met every angle. A millionth is allowed for rounding.
        """
        met = self.target * inv_freq  # (D/2,) radians
        return int((self.slow() & (met > self.context * self.frequencies() * (1 + 1e-6))).sum())

    def some_pairs(self) -> list[int]:
        """A few pairs over the range: the quarters, and the first that doesn't finish a turn."""
        count = self.head_dim // 2
        first_slow = torch.nonzero(self.slow()).flatten().tolist()[:1]
        return sorted({0, count // 4, count // 2, 3 * count // 4, count - 1, *first_slow})
