"""A model's weights: their names and shapes, and how the model stores each of them (`plan_weights`, once)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from .checkpoint import Checkpoint
from .checkpoint.base import EMBEDDING, OUTPUT
from .checkpoint.weight import DTYPES, Weight
from .config import ModelConfig
from .engine import kernels
from .engine.linears import kept_dtype, kept_format
from .errors import DamagedError
from .quant.groups import GroupFormat
from .quant.schemes import Scheme, scheme_for
from .quant.tiles import tiles_shape
from .rope import Layout


# --------------------------------------------------------------------------------------------------------- the plan
class WeightPlan(NamedTuple):
    """How the model stores a weight: its device, and its dtype or quantized format."""

    weight: Weight
    device: torch.device
    format: GroupFormat | torch.dtype

    @property
    def memory_footprint(self) -> int:
        """Bytes in the model."""
        if isinstance(self.format, torch.dtype):
            return math.prod(self.weight.shape) * self.format.itemsize
        return math.prod(tiles_shape(self.weight.shape, self.format))


def plan_weights(
    checkpoint: Checkpoint,
    device_of: Callable[[str], torch.device],
    dtype: torch.dtype,
    scheme: Scheme | None = None,
    fast: bool = False,
    keep: bool = False,
    layout: Layout = "interleaved",
) -> dict[str, WeightPlan]:
    """How to store each weight, by its name in the model. Reads headers only.

    dtype   the model's
    scheme  quantizes the linear layers; None: no quantization
    fast    float matrices may have another dtype than the model (`kept_dtype`)
    keep    use a file's quantized groups unchanged where the device has a kernel for them
    layout  order of the rows of wq and wk

    Tied weights are "output.weight"; on two devices, they are "tok_embeddings.weight" too.
    """
    weights = {name: checkpoint.weight(name, layout) for name in checkpoint.shapes}
    tied = checkpoint.config.tie_embeddings
    if tied:
        weights[OUTPUT] = weights[EMBEDDING]
        if device_of(EMBEDDING) == device_of(OUTPUT):
            del weights[EMBEDDING]

    def format_of(name: str, weight: Weight, device: torch.device) -> GroupFormat | torch.dtype:
        if len(weight.shape) != 2:
            return dtype
        if scheme is not None and (tied or name != EMBEDDING):
            return scheme_for(name, scheme).format
        stored = weight.format if keep and (name != EMBEDDING or device.type == "cpu") else None
        if stored is not None and (kept := kept_format(stored, device)):
            return kept
        return kept_dtype(DTYPES.get(weight.stored, dtype), dtype, device) if fast and not weight.changed else dtype

    found = ((name, weight, device_of(name)) for name, weight in weights.items())
    return {name: WeightPlan(weight, device, format_of(name, weight, device)) for name, weight, device in found}


AGAIN = "quantizing the original would lose less accuracy"


def storage_warnings(weights: Mapping[str, WeightPlan], dtype: torch.dtype) -> list[str]:
    """Warnings about quantized weights of the file that the model stores in another format."""
    requantized, dequantized, growth, size, could_stay = set(), set(), 0.0, 0, False
    for name, plan in weights.items():
        weight = plan.weight
        if weight.stored in DTYPES or len(weight.shape) != 2:
            continue
        if plan.device.type == "cpu" and not kernels.ready():
            continue  # nothing can be kept
        if isinstance(plan.format, GroupFormat):
            if not weight.is_stored_as(plan.format):
                requantized.add(weight.stored)
            growth += plan.memory_footprint - weight.bits * math.prod(weight.shape) / 8
        elif name != EMBEDDING and not weight.changed:
            dequantized.add(weight.stored)
            size += plan.memory_footprint
            could_stay |= weight.format is not None and kept_format(weight.format, plan.device) is not None
    warnings = []
    if requantized:
        kinds = ", ".join(sorted(requantized))
        larger = f", and these weights grow by {growth / 1e6:,.1f} MB" if growth > 0 else ""
        warnings.append(f"the source is already quantized ({kinds}); {AGAIN}{larger}")
    if dequantized:
        quantize = "quantize='int8' (--quantize int8) quantizes them again"
        remedy = "dtype=None (--dtype auto) keeps them" if could_stay else quantize
        warnings.append(
            f"weights stored as {', '.join(sorted(dequantized))} are dequantized to"
            f" {str(dtype).removeprefix('torch.')}, which takes {size / 1e9:.1f} GB; {remedy}"
        )
    return warnings


# --------------------------------------------------------------------------------------------------- names and shapes
def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless the tensors' names and shapes are those of the architecture. Reads only headers.

    This is the only check besides those of the libraries that read the files. It does not look for
    values that are not finite: quantization refuses them, float weights keep them, and a run names them.
    """
    if found := mismatches(checkpoint):
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise DamagedError(f"{checkpoint.path}: {found[0]}{more}: the tensors are not those of the configuration")


def mismatches(checkpoint: Checkpoint) -> list[str]:
    """All differences between tensors and configuration, as phrases with the names that the files use."""
    config, shapes, file_name = checkpoint.config, checkpoint.shapes, checkpoint.file_name
    layers = {int(name.split(".")[1]) for name in shapes if name.startswith("layers.")}
    if len(layers) != config.n_layers or max(layers, default=-1) >= config.n_layers:
        return [f"the configuration has {config.n_layers} layers, but the file has tensors of {len(layers)}"]
    expected = expected_shapes(config)
    found = []
    for problem, differing in (
        ("missing", expected.keys() - shapes.keys()),
        ("unexpected", shapes.keys() - expected.keys()),
    ):
        if differing:
            count = "1 tensor is" if len(differing) == 1 else f"{len(differing)} tensors are"
            found.append(f"{count} {problem}: {', '.join(map(file_name, sorted(differing)[:3]))}")
    return found + [
        f"{file_name(name)} has shape {shapes[name]}, but the configuration requires {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model and its shape, in the model's order, without a tied output projection."""
    vocabulary, block = (config.vocab_size, config.dim), config.block_shapes
    layers = {f"layers.{i}.{name}": shape for i in range(config.n_layers) for name, shape in block.items()}
    last = {"norm.weight": (config.dim,)} | ({} if config.tie_embeddings else {OUTPUT: vocabulary})
    return {EMBEDDING: vocabulary} | layers | last
