"""The architecture of a LLaMA decoder: sizes and constants, without device, dtype or limits of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import checks
from .errors import ConfigError

# No model has sizes near these. A larger number in a file means damage; nothing of that size may be allocated.
LARGEST_SIZE, LARGEST_HEAD_DIM = 2**31, 2**16


@dataclass(frozen=True)
class ModelConfig:
    """Everything needed to build the model. Construction raises ConfigError if a value is out of range.

    dim           C, width of the residual stream
    n_layers      number of transformer blocks
    n_heads       H, query heads
    n_kv_heads    KV, key/value heads; H / KV query heads share one (grouped-query attention, arXiv:2305.13245)
    head_dim      D, width of one head; usually C / H
    hidden_dim    width inside the feed-forward network
    vocab_size    V, rows of the embedding
    norm_eps      epsilon of RMSNorm
    rope_theta    base of the rotary frequencies
    rope_scaling  None, or a mapping as in Hugging Face's config: {"rope_type": "llama3", "factor": 8.0, ...}
    max_seq_len   context in tokens that the checkpoint was made for
    tie_embeddings  True if the output projection is the embedding matrix
    attention_bias  True if wq, wk, wv and wo add a bias; no official LLaMA does
    qkv_bias        True if wq, wk and wv add a bias, whether or not wo does; Qwen2's wo does not
    mlp_bias        True if w_gate, w_up and w_down add a bias; no official LLaMA does
    qk_norm         True if each head of q and k is normalized before it is rotated (Qwen3, arXiv:2505.09388)
    no_rope_layers  indices of the layers that do not rotate queries and keys, ascending (SmolLM3; arXiv:2305.19466)
    sliding_window  None, or how many tokens attention looks back (Mistral 7B v0.1); it limits the context
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_seq_len: int = 2048
    tie_embeddings: bool = False
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    no_rope_layers: tuple[int, ...] = ()
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size", "max_seq_len"):
            checks.integer(name, getattr(self, name), 1, LARGEST_SIZE, ConfigError)
        for name, high in (("norm_eps", 1), ("rope_theta", 1e300)):
            checks.number(name, getattr(self, name), 0, high, ConfigError, above=True)
        for name in ("tie_embeddings", "attention_bias", "qkv_bias", "mlp_bias", "qk_norm"):
            checks.boolean(name, getattr(self, name), ConfigError)
        if self.sliding_window is not None:
            checks.integer("sliding_window", self.sliding_window, 1, LARGEST_SIZE, ConfigError)
        layers = self.no_rope_layers
        if not isinstance(layers, tuple) or not all(checks.is_integer(i) and 0 <= i < self.n_layers for i in layers):
            raise ConfigError(f"no_rope_layers must be a tuple of layers below {self.n_layers}, got {layers!r:.60}")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"n_heads must be a multiple of n_kv_heads, got {self.n_heads} and {self.n_kv_heads}: each key/value"
                " head serves the same number of query heads"
            )
        if self.head_dim % 2 or self.head_dim > LARGEST_HEAD_DIM:
            raise ConfigError(f"head_dim must be at most {LARGEST_HEAD_DIM} and even, got {self.head_dim}")

    @property
    def block_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a block and its shape, in the model's order."""
        C, F, q, kv = self.dim, self.hidden_dim, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        qkv_bias, head_norms = self.attention_bias or self.qkv_bias, ("q_norm", "k_norm") if self.qk_norm else ()

        def linear(name: str, outputs: int, inputs: int, bias: bool) -> dict[str, tuple[int, ...]]:
            return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})

        return {
            "attention_norm.weight": (C,),
            **linear("attention.wq", q, C, qkv_bias),
            **linear("attention.wk", kv, C, qkv_bias),
            **linear("attention.wv", kv, C, qkv_bias),
            **linear("attention.wo", C, q, self.attention_bias),
            **{f"attention.{name}.weight": (self.head_dim,) for name in head_norms},
            "ffn_norm.weight": (C,),
            **linear("feed_forward.w_gate", F, C, self.mlp_bias),
            **linear("feed_forward.w_up", F, C, self.mlp_bias),
            **linear("feed_forward.w_down", C, F, self.mlp_bias),
        }

    @property
    def n_params(self) -> int:
        """Exact number of parameters; a tied output projection counts once."""
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return embeddings + self.n_layers * sum(map(math.prod, self.block_shapes.values())) + self.dim

    def kv_cache_bytes(self, tokens: int, bytes_per_element: int) -> int:
        """Bytes of the keys and values of `tokens` tokens in all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * tokens * bytes_per_element
