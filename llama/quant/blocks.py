"""Quantized weights as blocks: integers, with a scale and an optional offset for each group of a row.

    weight = scale * quant + offset

Every quantized GGUF type has this form, so the kernels can use the weights of a file without quantizing them again.
In some types the integer is an index into 16 values (a codebook), and takes their place in the formula.
Layouts: ggml-quants.c of https://github.com/ggml-org/ggml. R rows (out features), N columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 256  # columns that share the factors of two levels of scales


class BlockFormat(NamedTuple):
    """How a weight is packed: bits per weight, columns of a group (0: the complete row), and what a group has.

    offset    an offset
    codebook  quants are indices into 16 values
    levels    scales and offsets are small integers times factors of 256 columns, as in K-quants
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


class Blocks(NamedTuple):
    """A weight (R, N) in groups of `group` columns; group 0 is one group per row.

    quants   (R, N) uint8 below 2^bits
    scale    (R, groups) float32; the last group may be shorter than the others
    offset   (R, groups) float32; None means -scale * 2^(bits - 1), so that the middle integer means 0
    values   16 integers from -127 to 127; then quants are indices into them, and there is no offset
    factors  (R, ceil(N / 256), 1 or 2) float32, of which scale and offset are multiples by integers of 8 bits
    """

    quants: Tensor
    scale: Tensor
    offset: Tensor | None
    bits: int
    group: int
    values: tuple[int, ...] | None = None
    factors: Tensor | None = None

    @property
    def format(self) -> BlockFormat:
        has = self.offset is not None, self.values is not None, self.factors is not None
        return BlockFormat(self.bits, self.group, *has)

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
    def simple(self) -> Blocks:
        """The same weight in 4 or 8 bits, with one level of scales and no codebook: every layer supports that."""
        quants, bits = self.quants, 4 if self.bits <= 4 and self.values is None else 8
        if self.values is not None:
            quants = _looked_up(quants, self.values) + 128
        elif self.offset is None and bits != self.bits:
            quants = quants + (2 ** (bits - 1) - 2 ** (self.bits - 1))
        return Blocks(quants, self.scale, self.offset, bits, self.group)

    def as_format(self, format: BlockFormat) -> Blocks | None:
        """The same weight in a format; None unless that is its own, or that of `simple`."""
        return next((blocks for blocks in (self, self.simple) if blocks.format == format), None)

    def to(self, device: torch.device) -> Blocks:
        return self._map(lambda values: values.to(device))._replace(quants=self.quants.to(device))

    def scaled(self, factor: float) -> Blocks:
        """The weight times a factor."""
        return self._map(lambda values: values * factor)

    def rows(self, index: Tensor | slice) -> Blocks:
        """A selection of the rows, in the order of `index`."""
        return self._map(lambda values: values[index])._replace(quants=self.quants[index])

    def columns(self, part: slice) -> Blocks:
        """A range of the columns. Raises ValueError unless it begins and ends at group boundaries.

        If it begins or ends within the 256 columns that share factors, the result has one level of scales.
        """
        first, last, _ = part.indices(self.quants.shape[1])
        group = self.group or self.quants.shape[1]
        if self.group and (first % group or (last % group and last != self.quants.shape[1])):
            raise ValueError(f"columns {first} to {last} are not complete groups of {group}")
        if self.factors is not None and (first % BLOCK or (last % BLOCK and last != self.quants.shape[1])):
            return self.simple.columns(part)
        own = slice(first // group, -(-last // group)) if self.group else slice(None)
        blocks = slice(first // BLOCK, -(-last // BLOCK))
        return self._replace(
            quants=self.quants[:, first:last],
            scale=self.scale[:, own],
            offset=None if self.offset is None else self.offset[:, own],
            factors=None if self.factors is None else self.factors[:, blocks],
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> Blocks:
        """Change scales, offsets and factors."""
        return self._replace(
            scale=change(self.scale),
            offset=None if self.offset is None else change(self.offset),
            factors=None if self.factors is None else change(self.factors),
        )


def _looked_up(quants: Tensor, values: Sequence[int]) -> Tensor:
    """The values of indices, as int8 in uint8. On a CPU, bytes.translate takes a tenth of the time of indexing."""
    table = bytes(value & 255 for value in values)
    if quants.device.type != "cpu":
        return torch.tensor(list(table), dtype=torch.uint8, device=quants.device)[quants.int()]
    bytes_ = quants.contiguous().numpy().tobytes().translate(table.ljust(256, b"\0"))
    return torch.frombuffer(bytearray(bytes_), dtype=torch.uint8).view(quants.shape)


def joined(parts: Sequence[Blocks]) -> Blocks:
    """The rows of several weights of one format, below each other."""

    def below(values: Sequence[Tensor | None]) -> Tensor | None:
        return torch.cat([each for each in values if each is not None]) if values[0] is not None else None

    quants, scales, offsets, *_, factors = zip(*parts, strict=True)
    return parts[0]._replace(
        quants=torch.cat(quants), scale=torch.cat(scales), offset=below(offsets), factors=below(factors)
    )


def _halves(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(.., n) bytes -> (.., 2n) quants: the low 4 bits of every byte, then the high 4 bits."""
    element = np.dtype((np.void, packed.shape[-1]))  # numpy copies one element of n bytes faster than n bytes
    packed = np.ascontiguousarray(packed.view(element)).view(np.uint8)
    halves = np.empty((*packed.shape[:-1], 2), element)
    halves[..., :1], halves[..., 1:] = (packed & 15).view(element), (packed >> 4).view(element)
    return halves.view(np.uint8)


def _quarters(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(R, n, 64) bytes -> (R, n, 256) quants of 2 bits: for each 32 bytes, bits 0 and 1 of every byte, then 2 and 3."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    quants = packed.reshape(*packed.shape[:2], 2, 1, 32) >> shifts & np.uint8(3)
    return quants.reshape(*packed.shape[:2], 256)


def _floats(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(.., 2) bytes, a float16 -> (.., 1) float32."""
    return raw.view(np.float16).astype(np.float32)


def _blocks(
    quants: NDArray[np.uint8],
    scale: NDArray[np.float32],
    offset: NDArray[np.float32] | None,
    bits: int,
    group: int = 32,
    values: tuple[int, ...] | None = None,
    factors: tuple[NDArray[np.float32], ...] = (),
) -> Blocks:
    def by_rows(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.reshape(len(quants), -1))

    shift = None if offset is None else by_rows(offset)
    both = torch.stack([by_rows(factor) for factor in factors], dim=-1) if factors else None
    return Blocks(by_rows(quants), by_rows(scale), shift, bits, group, values, both)


def q4_0(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 32: scale d, 16 bytes; weight = d (q - 8)."""
    blocks = raw.reshape(len(raw), -1, 18)
    return _blocks(_halves(blocks[..., 2:]), _floats(blocks[..., :2]), None, 4)


def q4_1(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 32: scale d, minimum m, 16 bytes; weight = d q + m."""
    blocks = raw.reshape(len(raw), -1, 20)
    return _blocks(_halves(blocks[..., 4:]), _floats(blocks[..., :2]), _floats(blocks[..., 2:4]), 4)


def q4_k(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 256: d, dmin, eight pairs of 6-bit (sc, mn) in 12 bytes, 128 bytes; weight = d sc q - dmin mn."""
    blocks = raw.reshape(len(raw), -1, 144)
    packed = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)  # 32 bytes hold two groups: low halves, high halves
    return _with_k_scales(_halves(packed), blocks, 4)


def _with_k_scales(quants: NDArray[np.uint8], blocks: NDArray[np.uint8], bits: int) -> Blocks:
    """Quants with scale d sc and offset -dmin mn for each of the eight groups in blocks (R, N / 256, ..)."""
    d, dmin = _floats(blocks[..., :2]), _floats(blocks[..., 2:4])  # (R, N / 256, 1)
    a, b, c = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]  # 4 bytes each
    sc = np.concatenate((a & 63, (c & 15) | (a >> 6 << 4)), axis=-1)  # (R, N / 256, 8)
    mn = np.concatenate((b & 63, (c >> 4) | (b >> 6 << 4)), axis=-1)
    return _blocks(quants, d * sc, -dmin * mn, bits, factors=(d, -dmin))


def q2_k(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 256: 16 pairs of 4-bit (sc, mn), 64 bytes, d, dmin; weight = d sc q - dmin mn."""
    blocks = raw.reshape(len(raw), -1, 84)
    d, dmin = _floats(blocks[..., 80:82]), _floats(blocks[..., 82:])  # (R, N / 256, 1)
    scale, offset = d * (blocks[..., :16] & 15), -dmin * (blocks[..., :16] >> 4)
    return _blocks(_quarters(blocks[..., 16:80]), scale, offset, 2, 16, factors=(d, -dmin))


def q3_k(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 256: high bits in 32 bytes, low bits in 64, 16 6-bit scales sc, d; weight = d (sc - 32) (q - 4)."""
    blocks = raw.reshape(len(raw), -1, 110)
    high = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # (R, N / 256, 8, 32)
    low = _quarters(blocks[..., 32:96])  # (R, N / 256, 256)
    quants = low + (high.reshape(low.shape) << 2)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    top = (blocks[..., None, 104:108] >> shifts & 3).reshape(*blocks.shape[:2], 16)  # bits 4 and 5 of the scales
    sc = (_halves(blocks[..., 96:104]) | top << 4).view(np.int8) - np.int8(32)  # (R, N / 256, 16)
    d = _floats(blocks[..., 108:])
    return _blocks(quants, d * sc, None, 3, 16, factors=(d,))


def q5_0(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 32: scale d, the highest bits in 4 bytes, 16 bytes; weight = d (q - 16)."""
    blocks = raw.reshape(len(raw), -1, 22)
    high = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")  # (R, N / 32, 32)
    return _blocks(_halves(blocks[..., 6:]) + (high << 4), _floats(blocks[..., :2]), None, 5)


def q5_1(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 32: scale d, minimum m, the highest bits in 4 bytes, 16 bytes; weight = d q + m."""
    blocks = raw.reshape(len(raw), -1, 24)
    high = np.unpackbits(blocks[..., 4:8], axis=-1, bitorder="little")  # (R, N / 32, 32)
    quants = _halves(blocks[..., 8:]) + (high << 4)
    return _blocks(quants, _floats(blocks[..., :2]), _floats(blocks[..., 2:4]), 5)


def q5_k(raw: NDArray[np.uint8]) -> Blocks:
    """Q4_K with 32 bytes of highest bits before the 128 bytes: bit g of byte i belongs to quant i of group g."""
    blocks = raw.reshape(len(raw), -1, 176)
    packed = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # (R, N / 256, 8, 32)
    quants = _halves(packed).reshape(high.shape) + (high << 4)
    return _with_k_scales(quants, blocks, 5)


def q6_k(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 256: low bits in 128 bytes, high bits in 64, 16 signed scales sc, d; weight = d sc (q - 32)."""
    blocks = raw.reshape(len(raw), -1, 210)
    low = _halves(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))  # (R, N / 256, 2, 128)
    high = _quarters(blocks[..., 128:192])  # (R, N / 256, 256)
    d = _floats(blocks[..., 208:])
    scale = d * blocks[..., 192:208].view(np.int8)
    return _blocks(low.reshape(high.shape) + (high << 4), scale, None, 6, 16, factors=(d,))


def q8_0(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 32: scale d, 32 signed bytes; weight = d q."""
    blocks = raw.reshape(len(raw), -1, 34)
    return _blocks(blocks[..., 2:] ^ np.uint8(128), _floats(blocks[..., :2]), None, 8)


# ------------------------------------------------------------------------------------------------------- codebooks
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values of float4 E2M1


def iq4_nl(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 32: scale d, 16 bytes; weight = d values[q]."""
    blocks = raw.reshape(len(raw), -1, 18)
    return _blocks(_halves(blocks[..., 2:]), _floats(blocks[..., :2]), None, 4, values=IQ4_VALUES)


def iq4_xs(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 256: d, eight 6-bit scales sc in 2 + 4 bytes, 128 bytes; weight = d (sc - 32) values[q]."""
    blocks = raw.reshape(len(raw), -1, 136)
    low = np.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), axis=-1).reshape(*blocks.shape[:2], 8)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    high = (blocks[..., 2:4, None] >> shifts & 3).reshape(low.shape)
    sc = (low | high << 4).view(np.int8) - np.int8(32)  # (R, N / 256, 8)
    quants = _halves(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16))
    d = _floats(blocks[..., :2])
    return _blocks(quants, d * sc, None, 4, values=IQ4_VALUES, factors=(d,))


def mxfp4(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 32: exponent e, 16 bytes of E2M1; weight = 2^(e - 128) values[q]."""
    blocks = raw.reshape(len(raw), -1, 17)
    scale = np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 128, dtype=np.float32)
    return _blocks(_halves(blocks[..., 1:]), scale, None, 4, values=E2M1_VALUES)


def nvfp4(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 64: four scales in unsigned E4M3, 32 bytes of E2M1; weight = scale / 2 values[q]."""
    blocks = raw.reshape(len(raw), -1, 36)
    codes = np.arange(256, dtype=np.int32)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = np.ldexp((8 + mantissa).astype(np.float32), exponent - 10)
    halves = (np.where(exponent > 0, normal, np.ldexp(mantissa.astype(np.float32), -9)) / 2).astype(np.float32)
    halves[127] = 0  # NaN in E4M3; llama.cpp reads it as 0
    quants = _halves(blocks[..., 4:].reshape(*blocks.shape[:2], 4, 8))
    return _blocks(quants, halves[blocks[..., :4]], None, 4, 16, E2M1_VALUES)


# --------------------------------------------------------------------------------------------------------- ternary
def tq1_0(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 256: 52 bytes of base 3, d; weight = d (q - 1).

    The leading base-3 digit of a byte b is 3 b / 256, rounded down; the next ones are those of 3 b, 9 b, 27 b, 81 b.
    """
    blocks = raw.reshape(len(raw), -1, 54)
    powers = np.array([[1], [3], [9], [27], [81]], np.uint8)
    parts = [(blocks[..., None, :32], 5), (blocks[..., None, 32:48], 5), (blocks[..., None, 48:52], 4)]
    digits = np.concatenate([(part * powers[:n]).reshape(*blocks.shape[:2], -1) for part, n in parts], axis=-1)
    quants = (digits.astype(np.uint16) * 3 >> 8).astype(np.uint8) + np.uint8(8 - 1)
    return _blocks(quants, _floats(blocks[..., 52:]).repeat(8, axis=-1), None, 4)


def tq2_0(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 256: 64 bytes, d; weight = d (q - 1)."""
    blocks = raw.reshape(len(raw), -1, 66)
    quants = _quarters(blocks[..., :64]) + np.uint8(8 - 1)
    return _blocks(quants, _floats(blocks[..., 64:]).repeat(8, axis=-1), None, 4)


# ----------------------------------------------------------------------------------------------------------- grids
@functools.cache
def _grid(name: str) -> NDArray[Any]:
    """The points of a type's grid, one integer of 4 or 8 signed bytes each, from the gguf package."""
    from gguf import quants

    type = getattr(quants, name)
    type.init_grid()
    points = np.ascontiguousarray(type.grid[0, 0].astype(np.int8))  # (points, 4 or 8)
    return points.view(np.uint32 if points.shape[1] == 4 else np.uint64)[:, 0]


@functools.cache
def _sign_bytes() -> NDArray[np.uint64]:
    """For each byte, 8 bytes: 255 where its bit is set, the lowest bit first."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (bits * np.uint8(255)).view(np.uint64)[:, 0]


@functools.cache
def _even_signs() -> NDArray[np.uint8]:
    """The 128 bytes with an even number of bits, by their lowest 7 bits."""
    low = np.arange(128, dtype=np.uint8)
    return low | np.unpackbits(low[:, None], axis=1).sum(axis=1, dtype=np.uint8) << 7


IQ2_VALUES = (8, 25, 43, *[0] * 5, -8, -25, -43, *[0] * 5)
IQ3_VALUES = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)


def _indexed(quants: NDArray[np.uint8], values: Sequence[int]) -> NDArray[np.uint8]:
    """Integers, as int8 in uint8, as indices into values that contain them."""
    table = bytearray(256)
    for i, value in enumerate(values):
        table[value & 255] = i
    return np.frombuffer(bytearray(quants.tobytes().translate(table)), np.uint8).reshape(quants.shape)


def _signed(points: NDArray[Any], signs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Points of a grid as int8 in uint8, negated where a sign is set: (R, ..) -> (R, N). signs has a byte for 8."""
    masks = _sign_bytes()[signs].reshape(len(points), -1).view(np.uint8)
    values = np.ascontiguousarray(points).reshape(len(points), -1).view(np.uint8)
    return (values ^ masks) - masks


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(.., n) bytes -> (.., 2n): the low and the high 4 bits of each byte, next to each other."""
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)


def _odd(sc: NDArray[Any]) -> NDArray[np.float32]:
    return (2 * sc + 1).astype(np.float32)


def _words(raw: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """(.., n) bytes as little-endian integers."""
    return np.ascontiguousarray(raw).view(dtype)


def iq2_xxs(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 256: d, for each 32 weights 4 points and a word of four 7-bit signs and a 4-bit sc."""
    blocks = raw.reshape(len(raw), -1, 66)
    packed = blocks[..., 2:].reshape(*blocks.shape[:2], 8, 8)
    words = _words(packed[..., 4:], "<u4")  # (R, N / 256, 8, 1)
    signs = _even_signs()[words >> np.array([0, 7, 14, 21], np.uint32) & 127]
    scale = _floats(blocks[..., :2]) * _odd(words[..., 0] >> 28) / np.float32(8)
    quants = _signed(_grid("IQ2_XXS")[packed[..., :4]], signs)
    return _blocks(_indexed(quants, IQ2_VALUES), scale, None, 4, 32, IQ2_VALUES)


def iq2_xs(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 256: d, 32 words of a 9-bit point and 7-bit signs, sixteen 4-bit scales sc."""
    blocks = raw.reshape(len(raw), -1, 74)
    words = _words(blocks[..., 2:66], "<u2")  # (R, N / 256, 32)
    scale = _floats(blocks[..., :2]) * _odd(_nibbles(blocks[..., 66:])) / np.float32(8)
    quants = _signed(_grid("IQ2_XS")[words & 511], _even_signs()[words >> 9])
    return _blocks(_indexed(quants, IQ2_VALUES), scale, None, 4, 16, IQ2_VALUES)


def iq2_s(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 256: d, 32 low bytes of points, 32 bytes of signs, 8 with bits 8 and 9, sixteen 4-bit scales sc."""
    blocks = raw.reshape(len(raw), -1, 82)
    high = (blocks[..., 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(*blocks.shape[:2], 32)
    points = blocks[..., 2:34] | high.astype(np.uint16) << 8
    scale = _floats(blocks[..., :2]) * _odd(_nibbles(blocks[..., 74:])) / np.float32(8)
    quants = _signed(_grid("IQ2_S")[points], blocks[..., 34:66])
    return _blocks(_indexed(quants, IQ2_VALUES), scale, None, 4, 16, IQ2_VALUES)


def iq3_xxs(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 256: d, 64 points of 4 weights, for each 32 weights a word of four 7-bit signs and a 4-bit sc."""
    blocks = raw.reshape(len(raw), -1, 98)
    words = _words(blocks[..., 66:], "<u4")  # (R, N / 256, 8)
    signs = _even_signs()[words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127]
    scale = _floats(blocks[..., :2]) * _odd(words >> 28) / np.float32(4)
    quants = _signed(_grid("IQ3_XXS")[blocks[..., 2:66]], signs)
    return _blocks(_indexed(quants, IQ3_VALUES), scale, None, 4, 32, IQ3_VALUES)


def iq3_s(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 256: d, 64 low bytes of points, 8 with bit 8, 32 bytes of signs, eight 4-bit scales sc.

    The values are the odd numbers from -15 to 15: weight = d (2 sc + 1) (2 q - 15).
    """
    blocks = raw.reshape(len(raw), -1, 110)
    high = np.unpackbits(blocks[..., 66:74], axis=-1, bitorder="little")  # (R, N / 256, 64)
    values = _signed(_grid("IQ3_S")[blocks[..., 2:66] | high.astype(np.uint16) << 8], blocks[..., 74:106])
    step = _floats(blocks[..., :2]) * _odd(_nibbles(blocks[..., 106:]))
    return _blocks(values + np.uint8(15) >> np.uint8(1), 2 * step, -15 * step, 4)


def iq1_s(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 256: d, 32 low bytes of points; for each 32 weights a word of four high parts, sc and a sign.

    The points have the values -1, 0 and 1: weight = d (2 sc + 1) (q - 1 + shift), shift = 1/8 or -1/8 by the sign.
    """
    blocks = raw.reshape(len(raw), -1, 50)
    words = _words(blocks[..., 34:], "<u2")  # (R, N / 256, 8)
    high = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(*blocks.shape[:2], 32)
    points = _grid("IQ1_S")[blocks[..., 2:34] | high << 8]
    step = _floats(blocks[..., :2]) * _odd(words >> 12 & 7)
    offset = step * np.where(words >> 15, np.float32(-1.125), np.float32(-0.875))
    return _blocks(points.view(np.uint8) + np.uint8(1), step, offset, 4)


def iq1_m(raw: NDArray[np.uint8]) -> Blocks:
    """Blocks of 256: 32 low bytes of points, for each 8 weights 3 high bits and a sign, sixteen 3-bit scales sc, d.

    As in IQ1_S, with a sign for 8 weights: weight = d (2 sc + 1) (4 point + 4 + (1 or 0) - 4.5) / 4. The words of
    the scales have the 16 bits of d in their highest 4 bits.
    """
    blocks = raw.reshape(len(raw), -1, 56)
    words = _words(blocks[..., 48:], "<u2")  # (R, N / 256, 4)
    d = (words >> 12 << np.array([0, 4, 8, 12], np.uint16)).sum(axis=-1, keepdims=True, dtype=np.uint16)
    sc = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(*blocks.shape[:2], 16)
    high = _nibbles(blocks[..., 32:48])  # (R, N / 256, 32)
    points = _grid("IQ1_M")[blocks[..., :32] | (high & 7).astype(np.uint16) << 8][..., None].view(np.uint8)
    quants = (points + np.uint8(1) << np.uint8(2)) + (high < 8)[..., None]  # (R, N / 256, 32, 8)
    step = d.view(np.float16).astype(np.float32) * _odd(sc)
    return _blocks(quants, step / np.float32(4), step * np.float32(-1.125), 4, 16)


# GGUF type -> function that reads its blocks
READERS: dict[str, Callable[[NDArray[np.uint8]], Blocks]] = {
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q4_K": q4_k,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "Q8_0": q8_0,
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
    "MXFP4": mxfp4,
    "NVFP4": nvfp4,
}
