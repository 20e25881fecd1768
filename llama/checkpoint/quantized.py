"""Reader and writer of the folders of `clearllama quantize`: Hugging Face folders with quantized matrices.

config.json has a quantization_config. A matrix NAME.weight is stored as NAME.tiles, bytes that tiles.py packed, so
loading only maps them. The file's metadata has, under that name, the format of the tiles:

    {"shape": [2048, 2048], "bits": 4, "group": 32, "offset": true}

Norms, biases and an embedding that is not tied are floating-point tensors. The rows of wq and wk are in the order of
Meta's files, not of Hugging Face's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError
from ..quant.groups import GROUPS, GroupedWeight, GroupFormat
from ..quant.tiles import TILE, tiles_shape, unpack
from ..rope import Layout
from ..system.documents import Fields, parse_json
from . import huggingface_write
from .base import HUGGING_FACE_NAMES, to_file_name
from .huggingface import CONFIG, Layer, Method, StoredTensor, StoredWeight
from .huggingface_write import Entry
from .weight import Weight
from .write import Model

METHOD, VERSION = "clearllama", 1
LAYOUT: Layout = "interleaved"


# ------------------------------------------------------------------------------------------------------- reading
def clearllama(fields: Fields) -> Method:
    """The method of a folder that `clearllama quantize` wrote."""
    scheme = fields.get("scheme", str)
    if (fields.get("format_version", int), fields.get("layout", str)) != (VERSION, LAYOUT):
        raise ConfigError(f"{fields.where} is not of version {VERSION}; quantize the source again")
    return Method(f"clearllama as {scheme}", ("tiles",), packed_weight, LAYOUT)


def packed_weight(layer: Layer) -> Weight:
    """The weight that a tensor of tiles stores, in the format that its metadata describe."""
    tiles = layer["tiles"]
    where = f"{tiles.path}: the metadata of {tiles.name}"
    fields = Fields(parse_json(tiles.metadata.encode(), where), where)
    bits, group, offset = fields.get("bits", int), fields.get("group", int), fields.get("offset", bool)
    format, shape = GroupFormat(bits, group, offset), tuple(fields.get("shape", list))
    supported = (bits in (4, 8) and group in GROUPS) or format == GroupFormat(8, 0, False)
    if not supported or len(shape) != 2 or not all(type(n) is int and 0 < n < 2**40 for n in shape):
        raise CheckpointError(f"{where} is not of a supported format; quantize the source again")
    tiles.expect(("U8",), tiles_shape((shape[0], shape[1]), format))
    return PackedWeight(layer, shape, format)


class PackedWeight(StoredWeight):
    """A matrix that is stored as tiles."""

    def __init__(self, tensors: Mapping[str, StoredTensor], shape: tuple[int, ...], format: GroupFormat):
        super().__init__(tensors, shape, str(format))
        self.own_format = format

    def row_format(self) -> GroupFormat:
        return self.own_format

    def tiles(self) -> Tensor | None:
        return self.tensors[0].read() if self.shape == self.whole else None

    def groups(self) -> GroupedWeight:
        rows, columns = self.part
        start = rows.start // TILE * TILE
        tiles = self.tensors[0].read()[start // TILE : -(-rows.stop // TILE)]
        groups = unpack(tiles, rows.stop - start, self.whole[1], self.own_format)
        return groups.rows(slice(rows.start - start, None)).columns(columns)


# ------------------------------------------------------------------------------------------------------- writing
def write(folder: Path, model: Model, formats: Mapping[str, GroupFormat], scheme: str, shards: int) -> None:
    """Fill an empty folder. formats: the weights that model.read returns as tiles -> their formats."""
    entries = {}
    for name in sorted(model.shapes, key=lambda name: (name not in formats, -model.dtypes[name].itemsize)):  # aligned
        theirs = to_file_name(name, HUGGING_FACE_NAMES)
        if name not in formats:
            entries[theirs] = huggingface_write.entry(model, name, LAYOUT)
            continue
        rows, columns = model.shapes[name]
        shape = tiles_shape((rows, columns), formats[name])
        bits, group, offset, *_ = formats[name]  # these have no codebook and no second level of scales
        metadata = json.dumps({"shape": [rows, columns], "bits": bits, "group": group, "offset": offset})
        entry = Entry(torch.uint8, shape, partial(model.read, name), metadata)
        entries[theirs.removesuffix("weight") + "tiles"] = entry
    huggingface_write.write_weights(folder, entries, shards)
    quantization = {"quant_method": METHOD, "format_version": VERSION, "scheme": scheme, "layout": LAYOUT}
    config = {**huggingface_write.config_json(model), "quantization_config": quantization}
    huggingface_write.write_json(folder / CONFIG, config)
    huggingface_write.write_tokenizer(folder, model)
