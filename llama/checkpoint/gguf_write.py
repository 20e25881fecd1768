"""Writer of GGUF files, weight by weight, with the `gguf` package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import ModelConfig
from ..errors import ConfigError
from ..rope import to_layout
from ..rope_scaling import inverse_frequencies, kind_of, rotated_entries, stretched, trained_length
from .architectures import GGUF_LAYOUTS, INTERVAL, every
from .base import GGUF_NAMES, PARTIAL, to_file_name
from .gguf import ROPE_FREQS, ROPE_LONG, ROPE_SHORT, TEMPLATE
from .weight import FLOATS
from .write import Model, raw_bytes

FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}  # llama.cpp's LLAMA_FTYPE_*


def write(path: Path, model: Model, types: Mapping[str, str], file_type: int | None) -> None:
    """Write one file.

    types      matrices to store quantized -> GGUF's types; model.read returns their bytes, (rows, bytes of a row)
    file_type  llama.cpp's number for the mix of types; None: the number of the dtype
    """
    import gguf

    rope, tables = rope_entries(model.config)
    kind = architecture(model.config, bool(tables))
    writer = gguf.GGUFWriter(path, kind)
    file_type = FILE_TYPES[model.dtype] if file_type is None else file_type
    for key, value in {**metadata(model), "general.file_type": file_type, **rope}.items():
        _add(writer, key if key.startswith("general.") else f"{kind}.{key}", value)
    for key, value in _tokenizer(model).items():
        _add(writer, key, value)
    for name, values in tables.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    for name, shape in model.shapes.items():
        type = gguf.GGMLQuantizationType[types.get(name) or FLOATS[model.dtypes[name]]]
        block, size = gguf.GGML_QUANT_SIZES[type]
        stored = [*shape[:-1], shape[-1] // block * size]  # the package expects the shape of the bytes
        writer.add_tensor_info(to_file_name(name, GGUF_NAMES), stored, np.dtype(np.uint8), math.prod(stored), type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in tables.values():
        writer.write_tensor_data(values)
    for name in model.shapes:
        tensor = to_layout(name, model.read(name), model.config.head_dim, "interleaved", GGUF_LAYOUTS[kind])
        writer.write_tensor_data(raw_bytes(tensor))
    writer.close()


def architecture(config: ModelConfig, has_tables: bool) -> str:
    """The architecture of GGUF_LAYOUTS under which llama.cpp can run the model.

    llama.cpp's architecture llama has optional biases; its other architectures have no tables of RoPE
    divisors. Raises ConfigError if no architecture fits.
    """
    if config.qk_norm or config.no_rope_layers:
        kind, layers = ("qwen3", ()) if config.qk_norm else ("smollm3", every(INTERVAL, config.n_layers))
        if has_tables or config.mlp_bias or config.attention_bias or config.no_rope_layers != layers:
            raise ConfigError(
                "not possible in GGUF: only qwen3 has norms of queries and keys, only smollm3 has layers without"
                f" RoPE (every {INTERVAL}th), neither has RoPE divisors, mlp_bias or attention_bias; convert it to hf"
            )
        return kind
    usual = config.n_heads * config.head_dim == config.dim and not config.mlp_bias and not has_tables
    return "qwen2" if config.qkv_bias and usual else "llama"


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


def rope_entries(config: ModelConfig) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, np.dtype[np.float32]]]]:
    """The RoPE scaling as GGUF metadata, and as tensors that divide the frequencies.

    llama.cpp computes linear and yarn from the metadata. Raises ConfigError for what it can't compute: a scaling that
    depends on the length of a text, and some parameters of yarn.
    """
    kind, scaling, prefix = kind_of(config.rope_scaling), config.rope_scaling or {}, "rope.scaling."
    if rotated_entries(config.head_dim, scaling) < config.head_dim:
        raise ConfigError(PARTIAL)
    if kind == "default":
        return {}, {}
    if kind == "linear":
        return {f"{prefix}type": kind, f"{prefix}factor": float(scaling["factor"])}, {}
    trained = trained_length(config)
    factor = float(scaling.get("factor") or config.max_seq_len / trained)
    betas = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
    usual = betas == (32, 1) and scaling.get("truncate", True) and factor >= 1 and trained == int(trained)
    if kind in ("dynamic", "proportional") or (kind == "yarn" and not usual):
        raise ConfigError(f"GGUF can't express the rope scaling {kind!r} as given; convert the model to hf")
    plain, _ = inverse_frequencies(config.head_dim, config.rope_theta)
    scaled, attention_factor = inverse_frequencies(
        config.head_dim, config.rope_theta, scaling, max_seq_len=config.max_seq_len
    )
    original: dict[str, Any] = {f"{prefix}type": kind, f"{prefix}original_context_length": int(trained)}
    if kind == "yarn":
        own = 0.1 * math.log(factor) + 1  # llama.cpp multiplies its own attention factor by the file's
        return {f"{prefix}factor": factor, f"{prefix}attn_factor": attention_factor / own, **original}, {}
    # Divisors do not state how far the scaling stretches the context. A factor would be applied on top of the divisors.
    context: dict[str, Any] = {"context_length": stretched(config.max_seq_len, scaling)}
    if kind == "longrope":
        tables = {ROPE_LONG: scaling["long_factor"], ROPE_SHORT: scaling["short_factor"]}
        context |= {f"{prefix}attn_factor": attention_factor, **original}
    else:
        tables = {ROPE_FREQS: (plain.double() / scaled.double()).tolist()}
    return context, {name: np.array(table, np.float32) for name, table in tables.items()}


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a metadata entry: an int as uint32, a float as float32."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def _tokenizer(model: Model) -> dict[str, Any]:
    if model.tokenizer is None:
        return {}
    from ..tokenizer.write import gguf_metadata

    n_vocab, rows = model.tokenizer.n_vocab, model.config.vocab_size
    if n_vocab > rows:
        raise ConfigError(f"the tokenizer has {n_vocab} tokens, but the embedding has {rows} rows; convert to hf")
    entries = gguf_metadata(model.tokenizer, rows)
    entries = {key: value for key, value in entries.items() if not key.startswith(TEMPLATE)}  # a GGUF source's
    template = model.chat_template
    named = {"default": template} if isinstance(template, str) else template or {}
    for name, source in named.items():
        entries[TEMPLATE if name == "default" else f"{TEMPLATE}.{name}"] = source
    return entries
