"""Weights as integers in groups, as other programs store them.

Letters of shapes: N rows (out features), n rows of a part, K columns, G groups in a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..quant.groups import GROUPS, GroupedWeight, GroupFormat
from .huggingface import StoredTensor, StoredWeight

ROUNDING = 2.0**-11  # the largest accepted error of a scale in float16, divided by the weight's largest scale


class IntegerWeight(StoredWeight):
    """weight[n, k] = scale[n, g] * (quant[n, k] - zero[n, g]), where column k belongs to group g.

    width   bits of an integer: 4 or 8
    group   columns in a group; the last group may have fewer
    quants  a function: a slice of rows -> their integers, (n, K) uint8
    scale   (N, G) in any floating-point dtype
    zero    a function: a slice of rows -> their zero points, (n, G); None: 2^(width - 1) for all groups
    order   (K,) the group of each column, if the columns of a group are not adjacent (act order); otherwise None
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        stored: str,
        shape: tuple[int, int],
        width: int,
        group: int,
        quants: Callable[[slice], NDArray[np.uint8]],
        scale: Tensor,
        zero: Callable[[slice], NDArray[Any]] | None = None,
        order: Tensor | None = None,
    ):
        super().__init__(tensors, shape, stored if order is None else f"{stored} in act order")
        self.width, self.group, self.quants = width, group, quants
        self.scale, self.zero, self.order = scale, zero, order
        self._complete = self  # shared by all parts, so that the format is found once

    def dequantized(self) -> Tensor:
        rows, columns = self.part
        weight = torch.from_numpy(self.quants(rows)).float()  # (n, K)
        weight -= 2.0 ** (self.width - 1) if self.zero is None else self._by_column(torch.as_tensor(self.zero(rows)))
        return weight.mul_(self._by_column(self.scale[rows].float()))[:, columns]

    def _by_column(self, values: Tensor) -> Tensor:
        """(n, G) -> (n, K)."""
        return repeated(values, self.group, self.whole[1]) if self.order is None else values[:, self.order]

    def row_format(self) -> GroupFormat | None:
        return self._complete._row_format

    @functools.cached_property
    def _row_format(self) -> GroupFormat | None:
        """The kernels' format of this weight; None if no format represents it.

        Reads all scales and zero points. Scales of other dtypes are rounded to float16, and so is the product of scale
        and zero point.
        """
        if self.order is not None:
            return None
        single, scale = self.group >= self.whole[1], self.scale.float()
        zero = None if self.zero is None else self.zero(slice(self.whole[0]))
        offset = zero is not None and bool((zero != 2 ** (self.width - 1)).any())
        if single and self.width == 8 and not offset:
            return GroupFormat(8, 0, False)
        group = next((size for size in GROUPS if single or self.group % size == 0), None)
        error = (scale.half().float() - scale).abs().max()
        if group is None or not bool(error <= ROUNDING * scale.abs().max()):
            return None
        if offset and not bool((scale * torch.as_tensor(zero)).half().isfinite().all()):
            return None
        return GroupFormat(self.width, group, offset)

    def groups(self) -> GroupedWeight:
        rows, columns = self.part
        format = self.row_format()
        quants, scale, added = torch.from_numpy(self.quants(rows)), self.scale[rows].float(), None
        if format is None:
            raise ValueError(f"{self.name} has no format of the kernels")
        if format.offset and self.zero is not None:
            added = -scale * torch.as_tensor(self.zero(rows))
        if format.group:  # a group of the file is one or several groups of the kernels
            repeats, count = -(-self.group // format.group), -(-self.whole[1] // format.group)
            scale = repeated(scale, repeats, count)
            added = None if added is None else repeated(added, repeats, count)
        return GroupedWeight(quants, scale, added, self.width, format.group).columns(columns)


def repeated(values: Tensor, times: int, count: int) -> Tensor:
    """Each column several times: (n, G) -> (n, count)."""
    return values.repeat_interleave(min(times, count), 1)[:, :count]


# ----------------------------------------------------------------------------------------------- integers in words
def unpack_words(words: NDArray[np.int32], bits: int, part: slice = slice(None)) -> NDArray[np.uint8]:
    """Unpack the range `part` of each row's 4-bit or 8-bit integers, lowest bits first: (.., W) -> (.., n).

    Only words that contain a part of the range are read.
    """
    each = 32 // bits
    first, last, _ = part.indices(each * words.shape[-1])
    raw = np.ascontiguousarray(words[..., first // each : -(-last // each)]).view(np.uint8)  # little-endian
    if bits == 4:
        raw = np.stack((raw & 15, raw >> 4), axis=-1).reshape(*raw.shape[:-1], -1)
    return raw[..., first % each :][..., : last - first]


def unpack_rows_of_words(words: NDArray[np.int32], part: slice) -> NDArray[np.uint8]:
    """Unpack rows `part` of 4-bit integers. A word contains 8 rows, in AutoAWQ's order: (K, W) -> (n, K)."""
    first, last, _ = part.indices(8 * words.shape[1])
    quants = unpack_words(words[:, first // 8 : -(-last // 8), None], 4)  # (K, W, 8)
    rows = quants.transpose(1, 2, 0)[:, [0, 4, 1, 5, 2, 6, 3, 7]]  # (W, 8, K)
    return rows.reshape(-1, len(words))[first % 8 :][: last - first]
