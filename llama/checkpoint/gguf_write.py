"""Writer of GGUF files, weight by weight, with the `gguf` package: matrices in the given dtype or type, vectors in
float32.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import ConfigError, TokenizerError
from ..rope import to_half_layout
from ..rope_scaling import inverse_frequencies, kind_of, stretched, trained_length
from .architectures import INTERVAL, LAYOUTS, every
from .base import to_file_name
from .gguf import LAYERS, NAMES, ROPE_FREQS, ROPE_LONG, ROPE_SHORT
from .write import ROTATED, Model, dtype_name, raw_bytes

FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}  # llama.cpp's LLAMA_FTYPE_*


class Packed(NamedTuple):
    """A matrix to store in a quantized type, and a function that returns its bytes (rows, bytes of a row)."""

    type: str
    read: Callable[[], Tensor]


def write(
    path: Path,
    model: Model,
    shards: int = 0,
    packed: Mapping[str, Packed] = MappingProxyType({}),
    file_type: int | None = None,
) -> Sequence[str]:
    """Write one file. `packed` has the matrices to store quantized; model.read returns the others. Returns warnings.

    file_type  llama.cpp's number for the mix of types; None: that of the dtype
    """
    import gguf

    if shards > 1:
        raise ConfigError("a GGUF model is written as one file; omit --shards")
    tables = rope_tables(model.config)
    kind = architecture(model.config, bool(tables))
    writer = gguf.GGUFWriter(path, kind)
    rope = rope_metadata(model.config)
    if tables and not rope:  # a table does not contain the kind of scaling, from which the longer context follows
        rope["context_length"] = stretched(model.config.max_seq_len, model.config.rope_scaling)
    file_type = FILE_TYPES[model.dtype] if file_type is None else file_type
    for key, value in {**metadata(model), "general.file_type": file_type, **rope}.items():
        add(writer, key if key.startswith("general.") else f"{kind}.{key}", value)
    warnings = _add_tokenizer(writer, model)
    if any((model.config.rope_scaling or {}).get(key) is not None for key in ("beta_fast", "beta_slow")):
        warnings.append("the scaling's beta_fast and beta_slow are written, but llama.cpp 0.3.36 does not read them")
    for name, values in tables.items():
        writer.add_tensor_info(name, [len(values)], np.dtype(np.float32), 4 * len(values))
    types = {name: type_of(model, name, packed) for name in model.shapes}
    for name, shape in model.shapes.items():
        raw = gguf.GGMLQuantizationType[types[name]]
        # The package computes the shape of a quantized tensor from that of its bytes.
        block, size = gguf.GGML_QUANT_SIZES[raw]
        stored = [shape[0], shape[1] // block * size] if name in packed else list(shape)
        dtype = np.dtype(np.uint8 if name in packed else np.float32)
        writer.add_tensor_info(to_file_name(name, NAMES, LAYERS), stored, dtype, nbytes(model, name, packed), raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in tables.values():
        _put(writer, np.array(values, np.float32))
    for name, type in types.items():
        tensor = packed[name].read() if name in packed else model.read(name)  # packed: (rows, bytes of a row)
        if LAYOUTS[kind] == "half" and name.endswith(ROTATED):
            tensor = to_half_layout(tensor, model.config.head_dim)
        _put(writer, raw_bytes(tensor.float() if type == "F32" else tensor))
    writer.close()
    return warnings


def architecture(config: ModelConfig, has_tables: bool) -> str:
    """The architecture of LAYOUTS under which llama.cpp can run the model.

    llama.cpp's architecture llama has optional biases; its qwen2 and smollm3 have no tables of RoPE divisors. Raises
    ConfigError if none of them fits.
    """
    if config.no_rope_layers:
        if config.no_rope_layers != every(INTERVAL, config.n_layers):
            raise ConfigError(
                f"in GGUF, the layers without RoPE are always {INTERVAL - 1}, {2 * INTERVAL - 1}, {3 * INTERVAL - 1}"
                f" and so on, got {', '.join(map(str, config.no_rope_layers)):.60}; convert the model to hf"
            )
        if has_tables or config.mlp_bias or config.attention_bias:
            raise ConfigError(
                "GGUF's architecture smollm3, for models with layers without RoPE, can't express RoPE divisors,"
                " mlp_bias or a bias of wo; convert the model to hf"
            )
        return "smollm3"
    usual = config.n_heads * config.head_dim == config.dim and not config.mlp_bias and not has_tables
    return "qwen2" if config.qkv_bias and usual else "llama"


def type_of(model: Model, name: str, packed: Mapping[str, Packed]) -> str:
    """GGUF's name of the type in which a tensor is stored."""
    if name in packed:
        return packed[name].type
    return "F32" if len(model.shapes[name]) == 1 else dtype_name(model.dtypes[name])


def nbytes(model: Model, name: str, packed: Mapping[str, Packed] = MappingProxyType({})) -> int:
    """The bytes of a tensor in the file."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_of(model, name, packed)]]
    return math.prod(model.shapes[name]) // block * size


def metadata(model: Model) -> dict[str, Any]:
    """The architecture as GGUF metadata; keys without "general." belong to the architecture."""
    config = model.config
    window = {} if config.sliding_window is None else {"attention.sliding_window": config.sliding_window}
    return {
        "general.name": model.name,
        "general.quantization_version": 2,
        "context_length": config.max_seq_len,
        "embedding_length": config.dim,
        "block_count": config.n_layers,
        "feed_forward_length": config.hidden_dim,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
        **window,
    }


def rope_metadata(config: ModelConfig) -> dict[str, Any]:
    """The RoPE scaling as GGUF metadata. Empty for llama3 and divisors, which `rope_tables` covers.

    Raises ConfigError for a scaling that GGUF can't express.
    """
    kind, scaling = kind_of(config.rope_scaling), config.rope_scaling or {}
    prefix = "rope.scaling."
    if kind in ("dynamic", "proportional"):
        raise ConfigError(f"GGUF can't express the rope scaling {kind!r}; convert the model to hf")
    if kind not in ("linear", "yarn", "longrope"):
        return {}
    out: dict[str, Any] = {f"{prefix}type": kind}
    if scaling.get("factor") is not None:
        out[f"{prefix}factor"] = float(scaling["factor"])
    if scaling.get("original_max_position_embeddings") is not None:
        original = scaling["original_max_position_embeddings"]
        if original != int(original):
            raise ConfigError(
                f"GGUF stores original_max_position_embeddings as an integer, got {original}; convert the model to hf"
            )
        out[f"{prefix}original_context_length"] = int(original)
    _, attention_factor = inverse_frequencies(
        config.head_dim, config.rope_theta, scaling, max_seq_len=config.max_seq_len
    )
    if kind == "longrope":
        out[f"{prefix}attn_factor"] = attention_factor
    if kind == "yarn":
        if scaling.get("truncate", True) is not True:
            raise ConfigError("GGUF can't express the key truncate of the rope scaling yarn; convert the model to hf")
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if scaling.get(ours) is not None:
                out[f"{prefix}{theirs}"] = float(scaling[ours])
        factor = out.setdefault(f"{prefix}factor", config.max_seq_len / trained_length(config))
        usual = 0.1 * math.log(factor) + 1  # llama.cpp's own attention factor
        if usual <= 0:
            raise ConfigError(
                f"GGUF can't express the rope scaling yarn with the factor {factor:g}; convert the model to hf"
            )
        if attention_factor != usual:
            out[f"{prefix}attn_factor"] = attention_factor / usual
    return out


def rope_tables(config: ModelConfig) -> dict[str, list[float]]:
    """The RoPE scaling as tensors, for the kinds that GGUF stores as tables."""
    kind, scaling = kind_of(config.rope_scaling), config.rope_scaling or {}
    if kind == "longrope":
        return {ROPE_LONG: list(scaling["long_factor"]), ROPE_SHORT: list(scaling["short_factor"])}
    if kind not in ("llama3", "ntk", "divisors"):
        return {}
    plain, _ = inverse_frequencies(config.head_dim, config.rope_theta)
    scaled, _ = inverse_frequencies(config.head_dim, config.rope_theta, scaling, max_seq_len=config.max_seq_len)
    return {ROPE_FREQS: (plain.double() / scaled.double()).tolist()}


def _put(writer: Any, values: Any) -> None:
    """Write the values of the next tensor. Raises OSError."""
    try:
        writer.write_tensor_data(values)
    except OSError as error:
        if error.errno is None:  # numpy's own error lacks the cause; a plain write raises the system's error
            for _ in range(2):
                os.write(writer.fout[0].fileno(), bytes(2**16))
        raise


def add(writer: Any, key: str, value: Any) -> None:
    """Add a metadata entry: an int as uint32, a float as float32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        if not 2**-126 <= abs(value) < 2**128 and value != 0:
            raise ConfigError(f"GGUF stores {key} as float32, which can't hold {value:g}; convert the model to hf")
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tokenizer(writer: Any, model: Model) -> list[str]:
    if model.tokenizer is None:
        return ["the source has no readable tokenizer, so none was written; llama.cpp needs one"]
    from ..tokenizer.write import gguf_metadata

    try:
        entries = gguf_metadata(model.tokenizer, model.config.vocab_size)
    except TokenizerError as error:
        return [f"the tokenizer was not converted: {error}"]
    if model.chat_template is not None:
        entries["tokenizer.chat_template"] = model.chat_template
    for key, value in entries.items():
        add(writer, key, value)
    return []
