"""Quantization of a weight, in PyTorch. It defines the result; the C++ kernel is the fast version."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CheckpointError
from .blocks import BlockFormat, Blocks

# Factors to narrow a group's range by. A narrower range has finer steps for the many small weights and clips the few
# large ones.
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


def quantize(weight: Tensor, format: BlockFormat) -> Blocks:
    """Quantize a weight (N, K) by a format.

    For each group, several widths of its range are tried (CLIPS), and the one with the smallest squared error is used;
    for 8 bits the full range is best. Scales and offsets are rounded to float16.
    kernels.quantize_to_tiles computes the same, packed, tens of times as fast. Raises CheckpointError if a weight
    is not finite, or too large for a float16 scale.
    """
    columns = weight.shape[1]
    missing = -columns % format.group
    w = F.pad(weight.float(), (0, missing)).unflatten(1, (-1, format.group))  # (N, groups, group)
    if format.offset and missing:  # the padding of the last group must not widen its range
        w[:, -1, -missing:] = w[:, -1, :1]
    first, *others = clips_of(format)
    quants, scale, offset = _quantized(w, format, first)
    least = _error(w, quants, scale, offset, missing)  # (N, groups)
    for clip in others:
        tried = _quantized(w, format, clip)
        error = _error(w, *tried, missing)
        better = error < least
        quants = torch.where(better[..., None], tried[0], quants)
        scale, offset, least = (
            torch.where(better, *pair) for pair in ((tried[1], scale), (tried[2], offset), (error, least))
        )
    check_scales(scale, offset)
    quants = quants.to(torch.uint8).flatten(1)[:, :columns].contiguous()
    return Blocks(quants, scale, offset if format.offset else None, format.bits, format.group)


def _quantized(w: Tensor, format: BlockFormat, clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """Quants, scale and offset of groups (N, groups, group) whose range is narrowed to `clip` of its width."""
    top = 2**format.bits - 1
    if format.offset:
        low, high = w.amin(-1), w.amax(-1)  # (N, groups)
        middle, half = (low + high) / 2, (high - low) / 2 * clip
        scale = (half * 2 / top).half().float()
        offset = (middle - half).half().float()
    else:
        middle_quant = 2 ** (format.bits - 1)
        scale = (w.abs().amax(-1) * clip / (middle_quant - 1)).half().float()
        offset = -scale * middle_quant
    steps = torch.where(scale > 0, scale, 1)[..., None]
    return ((w - offset[..., None]) / steps).round().clamp(0, top), scale, offset


def clips_of(format: BlockFormat) -> tuple[float, ...]:
    """The factors to try for a format."""
    return CLIPS if format.bits < 8 else CLIPS[:1]


def _error(w: Tensor, quants: Tensor, scale: Tensor, offset: Tensor, missing: int) -> Tensor:
    """Squared error of groups (N, groups, group), without the last `missing` columns: -> (N, groups)."""
    gaps = quants * scale[..., None] + offset[..., None] - w
    gaps[:, -1, gaps.shape[-1] - missing :] = 0
    return gaps.square().sum(-1)


def check_scales(*scales: Tensor) -> None:
    """Raise CheckpointError if a scale or an offset is not finite."""
    if not all(bool(torch.isfinite(scale).all()) for scale in scales):
        raise CheckpointError(
            "a weight is not finite, or too large for 16-bit scales, and can't be quantized; load it without quantize"
            " (--quantize), or see 'clearllama verify --tensors'"
        )


# Below these values, adjacent float16 numbers differ by more than 3 %, and the scale of a group has that error.
SMALLEST_SCALE, SMALLEST_OFFSET = 2.0**-20, 2.0**-14


def check_range(scale: float, offset: float, is_zero: Callable[[], bool]) -> None:
    """Raise CheckpointError if 16-bit scales are too coarse for a weight that is not zero.

    scale, offset  the largest absolute values of the weight's groups. A single group with a small scale is accepted:
                   its error is small compared with the other groups.
    """
    if scale < SMALLEST_SCALE and offset < SMALLEST_OFFSET and not is_zero():
        raise CheckpointError(
            "all entries of a weight are too small for 16-bit scales; load the model without quantize (--quantize)"
        )
