"""Packing of 4-bit and 8-bit weights into tiles, the layout that the kernels read, and unpacking.

A tile is 16 rows of a weight (N, K); cpp/blocks.h describes its bytes. The files of a quantized checkpoint store the
same bytes, so such a file is only mapped when it is loaded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import Blocks

TILE = 16  # rows of a tile, as in cpp/blocks.h
PER_ROW = 64  # inputs per group in a tile if a row has one scale


def pack(blocks: Blocks) -> Tensor:
    """Pack a weight into tiles: (tiles, bytes of a tile) uint8. Rows and columns are padded."""
    rows, columns = blocks.quants.shape
    group = blocks.group or PER_ROW
    groups, tiles = -(-columns // group), -(-rows // TILE)
    zero = 0 if blocks.offset is not None else 2 ** (blocks.bits - 1)
    quants = F.pad(blocks.quants, (0, groups * group - columns, 0, tiles * TILE - rows), value=zero)
    quants = quants.view(tiles, TILE, groups, group // 4, 4).permute(0, 2, 3, 1, 4)  # tile, group, 4 inputs, row, 4
    if blocks.bits == 4:
        pairs = quants.reshape(tiles, groups, group // 8, 2, TILE * 4)
        quants = pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4
    parts = [quants.reshape(tiles, groups, -1)]
    if not blocks.group:
        scale = F.pad(blocks.scale[:, 0].float(), (0, tiles * TILE - rows)).view(tiles, TILE)
        return torch.cat((parts[0].flatten(1), scale.view(torch.uint8)), dim=1)
    for values in (blocks.scale, blocks.offset):
        if values is not None:
            padded = F.pad(values.half(), (0, 0, 0, tiles * TILE - rows)).view(tiles, TILE, groups)
            parts.append(padded.transpose(1, 2).contiguous().view(torch.uint8))  # (tiles, groups, 32)
    return torch.cat(parts, dim=-1).flatten(1)


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
