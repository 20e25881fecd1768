"""Reader of GGUF models, in one file or split. Weights stay in the mapped files until they are read.

A weight is stored in floating point or in the blocks of a quantized type; see quant/blocks.py.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import ModelConfig
from ..errors import CheckpointError, ConfigError, DamagedError, TokenizerError
from ..quant.blocks import READERS, Blocks, dequantize
from ..rope_scaling import inverse_frequencies
from ..system.documents import Fields
from ..tokenizer import Tokenizer
from .architectures import INTERVAL, LAYOUTS, every, refusal, window_warnings
from .base import (
    FLOATS,
    Checkpoint,
    check_vocabulary,
    checked,
    dequantized_floats,
    drop_pages,
    stored_bytes,
    to_file_name,
    to_model_name,
)  # fmt: skip
from .gguf_header import MAGIC, TensorInfo, read_header

PLAIN = {name: dtype for dtype, name in FLOATS.items()}

LAYERS = "blk"
TEMPLATE = "tokenizer.chat_template"
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
    "expert_count": 0,
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
SCALING = "rope.scaling."
# Extra tensors: divisors of the RoPE frequencies
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
# NVFP4 has one factor for the weight, and one for its input; the second is unused, as inputs are not quantized here
FACTOR = re.compile(r"(.*)\.(scale|input_scale)")
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # llama.cpp's name for a file of a split model


def recognizes(path: Path) -> bool:
    if path.is_dir():
        return any(file.suffix == ".gguf" for file in path.iterdir())
    with open(path, "rb") as file:
        return file.read(4) == MAGIC


class GGUFTensor:
    """A tensor in a mapped file."""

    def __init__(self, data: mmap.mmap, info: TensorInfo):
        self.data, self.info, self.type, self.shape = data, info, info.type, info.shape

    @property
    def raw(self) -> NDArray[np.uint8]:
        """Its bytes: (rows, bytes of a row). A row has shape[-1] entries, whatever the rank."""
        rows, width = math.prod(self.shape[:-1]), self.shape[-1] // self.info.block * self.info.size
        return np.frombuffer(self.data, np.uint8, rows * width, self.info.offset).reshape(rows, width)

    def read(self) -> Tensor:
        """The tensor, dequantized to float32 if it is quantized."""
        raw = self.raw
        if self.type not in PLAIN:
            weight = dequantized_floats(len(raw), self.shape[-1], lambda rows: dequantize(raw[rows], self.type))
            return weight.view(self.shape)
        aligned = raw.copy() if self.info.offset % self.info.size else raw
        return torch.from_numpy(aligned).view(PLAIN[self.type]).view(self.shape)

    def piece(self, rows: slice, columns: slice) -> Tensor:
        """`read()[rows, columns]` of a matrix. Reads only the blocks that contain them."""
        if self.type in PLAIN:
            return self.read()[rows, columns]
        raw, own = self._covering(rows, columns)
        return dequantize(raw, self.type)[:, own]

    def blocks(self, rows: slice, columns: slice) -> Blocks | None:
        """A part of a matrix as blocks for the kernels; None if they do not support its type."""
        if self.type not in READERS or len(self.shape) != 2:
            return None
        raw, own = self._covering(rows, columns)
        return READERS[self.type](raw).columns(own)  # a stored block may contain several groups

    def _covering(self, rows: slice, columns: slice) -> tuple[NDArray[np.uint8], slice]:
        """The bytes of the blocks that contain these rows and columns, and the columns within them."""
        block, size = self.info.block, self.info.size
        first, last, _ = columns.indices(self.shape[1])
        start, end = first // block, -(-last // block)  # blocks of a row
        return self.raw[rows, start * size : end * size], slice(first - start * block, last - start * block)


class GGUFFile:
    """A mapped file: its metadata, and its tensors by the file's names."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                # Copy-on-write: writing to a weight can't change the file or crash the process.
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from None
        except ValueError:
            raise DamagedError(f"{path} is empty") from None
        self.metadata, infos = read_header(self.data, str(path))
        self.tensors = {name: GGUFTensor(self.data, info) for name, info in infos.items()}


class GGUFCheckpoint(Checkpoint):
    """A GGUF model of an architecture in LAYOUTS. See Checkpoint for the members."""

    format = "GGUF"

    def __init__(self, path: Path):
        self.path = path
        files = _open_files(path)
        self.metadata = files[0].metadata
        self.parts = {file.path.name: len(file.data) for file in files}
        self._tensors: dict[str, GGUFTensor] = {}
        self._factors: dict[str, float] = {}
        tables: dict[str, list[float]] = {}
        for file in files:
            for file_name, tensor in file.tensors.items():
                factor = FACTOR.fullmatch(file_name)
                name = to_model_name(f"{factor[1]}.weight" if factor else file_name, NAMES, LAYERS)
                if not tensor.info.nbytes:
                    continue
                if file_name in (ROPE_FREQS, ROPE_LONG, ROPE_SHORT):
                    tables[file_name] = tensor.read().double().flatten().tolist()
                elif name is None:
                    raise CheckpointError(
                        f"{file.path}: tensor {file_name:.80} is not part of a LLaMA decoder; try llama.cpp"
                    )
                elif factor is None and name in self._tensors:
                    raise DamagedError(f"{file.path}: tensor {file_name} is also in another file of the model")
                elif factor is None:
                    self._tensors[name] = tensor
                elif factor[2] == "scale":
                    self._factors[name] = _factor(tensor, f"{file.path}: {file_name}")
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        try:
            self.config = checked(_config(self.metadata, self.shapes, tables))
            self.chat_template = _chat_template(Fields(self.metadata, "metadata"))
        except ConfigError as error:
            raise CheckpointError(f"{files[0].path}: {error}") from error
        self.layout = LAYOUTS[self.metadata["general.architecture"]]
        self.warnings = window_warnings(self.config)
        if self.metadata.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in self.metadata:
            self.warnings.append(
                "the file does not name its pre-tokenizer (no key tokenizer.ggml.pre); using llama.cpp's default; if"
                " answers are poor, download a newer conversion"
            )

    @property
    def about(self) -> Mapping[str, Any]:
        labels = {"name": "general.name", "organization": "general.organization", "licence": "general.license"}
        facts = {label: self.metadata[key] for label, key in labels.items() if isinstance(self.metadata.get(key), str)}
        stored = {name: (tensor.type, tensor.info.nbytes) for name, tensor in self._tensors.items()}
        return {**facts, "weights": stored_bytes(stored)}

    def tensor(self, name: str) -> Tensor:
        return self._scaled(name, self._tensors[name].read())

    def piece(self, name: str, rows: slice, columns: slice) -> Tensor:
        tensor = self._tensors[name]
        return tensor.read()[rows] if len(tensor.shape) == 1 else self._scaled(name, tensor.piece(rows, columns))

    def _scaled(self, name: str, weight: Tensor) -> Tensor:
        return weight * self._factors[name] if name in self._factors else weight

    def blocks(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Blocks | None:
        return None if name in self._factors else self._tensors[name].blocks(rows, columns)

    def raw(self, name: str) -> Tensor:
        """The bytes of a weight in the file: (rows, bytes of a row) uint8."""
        return torch.from_numpy(self._tensors[name].raw)

    def file_name(self, name: str) -> str:
        return to_file_name(name, NAMES, LAYERS)

    def stored(self, name: str) -> str:
        return self._tensors[name].type

    def bits(self, name: str) -> float:
        info = self._tensors[name].info
        return 8 * info.size / info.block

    def release(self, name: str) -> None:
        drop_pages(self.raw(name))

    def own_tokenizer(self) -> Tokenizer:
        from ..tokenizer.gguf import from_metadata

        tokenizer = from_metadata(self.metadata, str(self.path))
        if tokenizer.add_bos and tokenizer.bos_id is None:
            raise TokenizerError(
                f"{self.path}: the tokenizer adds a begin-of-text id, and the key tokenizer.ggml.bos_token_id is"
                f" missing; get another conversion of the model"
            )
        check_vocabulary(tokenizer, self.config, str(self.path))
        return tokenizer


def _factor(tensor: GGUFTensor, where: str) -> float:
    """The only element of a tensor. Raises DamagedError unless there is one, and it is finite."""
    values = tensor.read().flatten()
    if len(values) != 1 or not bool(values.isfinite()):
        raise DamagedError(f"{where} must be one finite number, the factor of a weight, got {values.tolist()[:4]}")
    return float(values)


def _open_files(path: Path) -> list[GGUFFile]:
    """The files of a model: one file, or all files of a split model, whichever of them `path` names."""
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix == ".gguf")
        models = {match[1] if (match := SPLIT.fullmatch(file.name)) else file.name for file in found}
        if len(models) > 1:
            raise CheckpointError(f"{path} contains {len(models)} GGUF models; name one of them")
        path = found[0]
    names = [path.name]
    if match := SPLIT.fullmatch(path.name):
        names = [f"{match[1]}-{i + 1:05d}-of-{match[3]}.gguf" for i in range(int(match[3]))] or names
    if missing := [name for name in names if not path.with_name(name).is_file()]:
        raise CheckpointError(f"{path} is one of {len(names)} files, and {missing[0]} is missing; download all of them")
    return [GGUFFile(path.with_name(name)) for name in names]


def _chat_template(metadata: Fields) -> str | Mapping[str, str] | None:
    """The chat template, or several by name: the keys are tokenizer.chat_template and tokenizer.chat_template.NAME."""
    default = metadata.get(TEMPLATE, str, None)
    names = [key.removeprefix(f"{TEMPLATE}.") for key in metadata.values if key.startswith(f"{TEMPLATE}.")]
    named = {name: metadata.get(f"{TEMPLATE}.{name}", str) for name in names}
    if not named:
        return default
    return named if default is None else {"default": default, **named}


def _config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], tables: Mapping[str, list[float]]
) -> ModelConfig:
    """The architecture by the metadata. The loader checks it against the shapes of the tensors."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in LAYOUTS:
        raise ConfigError(refusal("general.architecture", architecture, LAYOUTS))
    if "tok_embeddings.weight" not in shapes:
        raise ConfigError("the tensor token_embd.weight is missing")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): _single(value) for key, value in metadata.items() if key.startswith(prefix)}
    fields = Fields(own, architecture)
    for key, plain in PLAIN_VALUES.items():
        if (value := fields.get(key, type(plain), plain)) != plain:
            raise ConfigError(f"{prefix}{key} is {value!r:.40}, expected {plain!r} as in every LLaMA")
    n_heads, n_layers = fields.get("attention.head_count", int), fields.get("block_count", int)
    dim = fields.get("embedding_length", int)
    head_dim = fields.get("attention.key_length", int, dim // max(n_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := fields.get(key, int, head_dim)) != head_dim:
            raise ConfigError(f"{prefix}{key} is {value}, but the head dimension is {head_dim}")
    theta = _decimal(fields.get("rope.freq_base", float, 10000.0))
    q_bias, o_bias = (f"layers.0.attention.{name}.bias" in shapes for name in ("wq", "wo"))
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
        rope_scaling=_rope_scaling(fields, tables, head_dim, theta),
        max_seq_len=fields.get("context_length", int),
        tie_embeddings="output.weight" not in shapes,
        attention_bias=o_bias,
        qkv_bias=q_bias and not o_bias,
        mlp_bias="layers.0.feed_forward.w_gate.bias" in shapes,
        no_rope_layers=every(INTERVAL, n_layers) if architecture == "smollm3" else (),
        sliding_window=fields.get("attention.sliding_window", int, 0) or None,
    )


def _single(value: Any) -> Any:
    """A value; of an array of equal numbers, such as one for each layer, that number."""
    equal = isinstance(value, np.ndarray) and len(value) > 0 and bool((value == value[0]).all())
    return value[0].item() if equal else value


def _decimal(value: float) -> float:
    """The shortest decimal of a float32 in the file: 1e-05, not 9.999999747378752e-06."""
    return value if isinstance(value, int) or float(np.float32(value)) != value else float(str(np.float32(value)))


def _rope_scaling(
    fields: Fields, tables: Mapping[str, list[float]], head_dim: int, theta: float
) -> dict[str, Any] | None:
    """The scaling by the keys rope.scaling.*, the older key rope.scale_linear, or a table of divisors."""
    own = {key.removeprefix(SCALING): value for key, value in fields.values.items() if key.startswith(SCALING)}
    scaling = Fields(own, f"{fields.where}: rope.scaling")

    def number(key: str, default: float) -> float:
        return _decimal(scaling.get(key, float, default))

    factor = number("factor", _decimal(fields.get("rope.scale_linear", float, 0.0)))  # 0 means none
    kind = scaling.get("type", str, "linear")  # llama.cpp's default if there is only a factor
    if kind == "linear" and factor in (0, 1):
        kind = "none"
    attention, length = number("attn_factor", 1.0), scaling.get("original_context_length", int, 0)
    yarn_attention = attention * number("yarn_attn_factor", 1.0)
    original = {"original_max_position_embeddings": length} if length else {}
    betas = {key: number(f"yarn_{key}", 0.0) for key in ("beta_fast", "beta_slow") if f"yarn_{key}" in own}
    scaling.get("finetuned", object, None)
    if kind not in ("none", "linear", "yarn", "longrope") or scaling.unknown():
        unknown = scaling.unknown()[0] if scaling.unknown() else f"type {kind!r:.40}"
        raise ConfigError(f"{scaling.where}: {unknown} is not supported; its types are none, linear, yarn and longrope")
    if kind in ("none", "linear") and attention != 1:
        raise ConfigError(f"{scaling.where}: attn_factor is {attention}, but the type {kind} does not use it")
    if kind != "none" and ROPE_FREQS in tables:
        raise ConfigError(f"both {scaling.where} of type {kind} and {ROPE_FREQS} are present")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        if factor > 0 and (yarn_attention != 1 or factor < 1):  # llama.cpp multiplies YaRN's own attention factor by it
            betas["attention_factor"] = yarn_attention * (0.1 * math.log(factor) + 1)
        return {"rope_type": "yarn", "factor": factor, **original, **betas}
    if kind == "longrope" or ROPE_LONG in tables:
        if not (ROPE_LONG in tables and ROPE_SHORT in tables):
            raise ConfigError(f"longrope needs the tensors {ROPE_LONG} and {ROPE_SHORT}")
        lists = {"short_factor": tables[ROPE_SHORT], "long_factor": tables[ROPE_LONG]}
        return {"rope_type": "longrope", **lists, **original, "attention_factor": attention}  # llama.cpp computes none
    if ROPE_FREQS not in tables:
        return None
    return _as_llama3(tables[ROPE_FREQS], head_dim, theta) or {"rope_type": "divisors", "divisors": tables[ROPE_FREQS]}


def _as_llama3(divisors: list[float], head_dim: int, theta: float) -> dict[str, Any] | None:
    """The llama3 scaling from which a table of divisors was computed, or None if there is none.

    The table is rounded to float32; the parameters yield the exact frequencies, as in the other formats.
    """
    factor = float(round(max(divisors), 3))
    if len(divisors) != head_dim // 2 or not 1 <= factor < math.inf:
        return None
    plain, _ = inverse_frequencies(head_dim, theta)
    for power in range(1, 25):
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2**power,
        }
        scaled, _ = inverse_frequencies(head_dim, theta, scaling)
        if torch.allclose(plain / scaled, torch.tensor(divisors, dtype=plain.dtype), rtol=2e-6, atol=0):
            return scaling
    return None
