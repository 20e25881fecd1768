"""4-bit GGUF blocks as what they are: integers from 0 to 15 with a scale and an offset for every 32 of them.

    weight = scale * quant + offset

Q4_0, Q4_1 and Q4_K all have this form, so a 4-bit kernel can use a file's weights as they are, without a second
quantization. Layouts: ggml-quants.c of https://github.com/ggml-org/ggml. Arrays: R rows (out features), N columns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GROUP = 32


class Blocks4(NamedTuple):
    """quants (R, N) uint8 from 0 to 15; scale and offset (R, N / 32) float32."""

    quants: NDArray[np.uint8]
    scale: NDArray[np.float32]
    offset: NDArray[np.float32]


def _halves(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(.., 16) bytes -> (.., 32) quants: the low halves of all bytes first, then the high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _floats(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(.., 2) bytes -> (.., 1) float16 read as float32."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def q4_0(raw: NDArray[np.uint8]) -> Blocks4:
    """Blocks of 32: scale d, 16 bytes; weight = d (q - 8)."""
    rows, blocks = len(raw), raw.reshape(len(raw), -1, 18)
    scale = _floats(blocks[..., :2])[..., 0]  # (R, N / 32)
    return Blocks4(_halves(blocks[..., 2:]).reshape(rows, -1), scale, -8 * scale)


def q4_1(raw: NDArray[np.uint8]) -> Blocks4:
    """Blocks of 32: scale d, minimum m, 16 bytes; weight = d q + m."""
    rows, blocks = len(raw), raw.reshape(len(raw), -1, 20)
    scale, minimum = _floats(blocks[..., :2])[..., 0], _floats(blocks[..., 2:4])[..., 0]
    return Blocks4(_halves(blocks[..., 4:]).reshape(rows, -1), scale, minimum)


def q4_k(raw: NDArray[np.uint8]) -> Blocks4:
    """Blocks of 256: d, dmin, eight pairs of 6-bit (sc, mn) in 12 bytes, 128 bytes; weight = d sc q - dmin mn."""
    rows, blocks = len(raw), raw.reshape(len(raw), -1, 144)
    d, dmin = _floats(blocks[..., :2]), _floats(blocks[..., 2:4])  # (R, N / 256, 1)
    a, b, c = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]  # 4 bytes each
    sc = np.concatenate((a & 63, (c & 15) | (a >> 6 << 4)), axis=-1)  # (R, N / 256, 8)
    mn = np.concatenate((b & 63, (c >> 4) | (b >> 6 << 4)), axis=-1)
    packed = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)  # 32 bytes hold two groups: low halves, high halves
    quants = np.stack((packed & 15, packed >> 4), axis=-2)  # (R, N / 256, 4, 2, 32)
    return Blocks4(quants.reshape(rows, -1), (d * sc).reshape(rows, -1), (-dmin * mn).reshape(rows, -1))


# GGUF's name of the type -> its reader
READERS = {"Q4_0": q4_0, "Q4_1": q4_1, "Q4_K": q4_k}
