"""A checkpoint rounded to 4 or 8 bits and saved, weight by weight; what a running model does with it is in quant.py."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.quantized import LAYOUT, Packed, entries_of, write
from ..checkpoint.write import Model
from ..errors import CheckpointError, ConfigError, UsageError
from ..quant.blocks import BlockFormat
from ..quant.schemes import Scheme, pick_scheme, scheme_for
from ..weights import check_tensors, read_quantized, requantization_warning
from .convert import NO_TEMPLATE, Progress, Proof, check_target, describe, put_whole, stored_dtype, tensor_hash


def quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    scheme: str = "int4",
    *,
    shards: int = 0,
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Proof:
    """Write the model at `source` to the folder `target`, its linear layers rounded to a scheme of quant.SCHEMES.

    The source may be of any format. Where it is stored in the very integers that the scheme asks for, they are kept;
    others are turned into numbers and rounded again, and a warning says so. Everything else stays what it is.

    shards  files to spread the weights over; 0 is as few as needed
    force   replace a folder that exists

    Raises as convert.convert does, UsageError for an unknown scheme, CheckpointError for a weight that can't be
    rounded.
    """
    chosen = pick_scheme(scheme)
    if shards < 0:
        raise UsageError(f"the number of shards must not be negative, got {shards}")
    source, target = Path(source), Path(target)
    checkpoint = open_checkpoint(source)
    check_tensors(checkpoint)
    hashes: dict[str, str] = {}

    def noted(name: str, tensor: Tensor) -> Tensor:
        hashes[name] = tensor_hash(tensor)
        progress("writing", len(hashes), len(checkpoint.shapes))
        return tensor

    def read_tiles(name: str, kind: BlockFormat) -> Tensor:
        return noted(name, tiles_of(checkpoint, name, kind))

    kinds = {name: kind_of(checkpoint, name, chosen) for name in checkpoint.shapes}
    packed = {name: Packed(kind, partial(read_tiles, name, kind)) for name, kind in kinds.items() if kind is not None}
    plain = describe(checkpoint, _dtypes(checkpoint, packed))
    model = Model(**{**plain.__dict__, "read": lambda name: noted(name, plain.read(name))})
    warnings = requantization_warning(checkpoint, chosen)

    def fill(place: Path) -> Proof:
        warnings.extend(write(place, model, packed, scheme, shards))
        if model.tokenizer is None:
            warnings.append(f"why there is no tokenizer: {model.no_tokenizer}")
        elif checkpoint.format == "Meta":
            warnings.append(NO_TEMPLATE)
        return Proof(target, len(hashes), _prove(place, hashes, progress), warnings)

    check_target(source, target, True, force)
    needed = sum(entry.nbytes for entry in entries_of(model, packed)[0].values())
    try:
        return put_whole(target, True, force, needed, fill)
    except ConfigError as error:
        raise ConfigError(f"{source} can't be saved: {error}") from error


def kind_of(checkpoint: Checkpoint, name: str, scheme: Scheme) -> BlockFormat | None:
    """As what kind of integers a weight is saved; None: as the numbers that it is.

    A linear layer gets the scheme's. An embedding that is not tied to one is not rounded, but keeps integers it has.
    """
    layer = name.removesuffix(".weight")
    embedding = layer == "tok_embeddings" and not checkpoint.config.tie_embeddings
    if len(checkpoint.shapes[name]) != 2:
        return None
    if embedding:
        stored = checkpoint.blocks(name, slice(0, 1))
        return None if stored is None else stored.format
    wanted = scheme_for("output" if layer == "tok_embeddings" else layer, scheme)
    return wanted.format


def tiles_of(checkpoint: Checkpoint, name: str, kind: BlockFormat) -> Tensor:
    """A weight packed, taken from the file's integers or rounded. Raises CheckpointError, naming it, if it can't be."""
    try:
        tiles = read_quantized(checkpoint, name, kind, LAYOUT).tiles()
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {checkpoint.file_name(name)}: {error}") from error
    checkpoint.release(name)
    return tiles


def _dtypes(checkpoint: Checkpoint, packed: Mapping[str, Packed]) -> dict[str, torch.dtype]:
    """Of each weight the dtype it has; of one in few bits that in which it is worth computing with it."""
    stored = {name: stored_dtype(checkpoint, name) for name in checkpoint.shapes}
    few_bits = {name: torch.bfloat16 if name in packed else torch.float32 for name in stored}
    return {name: kind if isinstance(kind, torch.dtype) else few_bits[name] for name, kind in stored.items()}


def _prove(place: Path, hashes: Mapping[str, str], progress: Progress) -> str:
    """Read the new folder and hold each tensor against the hash of what was written; one hash over all.

    Raises CheckpointError when one differs.
    """
    written = open_checkpoint(place)
    check_tensors(written)
    whole = hashlib.sha256()
    for done, name in enumerate(sorted(hashes)):
        progress("checking", done, len(hashes))
        tiles = written.tiles(name)
        if tensor_hash(written.tensor(name) if tiles is None else tiles) != hashes[name]:
            raise CheckpointError(f"{name} does not read back as it was written; the disk or this program is at fault")
        whole.update(f"{name} {written.shapes[name]} {written.stored(name)} {hashes[name]}\n".encode())
        written.release(name)
    progress("checking", len(hashes), len(hashes))
    return whole.hexdigest()
