"""A quantized weight before it becomes a layer: quantized blocks of a file, or a float weight to be quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..quant.blocks import BlockFormat, Blocks, joined
from ..quant.schemes import CLIPS, check_scales, quantize
from ..quant.tiles import TILE, pack, scales_of, tile_bytes
from ..system.pages import empty_in_large_pages
from . import kernels

PIECE = 2**18  # entries that are quantized at a time on a CPU
PACKED_PIECE = 7 * 2**17  # entries that are packed at a time; for 2^15 scales, PyTorch would start threads
LARGE_PIECE = 2**24  # entries at a time on a GPU: larger, since each operation costs a launch
CPU = torch.device("cpu")


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight (N, K), read on demand.

    rows   returns the rows in a slice, on the given device; a float weight is quantized on that device
    tiles  returns all rows, packed for the C++ kernels
    """

    shape: tuple[int, int]
    format: BlockFormat
    rows: Callable[[slice, torch.device], Blocks]
    tiles: Callable[[], Tensor]

    @classmethod
    def from_float(
        cls, weight: Tensor | Callable[[slice], Tensor], shape: tuple[int, int], format: BlockFormat
    ) -> QuantizedWeight:
        """Quantize a float weight while it is read: a tensor in memory or in a mapped file, or a function of rows.

        A tensor that the kernel can read in place is quantized in one piece: between pieces, threads would wait.
        """
        read = weight.__getitem__ if isinstance(weight, Tensor) else weight
        in_place = (
            isinstance(weight, Tensor) and weight.dtype in (torch.float32, torch.bfloat16) and weight.is_contiguous()
        )

        def rows(part: slice, device: torch.device) -> Blocks:
            return quantize(read(part).to(device), format)

        def packed(part: slice) -> Tensor:
            return kernels.quantize_to_tiles(read(part), CLIPS[format.bits], *format[:3])

        def tiles() -> Tensor:
            if not kernels.ready():
                return pack_rows(partial(rows, device=CPU), shape, format)
            if in_place:
                out = packed(slice(None))
            else:
                out = in_pieces(shape, format, PIECE, lambda part, out: out.copy_(packed(part)))
            check_scales(*scales_of(out, shape[1], format).aminmax())
            return out

        return cls(shape, format, rows, tiles)

    @classmethod
    def from_file(
        cls, rows: Callable[[slice], Blocks], shape: tuple[int, int], tiles: Tensor | None = None
    ) -> QuantizedWeight:
        """A weight that is stored quantized, used unchanged. tiles: the packed weight, if the file has it."""
        format = rows(slice(0, 1)).format
        packed = (lambda: pack_rows(rows, shape, format)) if tiles is None else (lambda: tiles)
        return cls(shape, format, lambda part, device: rows(part).to(device), packed)

    def blocks(self, device: torch.device = CPU) -> Blocks:
        """All rows on a device, with one byte per integer."""
        pieces = _pieces(self.shape, PIECE if device.type == "cpu" else LARGE_PIECE)
        return joined([self.rows(part, device) for part in pieces])


def pack_rows(rows: Callable[[slice], Blocks], shape: tuple[int, int], format: BlockFormat) -> Tensor:
    """The tiles of a weight whose blocks are read by rows."""
    return in_pieces(shape, format, PACKED_PIECE, lambda part, out: pack(rows(part), out))


def in_pieces(
    shape: tuple[int, int], format: BlockFormat, entries: int, pack: Callable[[slice, Tensor], object]
) -> Tensor:
    """Pack a weight piece by piece, so that only one piece is in memory unpacked: `pack(rows, out)` writes to `out`."""
    out = empty_in_large_pages(-(-shape[0] // TILE), tile_bytes(shape[1], format))
    for part in _pieces(shape, entries):
        pack(part, out[part.start // TILE : -(-part.stop // TILE)])
    return out


def _pieces(shape: tuple[int, int], entries: int = PIECE) -> list[slice]:
    """The rows of a weight in slices of about this many entries, in complete tiles."""
    rows, columns = shape
    step = -(-entries // columns // TILE) * TILE
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
