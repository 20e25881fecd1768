"""Dequantization of the 4-bit files of Llama 3.2 (QLoRA and SpinQuant).

Linear layers of the blocks are 4-bit integers in int8 with one scale per group of a row; embedding and output are int8
with one scale per row. QLoRA adds a low-rank product. Meta's code also quantizes the activations to 8 bits; this code
does not, so its results are closer to the unquantized model. Source: llama-models, quantization/loader.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError, DamagedError
from ..system.documents import Fields

SCHEME = "int4_weight_int8_dynamic_activation"
SUFFIXES = (".weight", ".scales", ".zeros", ".adaptor.A.weight", ".adaptor.B.weight")


def dequantize(shard: Mapping[str, Tensor], name: str, params: Fields, where: str) -> Tensor:
    """(quants - zeros) * scales + lora_scale * B A, for the layer `name` of a shard: (out, in) float32."""
    if (scheme := params.get("quantization_args", dict, {}).get("scheme")) != SCHEME:
        raise CheckpointError(f"{where}: {name} is int8, but quantization_args.scheme is {scheme!r:.60}, not {SCHEME}")
    quants, scales, zeros, down, up = (shard.get(name + suffix) for suffix in SUFFIXES)
    if quants is None or scales is None or (down is None) != (up is None):
        raise DamagedError(f"{where}: the scales of {name} or one of its two adaptors are missing")
    try:
        out, width = quants.shape
        groups = quants.float().reshape(out, scales.numel() // out, -1)  # (out, groups, width / groups)
        if zeros is not None:
            groups = groups - zeros.float().reshape(out, -1, 1)
        weight = (groups * scales.float().reshape(out, -1, 1)).reshape(out, width)
        if down is None or up is None:
            return weight
        scale = Fields(params.get("lora_args", dict, {}), f"{where}: lora_args").get("scale", float)
        return weight + scale * (up.float() @ down.float())
    except (RuntimeError, ZeroDivisionError):
        raise DamagedError(f"{where}: the shapes of the parts of {name} do not match") from None


def hadamard(x: Tensor) -> Tensor:
    """x H along the last axis, H the orthonormal Hadamard matrix in Sylvester's order; the length is a power of two."""
    n = x.shape[-1]
    if n & (n - 1):
        raise CheckpointError(f"SpinQuant needs a feed-forward width that is a power of two, got {n}")
    y, half = x.float(), 1
    while half < n:
        a, b = y.unflatten(-1, (-1, 2, half)).unbind(-2)  # neighbouring blocks
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return y / n**0.5
