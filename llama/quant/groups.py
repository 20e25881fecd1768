"""Quantized weights in groups: integers, with a scale and an optional offset for each group of a row.

    weight = scale * quant + offset

Every type in READERS has this form, so the kernels can use a file's weights without quantizing them again.
In some types `quant` is instead one of 16 values (a codebook), and the file stores its index.
Layouts: ggml-quants.c of https://github.com/ggml-org/ggml. R rows (out features), N columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..errors import CheckpointError, UsageError

GROUPS = (128, 64, 32, 16)  # columns of a group in the kernels, the largest first
BLOCK = 256  # with two levels of scales, the number of columns that share the factors
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # the codebook of IQ4 types


class GroupFormat(NamedTuple):
    """How a weight is packed: bits per weight, columns of a group (0: the complete row), and three options.

    offset    each group has an offset
    codebook  quants are indices into 16 values
    levels    scales and offsets are small integers times factors that 256 columns share, as in K-quants
    """

    bits: int
    group: int
    offset: bool
    codebook: bool = False
    levels: bool = False

    def __str__(self) -> str:
        kinds = {"offset": self.offset, "codebook": self.codebook, "levels": self.levels}
        more = "".join(f"+{name}" for name, has in kinds.items() if has)
        return f"int{self.bits}-{f'g{self.group}' if self.group else 'row'}{more}"

    @property
    def simple(self) -> GroupFormat:
        """The format of `GroupedWeight.simple`."""
        return GroupFormat(4 if self.bits <= 4 and not self.codebook else 8, self.group, self.offset)

    def of_columns(self, first: int, last: int, columns: int) -> GroupFormat:
        """The format of a range of the columns. Raises UsageError unless it begins and ends at group boundaries.

        If the range begins or ends within 256 columns that share factors, its format has one level of scales.
        """

        def divides(unit: int) -> bool:
            return not first % unit and (not last % unit or last == columns)

        if self.group and not divides(self.group):
            found = f"columns {first} to {last} are not complete groups of {self.group}"
            raise UsageError(f"{found}; use fewer processes, so that each has complete quantization groups")
        return self if not self.levels or divides(BLOCK) else self.simple


class GroupedWeight(NamedTuple):
    """A weight (R, N) in groups of `group` columns. group=0: each row is one group.

    quants   (R, N) uint8 below 2^bits
    scale    (R, groups) float32; the last group may be shorter than the others
    offset   (R, groups) float32; None means -scale * 2^(bits - 1), so that the middle integer means 0
    values   16 integers from -127 to 127; if given, quants are indices into these, and there is no offset
    factors  (R, ceil(N / 256), 1 or 2) float32; if given, scale and offset are these factors times 8-bit integers
    """

    quants: Tensor
    scale: Tensor
    offset: Tensor | None
    bits: int
    group: int
    values: tuple[int, ...] | None = None
    factors: Tensor | None = None

    @property
    def format(self) -> GroupFormat:
        has = self.offset is not None, self.values is not None, self.factors is not None
        return GroupFormat(self.bits, self.group, *has)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight: (R, N) float32."""
        quants, columns = self.quants, self.quants.shape[1]
        group = self.group or columns
        if self.values is not None:
            quants = _looked_up(quants, self.values).view(torch.int8)
        elif self.offset is None:
            quants = (quants - 2 ** (self.bits - 1)).view(torch.int8)  # the uint8 difference wraps around
        weight = F.pad(quants, (0, -columns % group)).unflatten(1, (-1, group)).float()  # (R, groups, group)
        weight.mul_(self.scale[..., None])
        if self.offset is not None:
            weight.add_(self.offset[..., None])
        return weight.flatten(1)[:, :columns]

    @property
    def simple(self) -> GroupedWeight:
        """The same weight in 4 or 8 bits, with one level of scales and no codebook. Every layer supports it."""
        quants, bits = self.quants, 4 if self.bits <= 4 and self.values is None else 8
        if self.values is not None:
            quants = _looked_up(quants, self.values) + 128
        elif self.offset is None and bits != self.bits:
            quants = quants + (2 ** (bits - 1) - 2 ** (self.bits - 1))
        return GroupedWeight(quants, self.scale, self.offset, bits, self.group)

    def as_format(self, format: GroupFormat) -> GroupedWeight | None:
        """The same weight in a format; None unless it is this weight's format, or that of `simple`."""
        return next((groups for groups in (self, self.simple) if groups.format == format), None)

    def to(self, device: torch.device) -> GroupedWeight:
        return self._map(lambda tensor: tensor.to(device))

    def rows(self, index: Tensor | slice) -> GroupedWeight:
        """A selection of the rows, in the order of `index`."""
        return self._map(lambda tensor: tensor[index])

    def scaled(self, factors: Tensor) -> GroupedWeight:
        """The weight with row i multiplied by factors[i], (R,). The integers do not change."""
        return self._map(lambda x: x if x is self.quants else x * factors.view(-1, *[1] * (x.dim() - 1)))

    def _map(self, change: Callable[[Tensor], Tensor]) -> GroupedWeight:
        """Apply a function to every tensor; the first axis of each is the weight's rows."""
        changed: dict[str, Any] = {name: change(x) for name, x in self._asdict().items() if isinstance(x, Tensor)}
        return self._replace(**changed)

    def columns(self, part: slice) -> GroupedWeight:
        """A range of the columns, in the format that `GroupFormat.of_columns` returns."""
        first, last, _ = part.indices(self.quants.shape[1])
        if self.format.of_columns(first, last, self.quants.shape[1]) != self.format:
            return self.simple.columns(part)
        group = self.group or self.quants.shape[1]
        own = slice(first // group, -(-last // group)) if self.group else slice(None)
        factors = slice(first // BLOCK, -(-last // BLOCK))
        return self._replace(
            quants=self.quants[:, first:last],
            scale=self.scale[:, own],
            offset=None if self.offset is None else self.offset[:, own],
            factors=None if self.factors is None else self.factors[:, factors],
        )


def _looked_up(quants: Tensor, values: Sequence[int]) -> Tensor:
    """values[quants] on a CPU, int8 viewed as uint8. bytes.translate takes a tenth of the time of indexing."""
    table = bytes(value & 255 for value in values)
    bytes_ = quants.contiguous().numpy().tobytes().translate(table.ljust(256, b"\0"))
    return torch.frombuffer(bytearray(bytes_), dtype=torch.uint8).view(quants.shape)


def joined(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """One weight with the rows of several weights, which have the same format."""
    names = [name for name, value in parts[0]._asdict().items() if isinstance(value, Tensor)]
    below: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return parts[0]._replace(**below)


def _halves(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(.., n) bytes -> (.., 2n) quants: the low 4 bits of every byte, then the high 4 bits."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _quarters(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(R, n, 64) bytes -> (R, n, 256) quants of 2 bits: for each 32 bytes, bits 0 and 1 of every byte, then 2 and 3."""
    return _fields(packed.reshape(*packed.shape[:2], 2, 32), 2).reshape(*packed.shape[:2], 256)


def _fields(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """(.., n) bytes -> (.., 8 / bits, n): the lowest bits of every byte, then the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return packed[..., None, :] >> shifts & np.uint8(2**bits - 1)


def _floats(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(.., 2) bytes of a float16 -> (.., 1) float32."""
    return raw.view(np.float16).astype(np.float32)


def _split(raw: NDArray[np.uint8], *sizes: int) -> list[NDArray[np.uint8]]:
    """(R, bytes) -> every block divided into parts of these sizes in bytes: (R, blocks, size) each."""
    return np.split(raw.reshape(len(raw), -1, sum(sizes)), np.cumsum(sizes[:-1]), axis=-1)


def _blocks(
    quants: NDArray[np.uint8],
    scale: NDArray[np.float32],
    offset: NDArray[np.float32] | None,
    bits: int,
    group: int = 32,
    values: tuple[int, ...] | None = None,
    factors: tuple[NDArray[np.float32], ...] = (),
) -> GroupedWeight:
    def by_rows(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.reshape(len(quants), -1))

    shift = None if offset is None else by_rows(offset)
    both = torch.stack([by_rows(factor) for factor in factors], dim=-1) if factors else None
    return GroupedWeight(by_rows(quants), by_rows(scale), shift, bits, group, values, both)


def _legacy(
    raw: NDArray[np.uint8], bits: int, has_minimum: bool = False, values: tuple[int, ...] | None = None
) -> GroupedWeight:
    """Blocks of 32: scale d; minimum m (Q4_1, Q5_1); 4 bytes of highest bits (Q5_0, Q5_1); 16 bytes of low bits.

    weight = d q + m, d (q - 8) in Q4_0, d (q - 16) in Q5_0, d values[q] in IQ4_NL
    """
    d, m, high, low = _split(raw, 2, 2 * has_minimum, 4 * (bits - 4), 16)
    quants = _halves(low)  # (R, N / 32, 32)
    if bits == 5:
        quants = quants + (np.unpackbits(high, axis=-1, bitorder="little") << 4)
    return _blocks(quants, _floats(d), _floats(m) if has_minimum else None, bits, values=values)


def _k(raw: NDArray[np.uint8], bits: int) -> GroupedWeight:
    """Q4_K and Q5_K, blocks of 256 in 8 groups: d, dmin, eight pairs of 6-bit (sc, mn) in 12 bytes, low bits in 128.

    weight = d sc q - dmin mn. In Q5_K, 32 bytes of highest bits precede the 128: bit g of byte i belongs to group g.
    """
    *scales, a, b, c, high, low = _split(raw, 2, 2, 4, 4, 4, 32 * (bits - 4), 128)
    packed = low.reshape(*low.shape[:2], 4, 32)  # 32 bytes hold two groups: low halves, high halves
    quants = _halves(packed).reshape(*low.shape[:2], 8, 32)
    if bits == 5:
        quants = quants + (_fields(high, 1) << 4)
    d, dmin = map(_floats, scales)  # (R, N / 256, 1)
    sc = np.concatenate((a & 63, (c & 15) | (a >> 6 << 4)), axis=-1)  # (R, N / 256, 8)
    mn = np.concatenate((b & 63, (c >> 4) | (b >> 6 << 4)), axis=-1)
    return _blocks(quants, d * sc, -dmin * mn, bits, factors=(d, -dmin))


def q2_k(raw: NDArray[np.uint8]) -> GroupedWeight:
    """Blocks of 256: 16 pairs of 4-bit (sc, mn), quants in 64 bytes, d, dmin; weight = d sc q - dmin mn."""
    pairs, low, *scales = _split(raw, 16, 64, 2, 2)
    d, dmin = map(_floats, scales)  # (R, N / 256, 1)
    return _blocks(_quarters(low), d * (pairs & 15), -dmin * (pairs >> 4), 2, 16, factors=(d, -dmin))


def q3_k(raw: NDArray[np.uint8]) -> GroupedWeight:
    """Blocks of 256: high bits in 32 bytes, low bits in 64, 16 6-bit scales sc, d; weight = d (sc - 32) (q - 4)."""
    high, low, sc, sc_high, d = _split(raw, 32, 64, 8, 4, 2)
    quants = _quarters(low)  # (R, N / 256, 256)
    quants = quants + (_fields(high, 1).reshape(quants.shape) << 2)
    top = _fields(sc_high, 2).reshape(*low.shape[:2], 16)  # bits 4 and 5 of the scales
    scale = _floats(d) * ((_halves(sc) | top << 4).view(np.int8) - np.int8(32))  # (R, N / 256, 16)
    return _blocks(quants, scale, None, 3, 16, factors=(_floats(d),))


def q6_k(raw: NDArray[np.uint8]) -> GroupedWeight:
    """Blocks of 256: low bits in 128 bytes, high bits in 64, 16 signed scales sc, d; weight = d sc (q - 32)."""
    low, high, sc, d = _split(raw, 128, 64, 16, 2)
    quants = _halves(low.reshape(*low.shape[:2], 2, 64)).reshape(*low.shape[:2], 256)
    quants = quants + (_quarters(high) << 4)
    return _blocks(quants, _floats(d) * sc.view(np.int8), None, 6, 16, factors=(_floats(d),))


def q8_0(raw: NDArray[np.uint8]) -> GroupedWeight:
    """Blocks of 32: scale d, 32 signed bytes; weight = d q."""
    d, quants = _split(raw, 2, 32)
    return _blocks(quants ^ np.uint8(128), _floats(d), None, 8)


def iq4_xs(raw: NDArray[np.uint8]) -> GroupedWeight:
    """Blocks of 256: d, eight 6-bit scales sc in 2 + 4 bytes, quants in 128; weight = d (sc - 32) values[q]."""
    d, sc_high, sc_low, packed = _split(raw, 2, 2, 4, 128)
    low = np.stack((sc_low & 15, sc_low >> 4), axis=-1).reshape(*packed.shape[:2], 8)
    high = _fields(sc_high, 2).swapaxes(-1, -2).reshape(low.shape)
    scale = _floats(d) * ((low | high << 4).view(np.int8) - np.int8(32))  # (R, N / 256, 8)
    quants = _halves(packed.reshape(*packed.shape[:2], 8, 16))
    return _blocks(quants, scale, None, 4, values=IQ4_VALUES, factors=(_floats(d),))


# GGUF type -> function that reads its blocks (R, bytes) without changing a weight. The kernels compute with the result.
READERS: dict[str, Callable[[NDArray[np.uint8]], GroupedWeight]] = {
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_0": lambda raw: _legacy(raw, 4),
    "Q4_1": lambda raw: _legacy(raw, 4, True),
    "Q4_K": lambda raw: _k(raw, 4),
    "Q5_0": lambda raw: _legacy(raw, 5),
    "Q5_1": lambda raw: _legacy(raw, 5, True),
    "Q5_K": lambda raw: _k(raw, 5),
    "Q6_K": q6_k,
    "Q8_0": q8_0,
    "IQ4_NL": lambda raw: _legacy(raw, 4, values=IQ4_VALUES),
    "IQ4_XS": iq4_xs,
}


def dequantize(raw: NDArray[np.uint8], type: str) -> Tensor:
    """Blocks of a GGUF type (R, bytes) as weights (R, N) float32."""
    if type in READERS:
        return READERS[type](raw).weight
    import gguf  # slower, but knows the other types, which the kernels do not support

    try:
        return torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[type]))
    except NotImplementedError:
        raise CheckpointError(f"weights stored as {type} are not supported; get the model as Q4_K_M or Q8_0") from None
