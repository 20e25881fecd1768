"""The supported architectures besides Llama's, by their names in config.json and in GGUF.

Mistral is Llama with a sliding window in some versions, Qwen2 has biases on q, k and v, and SmolLM3 has layers without
RoPE. Sources: transformers' configuration and modeling files of these families; llama.cpp 0.3.36 in llama-cpp-python,
src/models/ and conversion/.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import NamedTuple

from ..checks import integer, is_integer
from ..config import ModelConfig
from ..errors import ConfigError
from ..rope import Layout
from ..rope_scaling import reach
from ..system.documents import Fields, describe


class Family(NamedTuple):
    """How transformers reads config.json for a model_type.

    architecture          the only entry of `architectures`
    context, theta, tied  the defaults of max_position_embeddings, rope_theta and tie_word_embeddings
    bias_keys             whether attention_bias and mlp_bias have an effect
    qkv_bias              whether q_proj, k_proj and v_proj always add a bias
    window                the default of sliding_window
    n_kv_heads            the default of num_key_value_heads; None: num_attention_heads
    """

    architecture: str
    context: int
    theta: float = 10000.0
    tied: bool = False
    bias_keys: bool = True
    qkv_bias: bool = False
    window: int | None = None
    n_kv_heads: int | None = None


FAMILIES = {
    "llama": Family("LlamaForCausalLM", 2048),
    "mistral": Family("MistralForCausalLM", 131072, bias_keys=False, window=4096, n_kv_heads=8),
    "qwen2": Family("Qwen2ForCausalLM", 32768, bias_keys=False, qkv_bias=True, window=4096, n_kv_heads=32),
    "smollm3": Family("SmolLM3ForCausalLM", 32768, theta=2000000.0, tied=True, n_kv_heads=4),
}
# general.architecture of a GGUF file -> the order of the rows of attn_q and attn_k. llama.cpp's converter undoes
# Hugging Face's permutation for all but qwen2. Mistral's files have the architecture llama.
LAYOUTS: dict[str, Layout] = {"llama": "interleaved", "qwen2": "half", "smollm3": "interleaved"}
MOST_LAYERS = 2**16  # the largest models have about 100
INTERVAL = 4  # every fourth layer of a SmolLM3 has no RoPE; in GGUF this is fixed, in config.json it is the default

FULL, SLIDING = "full_attention", "sliding_attention"  # values of layer_types


def refusal(key: str, kind: object, known: Collection[str]) -> str:
    """Why a model of another family can't be run, and what may run it."""
    return f"{key} is {describe(kind)}; only {', '.join(known)} can be run; try transformers, vLLM or llama.cpp"


def every(interval: int, n_layers: int) -> tuple[int, ...]:
    """Every `interval`-th layer, numbered from 0: interval - 1, 2 * interval - 1, ... Raises ConfigError."""
    integer("the number of layers", n_layers, 1, MOST_LAYERS, ConfigError)
    return tuple(range(interval - 1, n_layers, interval))


def no_rope_layers(fields: Fields, kind: str, n_layers: int) -> tuple[int, ...]:
    """The layers without RoPE. In config.json's list of this name, 0 means a layer without RoPE and 1 one with it.

    The name suggests the opposite (transformers' issue 43756), but transformers' modeling_smollm3.py reads the list in
    this way. Its default list and llama.cpp's smollm3.cpp also leave out RoPE in layers 3, 7, 11 and so on.
    """
    listed = fields.get("no_rope_layers", list, None)
    if kind != "smollm3":
        if listed:
            raise ConfigError(f"{fields.where}: no_rope_layers must be null or [] for {kind}, got {describe(listed)}")
        return ()
    interval = fields.get("no_rope_layer_interval", int, INTERVAL)
    integer(f"{fields.where}: no_rope_layer_interval", interval, error=ConfigError)
    if listed is None:
        return every(interval, n_layers)
    if len(listed) < n_layers or not all(is_integer(rope) and rope in (0, 1) for rope in listed):
        raise ConfigError(
            f"{fields.where}: no_rope_layers must have a 1 (RoPE) or a 0 (no RoPE) for each of the {n_layers} layers,"
            f" got {describe(listed)}"
        )
    return tuple(layer for layer in range(n_layers) if not listed[layer])


def sliding_window(fields: Fields, kind: str, n_layers: int) -> int | None:
    """The sliding window in tokens; None if no layer has one."""
    where, types = fields.where, fields.get("layer_types", list, None)
    default = None if "sliding_window" in fields.values else FAMILIES[kind].window  # null: no window
    window: int | None = fields.get("sliding_window", int, default)
    last, used = fields.get("max_window_layers", int, 28), fields.get("use_sliding_window", bool, False)
    known = [FULL] if kind == "llama" else [FULL, SLIDING]
    if types is not None and any(type not in known for type in types):
        raise ConfigError(f"{where}: layer_types of {kind} must be {' or '.join(known)}, got {describe(types)}")
    if kind == "llama" and window is not None:
        raise ConfigError(f"{where}: sliding_window of llama must be null, got {window}")
    if kind in ("qwen2", "smollm3"):
        slides = (kind == "smollm3" or last < n_layers) if types is None else SLIDING in types
        window = window if used and slides else None
    return None if window is None else integer(f"{where}: sliding_window", window, error=ConfigError)


def window_warnings(config: ModelConfig) -> list[str]:
    """A warning if a sliding window ends the context early."""
    context, window = reach(dataclasses.replace(config, sliding_window=None)), reach(config)
    if window == context:
        return []
    return [f"the context is limited to {window:,} of {context:,} tokens: sliding windows are not implemented"]
