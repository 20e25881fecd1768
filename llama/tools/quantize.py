"""Quantize a checkpoint to 4 or 8 bits and save it, weight by weight. engine/linears.py computes with the result."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .. import checks
from ..checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.adapters import Adapters, with_adapters
from ..checkpoint.quantized import LAYOUT, Packed, entries_of, write
from ..errors import CheckpointError, ConfigError
from ..hub import resolve
from ..quant.blocks import BlockFormat
from ..quant.schemes import Scheme, pick_scheme, scheme_for
from ..weights import check_tensors, read_quantized, requantization_warning
from .convert import (
    Progress,
    Proof,
    check_target,
    describe,
    prove,
    recorded,
    stored_dtype,
    tokenizer_warnings,
    write_target,
)


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
    progress: Progress | None = None,
) -> Proof:
    """Write a model to the folder `target`, its linear layers quantized, as `clearllama quantize` does.

    The source is a path or a name, as for `llama.load`, in any format. Weights that are stored quantized as in the
    scheme are copied; those quantized in another way are dequantized and quantized again, with a warning. All other
    weights stay as they are.

    scheme         one of `clearllama quantize --list`
    adapters       LoRA adapters to merge first, as for `llama.load`
    shards         number of weight files; 0: as few as needed
    tokenizer      a file or folder with the tokenizer to write in place of the source's own
    chat_template  as for convert.convert
    force          replace an existing folder
    progress       called as progress(what, done, total), in weights

    Returns the `path` of the folder, the number of `tensors` that were read back and compared, and `warnings`.
    Raises UsageError for an unknown scheme, or if the target exists and force is False, CheckpointError for a weight
    that can't be quantized, ConfigError for a model that such a folder can't hold.
    """
    chosen, report = pick_scheme(scheme), progress or (lambda what, done, total: None)
    checks.integer("shards", shards, 0)
    source, target = resolve(source), Path(target)
    checkpoint = with_adapters(open_checkpoint(source, tokenizer), adapters)
    check_tensors(checkpoint)
    hashes: dict[str, str] = {}

    def record(read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
        return recorded(read, hashes, len(checkpoint.shapes), report)

    formats = {name: format_for(checkpoint, name, chosen) for name in checkpoint.shapes}
    packed = {
        name: Packed(format, partial(record(partial(tiles_of, checkpoint, format=format)), name))
        for name, format in formats.items()
        if format is not None
    }
    plain = describe(checkpoint, _dtypes(checkpoint, packed), chat_template)
    model = dataclasses.replace(plain, read=record(plain.read))
    warnings = [*checkpoint.warnings, *requantization_warning(checkpoint, chosen)]

    def read_back(written: Checkpoint, name: str) -> tuple[Tensor, str]:
        tiles = written.tiles(name)
        tensor = written.tensor(name) if tiles is None else tiles
        return tensor, f"{written.shapes[name]} {written.stored(name)}"

    def write_folder(path: Path) -> Proof:
        warnings.extend(write(path, model, packed, scheme, shards))
        warnings.extend(tokenizer_warnings(checkpoint, model, "hf", chat_template))
        return Proof(target, len(hashes), prove(path, checkpoint.config, hashes, read_back, report), warnings)

    check_target(source, target, True, force)
    needed = sum(entry.nbytes for entry in entries_of(model, packed)[0].values())
    try:
        return write_target(target, True, force, needed, write_folder)
    except ConfigError as error:
        raise ConfigError(f"{source} can't be saved: {error}") from error


def format_for(checkpoint: Checkpoint, name: str, scheme: Scheme) -> BlockFormat | None:
    """The quantized format to save a weight in; None for floating point.

    Linear layers are quantized by the scheme. An embedding that is not tied to one is not, but stays quantized if the
    source stores it so, in 4 or 8 bits.
    """
    layer = name.removesuffix(".weight")
    embedding = layer == "tok_embeddings" and not checkpoint.config.tie_embeddings
    if len(checkpoint.shapes[name]) != 2:
        return None
    if embedding:
        stored = checkpoint.blocks(name, slice(0, 1))
        return None if stored is None else stored.simple.format
    return scheme_for("output" if layer == "tok_embeddings" else layer, scheme).format


def tiles_of(checkpoint: Checkpoint, name: str, format: BlockFormat) -> Tensor:
    """A weight in packed tiles, copied from the file or quantized. Raises CheckpointError if it can't be quantized."""
    try:
        tiles = read_quantized(checkpoint, name, format, LAYOUT).tiles()
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {checkpoint.file_name(name)}: {error}") from error
    checkpoint.release(name)
    return tiles


def _dtypes(checkpoint: Checkpoint, packed: Mapping[str, Packed]) -> dict[str, torch.dtype]:
    """The dtype to store each weight in; for quantized weights the one to compute in, float32 if dequantized here."""
    stored = {name: stored_dtype(checkpoint, name) for name in checkpoint.shapes}
    computed = {name: torch.bfloat16 if name in packed else torch.float32 for name in stored}
    return {name: kind if isinstance(kind, torch.dtype) else computed[name] for name, kind in stored.items()}
