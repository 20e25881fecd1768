"""Hugging Face's folder, written weight by weight: configuration, safetensors, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError, TokenizerError
from ..rope import to_half_layout
from .base import their_name
from .huggingface import INDEX, LAYERS, NAMES
from .write import Model, dtype_name, raw_bytes

LARGEST_FILE = 5 * 10**9  # bytes of weights; transformers splits at the same size
ROTATED = (".wq.weight", ".wk.weight", ".wq.bias", ".wk.bias")


def write(folder: Path, model: Model, shards: int = 0) -> Sequence[str]:
    """Fill an empty folder; as many files as shards says, or as are needed for at most 5 GB each. Returns warnings."""
    names = {name: their_name(name, NAMES, LAYERS) for name in model.shapes}
    parts = _parts(model, shards)
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts):
        file = "model.safetensors" if len(parts) == 1 else f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        write_safetensors(folder / file, model, {names[name]: name for name in part})
        weight_map |= {names[name]: file for name in part}
    if len(parts) > 1:
        total = sum(model.nbytes(name) for name in model.shapes)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    _write_json(folder / "config.json", config_json(model))
    return _write_tokenizer(folder, model)


def write_safetensors(path: Path, model: Model, names: dict[str, str]) -> None:
    """One file: the length of the header, the header, the tensors one after another.

    The safetensors library wants all tensors of a file in memory at once; this holds one.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for theirs, ours in names.items():
        start, end = end, end + model.nbytes(ours)
        header[theirs] = {
            "dtype": dtype_name(model.dtypes[ours]),
            "shape": list(model.shapes[ours]),
            "data_offsets": [start, end],
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for ours in names.values():
            tensor = model.read(ours)
            if ours.endswith(ROTATED):
                tensor = to_half_layout(tensor, model.config.head_dim)
            file.write(raw_bytes(tensor).data)


def _parts(model: Model, shards: int) -> list[list[str]]:
    """The tensors of each file, in the model's order."""
    if shards > len(model.shapes):
        raise ConfigError(f"{len(model.shapes)} weights can't be spread over {shards} files")
    total = sum(model.nbytes(name) for name in model.shapes)
    parts: list[list[str]] = [[]]
    size = 0  # of the file being filled, or of all so far where their number is given
    for left, name in zip(range(len(model.shapes), 0, -1), model.shapes, strict=True):
        if shards < 1:
            full = size + model.nbytes(name) > LARGEST_FILE
        else:  # the share of this file is reached, or each file still to come needs a weight of its own
            full = len(parts) < shards and (size * shards >= total * len(parts) or left == shards - len(parts))
        if parts[-1] and full:
            parts.append([])
            size = size if shards else 0
        parts[-1].append(name)
        size += model.nbytes(name)
    return parts


def config_json(model: Model) -> dict[str, Any]:
    """config.json in the spelling that transformers 4 and 5 both read."""
    config, tokenizer = model.config, model.tokenizer
    stops = sorted(tokenizer.stop_ids) if tokenizer else []
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config),
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        "bos_token_id": tokenizer.bos_id if tokenizer else None,
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
    }


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    if config.rope_scaling is None:
        return None
    kind = config.rope_scaling.get("rope_type", config.rope_scaling.get("type"))
    if kind in ("divisors", "ntk"):
        raise ConfigError(f"Hugging Face's config.json can't express the rope scaling {kind!r}")
    return dict(config.rope_scaling)


def _write_tokenizer(folder: Path, model: Model) -> list[str]:
    tokenizer = model.tokenizer
    if tokenizer is None:
        return ["the source has no tokenizer that can be read, so none was written"]
    from ..tokenizer.write import tokenizer_config, tokenizer_json

    generation: dict[str, Any] = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.stop_ids)}
    if "temperature" in model.sampling:
        generation["do_sample"] = True
    _write_json(folder / "generation_config.json", {**generation, **model.sampling})
    try:
        (folder / "tokenizer.json").write_text(tokenizer_json(tokenizer), encoding="utf-8")
    except TokenizerError as error:
        return [f"the tokenizer was not carried over: {error}"]
    settings = tokenizer_config(tokenizer)
    if model.chat_template is not None:
        settings["chat_template"] = model.chat_template
    _write_json(folder / "tokenizer_config.json", {**settings, "model_max_length": model.config.max_seq_len})
    return []


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
