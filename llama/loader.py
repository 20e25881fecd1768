"""From a path or a name to a model and its tokenizer: open the checkpoint, build the model empty, fill it.

(The module is called loader and not load, because `llama.load` is the function.)
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import kernels, memory
from .attention import ATTENTION
from .cache import FIRST_SLOTS, KINDS
from .checkpoint import Checkpoint, open_checkpoint
from .checkpoint.base import FLOATS
from .checkpoint.blocks import Blocks
from .checkpoint.documents import read_json
from .checkpoint.part import PartCheckpoint
from .checkpoint.tiles import TILE, tile_bytes
from .compiled import compile_
from .config import ModelConfig
from .errors import CheckpointError, UsageError
from .hub import DEFAULT, resolve
from .model import Transformer
from .parallel import World, share
from .placement import NO_COMPILING, Devices, pick_placement, run_placed
from .quant import Integers, Scheme, embedding_of, linear_of, pick_scheme, rounded, scheme_for, taken
from .rope import FORMS, Layout, to_half_layout, to_interleaved_layout
from .rope_scaling import with_rope
from .runtime import FewRowsLinear, PackedLinear, pick_attention, pick_dtype, pick_linear
from .tokenizer import Tokenizer, is_tokenizer, open_tokenizer

if TYPE_CHECKING:
    from .text import Llama

# The weights whose rows RoPE pairs.
ROTATED = ("attention.wq.weight", "attention.wk.weight", "attention.wq.bias", "attention.wk.bias")

LARGE = 2**26  # entries of a weight


def load(
    path_or_name: str | os.PathLike[str] = DEFAULT,
    device: Devices = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    compile: bool = False,
    rope: str = "complex",
    max_seq_len: int | None = None,
    *,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
    kv_cache: str = "model",
    gpu_layers: int | None = None,
    world: World | None = None,
    tokens: int | Callable[[Tokenizer], int] | None = None,
    check_memory: bool = True,
) -> Llama:
    """Load a model with its tokenizer, ready to generate.

    path_or_name  a folder of Meta's or Hugging Face's, a .gguf file, the name of a model that can be fetched
                  (hub.MODELS), or ORG/NAME in the Hugging Face cache
    device        "cpu", "cuda", "cuda:1", ...; None takes the best there is; "cuda:0,cuda:1" spreads the layers evenly
    dtype         "float32", "bfloat16", "float16"; None takes the fastest the device computes in
    quantize      round the linear layers to a scheme of quant.SCHEMES: "int8", "int4", ...
    compile       compile the decoding step (compiled.py): some seconds the first time, then kept
    rope          "complex", "real", "half", "elementwise" or "matrix": five forms of one rotation (rope.py)
    max_seq_len   context in tokens, if another than the checkpoint's is wanted
    rope_scaling  another scaling than the checkpoint's, to stretch its context: {"rope_type": "yarn", "factor": 4.0};
                  {"rope_type": "default"} takes the checkpoint's off
    rope_theta    another base of the frequencies
    kv_cache      "model" keeps keys and values in the model's dtype, "int8" in 8 bits: for long contexts
    gpu_layers    only the last so many layers on the GPU, the others on the CPU (placement.py)
    world         the processes that share the model (parallel.join), of which this one loads its part
    tokens        how long prompt and answer will be, if that is known, or a function that tells it by the tokenizer
    check_memory  hold what is needed for that against what is free, before a weight is read and before a cache grows

    Raises CheckpointError when the file can't be run, UsageError on a bad argument, MemoryLimitError for too much.
    """
    from .text import Llama

    checkpoint = open_checkpoint(resolve(path_or_name))
    tokenizer = checkpoint.tokenizer()
    model = build(
        checkpoint,
        device,
        dtype,
        rope,
        max_seq_len,
        pack=True,
        rope_scaling=rope_scaling,
        rope_theta=rope_theta,
        quantize=quantize,
        compile=compile,
        kv_cache=kv_cache,
        gpu_layers=gpu_layers,
        world=world,
        tokens=tokens(tokenizer) if callable(tokens) else tokens,
        check_memory=check_memory,
    )
    chat_format = checkpoint.chat_format(tokenizer) if checkpoint.chat_template is None else None
    return Llama(
        model,
        tokenizer,
        checkpoint.chat_template,
        chat_format=chat_format,
        sampling=checkpoint.sampling,
        warnings=[*checkpoint.warnings, *(rounded_again(checkpoint, pick_scheme(quantize)) if quantize else ())],
    )


def load_model(
    path_or_name: str | os.PathLike[str] = DEFAULT,
    device: Devices = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    rope: str = "complex",
    max_seq_len: int | None = None,
    *,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
    gpu_layers: int | None = None,
    check_memory: bool = True,
) -> Transformer:
    """The model alone, with plain nn.Linear weights to look at; no tokenizer is needed. Arguments as in `load`."""
    checkpoint = open_checkpoint(resolve(path_or_name))
    return build(
        checkpoint,
        device,
        dtype,
        rope,
        max_seq_len,
        rope_scaling=rope_scaling,
        rope_theta=rope_theta,
        quantize=quantize,
        gpu_layers=gpu_layers,
        check_memory=check_memory,
    )


def load_tokenizer(path_or_name: str | os.PathLike[str] = DEFAULT) -> Tokenizer:
    """The tokenizer of a checkpoint, or of a tokenizer.model or tokenizer.json by itself; no weight is read."""
    path = resolve(path_or_name)
    alone = [path / name for name in ("tokenizer.json", "tokenizer.model")] if path.is_dir() else [path]
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError:
        for file in alone:
            if file.is_file() and is_tokenizer(file):
                settings = file.with_name("tokenizer_config.json")
                return open_tokenizer(file, read_json(settings) if settings.is_file() else None)
        raise
    return checkpoint.tokenizer()


def build(
    checkpoint: Checkpoint,
    device: Devices = None,
    dtype: str | torch.dtype | None = None,
    rope: str = "complex",
    max_seq_len: int | None = None,
    pack: bool = False,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
    quantize: str | None = None,
    compile: bool = False,
    kv_cache: str = "model",
    gpu_layers: int | None = None,
    world: World | None = None,
    tokens: int | None = None,
    check_memory: bool = True,
) -> Transformer:
    """A model filled with a checkpoint's weights: each is read, reordered if need be, cast or rounded, handed over.

    pack          take the linear layers that run fastest here (runtime.py, quant.py), and a file's 4 and 8-bit blocks
                  as they are, unless dtype asks for float32 or float16
    rope_scaling  and rope_theta as in `load`
    quantize      a scheme of quant.SCHEMES for the linear layers
    compile       compile the decoding step (compiled.py); RoPE then runs in the real form instead of the complex one
    kv_cache      what caches of this model keep keys and values in, one of cache.KINDS
    gpu_layers    as in `load`; each layer is made for the device that it lies on
    world         the processes that share the model: this one's slices are read, and only then cast or rounded
    tokens        and check_memory as in `load`

    A weight that needs no change stays in the mapped file; one that is rounded is read piece by piece. Strict both
    ways: CheckpointError lists tensors that are missing, unexpected or of another shape.
    """
    if rope not in FORMS:
        raise UsageError(f"unknown form of RoPE {rope!r}; known: {', '.join(FORMS)}")
    if max_seq_len is not None and (
        isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or max_seq_len < 1
    ):
        raise UsageError(f"max_seq_len must be a whole number of at least 1, got {max_seq_len!r}")
    if not isinstance(compile, bool):
        raise UsageError(f"compile must be True or False, got {compile!r}")
    scheme = None if quantize is None else pick_scheme(quantize)
    config = with_rope(checkpoint.config, rope_scaling, rope_theta)
    if kv_cache not in KINDS:
        raise UsageError(f"unknown kind of KV cache {kv_cache!r}; known: {', '.join(KINDS)}")
    sizes = config
    if world is not None:
        if compile:
            raise UsageError("--compile is for one process; leave it out, or run the model in one")
        if gpu_layers is not None:
            raise UsageError("gpu_layers is for one process; leave it out, or run the model in one")
        device, sizes = world.device, world.place.config(config)
    place = pick_placement(sizes, device, gpu_layers)
    if compile and not place.single:
        raise UsageError(NO_COMPILING)
    torch_dtype = pick_dtype(dtype, place.output)
    takes_blocks = pack and (dtype in (None, "auto") or torch_dtype == torch.bfloat16)  # on a CPU
    if compile and rope == "complex":
        rope = "real"  # the same arithmetic; the compiler has no complex numbers
    check_tensors(checkpoint)
    if world is not None:
        checkpoint = PartCheckpoint(checkpoint, world.place)
        if scheme is not None or (takes_blocks and place.output.type == "cpu"):
            checkpoint.check_groups(None if scheme is None else scheme.group)
    with torch.device("meta"), SkipInit():
        model = Transformer(sizes, rope, max_seq_len=max_seq_len).requires_grad_(False).eval()
    if world is not None and world.place.stage:
        model.tok_embeddings = model.output = nn.Identity()  # type: ignore[assignment]  # the first stage has them
    for block, where in zip(model.layers, place.layers, strict=True):
        block.attention.attend = ATTENTION[pick_attention(where) if pack else "sdpa"]  # type: ignore[union-attr]
    makers = {where: pick_linear(where, torch_dtype) if pack else None for where in {place.output, *place.layers}}
    if compile:  # PackedLinear's weights are opaque to the compiler
        makers = {where: None if make is PackedLinear else make for where, make in makers.items()}
    model.cache_kind, model.check_memory = kv_cache, check_memory
    if check_memory:
        moved = model.rope.layout != checkpoint.layout
        ranks = 1 if world is None else world.on_this_host
        for where in dict.fromkeys((*place.layers, place.output)):
            as_stored = takes_blocks and where.type == "cpu"
            names = [name for name in checkpoint.shapes if place.of(name) == where]
            weights, mapped = held(
                checkpoint, names, where, torch_dtype, scheme, makers[where], as_stored, moved, compile
            )
            need = memory.need(
                dataclasses.replace(sizes, n_layers=place.layers.count(where) or 1),
                weights,
                itemsize=torch_dtype.itemsize,
                tokens=min(FIRST_SLOTS if tokens is None else tokens, model.max_seq_len),
                kind=kv_cache,
                mapped=mapped,
            )
            remedies = memory.remedies(need, torch_dtype, quantize, kv_cache)
            memory.check(str(checkpoint.path), need, memory.rooms(where), remedies, ranks if where.type == "cpu" else 1)
    layers = {
        name: child for name, child in model.named_modules() if next(child.parameters(recurse=False), None) is not None
    }
    tied = config.tie_embeddings and place.embedding == place.output  # else each has a copy

    def plain(name: str, device: torch.device) -> Tensor:
        """A tensor in the order, the dtype and the place that the model wants."""
        stored = checkpoint.tensor(name)
        ordered = to_layout(name, stored, config.head_dim, checkpoint.layout, model.rope.layout)
        value = _cast(ordered, name, device, torch_dtype)
        if value.data_ptr() != stored.data_ptr():
            checkpoint.release(name)
        return value

    def fill(name: str) -> None:
        layer, device = layers[name], place.of(name)
        source = "tok_embeddings" if config.tie_embeddings and name == "output" else name
        as_stored, shared = takes_blocks and device.type == "cpu", tied and name == "output"
        kinds = [kind for kind, _ in layer.named_parameters(recurse=False)]  # weight, bias
        bias = plain(f"{source}.bias", device) if "bias" in kinds else None
        if isinstance(layer, nn.Linear):
            wanted = scheme and scheme_for(name, scheme)
            read = read_blocks(checkpoint, f"{source}.weight", model.rope.layout, wanted, as_stored)
            made = None if read is None else linear_of(read, device, bias)
            if made is None and scheme is not None:
                raise UsageError(f"{quantize} needs the C++ kernels on this CPU, and they can't be built; leave it out")
            make_linear = makers[device]
            if made is None and make_linear is not None:
                made = make_linear(plain(f"{source}.weight", device), bias)
            if made is not None:
                model.set_submodule(name, made)
                if shared:
                    embedding = embedding_of(made, torch_dtype)
                    if embedding is None:
                        weight = made.weight if isinstance(made, FewRowsLinear) else plain(f"{source}.weight", device)
                        model.tok_embeddings.weight = nn.Parameter(weight, requires_grad=False)
                    else:
                        model.tok_embeddings = embedding  # type: ignore[assignment]
                if read is not None:
                    checkpoint.release(f"{source}.weight")
                return
        elif isinstance(layer, nn.Embedding) and (as_stored or scheme) and (device.type != "cpu" or kernels.ready()):
            wanted = scheme_for("output", scheme) if scheme and config.tie_embeddings else None
            read = read_blocks(checkpoint, f"{name}.weight", model.rope.layout, wanted, as_stored)
            made = None if read is None else linear_of(read, device)
            if made is not None:
                model.tok_embeddings = embedding_of(made, torch_dtype)  # type: ignore[assignment]
                checkpoint.release(f"{name}.weight")
                return
        for kind in kinds:
            value = bias if kind == "bias" and bias is not None else plain(f"{source}.{kind}", device)
            setattr(layer, kind, nn.Parameter(value, requires_grad=False))
        if shared:
            model.tok_embeddings.weight = layer.weight

    # Dequantization is numpy, which lets go of the interpreter lock, so several threads keep several cores busy; but
    # large weights go one by one, so that no more than one of them is in memory twice.
    names = [name for name in layers if not (tied and name == "tok_embeddings")]  # filled with the output
    large = [name for name in names if math.prod(tuple(layers[name].weight.shape)) > LARGE]
    for name in large:
        fill(name)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        for _ in pool.map(fill, [name for name in names if name not in large]):
            pass
    if world is not None:
        return share(model, config, world)
    run_placed(model, place)
    return compile_(model) if compile else model


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


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model and its shape; a tied output projection is no tensor of its own."""
    with torch.device("meta"), SkipInit():
        state = Transformer(config).state_dict()
    return {
        name: tuple(tensor.shape)
        for name, tensor in state.items()
        if not (config.tie_embeddings and name == "output.weight")
    }


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


def _cast(tensor: Tensor, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """To device and dtype. A value that float16 can't hold would become infinity in silence, so that is an error."""
    cast = tensor.to(device=device, dtype=dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(cast).all()) and bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{name} holds values beyond float16's 65504; use --dtype bfloat16 or float32")
    return cast
