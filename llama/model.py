"""The LLaMA decoder (arXiv:2302.13971, arXiv:2307.09288, arXiv:2407.21783), whole.

    tokens (B, T)
       │ embedding
       h (B, T, C)
       │                                                           ─┐
       ├──► RMSNorm ──► wq wk wv ──► RoPE ──► attention ──► wo ──┐  │
       + ◄───────────────────────────────────────────────────────┘  │ n_layers times
       ├──► RMSNorm ──► w_down(silu(w_gate x) * w_up x) ─────────┐  │
       + ◄───────────────────────────────────────────────────────┘  │
       │                                                           ─┘
    RMSNorm
       │ output
    logits (B, T, V)

Letters on the shapes: B batch, T new tokens, S keys (cached and new), H query heads, KV key/value heads, D head_dim,
C model dim, V vocabulary.

The file knows nothing of devices, files, quantization or sharding. The layers are plain nn.Linear, so those can
swap them from outside; the number of heads is read off the tensors, so a slice of a weight works unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import ATTENTION, causal_mask
from .cache import KVCache, LayerCache
from .config import ModelConfig
from .rope import Rope
from .rope_scaling import reach


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last axis (arXiv:1910.07467). Any shape (.., C)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()  # squares of bfloat16 lose too much
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.type_as(x) * self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, layer: int, rope: Rope, attention: str):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim  # the layer's number is for those who look, not used here
        self.rope, self.attend = rope, ATTENTION[attention]
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=config.attention_bias)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=config.attention_bias)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=config.attention_bias)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=config.attention_bias)

    def forward(
        self, x: Tensor, turns: tuple[Tensor, ...], mask: Tensor | None, positions: Tensor, cache: LayerCache | None
    ) -> Tensor:
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))  # (B, T, KV, D)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))  # (B, T, KV, D)
        q, k = self.rope.apply(q, k, *turns)  # v is not rotated: position decides who is heard, not what is said
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D), (B, KV, T, D) twice
        if cache is not None:
            k, v = cache.update(k, v, positions)  # (B, KV, S, D): keys are cached already rotated
        y = self.attend(q, k, v, mask)  # (B, H, T, D)
        return self.wo(y.transpose(1, 2).flatten(-2))  # (B, T, C)


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): w_down(silu(w_gate x) * w_up x). (.., C) -> (.., C)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.w_gate = nn.Linear(config.dim, config.hidden_dim, bias=config.mlp_bias)
        self.w_up = nn.Linear(config.dim, config.hidden_dim, bias=config.mlp_bias)
        self.w_down = nn.Linear(config.hidden_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each on the normed input and added to it. (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig, layer: int, rope: Rope, attention: str):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, layer, rope, attention)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self, h: Tensor, turns: tuple[Tensor, ...], mask: Tensor | None, positions: Tensor, cache: LayerCache | None
    ) -> Tensor:
        h = h + self.attention(self.attention_norm(h), turns, mask, positions, cache)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """The whole decoder.

    rope        which form of the rotation runs, one of rope.FORMS; "half" wants wq and wk in the half layout
                (rope.to_half_layout). All give the same logits.
    attention   "sdpa" or "reference"
    max_seq_len positions it may be used for; the config's context, stretched by its scaling, unless given
    """

    def __init__(
        self, config: ModelConfig, rope: str = "complex", attention: str = "sdpa", max_seq_len: int | None = None
    ):
        super().__init__()
        self.config = config
        self.max_seq_len = reach(config.max_seq_len, config.rope_scaling) if max_seq_len is None else max_seq_len
        self.rope = Rope(
            rope, config.head_dim, self.max_seq_len, config.rope_theta, config.rope_scaling, config.max_seq_len
        )
        self.fixed_cache = False  # whether new_cache makes tensors of one shape; compiled code wants them (compiled.py)
        self.cache_kind = "model"  # what new_cache keeps keys and values in, one of cache.KINDS
        self.check_memory = True  # whether a cache asks what is free before it grows
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            TransformerBlock(config, layer, self.rope, attention) for layer in range(config.n_layers)
        )
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def hidden(
        self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None, length: int | None = None
    ) -> Tensor:
        """The last hidden state, normed: (B, T) int64 -> (B, T, C). Arguments as in `forward`.

        length  how long the text will be of which these tokens are a part: a RoPE that depends on the length turns them
                as it would in the whole text. None means that it ends here
        """
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be (B, T), got shape {tuple(tokens.shape)}")
        T = tokens.shape[1]
        sees_all = T == 1 and positions is None  # one token after all others sees every key: no mask
        if positions is not None and bool((positions < 0).any()):
            raise ValueError(f"positions must not be negative, got {int(positions.min())}")
        if cache is not None:
            positions = cache.place(T, positions)  # (T,), or (B, T) as given
            end = cache.end
            key_positions = torch.arange(cache.width, device=tokens.device)  # (S,)
            sees_all = sees_all and not cache.fixed  # there, slots still to be filled are among the keys
        else:
            end = T if positions is None else int(positions.max()) + 1
            positions = torch.arange(T, device=tokens.device) if positions is None else positions
            key_positions = positions  # (S,) or (B, S): the keys are the tokens themselves
        turns = self.rope.rows(positions, end if length is None else max(end, length))  # these two once for all layers
        mask = None if sees_all else causal_mask(positions, key_positions)  # (T, S) or (B, 1, T, S)
        h = self.run(tokens, turns, mask, positions, cache)
        if cache is not None:
            cache.commit()
        return h

    def run(
        self, tokens: Tensor, turns: tuple[Tensor, ...], mask: Tensor | None, positions: Tensor, cache: KVCache | None
    ) -> Tensor:
        """`hidden`, once it is clear who sits where and sees whom."""
        h = self.tok_embeddings(tokens)  # (B, T, C)
        for i, block in enumerate(self.layers):
            h = block(h, turns, mask, positions, None if cache is None else cache.layers[i])
        return self.norm(h)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Logits of the next token after each token: (B, T) int64 -> (B, T, V) float32.

        positions  (T,) or (B, T) int64; None means: after the tokens in the cache, or from 0 without one
        cache      takes the new keys and values and supplies the old ones

        Raises ContextLengthError when a position lies beyond the cache or the RoPE table.
        """
        return self.output(self.hidden(tokens, positions, cache)).float()

    def new_cache(self, max_len: int | None = None, batch: int = 1, fixed: bool | None = None) -> KVCache:
        """An empty cache for this model's shape, dtype and device; for its whole context unless max_len is given.

        fixed  whether it has all its slots from the start; as `fixed_cache` says, unless given
        """
        weight = self.norm.weight  # the one weight that is never packed
        attention: Any = self.layers[0].attention
        return KVCache(
            len(self.layers),
            attention.wk.out_features // attention.head_dim,
            attention.head_dim,
            self.max_seq_len if max_len is None else max_len,
            batch=batch,
            dtype=weight.dtype,
            device=weight.device,
            fixed=self.fixed_cache if fixed is None else fixed,
            kind=self.cache_kind,
            check_memory=self.check_memory,
        )
