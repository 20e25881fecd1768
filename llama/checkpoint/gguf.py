"""GGUF, llama.cpp's file format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), read with suspicion.

The header is untrusted: no number in it sizes an allocation before it was held against the bytes that are there,
arithmetic is in Python's unbounded integers, and each tensor must begin where the one before it ended. Weights stay
in the mapped file until asked for; blocks are dequantized by the `gguf` package.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import CheckpointError, ConfigError
from ..rope import Layout
from ..tokenizer import Tokenizer
from .blocks import READERS, Blocks4

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LONGEST_NAME = 2**16

# value type -> (struct format, numpy dtype) of the fixed-size ones; 8 is a string, 9 an array
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

# tensor type -> (name, elements in a block, bytes of a block): those the `gguf` package dequantizes
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
    30: ("BF16", 1, 2),
}

# GGUF's tensor names -> the model's; "blk.N." becomes "layers.N."
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
ROPE_FREQS = "rope_freqs.weight"  # known extra: divisors of the frequencies


def recognizes(start: bytes) -> bool:
    return start.startswith(MAGIC)


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. shape is torch's order (GGUF stores it reversed); offset counts from the file's start."""

    type: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Reader:
    """A cursor over bytes that refuses to pass their end."""

    def __init__(self, data: mmap.mmap | bytes, where: str):
        self.data, self.where, self.at, self.size = data, where, 0, len(data)

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {what} (at byte {self.at} of {self.size}); the file is damaged or cut off"
        )

    def take(self, count: int, what: str) -> int:
        """Move over `count` bytes that must exist; returns where they begin."""
        if count > self.size - self.at:
            raise self.fail(f"{what} needs {count} bytes, {self.size - self.at} are left")
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
        """`string`, many times: a vocabulary has 100,000 of them, so this is the loop that has to be quick."""
        data, at, size = self.data, self.at, self.size
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
            if 8 * count > self.size - self.at:  # each string takes at least its own length field
                raise self.fail(f"{what} claims {count} strings, more than the file can hold")
            return self.strings(count, what)
        if item not in SCALARS:
            raise self.fail(f"{what} is an array of type {item}, which a LLaMA file has no use for")
        dtype = np.dtype(SCALARS[item][1])
        start = self.take(count * dtype.itemsize, what)
        return np.frombuffer(self.data, dtype, count, start).copy()


def read_header(data: mmap.mmap | bytes, where: str) -> Header:
    """Everything but the weights. Raises CheckpointError on any contradiction; memory is bounded by the header."""
    reader = _Reader(data, where)
    if not recognizes(data[:4]):
        raise CheckpointError(f"{where} is not a GGUF file: it begins with {data[:4]!r} instead of {MAGIC!r}")
    reader.take(4, "the magic")
    version = reader.scalar(4, "the version")
    if version not in VERSIONS:
        if version.to_bytes(4, "big") in (v.to_bytes(4, "little") for v in VERSIONS):
            raise CheckpointError(f"{where} is a big-endian GGUF file; only little-endian ones are read")
        raise CheckpointError(f"{where} has GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are read")
    n_tensors, n_metadata = reader.scalar(10, "the tensor count"), reader.scalar(10, "the metadata count")
    # A tensor's entry takes at least 32 bytes and a metadata entry 13, so larger counts are lies.
    if 32 * n_tensors + 13 * n_metadata > reader.size - reader.at:
        raise reader.fail(f"the header claims {n_tensors} tensors and {n_metadata} metadata entries, more than fit")

    metadata: dict[str, Any] = {}
    for i in range(n_metadata):
        key = reader.string(f"metadata key {i}")
        if not key or len(key) > LONGEST_NAME or not key.isprintable():
            raise reader.fail(f"metadata key {i} is not a name: {key[:40]!r}")
        if key in metadata:
            raise reader.fail(f"metadata key {key} occurs twice")
        metadata[key] = reader.value(key)

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise CheckpointError(f"{where}: general.alignment must be a power of two from 8 to 2^20, got {alignment!r}")

    entries: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for i in range(n_tensors):
        name = reader.string(f"the name of tensor {i}")
        if not name or len(name) > LONGEST_NAME or not name.isprintable():
            raise reader.fail(f"the name of tensor {i} is not a name: {name[:40]!r}")
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
            readable = ", ".join(name for name, _, _ in TENSOR_TYPES.values())
            raise CheckpointError(f"{where}: tensor {name} has type {type}, which can't be read; readable: {readable}")
        type_name, per_block, block_bytes = TENSOR_TYPES[type]
        elements = 1
        for d in shape:
            elements *= d
        if elements < 1 or shape[-1] % per_block:
            raise CheckpointError(
                f"{where}: tensor {name} of type {type_name} has shape {shape}; sizes must be above 0 and rows whole"
                f" blocks of {per_block}"
            )
        nbytes = elements // per_block * block_bytes
        if offset != expected:
            raise CheckpointError(
                f"{where}: tensor {name} begins at {offset} of the data, expected {expected}, where the one before it"
                f" ends; the file is damaged"
            )
        if start + offset + nbytes > reader.size:
            raise CheckpointError(
                f"{where}: tensor {name} reaches to byte {start + offset + nbytes} and the file has {reader.size};"
                f" it is cut off, fetch it again"
            )
        tensors[name] = TensorInfo(type, shape, start + offset, nbytes)
        expected = -(-(offset + nbytes) // alignment) * alignment
    if reader.size > start + expected:
        raise CheckpointError(
            f"{where}: {reader.size - start - expected} bytes follow the last tensor; the file is damaged"
        )
    return Header(version, metadata, tensors)


class GGUFCheckpoint:
    """A GGUF file of architecture `llama`. See Checkpoint for the members."""

    format = "GGUF"
    layout: Layout = "interleaved"  # converters undo Hugging Face's permutation; llama.cpp's rope type is NORM

    def __init__(self, path: Path):
        self.path = path
        where = str(path)
        with open(path, "rb") as file:
            # Copy-on-write: nobody can write through to the file, and a stray write can't crash the process.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.header = read_header(self._data, where)
        metadata, tensors = self.header.metadata, self.header.tensors
        parts = metadata.get("split.count", 1)
        if parts != 1:
            raise CheckpointError(f"{where} is part {metadata.get('split.no', '?')} of {parts}; join the parts first")
        self._file_names = {_model_name(name, where): name for name in tensors if name != ROPE_FREQS}
        self.shapes = {name: tensors[file_name].shape for name, file_name in self._file_names.items()}
        try:
            self.config = _config(metadata, tensors, self._rope_divisors())
        except ConfigError as error:
            raise CheckpointError(f"{where}: {error}") from error
        template = metadata.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) else None

    @cached_property
    def about(self) -> Mapping[str, Any]:
        metadata, tensors = self.header.metadata, self.header.tensors
        by_type: dict[str, int] = {}
        for info in tensors.values():
            name = TENSOR_TYPES[info.type][0]
            by_type[name] = by_type.get(name, 0) + info.nbytes
        wanted = {"name": "general.name", "organization": "general.organization", "licence": "general.license"}
        told = {label: metadata[key] for label, key in wanted.items() if isinstance(metadata.get(key), str)}
        return {
            **told,
            "weights": {name: by_type[name] for name in sorted(by_type, key=by_type.__getitem__, reverse=True)},
        }

    def tensor(self, name: str) -> Tensor:
        return self._read(self._file_names[name])

    def blocks4(self, name: str) -> Blocks4 | None:
        info = self.header.tensors[self._file_names[name]]
        read = READERS.get(TENSOR_TYPES[info.type][0])
        if read is None or len(info.shape) != 2:
            return None
        return read(np.frombuffer(self._data, np.uint8, info.nbytes, info.offset).reshape(info.shape[0], -1))

    def tokenizer(self) -> Tokenizer:
        from ..tokenizer.gguf import from_metadata

        tokenizer = from_metadata(self.header.metadata, str(self.path))
        if tokenizer.n_vocab > self.config.vocab_size:
            raise CheckpointError(
                f"{self.path}: the tokenizer has {tokenizer.n_vocab} tokens and the embedding"
                f" {self.config.vocab_size} rows; they do not belong together"
            )
        return tokenizer

    def _read(self, file_name: str) -> Tensor:
        info = self.header.tensors[file_name]
        type_name, per_block, block_bytes = TENSOR_TYPES[info.type]
        plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        if type_name in plain:
            count = info.nbytes // block_bytes
            return torch.frombuffer(self._data, dtype=plain[type_name], count=count, offset=info.offset).view(
                info.shape
            )
        from gguf import GGMLQuantizationType, quants

        raw = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)
        out = np.empty(info.nbytes // block_bytes * per_block, np.float32)
        # A matrix is one long row of blocks to the dequantizer; a million numbers at a time stay in the CPU's cache.
        step = 2**20 // per_block
        for first in range(0, info.nbytes // block_bytes, step):
            part = raw[first * block_bytes : (first + step) * block_bytes]
            numbers = quants.dequantize(part[None], GGMLQuantizationType(info.type))[0]
            out[first * per_block : first * per_block + len(numbers)] = numbers
        return torch.from_numpy(out).view(info.shape)

    def _rope_divisors(self) -> list[float] | None:
        if ROPE_FREQS not in self.header.tensors:
            return None
        divisors: list[float] = self._read(ROPE_FREQS).double().flatten().tolist()
        return divisors


def _model_name(file_name: str, where: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", file_name)
    if not match or match[2] not in NAMES:
        raise CheckpointError(f"{where}: tensor {file_name} is not part of a LLaMA decoder; this model can't be run")
    return (f"layers.{match[1]}." if match[1] else "") + NAMES[match[2]] + ".weight"


def _config(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], divisors: list[float] | None
) -> ModelConfig:
    """The architecture from the metadata; sizes that the tensors know are held against them by the loader."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"the architecture is {architecture!r}; only 'llama' can be run")

    def number(key: str, default: Any = None) -> Any:
        value = metadata.get("llama." + key, default)
        if value is None:
            raise ConfigError(f"the key llama.{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"llama.{key} must be one number, got {value!r:.60}")
        return value

    if number("expert_count", 0):
        raise ConfigError(f"it is a mixture of {number('expert_count')} experts, which is not a LLaMA decoder")
    if "token_embd.weight" not in tensors:
        raise ConfigError("the tensor token_embd.weight is missing")
    dim, n_heads = number("embedding_length"), number("attention.head_count")
    if not n_heads:
        raise ConfigError("llama.attention.head_count must be above 0")
    head_dim = number("attention.key_length", dim // n_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise ConfigError(f"llama.{key} is {number(key)} and the head dimension {head_dim}; they must be equal")
    return ModelConfig(
        dim=dim,
        n_layers=number("block_count"),
        n_heads=n_heads,
        n_kv_heads=number("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        hidden_dim=number("feed_forward_length"),
        vocab_size=tensors["token_embd.weight"].shape[0],
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(metadata, divisors),
        max_seq_len=number("context_length"),
        tie_embeddings="output.weight" not in tensors,
    )


def _rope_scaling(metadata: Mapping[str, Any], divisors: list[float] | None) -> dict[str, Any] | None:
    kind = metadata.get("llama.rope.scaling.type", "none")
    factor = metadata.get("llama.rope.scaling.factor", metadata.get("llama.rope.scale_linear"))
    if kind == "none" and "llama.rope.scale_linear" in metadata:
        kind = "linear"
    if kind not in ("none", "linear"):
        raise ConfigError(f"llama.rope.scaling.type {kind!r} is not supported; supported: none, linear, {ROPE_FREQS}")
    if kind == "linear" and factor not in (1, 1.0):
        if divisors is not None:
            raise ConfigError(f"both a linear rope scaling and {ROPE_FREQS} are present; which one holds is unclear")
        return {"rope_type": "linear", "factor": factor}
    return None if divisors is None else {"rope_type": "divisors", "divisors": divisors}
