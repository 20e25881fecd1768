"""The linear layers and embeddings that replace nn.Linear and nn.Embedding, and the functions that choose one.

A decoding step spends most of its time on reading weights, so a quarter of the bytes takes about a quarter of the time.

    nn.Linear      any device and dtype; PyTorch
    FewRowsLinear  bfloat16 on a CPU; a C++ kernel for a few rows, with AMX for any number
    TileLinear     2 to 8 bits on a CPU; a C++ kernel for any number of rows
    BlockLinear    4 or 8 bits on a GPU; a Triton kernel for one row; for more, one that dequantizes the weight
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import UsageError
from ..model import Transformer
from ..quant.blocks import BlockFormat, Blocks
from ..quant.schemes import pick_scheme, scheme_for
from ..quant.tiles import unpack, unpack_rows
from . import kernels, triton_kernels
from .quantized_weight import QuantizedWeight
from .triton_kernels import Weight

FEW_ROWS = 4  # the kernel reads the weight once for up to 4 rows


class FewRowsLinear(nn.Module):
    """A linear layer in bfloat16 on a CPU; its weight may be in a mapped file.

    Few rows go to a C++ kernel, which reads the weight as fast as the memory allows. More rows go to F.linear, unless
    the kernels use AMX.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)  # the kernel ignores strides
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.any_rows = kernels.has_tiles()

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        few = self.any_rows or x.numel() <= FEW_ROWS * self.in_features
        if few and x.dtype == self.weight.dtype == torch.bfloat16 and not _records(x, self.weight):
            return kernels.linear_bf16(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bfloat16"


def _records(*tensors: Tensor) -> bool:
    """Whether PyTorch records operations on these tensors for a gradient. The C++ kernels have no derivatives."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class TileLinear(nn.Module):
    """A quantized linear layer for a CPU with the C++ kernels; its weight is packed in tiles (quant/tiles.py).

    The result has the dtype of x. `weight` unpacks the complete matrix; it is for inspection, not for computing.
    """

    tiles: Tensor
    bias: Tensor | None

    def __init__(self, tiles: Tensor, shape: tuple[int, int], format: BlockFormat, bias: Tensor | None):
        super().__init__()
        self.out_features, self.in_features = shape
        self.format, self.bits = format, format.bits
        self.register_buffer("tiles", tiles)
        self.register_buffer("bias", bias)

    @property
    def blocks(self) -> Blocks:
        """The weight, unpacked."""
        return unpack(self.tiles, self.out_features, self.in_features, self.format)

    @property
    def weight(self) -> Tensor:
        """(out, in) float32."""
        return self.blocks.weight

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.format}"

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        if _records(x):
            raise UsageError(
                "layers with packed weights have no gradients; load the model with llama.load_model, or use"
                " torch.no_grad"
            )
        y = kernels.linear_blocks(x, self.tiles, self.format, self.out_features)
        return y if self.bias is None else y + self.bias


class TileEmbedding(nn.Module):
    """A quantized embedding; with tied weights it shares the tiles of the output layer."""

    tiles: Tensor

    def __init__(self, output: TileLinear, dtype: torch.dtype):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.dtype = output.out_features, output.in_features, dtype
        self.format = output.format
        self.register_buffer("tiles", output.tiles)

    @property
    def blocks(self) -> Blocks:
        """The weight, unpacked."""
        return unpack(self.tiles, self.num_embeddings, self.embedding_dim, self.format)

    @property
    def weight(self) -> Tensor:
        """(V, C) float32."""
        return self.blocks.weight

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, C)
        ids = tokens.flatten()  # (n,)
        if int(ids.min()) < 0 or int(ids.max()) >= self.num_embeddings:
            raise IndexError(f"token ids must lie between 0 and {self.num_embeddings - 1}")
        rows = unpack_rows(self.tiles, ids, self.embedding_dim, self.format)  # (n, C)
        return rows.view(*tokens.shape, -1).to(self.dtype)


class BlockLinear(nn.Module):
    """A quantized linear layer in the layout of triton_kernels: for a GPU, and the reference for the other layers.

    On a CUDA device, one Triton kernel multiplies a single row. For several rows or small groups, another dequantizes
    the weight to x's dtype. In all other cases PyTorch dequantizes the weight.
    """

    quants: Tensor
    scale: Tensor
    offset: Tensor | None
    bias: Tensor | None

    def __init__(self, blocks: Blocks, bias: Tensor | None = None):
        super().__init__()
        blocks = blocks.simple
        self.out_features, self.in_features = blocks.quants.shape
        self.bits, self.group = blocks.bits, blocks.group or -(-self.in_features // 8) * 8
        missing = -self.in_features % self.group if blocks.group or self.bits == 4 else 0
        quants = F.pad(blocks.quants, (0, missing))  # complete groups
        if self.bits == 4:  # word w of a group holds its inputs w, w + group / 8, w + 2 group / 8, ...
            nibbles = quants.view(len(quants), -1, 4, 2, self.group // 8)  # (N, groups, byte, half, word)
            bytes = nibbles[:, :, :, 0] | nibbles[:, :, :, 1] << 4  # (N, groups, byte, word)
            quants = bytes.transpose(-1, -2).contiguous().view(torch.int32).flatten(1)  # (N, groups * group / 8)
        self.register_buffer("quants", quants)
        self.register_buffer("scale", _narrow(blocks.scale))  # (N, groups)
        self.register_buffer("offset", None if blocks.offset is None else _narrow(blocks.offset))
        self.register_buffer("bias", bias)

    @property
    def weight(self) -> Tensor:
        """(out, in) float32."""
        return self._dequantized(self.quants, self.scale, self.offset)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight: index (..) -> (.., in) float32."""
        offset = None if self.offset is None else self.offset[index]
        return self._dequantized(self.quants[index], self.scale[index], offset)

    def _dequantized(self, quants: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        if self.bits == 4:
            bytes = quants.view(torch.uint8).unflatten(-1, (-1, self.group // 8, 4))  # (.., groups, word, byte)
            halves = torch.stack((bytes & 15, bytes >> 4), dim=-1).flatten(-2)  # (.., groups, word, 8)
            quants = halves.transpose(-1, -2).flatten(-3)
        scale = scale.float().unsqueeze(-1)  # (.., groups, 1)
        offset = -(2.0 ** (self.bits - 1)) * scale if offset is None else offset.float().unsqueeze(-1)
        weight = quants.unflatten(-1, (scale.shape[-2], -1)).float() * scale + offset  # (.., groups, group)
        return weight.flatten(-2)[..., : self.in_features]

    @property
    def packed(self) -> Weight:
        """The weight in the form that triton_kernels expects."""
        size = self.out_features, self.in_features
        return Weight(self.quants, self.scale, self.offset, self.bias, *size, self.bits, self.group)

    def _apply(self, fn: Any, recurse: bool = True) -> BlockLinear:
        """Move to another device. A cast of the model leaves the scales unchanged, since they belong to the quants."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer.view(torch.uint8)).view(buffer.dtype)  # a cast does not apply to bytes
        return self

    def extra_repr(self) -> str:
        group = f"g{self.group}" if self.scale.shape[-1] > 1 else "row"
        return f"in_features={self.in_features}, out_features={self.out_features}, int{self.bits}-{group}"

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        if x.is_cuda and x.numel() == self.in_features and triton_kernels.supports(self.packed):
            y = x.new_empty(*x.shape[:-1], self.out_features)
            return triton_kernels.linear(self.packed, x.contiguous(), y)
        by_kernel = x.is_cuda and triton_kernels.unpacks(self.packed)
        y = F.linear(x, triton_kernels.unpack(self.packed, x.dtype) if by_kernel else self.weight.to(x.dtype))
        return y if self.bias is None else y + self.bias


def _narrow(scales: Tensor) -> Tensor:
    """Convert to float16 if that is exact, as it is for scales that `quantize` computed."""
    half = scales.half()
    return half if torch.equal(half.float(), scales.float()) else scales


class BlockEmbedding(nn.Module):
    """An embedding that reads the rows of a tied BlockLinear."""

    def __init__(self, output: BlockLinear, dtype: torch.dtype):
        super().__init__()
        self._output, self.dtype = (output,), dtype  # in a tuple, so that it is not a submodule of the embedding too

    @property
    def output(self) -> BlockLinear:
        """The tied output layer."""
        return self._output[0]

    @property
    def weight(self) -> Tensor:
        """(V, C) float32."""
        return self.output.weight

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, C)
        return self.output.rows(tokens).to(self.dtype)


# ------------------------------------------------------------------------------------------------------- the choice
class SkipInit(TorchFunctionMode):
    """Skips random initialization: all weights are replaced, and the first draw on the meta device takes a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.normal_, nn.init.kaiming_uniform_):  # called by nn.Embedding and nn.Linear
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def make_linear(
    weight: Tensor | QuantizedWeight, device: torch.device, bias: Tensor | None = None, plain: bool = False
) -> nn.Module:
    """The fastest linear layer for a weight (out, in) on a device; plain: nn.Linear for every float weight.

    Quantized weights on a CPU require the C++ kernels (`computes_quantized`).
    """
    if isinstance(weight, QuantizedWeight):
        if device.type == "cpu":
            return TileLinear(weight.tiles(), weight.shape, weight.format, bias)
        return BlockLinear(weight.blocks(device), bias).to(device)
    if not plain and device.type == "cpu" and weight.dtype == torch.bfloat16 and kernels.ready():
        return FewRowsLinear(weight, bias)
    rows, columns = weight.shape
    with SkipInit():
        layer = nn.Linear(columns, rows, bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def make_embedding(output: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The embedding that shares the weight of an output layer from `make_linear` and returns rows in `dtype`."""
    if isinstance(output, TileLinear):
        return TileEmbedding(output, dtype)
    if isinstance(output, BlockLinear):
        return BlockEmbedding(output, dtype)
    weight: Any = output.weight
    embedding = nn.Embedding.from_pretrained(weight)
    embedding.weight = weight  # the same parameter, not only the same memory
    return embedding


def kept_format(blocks: Blocks, device: torch.device) -> BlockFormat | None:
    """The format in which a device computes with a file's quantized weight; None if it is dequantized there.

    blocks  one row of the weight is enough
    """
    if device.type == "cpu":
        return blocks.format if kernels.ready() else None
    return gpu_format(blocks) if device.type == "cuda" and triton_kernels.ready() else None


def gpu_format(blocks: Blocks) -> BlockFormat | None:
    """The format of a BlockLinear that one Triton kernel multiplies by one row; None if the kernel can't.

    Other formats would be dequantized for every token, which takes longer than reading a dequantized weight.
    """
    format = blocks.simple.format
    groups = format.group >= 32 and format.group == triton_kernels.power_of_2(format.group)
    return format if groups or (format.bits == 8 and not format.group) else None


def computes_quantized(device: torch.device) -> bool:
    """Whether a device has layers for quantized weights."""
    return device.type != "cpu" or kernels.ready()


def quantize_(model: Transformer, scheme: str) -> Transformer:
    """Replace every nn.Linear of a model by a quantized layer, in place; returns the model.

    A tied embedding then shares the quantized weight of the output layer. Raises UsageError for an unknown scheme, or
    if the model's device has no layers for quantized weights.
    """
    chosen = pick_scheme(scheme)
    for name, linear in [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]:
        weight = linear.weight.detach()
        check_quantized(scheme, weight.device)
        tied = name == "output" and weight.data_ptr() == model.tok_embeddings.weight.data_ptr()
        quantized = QuantizedWeight.from_tensor(weight, scheme_for(name, chosen).format)
        layer = make_linear(quantized, weight.device, linear.bias)
        model.set_submodule(name, layer)
        if tied:
            model.set_submodule("tok_embeddings", make_embedding(layer, weight.dtype))
    return model


def check_quantized(scheme: str, device: torch.device) -> None:
    """Raise UsageError if a device has no layers for quantized weights."""
    if not computes_quantized(device):
        raise UsageError(
            f"quantize={scheme!r} (--quantize) requires the C++ kernels on this CPU, and they are not available"
            " (`clearllama doctor` shows the reason); install a C++ compiler, or leave quantize out"
        )


def describe_quantization(model: nn.Module) -> str:
    """'4/8-bit' for a model with quantized weights of 4 and of 8 bits; '' for one without."""
    bits = {module.bits for module in model.modules() if isinstance(module, TileLinear | BlockLinear)}
    return f"{'/'.join(map(str, sorted(bits)))}-bit" if bits else ""
