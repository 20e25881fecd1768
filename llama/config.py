"""The architecture of a LLaMA decoder, and nothing else: no device, no dtype, no limits of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError

# No model comes near this; a larger number in a file is damage, and must not size anything.
LARGEST_SIZE = 2**31


@dataclass(frozen=True)
class ModelConfig:
    """What has to be known to build the model, in the field's names. Every size is checked at birth.

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
    max_seq_len   context in tokens the checkpoint was made for
    tie_embeddings  True if the output projection is the embedding matrix
    attention_bias  True if wq, wk, wv and wo add a bias; no official LLaMA does
    mlp_bias        True if w_gate, w_up and w_down add a bias; no official LLaMA does
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
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size", "max_seq_len"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")
            if not 1 <= value <= LARGEST_SIZE:
                raise ConfigError(f"{name} must lie between 1 and {LARGEST_SIZE}, got {str(value)[:40]}")
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
            most = {"norm_eps": 1, "rope_theta": 1e300}[name]
            if not 0 < value <= most:  # false for NaN too
                raise ConfigError(f"{name} must be a number above 0 and at most {most:g}, got {str(value)[:40]}")
        for name in ("tie_embeddings", "attention_bias", "mlp_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"n_heads must be a multiple of n_kv_heads, so that each key/value head serves equally many"
                f" query heads; got {self.n_heads} and {self.n_kv_heads}"
            )
        if self.head_dim > 2**16:
            raise ConfigError(f"head_dim must be at most {2**16}, got {self.head_dim}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even, since RoPE rotates pairs of entries; got {self.head_dim}")

    @property
    def n_params(self) -> int:
        """Exact number of parameters, a tied output projection counted once."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = 2 * self.dim * (q + kv) + self.attention_bias * (q + 2 * kv + self.dim)
        feed_forward = 3 * self.dim * self.hidden_dim + self.mlp_bias * (2 * self.hidden_dim + self.dim)
        block = attention + feed_forward + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return embeddings + self.n_layers * block + self.dim

    def kv_cache_bytes(self, tokens: int, bytes_per_element: int) -> int:
        """Bytes that keys and values of `tokens` tokens take over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * tokens * bytes_per_element
