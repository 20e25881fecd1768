"""Dequantization of the 4-bit files of Llama 3.2 (QLoRA and SpinQuant).

Linear layers of the blocks are 4-bit integers in int8 with one scale per group of a row; embedding and output are int8
with one scale per row. QLoRA adds a low-rank product. Meta's code also quantizes the activations to 8 bits; this code
does not, so its results are closer to the unquantized model. Source: llama-models, quantization/loader.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checks import is_number
from ..errors import CheckpointError

SCHEME = "int4_weight_int8_dynamic_activation"
SUFFIXES = (".weight", ".scales", ".zeros", ".adaptor.A.weight", ".adaptor.B.weight")


def dequantize(shard: Mapping[str, Tensor], name: str, params: Mapping[str, Any], where: str) -> Tensor:
    """(quants - zeros) * scales + lora_scale * B A, for the layer `name` of a shard: (out, in) float32."""
    arguments = params.get("quantization_args")
    if not isinstance(arguments, Mapping) or arguments.get("scheme") != SCHEME:
        raise CheckpointError(
            f"{where}: {name} is int8, but quantization_args.scheme in params.json is not {SCHEME}; params.json belongs"
            " to another model, download it again"
        )
    quants, scales = shard[f"{name}.weight"].float(), shard[f"{name}.scales"].float()
    out, width = quants.shape
    if out == 0 or scales.numel() % out or width % (scales.numel() // out or 1):
        raise CheckpointError(
            f"{where}: {name} has {scales.numel()} scales for {out} rows of {width}; the file is damaged, download it"
            " again"
        )
    groups = quants.reshape(out, scales.numel() // out, -1)  # (out, groups, width / groups)
    try:
        return _combine(groups, scales, shard, name, params, where)
    except RuntimeError as error:
        text = " ".join(str(error).split())[:120]
        raise CheckpointError(
            f"{where}: the shapes of the parts of {name} do not match ({text}); the file is damaged, download it again"
        ) from None


def _combine(
    groups: Tensor, scales: Tensor, shard: Mapping[str, Tensor], name: str, params: Mapping[str, Any], where: str
) -> Tensor:
    out, width = len(groups), groups.shape[1] * groups.shape[2]
    zeros = shard.get(f"{name}.zeros")
    if zeros is not None:
        groups = groups - zeros.float().reshape(out, -1, 1)
    weight = (groups * scales.reshape(out, -1, 1)).reshape(out, width)
    down, up = shard.get(f"{name}.adaptor.A.weight"), shard.get(f"{name}.adaptor.B.weight")
    if down is None or up is None:
        return weight
    lora = params.get("lora_args")
    scale = lora.get("scale") if isinstance(lora, Mapping) else None
    if not is_number(scale):
        raise CheckpointError(
            f"{where}: {name} has a low-rank part, but params.json has no lora_args.scale; params.json belongs to"
            " another model, download it again"
        )
    return weight + scale * (up.float() @ down.float())


def hadamard(x: Tensor) -> Tensor:
    """x H along the last axis, H the orthonormal Hadamard matrix in Sylvester's order; the length is a power of two."""
    n = x.shape[-1]
    if n & (n - 1):
        raise CheckpointError(f"the size of Sylvester's Hadamard matrix must be a power of two, got {n}")
    y, half = x.float(), 1
    while half < n:
        a, b = y.unflatten(-1, (-1, 2, half)).unbind(-2)  # neighbouring blocks
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return y / n**0.5
