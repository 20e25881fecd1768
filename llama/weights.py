"""Reading a checkpoint's tensors for a model: their names and shapes, row order, dtype, format and size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .checkpoint.base import FLOATS
from .config import ModelConfig
from .engine.linears import SkipInit, kept_format
from .engine.quantized_weight import QuantizedWeight
from .errors import CheckpointError, DamagedError
from .model import Transformer
from .quant.blocks import BlockFormat, Blocks
from .quant.schemes import Scheme, scheme_for
from .quant.tiles import TILE, tile_bytes
from .rope import Layout, to_half_layout, to_interleaved_layout

# The tensors whose rows RoPE rotates in pairs.
ROTATED = ("attention.wq.weight", "attention.wk.weight", "attention.wq.bias", "attention.wk.bias")


@dataclass(frozen=True)
class Storage:
    """How a model stores its weights.

    dtype        of float weights
    scheme       quantizes the linear layers; None: no quantization
    keep_blocks  use a file's quantized blocks unchanged where the device has a kernel for them
    layout       order of the rows of wq and wk
    """

    dtype: torch.dtype
    scheme: Scheme | None
    keep_blocks: bool
    layout: Layout


def quantized_format(
    checkpoint: Checkpoint, name: str, device: torch.device, storage: Storage
) -> tuple[BlockFormat | None, bool]:
    """The format in which a model stores a weight, None for a float weight; and whether the file has that format.

    Weights that the file stores in the format of the scheme are used unchanged: quantizing again would lose precision.
    """
    if len(checkpoint.shapes[name]) != 2:
        return None, False
    in_file = checkpoint.blocks(name, slice(0, 1))
    layer = name.removesuffix(".weight")
    if layer == "tok_embeddings" and checkpoint.config.tie_embeddings:
        layer = "output"
    if storage.scheme is not None and layer != "tok_embeddings":
        wanted = scheme_for(layer, storage.scheme).format
        return wanted, in_file is not None and in_file.as_format(wanted) is not None
    if in_file is None or not storage.keep_blocks or (layer == "tok_embeddings" and device.type != "cpu"):
        return None, False
    kept = kept_format(in_file, device)
    return kept, kept is not None


def memory_footprint(checkpoint: Checkpoint, names: Iterable[str], device: torch.device, storage: Storage) -> int:
    """Bytes of weights in a model. Only headers are read."""
    weights = 0
    formats: dict[object, tuple[BlockFormat | None, bool]] = {}  # by stored type and shape, the same for all layers
    for name in names:
        shape, stored = checkpoint.shapes[name], checkpoint.stored(name)
        changed = checkpoint.changed(name)
        kind = stored, shape, changed, name if name in ("tok_embeddings.weight", "output.weight") else None
        if kind not in formats:
            formats[kind] = quantized_format(checkpoint, name, device, storage)
        format, _ = formats[kind]
        if format is not None:
            size = -(-shape[0] // TILE) * tile_bytes(shape[1], format)
        else:
            size = math.prod(shape) * storage.dtype.itemsize
        weights += size
    return weights


def dequantization_warning(
    checkpoint: Checkpoint, device_of: Callable[[str], torch.device], storage: Storage
) -> list[str]:
    """A warning if linear layers that a file stores quantized are dequantized on a GPU; otherwise an empty list."""
    kinds, formats, entries = set(), {}, 0
    for name, shape in checkpoint.shapes.items():
        device, kind = device_of(name), checkpoint.stored(name)
        key = device, kind, shape, checkpoint.changed(name), name == "tok_embeddings.weight"
        if device.type == "cpu" or len(shape) != 2 or kind in FLOATS.values():
            continue
        if key not in formats:
            dequantized = quantized_format(checkpoint, name, device, storage)[0] is None
            untied = name == "tok_embeddings.weight" and not checkpoint.config.tie_embeddings
            formats[key] = dequantized and not untied and checkpoint.blocks(name, slice(0, 1)) is not None
        if formats[key]:
            kinds.add(kind)
            entries += math.prod(shape)
    if not kinds:
        return []
    return [
        f"on the GPU, weights stored as {', '.join(sorted(kinds))} are dequantized to"
        f" {str(storage.dtype).removeprefix('torch.')}, which takes {entries * storage.dtype.itemsize / 1e9:.1f} GB;"
        " --quantize int8 or int4 quantizes them again"
    ]


def read_weight(checkpoint: Checkpoint, name: str, device: torch.device, storage: Storage) -> Tensor | QuantizedWeight:
    """A matrix as the model stores it: float on the device, or quantized."""
    format, _ = quantized_format(checkpoint, name, device, storage)
    if format is None:
        return read_float(checkpoint, name, device, storage)
    return read_quantized(checkpoint, name, format, storage.layout)


def read_quantized(checkpoint: Checkpoint, name: str, format: BlockFormat, layout: Layout) -> QuantizedWeight:
    """A matrix in a quantized format: the file's blocks if they have this format, otherwise quantized on demand.

    Reading its rows or tiles raises CheckpointError if a weight is not finite.
    """
    shape: tuple[int, int] = checkpoint.shapes[name]  # type: ignore[assignment]
    reordered = layout != checkpoint.layout and name.endswith(ROTATED)
    order = checkpoint.config.head_dim, checkpoint.layout, layout
    first = checkpoint.blocks(name, slice(0, 1))

    def blocks(rows: slice) -> Blocks:
        found = checkpoint.blocks(name, rows)
        if found is None:
            raise RuntimeError(f"the storage of {name} changed while it was read")
        return found.as_format(format) or found

    in_file = first is not None and first.as_format(format) is not None
    if in_file and reordered:
        everything = blocks(slice(None)).rows(to_layout(name, torch.arange(shape[0]), *order))
        return QuantizedWeight.from_file(everything.rows, shape)
    if in_file:
        return QuantizedWeight.from_file(blocks, shape, checkpoint.tiles(name))
    if first is not None and not reordered:
        return QuantizedWeight.from_float(lambda rows: blocks(rows).weight, shape, format)
    weight = to_layout(name, checkpoint.tensor(name), *order)
    return QuantizedWeight.from_tensor(weight, format)


def read_float(checkpoint: Checkpoint, name: str, device: torch.device, storage: Storage) -> Tensor:
    """A tensor in the model's row order, on a device and in the dtype of float weights."""
    stored = checkpoint.tensor(name)
    ordered = to_layout(name, stored, checkpoint.config.head_dim, checkpoint.layout, storage.layout)
    value = cast(ordered, f"{checkpoint.path}: {checkpoint.file_name(name)}", device, storage.dtype)
    if value.data_ptr() != stored.data_ptr():
        checkpoint.release(name)
    return value


def requantization_warning(checkpoint: Checkpoint, scheme: Scheme) -> list[str]:
    """A warning if linear layers are stored quantized in another format than the scheme's; otherwise an empty list."""
    storage = Storage(torch.float32, scheme, keep_blocks=False, layout=checkpoint.layout)
    before = set()
    for name in checkpoint.shapes:
        format, in_file = quantized_format(checkpoint, name, torch.device("cpu"), storage)
        if format is not None and not in_file and checkpoint.stored(name) not in FLOATS.values():
            before.add(checkpoint.stored(name))
    if not before:
        return []
    kinds = ", ".join(sorted(before))
    return [f"the source is already quantized ({kinds}); quantizing the original would lose less accuracy"]


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless the tensors' names and shapes are those of the architecture. Reads only headers.

    This is the one check after the libraries' own: names and shapes are compared in `mismatches`. Values that are not
    finite are found where weights are read: `QuantizedWeight` refuses them, float weights are read as they are, and
    `verify --tensors` searches all. Ids of tokens are compared with the embedding by `base.check_vocabulary` and, in a
    prompt, by `checks.known_ids`.
    """
    if found := mismatches(checkpoint):
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise DamagedError(f"{checkpoint.path}: {found[0]}{more}: the tensors are not those of the configuration")


def mismatches(checkpoint: Checkpoint) -> list[str]:
    """All differences between tensors and configuration, as phrases with the names that the files use."""
    config, shapes, file_name = checkpoint.config, checkpoint.shapes, checkpoint.file_name
    layers = {int(name.split(".")[1]) for name in shapes if name.startswith("layers.")}
    if len(layers) != config.n_layers or max(layers, default=-1) != config.n_layers - 1:
        last = f", up to layer {max(layers)}" if layers else ""
        return [f"the configuration has {config.n_layers} layers, but the file has tensors of {len(layers)}{last}"]
    expected = expected_shapes(config)
    missing, unexpected = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    found = []
    for problem, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            count = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
            found.append(f"{count} {problem}: {', '.join(map(file_name, names[:3]))}{more}")
    return found + [
        f"{file_name(name)} has shape {shapes[name]}, but the configuration requires {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model and its shape, without a tied output projection."""
    with torch.device("meta"), SkipInit():
        state = Transformer(config).state_dict()
    return {
        name: tuple(tensor.shape)
        for name, tensor in state.items()
        if not (config.tie_embeddings and name == "output.weight")
    }


def random_model(config: ModelConfig, rope: str = "complex", **options: Any) -> Transformer:
    """A model with random float32 weights, the same for every form of RoPE; options as for Transformer."""
    model = Transformer(config, rope, **options).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        value = 1 + 0.2 * noise if name.endswith("norm.weight") else noise / weight.shape[-1] ** 0.5
        weight.copy_(to_layout(name, value, config.head_dim, "interleaved", model.rope.layout))
    return model


def to_layout(name: str, tensor: Tensor, head_dim: int, source: Layout, target: Layout) -> Tensor:
    """Reorder the rows of wq and wk from one RoPE layout to the other; return other tensors unchanged."""
    if source == target or not name.endswith(ROTATED):
        return tensor
    return to_half_layout(tensor, head_dim) if target == "half" else to_interleaved_layout(tensor, head_dim)


def cast(tensor: Tensor, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Move to a device and cast to a dtype. Raises CheckpointError for a value that float16 would make infinite."""
    cast = tensor.to(device=device, dtype=dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(cast).all()) and bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{name} holds values beyond float16's limit, 65504; use dtype='bfloat16' or 'float32' (--dtype)"
        )
    return cast
