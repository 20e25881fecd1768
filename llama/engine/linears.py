"""Weights of 4 and 8 bits: how they are rounded, how they are packed, and the layers that compute with them.

A weight matrix (N, K) becomes integers with a scale (and perhaps an offset) for each group of inputs:

    weight = scale * quant + offset

Decoding one token does little but read the weights, so a quarter of the bytes is nearly a quarter of the time. The
layers replace nn.Linear and nn.Embedding from outside; the model does not know. A new scheme is an entry of SCHEMES.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import CheckpointError, UsageError
from ..quant.blocks import Blocks
from ..quant.tiles import TILE, pack, scales_of, tile_bytes, unpack, unpack_rows
from . import kernels, triton_kernels
from .triton_kernels import Weight

if TYPE_CHECKING:
    from ..model import Transformer


@dataclass(frozen=True)
class Scheme:
    """bits a weight, inputs a group (0: the whole row), and whether a group has an offset besides its scale.

    output  the scheme of the output layer (and of an embedding tied to it), if another: a word's logit is one row of
            it, and an error there is not averaged away by later layers
    """

    bits: int
    group: int
    offset: bool
    about: str
    output: str | None = None

    @property
    def bits_per_weight(self) -> float:
        """With scales and offsets, which take 16 bits each."""
        return self.bits + (16 * (1 + self.offset) / self.group if self.group else 0)


SCHEMES = {
    "int8": Scheme(8, 32, True, "8 bits in groups of 32 with a zero point"),
    "int8-sym": Scheme(8, 32, False, "8 bits in groups of 32, symmetric"),
    "int8-row": Scheme(8, 0, False, "8 bits, one scale for each row"),
    "int4": Scheme(4, 32, True, "4 bits in groups of 32 with a zero point, output as int8-sym", "int8-sym"),
    "int4-g64": Scheme(4, 64, True, "4 bits in groups of 64 with a zero point, output as int8-sym", "int8-sym"),
    "int4-g128": Scheme(4, 128, True, "4 bits in groups of 128 with a zero point, output as int8-sym", "int8-sym"),
    "int4-sym": Scheme(4, 32, False, "4 bits in groups of 32, symmetric, output as int8-sym", "int8-sym"),
    "int4-sym-g64": Scheme(4, 64, False, "4 bits in groups of 64, symmetric, output as int8-sym", "int8-sym"),
    "int4-sym-g128": Scheme(4, 128, False, "4 bits in groups of 128, symmetric, output as int8-sym", "int8-sym"),
    "int4-all": Scheme(4, 32, True, "4 bits in groups of 32 with a zero point, output too"),
}


def pick_scheme(name: str) -> Scheme:
    """The scheme of that name. Raises UsageError naming those there are."""
    if name not in SCHEMES:
        raise UsageError(f"unknown quantization scheme {name!r}; known: {', '.join(SCHEMES)}")
    return SCHEMES[name]


def scheme_for(layer: str, scheme: Scheme) -> Scheme:
    """The scheme of one layer, by its name in the model."""
    return SCHEMES[scheme.output] if layer == "output" and scheme.output else scheme


# ----------------------------------------------------------------------------------------------------- rounding
# How far a group's range is drawn in, so that its many small weights get finer steps at the cost of its few large ones.
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


def quantize(weight: Tensor, scheme: Scheme) -> Blocks:
    """Round a weight (N, K) to the scheme's integers.

    The ends of each group's range are tried at several widths (CLIPS), and the one with the least squared error stays;
    in 8 bits the whole range is best. Scales are those the kernel will see: float16 for groups, float32 for rows.
    kernels.round_to_tiles does the same and packs, twenty times as fast. Raises CheckpointError when a weight is
    not finite or too large for a float16 scale.
    """
    rows, columns = weight.shape
    group = scheme.group or columns
    missing = -columns % group
    w = F.pad(weight.float(), (0, missing)).view(rows, -1, group)  # (N, groups, group)
    if scheme.offset and missing:  # what fills up the last group must not widen its range
        w[:, -1, -missing:] = w[:, -1, :1]
    first, *others = _clips(scheme)
    best = _round(w, scheme, first)
    least = _error(w, *best, missing)  # (N, groups)
    for clip in others:
        tried = _round(w, scheme, clip)
        error = _error(w, *tried, missing)
        better = error < least
        best = (
            torch.where(better[..., None], tried[0], best[0]),  # quants
            torch.where(better, tried[1], best[1]),  # scale
            torch.where(better, tried[2], best[2]),  # offset
        )
        least = torch.where(better, error, least)
    quants, scale, offset = best
    _check_finite(scale, offset)
    return Blocks(
        quants.to(torch.uint8).flatten(1)[:, :columns].contiguous(),
        scale,
        offset if scheme.offset else None,
        scheme.bits,
        scheme.group,
    )


def _round(w: Tensor, scheme: Scheme, clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """Integers, scale and offset of groups (N, groups, group) whose range is drawn in to `clip` of its width."""
    top = 2**scheme.bits - 1
    if scheme.offset:
        low, high = w.amin(-1), w.amax(-1)  # (N, groups)
        middle, half = (low + high) / 2, (high - low) / 2 * clip
        scale = _stored(half * 2 / top, scheme)
        offset = _stored(middle - half, scheme)
    else:
        middle_quant = 2 ** (scheme.bits - 1)
        scale = _stored(w.abs().amax(-1) * clip / (middle_quant - 1), scheme)
        offset = -scale * middle_quant
    steps = torch.where(scale > 0, scale, 1)[..., None]
    return ((w - offset[..., None]) / steps).round().clamp(0, top), scale, offset


def _stored(x: Tensor, scheme: Scheme) -> Tensor:
    """As it is kept: float16 for groups."""
    return x.half().float() if scheme.group else x


def _clips(scheme: Scheme) -> tuple[float, ...]:
    return CLIPS if scheme.bits < 8 else CLIPS[:1]


def _error(w: Tensor, quants: Tensor, scale: Tensor, offset: Tensor, missing: int) -> Tensor:
    """Squared error of groups (N, groups, group) but for the last `missing` columns: -> (N, groups)."""
    gaps = quants * scale[..., None] + offset[..., None] - w
    gaps[:, -1, gaps.shape[-1] - missing :] = 0
    return gaps.square().sum(-1)


def _check_finite(*scales: Tensor) -> None:
    if not all(bool(torch.isfinite(numbers).all()) for numbers in scales):
        raise CheckpointError(
            "a weight is not finite, or too large for 16-bit scales, and can't be quantized; get the file again"
            " (clearllama verify --tensors looks at every weight), or load it as it is"
        )


PIECE = 2**18  # entries of a weight that are rounded or packed at once


@dataclass(frozen=True)
class Integers:
    """A weight (N, K) as integers, wherever they come from: those of a file, or rounded on the spot.

    rows   the rows in a slice
    tiles  all of them packed, for the kernels; made when asked for
    """

    shape: tuple[int, int]
    bits: int
    group: int
    offset: bool
    rows: Callable[[slice], Blocks]
    tiles: Callable[[], Tensor]


def rounded(read: Callable[[slice], Tensor], shape: tuple[int, int], scheme: Scheme) -> Integers:
    """A weight whose rows `read` gives as numbers, rounded to a scheme: piece by piece, whatever is asked for."""

    def rows(part: slice) -> Blocks:
        return quantize(read(part), scheme)

    def tiles() -> Tensor:
        kind = scheme.bits, scheme.group, scheme.offset
        if not kernels.ready():
            return pack_rows(rows, shape)
        out = torch.empty(-(-shape[0] // TILE), tile_bytes(shape[1], *kind), dtype=torch.uint8)
        for part in _pieces(shape, PIECE):
            packed = kernels.round_to_tiles(read(part), _clips(scheme), *kind)
            _check_finite(scales_of(packed, shape[1], *kind))
            out[part.start // TILE : -(-part.stop // TILE)] = packed
        return out

    return Integers(shape, scheme.bits, scheme.group, scheme.offset, rows, tiles)


def taken(
    rows: Callable[[slice], Blocks], shape: tuple[int, int], tiles: Callable[[], Tensor] | None = None
) -> Integers:
    """A weight that is stored as integers, taken as it is."""
    first = rows(slice(0, 1))
    return Integers(
        shape, first.bits, first.group, first.offset is not None, rows, tiles or (lambda: pack_rows(rows, shape))
    )


def pack_rows(rows: Callable[[slice], Blocks], shape: tuple[int, int]) -> Tensor:
    """`pack`, piece by piece, so that besides the packed weight only a part of it is in memory."""
    first, *others = _pieces(shape, PIECE)
    packed = pack(rows(first))
    out = packed.new_empty(-(-shape[0] // TILE), packed.shape[1])
    out[: len(packed)] = packed
    for part in others:
        out[part.start // TILE : -(-part.stop // TILE)] = pack(rows(part))
    return out


def _pieces(shape: tuple[int, int], entries: int) -> list[slice]:
    """The rows of a weight in slices of so many entries, whole tiles."""
    rows, columns = shape
    step = max(TILE, entries // columns // TILE * TILE)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


# ------------------------------------------------------------------------------------------------------- layers
class TileLinear(nn.Module):
    """A linear layer over packed tiles, for a CPU with the kernels: for one row or many the same integers.

    The result has the dtype of x. `weight` unpacks the whole matrix; look, don't compute with it.
    """

    tiles: Tensor
    bias: Tensor | None

    def __init__(self, tiles: Tensor, shape: tuple[int, int], bits: int, group: int, offset: bool, bias: Tensor | None):
        super().__init__()
        self.out_features, self.in_features = shape
        self.bits, self.group, self.offset = bits, group, offset
        self.register_buffer("tiles", tiles)
        self.register_buffer("bias", bias)

    @property
    def blocks(self) -> Blocks:
        return unpack(self.tiles, self.out_features, self.in_features, self.bits, self.group, self.offset)

    @property
    def weight(self) -> Tensor:
        """(out, in) float32."""
        return self.blocks.weight

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        y = kernels.linear_blocks(x, self.tiles, self.bits, self.group, self.offset, self.out_features)
        return y if self.bias is None else y + self.bias


class TileEmbedding(nn.Module):
    """An embedding over packed tiles; with tied weights they are the very tiles of the output layer."""

    tiles: Tensor

    def __init__(self, output: TileLinear, dtype: torch.dtype):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.dtype = output.out_features, output.in_features, dtype
        self.bits, self.group, self.offset = output.bits, output.group, output.offset
        self.register_buffer("tiles", output.tiles)

    @property
    def weight(self) -> Tensor:
        """(V, C) float32."""
        return unpack(self.tiles, self.num_embeddings, self.embedding_dim, self.bits, self.group, self.offset).weight

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, C)
        ids = tokens.flatten()  # (n,)
        if int(ids.min()) < 0 or int(ids.max()) >= self.num_embeddings:
            raise IndexError(f"token ids must lie between 0 and {self.num_embeddings - 1}")
        rows = unpack_rows(self.tiles, ids, self.embedding_dim, self.bits, self.group, self.offset)  # (n, C)
        return rows.view(*tokens.shape, -1).to(self.dtype)


class BlockLinear(nn.Module):
    """A linear layer over integers in triton_kernels' order: for a GPU, and to check the others.

    One row on a CUDA device goes to that kernel. All else multiplies by the weight in x's dtype.
    """

    quants: Tensor
    scale: Tensor
    offset: Tensor | None
    bias: Tensor | None

    def __init__(self, blocks: Blocks, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = blocks.quants.shape
        self.bits, self.group = blocks.bits, blocks.group or -(-self.in_features // 8) * 8
        missing = -self.in_features % self.group if blocks.group or self.bits == 4 else 0
        quants = F.pad(blocks.quants, (0, missing))  # whole groups
        if self.bits == 4:  # word w of a group holds its inputs w, w + group / 8, w + 2 group / 8, ...
            nibbles = quants.view(len(quants), -1, 4, 2, self.group // 8)  # (N, groups, byte, half, word)
            whole = nibbles[:, :, :, 0] | nibbles[:, :, :, 1] << 4  # (N, groups, byte, word)
            quants = whole.transpose(-1, -2).contiguous().view(torch.int32).flatten(1)  # (N, groups * group / 8)
        self.register_buffer("quants", quants)
        self.register_buffer("scale", _narrow(blocks.scale))  # (N, groups)
        self.register_buffer("offset", None if blocks.offset is None else _narrow(blocks.offset))
        self.register_buffer("bias", bias)

    @property
    def weight(self) -> Tensor:
        """(out, in) float32."""
        return self._numbers(self.quants, self.scale, self.offset)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight: index (..) -> (.., in) float32."""
        return self._numbers(self.quants[index], self.scale[index], None if self.offset is None else self.offset[index])

    def _numbers(self, quants: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        if self.bits == 4:
            bytes = quants.view(torch.uint8).unflatten(-1, (-1, self.group // 8, 4))  # (.., groups, word, byte)
            halves = torch.stack((bytes & 15, bytes >> 4), dim=-1).flatten(-2)  # (.., groups, word, 8)
            quants = halves.transpose(-1, -2).flatten(-3)
        scale = scale.float().unsqueeze(-1)  # (.., groups, 1)
        offset = -(2.0 ** (self.bits - 1)) * scale if offset is None else offset.float().unsqueeze(-1)
        numbers = quants.unflatten(-1, (scale.shape[-2], -1)).float() * scale + offset  # (.., groups, group)
        return numbers.flatten(-2)[..., : self.in_features]

    @property
    def packed(self) -> Weight:
        """As triton_kernels takes it."""
        numbers = self.scale, self.offset, self.bias
        return Weight(self.quants, *numbers, self.out_features, self.in_features, self.bits, self.group)

    def _apply(self, fn: Any, recurse: bool = True) -> BlockLinear:
        """Move to another device; a cast of the model leaves scales as they are, since they belong to the integers."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer.view(torch.uint8)).view(buffer.dtype)  # bytes are not cast
        return self

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        if x.is_cuda and x.numel() == self.in_features and triton_kernels.serves(self.packed):
            y = x.new_empty(*x.shape[:-1], self.out_features)
            triton_kernels.linear(self.packed, x.contiguous(), y)
            return y
        y = F.linear(x, self.weight.to(x.dtype))
        return y if self.bias is None else y + self.bias


def _narrow(scales: Tensor) -> Tensor:
    """In 16 bits where nothing is lost, as for the scales of groups that were rounded here."""
    half = scales.half()
    return half if torch.equal(half.float(), scales.float()) else scales


class BlockEmbedding(nn.Module):
    """An embedding that takes its rows out of a tied BlockLinear."""

    def __init__(self, output: BlockLinear, dtype: torch.dtype):
        super().__init__()
        self._output, self.dtype = (output,), dtype  # in a tuple, so that it counts as the output layer's alone

    @property
    def weight(self) -> Tensor:
        """(V, C) float32."""
        return self._output[0].weight

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, C)
        return self._output[0].rows(tokens).to(self.dtype)


class TorchInt4Linear(nn.Module):
    """4 bits by torch's own kernel for CPUs: what is left without a compiler. Scales are rounded to bfloat16."""

    def __init__(self, blocks: Blocks):
        super().__init__()
        self.out_features, self.in_features = blocks.quants.shape
        self.group = blocks.group
        # Not buffers: a cast of the model must not touch them.
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(blocks.quants.int(), 1)
        offset = -8 * blocks.scale if blocks.offset is None else blocks.offset
        # The kernel computes (quant - 8) * scale + zero.
        scales = torch.stack((blocks.scale, offset + 8 * blocks.scale), -1)  # (N, groups, 2)
        self._scales = scales.transpose(0, 1).contiguous().bfloat16()

    @property
    def weight(self) -> Tensor:
        """(out, in) bfloat16: the layer's answers to every unit vector."""
        return self(torch.eye(self.in_features, dtype=torch.bfloat16)).mT.contiguous()

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        rows = x.reshape(-1, self.in_features).bfloat16().contiguous()
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._packed, self.group, self._scales)
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)


class TorchInt8Linear(nn.Module):
    """8 bits with a scale for each row, by torch's own kernel for CPUs: what is left without a compiler."""

    def __init__(self, blocks: Blocks):
        super().__init__()
        self.out_features, self.in_features = blocks.quants.shape
        self._quants = (blocks.quants.int() - 128).to(torch.int8)
        self._scale = blocks.scale[:, 0].bfloat16()

    @property
    def weight(self) -> Tensor:
        """(out, in) float32."""
        return self._quants.float() * self._scale[:, None].float()

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        rows = x.reshape(-1, self.in_features).bfloat16().contiguous()
        y: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self._quants, self._scale)
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)


def linear_of(weight: Integers, device: torch.device, bias: Tensor | None = None) -> nn.Module | None:
    """The layer that computes with a weight of few bits on a device; None where nothing beats bfloat16 there."""
    rows, columns = weight.shape
    bits, group, offset = weight.bits, weight.group, weight.offset
    if device.type == "cpu" and kernels.ready():
        return TileLinear(weight.tiles(), weight.shape, bits, group, offset, bias)
    int4 = bits == 4 and rows % 16 == 0 and group in (32, 64, 128) and columns % group == 0
    int8 = bits == 8 and not group and not offset
    runs = int8 or (int4 and torch.cpu._is_avx512_supported())
    if device.type == "cpu" and (bias is not None or not runs):
        return None
    parts = [weight.rows(part) for part in _pieces(weight.shape, PIECE)]
    blocks = Blocks(
        torch.cat([part.quants for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat([part.offset for part in parts if part.offset is not None]) if offset else None,
        bits,
        group,
    )
    if device.type != "cpu":
        return BlockLinear(blocks, bias).to(device)
    return TorchInt4Linear(blocks) if int4 else TorchInt8Linear(blocks)


def quantize_(model: Transformer, scheme: str) -> Transformer:
    """Replace every nn.Linear of a model by the layer for a scheme; tied embeddings then read the output's integers.

    In place; returns the model. Raises UsageError for an unknown scheme, or one that nothing here computes with.
    """
    chosen = pick_scheme(scheme)
    for name, linear in [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]:
        weight = linear.weight.detach()
        read = functools.partial(_rows_of, weight)
        shape = linear.out_features, linear.in_features
        layer = linear_of(rounded(read, shape, scheme_for(name, chosen)), weight.device, linear.bias)
        if layer is None:
            raise UsageError(f"{scheme} needs the C++ kernels on this CPU; see the message about them, or leave it out")
        tied = name == "output" and weight.data_ptr() == model.tok_embeddings.weight.data_ptr()
        model.set_submodule(name, layer)
        if tied and (embedding := embedding_of(layer, weight.dtype)):
            model.tok_embeddings = embedding  # type: ignore[assignment]
    return model


def _rows_of(weight: Tensor, rows: slice) -> Tensor:
    return weight[rows].cpu()


def embedding_of(output: nn.Module, dtype: torch.dtype) -> nn.Module | None:
    """The embedding that reads a tied output layer's integers, or None where they are packed beyond reach."""
    if isinstance(output, TileLinear):
        return TileEmbedding(output, dtype)
    return BlockEmbedding(output, dtype) if isinstance(output, BlockLinear) else None


def told(model: nn.Module) -> str:
    """What of a model is held in few bits, for people: ' with weights of 4 bits', or nothing."""
    bits = {module.bits for module in model.modules() if isinstance(module, TileLinear | BlockLinear)}
    bits |= {4 for module in model.modules() if isinstance(module, TorchInt4Linear)}
    bits |= {8 for module in model.modules() if isinstance(module, TorchInt8Linear)}
    return f" with weights of {' and '.join(map(str, sorted(bits)))} bits" if bits else ""
