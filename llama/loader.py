"""From a path or a name to a model and its tokenizer: open the checkpoint, build the model empty, fill it.

(The module is called loader and not load, because `llama.load` is the function.)
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .attention import ATTENTION
from .cache import FIRST_SLOTS, KINDS
from .checkpoint import Checkpoint, open_checkpoint
from .checkpoint.documents import read_json
from .engine import kernels
from .engine.compiled import compile_
from .engine.linears import embedding_of, linear_of, pick_scheme, scheme_for
from .engine.parallel import World, share
from .engine.placement import NO_COMPILING, Devices, pick_placement, run_placed
from .engine.runtime import FewRowsLinear, PackedLinear, pick_attention, pick_dtype, pick_linear
from .engine.sharding import PartCheckpoint
from .errors import CheckpointError, UsageError
from .hub.named import DEFAULT, resolve
from .model import Transformer
from .rope import FORMS
from .rope_scaling import with_rope
from .system import memory
from .tokenizer import Tokenizer, is_tokenizer, open_tokenizer
from .weights import SkipInit, cast, check_tensors, held, read_blocks, rounded_again, sample_hash, to_layout

if TYPE_CHECKING:
    from .text import Llama

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
    quiet: bool = False,
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
    quiet         say nothing on stderr if the model has to be fetched

    Raises CheckpointError when the file can't be run, UsageError on a bad argument, MemoryLimitError for too much.
    """
    from .text import Llama

    checkpoint = open_checkpoint(resolve(path_or_name, quiet))
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
    check_tensors(checkpoint)  # first, for nothing below may be as large as a damaged file says
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
    if world is not None:
        world.told.append(f"weights whose sample has the hash {sample_hash(checkpoint)}")
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
        value = cast(ordered, f"{checkpoint.path}: {checkpoint.file_name(name)}", device, torch_dtype)
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
            try:
                read = read_blocks(checkpoint, f"{source}.weight", model.rope.layout, wanted, as_stored)
                made = None if read is None else linear_of(read, device, bias)
            except CheckpointError as error:
                if str(checkpoint.path) in str(error):
                    raise
                where = f"{checkpoint.path}: {checkpoint.file_name(f'{source}.weight')}"
                raise CheckpointError(f"{where}: {error}") from error
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
