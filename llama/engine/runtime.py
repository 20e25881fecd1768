"""Decisions about the machine: device, dtype, threads, and the layout of weights that its kernels like best."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UsageError
from . import kernels

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def pick_device(name: str | torch.device | None = None) -> torch.device:
    """The device of that name, or the best one there is. Raises UsageError naming those that exist."""
    here = ["cpu"]
    if torch.cuda.is_available():
        here = [f"cuda:{i}" for i in range(torch.cuda.device_count())] + here
    if torch.backends.mps.is_available():
        here = ["mps", *here]
    if name is None or str(name) == "auto":
        return torch.device(here[0])
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise UsageError(f"{name!r} is not a device; available here: {', '.join(here)}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if not any(h == str(device) or h.split(":")[0] == str(device) for h in here):
        raise UsageError(f"device {str(device)!r} is not available; available here: {', '.join(here)}")
    return device


def pick_dtype(name: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of that name, or the fastest the device computes in: bfloat16 where it has instructions for it.

    Half the bytes are half the time of a decoding step, which does little but read the weights.
    """
    if isinstance(name, torch.dtype):
        if name not in DTYPES.values():
            raise UsageError(f"dtype {name} is not supported; supported: float32, bfloat16, float16")
        return name
    if name is not None and name != "auto":
        if name not in DTYPES:
            raise UsageError(f"unknown dtype {name!r}; known: auto, {', '.join(DTYPES)}")
        if DTYPES[name] == torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise UsageError(f"{device} can't compute in bfloat16; take --dtype float16, or leave it out")
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if device.type == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16


def set_threads(count: int | None) -> None:
    """Use this many threads for one operation; None leaves torch's choice, one for each core it may use."""
    if count is None:
        return
    most = max(64, 4 * (os.cpu_count() or 1))
    if not 1 <= count <= most:
        raise UsageError(f"threads must be a whole number from 1 to {most}, got {count}")
    torch.set_num_threads(count)


class FewRowsLinear(nn.Module):
    """A linear layer in bfloat16 over a plain weight, which may lie in a mapped file: few rows go to the C++ kernel.

    One row at a time is decoding, and there the kernel reads weights as fast as the memory gives them. Many rows are
    F.linear's business.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        if x.numel() <= FEW_ROWS * self.in_features and x.dtype == torch.bfloat16:
            return kernels.linear_bf16(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


FEW_ROWS = 4  # the kernel reads the weight once for up to 4 rows


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's blocked order, as its bfloat16 kernels for the CPU read it.

    F.linear with a plain weight reads it row by row; in blocked order the same product of one row ran 1.3 to 2
    times as fast on AVX-512 (docs/benchmarks). The numbers are the same up to the order of summation. `weight` is
    still there to be read: it is unpacked on demand.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """The weight in plain order, (out, in)."""
        plain: Tensor = self._packed.to_dense()
        return plain

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        raise UsageError(
            "the weights of a model from llama.load lie in packed form and can't be moved or cast; name device and"
            " dtype when loading, or take llama.load_model, whose weights are plain"
        )

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y


def pick_linear(device: torch.device, dtype: torch.dtype) -> Callable[[Tensor, Tensor | None], nn.Module] | None:
    """What makes the fastest linear layer of a plain weight and bias here; None: nn.Linear is."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return None
    if kernels.ready():
        return FewRowsLinear
    return PackedLinear if _packs() else None


def _packs() -> bool:
    """Whether PackedLinear runs here: a torch built with oneDNN, and results like F.linear's."""
    if not torch.backends.mkldnn.is_available():
        return False
    with torch.inference_mode():
        x, weight = torch.ones(1, 32, dtype=torch.bfloat16), torch.arange(512).bfloat16().view(16, 32) / 512
        try:
            return torch.allclose(PackedLinear(weight)(x), F.linear(x, weight), rtol=0.05, atol=0.05)
        except (AttributeError, RuntimeError):  # the operators are torch's own business and may change
            return False


def pick_attention(device: torch.device) -> str:
    """The fastest of attention.ATTENTION here."""
    return "kernel" if device.type == "cpu" and kernels.ready() else "sdpa"
