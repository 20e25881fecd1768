"""One weight of a checkpoint, whatever its format: described from the headers, read on demand."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..quant.groups import GroupedWeight, GroupFormat
from ..quant.tiles import TILE
from ..system.pages import drop_pages, empty_in_large_pages

# Floating-point dtypes in which weights may be stored -> their name in the formats, and the reverse
FLOATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in FLOATS.items()}
CACHED_ENTRIES = 2**20  # entries of a weight that are dequantized at once; they fit into the CPU's cache


class Blocks(NamedTuple):
    """Quantized rows as a GGUF file stores them: their bytes (rows, bytes of a row), which may be mapped, and the type.

    order  int64 (n,): row i of the weight is row order[i] of the bytes; None: all rows, as they are
    """

    raw: Tensor
    type: str
    order: Tensor | None = None


class Weight:
    """A weight of a checkpoint; `weight[rows]` or `weight[rows, columns]` is a part of it; rows and columns are slices.

    Its values are read by `floats`, `groups`, `blocks` and `tiles`, and by nothing else.

    name     in the files
    stored   the type in the files: F32, BF16, F16, or the name of a quantization
    whole    the shape of the complete weight
    changed  whether adapters or a factor change it, so that it is not the weight that `stored` describes
    """

    changed = False

    def __init__(self, name: str, shape: Sequence[int], stored: str):
        self.name, self.stored = name, stored
        self.whole, self.ranges = tuple(shape), tuple(map(range, shape))

    def __getitem__(self, part: slice | tuple[slice, ...]) -> Self:
        part, some = part if isinstance(part, tuple) else (part,), copy.copy(self)
        some.ranges = tuple(own[one] for own, one in zip(self.ranges, (*part, slice(None)), strict=False))
        return some

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.ranges))

    @property
    def bits(self) -> float:
        """Bits per entry in the files, including scales."""
        return 8 * DTYPES[self.stored].itemsize if self.stored in DTYPES else 8

    @property
    def part(self) -> tuple[slice, ...]:
        """Where this part is in the complete weight: a slice of rows and, for a matrix, one of columns."""
        return tuple(slice(own.start, own.stop) for own in self.ranges)

    def row_format(self) -> GroupFormat | None:
        """The `format` that the weight would have with complete rows."""
        return None

    @property
    def format(self) -> GroupFormat | None:
        """The quantized format of `groups`; None if the weight is stored in another way. Reads no integers."""
        found = self.row_format()
        if found is None or len(self.ranges) != 2:
            return None
        return found.of_columns(self.ranges[1].start, self.ranges[1].stop, self.whole[1])

    def is_stored_as(self, format: GroupFormat) -> bool:
        """Whether `groups` has this format, or can be converted to it without a change of the weight."""
        return self.format is not None and format in (self.format, self.format.simple)

    def groups(self) -> GroupedWeight:
        """The integers and scales of a matrix, which must have a `format`."""
        raise NotImplementedError

    def blocks(self) -> Blocks | None:
        """The matrix in complete blocks of a GGUF type in READERS, equal to `groups`; None if it is not stored so."""
        return None

    def tiles(self) -> Tensor | None:
        """The matrix in `format`, packed by tiles.pack and mapped; None if it is not stored so."""
        return None

    def dequantized(self) -> Tensor:
        """The floating-point values of a quantized matrix; `floats` calls this for a few rows at a time."""
        return self.groups().weight

    def floats(self) -> Tensor:
        """The values in floating point, on the CPU, contiguous. They must not be written to."""
        weight = torch.empty(self.shape, dtype=torch.float32)
        for rows in self.pieces(CACHED_ENTRIES):
            weight[rows] = self[rows].dequantized()
        return weight

    def pieces(self, entries: int) -> list[slice]:
        """The rows in slices of about this many entries, in complete tiles."""
        rows, columns = self.shape
        step = -(-entries // columns // TILE) * TILE
        return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]

    def mapped(self) -> Iterable[Tensor]:
        """The tensors in mapped files that store the weight."""
        return ()

    def release(self, kept: Tensor | None = None) -> None:
        """After copying the weight, let the system free its mapped pages, except those that contain `kept`."""
        for tensor in self.mapped():
            if kept is None or not 0 <= kept.data_ptr() - tensor.data_ptr() < tensor.nbytes:
                drop_pages(tensor)


class MemoryWeight(Weight):
    """A weight in memory."""

    def __init__(self, tensor: Tensor, name: str = "weight"):
        super().__init__(name, tensor.shape, FLOATS.get(tensor.dtype, "F64"))
        self.tensor = tensor

    def floats(self) -> Tensor:
        return self.tensor[self.part].contiguous()


class DerivedWeight(Weight):
    """A weight that is computed from another one, of the same shape."""

    def __init__(self, base: Weight):
        super().__init__(base.name, base.shape, base.stored)
        self.base = base

    @property
    def bits(self) -> float:
        return self.base.bits

    def mapped(self) -> Iterable[Tensor]:
        return self.base.mapped()


class ReorderedWeight(DerivedWeight):
    """A weight with its rows in another order: row i is row order[i] of the base."""

    def __init__(self, base: Weight, order: Tensor):
        super().__init__(base)
        self.order, self.changed = order, base.changed

    def row_format(self) -> GroupFormat | None:
        return self.base.row_format()

    def _rows(self) -> tuple[Weight, Tensor]:
        """A part of the base that contains all rows of this part, and the index of each row in it."""
        order = self.order[self.part[0]]
        first, last = (int(end) for end in order.aminmax())
        rest: Any = self.part[1:]
        return self.base[(slice(first, last + 1), *rest)], order - first

    def floats(self) -> Tensor:
        base, order = self._rows()
        stored = base.floats()
        out = empty_in_large_pages(len(order), stored[0].nbytes).view(stored.dtype).view(self.shape)
        return torch.index_select(stored, 0, order, out=out)

    def groups(self) -> GroupedWeight:
        base, order = self._rows()
        return base.groups().rows(order)

    def blocks(self) -> Blocks | None:
        base, order = self._rows()
        found = base.blocks()
        return found and found._replace(order=order if found.order is None else found.order[order])


class ScaledWeight(DerivedWeight):
    """A weight times a factor, or times one factor for each row (a tensor).

    `floats` returns the products in float32. They are rounded once, when they are stored; a power of two is exact. In a
    quantized weight, only scales and offsets are multiplied, in float32. Packing rounds them to float16.
    """

    def __init__(self, base: Weight, factor: float | Tensor):
        super().__init__(base)
        self.factors = torch.as_tensor(factor, dtype=torch.float32).expand(base.shape[0])
        self.changed = base.changed or base.stored in DTYPES

    def row_format(self) -> GroupFormat | None:
        found = self.base.row_format()
        # The scales' own factors in two-level formats are so small that smaller ones would lose digits in float16.
        return found.simple if found and found.levels and bool((self.factors.abs() < 1).any()) else found

    def floats(self) -> Tensor:
        rows = self.factors[self.part[0]]
        return self.base[self.part].floats() * rows.view(-1, *[1] * (len(self.ranges) - 1))

    def groups(self) -> GroupedWeight:
        found = self.base[self.part].groups().scaled(self.factors[self.part[0]])
        return found if found.format == self.format else found.simple
