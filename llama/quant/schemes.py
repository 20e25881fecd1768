"""Quantization of weights: the registry of schemes, and what a scheme does, in PyTorch.

A weight matrix (N, K) becomes integers, with a scale and an optional offset for each group of inputs:

    weight = scale * quant + offset

A new scheme is an entry of SCHEMES. `quantize` defines the result; the C++ kernel is the fast version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from ..errors import CheckpointError
from .groups import GroupedWeight, GroupFormat

# Factors that narrow the range of a group. A narrower range has finer steps for the many small weights and clips the
# few large ones. In 8 bits the full range is best.
CLIPS = {4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.75), 8: (1.0,)}


@dataclass(frozen=True)
class Scheme:
    """How weights are quantized.

    output  the scheme of the output layer and a tied embedding, if it differs: a logit depends on one row of the layer,
            and no later layer averages the error
    """

    format: GroupFormat
    about: str
    output: Scheme | None = None

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, including scales and offsets, which have 16 bits each."""
        return self.format.bits + 16 * (1 + self.format.offset) / self.format.group


SCHEMES = {
    "int8": Scheme(GroupFormat(8, 32, True), "8 bits in groups of 32 with a zero point"),
    "int4": Scheme(GroupFormat(4, 32, True), "4 bits in groups of 32 with a zero point, output in 8 bits",
                   Scheme(GroupFormat(8, 32, False), "8 bits in groups of 32, symmetric")),
}  # fmt: skip


def pick_scheme(name: str) -> Scheme:
    """The scheme with a name. Raises UsageError, which lists the known names."""
    return SCHEMES[checks.choice("quantization scheme", name, SCHEMES)]


def scheme_for(name: str, scheme: Scheme) -> Scheme:
    """The scheme of a quantized layer or weight of the model; a quantized embedding is always tied."""
    return scheme.output if name.startswith(("output", "tok_embeddings")) and scheme.output else scheme


def quantize(weight: Tensor, format: GroupFormat) -> GroupedWeight:
    """Quantize a weight (N, K) by a format.

    For each group, several widths of its range are tried (CLIPS), and the one with the smallest squared error is used.
    Scales and offsets are rounded to float16.
    kernels.quantize_to_tiles computes the same, packed, tens of times as fast. Raises CheckpointError if a weight
    is not finite, or too large for a float16 scale.
    """
    columns = weight.shape[1]
    missing = -columns % format.group
    w = F.pad(weight.float(), (0, missing)).unflatten(1, (-1, format.group))  # (N, groups, group)
    if format.offset and missing:  # the padding of the last group must not widen its range
        w[:, -1, -missing:] = w[:, -1, :1]
    quants, scale, offset = best(_candidates(w, format, missing))
    check_scales(scale, offset)
    quants = quants.to(torch.uint8).flatten(1)[:, :columns].contiguous()
    return GroupedWeight(quants, scale[..., 0], offset[..., 0] if format.offset else None, format.bits, format.group)


def _candidates(w: Tensor, format: GroupFormat, missing: int) -> Iterator[tuple[Tensor, ...]]:
    """Error, quants, scale and offset of groups (N, groups, group), for each width of their ranges.

    missing  columns at the end that do not count
    """
    top, middle_quant = 2**format.bits - 1, 2 ** (format.bits - 1)
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)  # (N, groups, 1)
    for clip in CLIPS[format.bits]:
        if format.offset:
            middle, half = (low + high) / 2, (high - low) / 2 * clip
            scale = (half * 2 / top).half().float()
            offset = (middle - half).half().float()
        else:
            scale = (torch.maximum(-low, high) * clip / (middle_quant - 1)).half().float()
            offset = -scale * middle_quant
        quants = ((w - offset) / torch.where(scale > 0, scale, 1)).round().clamp(0, top)
        gaps = quants * scale + offset - w
        gaps[:, -1, gaps.shape[-1] - missing :] = 0
        yield gaps.square().sum(-1, keepdim=True), quants, scale, offset


def best(candidates: Iterator[tuple[Tensor, ...]]) -> list[Tensor]:
    """The values with the smallest error, for each group. A candidate is an error (.., groups, 1), then its values."""
    least, *found = next(candidates)
    for error, *values in candidates:
        better = error < least
        least, *found = (torch.where(better, *pair) for pair in zip((error, *values), (least, *found), strict=True))
    return found


def check_scales(*scales: Tensor) -> None:
    """Raise CheckpointError if a scale or an offset is not finite."""
    if not all(bool(torch.isfinite(scale).all()) for scale in scales):
        raise CheckpointError(
            "a weight is not finite, or too large for 16-bit scales, and can't be quantized; load it without quantize"
            " (--quantize), or compare checksums (clearllama verify)"
        )
