"""Quantization to GGUF's block types: the inverse of groups.READERS, and the choice of a type for each weight.

Q8_0, Q4_0 and Q5_0 are quantized by the gguf package, with llama.cpp's integers. The K types have two levels of scales,
for which the format defines no rule. llama.cpp searches for the least weighted error, and this file for the least
squared error.
Layouts: ggml-quants.c of https://github.com/ggml-org/ggml; choice of types: llama-quant.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import gguf
import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import CheckpointError
from .schemes import best, check_scales

QUANTIZED_ENTRIES = 2**18  # maximum entries to quantize at once, so that they and their copies fit into the cache
SMALLEST = 1e-15  # if all weights of a group are below this in absolute value, they become 0
STEPS = (-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0)  # to add to 15, the steps in a Q4_K group; all are tried
ENDS = (32.0, 31.5, 32.5, 31.0, 33.0)  # quants, negated, to try for the largest weight of a Q6_K group


# ------------------------------------------------------------------------------------------------------------- types
def q4_k(w: Tensor) -> Tensor:
    """Blocks of 256 in 8 groups: weight = d sc q - dmin mn. d, dmin: per block; sc, mn: per group, 6 bits; q: 4."""
    groups = w.unflatten(1, (-1, 8, 32))  # (R, blocks, groups, 32)
    low = groups.amin(-1, keepdim=True).clamp(max=0)  # the format can't store a minimum above 0
    width = groups.amax(-1, keepdim=True).clamp(min=0) - low
    total = groups.sum(-1, keepdim=True)

    def candidates() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for more in STEPS:
            quants = ((groups - low) * _inverse(width / (15 + more))).round().clamp(0, 15)
            # least squares for these quants: fit scale and offset, or the scale alone if the offset would be above 0
            sum_q, sum_qq = quants.sum(-1, keepdim=True), quants.square().sum(-1, keepdim=True)
            sum_qw = (quants * groups).sum(-1, keepdim=True)
            scale = (32 * sum_qw - sum_q * total) * _inverse(32 * sum_qq - sum_q.square())
            offset = (total - scale * sum_q) / 32
            scale = torch.where(offset > 0, sum_qw * _inverse(sum_qq), scale).clamp(min=0)
            offset = offset.clamp(max=0)
            yield (scale * quants + offset - groups).square().sum(-1, keepdim=True), scale, offset

    scale, offset = best(candidates())
    d, dmin = (values.amax(-2, keepdim=True) / 63 for values in (scale, -offset))  # (R, blocks, 1, 1)
    stored = d.half(), dmin.half()
    d, dmin = (values.float() for values in stored)
    sc, mn = ((v * _inverse(u)).round().clamp(0, 63) for v, u in ((scale, d), (-offset, dmin)))
    quants = ((groups + dmin * mn) * _inverse(d * sc)).round().clamp(0, 15).to(torch.uint8)
    sc, mn = (values.to(torch.uint8).squeeze(-1) for values in (sc, mn))  # (R, blocks, 8)
    parts = (
        *(values.view(torch.uint8).flatten(-2) for values in stored),
        sc[..., :4] | sc[..., 4:] >> 4 << 6,
        mn[..., :4] | mn[..., 4:] >> 4 << 6,
        (sc[..., 4:] & 15) | (mn[..., 4:] & 15) << 4,
        _bytes(quants.unflatten(-2, (4, 2))).flatten(-2),
    )
    return torch.cat(parts, -1).flatten(1)


def q6_k(w: Tensor) -> Tensor:
    """Blocks of 256 in 16 groups: weight = d sc (q - 32). d: per block; sc: 8 bits, per group; q: 6 bits."""
    groups = w.unflatten(1, (-1, 16, 16))  # (R, blocks, groups, 16)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))

    def candidates() -> Iterator[tuple[Tensor, Tensor]]:
        for end in ENDS:
            quants = (groups * _inverse(-largest / end)).round().clamp(-32, 31)
            fitted = (quants * groups).sum(-1, keepdim=True) * _inverse(quants.square().sum(-1, keepdim=True))
            yield (fitted * quants - groups).square().sum(-1, keepdim=True), fitted

    (scale,) = best(candidates())
    d = scale.gather(-2, scale.abs().argmax(-2, keepdim=True)) / -128  # (R, blocks, 1, 1)
    stored = d.half()
    d = stored.float()
    sc = (scale * _inverse(d)).round().clamp(-128, 127)
    q = ((groups * _inverse(d * sc)).round().clamp(-32, 31) + 32).to(torch.uint8).flatten(-2)  # (R, blocks, 256)
    high = (q >> 4).unflatten(-1, (2, 4, 32)) << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    parts = (
        _bytes(q.unflatten(-1, (2, 2, 64)) & 15).flatten(-2),
        high.sum(-2, dtype=torch.uint8).flatten(-2),
        sc.to(torch.int8).view(torch.uint8).flatten(-2),
        stored.view(torch.uint8).flatten(-2),
    )
    return torch.cat(parts, -1).flatten(1)


def _bytes(pairs: Tensor) -> Tensor:
    """(.., 2, n) quants of 4 bits -> (.., n): the first n in the low halves of the bytes."""
    return pairs[..., 0, :] | pairs[..., 1, :] << 4


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 for 0."""
    return torch.where(x == 0, 0, 1 / x)


# Type -> number of weights that share a scale
TYPES = {"Q8_0": 32, "Q4_0": 32, "Q5_0": 32, "Q4_K": 32, "Q6_K": 16}


def block_of(type: str) -> tuple[int, int]:
    """The number of weights in a block of a type, and the number of bytes."""
    block, size = gguf.GGML_QUANT_SIZES[number(type)]
    return block, size


def number(type: str) -> Any:
    """The number of a type in files."""
    return gguf.GGMLQuantizationType[type]


def quantize(weight: Tensor, type: str) -> Tensor:
    """A weight (R, N) in a GGUF type: (R, bytes of a row) uint8. Raises CheckpointError if a weight is not finite.

    Groups below SMALLEST become 0, as in llama.cpp, since the reciprocals of their scales would overflow.
    """
    (rows, columns), (block, size) = weight.shape, block_of(type)
    out = torch.empty(rows, columns // block * size, dtype=torch.uint8)
    step = max(1, QUANTIZED_ENTRIES // columns)
    for first in range(0, rows, step):
        groups = weight[first : first + step].float().unflatten(1, (-1, TYPES[type]))  # (R, groups, group)
        largest = groups.abs().amax(-1, keepdim=True)
        check_scales((largest / 8).half())  # of all types, Q4_0 has the largest scales
        w = torch.where(largest < SMALLEST, 0, groups).flatten(1)
        own = {"Q4_K": q4_k, "Q6_K": q6_k}.get(type)
        out[first : first + step] = own(w) if own else torch.from_numpy(gguf.quantize(w.numpy(), number(type)))
    return out


# ------------------------------------------------------------------------------------------------------- their choice
class Mix(NamedTuple):
    """A kind of quantized GGUF: llama.cpp's number for it, the type of most weights, and that of the output layer."""

    file_type: int
    type: str
    output: str
    about: str


MIXES = {
    "q8_0": Mix(7, "Q8_0", "Q8_0", "8 bits in groups of 32"),
    "q4_0": Mix(2, "Q4_0", "Q6_K", "4 bits in groups of 32, output in 6 bits"),
    "q4_k": Mix(15, "Q4_K", "Q6_K", "4 bits with two levels of scales, output and some layers in 6 bits (Q4_K_M)"),
}
# Type -> the type to use if the rows are not a multiple of 256
SMALLER = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


def types_of(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, kind: str) -> dict[str, str]:
    """The type of each matrix, as llama.cpp chooses it, except for the value projections of Llama 70B.

    Raises CheckpointError if rows can't be divided into blocks.
    """
    mix, types = MIXES[kind], {}
    output = "output.weight" if "output.weight" in shapes else "tok_embeddings.weight"
    for name, shape in shapes.items():
        if len(shape) != 2:
            continue
        type = mix.output if name == output else mix.type
        if kind == "q4_k" and name.endswith(("attention.wv.weight", "feed_forward.w_down.weight")):
            # more bits for the first and last eighth of the layers, and every third between them
            layer, eighth = int(name.split(".")[1]), config.n_layers // 8
            if layer < eighth or layer >= 7 * config.n_layers // 8 or (layer - eighth) % 3 == 2:
                type = "Q6_K"
        if shape[1] % block_of(type)[0]:
            type = SMALLER.get(type, type)
        if shape[1] % block_of(type)[0]:
            raise CheckpointError(
                f"{name} has rows of {shape[1]} weights, no multiple of 32; leave quantize (--quantize) out"
            )
        types[name] = type
    return types
