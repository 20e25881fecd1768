"""Packing of 4-bit and 8-bit weights into tiles, the layout that the kernels read, and unpacking.

A tile is 16 rows of a weight (N, K); cpp/blocks.h describes its bytes. The files of a quantized checkpoint store the
same bytes, so such a file is only mapped when it is loaded.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import Blocks

TILE = 16  # rows of a tile, as in cpp/blocks.h
PER_ROW = 64  # inputs per group in a tile if a row has one scale


def pack(blocks: Blocks, out: Tensor | None = None) -> Tensor:
    """Pack a weight into tiles: (tiles, bytes of a tile) uint8, `out` if it is given. Rows and columns are padded."""
    rows, columns = blocks.quants.shape
    width = blocks.group or PER_ROW
    groups, tiles, words = -(-columns // width), -(-rows // TILE), width * blocks.bits // 32
    if out is None:
        out = torch.empty(tiles, tile_bytes(columns, *blocks.format), dtype=torch.uint8)
    zero = 0 if blocks.offset is not None else 2 ** (blocks.bits - 1)
    # numpy, since PyTorch would start threads, and several pieces are packed at once. A word is 4 bytes of a row; words
    # are copied in a quarter of the time of their bytes.
    quants = _pad(blocks.quants, tiles * TILE - rows, groups * width - columns, zero).contiguous().numpy()
    if blocks.bits == 4:
        eight = quants.view(np.int64)  # 8 inputs, the first in the lowest byte
        row_words = (eight | eight >> 28).view(np.int32)[:, ::2]  # byte i: input i, and input i + 4 in its high half
    else:
        row_words = quants.view(np.int32)
    body = (out if blocks.group else out[:, :-64]).unflatten(1, (groups, -1))  # (tiles, groups, bytes)
    packed = body.view(torch.int32)[:, :, : words * TILE].unflatten(-1, (words, TILE)).numpy()
    packed[...] = row_words.reshape(tiles, TILE, groups, words).transpose(0, 2, 3, 1)
    if not blocks.group:
        scale = _pad(blocks.scale[:, :1], tiles * TILE - rows)
        out[:, -64:].view(torch.float32).copy_(scale.view(tiles, TILE))
        return out
    for i, values in enumerate((blocks.scale, blocks.offset)):
        if values is not None:
            first = 2 * words * TILE + i * TILE
            padded = _pad(values, tiles * TILE - rows).view(tiles, TILE, groups)
            body.view(torch.float16)[:, :, first : first + TILE].copy_(padded.transpose(1, 2))
    return out


def _pad(values: Tensor, rows: int, columns: int = 0, value: int = 0) -> Tensor:
    """A matrix with rows and columns appended; the same tensor, not a copy, if there are none."""
    return F.pad(values, (0, columns, 0, rows), value=value) if rows or columns else values


def tile_bytes(columns: int, bits: int, group: int, offset: bool) -> int:
    """Bytes of one tile of a weight with `columns` columns."""
    width = group or PER_ROW
    groups = -(-columns // width)
    return groups * (width * TILE * bits // 8 + (32 * (1 + offset) if group else 0)) + (0 if group else 64)


def tiles_shape(shape: tuple[int, int], bits: int, group: int, offset: bool) -> tuple[int, int]:
    """The shape of a packed weight: (tiles, bytes of a tile)."""
    rows, columns = shape
    return -(-rows // TILE), tile_bytes(columns, bits, group, offset)


def scales_of(tiles: Tensor, columns: int, bits: int, group: int, offset: bool) -> Tensor:
    """Scales and offsets of a packed weight: (tiles, groups, 1 or 2, 16); one group if a row has one scale."""
    if not group:
        return tiles[:, -64:].contiguous().view(torch.float32).view(-1, 1, 1, TILE)
    body = tiles.view(len(tiles), -(-columns // group), -1)
    return body[:, :, group * TILE * bits // 8 :].contiguous().view(torch.float16).unflatten(-1, (1 + offset, TILE))


def unpack(tiles: Tensor, rows: int, columns: int, bits: int, group: int, offset: bool) -> Blocks:
    """The inverse of `pack`, for a weight (rows, columns)."""
    count, width = len(tiles), group or PER_ROW
    groups, size = -(-columns // width), width * TILE * bits // 8
    values = scales_of(tiles, columns, bits, group, offset).float().permute(2, 0, 3, 1)  # (1 or 2, tiles, 16, groups)
    values = values.flatten(1, 2)[:, :rows]  # scale, offset
    body = (tiles if group else tiles[:, :-64]).view(count, groups, -1)
    quants = body[:, :, :size].reshape(count, groups, -1, TILE * 4)
    if bits == 4:
        quants = torch.stack((quants & 15, quants >> 4), dim=3).flatten(2, 3)  # (tiles, groups, group / 4, 64)
    quants = quants.unflatten(-1, (TILE, 4)).permute(0, 3, 1, 2, 4).reshape(count * TILE, -1)
    return Blocks(quants[:rows, :columns].contiguous(), values[0], values[1] if offset else None, bits, group)


def unpack_rows(tiles: Tensor, ids: Tensor, columns: int, bits: int, group: int, offset: bool) -> Tensor:
    """Rows `ids` (n,) of a packed weight, dequantized: (n, columns) float32. Reads only the tiles of these rows."""
    width = group or PER_ROW
    groups, size, n = -(-columns // width), width * TILE * bits // 8, len(ids)
    lane = ids % TILE  # (n,)
    own, each = tiles[ids // TILE], torch.arange(n, device=ids.device)  # (n, bytes of a tile)
    body = (own if group else own[:, :-64]).view(n, groups, -1)
    quants = body[:, :, :size].unflatten(-1, (-1, TILE, 4))[each, :, :, lane]  # (n, groups, group / 4 or 8, 4)
    if bits == 4:
        quants = torch.stack((quants & 15, quants >> 4), dim=3)
    values = scales_of(own, columns, bits, group, offset)[each, :, :, lane].float()  # (n, groups, 1 or 2)
    scale = values[..., :1]
    zero = values[..., 1:] if offset else -(2.0 ** (bits - 1)) * scale
    return (quants.flatten(2).float() * scale + zero).flatten(1)[:, :columns]
