"""A model's weights: their names and shapes, how each is stored (`plan_weights`, once), and how each is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .checkpoint.base import FLOATS
from .checkpoint.write import ROTATED, to_layout
from .config import ModelConfig
from .engine import kernels
from .engine.linears import kept_format
from .engine.quantized_weight import QuantizedWeight
from .errors import CheckpointError, DamagedError
from .quant.blocks import BlockFormat
from .quant.schemes import Scheme, scheme_for
from .quant.tiles import TILE, tile_bytes
from .rope import Layout


# --------------------------------------------------------------------------------------------------------- the plan
class WeightPlan(NamedTuple):
    """How the model stores a weight: its name in the checkpoint, its device, and its format; None: floating point."""

    source: str
    device: torch.device
    format: BlockFormat | None


def plan_weights(
    checkpoint: Checkpoint, device_of: Callable[[str], torch.device], scheme: Scheme | None, keep_blocks: bool
) -> dict[str, WeightPlan]:
    """How to store each weight, by its name in the model. Reads one row of each matrix.

    scheme       quantizes the linear layers; None: no quantization
    keep_blocks  use a file's quantized blocks unchanged where the device has a kernel for them

    Tied weights are "output.weight"; on two devices, they are "tok_embeddings.weight" too.
    """
    sources = {name: name for name in checkpoint.shapes}
    tied = checkpoint.config.tie_embeddings
    if tied:
        sources["output.weight"] = "tok_embeddings.weight"
        if device_of("tok_embeddings") == device_of("output"):
            del sources["tok_embeddings.weight"]

    def format_of(name: str, source: str) -> BlockFormat | None:
        if len(checkpoint.shapes[source]) != 2:
            return None
        embedding = name == "tok_embeddings.weight" and not tied
        if scheme is not None and not embedding:
            return scheme_for("output" if source != name else name.removesuffix(".weight"), scheme).format
        blocks = checkpoint.blocks(source, slice(0, 1)) if keep_blocks else None
        if blocks is None or (name == "tok_embeddings.weight" and device_of(name).type != "cpu"):
            return None
        return kept_format(blocks, device_of(name))

    return {name: WeightPlan(source, device_of(name), format_of(name, source)) for name, source in sources.items()}


def memory_footprint(checkpoint: Checkpoint, weight: WeightPlan, dtype: torch.dtype) -> int:
    """Bytes of a weight in the model; `dtype` is that of float weights."""
    shape = checkpoint.shapes[weight.source]
    if weight.format is None:
        return math.prod(shape) * dtype.itemsize
    return -(-shape[0] // TILE) * tile_bytes(shape[1], weight.format)


AGAIN = "quantizing the original would lose less accuracy"


def storage_warnings(checkpoint: Checkpoint, weights: Mapping[str, WeightPlan], dtype: torch.dtype) -> list[str]:
    """Warnings about quantized weights of the file that the model stores in another format."""
    requantized, dequantized, growth, size, could_stay = set(), set(), 0.0, 0, False
    for name, weight in weights.items():
        kind = checkpoint.stored(weight.source)
        if kind in FLOATS.values() or len(checkpoint.shapes[weight.source]) != 2:
            continue
        if weight.device.type == "cpu" and not kernels.ready():
            continue  # nothing can be kept
        if weight.format is not None:
            if not is_stored_as(checkpoint, weight.source, weight.format):
                requantized.add(kind)
            stored = checkpoint.bits(weight.source) * math.prod(checkpoint.shapes[weight.source]) / 8
            growth += memory_footprint(checkpoint, weight, dtype) - stored
        elif name != "tok_embeddings.weight" and not checkpoint.changed(weight.source):
            dequantized.add(kind)
            size += memory_footprint(checkpoint, weight, dtype)
            row = checkpoint.blocks(weight.source, slice(0, 1))
            could_stay |= row is not None and kept_format(row, weight.device) is not None
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


# ------------------------------------------------------------------------------------------------------------ reading
def is_stored_as(checkpoint: Checkpoint, name: str, format: BlockFormat) -> bool:
    """Whether the file has a weight in a quantized format, so that it is used unchanged."""
    row = checkpoint.blocks(name, slice(0, 1))
    return row is not None and row.as_format(format) is not None


def read_quantized(checkpoint: Checkpoint, name: str, format: BlockFormat, layout: Layout) -> QuantizedWeight:
    """A matrix in a quantized format: the file's blocks if they have this format, otherwise quantized on demand.

    Reading its rows or tiles raises CheckpointError if a weight is not finite.
    """
    shape: Any = checkpoint.shapes[name]
    order = checkpoint.config.head_dim, checkpoint.layout, layout
    reordered = layout != checkpoint.layout and name.endswith(ROTATED)
    read: Callable[..., Any] = partial(checkpoint.blocks, name)
    if read(slice(0, 1)) is None:
        return QuantizedWeight.from_float(to_layout(name, checkpoint.tensor(name), *order), shape, format)
    if reordered:
        read = read(slice(None)).rows(to_layout(name, torch.arange(shape[0]), *order)).rows
    if is_stored_as(checkpoint, name, format):
        tiles = None if reordered else checkpoint.tiles(name)
        return QuantizedWeight.from_file(lambda rows: read(rows).as_format(format), shape, tiles)
    return QuantizedWeight.from_float(lambda rows: read(rows).weight, shape, format)


def read_float(checkpoint: Checkpoint, name: str, device: torch.device, dtype: torch.dtype, layout: Layout) -> Tensor:
    """A tensor with the rows of wq and wk in the order `layout`, on a device and in a dtype."""
    stored = checkpoint.tensor(name)
    ordered = to_layout(name, stored, checkpoint.config.head_dim, checkpoint.layout, layout)
    value = cast(ordered, f"{checkpoint.path}: {checkpoint.file_name(name)}", device, dtype)
    if value.data_ptr() != stored.data_ptr():
        checkpoint.release(name)
    return value


def cast(tensor: Tensor, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Move to a device and cast to a dtype. Raises CheckpointError for a value that float16 would make infinite."""
    cast = tensor.to(device=device, dtype=dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(cast).all()) and bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{name} holds values beyond float16's limit, 65504; use dtype='bfloat16' (--dtype)")
    return cast


# --------------------------------------------------------------------------------------------------- names and shapes
def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless the tensors' names and shapes are those of the architecture. Reads only headers.

    The libraries that read the files make their own checks; this is the only one after them. It does not look for
    values that are not finite: `QuantizedWeight` refuses them, float weights keep them, and a run names them.
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
    C, F, vocabulary = config.dim, config.hidden_dim, (config.vocab_size, config.dim)
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    qkv_bias = config.attention_bias or config.qkv_bias

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})

    block = {
        "attention_norm.weight": (C,),
        **linear("attention.wq", q, C, qkv_bias),
        **linear("attention.wk", kv, C, qkv_bias),
        **linear("attention.wv", kv, C, qkv_bias),
        **linear("attention.wo", C, q, config.attention_bias),
        "ffn_norm.weight": (C,),
        **linear("feed_forward.w_gate", F, C, config.mlp_bias),
        **linear("feed_forward.w_up", F, C, config.mlp_bias),
        **linear("feed_forward.w_down", C, F, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": vocabulary}
    for i in range(config.n_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in block.items()}
    return shapes | {"norm.weight": (C,)} | ({} if config.tie_embeddings else {"output.weight": vocabulary})
