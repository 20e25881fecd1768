"""The supported architectures besides Llama's, by their names in config.json and in GGUF.

Mistral is Llama with a sliding window in some versions, Qwen2 has biases on q, k and v, and SmolLM3 has layers without
RoPE. Sources: transformers' configuration and modeling files of these families; llama.cpp 0.3.36 in llama-cpp-python,
src/models/ and conversion/.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import NamedTuple

from ..checks import integer, is_integer
from ..config import ModelConfig
from ..errors import ConfigError
from ..rope import Layout
from ..rope_scaling import reach
from .documents import Fields, describe


class Family(NamedTuple):
    """How transformers reads config.json for a model_type.

    architecture          the only entry of `architectures`
    context, theta, tied  the defaults of max_position_embeddings, rope_theta and tie_word_embeddings
    bias_keys             whether attention_bias and mlp_bias have an effect
    qkv_bias              whether q_proj, k_proj and v_proj always add a bias
    window                the default of sliding_window
    n_kv_heads            the value without a key num_key_value_heads; None: that of num_attention_heads
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

# Other families (names without "_" and "-") -> what this decoder lacks to run them
EXPERTS, VISION, NORMS = "a mixture of experts", "vision", "norms on queries and keys"
OTHERS = {
    "mixtral": EXPERTS, "qwen2moe": EXPERTS, "qwen3moe": EXPERTS, "deepseek2": EXPERTS, "deepseekv2": EXPERTS,
    "deepseekv3": EXPERTS, "gptoss": EXPERTS, "llama4": EXPERTS, "llama4text": EXPERTS, "mistral4": EXPERTS,
    "mllama": VISION, "llava": VISION, "mistral3": VISION, "pixtral": VISION, "qwen2vl": VISION, "qwen25vl": VISION,
    "qwen3vl": VISION, "smolvlm": VISION, "qwen3": NORMS, "olmo2": NORMS, "gemma3": NORMS, "gemma3text": NORMS,
    "gemma": "other norms", "gemma2": "capped logits", "granite": "factors on its layers", "phi3": "joined matrices",
    "ministral": "layers with a sliding window between others", "ministral3": "queries scaled by their position",
}  # fmt: skip


def refusal(key: str, kind: object, known: Collection[str]) -> str:
    """Why a model of another family can't be run, and what may run it."""
    *names, last = known
    names_and_last = f"{', '.join(names)} and {last}"
    if not isinstance(kind, str):
        found = "missing" if kind is None else describe(kind)
        return (
            f"{key} is {found}; only {names_and_last} can be run; download the file again if it should be one of them"
        )
    other = OTHERS.get(re.sub("[^a-z0-9]", "", kind.lower()))
    has = f", a model with {other}" if other else ""
    return f"{key} is {kind!r:.60}{has}; only {names_and_last} can be run; try transformers, vLLM or llama.cpp"


def every(interval: int, n_layers: int) -> tuple[int, ...]:
    """Every `interval`-th layer, numbered from 0: interval - 1, 2 * interval - 1, ... Raises ConfigError."""
    integer("the number of layers", n_layers, 1, MOST_LAYERS, ConfigError)
    return tuple(range(interval - 1, n_layers, interval))


def no_rope_layers(fields: Fields, kind: str, n_layers: int) -> tuple[int, ...]:
    """The layers without RoPE. In config.json's list of this name, 0 means a layer without RoPE and 1 one with it.

    The name suggests the opposite (transformers' issue 43756), but transformers' modeling_smollm3.py reads the list in
    this way. Its default list and llama.cpp's smollm3.cpp also leave out RoPE in layers 3, 7, 11 and so on.
    """
    where, listed = fields.where, fields.get("no_rope_layers", object, None)
    if kind != "smollm3":
        if listed not in (None, []):
            raise ConfigError(
                f"{where}: no_rope_layers must be null for model_type {kind}, which has RoPE in every layer, got"
                f" {listed!r:.60}"
            )
        return ()
    interval = fields.get("no_rope_layer_interval", int, INTERVAL)
    integer(f"{where}: no_rope_layer_interval", interval, error=ConfigError)
    if listed is None:
        return every(interval, n_layers)
    if not isinstance(listed, list) or len(listed) < n_layers or not all(is_integer(i) and i in (0, 1) for i in listed):
        raise ConfigError(
            f"{where}: no_rope_layers must have a 1 (RoPE) or a 0 (no RoPE) for each of the {n_layers} layers, got"
            f" {listed!r:.60}; download the file again"
        )
    return tuple(layer for layer in range(n_layers) if not listed[layer])


def sliding_window(fields: Fields, kind: str, n_layers: int) -> int | None:
    """The sliding window in tokens; None if no layer has one."""
    where, types = fields.where, fields.get("layer_types", object, None)
    given = fields.get("sliding_window", object, None) if "sliding_window" in fields.values else FAMILIES[kind].window
    known = {FULL} if kind == "llama" else {FULL, SLIDING}
    if types is not None and (not isinstance(types, list) or set(map(str, types)) - known):
        raise ConfigError(
            f"{where}: layer_types of a {kind} model must be a list of {' or '.join(sorted(known))}, got {types!r:.80}"
        )
    if kind == "llama":
        if given is not None:
            raise ConfigError(f"{where}: sliding_window of a llama model must be null, got {describe(given)}")
        return None
    if kind != "mistral":
        last = fields.get("max_window_layers", int, 28)
        if not fields.get("use_sliding_window", bool, False):
            return None
        slides = (kind == "smollm3" or last < n_layers) if types is None else SLIDING in types
        given = given if slides else None
    if given is None:
        return None
    if not is_integer(given):
        raise ConfigError(f"{where}: sliding_window must be an integer or null, got {describe(given)}")
    return integer(f"{where}: sliding_window", given, error=ConfigError)


def window_warnings(config: ModelConfig) -> list[str]:
    """A warning if a sliding window ends the context early."""
    context, window = reach(dataclasses.replace(config, sliding_window=None)), reach(config)
    if window == context:
        return []
    return [
        f"the context is limited to the model's sliding window, {window:,} of {context:,} tokens, because windows are"
        f" not implemented; up to this length, full attention gives the same result"
    ]
