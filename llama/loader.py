"""From a path or a name to a model and its tokenizer: open the checkpoint, build the model empty, fill it.

(The module is called loader and not load, because `llama.load` is the function.)
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .checkpoint import Checkpoint, open_checkpoint
from .checkpoint.blocks import Blocks4
from .checkpoint.documents import read_json
from .config import ModelConfig
from .errors import CheckpointError, UsageError
from .hub import DEFAULT, resolve
from .model import Transformer
from .quant import Int4Linear, runs_int4
from .rope import FORMS, Layout, to_half_layout, to_interleaved_layout
from .rope_scaling import with_rope
from .runtime import PackedLinear, packs_linears, pick_device, pick_dtype
from .tokenizer import Tokenizer, is_tokenizer, open_tokenizer

if TYPE_CHECKING:
    from .text import Llama

# The weights whose rows RoPE pairs.
ROTATED = ("attention.wq.weight", "attention.wk.weight", "attention.wq.bias", "attention.wk.bias")

LARGE = 2**26  # entries of a weight


def load(
    path_or_name: str | os.PathLike[str] = DEFAULT,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    compile: bool = False,
    rope: str = "complex",
    max_seq_len: int | None = None,
    *,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
) -> Llama:
    """Load a model with its tokenizer, ready to generate.

    path_or_name  a folder of Meta's or Hugging Face's, a .gguf file, the name of a model that can be fetched
                  (hub.MODELS), or ORG/NAME in the Hugging Face cache
    device        "cpu", "cuda", "cuda:1", ...; None takes the best there is
    dtype         "float32", "bfloat16", "float16"; None takes the fastest the device computes in
    rope          "complex", "real", "half", "elementwise" or "matrix": five forms of one rotation (rope.py)
    max_seq_len   context in tokens, if another than the checkpoint's is wanted
    rope_scaling  another scaling than the checkpoint's, to stretch its context: {"rope_type": "yarn", "factor": 4.0};
                  {"rope_type": "default"} takes the checkpoint's off
    rope_theta    another base of the frequencies

    Raises CheckpointError when the file can't be run, UsageError on a bad argument.
    """
    from .text import Llama

    _not_yet(quantize, compile)
    checkpoint = open_checkpoint(resolve(path_or_name))
    tokenizer = checkpoint.tokenizer()
    model = build(
        checkpoint, device, dtype, rope, max_seq_len, pack=True, rope_scaling=rope_scaling, rope_theta=rope_theta
    )
    chat_format = checkpoint.chat_format(tokenizer) if checkpoint.chat_template is None else None
    return Llama(
        model,
        tokenizer,
        checkpoint.chat_template,
        chat_format=chat_format,
        sampling=checkpoint.sampling,
        warnings=checkpoint.warnings,
    )


def load_model(
    path_or_name: str | os.PathLike[str] = DEFAULT,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    rope: str = "complex",
    max_seq_len: int | None = None,
    *,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
) -> Transformer:
    """The model alone, with plain nn.Linear weights to look at; no tokenizer is needed. Arguments as in `load`."""
    _not_yet(quantize, False)
    checkpoint = open_checkpoint(resolve(path_or_name))
    return build(checkpoint, device, dtype, rope, max_seq_len, rope_scaling=rope_scaling, rope_theta=rope_theta)


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
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    rope: str = "complex",
    max_seq_len: int | None = None,
    pack: bool = False,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
) -> Transformer:
    """A model filled with a checkpoint's weights: each is read, reordered if need be, cast, and handed over.

    pack          lay the linear layers out as the CPU's kernels like them, where they do (runtime.py, quant.py)
    rope_scaling  and rope_theta as in `load`

    A weight that needs no change stays in the mapped file. Strict both ways: CheckpointError lists tensors that are
    missing, unexpected or of another shape.
    """
    if rope not in FORMS:
        raise UsageError(f"unknown form of RoPE {rope!r}; known: {', '.join(FORMS)}")
    if max_seq_len is not None and (
        isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or max_seq_len < 1
    ):
        raise UsageError(f"max_seq_len must be a whole number of at least 1, got {max_seq_len!r}")
    config = with_rope(checkpoint.config, rope_scaling, rope_theta)
    torch_device = pick_device(device)
    torch_dtype = pick_dtype(dtype, torch_device)
    pack = pack and packs_linears(torch_device, torch_dtype)
    check_tensors(checkpoint)
    with torch.device("meta"), SkipInit():
        model = Transformer(config, rope=rope, max_seq_len=max_seq_len).requires_grad_(False).eval()
    layers = {
        name: child for name, child in model.named_modules() if next(child.parameters(recurse=False), None) is not None
    }

    def source_of(name: str) -> str:
        return "tok_embeddings" if config.tie_embeddings and name == "output" else name

    def fill(name: str) -> None:
        source = source_of(name)
        values: dict[str, Tensor] = {}
        copied: list[str] = []
        for kind, _ in layers[name].named_parameters(recurse=False):  # weight, bias
            stored = checkpoint.tensor(f"{source}.{kind}")
            ordered = to_layout(f"{source}.{kind}", stored, config.head_dim, checkpoint.layout, model.rope.layout)
            values[kind] = _cast(ordered, f"{source}.{kind}", torch_device, torch_dtype)
            if pack or values[kind].data_ptr() != stored.data_ptr():
                copied.append(f"{source}.{kind}")
        if pack and isinstance(layers[name], nn.Linear):
            packed = PackedLinear(values["weight"], values.get("bias"))
            model.set_submodule(
                name, _with_blocks(packed, checkpoint, f"{source}.weight", config.head_dim, model.rope.layout)
            )
        else:
            for kind, value in values.items():
                setattr(layers[name], kind, nn.Parameter(value, requires_grad=False))
        for tensor in copied:
            checkpoint.release(tensor)

    # Dequantization is numpy, which lets go of the interpreter lock, so several threads keep several cores busy; but
    # large weights go one by one, so that no more than one of them is in memory twice.
    large = [name for name in layers if math.prod(checkpoint.shapes[f"{source_of(name)}.weight"]) > LARGE]
    for name in large:
        fill(name)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        for _ in pool.map(fill, [name for name in layers if name not in large]):
            pass
    if config.tie_embeddings and not pack:
        model.output.weight = model.tok_embeddings.weight
    return model


def _with_blocks(linear: PackedLinear, checkpoint: Checkpoint, name: str, head_dim: int, layout: Layout) -> nn.Module:
    """Where the file holds a weight in 4-bit blocks, a layer that decodes from those very blocks; else the layer."""
    if linear.bias is not None or not runs_int4(linear.out_features, linear.in_features):
        return linear
    blocks = checkpoint.blocks4(name)
    if blocks is None:
        return linear
    if layout != checkpoint.layout and name.endswith(ROTATED):
        order = to_layout(name, torch.arange(linear.out_features), head_dim, checkpoint.layout, layout).numpy()
        blocks = Blocks4(*(part[order] for part in blocks))
    return Int4Linear(blocks, wide=linear)


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


def _not_yet(quantize: str | None, compile: bool) -> None:
    if quantize is not None:
        raise UsageError(f"quantize={quantize!r} is not available in this version; leave it out")
    if compile:
        raise UsageError("compile=True is not available in this version; leave it out")
