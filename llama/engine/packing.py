"""A weight of a checkpoint in the format that a layer computes with: floats, groups, or tiles for the kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..checkpoint.weight import MemoryWeight, Weight
from ..errors import CheckpointError
from ..quant.groups import GroupedWeight, GroupFormat, joined
from ..quant.schemes import CLIPS, check_scales, quantize
from ..quant.tiles import TILE, pack, scales_of, tiles_shape
from ..system.pages import empty_in_large_pages
from . import kernels

# Maximum entries of a weight to unpack at once. A GPU takes more, since each of its operations costs a launch
ON_CPU, ON_GPU = 2**18, 2**24


def to_floats(weight: Weight, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A weight on a device and in a dtype. Raises CheckpointError for a value that float16 would make infinite."""
    stored = weight.floats()
    value = stored.to(device=device, dtype=dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(value).all()) and bool(torch.isfinite(stored).all()):
        raise CheckpointError(
            f"{weight.name} holds values beyond float16's limit, 65504; use dtype='bfloat16' (--dtype)"
        )
    weight.release(kept=value)
    return value


def to_groups(weight: Weight, format: GroupFormat, device: torch.device) -> GroupedWeight:
    """A weight in groups on a device: the file's groups if they have this format; otherwise the device quantizes it."""
    read = _reader(weight, format, device)
    found = joined([read(rows) for rows in weight.pieces(ON_CPU if device.type == "cpu" else ON_GPU)])
    weight.release()
    return found


def to_tiles(weight: Weight, format: GroupFormat) -> Tensor:
    """A weight packed for the C++ kernels. Tiles and groups in this format are kept; others are quantized.

    Floats that the kernel can read in place are quantized in one piece, since threads would wait between pieces.
    """
    tiles = weight.tiles()
    if tiles is not None and weight.format == format:
        return tiles
    blocks = weight.blocks() if weight.format == format and kernels.ready() else None
    if blocks is not None:
        tiles = empty_in_large_pages(*tiles_shape(weight.shape, format))
        kernels.pack_blocks(*blocks, tiles)
    elif weight.is_stored_as(format) or not kernels.ready():
        read = _reader(weight, format, torch.device("cpu"))
        tiles = _in_pieces(weight, format, lambda rows, out: pack(read(rows), out))
    else:
        tiles = _quantized_tiles(weight, format)
        check_scales(*scales_of(tiles, weight.shape[1], format).aminmax())
    weight.release()
    return tiles


def _quantized_tiles(weight: Weight, format: GroupFormat) -> Tensor:
    """The tiles of a weight that the C++ kernel quantizes."""
    floats = None if weight.format else weight.floats()

    def quantized(rows: slice) -> Tensor:
        values = weight[rows].groups().weight if floats is None else floats[rows]
        return kernels.quantize_to_tiles(values, CLIPS[format.bits], *format[:3])

    if floats is not None and floats.dtype in (torch.float32, torch.bfloat16):
        return quantized(slice(None))
    return _in_pieces(weight, format, lambda rows, out: out.copy_(quantized(rows)))


def _reader(weight: Weight, format: GroupFormat, device: torch.device) -> Callable[[slice], GroupedWeight]:
    """A function that returns some rows in a format, on a device."""
    source = weight if weight.format else MemoryWeight(weight.floats())

    def read(rows: slice) -> GroupedWeight:
        if source.format is None:
            return quantize(source[rows].floats().to(device), format)
        stored = source[rows].groups()
        unchanged = stored.as_format(format)
        return quantize(stored.weight.to(device), format) if unchanged is None else unchanged.to(device)

    return read


def _in_pieces(weight: Weight, format: GroupFormat, write: Callable[[slice, Tensor], object]) -> Tensor:
    """The tiles of a weight, written piece by piece by `write(rows, out)`. Only one piece at a time is unpacked."""
    out = empty_in_large_pages(*tiles_shape(weight.shape, format))
    for rows in weight.pieces(ON_CPU):
        write(rows, out[rows.start // TILE : -(-rows.stop // TILE)])
    return out
