"""A checkpoint's tensors as a model wants them: which, in which order, dtype and kind, and how many bytes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .checkpoint import Checkpoint
from .checkpoint.base import FLOATS
from .config import ModelConfig
from .engine import kernels
from .engine.linears import Integers, Scheme, rounded, scheme_for, taken
from .engine.runtime import PackedLinear
from .errors import CheckpointError
from .model import Transformer
from .quant.blocks import Blocks
from .quant.tiles import TILE, tile_bytes
from .rope import Layout, to_half_layout, to_interleaved_layout

# The weights whose rows RoPE pairs.
ROTATED = ("attention.wq.weight", "attention.wk.weight", "attention.wq.bias", "attention.wk.bias")


def held(
    checkpoint: Checkpoint,
    names: Iterable[str],
    device: torch.device,
    dtype: torch.dtype,
    scheme: Scheme | None,
    make_linear: Callable[..., nn.Module] | None,
    as_stored: bool,
    moved: bool,
    compile: bool = False,
) -> tuple[int, int]:
    """Bytes that these weights will take as `build` holds them, and those of them that stay in the mapped file.

    Arguments as `build` has them; moved says whether the rows of wq and wk change places. Nothing but headers is read.
    """
    weights = mapped = 0
    on_cpu = device.type == "cpu"
    kinds: dict[object, tuple[int, int, bool] | None] = {}  # (how it is stored, shape) -> bits, group, offset
    for name in names:
        layer, shape, stored = name.removesuffix(".weight"), checkpoint.shapes[name], checkpoint.stored(name)
        if (stored, shape) not in kinds:
            blocks = checkpoint.blocks(name, slice(0, 1)) if len(shape) == 2 else None
            kinds[stored, shape] = None if blocks is None else (blocks.bits, blocks.group, blocks.offset is not None)
        kind = kinds[stored, shape]
        reordered = moved and name.endswith(ROTATED)
        wanted = None
        if layer == "tok_embeddings" and checkpoint.config.tie_embeddings:
            layer = "output"
        if len(shape) == 2 and scheme is not None and layer != "tok_embeddings":
            chosen = scheme_for(layer, scheme)
            wanted = chosen.bits, chosen.group, chosen.offset
        taken = kind is not None and (kind == wanted or (wanted is None and as_stored and kernels.ready()))
        few = kind if taken else wanted
        if few is not None:
            size = -(-shape[0] // TILE) * tile_bytes(shape[1], *few)
            as_is = taken and not reordered and not compile and on_cpu and checkpoint.tiles(name) is not None
        else:
            size = math.prod(shape) * dtype.itemsize
            as_is = stored == FLOATS[dtype] and not reordered and on_cpu and make_linear is not PackedLinear
        weights += size
        mapped += size if as_is else 0
    return weights, mapped


def read_blocks(
    checkpoint: Checkpoint, name: str, layout: Layout, scheme: Scheme | None, as_stored: bool
) -> Integers | None:
    """How to get a weight as integers: those of the file, or rounded here; None where it stays numbers.

    The file's own are taken where they are what the scheme asks for, since rounding them again would only lose.
    """
    shape: tuple[int, int] = checkpoint.shapes[name]  # type: ignore[assignment]
    stored = checkpoint.blocks(name, slice(0, 1))
    kind = stored and (stored.bits, stored.group, stored.offset is not None)
    moved = layout != checkpoint.layout and name.endswith(ROTATED)
    order = checkpoint.config.head_dim, checkpoint.layout, layout

    def blocks(rows: slice) -> Blocks:
        found = checkpoint.blocks(name, rows)
        if found is None:
            raise AssertionError("a weight's storage can't change while it is read")
        return found

    if stored is not None and (as_stored if scheme is None else kind == (scheme.bits, scheme.group, scheme.offset)):
        if moved:
            whole = blocks(slice(None)).rows(to_layout(name, torch.arange(shape[0]), *order))
            return taken(whole.rows, shape)
        packed = checkpoint.tiles(name)
        return taken(blocks, shape, None if packed is None else lambda: packed)
    if scheme is None:
        return None
    if stored is not None and not moved:
        return rounded(lambda rows: blocks(rows).weight, shape, scheme)
    weight = to_layout(name, checkpoint.tensor(name), *order)
    return rounded(lambda rows: weight[rows], shape, scheme)


def rounded_again(checkpoint: Checkpoint, scheme: Scheme) -> list[str]:
    """A warning about linear layers that were rounded before, to other integers than the scheme's."""
    before = set()
    for name, shape in checkpoint.shapes.items():
        embedding = name == "tok_embeddings.weight"
        if len(shape) == 2 and (not embedding or checkpoint.config.tie_embeddings):
            wanted = scheme_for("output" if embedding else name.removesuffix(".weight"), scheme)
            stored = checkpoint.blocks(name, slice(0, 1))
            same = stored and (stored.bits, stored.group, stored.offset is not None) == (
                wanted.bits,
                wanted.group,
                wanted.offset,
            )
            if not same and checkpoint.stored(name) not in FLOATS.values():
                before.add(checkpoint.stored(name))
    if not before:
        return []
    kinds = ", ".join(sorted(before))
    return [f"the source was rounded before ({kinds}); rounding it again loses more than rounding the original once"]


def check_tensors(checkpoint: Checkpoint) -> None:
    """Hold the tensors that are there against those the architecture needs, before any weight is read.

    Raises CheckpointError naming what does not fit.
    """
    found = mismatches(checkpoint)
    if found:
        more = f"; and {len(found) - 1} more such" if len(found) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.path}: {found[0]}{more}; file and configuration do not belong together or one is damaged"
        )


def mismatches(checkpoint: Checkpoint) -> list[str]:
    """Everything in which tensors and configuration differ, in words and with the names that the files use."""
    config, shapes, told = checkpoint.config, checkpoint.shapes, checkpoint.file_name
    layers = {int(name.split(".")[1]) for name in shapes if name.startswith("layers.")}
    if len(layers) != config.n_layers or max(layers, default=-1) != config.n_layers - 1:
        last = f", the last is {max(layers)}" if layers else ""
        return [f"the configuration says {config.n_layers} layers and the file holds tensors of {len(layers)}{last}"]
    expected = expected_shapes(config)
    missing, unexpected = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    found = []
    for problem, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            count = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
            found.append(f"{count} {problem}: {', '.join(map(told, names[:3]))}{more}")
    return found + [
        f"{told(name)} has shape {shapes[name]} and the configuration asks for {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]


def sample_hash(checkpoint: Checkpoint) -> str:
    """A hash of a few numbers, by which two checkpoints of one architecture are told apart without reading them whole.

    The first row of every matrix, and every vector, of the first, the middle and the last layer and outside of them, in
    float32. Whoever trains a model, or merges an adapter into it, changes these. Damage is `verify`'s business.
    """
    last, sample = checkpoint.config.n_layers - 1, hashlib.sha256()
    layers = tuple(f"layers.{i}." for i in sorted({0, last // 2, last}))
    for name in sorted(checkpoint.shapes):
        if not name.startswith("layers.") or name.startswith(layers):
            rows = slice(0, 1) if len(checkpoint.shapes[name]) == 2 else slice(None)
            sample.update(checkpoint.piece(name, rows, slice(None)).float().contiguous().numpy().tobytes())
    return sample.hexdigest()[:16]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model and its shape; a tied output projection is no tensor of its own."""
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


class SkipInit(TorchFunctionMode):
    """Draws no random weights: all are replaced anyway, and on the meta device the first draw takes torch a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.normal_, nn.init.kaiming_uniform_):  # the draws of nn.Embedding and nn.Linear
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def to_layout(name: str, tensor: Tensor, head_dim: int, source: Layout, target: Layout) -> Tensor:
    """Reorder the rows of wq and wk from one pairing of RoPE to the other; leave everything else."""
    if source == target or not name.endswith(ROTATED):
        return tensor
    return to_half_layout(tensor, head_dim) if target == "half" else to_interleaved_layout(tensor, head_dim)


def cast(tensor: Tensor, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """To device and dtype. A value that float16 can't hold would become infinity in silence, so that is an error."""
    cast = tensor.to(device=device, dtype=dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(cast).all()) and bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{name} holds values beyond float16's 65504; use --dtype bfloat16 or float32")
    return cast
