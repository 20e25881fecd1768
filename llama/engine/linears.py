"""The linear layers and embeddings that replace nn.Linear and nn.Embedding, and the functions that choose one.

A decoding step spends most of its time on reading weights, so a quarter of the bytes takes about a quarter of the time.

    nn.Linear      any device and dtype; PyTorch
    FewRowsLinear  16 bits on a CPU; a C++ kernel for a few rows; for any number with AMX, or if it computes in float32
    TileLinear     2 to 8 bits on a CPU; a C++ kernel for any number of rows
    Int4Linear     4 bits on a recent CUDA device; PyTorch's kernel
    GroupedLinear  4 or 8 bits on any other device; PyTorch, which dequantizes the weight in each pass
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..checkpoint.weight import Weight
from ..checks import dtype_name
from ..errors import UsageError
from ..quant.groups import GroupedWeight, GroupFormat
from ..quant.tiles import unpack
from . import kernels
from .packing import to_floats, to_groups, to_tiles

LOG = logging.getLogger(__name__)
FEW_ROWS = 4  # the kernel reads the weight once for up to 4 rows
HALVES = (torch.bfloat16, torch.float16)
DEQUANTIZED_ENTRIES = 2**26  # maximum entries that GroupedLinear dequantizes at a time


class FewRowsLinear(nn.Module):
    """A linear layer with a weight in 16 bits on a CPU; the weight may be in a mapped file.

    Few rows go to a C++ kernel, which reads the weight as fast as the memory allows. More rows go to F.linear, unless
    the kernels use AMX. On processors without bfloat16, the kernel multiplies any number of rows in float32: x has the
    model's dtype, the weight is bfloat16 or float16, and widening the weight is exact.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)  # the kernel ignores strides
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.widens = kernels.widen()
        self.any_rows = self.widens or kernels.has_tiles()

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        few = self.any_rows or x.numel() <= FEW_ROWS * self.in_features
        known = self.weight.dtype in HALVES if self.widens else x.dtype == self.weight.dtype == torch.bfloat16
        if few and known and x.dtype in (torch.float32, *HALVES) and not _records(x, self.weight):
            return kernels.linear_bf16(x, self.weight, self.bias)
        with kernels.all_threads():
            return F.linear(x, self.weight.to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        dtype = dtype_name(self.weight.dtype)
        return f"in_features={self.in_features}, out_features={self.out_features}, {dtype}"


def _records(*tensors: Tensor) -> bool:
    """Whether PyTorch records operations on these tensors for a gradient. The C++ kernels have no derivatives."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class QuantizedLinear(nn.Module):
    """A linear layer in 2 to 8 bits. The result has the dtype of x. Subclasses have the weight and the product."""

    bias: Tensor | None
    product: Callable[[Tensor], Tensor]  # (.., in) -> (.., out) in the dtype of x, without the bias
    dequantized: Callable[[], Tensor]  # (out, in) float32

    def __init__(self, shape: Sequence[int], format: GroupFormat, bias: Tensor | None):
        super().__init__()
        (self.out_features, self.in_features), self.format, self.bits = shape, format, format.bits
        self.register_buffer("bias", bias)

    @property
    def weight(self) -> Tensor:
        """The complete weight (out, in) in float32, for inspection. It is a copy, which PyTorch refuses to change."""
        with torch.inference_mode():
            return self.dequantized()

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        y = self.product(x)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.format}"


class TileLinear(QuantizedLinear):
    """A quantized linear layer for a CPU with the C++ kernels; its weight is packed in tiles (quant/tiles.py)."""

    tiles: Tensor

    def __init__(self, tiles: Tensor, shape: tuple[int, int], format: GroupFormat, bias: Tensor | None):
        super().__init__(shape, format, bias)
        self.register_buffer("tiles", tiles)

    @property
    def groups(self) -> GroupedWeight:
        """The weight, unpacked."""
        return unpack(self.tiles, self.out_features, self.in_features, self.format)

    def dequantized(self) -> Tensor:
        return self.groups.weight

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight: index (..) -> (.., in) float32."""
        shape = self.out_features, self.in_features
        return kernels.rows_of_tiles(self.tiles, index.flatten(), shape, self.format).view(*index.shape, -1)

    def product(self, x: Tensor) -> Tensor:
        if _records(x):
            raise UsageError(
                "layers with packed weights have no gradients; load the model with llama.load_model, or use"
                " torch.no_grad"
            )
        return kernels.linear_tiles(x, self.tiles, self.format, self.out_features)


class GroupedLinear(QuantizedLinear):
    """A quantized linear layer for a GPU in plain PyTorch, in 4 or 8 bits; the reference for the other layers.

    Each pass dequantizes the weight. Compiled code (engine/compiled.py) dequantizes inside the product with one row, so
    that it reads only the packed weight; otherwise at most 2^26 dequantized entries are in memory at a time.
    """

    quants: Tensor
    scale: Tensor
    offset: Tensor | None

    def __init__(self, groups: GroupedWeight, bias: Tensor | None = None):
        groups = groups.simple
        super().__init__(groups.quants.shape, groups.format, bias)
        self.group = groups.group or self.in_features + self.in_features % 2
        quants = F.pad(groups.quants, (0, -self.in_features % self.group))  # pad to complete groups
        self.register_buffer("quants", two_per_byte(quants) if self.bits == 4 else quants)  # (N, ..)
        self.register_buffer("scale", _narrow(groups.scale))  # (N, groups)
        self.register_buffer("offset", None if groups.offset is None else _narrow(groups.offset))

    def dequantized(self) -> Tensor:
        return self.rows(slice(None))

    def rows(self, index: Tensor | slice) -> Tensor:
        """Rows of the weight: index (..) -> (.., in) float32."""
        quants, scale = self.quants[index], self.scale[index].float().unsqueeze(-1)  # (.., groups, 1)
        if self.bits == 4:
            quants = torch.stack((quants >> 4, quants & 15), dim=-1).flatten(-2)
        middle = -(2.0 ** (self.bits - 1)) * scale
        offset = middle if self.offset is None else self.offset[index].float().unsqueeze(-1)
        weight = quants.unflatten(-1, (-1, self.group)).float() * scale + offset  # (.., groups, group)
        return weight.flatten(-2)[..., : self.in_features]

    def _apply(self, fn: Any, recurse: bool = True) -> GroupedLinear:
        """Move to another device. A cast of the model leaves the scales unchanged, since they belong to the quants."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer.view(torch.uint8)).view(buffer.dtype)  # a cast does not apply to bytes
        return self

    def product(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and x.numel() == self.in_features:
            y = (self.dequantized() * x.float().flatten()).sum(-1)  # fused into one kernel
            return y.to(x.dtype).reshape(*x.shape[:-1], -1)
        step = max(1, DEQUANTIZED_ENTRIES // self.in_features)
        parts = [slice(first, first + step) for first in range(0, self.out_features, step)]
        return torch.cat([F.linear(x, self.rows(part).to(x.dtype)) for part in parts], dim=-1)


def two_per_byte(quants: Tensor) -> Tensor:
    """Pack integers of 4 bits (N, K) in bytes (N, K / 2): even columns in the high halves."""
    return quants[:, ::2] << 4 | quants[:, 1::2]


def _narrow(scales: Tensor) -> Tensor:
    """Convert to float16 if exact, as for scales of `quantize`. `_apply` needs them contiguous, to view as bytes."""
    half = scales.half()
    return (half if torch.equal(half.float(), scales.float()) else scales).contiguous()


class Int4Linear(QuantizedLinear):
    """A linear layer in 4 bits for a CUDA device, with PyTorch's own kernel, which is fastest for few rows.

    The kernel computes in bfloat16, scales included. `has_int4_kernel` says what it supports.
    """

    packed: Tensor
    scale_and_zero: Tensor

    def __init__(self, groups: GroupedWeight, bias: Tensor | None = None):
        super().__init__(groups.quants.shape, groups.format, bias)
        inner_tiles = next(tiles for tiles in (8, 4, 2) if self.in_features % (16 * tiles) == 0)
        # The kernel's weight is (quant - 8) * scale + zero.
        zero = torch.zeros_like(groups.scale) if groups.offset is None else groups.offset + 8 * groups.scale
        pairs = torch.stack((groups.scale, zero), dim=-1).transpose(0, 1)  # (groups, N, 2)
        packed = torch.ops.aten._convert_weight_to_int4pack(two_per_byte(groups.quants), inner_tiles)
        self.register_buffer("packed", packed)
        self.register_buffer("scale_and_zero", pairs.to(torch.bfloat16).contiguous())

    def dequantized(self) -> Tensor:
        return self.product(torch.eye(self.in_features, dtype=torch.bfloat16, device=self.packed.device)).T.float()

    def product(self, x: Tensor) -> Tensor:
        rows, (_, group, *_) = x.flatten(0, -2).to(torch.bfloat16), self.format
        y: Tensor = torch.ops.aten._weight_int4pack_mm(rows, self.packed, group, self.scale_and_zero)
        return y.reshape(*x.shape[:-1], -1).to(x.dtype)


class HalfEmbedding(nn.Embedding):
    """An embedding in 16 bits of a model that computes in float32."""

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, C)
        return super().forward(tokens).float()


class QuantizedEmbedding(nn.Module):
    """An embedding that reads the rows of a quantized linear layer: the output layer, if the weights are tied."""

    def __init__(self, output: TileLinear | GroupedLinear, dtype: torch.dtype):
        super().__init__()
        self._output, self.dtype = (output,), dtype  # in a tuple, so that it is not a submodule of the embedding too
        self.register_buffer("tiles", getattr(output, "tiles", None))  # part of the model even if not tied

    @property
    def output(self) -> TileLinear | GroupedLinear:
        """The layer that has the weight."""
        return self._output[0]

    @property
    def weight(self) -> Tensor:
        """(V, C) float32."""
        return self.output.weight

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, C)
        return self.output.rows(tokens).to(self.dtype)


# ------------------------------------------------------------------------------------------------------- the choice
class SkipInit(TorchFunctionMode):
    """Skips random initialization: all weights are replaced, and the first draw on the meta device takes 1 s."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.normal_, nn.init.kaiming_uniform_):  # called by nn.Embedding and nn.Linear
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def make_linear(
    weight: Weight,
    device: torch.device,
    format: GroupFormat | torch.dtype,
    bias: Tensor | None = None,
    fast: bool = True,
) -> nn.Module:
    """The fastest linear layer for a weight (out, in) on a device. fast=False: nn.Linear for every float weight.

    Quantized weights on a CPU require the C++ kernels (`check_quantized`). Raises CheckpointError if the weight can't
    be stored in the format.
    """
    rows, columns = weight.shape
    if isinstance(format, GroupFormat):
        if device.type == "cpu":
            return TileLinear(to_tiles(weight, format), (rows, columns), format, bias)
        groups = to_groups(weight, format, device)
        if has_int4_kernel(format, (rows, columns), device):
            return Int4Linear(groups, bias)
        if groups.bits == 4:
            warn_of_dequantization(device)
        return GroupedLinear(groups, bias).to(device)
    values = to_floats(weight, device, format)
    kinds = () if not fast or device.type != "cpu" else HALVES if kernels.widen() else (torch.bfloat16,)
    if format in kinds and kernels.ready():
        return FewRowsLinear(values, bias)
    with SkipInit():
        layer = nn.Linear(columns, rows, bias=bias is not None, device="meta", dtype=format)
    layer.weight = nn.Parameter(values, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def make_embedding(output: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The embedding that shares the weight of an output layer from `make_linear` and returns rows in `dtype`."""
    if isinstance(output, TileLinear | GroupedLinear):
        return QuantizedEmbedding(output, dtype)
    weight: Any = output.weight
    if isinstance(output, Int4Linear):  # its kernel can't read single rows
        return nn.Embedding.from_pretrained(weight.to(dtype))
    kind = HalfEmbedding if dtype == torch.float32 and weight.dtype in HALVES else nn.Embedding
    embedding = kind.from_pretrained(weight)
    embedding.weight = weight  # the same parameter, not only the same memory
    return embedding


def has_int4_kernel(format: GroupFormat, shape: tuple[int, int], device: torch.device) -> bool:
    """Whether PyTorch's kernel for 4 bits supports a weight (N, K) on a device."""
    (rows, columns), groups = shape, (32, 64, 128, 256)
    if device.type != "cuda" or torch.version.cuda is None or format.bits != 4 or format.group not in groups:
        return False
    return rows % 8 == 0 and columns % format.group == 0 and torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def warn_of_dequantization(device: torch.device) -> None:
    """Log once that weights in 4 bits are slow on a device."""
    LOG.warning(
        "clearllama: %s has no kernel for some or all of these 4-bit weights, so each pass dequantizes them; int8 is"
        " faster here",
        device,
    )


def kept_format(format: GroupFormat, device: torch.device) -> GroupFormat | None:
    """The format in which a device computes with a file's quantized weight; None if the weight is dequantized there."""
    if device.type == "cpu":
        return format if kernels.ready() else None
    simple = format.bits in (4, 8) and format.group % 32 == 0 and not (format.codebook or format.levels)
    return format if simple and device.type == "cuda" else None


def kept_dtype(stored: torch.dtype, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of a float matrix on a device, in a model that computes in `dtype`.

    If a CPU needs a file's 16-bit weights in float32, each product widens them, with the same numbers as in advance.
    """
    widens = dtype == torch.float32 and device.type == "cpu" and kernels.widen()
    return stored if widens and stored in HALVES else dtype


def check_quantized(scheme: str, device: torch.device) -> None:
    """Raise UsageError if a device has no layers for quantized weights."""
    if device.type == "cpu" and not kernels.ready():
        raise UsageError(
            f"quantize={scheme!r} (--quantize) requires the C++ kernels on this CPU, and they are not available;"
            " run `clearllama doctor` for the reason, or leave quantize out"
        )


def describe_quantization(model: nn.Module) -> str:
    """'4/8-bit' for a model with quantized weights of 4 and of 8 bits; '' for a model without quantized weights."""
    bits = {module.bits for module in model.modules() if isinstance(module, QuantizedLinear)}
    return f"{'/'.join(map(str, sorted(bits)))}-bit" if bits else ""
