"""The supported architectures, by their names in config.json and in GGUF. A new one is a row of these tables.

Mistral is Llama with a sliding window in some versions, Qwen2 has biases on q, k and v, Qwen3 normalizes the heads of q
and k, SmolLM3 has layers without RoPE, Granite has multipliers, Ministral 3 scales queries, EXAONE has other names, and
Phi-3 stores several matrices as one. Sources: transformers' configuration and modeling files of the families; llama.cpp
0.3.36, src/models/ and conversion/.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from ..checks import integer, is_integer, number, shown
from ..config import ModelConfig
from ..errors import ConfigError
from ..rope import Layout
from ..rope_scaling import reach
from ..system.documents import Fields


class ModelType(NamedTuple):
    """How transformers reads config.json for a model_type.

    architecture          the only entry of `architectures`
    context, theta, tied  the defaults of max_position_embeddings, rope_theta and tie_word_embeddings
    bias_keys             which of attention_bias and mlp_bias have an effect
    qkv_bias              whether q_proj, k_proj and v_proj always add a bias
    qk_norm               whether q_norm and k_norm normalize each head
    head_dim              the default of head_dim; None: hidden_size / num_attention_heads
    slides                when sliding_window has an effect: never, always, or if use_sliding_window is set
    window                the default of sliding_window
    last_layers           whether only the layers from max_window_layers on have a window
    n_kv_heads            the default of num_key_value_heads; None: num_attention_heads
    no_rope_interval      the default of no_rope_layer_interval; None: every layer has RoPE
    norm_eps              the default of rms_norm_eps
    trained               the default of original_max_position_embeddings, if RoPE follows the rules of Phi-3
    """

    architecture: str
    context: int
    theta: float = 10000.0
    tied: bool = False
    bias_keys: tuple[str, ...] = ("attention_bias", "mlp_bias")
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    slides: Literal["never", "always", "if used"] = "never"
    window: int | None = None
    last_layers: bool = False
    n_kv_heads: int | None = None
    no_rope_interval: int | None = None
    norm_eps: float = 1e-6
    trained: int | None = None


INTERVAL = 4  # every fourth layer of a SmolLM3 has no RoPE; in GGUF this is fixed, in config.json it is the default
MODEL_TYPES = {
    "llama": ModelType("LlamaForCausalLM", 2048),
    "mistral": ModelType("MistralForCausalLM", 131072, bias_keys=(), slides="always", window=4096, n_kv_heads=8),
    "qwen2": ModelType("Qwen2ForCausalLM", 32768, bias_keys=(), qkv_bias=True, slides="if used", window=4096,
                       last_layers=True, n_kv_heads=32),
    "qwen3": ModelType("Qwen3ForCausalLM", 32768, bias_keys=("attention_bias",), qk_norm=True, head_dim=128,
                       slides="if used", window=4096, last_layers=True, n_kv_heads=32),
    "smollm3": ModelType("SmolLM3ForCausalLM", 32768, theta=2000000.0, tied=True, slides="if used", n_kv_heads=4,
                         no_rope_interval=INTERVAL),
    "granite": ModelType("GraniteForCausalLM", 2048),
    "ministral3": ModelType("Ministral3ForCausalLM", 262144, bias_keys=(), head_dim=128, slides="always",
                            n_kv_heads=8, norm_eps=1e-5),
    "exaone": ModelType("LlamaForCausalLM", 4096, theta=500000.0, n_kv_heads=8, norm_eps=1e-5),
    "phi3": ModelType("Phi3ForCausalLM", 4096, bias_keys=(), slides="always", norm_eps=1e-5, trained=4096),
}  # fmt: skip
# general.architecture of a GGUF file -> the order of the rows of attn_q and attn_k. llama.cpp's converter undoes
# Hugging Face's permutation for all but qwen2, qwen3, exaone and phi3. Mistral's files have llama or mistral3.
GGUF_LAYOUTS: dict[str, Layout] = {
    "llama": "interleaved", "qwen2": "half", "qwen3": "half", "smollm3": "interleaved", "granite": "interleaved",
    "mistral3": "interleaved", "exaone": "half", "phi3": "half",
}  # fmt: skip
MOST_LAYERS = 2**16  # the largest models have about 100

# The parameters of Meta's use_scaled_rope (llama-models, apply_scaling), except the factor
SCALED_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip

FULL, SLIDING = "full_attention", "sliding_attention"  # values of layer_types
# A feature that is not implemented -> the architectures that need it
NEEDS = {
    "experts": "mixtral llama4 qwen2_moe qwen3_moe qwen3moe gpt_oss gpt-oss granitemoe phimoe deepseek_v3 deepseek2",
    "norms after the sublayers": "olmo2 olmo3 exaone4 gemma2 gemma3 gemma3_text glm4",
    "norms of 1 + weight and GELU": "gemma",
    "Mamba layers or a fused feed-forward network": "granitehybrid granitemoehybrid jamba falcon_h1 nemotron_h",
    "attention beside the feed-forward network": "phi phi2 gpt_neox gptneox falcon cohere command-r",
}
# Granite multiplies the embedding, the scores and what each sublayer adds by the first three, and divides the logits
MULTIPLIERS = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
GGUF_MULTIPLIERS = "embedding_scale", "attention.scale", "residual_scale", "logit_scale"
EXAONE_KEYS = {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps",
               "activation_function": "hidden_act"}  # fmt: skip


def folded(config: ModelConfig, fields: Fields) -> tuple[ModelConfig, dict[str, float]]:
    """Fold Granite's multipliers into norm_eps and factors of weights: return the configuration and the factors.

    The residual stream is divided by the residual multiplier. So wo and w_down need no factor, and a norm gives the
    same result with its epsilon divided by the multiplier's square. The last norm also divides the logits. Raises
    ConfigError.
    """
    in_gguf, usual = "general.architecture" in fields.values, config.head_dim**-0.5
    if fields.values["general.architecture" if in_gguf else "model_type"] != "granite":
        return config, {}
    keys = [f"granite.{key}" for key in GGUF_MULTIPLIERS] if in_gguf else MULTIPLIERS
    if in_gguf:
        fields.get("granite.logit_scale", float)  # raises if it is missing: llama.cpp requires it
    embedding, attention, residual, logits = (
        number(f"{fields.where}: {key}", fields.get(key, float, default), 1e-6, 1e6, ConfigError)
        for key, default in zip(keys, (1.0, usual if in_gguf else 1.0, 1.0, 1.0), strict=True)
    )
    stream = embedding / residual
    output = stream if config.tie_embeddings else 1.0
    factors = {"tok_embeddings": stream, "wq": attention / usual, "norm": 1 / (logits * output), "output": output}
    return dataclasses.replace(config, norm_eps=config.norm_eps / residual**2), factors


def known(fields: Fields, key: str, kinds: Collection[str]) -> str:
    """The value of a key that names the architecture. Raises ConfigError unless it is one of `kinds`."""
    kind = fields.get(key, object, None)
    if not isinstance(kind, str) or kind not in kinds:
        found = f"{fields.where}: {key} is {shown(kind)}"
        found += next((f", which needs {what}" for what, names in NEEDS.items() if kind in names.split()), "")
        raise ConfigError(f"{found}; only {', '.join(kinds)} can be run; try transformers, vLLM or llama.cpp")
    return kind


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with the usual keys. Of a model that also sees images, only the part of its language model."""
    fields = Fields(settings, "config.json")
    kind = settings.get("model_type")
    if kind == "mistral3":
        return {"model_type": "mistral", **fields.get("text_config", dict)}
    if kind == "exaone":
        return {EXAONE_KEYS.get(key, key): value for key, value in settings.items()}
    layers = fields.get("layer_types", list, None) if kind == "granitemoehybrid" else None
    attention = layers is not None and all(type in ("attention", FULL) for type in layers)
    if attention and (settings.get("num_local_experts"), settings.get("position_embedding_type")) == (0, "rope"):
        others = re.compile("mamba_|time_step_|intermediate_size|layer_types|position_embedding_type")
        renamed = {key.removeprefix("shared_"): value for key, value in settings.items() if not others.match(key)}
        return {**renamed, "model_type": "granite"}
    return settings


def every(interval: int, n_layers: int) -> tuple[int, ...]:
    """Every `interval`-th layer, numbered from 0: interval - 1, 2 * interval - 1, ... Raises ConfigError."""
    integer("the number of layers", n_layers, 1, MOST_LAYERS, ConfigError)
    return tuple(range(interval - 1, n_layers, interval))


def no_rope_layers(fields: Fields, kind: str, n_layers: int) -> tuple[int, ...]:
    """The layers without RoPE. In config.json's list of this name, 0 means a layer without RoPE and 1 one with it.

    The name suggests the opposite (transformers' issue 43756), but transformers' modeling_smollm3.py reads the list in
    this way. Its default list and llama.cpp's smollm3.cpp also leave out RoPE in layers 3, 7, 11 and so on.
    """
    default = MODEL_TYPES[kind].no_rope_interval
    if default is None:
        return ()
    interval = fields.get("no_rope_layer_interval", int, default)
    listed = fields.get("no_rope_layers", list, None)
    if listed is None:
        return every(integer(f"{fields.where}: no_rope_layer_interval", interval, error=ConfigError), n_layers)
    if len(listed) < n_layers or not all(is_integer(rope) and rope in (0, 1) for rope in listed):
        raise ConfigError(
            f"{fields.where}: no_rope_layers must have a 0 (no RoPE) or a 1 for each of the {n_layers} layers"
        )
    return tuple(layer for layer in range(n_layers) if not listed[layer])


def sliding_window(fields: Fields, kind: str, n_layers: int) -> int | None:
    """The number of tokens up to which full attention is exact, such as the sliding window; None: no limit."""
    model_type = MODEL_TYPES[kind]
    if model_type.slides == "never":
        return None
    default = None if "sliding_window" in fields.values else model_type.window  # null: no window
    window: int | None = fields.get("sliding_window", int, default)
    if model_type.slides == "if used":
        types, full = fields.get("layer_types", list, None), fields.get("max_window_layers", int, 28)
        used = fields.get("use_sliding_window", bool, False)
        if types is not None and any(type not in (FULL, SLIDING) for type in types):
            raise ConfigError(f"{fields.where}: layer_types must be {FULL} or {SLIDING}, got {shown(types)}")
        slides = (full < n_layers or not model_type.last_layers) if types is None else SLIDING in types
        # With types, transformers ignores use_sliding_window, except for Qwen2 and Qwen3.
        window = window if slides and (used or (types is not None and not model_type.last_layers)) else None
    if kind == "ministral3":  # queries are scaled from position `length` on; transformers prefers the outer key
        inner = fields.get("rope_parameters", dict, None) or fields.get("rope_scaling", dict)
        length = Fields(inner, fields.where).get("original_max_position_embeddings", int)
        length = min(length, fields.get("original_max_position_embeddings", int, length))
        window = length if window is None else min(window, length)
    return None if window is None else integer(f"{fields.where}: sliding_window", window, error=ConfigError)


def window_warnings(config: ModelConfig) -> list[str]:
    """A warning if the context ends early, at a sliding window or at the position from which queries are scaled."""
    context, window = reach(dataclasses.replace(config, sliding_window=None)), reach(config)
    if window == context:
        return []
    return [
        f"the context is limited to {window:,} of {context:,} tokens: windows and scaled queries are not implemented"
    ]
