"""Reader of GGUF models, in one file or split. Weights stay in the mapped files until they are read.

A weight is stored in floating point or in the blocks of a quantized type; see quant/groups.py.
"""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import ModelConfig
from ..errors import CheckpointError, ConfigError, DamagedError
from ..hub.repository import PART, with_all_parts
from ..quant.groups import READERS, GroupedWeight, GroupFormat, dequantize
from ..rope_scaling import inverse_frequencies
from ..system.documents import Fields, start_of
from ..tokenizer import Tokenizer
from . import base
from .architectures import GGUF_LAYOUTS, GGUF_MULTIPLIERS, INTERVAL, SCALED_ROPE, every, folded, known
from .base import GGUF_NAMES, Checkpoint
from .gguf_header import MAGIC, TensorInfo, read_header
from .weight import DTYPES, Blocks, Weight

TEMPLATE = "tokenizer.chat_template"
# Keys that can change what is computed -> the only supported value, which changes nothing
PLAIN_VALUES = {
    "expert_count": 0, "attention.causal": True, "attention.scale": 0.0, "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "logit_scale": 0.0, "embedding_scale": 0.0,
    "residual_scale": 0.0, "use_parallel_residual": False,
}  # fmt: skip
SCALING = "rope.scaling."
YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_log_multiplier": "mscale_all_dim"}
# Extra tensors: divisors of the RoPE frequencies
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
TABLES = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)


def recognizes(path: Path) -> bool:
    if path.is_dir():
        return any(file.suffix == ".gguf" for file in path.iterdir())
    return start_of(path).startswith(MAGIC)


class GGUFWeight(Weight):
    """A tensor in a mapped file."""

    def __init__(self, data: mmap.mmap, info: TensorInfo, name: str):
        super().__init__(name, info.shape, info.type)
        self.data, self.info = data, info

    @property
    def bits(self) -> float:
        return 8 * self.info.size / self.info.block

    @property
    def raw(self) -> NDArray[np.uint8]:
        """The bytes of the complete tensor: (rows, bytes of a row). A row has whole[-1] entries, whatever the rank."""
        rows, width = math.prod(self.whole[:-1]), self.whole[-1] // self.info.block * self.info.size
        return np.frombuffer(self.data, np.uint8, rows * width, self.info.offset).reshape(rows, width)

    def mapped(self) -> list[Tensor]:
        return [torch.from_numpy(self.raw)]

    def row_format(self) -> GroupFormat | None:
        return _format(self.stored, self.info.size)

    def floats(self) -> Tensor:
        if self.stored not in DTYPES:
            return super().floats() if len(self.whole) == 2 else self.dequantized().view(self.shape)
        raw = self.raw
        aligned = raw.copy() if self.info.offset % self.info.size else raw
        return torch.from_numpy(aligned).view(DTYPES[self.stored]).view(self.whole)[self.part].contiguous()

    def dequantized(self) -> Tensor:
        raw, columns = self._stored_blocks()
        return dequantize(raw, self.stored)[:, columns]

    def groups(self) -> GroupedWeight:
        raw, columns = self._stored_blocks()
        return READERS[self.stored](raw).columns(columns)  # a stored block may contain several groups

    def blocks(self) -> Blocks | None:
        if self.row_format() is None or len(self.whole) != 2:
            return None
        raw, columns = self._stored_blocks()
        complete = columns.start == 0 and columns.stop == raw.shape[1] // self.info.size * self.info.block
        return Blocks(torch.from_numpy(raw), self.stored) if complete else None

    def _stored_blocks(self) -> tuple[NDArray[np.uint8], slice]:
        """The bytes of the blocks that contain this part, and the part's columns within these blocks."""
        block, size = self.info.block, self.info.size
        rows, columns = self.part[0] if len(self.whole) == 2 else slice(None), self.ranges[-1]
        start, end = columns.start // block, -(-columns.stop // block)  # blocks of a row
        own = slice(columns.start - start * block, columns.stop - start * block)
        return self.raw[rows, start * size : end * size], own


@functools.cache
def _format(type: str, size: int) -> GroupFormat | None:
    """The format of the groups of a type with blocks of `size` bytes; None if the kernels do not support it."""
    return READERS[type](np.zeros((1, size), np.uint8)).format if type in READERS else None


class GGUFFile:
    """A mapped file: its metadata, and its tensors by their names in the file."""

    def __init__(self, path: Path):
        self.path = path
        start_of(path)  # raises CheckpointError if it can't be read or is empty
        with open(path, "rb") as file:
            # Copy-on-write: writing to a weight can't change the file or crash the process.
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.metadata, infos = read_header(self.data, str(path))
        self.tensors = {name: GGUFWeight(self.data, info, name) for name, info in infos.items()}


class GGUFCheckpoint(Checkpoint):
    """A GGUF model of an architecture in GGUF_LAYOUTS. See Checkpoint for the members."""

    format = "GGUF"
    names = GGUF_NAMES

    def __init__(self, path: Path):
        self.path = path
        files = _open_files(path)
        self.metadata = files[0].metadata
        self.parts = {file.path.name: len(file.data) for file in files}
        found = [item for file in files for item in file.tensors.items() if item[1].info.nbytes]
        stored = dict(found)
        if len(stored) < len(found):
            raise DamagedError(f"{path}: two of its {len(files)} files have the same tensor")
        tables = {name: stored.pop(name).floats().double().flatten().tolist() for name in TABLES if name in stored}
        weights: dict[str, Weight] = {}
        for file_name, tensor in stored.items():
            name = base.to_model_name(file_name, GGUF_NAMES)
            if name is None:
                raise CheckpointError(f"{path}: {file_name:.80} is not part of a LLaMA decoder; try llama.cpp")
            weights[name] = tensor
        fields = Fields(self.metadata, "metadata")
        self.config = _config(fields, {name: weight.shape for name, weight in weights.items()}, tables)
        self._weights = base.model_weights(weights, self.config)
        self.config, self.factors = folded(self.config, fields)
        self.layout = GGUF_LAYOUTS[self.metadata["general.architecture"]]
        self.chat_template = _chat_template(fields)
        if self.metadata.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in self.metadata:
            self.warnings = ["no key tokenizer.ggml.pre; using llama.cpp's default, with which answers may be poor"]

    @property
    def about(self) -> Mapping[str, Any]:
        name = self.metadata.get("general.name")
        return {**({"name": name} if isinstance(name, str) else {}), **super().about}

    def own_tokenizer(self) -> Tokenizer:
        from ..tokenizer.gguf import from_metadata

        return from_metadata(self.metadata, str(self.path))


def _open_files(path: Path) -> list[GGUFFile]:
    """The files of a model: one file, or all files of a split model, whichever of them `path` names."""
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix == ".gguf")
        if len({PART.sub(r"\1", file.name) for file in found}) > 1:
            raise CheckpointError(f"{path} contains several GGUF models; name one of them, such as {found[0]}")
        path = found[0]
    return [GGUFFile(path.with_name(name)) for name in sorted(with_all_parts([path.name]))]


def _chat_template(metadata: Fields) -> str | Mapping[str, str] | None:
    """The chat template, or {name: template} if keys tokenizer.chat_template.NAME give several."""
    keys = [key for key in metadata.values if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")]
    templates = {key[len(TEMPLATE) + 1 :] or "default": metadata.get(key, str) for key in keys}
    return templates["default"] if templates.keys() == {"default"} else templates or None


def _config(metadata: Fields, shapes: Mapping[str, tuple[int, ...]], tables: Mapping[str, list[float]]) -> ModelConfig:
    """The architecture that the metadata describe. The loader checks it against the shapes of the tensors."""
    architecture = known(metadata, "general.architecture", GGUF_LAYOUTS)
    if "tok_embeddings.weight" not in shapes:
        raise ConfigError("the tensor token_embd.weight is missing")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): _same(value) for key, value in metadata.values.items() if key.startswith(prefix)}
    fields = Fields(own, architecture)
    n_heads, n_layers = fields.get("attention.head_count", int), fields.get("block_count", int)
    dim = fields.get("embedding_length", int)
    head_dim = fields.get("attention.key_length", int, dim // max(n_heads, 1))
    rotated = fields.get("rope.dimension_count", int, head_dim) if architecture == "phi3" else head_dim
    plain = {**PLAIN_VALUES, "attention.value_length": head_dim, "rope.dimension_count": rotated}
    if architecture == "granite":  # finetuned is false if no layer has RoPE; `folded` reads the multipliers
        plain = {key: value for key, value in plain.items() if key not in GGUF_MULTIPLIERS}
        plain["rope.scaling.finetuned"] = True
    window = fields.get("attention.sliding_window", int, 0)
    if architecture == "mistral3" and fields.get("attention.temperature_scale", float, 0.0):  # then it scales queries
        window = fields.get("rope.scaling.original_context_length", int)
    for key, expected in plain.items():
        if (value := fields.get(key, type(expected), expected)) != expected:
            raise ConfigError(f"{prefix}{key} is {value!r:.40}, expected {expected!r}, as in every LLaMA")
    theta = _decimal(fields.get("rope.freq_base", float, 10000.0))
    q_bias, o_bias = (f"layers.0.attention.{name}.bias" in shapes for name in ("wq", "wo"))
    scaling, part = _rope_scaling(fields, tables, head_dim, theta), rotated / max(head_dim, 1)
    if rotated != head_dim:
        scaling = {"rope_type": "default", **(scaling or {}), "partial_rotary_factor": part}
    return ModelConfig(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=fields.get("attention.head_count_kv", int, n_heads),
        head_dim=head_dim,
        hidden_dim=fields.get("feed_forward_length", int),
        vocab_size=shapes["tok_embeddings.weight"][0],
        norm_eps=_decimal(fields.get("attention.layer_norm_rms_epsilon", float)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_seq_len=fields.get("context_length", int),
        tie_embeddings="output.weight" not in shapes,
        attention_bias=o_bias,
        qkv_bias=q_bias and not o_bias,
        mlp_bias="layers.0.feed_forward.w_gate.bias" in shapes,
        qk_norm=architecture == "qwen3",
        no_rope_layers=every(INTERVAL, n_layers) if architecture == "smollm3" else (),
        sliding_window=window or None,
    )


def _same(value: Any) -> Any:
    """Replace an array of equal numbers by the number: a file may state a size for each layer. Keep other values."""
    array = isinstance(value, np.ndarray) and len(value) > 0
    return value[0].item() if array and bool((value == value[0]).all()) else value


def _decimal(value: float) -> float:
    """The shortest decimal number for a float32 of the file: 1e-05, not 9.999999747378752e-06."""
    return value if isinstance(value, int) or float(np.float32(value)) != value else float(str(np.float32(value)))


def _rope_scaling(
    fields: Fields, tables: Mapping[str, list[float]], head_dim: int, theta: float
) -> dict[str, Any] | None:
    """The RoPE scaling that the keys rope.scaling.*, the older key rope.scale_linear or tables of divisors describe."""
    own = {key.removeprefix(SCALING): value for key, value in fields.values.items() if key.startswith(SCALING)}
    scaling = Fields(own, f"{fields.where}: rope.scaling")
    factor = _decimal(scaling.get("factor", float, fields.get("rope.scale_linear", float, 0.0)))  # 0 means none
    attention, length = _decimal(scaling.get("attn_factor", float, 1.0)), scaling.get("original_context_length", int, 0)
    original: dict[str, Any] = {"original_max_position_embeddings": length} if length else {}
    scaling.get("finetuned", object, None)
    kind = scaling.get("type", str, "linear")  # llama.cpp's default if there is only a factor
    if kind == "linear" and factor in (0, 1):
        kind = "none"
    plain = not scaling.unknown() and attention == 1
    if kind == "none" and plain and not tables:
        return None
    if kind == "none" and plain and tables.keys() == {ROPE_FREQS}:
        divisors = tables[ROPE_FREQS]
        return _as_llama3(divisors, head_dim, theta) or {"rope_type": "divisors", "divisors": divisors}
    if kind == "linear" and plain and not tables:
        return {"rope_type": kind, "factor": factor}
    if fields.where == "mistral3" and attention == 1:  # llama.cpp reads the keys in YARN only for this one
        yarn = {name: _decimal(scaling.get(key, float)) for key, name in YARN.items() if key in own}
        original |= {"mscale": 1.0, **yarn}
    if kind == "yarn" and not scaling.unknown() and not tables:
        if factor > 0 and (attention != 1 or factor < 1):  # llama.cpp multiplies YaRN's attention factor by attn_factor
            original["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
        return {"rope_type": kind, "factor": factor, **original}
    if kind in ("none", "longrope") and not scaling.unknown() and tables.keys() == {ROPE_LONG, ROPE_SHORT}:
        lists = {"short_factor": tables[ROPE_SHORT], "long_factor": tables[ROPE_LONG]}
        return {"rope_type": "longrope", **lists, **original, "attention_factor": attention}  # llama.cpp's default: 1
    found = ", ".join([kind, *own, *tables])
    raise ConfigError(f"{scaling.where}: {found:.200} is not supported in this combination; try llama.cpp")


def _as_llama3(divisors: list[float], head_dim: int, theta: float) -> dict[str, Any] | None:
    """The llama3 scaling from which a table of divisors was computed, or None if there is none.

    The table is rounded to float32. Its parameters yield exact frequencies, the same as from the other formats.
    """
    factor = float(round(max(divisors), 3))
    if len(divisors) != head_dim // 2 or not 1 <= factor < math.inf:
        return None
    plain, _ = inverse_frequencies(head_dim, theta)
    for power in range(1, 25):
        scaling = {**SCALED_ROPE, "factor": factor, "original_max_position_embeddings": 2**power}
        scaled, _ = inverse_frequencies(head_dim, theta, scaling)
        if torch.allclose(plain / scaled, torch.tensor(divisors, dtype=plain.dtype), rtol=2e-6, atol=0):
            return scaling
    return None
