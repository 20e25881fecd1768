"""Reader of GGUF, llama.cpp's file format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

The header is untrusted: a number in it sizes an allocation only after it was checked against the file's size,
arithmetic uses Python's unbounded integers, and each tensor must begin where the one before it ends. Weights stay in
the mapped file until they are read.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..checks import is_integer, is_number
from ..config import ModelConfig
from ..errors import CheckpointError, ConfigError, TokenizerError
from ..quant.blocks import READERS, Blocks
from ..rope_scaling import inverse_frequencies
from ..tokenizer import Tokenizer
from .architectures import INTERVAL, LAYOUTS, every, refusal, window_warnings
from .base import (
    Checkpoint,
    check_vocabulary,
    checked,
    dequantized,
    drop_pages,
    stored_bytes,
    to_file_name,
    to_model_name,
)
from .documents import with_remedy

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LONGEST_NAME = 2**16

# Fixed-size value type -> (struct format, numpy dtype)
SCALARS = {
    0: ("<B", "u1"),
    1: ("<b", "i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "?"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
STRING, ARRAY = 8, 9

# Tensor type -> (name, elements in a block, bytes of a block)
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}

# Types that are not supported: removed from llama.cpp, not used for stored weights, or 1 bit
OTHER_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 31: "Q4_0_4_4",
    32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 41: "Q1_0",
}  # fmt: skip

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

LAYERS = "blk"
# GGUF's tensor names -> the model's
NAMES = {
    "token_embd": "tok_embeddings",
    "output_norm": "norm",
    "output": "output",
    "attn_norm": "attention_norm",
    "attn_q": "attention.wq",
    "attn_k": "attention.wk",
    "attn_v": "attention.wv",
    "attn_output": "attention.wo",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w_gate",
    "ffn_up": "feed_forward.w_up",
    "ffn_down": "feed_forward.w_down",
}
# Keys that would change what is computed, and the value that changes nothing
PLAIN_VALUES = {
    "attention.causal": True,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "use_parallel_residual": False,
}
# Extra tensors: divisors of the RoPE frequencies
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
# NVFP4 has one factor for the weight, and one for its input; the second is unused, as inputs are not quantized here
FACTOR = re.compile(r"(.*)\.(scale|input_scale)")
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)")  # llama.cpp's name for a part of a split model


def recognizes(path: Path) -> bool:
    if path.is_dir():
        return any(file.suffix == ".gguf" for file in path.iterdir())
    with open(path, "rb") as file:
        return file.read(4) == MAGIC


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry. shape is in torch's order (GGUF stores it reversed); offset counts from the file's start."""

    type: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


# Limits of a header. A header of Llama 3 has 10 MB and 410,000 strings; the 405B model has 1,138 tensors.
LARGEST_HEADER, MOST_STRINGS, MOST_ENTRIES = 2**27, 2**21, 2**15


class _Reader:
    """A cursor over bytes. Reading past their end, or past the limits of a header, raises CheckpointError."""

    def __init__(self, data: mmap.mmap | bytes, where: str):
        self.data, self.where, self.at, self.size = data, where, 0, len(data)
        self.strings_left = MOST_STRINGS

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {what} (at byte {self.at} of {self.size}); the file is damaged or truncated,"
            " download it again"
        )

    def take(self, count: int, what: str) -> int:
        """Skip `count` bytes, which must exist, and return the position of the first."""
        if count > self.size - self.at:
            raise self.fail(f"{what} needs {count} bytes, but {self.size - self.at} are left")
        if self.at + count > LARGEST_HEADER:
            raise self.fail(
                f"{what} ends after {self.at + count:,} bytes, expected a header of at most {LARGEST_HEADER:,}"
            )
        start = self.at
        self.at += count
        return start

    def scalar(self, type: int, what: str) -> Any:
        format, _ = SCALARS[type]
        return struct.unpack_from(format, self.data, self.take(struct.calcsize(format), what))[0]

    def string(self, what: str) -> str:
        length = self.scalar(10, what)
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def strings(self, count: int, what: str) -> list[str]:
        """`string` repeated `count` times, in a fast loop: a vocabulary has 100,000 strings."""
        self.strings_left -= count
        if self.strings_left < 0:
            raise self.fail(
                f"with {what}, the header has more than {MOST_STRINGS:,} strings, the most that is accepted"
            )
        data, at, size = self.data, self.at, min(self.size, LARGEST_HEADER)
        out: list[str] = []
        from_bytes = int.from_bytes
        try:
            for _ in range(count):
                start = at + 8
                at = start + from_bytes(data[at:start], "little")
                if start > size or at > size:
                    self.at = start - 8
                    raise self.fail(f"string {len(out)} of {what} reaches past the end")
                out.append(data[start:at].decode())
        except UnicodeDecodeError:
            self.at = start
            raise self.fail(f"string {len(out)} of {what} is not UTF-8") from None
        self.at = at
        return out

    def value(self, what: str) -> Any:
        type = self.scalar(4, f"the type of {what}")
        if type in SCALARS:
            return self.scalar(type, what)
        if type == STRING:
            return self.string(what)
        if type != ARRAY:
            raise self.fail(f"{what} has the unknown type {type}")
        item, count = self.scalar(4, what), self.scalar(10, what)
        if item == STRING:
            if 8 * count > self.size - self.at:  # the length of a string takes 8 bytes
                raise self.fail(f"{what} claims {count} strings, more than the file can hold")
            return self.strings(count, what)
        if item not in SCALARS:
            raise self.fail(f"{what} is an array of type {item}, which a LLaMA file does not need")
        dtype = np.dtype(SCALARS[item][1])
        start = self.take(count * dtype.itemsize, what)
        return np.frombuffer(self.data, dtype, count, start).copy()


def read_header(data: mmap.mmap | bytes, where: str) -> Header:
    """Metadata and tensor entries. Raises CheckpointError on any contradiction. Memory is bounded by the header."""
    reader = _Reader(data, where)
    if data[:4] != MAGIC:
        raise CheckpointError(
            f"{where} is not a GGUF file: it begins with {data[:4]!r} instead of {MAGIC!r}; download it again"
        )
    reader.take(4, "the magic")
    version = reader.scalar(4, "the version")
    if version not in VERSIONS:
        if version.to_bytes(4, "big") in (v.to_bytes(4, "little") for v in VERSIONS):
            raise CheckpointError(f"{where} is a big-endian GGUF file; get a little-endian file")
        raise CheckpointError(
            f"{where} has GGUF version {version}, expected {VERSIONS[0]} or {VERSIONS[1]}; get a file of such a version"
        )
    n_tensors, n_metadata = reader.scalar(10, "the tensor count"), reader.scalar(10, "the metadata count")
    # A tensor's entry takes at least 32 bytes and a metadata entry 13.
    if 32 * n_tensors + 13 * n_metadata > reader.size - reader.at:
        raise reader.fail(
            f"the header claims {n_tensors} tensors and {n_metadata} metadata entries, more than the file can hold"
        )
    if max(n_tensors, n_metadata) > MOST_ENTRIES:
        raise reader.fail(
            f"the header claims {n_tensors} tensors and {n_metadata} metadata entries, expected at most"
            f" {MOST_ENTRIES:,}"
        )

    metadata: dict[str, Any] = {}
    for i in range(n_metadata):
        key = reader.string(f"metadata key {i}")
        if not key or len(key) > LONGEST_NAME or not key.isprintable():
            raise reader.fail(f"metadata key {i} is not a valid name: {key[:40]!r}")
        if key in metadata:
            raise reader.fail(f"metadata key {key} occurs twice")
        metadata[key] = reader.value(key)

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise CheckpointError(
            f"{where}: general.alignment must be a power of two from 8 to 2^20, got {alignment!r}; the file is damaged,"
            " download it again"
        )

    entries: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for i in range(n_tensors):
        name = reader.string(f"the name of tensor {i}")
        if not name or len(name) > LONGEST_NAME or not name.isprintable():
            raise reader.fail(f"the name of tensor {i} is not valid: {name[:40]!r}")
        if name in entries:
            raise reader.fail(f"tensor {name} occurs twice")
        n_dims = reader.scalar(4, f"the rank of {name}")
        if not 1 <= n_dims <= 4:
            raise reader.fail(f"tensor {name} has {n_dims} dimensions, expected 1 to 4")
        dims = [reader.scalar(10, f"the shape of {name}") for _ in range(n_dims)]
        type = reader.scalar(4, f"the type of {name}")
        entries[name] = (type, tuple(reversed(dims)), reader.scalar(10, f"the offset of {name}"))

    start = -(-reader.at // alignment) * alignment  # data begins at the next multiple of the alignment
    tensors: dict[str, TensorInfo] = {}
    expected = 0
    for name, (type, shape, offset) in entries.items():
        if type not in TENSOR_TYPES:
            kind = f"type {type} ({OTHER_TYPES[type]})" if type in OTHER_TYPES else f"the unknown type {type}"
            readable = ", ".join(name for name, _, _ in TENSOR_TYPES.values())
            raise CheckpointError(
                f"{where}: tensor {name} has {kind}, which is not supported; get the model in another type, such as"
                f" Q4_K or Q8_0 (supported: {readable})"
            )
        type_name, per_block, block_bytes = TENSOR_TYPES[type]
        elements = math.prod(shape)
        if elements < 1 or shape[-1] % per_block:
            raise CheckpointError(
                f"{where}: tensor {name} of type {type_name} has shape {shape}; sizes must be above 0, and the"
                f" length of a row a multiple of {per_block}: download the file again"
            )
        nbytes = elements // per_block * block_bytes
        if offset != expected:
            raise CheckpointError(
                f"{where}: tensor {name} begins at byte {offset} of the data, expected byte {expected}, where the"
                f" previous tensor ends; the file is damaged, download it again"
            )
        if start + offset + nbytes > reader.size:
            raise CheckpointError(
                f"{where}: tensor {name} ends at byte {start + offset + nbytes:,}, but the file has"
                f" {reader.size:,} bytes; it is truncated, download it again"
            )
        tensors[name] = TensorInfo(type, shape, start + offset, nbytes)
        expected = -(-(offset + nbytes) // alignment) * alignment
    if reader.size > start + expected:
        raise CheckpointError(
            f"{where}: {reader.size - start - expected} bytes follow the last tensor; the file is damaged, download"
            " it again"
        )
    return Header(version, metadata, tensors)


class Part:
    """One GGUF file: its header and its mapped bytes."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                # Copy-on-write: writing to a weight can't change the file or crash the process.
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from None
        except ValueError:
            raise CheckpointError(
                f"{path} is empty; the download was probably interrupted, download it again"
            ) from None
        self.header = read_header(self.data, str(path))

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor: (rows, bytes of a row). A row has shape[-1] entries, whatever the rank."""
        info = self.header.tensors[name]
        return np.frombuffer(self.data, np.uint8, info.nbytes, info.offset).reshape(math.prod(info.shape[:-1]), -1)

    def tensor(self, name: str) -> Tensor:
        """A tensor by the file's name for it, dequantized to float32 if it is quantized."""
        info = self.header.tensors[name]
        type_name, _, block_bytes = TENSOR_TYPES[info.type]
        if type_name in PLAIN:
            count = info.nbytes // block_bytes
            return torch.frombuffer(self.data, dtype=PLAIN[type_name], count=count, offset=info.offset).view(info.shape)
        read, raw = READERS[type_name], self.raw(name)
        return dequantized(len(raw), info.shape[-1], lambda rows: read(raw[rows])).view(info.shape)

    def piece(self, name: str, rows: slice, columns: slice) -> Tensor:
        """`tensor(name)[rows, columns]` of a matrix. Reads only the blocks that contain them."""
        covering = self.covering(name, rows, columns)
        if covering is None:
            return self.tensor(name)[rows, columns]
        blocks, own = covering
        return blocks.weight[:, own]

    def covering(self, name: str, rows: slice, columns: slice) -> tuple[Blocks, slice] | None:
        """The stored blocks of a quantized matrix that contain these rows and columns, and the columns within them."""
        info = self.header.tensors[name]
        type_name, per_block, block_bytes = TENSOR_TYPES[info.type]
        if type_name in PLAIN or len(info.shape) != 2:
            return None
        first, last, _ = columns.indices(info.shape[1])
        start, end = first // per_block, -(-last // per_block)  # blocks of a row
        raw = self.raw(name)[rows, start * block_bytes : end * block_bytes]
        return READERS[type_name](raw), slice(first - start * per_block, last - start * per_block)


class GGUFCheckpoint(Checkpoint):
    """A GGUF model of an architecture in LAYOUTS, in one file or split. See Checkpoint for the members."""

    format = "GGUF"

    def __init__(self, path: Path):
        self.path = path
        parts = _open_parts(path)
        self.metadata = parts[0].header.metadata
        self.parts = {part.path.name: len(part.data) for part in parts}
        where = str(parts[0].path)
        self._sources: dict[str, tuple[Part, str]] = {}
        self._factors: dict[str, float] = {}
        tables: dict[str, list[float]] = {}
        for part in parts:
            for file_name in part.header.tensors:
                if file_name in (ROPE_FREQS, ROPE_LONG, ROPE_SHORT):
                    tables[file_name] = part.tensor(file_name).double().flatten().tolist()
                    continue
                if (match := FACTOR.fullmatch(file_name)) and (
                    of := to_model_name(f"{match[1]}.weight", NAMES, LAYERS)
                ):
                    if match[2] == "scale":
                        self._factors[of] = _factor(part, file_name)
                    continue
                name = to_model_name(file_name, NAMES, LAYERS)
                if name is None:
                    raise CheckpointError(
                        f"{part.path}: tensor {file_name} is not part of a LLaMA decoder, so this model can't be run;"
                        " try llama.cpp"
                    )
                if name in self._sources:
                    raise CheckpointError(
                        f"{part.path}: tensor {file_name} is also in {self._sources[name][0].path.name}; download"
                        " both again"
                    )
                self._sources[name] = part, file_name
        self.shapes = {name: part.header.tensors[file_name].shape for name, (part, file_name) in self._sources.items()}
        try:
            self.config = checked(_config(self.metadata, self.shapes, tables))
        except ConfigError as error:
            raise CheckpointError(
                f"{where}: {with_remedy(error, 'get another conversion of the model, or run it in llama.cpp')}"
            ) from error
        self.layout = LAYOUTS[self.metadata["general.architecture"]]
        self.warnings = [*window_warnings(self.config), *pre_warnings(self.metadata)]
        self.chat_template = self.metadata.get("tokenizer.chat_template")
        if not isinstance(self.chat_template, str | None):
            raise CheckpointError(
                f"{where}: tokenizer.chat_template must be a string, got {_shown(self.chat_template)}; download it"
                " again"
            )

    @property
    def about(self) -> Mapping[str, Any]:
        infos = {name: part.header.tensors[file_name] for name, (part, file_name) in self._sources.items()}
        labels = {"name": "general.name", "organization": "general.organization", "licence": "general.license"}
        facts = {label: self.metadata[key] for label, key in labels.items() if isinstance(self.metadata.get(key), str)}
        stored = {name: (TENSOR_TYPES[info.type][0], info.nbytes) for name, info in infos.items()}
        return {**facts, "weights": stored_bytes(stored)}

    def tensor(self, name: str) -> Tensor:
        part, file_name = self._sources[name]
        return self._scaled(name, part.tensor(file_name))

    def _scaled(self, name: str, weight: Tensor) -> Tensor:
        return weight * self._factors[name] if name in self._factors else weight

    def file_name(self, name: str) -> str:
        return to_file_name(name, NAMES, LAYERS)

    def stored(self, name: str) -> str:
        part, file_name = self._sources[name]
        return TENSOR_TYPES[part.header.tensors[file_name].type][0]

    def bits(self, name: str) -> float:
        part, file_name = self._sources[name]
        _, per_block, block_bytes = TENSOR_TYPES[part.header.tensors[file_name].type]
        return 8 * block_bytes / per_block

    def release(self, name: str) -> None:
        drop_pages(self.raw(name))

    def raw(self, name: str) -> Tensor:
        """The bytes of a weight in the file: (rows, bytes of a row) uint8."""
        part, file_name = self._sources[name]
        return torch.from_numpy(part.raw(file_name))

    def piece(self, name: str, rows: slice, columns: slice) -> Tensor:
        part, file_name = self._sources[name]
        if len(self.shapes[name]) == 1:
            return part.tensor(file_name)[rows]
        return self._scaled(name, part.piece(file_name, rows, columns))

    def blocks(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Blocks | None:
        part, file_name = self._sources[name]
        covering = part.covering(file_name, rows, columns)
        if covering is None:
            return None
        blocks, own = covering  # a stored block may contain several groups
        blocks = blocks.columns(own)
        return blocks.scaled(self._factors[name]) if name in self._factors else blocks

    def own_tokenizer(self) -> Tokenizer:
        from ..tokenizer.gguf import from_metadata

        tokenizer = from_metadata(self.metadata, str(self.path))
        if tokenizer.add_bos and tokenizer.bos_id is None:
            raise TokenizerError(
                f"{self.path}: the tokenizer adds a begin-of-text id, and the key tokenizer.ggml.bos_token_id is"
                f" missing; the vocabulary is damaged, download the file again"
            )
        check_vocabulary(tokenizer, self.config, str(self.path))
        return tokenizer


def _factor(part: Part, name: str) -> float:
    """The only element of a tensor. Raises CheckpointError unless there is one, and it is finite."""
    count = math.prod(part.header.tensors[name].shape)
    value = float(part.tensor(name)) if count == 1 else math.nan
    if not math.isfinite(value):
        found = value if count == 1 else f"{count} of them"
        raise CheckpointError(
            f"{part.path}: tensor {name} must hold one finite number, the factor of a weight, got {found}; the file is"
            f" damaged or of another architecture, download it again"
        )
    return value


def _open_parts(path: Path) -> list[Part]:
    """The files of a model: one file, or all parts of a split model, whichever part `path` names."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix == ".gguf")
        sets = {match[1] if (match := PART.fullmatch(file.name)) else file.name for file in files}
        if len(sets) > 1:
            names = ", ".join(file.name for file in files[:4])
            raise CheckpointError(f"{path} contains {len(sets)} GGUF models ({names}); name one of them")
        path = files[0]
    named = Part(path)
    count, number = (named.header.metadata.get(f"split.{key}", default) for key, default in (("count", 1), ("no", 0)))
    for key, value in (("count", count), ("no", number)):
        if not is_integer(value):
            raise CheckpointError(f"{path}: split.{key} must be an integer, got {_shown(value)}; download it again")
    if count in (0, 1):
        return [named]
    match = PART.fullmatch(path.name)
    if not match or not 1 < count < 10**5 or int(match[3]) != count or int(match[2]) != number + 1:
        raise CheckpointError(
            f"{path} is part {number} (from 0) of {count}; parts are found by names like"
            f" NAME-00001-of-00003.gguf, so rename it to its original name"
        )
    files = [path.with_name(f"{match[1]}-{i + 1:05d}-of-{count:05d}{match[4]}") for i in range(count)]
    there = {file.name for file in path.parent.iterdir()}  # listed once: a name may claim 99,999 parts
    if missing := [file.name for file in files if file.name not in there or not file.is_file()]:
        raise CheckpointError(
            f"{path} is one of {count} parts, and {len(missing)} are missing: {', '.join(missing[:4])}; download them"
        )
    parts = [named if file == path else Part(file) for file in files]
    for i, part in enumerate(parts):
        stored = tuple(part.header.metadata.get(f"split.{key}") for key in ("no", "count"))
        if stored != (i, count):
            raise CheckpointError(
                f"{part.path} is part {i} of {count} by its name, but part {stored[0]} of {stored[1]} by its header;"
                " restore its original name"
            )
    expected, found = parts[0].header.metadata.get("split.tensors.count"), sum(len(p.header.tensors) for p in parts)
    if expected not in (None, found):
        raise CheckpointError(
            f"{path}: the parts contain {found} tensors, expected {expected}; they belong to different models,"
            " download all of them again"
        )
    return parts


def _config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], tables: Mapping[str, list[float]]
) -> ModelConfig:
    """The architecture by the metadata. The loader checks it against the shapes of the tensors."""
    architecture = _single(metadata, "general.architecture")
    if not isinstance(architecture, str) or architecture not in LAYOUTS:
        raise ConfigError(refusal("general.architecture", architecture, LAYOUTS))
    prefix = f"{architecture}."

    def number(key: str, default: Any = None) -> Any:
        value = metadata.get(prefix + key, default)
        if value is None:
            raise ConfigError(f"the key {prefix}{key} is missing")
        if not is_number(value):
            raise ConfigError(f"{prefix}{key} must be one number, got {_shown(value)}")
        return _decimal(value)

    if number("expert_count", 0):
        raise ConfigError(
            f"it is a mixture of {number('expert_count')} experts, which is not a LLaMA decoder; try transformers, vLLM"
            f" or llama.cpp"
        )
    for key, plain in PLAIN_VALUES.items():
        if (value := _single(metadata, prefix + key, plain)) != plain:
            raise ConfigError(f"{prefix}{key} is {value!r:.40}, expected {plain!r} as in every LLaMA")
    if "tok_embeddings.weight" not in shapes:
        raise ConfigError("the tensor token_embd.weight is missing")
    if number("vocab_size", shapes["tok_embeddings.weight"][0]) != shapes["tok_embeddings.weight"][0]:
        rows = shapes["tok_embeddings.weight"][0]
        raise ConfigError(f"{prefix}vocab_size is {number('vocab_size')}, but the embedding has {rows} rows")
    dim, n_heads = number("embedding_length"), number("attention.head_count")
    if not n_heads:
        raise ConfigError(f"{prefix}attention.head_count must be above 0")
    head_dim = number("attention.key_length", dim // n_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise ConfigError(f"{prefix}{key} is {number(key)}, but the head dimension is {head_dim}")
    theta, n_layers = number("rope.freq_base", 10000.0), number("block_count")
    q_bias, o_bias = (f"layers.0.attention.{name}.bias" in shapes for name in ("wq", "wo"))
    return ModelConfig(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=number("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        hidden_dim=number("feed_forward_length"),
        vocab_size=shapes["tok_embeddings.weight"][0],
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(metadata, prefix, tables, head_dim, theta),
        max_seq_len=number("context_length"),
        tie_embeddings="output.weight" not in shapes,
        attention_bias=o_bias,
        qkv_bias=q_bias and not o_bias,
        mlp_bias="layers.0.feed_forward.w_gate.bias" in shapes,
        no_rope_layers=every(INTERVAL, n_layers) if architecture == "smollm3" else (),
        sliding_window=number("attention.sliding_window", 0) or None,
    )


def pre_warnings(metadata: Mapping[str, Any]) -> list[str]:
    """A warning if a file does not name its pre-tokenizer."""
    if metadata.get("tokenizer.ggml.model") != "gpt2" or metadata.get("tokenizer.ggml.pre") is not None:
        return []
    return [
        "the file does not name its pre-tokenizer (no key tokenizer.ggml.pre); using llama.cpp's default; if answers"
        " are poor, download a newer conversion"
    ]


def _single(metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A value that must not be an array: comparing an array returns an array."""
    value = metadata.get(key, default)
    if isinstance(value, list | np.ndarray):
        raise ConfigError(f"{key} must be one value, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """A metadata value for an error message."""
    if isinstance(value, list | np.ndarray):
        return f"an array of {len(value)}: {list(value[:4])!r:.60}" if len(value) else "an empty array"
    return f"{value!r:.60}"


def _decimal(value: float) -> float:
    """The shortest decimal of a float32 in the file: 1e-05, not 9.999999747378752e-06."""
    return value if isinstance(value, int) or float(np.float32(value)) != value else float(str(np.float32(value)))


def _rope_scaling(
    metadata: Mapping[str, Any], architecture: str, tables: Mapping[str, list[float]], head_dim: int, theta: float
) -> dict[str, Any] | None:
    """The scaling from {architecture}rope.scaling.*, the older rope.scale_linear, or a table of divisors."""
    prefix = f"{architecture}rope.scaling."
    given = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key, value in given.items():
        if key not in ("type", "finetuned") and not is_number(value):
            raise ConfigError(f"{prefix}{key} must be one number, got {_shown(value)}")
    numbers = {key: _decimal(value) for key, value in given.items() if isinstance(value, int | float)}
    factor = numbers.get("factor", _single(metadata, f"{architecture}rope.scale_linear"))
    kind = _single(metadata, prefix + "type", "linear")  # llama.cpp's default if there is only a factor; 0 means none
    if kind == "linear" and factor in (None, 0, 0.0, 1, 1.0):
        kind = "none"
    if kind in ("none", "linear") and numbers.get("attn_factor", 1) != 1:
        raise ConfigError(f"{prefix}attn_factor is {numbers['attn_factor']}, but {prefix}type {kind} does not use it")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ConfigError(f"{prefix}type {kind!r:.40} is not supported, only none, linear, yarn and longrope are")
    if kind != "none" and ROPE_FREQS in tables:
        raise ConfigError(f"both {prefix}type {kind} and {ROPE_FREQS} are present, so it is unclear which one applies")
    original = {"original_max_position_embeddings": numbers["original_context_length"]} if (
        "original_context_length" in numbers) else {}  # fmt: skip
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor is None:
        raise ConfigError(f"{prefix}type is yarn, but {prefix}factor is missing")
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, **original, **_yarn_keys(numbers, factor)}
    if kind == "longrope" or ROPE_LONG in tables:
        if not (ROPE_LONG in tables and ROPE_SHORT in tables):
            raise ConfigError(f"longrope needs the tensors {ROPE_LONG} and {ROPE_SHORT}")
        attention = {"attention_factor": numbers.get("attn_factor", 1.0)}  # llama.cpp does not compute one
        lists = {"short_factor": tables[ROPE_SHORT], "long_factor": tables[ROPE_LONG]}
        return {"rope_type": "longrope", **lists, **original, **attention}
    if ROPE_FREQS not in tables:
        return None
    return _as_llama3(tables[ROPE_FREQS], head_dim, theta) or {"rope_type": "divisors", "divisors": tables[ROPE_FREQS]}


def _yarn_keys(numbers: Mapping[str, float], factor: Any) -> dict[str, float]:
    """The keys of YaRN only. llama.cpp multiplies YaRN's own attention factor by attn_factor."""
    out = {theirs: numbers[ours] for ours, theirs in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"))
           if ours in numbers}  # fmt: skip
    if numbers.get("yarn_ext_factor", -1) not in (-1, 1):
        raise ConfigError(f"rope.scaling.yarn_ext_factor is {numbers['yarn_ext_factor']}, only 1 is supported")
    multiplier = numbers.get("attn_factor", 1.0) * numbers.get("yarn_attn_factor", 1.0)
    if isinstance(factor, int | float) and factor > 0 and (multiplier != 1 or factor < 1):
        out["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1)
    return out


def _as_llama3(divisors: list[float], head_dim: int, theta: float) -> dict[str, Any] | None:
    """The llama3 scaling from which a table of divisors was computed, or None if there is none.

    The table is rounded to float32; the parameters yield the exact frequencies, as in the other formats.
    """
    if len(divisors) != head_dim // 2:
        return None
    plain, _ = inverse_frequencies(head_dim, theta)
    for power in range(1, 25):
        scaling = {
            "rope_type": "llama3",
            "factor": float(round(max(divisors), 3)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2**power,
        }
        if scaling["factor"] < 1:
            return None
        scaled, _ = inverse_frequencies(head_dim, theta, scaling)
        if torch.allclose(plain / scaled, torch.tensor(divisors, dtype=plain.dtype), rtol=2e-6, atol=0):
            return scaling
    return None
