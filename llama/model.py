"""The LLaMA decoder (arXiv:2302.13971, arXiv:2307.09288, arXiv:2407.21783), complete.

    tokens (B, T)
       │ tok_embeddings
       h (B, T, C)
       │                                                                       ─┐
       ├──► RMSNorm ──► wq wk wv ──► apply_rotary_emb ──► attend ──► wo ──────┐  │
       + ◄───────────────────────────────────────────────────────────────────┘  │ n_layers times
       ├──► RMSNorm ──► w_down(silu(w_gate x) * w_up x) ─────────────────────┐  │
       + ◄───────────────────────────────────────────────────────────────────┘  │
       │                                                                       ─┘
    RMSNorm
       │ output
    logits (B, T, V)

Letters: B batch, T new tokens, S keys (cached and new), H query heads, KV key/value heads, D head_dim, C dim, V vocab.

Devices, files, quantization and sharding are handled elsewhere, through two extension points: every layer is a module
that `set_submodule` can replace, and a `Runner` may execute the layers. Head counts are read from the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import checks
from .attention import ATTENTION, Attend, causal_mask
from .cache import KVCache, LayerCache, MemoryCheck
from .config import ModelConfig
from .rope import FreqsCis, Rope, RotaryEmb
from .rope_scaling import reach

Cache = KVCache | None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis (arXiv:1910.07467). (.., C) -> (.., C)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()  # squares in bfloat16 lose too much precision
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)  # (.., C) * (.., 1)
        return y.type_as(x) * self.weight


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions. (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig, layer: int, rope: str, attention: str):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim  # hooks read the layer's index
        qkv_bias = config.attention_bias or config.qkv_bias
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=qkv_bias)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=qkv_bias)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=qkv_bias)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=config.attention_bias)
        # Qwen3 normalizes each head of q and k, with one weight (D,) for all heads; a Llama does not.
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.apply_rotary_emb = RotaryEmb(rope, rotates=layer not in config.no_rope_layers)
        self.attend = Attend(ATTENTION[checks.choice("attention", attention, ATTENTION)])

    def forward(
        self, x: Tensor, freqs_cis: FreqsCis, mask: Tensor | None, positions: Tensor, cache: LayerCache | None
    ) -> Tensor:
        q = self.q_norm(self.wq(x).unflatten(-1, (-1, self.head_dim)))  # (B, T, H, D)
        k = self.k_norm(self.wk(x).unflatten(-1, (-1, self.head_dim)))  # (B, T, KV, D)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))  # (B, T, KV, D)
        q, k = self.apply_rotary_emb(q, k, freqs_cis)  # v is not rotated: position affects only the weights
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D), (B, KV, T, D) twice
        if cache is not None:
            k, v = cache.update(k, v, positions)  # (B, KV, S, D): cached keys are rotated already
        y = self.attend(q, k, v, mask)  # (B, H, T, D)
        return self.wo(y.transpose(1, 2).flatten(-2))  # (B, T, H, D), (B, T, H * D), then (B, T, C)

    def key_offset(self, rope: Rope) -> Tensor | None:
        """wk's bias, rotated and averaged over positions: (KV, 1, D). None without a bias. See QuantizedLayerCache."""
        bias: Tensor | None = getattr(self.wk, "bias", None)  # a layer that replaced wk may lack a bias
        if bias is None or isinstance(self.k_norm, RMSNorm):  # normalized keys do not contain the bias
            return None
        k = bias.float().view(1, 1, -1, self.head_dim)  # (1, 1, KV, D)
        _, k = self.apply_rotary_emb(k, k, rope.mean_freqs_cis(k.device))  # (1, 1, KV, D)
        return k[0].transpose(0, 1)  # (KV, 1, D)


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): w_down(silu(w_gate x) * w_up x). (.., C) -> (.., C)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.w_gate = nn.Linear(config.dim, config.hidden_dim, bias=config.mlp_bias)
        self.w_up = nn.Linear(config.dim, config.hidden_dim, bias=config.mlp_bias)
        self.w_down = nn.Linear(config.hidden_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))  # (.., hidden_dim), then (.., C)


class TransformerBlock(nn.Module):
    """h = h + attention(norm(h)), then h + feed_forward(norm(h)). (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig, layer: int, rope: str, attention: str):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, layer, rope, attention)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self, h: Tensor, freqs_cis: FreqsCis, mask: Tensor | None, positions: Tensor, cache: LayerCache | None
    ) -> Tensor:
        h = h + self.attention(self.attention_norm(h), freqs_cis, mask, positions, cache)  # (B, T, C)
        return h + self.feed_forward(self.ffn_norm(h))  # (B, T, C)


class Runner:
    """Executes the layers of a model, one after the other. Subclasses in engine/ compute the same in other ways."""

    def layers(
        self, model: Transformer, h: Tensor, freqs_cis: FreqsCis, mask: Tensor | None, positions: Tensor, cache: Cache
    ) -> Tensor:
        """The loop over the layers: (B, T, C) -> (B, T, C)."""
        for i, layer in enumerate(model.layers):
            h = layer(h, freqs_cis, mask, positions, None if cache is None else cache.layers[i])  # (B, T, C)
        return h

    def threads(self, tokens: int) -> AbstractContextManager[None]:
        """A context that assigns the CPU's threads to passes over this number of tokens. Here it does nothing."""
        return nullcontext()


class Transformer(nn.Module):
    """The complete decoder: `config`, `tok_embeddings`, `layers` (a TransformerBlock each), `norm` and `output`.

    rope         form of the rotation, one of rope.FORMS; "half" needs wq and wk in that layout (rope.to_half_layout)
    attention    "sdpa" or "reference"
    max_seq_len  maximum number of positions; default: `reach`, which depends on the context, scaling and window
    """

    layers: Any  # a ModuleList, whose members PyTorch types as Module

    def __init__(
        self, config: ModelConfig, rope: str = "complex", attention: str = "sdpa", max_seq_len: int | None = None
    ):
        super().__init__()
        self.config, self.runner = config, Runner()
        self.cache_kind = "model"  # how new caches store numbers, one of cache.KINDS
        self.check_memory: MemoryCheck | None = None  # called before a cache allocates memory
        self.make_cache: Callable[..., KVCache] = KVCache
        self.world: Any = None  # the processes that share the model, if there are several (engine/parallel.World)
        self.max_seq_len = reach(config) if max_seq_len is None else checks.integer("max_seq_len", max_seq_len)
        scaling, trained_len = config.rope_scaling, config.max_seq_len
        self.rope = Rope(rope, config.head_dim, self.max_seq_len, config.rope_theta, scaling, trained_len)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config, i, rope, attention) for i in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def extra_repr(self) -> str:  # the first line of repr(model)
        return f"{self.config.n_params:,} parameters, context {self.max_seq_len:,}, {self.norm.weight.dtype}"

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Logits of the next token after each token: (B, T) int64 -> (B, T, V) float32.

        positions  (T,) or (B, T) int64, distinct in each row; None: after the cached tokens, or from 0 without a cache
        cache      keeps the keys and values of the tokens so far; the new ones are added
        Raises UsageError for an unknown id or a B that is not the cache's, ContextLengthError for a position beyond
        max_seq_len or the cache's max_len.
        """
        checks.known_tokens(tokens, self.config.vocab_size)
        return self.output(self.hidden(tokens, positions, cache)).float()  # (B, T, V)

    def hidden(
        self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None, length: int | None = None
    ) -> Tensor:
        """The normalized output of the last layer: (B, T) int64 -> (B, T, C). Arguments as in `forward`.

        length  length of the complete text, if frequencies depend on it (rope_scaling.BY_LENGTH); None: length so far
        """
        positions, T = checks.positions_of(tokens, positions), tokens.shape[1]
        if cache is not None:
            checks.instance("cache", cache, KVCache, "a KVCache")
            cache.check_sizes(*self.cache_sizes)
            # A single new token sees every key, so it needs no mask, unless a fixed cache also returns empty slots.
            masked = T != 1 or positions is not None or cache.fixed
            positions, end = cache.place(T, positions, len(tokens)), cache.end  # (T,), or (B, T) as given
            key_positions = torch.arange(cache.visible, device=tokens.device) if masked else None  # (S,)
        else:
            end = T if positions is None else int(positions.max()) + 1
            positions = torch.arange(T, device=tokens.device) if positions is None else positions
            key_positions = positions  # (S,) or (B, S): the keys are the tokens themselves
        h = self.states(tokens, positions, key_positions, max(end, length or 0), cache)  # (B, T, C)
        if cache is not None:
            cache.commit()
        return h

    def states(
        self, tokens: Tensor, positions: Tensor, key_positions: Tensor | None, seq_len: int, cache: Cache
    ) -> Tensor:
        """The part of `hidden` after the cache has given positions (T,) or (B, T): embed, run the layers, normalize.

        key_positions  (S,) or (B, S); None if every query sees every key
        seq_len        the length that the frequencies are for; all positions are below it
        """
        with self.runner.threads(tokens.numel()):
            h = self.tok_embeddings(tokens)  # (B, T, C)
            freqs_cis = self.rope.freqs_cis(positions, seq_len)  # (T, D/2) or (B, T, D/2), once for all layers
            # (T, S) or (B, 1, T, S)
            mask = None if key_positions is None else causal_mask(positions, key_positions)
            h = self.runner.layers(self, h, freqs_cis, mask, positions, cache)  # (B, T, C): the loop over the layers
            return self.norm(h)  # (B, T, C)

    def new_cache(self, max_len: int | None = None, batch: int = 1, **options: Any) -> KVCache:
        """An empty `KVCache` for this model, with room for `max_len` tokens (default: max_seq_len)."""
        return self.make_cache(
            *self.cache_sizes[:3],
            self.max_seq_len if max_len is None else max_len,
            batch=batch,
            dtype=self.norm.weight.dtype,
            device=[next(layer.parameters()).device for layer in self.layers],  # where the layer computes
            kind=self.cache_kind,
            key_offset=lambda i: self.layers[i].attention.key_offset(self.rope),
            check_memory=self.check_memory,
            **options,
        )

    @property
    def cache_sizes(self) -> tuple[int, int, int, torch.dtype]:
        """Layers, key/value heads, head_dim and dtype of the model's caches."""
        head_dim, key = self.config.head_dim, self.layers[0].attention.wk
        return len(self.layers), key.out_features // head_dim, head_dim, self.norm.weight.dtype
