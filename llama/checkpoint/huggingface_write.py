"""Writer of Hugging Face folders, weight by weight: configuration, safetensors, tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import dtype_name
from ..config import ModelConfig
from ..errors import ConfigError
from ..rope import Layout, to_layout
from ..rope_scaling import kind_of, rotated_entries, trained_length
from .architectures import FULL, MODEL_TYPES, SLIDING
from .base import HUGGING_FACE_NAMES, PARTIAL, to_file_name
from .huggingface import INDEX, STORED
from .write import Model, raw_bytes

FILE_SIZE = 5 * 10**9  # bytes of weights in a file, approximately; as in transformers


class Entry(NamedTuple):
    """A tensor to write.

    read      returns the values
    metadata  a text to write under the tensor's name into the header of the file
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    metadata: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(folder: Path, model: Model, shards: int = 0) -> None:
    """Fill an empty folder with `shards` files of weights; 0 means as many as needed for about 5 GB each."""
    if family_keys(model.config)[0] == "phi3":
        raise ConfigError(PARTIAL)
    write_weights(folder, {to_file_name(name, HUGGING_FACE_NAMES): entry(model, name) for name in model.shapes}, shards)
    write_json(folder / "config.json", config_json(model))
    write_tokenizer(folder, model)


def entry(model: Model, name: str, layout: Layout = "half") -> Entry:
    """The entry of a floating-point weight."""

    def read() -> Tensor:
        return to_layout(name, model.read(name), model.config.head_dim, "interleaved", layout)

    return Entry(model.dtypes[name], model.shapes[name], read)


def write_weights(folder: Path, entries: Mapping[str, Entry], shards: int) -> None:
    """Write one file, or several with equally many tensors and an index."""
    names, total = list(entries), sum(one.nbytes for one in entries.values())
    count = shards or -(-total // FILE_SIZE)
    if count > len(names):
        raise ConfigError(f"{len(names)} weights can't be split into {count} files; lower shards (--shards)")
    weight_map: dict[str, str] = {}
    for i in range(count):
        file = "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = {name: entries[name] for name in names[i * len(names) // count : (i + 1) * len(names) // count]}
        write_safetensors(folder / file, part, {name: one.metadata for name, one in part.items() if one.metadata})
        weight_map |= dict.fromkeys(part, file)
    if count > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def write_safetensors(path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> None:
    """Write one file: the length of the header, the header, the tensors.

    The safetensors library needs all tensors of a file in memory; this function needs one at a time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, one in entries.items():
        start, end = end, end + one.nbytes
        header[name] = {"dtype": STORED[one.dtype], "shape": list(one.shape), "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(len(raw) + 8) % 64)  # aligns the first tensor to a cache line
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for one in entries.values():
            file.write(raw_bytes(one.read()).data)


def config_json(model: Model) -> dict[str, Any]:
    """config.json with keys that both transformers 4 and 5 read."""
    config, tokenizer = model.config, model.tokenizer
    stops = sorted(tokenizer.stop_ids) if tokenizer else []
    kind, own = family_keys(config)
    if (scaling := kind_of(config.rope_scaling)) in ("divisors", "ntk"):
        raise ConfigError(f"config.json can't express the rope scaling {scaling!r}; convert the model to gguf")
    return {
        "architectures": [MODEL_TYPES[kind].architecture],
        "model_type": kind,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling and dict(config.rope_scaling),
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
        **own,
        "hidden_act": "silu",
        "torch_dtype": dtype_name(model.dtype),
        "bos_token_id": tokenizer.bos_id if tokenizer else None,
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
    }


def family_keys(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The model_type under which transformers computes the model, and the keys of config.json that depend on it.

    Raises ConfigError if no model_type fits: each family has its own biases, norms, windows and layers without RoPE.
    """
    windowed = config.sliding_window is not None
    partial = rotated_entries(config.head_dim, config.rope_scaling) < config.head_dim
    kind = "phi3" if partial else "mistral" if windowed else "llama"
    for other, needed in (("qwen2", config.qkv_bias), ("smollm3", config.no_rope_layers), ("qwen3", config.qk_norm)):
        kind = other if needed else kind
    family, biases = MODEL_TYPES[kind], {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    wrong = [key for key, biased in biases.items() if biased and key not in family.bias_keys]
    if wrong or config.qkv_bias != family.qkv_bias or (config.no_rope_layers and family.no_rope_interval is None):
        raise ConfigError(
            f"Hugging Face's model type {kind} can't have the biases or the layers without RoPE of this model; convert"
            " it to gguf"
        )
    keys: dict[str, Any] = {key: biases[key] for key in family.bias_keys}
    if kind == "smollm3":
        keys["no_rope_layers"] = [int(layer not in config.no_rope_layers) for layer in range(config.n_layers)]
        keys["pad_token_id"] = None  # transformers' default is an id of the published vocabulary
    keys |= {"original_max_position_embeddings": int(trained_length(config))} if partial else {}
    if kind in ("smollm3", "qwen2", "qwen3"):
        keys |= {"use_sliding_window": windowed, "layer_types": [SLIDING if windowed else FULL] * config.n_layers}
    return kind, keys if kind == "llama" else {**keys, "sliding_window": config.sliding_window}


def write_tokenizer(folder: Path, model: Model) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json, if the model has a tokenizer."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return
    from ..tokenizer.write import huggingface_files

    generation: dict[str, Any] = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.stop_ids)}
    if "temperature" in model.sampling:
        generation["do_sample"] = True
    write_json(folder / "generation_config.json", {**generation, **model.sampling})
    text, config = huggingface_files(tokenizer)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    settings = {"model_max_length": model.config.max_seq_len, **config}
    template = model.chat_template
    if isinstance(template, Mapping):
        settings["chat_template"] = [{"name": name, "template": source} for name, source in template.items()]
    elif template is not None:
        settings["chat_template"] = template
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON document, indented."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
