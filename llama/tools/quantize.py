"""Quantize a checkpoint to 4 or 8 bits and save it, weight by weight. engine/linears.py computes with the result."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
from torch import Tensor

from .. import checks
from ..checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.adapters import Adapters, with_adapters
from ..checkpoint.quantized import LAYOUT, write
from ..checkpoint.write import Model
from ..errors import CheckpointError
from ..hub import resolve
from ..quant.blocks import BlockFormat
from ..quant.schemes import Scheme, pick_scheme, scheme_for
from ..weights import WeightPlan, check_tensors, read_quantized, storage_warnings
from .convert import DTYPES, Progress, Proof, check_target, model_of, save


def quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    scheme: str = "int4",
    *,
    adapters: Adapters = (),
    shards: int = 0,
    tokenizer: str | os.PathLike[str] | None = None,
    chat_template: str = "auto",
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Proof:
    """Write a model to the folder `target`, its linear layers quantized, as `clearllama quantize` does.

    The source is a path or a name, as for `llama.load`. Weights that are stored quantized as in the scheme are copied;
    those quantized in another way are quantized again, with a warning. All other weights stay as they are.

    scheme    one of `clearllama quantize --list`
    adapters  LoRA adapters to merge first, as for `llama.load`
    shards, tokenizer, chat_template, force  as for convert.convert

    Raises UsageError for an unknown scheme, or if the target exists and force is False, CheckpointError for a weight
    that can't be quantized, ConfigError for a model or tokenizer that such a folder can't hold.
    """
    chosen = pick_scheme(scheme)
    checks.integer("shards", shards, 0)
    source, target = resolve(source), Path(target)
    check_target(source, target, True, force)
    checkpoint = with_adapters(open_checkpoint(source, tokenizer), adapters)
    check_tensors(checkpoint)
    formats = {name: format_for(checkpoint, name, chosen) for name in checkpoint.shapes}
    dtypes = {}
    for name, format in formats.items():  # quantized: computed with in bfloat16, or dequantized here to float32
        dtypes[name] = DTYPES.get(checkpoint.stored(name), torch.bfloat16 if format else torch.float32)
    model, warnings = model_of(checkpoint, dtypes, chat_template)

    def read(name: str) -> Tensor:
        format = formats[name]
        if format is None:
            return model.read(name)
        try:
            tiles = read_quantized(checkpoint, name, format, LAYOUT).tiles()
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.path}: {checkpoint.file_name(name)}: {error}") from error
        checkpoint.release(name)
        return tiles

    def read_back(written: Checkpoint, name: str) -> Tensor:
        tiles = written.tiles(name)
        return written.tensor(name) if tiles is None else tiles

    def write_folder(path: Path, recorded: Model) -> None:
        write(path, recorded, {name: format for name, format in formats.items() if format}, scheme, shards)

    proof = save(target, True, dataclasses.replace(model, read=read), write_folder, read_back, progress)
    plan = {name: WeightPlan(name, torch.device("cpu"), format) for name, format in formats.items()}
    return dataclasses.replace(proof, warnings=warnings + storage_warnings(checkpoint, plan, torch.float32))


def format_for(checkpoint: Checkpoint, name: str, scheme: Scheme) -> BlockFormat | None:
    """The quantized format to save a weight in; None for floating point.

    Linear layers are quantized by the scheme. An embedding that is not tied to one is not, but stays quantized if the
    source stores it so, in 4 or 8 bits.
    """
    layer = name.removesuffix(".weight")
    if len(checkpoint.shapes[name]) != 2:
        return None
    if layer == "tok_embeddings" and not checkpoint.config.tie_embeddings:
        stored = checkpoint.blocks(name, slice(0, 1))
        return None if stored is None else stored.simple.format
    return scheme_for("output" if layer == "tok_embeddings" else layer, scheme).format
