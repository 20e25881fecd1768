"""Reader and writer of the folders of `clearllama quantize`: Hugging Face folders with quantized matrices.

config.json has a quantization_config. A matrix NAME.weight is stored as NAME.tiles, bytes that tiles.py packed, so
loading only maps them. The file's metadata has their format under that name:

    {"shape": [2048, 2048], "bits": 4, "group": 32, "offset": true}

Norms, biases and an embedding that is not tied are floating-point tensors. The rows of wq and wk are in the order of
Meta's files, not of Hugging Face's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..checks import is_integer
from ..errors import CheckpointError, ConfigError
from ..quant.blocks import BlockFormat, Blocks
from ..quant.tiles import TILE, tiles_shape, unpack
from ..rope import Layout
from . import huggingface, huggingface_write
from .base import dequantized, stored_bytes, to_file_name
from .documents import Fields, parse_json, read_json
from .huggingface import LAYERS, NAMES, HuggingFaceCheckpoint, WeightFile
from .huggingface_write import Entry
from .write import Model

METHOD, VERSION = "clearllama", 1
LAYOUT: Layout = "interleaved"
TILES = ".tiles"
FIELDS = ("bits", "group", "offset")  # of a format; those with a codebook or two levels of scales are not written
GROUPS = (0, 16, 32, 64, 128)  # supported by the kernels
EMBEDDING = "embed_tokens.weight"  # the only matrix that may be stored in floating point
AGAIN = "quantize the source again"


# ------------------------------------------------------------------------------------------------------- reading
def recognizes(folder: Path) -> bool:
    if not huggingface.recognizes(folder):
        return False
    try:
        scheme = read_json(folder / huggingface.CONFIG).get("quantization_config")
    except CheckpointError:
        return False  # HuggingFaceCheckpoint raises the error
    return isinstance(scheme, dict) and scheme.get("quant_method") == METHOD


class QuantizedCheckpoint(HuggingFaceCheckpoint):
    """A folder that `clearllama quantize` wrote. See Checkpoint for the members."""

    format = "Hugging Face, quantized by clearllama"
    layout = LAYOUT

    def __init__(self, folder: Path):
        self._formats: dict[str, tuple[BlockFormat, tuple[int, int]]] = {}  # by name in the files; shape of the weight
        super().__init__(folder)

    @property
    def about(self) -> Mapping[str, Any]:
        stored = {name: (self.stored(name), file.nbytes(source)) for name, (file, source) in self._sources.items()}
        return {"quantization": self.scheme, "weights": stored_bytes(stored)}

    def tensor(self, name: str) -> Tensor:
        packed = self._packed(name)
        if packed is None:
            return super().tensor(name)
        _, (rows, columns) = packed
        return dequantized(rows, columns, lambda part: self._unpack(name, part))

    def stored(self, name: str) -> str:
        packed = self._packed(name)
        return super().stored(name) if packed is None else str(packed[0])

    def bits(self, name: str) -> float:
        packed = self._packed(name)
        if packed is None:
            return super().bits(name)
        format, shape = packed
        tiles, nbytes = tiles_shape(shape, format)
        return 8 * tiles * nbytes / (shape[0] * shape[1])

    def piece(self, name: str, rows: slice, columns: slice) -> Tensor:
        blocks = self.blocks(name, rows)
        return super().piece(name, rows, columns) if blocks is None else blocks.weight[:, columns]

    def blocks(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Blocks | None:
        return None if self._packed(name) is None else self._unpack(name, rows).columns(columns)

    def tiles(self, name: str) -> Tensor | None:
        return None if self._packed(name) is None else super().tensor(name)

    def file_name(self, name: str) -> str:
        return self._sources[name][1] if name in self._sources else super().file_name(name)

    def _unpack(self, name: str, rows: slice) -> Blocks:
        """Rows of a packed weight. Reads only their tiles."""
        format, (count, columns) = self._formats[self._sources[name][1]]
        first, last, _ = rows.indices(count)
        start = first // TILE * TILE
        tiles = super().tensor(name)[start // TILE : -(-last // TILE)]
        return unpack(tiles, last - start, columns, format).rows(slice(first - start, None))

    def _packed(self, name: str) -> tuple[BlockFormat, tuple[int, int]] | None:
        """Format and shape of a weight that is stored as tiles; None for other weights."""
        return self._formats.get(self._sources[name][1])

    def _check_quantization(self, scheme: Mapping[str, Any] | None, where: str) -> None:
        where = f"{where}: quantization_config"
        fields = dict(scheme or {})
        version, self.scheme = fields.get("format_version", object, None), fields.get("scheme", object, None)
        if not is_integer(version) or version != VERSION:
            raise ConfigError(
                f"{where}: format_version must be {VERSION}, got {version!r:.40}; {AGAIN}, or use the version of"
                f" clearllama that wrote it"
            )
        if not isinstance(self.scheme, str):
            raise ConfigError(f"{where}: scheme must be a name, got {self.scheme!r:.40}; {AGAIN}")
        if fields.get("layout", object, None) != LAYOUT:
            raise ConfigError(f"{where}: layout must be {LAYOUT!r}, got {fields.get('layout')!r:.40}; {AGAIN}")
        if unknown := sorted(fields.keys() - {"quant_method", "format_version", "scheme", "layout"}):
            raise ConfigError(f"{where}: unknown keys: {', '.join(unknown):.80}; {AGAIN}")

    def _weight_name(self, source: str) -> str:
        return source.removesuffix(TILES) + ".weight" if source.endswith(TILES) else source

    def _check_stored(self, file: WeightFile, source: str) -> None:
        if not source.endswith(TILES):
            if len(file.shapes[source]) == 2 and not source.endswith(EMBEDDING):  # the order of its rows is unknown
                raise CheckpointError(
                    f"{file.path}: {source} is {file.dtypes[source]}; expected {source.removesuffix('.weight') + TILES}"
                    f" as for all linear layers here; the file is of another model, {AGAIN}"
                )
            return super()._check_stored(file, source)
        format, shape = _parse_format(file.metadata.get(source), f"{file.path}: the metadata of {source}")
        if file.dtypes[source] != "U8" or file.shapes[source] != tiles_shape(shape, format):
            raise CheckpointError(
                f"{file.path}: {source} is {file.dtypes[source]} {file.shapes[source]}; expected U8"
                f" {tiles_shape(shape, format)} for a weight {shape} in {format}; the file is damaged, {AGAIN}"
            )
        self._formats[source] = format, shape

    def _shape(self, file: WeightFile, source: str) -> tuple[int, ...]:
        return self._formats[source][1] if source in self._formats else super()._shape(file, source)


def _parse_format(text: str | None, where: str) -> tuple[BlockFormat, tuple[int, int]]:
    """Format and shape of a packed weight. Raises CheckpointError unless the kernels support the format."""
    if text is None:
        raise CheckpointError(f"{where} is missing, so the shape and the bits are unknown; {AGAIN}")
    try:
        fields = Fields(parse_json(text.encode(), where), where)
        format = BlockFormat(fields.get("bits", int), fields.get("group", int), fields.get("offset", bool))
        shape = fields.get("shape", object, None)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{error}; {AGAIN}") from error
    supported = (
        format.bits in (4, 8) and format.group in GROUPS and (format.group > 0 or format == BlockFormat(8, 0, False))
    )
    if not supported or fields.unknown():
        raise CheckpointError(
            f"{where} is {text!r:.120}; expected shape, offset, 4 or 8 bits and a group of"
            f" {', '.join(map(str, GROUPS[1:]))} (0 for 8 bits without offset), and no other keys; {AGAIN}"
        )
    if not isinstance(shape, list) or len(shape) != 2 or not all(is_integer(n) and 0 < n < 2**40 for n in shape):
        raise CheckpointError(f"{where}: shape must be two sizes above 0, got {shape!r:.60}; {AGAIN}")
    return format, (shape[0], shape[1])


# ------------------------------------------------------------------------------------------------------- writing
class Packed(NamedTuple):
    """A weight to store as tiles, and a function that returns the tiles."""

    format: BlockFormat
    read: Callable[[], Tensor]


def write(folder: Path, model: Model, packed: Mapping[str, Packed], scheme: str, shards: int = 0) -> None:
    """Fill an empty folder. `packed` has the weights to store as tiles; model.read returns the others."""
    entries, metadata = entries_of(model, packed)
    huggingface_write.write_weights(folder, entries, shards, metadata)
    quantization = {"quant_method": METHOD, "format_version": VERSION, "scheme": scheme, "layout": LAYOUT}
    huggingface_write.write_json(
        folder / huggingface.CONFIG, {**huggingface_write.config_json(model), "quantization_config": quantization}
    )
    huggingface_write.write_tokenizer(folder, model)


def entries_of(model: Model, packed: Mapping[str, Packed]) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors to write, those with the strictest alignment first, and the metadata of the packed ones."""
    entries, metadata = {}, {}
    for name in sorted(model.shapes, key=lambda name: (name not in packed, -model.dtypes[name].itemsize)):
        theirs = to_file_name(name, NAMES, LAYERS)
        if name not in packed:
            entries[theirs] = huggingface_write.entry(model, name, LAYOUT)
            continue
        format, read = packed[name]
        rows, columns = model.shapes[name]
        shape = tiles_shape((rows, columns), format)
        theirs = theirs.removesuffix(".weight") + TILES
        entries[theirs] = Entry("U8", shape, shape[0] * shape[1], read)
        metadata[theirs] = json.dumps({"shape": [rows, columns], **dict(zip(FIELDS, format, strict=False))})
    return entries, metadata
