"""Weights of 4 and 8 bits in tiles, the order in which the kernels read them: how they are packed, and back.

A tile is 16 rows of a weight (N, K); cpp/blocks.h describes its bytes. So they lie in memory, and in the files of a
quantized checkpoint, so that loading one is mapping its files.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import Blocks

TILE = 16  # rows of a tile, as cpp/blocks.h has it
PER_ROW = 64  # with one scale for a whole row, the kernel still sums up by 64 inputs


def pack(blocks: Blocks) -> Tensor:
    """Into the tiles that cpp/blocks.h describes: (tiles, bytes of a tile) uint8. Rows and columns are padded."""
    rows, columns = blocks.quants.shape
    group = blocks.group or PER_ROW
    groups, tiles = -(-columns // group), -(-rows // TILE)
    empty = 0 if blocks.offset is not None else 2 ** (blocks.bits - 1)
    quants = F.pad(blocks.quants, (0, groups * group - columns, 0, tiles * TILE - rows), value=empty)
    quants = quants.view(tiles, TILE, groups, group // 4, 4).permute(0, 2, 3, 1, 4)  # tile, group, 4 inputs, row, 4
    if blocks.bits == 4:
        pairs = quants.reshape(tiles, groups, group // 8, 2, TILE * 4)
        quants = pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4
    parts = [quants.reshape(tiles, groups, -1)]
    if not blocks.group:
        scale = F.pad(blocks.scale[:, 0].float(), (0, tiles * TILE - rows)).view(tiles, TILE)
        return torch.cat((parts[0].flatten(1), scale.view(torch.uint8)), dim=1)
    for numbers in (blocks.scale, blocks.offset):
        if numbers is not None:
            padded = F.pad(numbers.half(), (0, 0, 0, tiles * TILE - rows)).view(tiles, TILE, groups)
            parts.append(padded.transpose(1, 2).contiguous().view(torch.uint8))  # (tiles, groups, 32)
    return torch.cat(parts, dim=-1).flatten(1)


def tile_bytes(columns: int, bits: int, group: int, offset: bool) -> int:
    """Bytes of one tile of a weight with so many columns."""
    width = group or PER_ROW
    groups = -(-columns // width)
    return groups * (width * TILE * bits // 8 + (32 * (1 + offset) if group else 0)) + (0 if group else 64)


def tiles_shape(shape: tuple[int, int], bits: int, group: int, offset: bool) -> tuple[int, int]:
    """The shape of a packed weight: (tiles, bytes of a tile)."""
    rows, columns = shape
    return -(-rows // TILE), tile_bytes(columns, bits, group, offset)


def scales_of(tiles: Tensor, columns: int, bits: int, group: int, offset: bool) -> Tensor:
    """The scales in tiles, and the offsets behind them: (tiles, groups, 1 or 2, 16), one group for whole rows."""
    if not group:
        return tiles[:, -64:].contiguous().view(torch.float32).view(-1, 1, 1, TILE)
    body = tiles.view(len(tiles), -(-columns // group), -1)
    return body[:, :, group * TILE * bits // 8 :].contiguous().view(torch.float16).unflatten(-1, (1 + offset, TILE))


def unpack(tiles: Tensor, rows: int, columns: int, bits: int, group: int, offset: bool) -> Blocks:
    """The inverse of `pack`, for a weight (rows, columns)."""
    count, width = len(tiles), group or PER_ROW
    groups, size = -(-columns // width), width * TILE * bits // 8
    numbers = scales_of(tiles, columns, bits, group, offset).float().permute(2, 0, 3, 1)  # (1 or 2, tiles, 16, groups)
    numbers = numbers.flatten(1, 2)[:, :rows]  # scale, offset
    body = (tiles if group else tiles[:, :-64]).view(count, groups, -1)
    quants = body[:, :, :size].reshape(count, groups, -1, TILE * 4)
    if bits == 4:
        quants = torch.stack((quants & 15, quants >> 4), dim=3).flatten(2, 3)  # (tiles, groups, group / 4, 64)
    quants = quants.unflatten(-1, (TILE, 4)).permute(0, 3, 1, 2, 4).reshape(count * TILE, -1)
    return Blocks(quants[:rows, :columns].contiguous(), numbers[0], numbers[1] if offset else None, bits, group)


def unpack_rows(tiles: Tensor, ids: Tensor, columns: int, bits: int, group: int, offset: bool) -> Tensor:
    """Rows `ids` (n,) of a packed weight, as numbers: (n, columns) float32. Reads their tiles only."""
    width = group or PER_ROW
    groups, size, n = -(-columns // width), width * TILE * bits // 8, len(ids)
    lane = ids % TILE  # (n,)
    taken, each = tiles[ids // TILE], torch.arange(n, device=ids.device)  # (n, bytes of a tile)
    body = (taken if group else taken[:, :-64]).view(n, groups, -1)
    quants = body[:, :, :size].unflatten(-1, (-1, TILE, 4))[each, :, :, lane]  # (n, groups, group / 4 or 8, 4)
    if bits == 4:
        quants = torch.stack((quants & 15, quants >> 4), dim=3)
    numbers = scales_of(taken, columns, bits, group, offset)[each, :, :, lane].float()  # (n, groups, 1 or 2)
    scale = numbers[..., :1]
    zero = numbers[..., 1:] if offset else -(2.0 ** (bits - 1)) * scale
    return (quants.flatten(2).float() * scale + zero).flatten(1)[:, :columns]
