"""Quantization to GGUF's block types: the inverse of blocks.READERS, and which weight gets which type.

Q8_0, Q4_0 and Q5_0 follow the rule of llama.cpp's own quantizer and give its integers. The K types have two levels of
scales, for which no rule is defined; llama.cpp searches with weighted errors, and this file with plain squared errors.
Layouts: ggml-quants.c of https://github.com/ggml-org/ggml; choice of types: llama-quant.cpp of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import CheckpointError
from .rounding import check_scales

PIECE = 2**18  # entries that are quantized at once; with their copies, they fit into the cache
STEPS = (-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0)  # of a group of Q4_K: added to the number of its steps
ENDS = (32.0, 31.5, 32.5, 31.0, 33.0)  # of a group of Q6_K: the multiple of the scale that its largest weight becomes


# ------------------------------------------------------------------------------------------------------------- types
def q8_0(w: Tensor) -> Tensor:
    """Blocks of 32: the largest absolute weight becomes 127."""
    groups = w.unflatten(1, (-1, 32))  # (R, blocks, 32)
    d = groups.abs().amax(-1, keepdim=True) / 127
    x = groups * _inverse(d)
    whole = x.abs().floor()
    quants = (x.sign() * (whole + (2 * (x.abs() - whole)).floor())).to(torch.int8)  # halves are rounded away from zero
    return torch.cat((_half(d), quants.view(torch.uint8)), -1).flatten(1)


def q4_0(w: Tensor) -> Tensor:
    """Blocks of 32: the weight with the largest absolute value becomes -8."""
    quants, d = _signed(w, 8)
    return torch.cat((_half(d), _nibbles(quants)), -1).flatten(1)


def q5_0(w: Tensor) -> Tensor:
    """Blocks of 32: the weight with the largest absolute value becomes -16."""
    quants, d = _signed(w, 16)
    high = quants >> 4 << torch.arange(8, dtype=torch.uint8).repeat(4)  # (R, blocks, 32)
    high = high.unflatten(-1, (4, 8)).sum(-1, dtype=torch.uint8)
    return torch.cat((_half(d), high, _nibbles(quants & 15)), -1).flatten(1)


def _signed(w: Tensor, middle: int) -> tuple[Tensor, Tensor]:
    """Quants (R, blocks, 32) and scales (R, blocks, 1); the weight with the largest absolute value becomes quant 0."""
    groups = w.unflatten(1, (-1, 32))
    d = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -middle
    x = groups * _inverse(d) + (middle + 0.5)  # two roundings, as in llama.cpp
    return x.clamp(max=2 * middle - 1).to(torch.uint8), d


def q4_k(w: Tensor) -> Tensor:
    """Blocks of 256 in 8 groups: weight = d sc q - dmin mn, with 6 bits for sc and mn and 4 for q."""
    head, quants = _two_levels(w, 15)
    return torch.cat((head, _pairs(quants)), -1).flatten(1)


def q5_k(w: Tensor) -> Tensor:
    """Q4_K with 5 bits for q; the highest bits come first: bit g of byte i belongs to quant i of group g."""
    head, quants = _two_levels(w, 31)
    high = (quants >> 4 << torch.arange(8, dtype=torch.uint8)[:, None]).sum(-2, dtype=torch.uint8)  # (R, blocks, 32)
    return torch.cat((head, high, _pairs(quants & 15)), -1).flatten(1)


def q6_k(w: Tensor) -> Tensor:
    """Blocks of 256 in 16 groups: weight = d sc (q - 32), with 8 bits for sc and 6 for q."""
    groups = w.unflatten(1, (-1, 16, 16))  # (R, blocks, groups, 16)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best = least = None
    for end in ENDS:
        quants = (groups * _inverse(-largest / end)).round().clamp(-32, 31)
        scale = (quants * groups).sum(-1, keepdim=True) * _inverse(quants.square().sum(-1, keepdim=True))
        error = (scale * quants - groups).square().sum(-1, keepdim=True)
        best = scale if best is None or least is None else torch.where(error < least, scale, best)
        least = error if least is None else torch.minimum(error, least)
    scale = torch.zeros_like(largest) if best is None else best
    d = scale.gather(-2, scale.abs().argmax(-2, keepdim=True)) / -128  # (R, blocks, 1, 1)
    stored = _half(d)
    d = stored.view(torch.float16).float()
    sc = (scale * _inverse(d)).round().clamp(-128, 127)
    q = ((groups * _inverse(d * sc)).round().clamp(-32, 31) + 32).to(torch.uint8).flatten(-2)  # (R, blocks, 256)
    halves = q.unflatten(-1, (2, 2, 64)) & 15
    low = halves[..., 0, :] | halves[..., 1, :] << 4  # (R, blocks, 2, 64)
    high = (q >> 4).unflatten(-1, (2, 4, 32)) << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    parts = (
        low.flatten(-2),
        high.sum(-2, dtype=torch.uint8).flatten(-2),
        sc.to(torch.int8).view(torch.uint8).flatten(-2),
    )
    return torch.cat((*parts, stored.flatten(-2)), -1).flatten(1)


def _two_levels(w: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """d, dmin and the packed sc and mn (R, blocks, 16); quants from 0 to top (R, blocks, 8, 32)."""
    groups = w.unflatten(1, (-1, 8, 32))  # (R, blocks, groups, 32)
    low = groups.amin(-1, keepdim=True).clamp(max=0)  # the minimum can't be above 0
    width = groups.amax(-1, keepdim=True).clamp(min=0) - low
    scale, offset, least = width / top, low, torch.full_like(low, torch.inf)
    total = groups.sum(-1, keepdim=True)
    for more in STEPS:
        quants = ((groups - low) * _inverse(width / (top + more))).round().clamp(0, top)
        # least squares for these quants: of the scale and the offset, or of the scale alone if the offset is above 0
        sum_q, sum_qq = quants.sum(-1, keepdim=True), quants.square().sum(-1, keepdim=True)
        sum_qw = (quants * groups).sum(-1, keepdim=True)
        fitted = (32 * sum_qw - sum_q * total) * _inverse(32 * sum_qq - sum_q.square())
        moved = (total - fitted * sum_q) / 32
        fitted = torch.where(moved > 0, sum_qw * _inverse(sum_qq), fitted).clamp(min=0)
        moved = moved.clamp(max=0)
        error = (fitted * quants + moved - groups).square().sum(-1, keepdim=True)
        better = error < least
        scale, offset = torch.where(better, fitted, scale), torch.where(better, moved, offset)
        least = torch.where(better, error, least)
    d, dmin = (values.amax(-2, keepdim=True) / 63 for values in (scale, -offset))  # (R, blocks, 1, 1)
    stored = _half(d), _half(dmin)
    d, dmin = (values.view(torch.float16).float() for values in stored)
    sc, mn = ((v * _inverse(u)).round().clamp(0, 63) for v, u in ((scale, d), (-offset, dmin)))
    quants = ((groups + dmin * mn) * _inverse(d * sc)).round().clamp(0, top).to(torch.uint8)
    sc, mn = (values.to(torch.uint8).squeeze(-1) for values in (sc, mn))  # (R, blocks, 8)
    packed = (
        sc[..., :4] | sc[..., 4:] >> 4 << 6,
        mn[..., :4] | mn[..., 4:] >> 4 << 6,
        (sc[..., 4:] & 15) | (mn[..., 4:] & 15) << 4,
    )
    return torch.cat((*(values.flatten(-2) for values in stored), *packed), -1), quants


def _pairs(quants: Tensor) -> Tensor:
    """(R, blocks, 8, 32) quants of 4 bits -> (R, blocks, 128): the halves of 32 bytes hold two groups."""
    pairs = quants.unflatten(-2, (4, 2))
    return (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(-2)


def _nibbles(quants: Tensor) -> Tensor:
    """(R, blocks, 32) quants of 4 bits -> (R, blocks, 16): the first half in the low halves of the bytes."""
    return quants[..., :16] | quants[..., 16:] << 4


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 for 0."""
    return torch.where(x == 0, 0, 1 / x)


def _half(x: Tensor) -> Tensor:
    """The bytes of scales in float16: (.., 1) -> (.., 2). Raises CheckpointError if one is not finite."""
    half = x.half()
    check_scales(half)
    return half.view(torch.uint8)


class GGUFType(NamedTuple):
    """Weights in a block, its bytes, and the function that quantizes rows (R, N) float32 to bytes (R, ..)."""

    block: int
    nbytes: int
    quantize: Callable[[Tensor], Tensor]

    def size(self, shape: tuple[int, ...]) -> int:
        """The bytes of a weight of a shape."""
        return math.prod(shape) // self.block * self.nbytes


TYPES = {
    "Q8_0": GGUFType(32, 34, q8_0),
    "Q4_0": GGUFType(32, 18, q4_0),
    "Q5_0": GGUFType(32, 22, q5_0),
    "Q4_K": GGUFType(256, 144, q4_k),
    "Q5_K": GGUFType(256, 176, q5_k),
    "Q6_K": GGUFType(256, 210, q6_k),
}


def quantize(weight: Tensor, type: str) -> Tensor:
    """A weight (R, N) in a GGUF type: (R, bytes of a row) uint8. Raises CheckpointError if a weight is not finite."""
    block, nbytes, function = TYPES[type]
    rows, columns = weight.shape
    out = torch.empty(rows, columns // block * nbytes, dtype=torch.uint8)
    step = max(1, PIECE // columns)
    for first in range(0, rows, step):
        out[first : first + step] = function(weight[first : first + step].float())
    return out


# ------------------------------------------------------------------------------------------------------- their choice
class Mix(NamedTuple):
    """A kind of quantized GGUF: llama.cpp's number for it, the type of most weights, and that of the output."""

    file_type: int
    type: str
    output: str
    about: str


MIXES = {
    "q8_0": Mix(7, "Q8_0", "Q8_0", "8 bits in groups of 32"),
    "q4_0": Mix(2, "Q4_0", "Q6_K", "4 bits in groups of 32, output in 6 bits"),
    "q4_k": Mix(15, "Q4_K", "Q6_K", "4 bits with two levels of scales, output and some layers in 6 bits (Q4_K_M)"),
}
# If rows are no multiple of 256
SMALLER = {"Q4_K": "Q5_0", "Q5_K": "Q8_0", "Q6_K": "Q8_0"}


def types_of(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, kind: str) -> dict[str, str]:
    """The type of each matrix, as llama.cpp chooses it. Raises CheckpointError if rows can't be divided into blocks."""
    mix, types = MIXES[kind], {}
    output = "output.weight" if "output.weight" in shapes else "tok_embeddings.weight"
    for name, shape in shapes.items():
        if len(shape) != 2:
            continue
        type = mix.output if name == output else mix.type
        if kind == "q4_k" and name.endswith(("attention.wv.weight", "feed_forward.w_down.weight")):
            if _more_bits(int(name.split(".")[1]), config.n_layers):
                type = "Q6_K"
            elif "wv" in name and config.n_layers == 80 and config.n_heads != config.n_kv_heads:  # Llama 70B
                type = "Q5_K"  # 8 heads share each value head
        if shape[1] % TYPES[type].block:
            type = SMALLER.get(type, type)
        if shape[1] % TYPES[type].block:
            raise CheckpointError(
                f"{name} has rows of {shape[1]} weights, and GGUF's quantized types need multiples of 32; write it"
                f" without --quantize"
            )
        types[name] = type
    return types


def _more_bits(layer: int, count: int) -> bool:
    """Whether Q4_K_M gives a layer more bits: the first and last eighth, and every third between them."""
    return layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2
