"""Small models and vocabularies, created by the tests, so that all their values are known."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn

from llama.attention import ATTENTION, Attend
from llama.cache import KVCache
from llama.checkpoint.weight import MemoryWeight
from llama.config import ModelConfig
from llama.engine import kernels
from llama.engine.cpu_attention import cpu_sdpa, kernel_attention
from llama.engine.linears import make_embedding, make_linear
from llama.model import Transformer
from llama.quant.schemes import pick_scheme, scheme_for
from llama.rope import Rope, RotaryEmb, to_layout
from llama.weights import expected_shapes

CONFIG = ModelConfig(
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    hidden_dim=96,
    vocab_size=320,
    norm_eps=1e-5,
    max_seq_len=256,
)

# Wide enough for every group size of quantized weights, and for the kernels that need 16 rows.
WIDE = ModelConfig(128, 2, 4, 2, 32, 256, 320, norm_eps=2**-17, max_seq_len=256)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def weights(config: ModelConfig = CONFIG, seed: int = 0, scale: float = 1.0) -> dict[str, Tensor]:
    """Return random weights, scaled so that every part of the model affects the logits."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith(".bias"):
            state[name] = 0.3 * noise
        else:
            state[name] = 1 + 0.2 * noise if len(shape) == 1 else scale * noise / shape[-1] ** 0.5
    return state


# Every attention function, by name: the decoder's, and those that the loader chooses on a CPU.
FUNCTIONS = {**ATTENTION, "cpu": cpu_sdpa, **({"kernel": kernel_attention} if kernels.pick_form() else {})}


def model(config: ModelConfig = CONFIG, seed: int = 0, attention: str = "cpu", **options: Any) -> Transformer:
    """Return a random model in float32, with one of FUNCTIONS."""
    net = Transformer(config, **options).requires_grad_(False).eval()
    net.load_state_dict(weights(config, seed), strict=not config.tie_embeddings)
    for layer in range(config.n_layers):
        net.set_submodule(f"layers.{layer}.attention.attend", Attend(FUNCTIONS[attention]))
    return net


def cache_maker(fixed: bool) -> Any:
    """Return a value of `Transformer.make_cache` that makes fixed caches, or caches that grow."""
    return functools.partial(KVCache, fixed=fixed)


def next_logits(net: Transformer, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
    """Return the logits (B, V) after tokens (B, 1), computed as generation/batch.py does: over all slots of a cache."""
    slots = torch.arange(cache.slots, device=tokens.device)  # (S,)
    return net.output(net.states(tokens, positions, slots, net.max_seq_len, cache)[:, -1]).float()


def quantized(net: Transformer, scheme: str) -> Transformer:
    """Replace the linear layers of a model, and its tied embedding, by the loader's quantized layers, in place."""
    for name, linear in [(n, m) for n, m in net.named_modules() if isinstance(m, nn.Linear)]:
        format = scheme_for(name, pick_scheme(scheme)).format
        layer = make_linear(MemoryWeight(linear.weight), linear.weight.device, format, linear.bias)
        net.set_submodule(name, layer)
        if name == "output" and net.config.tie_embeddings:
            net.set_submodule("tok_embeddings", make_embedding(layer, linear.weight.dtype))
    return net


# The names of transformers' layers -> ours
NAMES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w_gate", "mlp.up_proj": "feed_forward.w_up",
    "mlp.down_proj": "feed_forward.w_down", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "embed_tokens": "tok_embeddings", "lm_head": "output", "model.": "",
}  # fmt: skip


def transformers_model(config: ModelConfig = CONFIG) -> Any:
    """Return the model of `weights(config)` in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=config.dim, num_hidden_layers=config.n_layers, num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads, head_dim=config.head_dim, intermediate_size=config.hidden_dim,
            vocab_size=config.vocab_size, rms_norm_eps=config.norm_eps, max_position_embeddings=config.max_seq_len,
            rope_parameters={"rope_theta": config.rope_theta, **(config.rope_scaling or {"rope_type": "default"})},
            tie_word_embeddings=config.tie_embeddings,
        )
    ).eval()  # fmt: skip
    state, given = weights(config), {}
    for name in theirs.state_dict():
        ours = functools.reduce(lambda name, pair: name.replace(*pair), NAMES.items(), name)
        if ours in state:
            given[name] = to_layout(ours, state[ours], config.head_dim, "interleaved", "half")
    theirs.load_state_dict(given, strict=not config.tie_embeddings)
    return theirs


def rows(table: Rope, positions: Tensor, end: int) -> tuple[Tensor, ...]:
    """Return rows of a table of freqs_cis as a tuple in every form: one complex tensor, or two real ones."""
    found = table.freqs_cis(positions, end)
    return (found,) if isinstance(found, Tensor) else found


def rotate(table: Rope, q: Tensor, k: Tensor, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Rotate q and k as a model with this table does."""
    rotated: tuple[Tensor, Tensor] = RotaryEmb(table.form)(q, k, table.freqs_cis(positions, end))
    return rotated


def byte_vocabulary() -> dict[str, Any]:
    """Return GGUF metadata of a byte-level vocabulary: 3 control tokens, 256 bytes, a few merges."""
    from llama.tokenizer.common import BYTE_OF

    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    pairs = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ("Ġt", "he"), ("Ċ", "Ċ")]
    tokens = control + list(BYTE_OF) + [a + b for a, b in pairs]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(control) + [1] * (len(tokens) - len(control)),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in pairs],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }


def gguf_name(config: ModelConfig) -> str:
    """Return the architecture's name in GGUF."""
    return "qwen3" if config.qk_norm else "llama"


def architecture(config: ModelConfig = CONFIG) -> dict[str, Any]:
    """Return GGUF metadata of an architecture."""
    entries = {
        "context_length": config.max_seq_len,
        "embedding_length": config.dim,
        "block_count": config.n_layers,
        "feed_forward_length": config.hidden_dim,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.head_dim,
    }
    return {f"{gguf_name(config)}.{key}": value for key, value in entries.items()}


def add_metadata(writer: gguf.GGUFWriter, entries: dict[str, Any]) -> None:
    """Add metadata entries that are not None, each with the type of its value."""
    kinds: dict[type, Any] = {str: writer.add_string, bool: writer.add_bool, list: writer.add_array,
                              float: writer.add_float32, int: writer.add_uint32}  # fmt: skip
    for key, value in entries.items():
        if value is not None:
            kinds[type(value)](key, value)


def write_gguf(
    path: Path,
    config: ModelConfig = CONFIG,
    state: dict[str, Tensor] | None = None,
    *,
    quantization: str = "F32",
    metadata: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    extra: dict[str, Tensor] | None = None,
) -> Path:
    """Write a GGUF file with the reference writer. `metadata` overrides entries; None removes one."""
    from llama.checkpoint.base import GGUF_NAMES, to_file_name

    state = weights(config) if state is None else state
    entries = {**architecture(config), **byte_vocabulary(), **(metadata or {})}
    writer = gguf.GGUFWriter(str(path), entries.pop("general.architecture", gguf_name(config)))
    add_metadata(writer, entries)
    tensors = {to_file_name(name, GGUF_NAMES): tensor for name, tensor in state.items()}
    for name, tensor in {**tensors, **(extra or {})}.items():
        if name in without:
            continue
        type = gguf.GGMLQuantizationType[quantization if tensor.dim() == 2 else "F32"]
        array = tensor.float().numpy()
        writer.add_tensor(name, gguf.quants.quantize(array, type), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_meta(
    folder: Path, config: ModelConfig = CONFIG, state: dict[str, Tensor] | None = None, shards: int = 1
) -> Path:
    """Write a folder in Meta's format, without a tokenizer, in shards as those of Llama 3."""
    from llama.checkpoint.base import META_NAMES, to_file_name

    from .scripts import make_tiny

    folder.mkdir()
    state = weights(config) if state is None else state
    if config.tie_embeddings:
        state = {**state, "output.weight": state["tok_embeddings.weight"]}
    pieces = {to_file_name(name, META_NAMES): tensor for name, tensor in state.items()}
    split = {name: make_tiny.split(name, tensor, config, shards, False) for name, tensor in pieces.items()}
    for rank in range(shards):
        torch.save({name: parts[rank] for name, parts in split.items()}, folder / f"consolidated.{rank:02d}.pth")
    names = ("dim", "n_layers", "n_heads", "vocab_size", "norm_eps", "rope_theta")
    params = {name: getattr(config, name) for name in names} | {"n_kv_heads": max(config.n_kv_heads, shards)}
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def random_tokens(length: int, config: ModelConfig = CONFIG, seed: int = 0, batch: int = 1) -> Tensor:
    """Return (batch, length) random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


def as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().double().numpy()


def contents(cache: Any, length: int | None = None) -> list[Tensor]:
    """Keys and values of the first `length` slots of every layer, dequantized."""
    return [floats[:, :, :length] for layer in cache.layers for floats in layer.floats()]
