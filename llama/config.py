"""The architecture of a LLaMA decoder: sizes and constants, without device, dtype or limits of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import checks
from .errors import ConfigError

# No model has sizes near these. A larger number in a file means damage and must not size an allocation.
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
    def n_params(self) -> int:
        """Exact number of parameters; a tied output projection counts once."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = 2 * self.dim * (q + kv) + self.attention_bias * self.dim
        attention += (self.attention_bias or self.qkv_bias) * (q + 2 * kv) + self.qk_norm * 2 * self.head_dim
        feed_forward = 3 * self.dim * self.hidden_dim + self.mlp_bias * (2 * self.hidden_dim + self.dim)
        block = attention + feed_forward + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return embeddings + self.n_layers * block + self.dim

    def kv_cache_bytes(self, tokens: int, bytes_per_element: int) -> int:
        """Bytes of the keys and values of `tokens` tokens in all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * tokens * bytes_per_element
