"""The registry of quantization schemes. A new scheme is an entry of SCHEMES.

A weight matrix (N, K) becomes integers, with a scale and an optional offset for each group of inputs:

    weight = scale * quant + offset
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import checks
from .blocks import BlockFormat


@dataclass(frozen=True)
class Scheme:
    """Bits per weight, inputs per group, and whether a group has an offset too.

    output  the scheme of the output layer and a tied embedding, if another: a token's logit depends on one row of it,
            and no later layer averages the error
    """

    bits: int
    group: int
    offset: bool
    about: str
    output: Scheme | None = None

    @property
    def format(self) -> BlockFormat:
        """The format of a weight that is quantized by the scheme."""
        return BlockFormat(self.bits, self.group, self.offset)

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, including scales and offsets, which have 16 bits each."""
        return self.bits + 16 * (1 + self.offset) / self.group


SCHEMES = {
    "int8": Scheme(8, 32, True, "8 bits in groups of 32 with a zero point"),
    "int4": Scheme(4, 32, True, "4 bits in groups of 32 with a zero point, output in 8 bits",
                   Scheme(8, 32, False, "8 bits in groups of 32, symmetric")),
}  # fmt: skip


def pick_scheme(name: str) -> Scheme:
    """The scheme with a name. Raises UsageError, which lists the known names."""
    return SCHEMES[checks.choice("quantization scheme", name, SCHEMES)]


def scheme_for(layer: str, scheme: Scheme) -> Scheme:
    """The scheme of one layer, given its name in the model."""
    return scheme.output if layer == "output" and scheme.output else scheme
