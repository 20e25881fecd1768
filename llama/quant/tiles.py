"""Packing of quantized weights into tiles, the layout that the kernels read, and unpacking.

A tile is 16 rows of a weight (N, K); cpp/groups.h describes its bytes. The files of a quantized checkpoint store the
same bytes, so such a file is only mapped when it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .groups import BLOCK, GroupedWeight, GroupFormat

TILE = 16  # rows of a tile, as in cpp/groups.h
PER_ROW = 64  # a tile is divided into groups of 64 inputs if a row has one scale


class TileLayout(NamedTuple):
    """How a row of 16 weights is divided into blocks.

    width     inputs per group
    groups    groups per block
    units     units per block
    planes    parts of a unit, each as bits per weight, lowest bit, first byte, number of bytes
    integers  bytes of the integer scales, if there are two levels of scales
    numbers   bytes of scales and offsets, or of factors
    """

    width: int
    groups: int
    units: int
    planes: tuple[tuple[int, int, int, int], ...]
    integers: int
    numbers: int

    @classmethod
    def of(cls, format: GroupFormat) -> TileLayout:
        bits, group, offset, _, levels = format
        width, low = group or PER_ROW, 8 if bits == 8 else 4 if bits >= 4 else 2
        groups = BLOCK // width if levels else 1
        unit = 32 // (bits - low) if bits > low else groups * width  # 64 bytes hold the other bits of a unit
        first = unit * TILE * low // 8
        planes = ((low, 0, 0, first), (bits - low, low, first, unit * TILE * (bits - low) // 8))
        integers = groups * TILE * (1 + (offset and bits > 2)) if levels else 0
        numbers = 2 * TILE * (1 + offset) if group else 0
        return cls(width, groups, groups * width // unit, planes[: 1 + (bits > low)], integers, numbers)

    @property
    def weights(self) -> int:
        """Bytes of a block's weights."""
        return self.units * sum(size for *_, size in self.planes)

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.weights + self.integers + self.numbers

    def parts(self, tiles: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tiles as weights (tiles, blocks, units, bytes), integers and numbers (tiles, blocks, bytes)."""
        count = self.blocks(columns)
        body = tiles[:, : count * self.nbytes].unflatten(1, (count, -1))
        if self.integers:
            numbers, integers, weights = body.split([self.numbers, self.integers, self.weights], -1)
        else:
            (weights, numbers), integers = body.split([self.weights, self.numbers], -1), body[..., :0]
        return weights.unflatten(-1, (self.units, -1)), integers, numbers

    def blocks(self, columns: int) -> int:
        """The blocks of a row."""
        return -(-columns // (self.groups * self.width))


def pack(groups: GroupedWeight, out: Tensor | None = None) -> Tensor:
    """Pack a weight into tiles: (tiles, bytes of a tile) uint8, `out` if it is given. Rows and columns are padded."""
    format, bits, (rows, columns) = groups.format, groups.bits, groups.quants.shape
    layout = TileLayout.of(format)
    tiles, count = -(-rows // TILE), layout.blocks(columns)
    missing = tiles * TILE - rows
    if out is None:
        out = torch.empty(tiles, tile_bytes(columns, format), dtype=torch.uint8)
    zero = 0 if groups.offset is not None or groups.values is not None else 2 ** (bits - 1)
    # numpy, since PyTorch would start threads, and several pieces are packed at once. A word is 4 bytes of a row; words
    # are copied in a quarter of the time of their bytes.
    padded = _pad(groups.quants, missing, count * layout.groups * layout.width - columns, zero)
    quants = padded.contiguous().numpy()
    weights, integers, numbers = layout.parts(out, columns)
    for each, lowest, first, size in layout.planes:
        part = quants if each == bits else quants >> np.uint8(lowest) & np.uint8((1 << each) - 1)
        to = weights[..., first : first + size].view(torch.int32).unflatten(-1, (-1, TILE)).numpy()
        words = _dense(part, each).reshape(tiles, TILE, count, layout.units, -1)
        to[...] = words.transpose(0, 2, 3, 4, 1)
    if not groups.group:
        out[:, -4 * TILE :].view(torch.float32).copy_(_pad(groups.scale[:, :1], missing).view(tiles, TILE))
        return out
    if groups.values is not None:
        out[:, -4 * TILE :] = (torch.tensor(groups.values) + 128).repeat(4)
    stored = [groups.scale] if groups.offset is None else [groups.scale, groups.offset]
    if groups.factors is not None:
        factors = list(groups.factors.unbind(-1))
        found = [_integers(*each, tiles, count, layout.groups) for each in zip(stored, factors, strict=True)]
        packed = [found[0] | found[1] << 4] if bits == 2 and groups.offset is not None else found
        integers.copy_(torch.cat(packed, dim=2).flatten(2).view(torch.uint8))
        stored = factors
    for values, to in zip(stored, numbers.view(torch.float16).split(TILE, -1), strict=True):
        to.copy_(_pad(values, missing).view(tiles, TILE, count).transpose(1, 2))
    return out


def _dense(quants: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Integers of 1, 2, 4 or 8 bits (R, N) in words: byte i of a word has inputs i, i + 4, i + 8, ..."""
    words, parts = quants.view(np.int32), 8 // bits
    return np.bitwise_or.reduce([words[:, i::parts] << i * bits for i in range(parts)])


def _sparse(words: Tensor, bits: int) -> Tensor:
    """The inverse of `_dense`: words (N, .., 4) as bytes -> (N, K)."""
    parts = [words >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)] if bits < 8 else [words]
    return torch.stack(parts, dim=-2).flatten(1)


def _integers(scale: Tensor, factor: Tensor, tiles: int, count: int, each: int) -> Tensor:
    """The integers in scale = integer * factor: (N, groups), (N, blocks) -> (tiles, blocks, each, 16)."""
    missing = tiles * TILE - len(scale)
    padded = _pad(scale, missing, count * each - scale.shape[1]).view(tiles, TILE, count, each)
    factor = _pad(factor, missing).view(tiles, TILE, count, 1)
    ratio = torch.where(factor == 0, 0, padded / factor).round().nan_to_num(0, 0, 0)
    return ratio.to(torch.int8).permute(0, 2, 3, 1)


def _pad(values: Tensor, rows: int, columns: int = 0, value: int = 0) -> Tensor:
    """A matrix with rows and columns appended; the same tensor, not a copy, if there are none."""
    return F.pad(values, (0, columns, 0, rows), value=value) if rows or columns else values


def tile_bytes(columns: int, format: GroupFormat) -> int:
    """Bytes of one tile of a weight with `columns` columns."""
    layout = TileLayout.of(format)
    return layout.blocks(columns) * layout.nbytes + (4 * TILE if format.codebook or not format.group else 0)


def tiles_shape(shape: Sequence[int], format: GroupFormat) -> tuple[int, int]:
    """The shape of a packed weight: (tiles, bytes of a tile)."""
    rows, columns = shape
    return -(-rows // TILE), tile_bytes(columns, format)


def scales_of(tiles: Tensor, columns: int, format: GroupFormat) -> Tensor:
    """Scales and offsets of groups (one group if a row has one scale), or the factors of two levels of scales.

    Returns (tiles, groups or blocks, 1 or 2, 16).
    """
    if not format.group:
        return tiles[:, -4 * TILE :].contiguous().view(torch.float32).view(-1, 1, 1, TILE)
    numbers = TileLayout.of(format).parts(tiles, columns)[2].contiguous()
    return numbers.view(torch.float16).unflatten(-1, (-1, TILE))


def unpack(tiles: Tensor, rows: int, columns: int, format: GroupFormat) -> GroupedWeight:
    """The inverse of `pack`, for a weight (rows, columns)."""
    layout = TileLayout.of(format)
    weights, packed, _ = layout.parts(tiles, columns)

    def by_rows(values: Tensor, axis: int) -> Tensor:  # (tiles, .., 16, ..) -> (rows, ..)
        return values.movedim(axis, 1).flatten(0, 1)[:rows]

    planes = []  # (N, K)
    for each, lowest, first, size in layout.planes:
        words = by_rows(weights[..., first : first + size].unflatten(-1, (-1, TILE, 4)), 4)
        planes.append(_sparse(words, each) << lowest)
    quants = planes[0] if len(planes) == 1 else planes[0] | planes[1]
    numbers, factors = by_rows(scales_of(tiles, columns, format), 3).float(), None  # (N, groups or blocks, 1 or 2)
    if format.levels:
        packed = packed.unflatten(-1, (-1, layout.groups, TILE))  # (tiles, blocks, 1 or 2, groups, 16)
        if format.bits == 2 and format.offset:
            packed = torch.cat((packed & 15, packed >> 4), dim=2)
        integers, factors = by_rows(packed, 4).view(torch.int8), numbers  # (N, blocks, 1 or 2, groups)
        products = (integers * factors[..., None]).transpose(2, 3)
        numbers = products.flatten(1, 2)[:, : -(-columns // format.group)]
    quants, scale, offset = quants[:, :columns], numbers[..., 0], numbers[..., 1] if format.offset else None
    if not format.codebook:
        return GroupedWeight(quants.contiguous(), scale, offset, format.bits, format.group, None, factors)
    values = tiles[0, -TILE:]
    return GroupedWeight(
        quants.contiguous(), scale, None, format.bits, format.group, tuple((values.int() - 128).tolist()), factors
    )
