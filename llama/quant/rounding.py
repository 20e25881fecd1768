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
    for 8 bits the full range is best. Scales have the kernel's dtype: float16 for groups, float32 for rows.
    kernels.quantize_to_tiles computes the same, packed, tens of times as fast. Raises CheckpointError if a weight
    is not finite, or too large for a float16 scale.
    """
    rows, columns = weight.shape
    group = format.group or columns
    missing = -columns % group
    w = F.pad(weight.float(), (0, missing)).view(rows, -1, group)  # (N, groups, group)
    if format.offset and missing:  # the padding of the last group must not widen its range
        w[:, -1, -missing:] = w[:, -1, :1]
    first, *others = clips_of(format)
    best = _quantized(w, format, first)
    least = _error(w, *best, missing)  # (N, groups)
    for clip in others:
        tried = _quantized(w, format, clip)
        error = _error(w, *tried, missing)
        better = error < least
        best = (
            torch.where(better[..., None], tried[0], best[0]),  # quants
            torch.where(better, tried[1], best[1]),  # scale
            torch.where(better, tried[2], best[2]),  # offset
        )
        least = torch.where(better, error, least)
    quants, scale, offset = best
    check_scales(scale, offset)
    return Blocks(
        quants.to(torch.uint8).flatten(1)[:, :columns].contiguous(),
        scale,
        offset if format.offset else None,
        format.bits,
        format.group,
    )


def _quantized(w: Tensor, format: BlockFormat, clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """Quants, scale and offset of groups (N, groups, group) whose range is narrowed to `clip` of its width."""
    top = 2**format.bits - 1
    if format.offset:
        low, high = w.amin(-1), w.amax(-1)  # (N, groups)
        middle, half = (low + high) / 2, (high - low) / 2 * clip
        scale = _stored(half * 2 / top, format)
        offset = _stored(middle - half, format)
    else:
        middle_quant = 2 ** (format.bits - 1)
        scale = _stored(w.abs().amax(-1) * clip / (middle_quant - 1), format)
        offset = -scale * middle_quant
    steps = torch.where(scale > 0, scale, 1)[..., None]
    return ((w - offset[..., None]) / steps).round().clamp(0, top), scale, offset


def _stored(x: Tensor, format: BlockFormat) -> Tensor:
    """A scale or offset as it is stored: float16 for groups."""
    return x.half().float() if format.group else x


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
            "a weight is not finite, or too large for 16-bit scales, and can't be quantized; download the file again"
            " (clearllama verify --tensors checks every weight), or load it without quantize (--quantize)"
        )


LARGEST_SCALE = 65504.0  # of float16


def check_overflow(blocks: Blocks) -> None:
    """Raise CheckpointError if a finite scale or offset of a group becomes infinite in 16 bits."""
    stored = (blocks.scale, blocks.offset) if blocks.factors is None else (blocks.factors,)
    for values in stored if blocks.group else ():
        largest = 0.0 if values is None else float(values.abs().max())  # NaN if one is NaN
        if LARGEST_SCALE < largest < torch.inf:
            raise CheckpointError(
                f"a scale of {largest:g} is beyond float16's limit, {LARGEST_SCALE:g}; load the model with"
                f" dtype='float32' (--dtype float32), which dequantizes the weights"
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
            "all entries of a weight are too small for 16-bit scales, so quantizing it would destroy it; use"
            " quantize='int8-row' (--quantize int8-row), whose scales have 32 bits, or load it without quantize"
        )
