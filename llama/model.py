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
that `set_submodule` can replace, and `Transformer.runner` executes the blocks. Head counts are read from the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
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
Pick = Callable[[Tensor], tuple[Tensor, ...]]  # logits (V,) -> the next token (1,), and other values to yield with it


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis (arXiv:1910.07467). (.., C) -> (.., C)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()  # squares in bfloat16 lose too much
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)  # (.., C) * (.., 1)
        return y.type_as(x) * self.weight


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions. (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig, layer: int, rope: str, attention: str):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim  # layer: the layer's index, for hooks
        qkv_bias = config.attention_bias or config.qkv_bias
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=qkv_bias)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=qkv_bias)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=qkv_bias)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=config.attention_bias)
        self.apply_rotary_emb = RotaryEmb(rope, rotates=layer not in config.no_rope_layers)
        self.attend = Attend(ATTENTION[checks.choice("attention", attention, ATTENTION)])

    def forward(
        self, x: Tensor, freqs_cis: FreqsCis, mask: Tensor | None, positions: Tensor, cache: LayerCache | None
    ) -> Tensor:
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))  # (B, T, KV, D)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))  # (B, T, KV, D)
        q, k = self.apply_rotary_emb(q, k, freqs_cis)  # v is not rotated: position affects only the weights
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D), (B, KV, T, D) twice
        if cache is not None:
            k, v = cache.update(k, v, positions)  # (B, KV, S, D): cached keys are rotated already
        y = self.attend(q, k, v, mask)  # (B, H, T, D)
        return self.wo(y.transpose(1, 2).flatten(-2))  # (B, T, H, D), (B, T, H * D), then (B, T, C)

    def key_offset(self, rope: Rope) -> Tensor | None:
        """The mean of what wk's bias adds to keys, (KV, 1, D), or None: see cache.QuantizedLayerCache."""
        bias: Tensor | None = getattr(self.wk, "bias", None)  # a layer that replaced wk may lack it
        if bias is None:
            return None
        k = bias.float().view(1, 1, -1, self.head_dim)  # (B, T, KV, D)
        return self.apply_rotary_emb(k, k, rope.mean_freqs_cis(k.device))[1][0].transpose(0, 1)


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
    """h + attention(norm(h)), then the same with feed_forward. (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig, layer: int, rope: str, attention: str):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, layer, rope, attention)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self, h: Tensor, freqs_cis: FreqsCis, mask: Tensor | None, positions: Tensor, cache: LayerCache | None
    ) -> Tensor:
        h = h + self.attention(self.attention_norm(h), freqs_cis, mask, positions, cache)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """The complete decoder: `config`, `tok_embeddings`, `layers` (a TransformerBlock each), `norm` and `output`.

    rope         form of the rotation, one of rope.FORMS; "half" needs wq and wk in that layout (rope.to_half_layout)
    attention    "sdpa" or "reference"
    max_seq_len  number of positions it may use; default: `reach`, the config's context with its scaling and window
    """

    def __init__(
        self, config: ModelConfig, rope: str = "complex", attention: str = "sdpa", max_seq_len: int | None = None
    ):
        super().__init__()
        self.config, self.runner = config, Runner()
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
        max_seq_len or the cache's room.
        """
        checks.known_tokens(tokens, self.config.vocab_size)
        return self.output(self.hidden(tokens, positions, cache)).float()  # (B, T, V)

    def hidden(
        self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None, length: int | None = None
    ) -> Tensor:
        """The last hidden state, normed: (B, T) int64 -> (B, T, C). Arguments as in `forward`.

        length  tokens in the complete text, for frequencies that depend on it (rope_scaling.BY_LENGTH); None: so far
        """
        positions, T = checks.positions_of(tokens, positions), tokens.shape[1]
        if cache is not None:
            checks.instance("cache", cache, KVCache, "a KVCache").check_sizes(*self.runner.cache_sizes(self))
            # One token after all others sees every key. A fixed cache also has slots that are not filled yet.
            masked = T != 1 or positions is not None or cache.fixed
            positions, end = cache.place(T, positions, len(tokens)), cache.end  # (T,), or (B, T) as given
            keys = torch.arange(cache.visible, device=tokens.device) if masked else None  # (S,)
        else:
            end = T if positions is None else int(positions.max()) + 1
            positions = torch.arange(T, device=tokens.device) if positions is None else positions
            keys = positions  # (S,) or (B, S): the keys are the tokens themselves
        h = self.runner.run(self, tokens, positions, keys, max(end, length or 0), cache)  # (B, T, C)
        if cache is not None:
            cache.commit()
        return h

    def new_cache(self, max_len: int | None = None, batch: int = 1, fixed: bool | None = None) -> KVCache:
        """An empty `KVCache` for this model, with room for `max_len` tokens (default: max_seq_len)."""
        return self.runner.new_cache(self, max_len, batch, fixed)


class Runner:
    """Executes a model. This class runs block after block; subclasses in engine/ compute the same in other ways.

    cache_kind    the format of keys and values in new caches, one of cache.KINDS
    check_memory  called before a cache allocates memory, see cache.MemoryCheck
    """

    fixed_cache = False  # whether `new_cache` allocates all slots at once
    world: Any = None  # the processes that share the model, if there are several (engine/parallel.World)

    def __init__(self, cache_kind: str = "model", check_memory: MemoryCheck | None = None):
        self.cache_kind, self.check_memory = cache_kind, check_memory

    def run(
        self, model: Transformer, tokens: Tensor, positions: Tensor, keys: Tensor | None, seq_len: int, cache: Cache
    ) -> Tensor:
        """All blocks and the last norm: tokens (B, T) at positions (T,) or (B, T) -> (B, T, C).

        keys     positions of the keys, (S,) or (B, S); None if every query sees every key
        seq_len  the length that the frequencies are for; all positions are below it
        """
        h = model.tok_embeddings(tokens)  # (B, T, C)
        freqs_cis = model.rope.freqs_cis(positions, seq_len)  # (T, D/2) or (B, T, D/2), once for all layers
        mask = None if keys is None else causal_mask(positions, keys)  # (T, S) or (B, 1, T, S)
        for i, block in enumerate(model.layers):
            h = block(h, freqs_cis, mask, positions, None if cache is None else cache.layers[i])
        return model.norm(h)  # (B, T, C)

    def next_logits(self, model: Transformer, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Logits (B, V) after tokens (B, 1) at positions (1,) or (B, 1), over all slots of a cache.

        For batches: no shape or branch depends on the values of positions, and `cache.length` is unchanged.
        """
        slots = torch.arange(cache.slots, device=tokens.device)  # (S,)
        h = self.run(model, tokens, positions, slots, min(cache.slots, model.max_seq_len), cache)  # (B, 1, C)
        return model.output(h[:, -1]).float()  # (B, C), then (B, V)

    def decode(
        self, model: Transformer, logits: Tensor, cache: KVCache, steps: int, pick: Pick
    ) -> Generator[list[Any]]:
        """Pick a token from the logits (V,), yield the values of `pick`, feed the token; `steps` times."""
        for step in range(steps):
            choice = pick(logits)
            yield [values.item() for values in choice]
            if step + 1 < steps:  # the last token is not fed
                h = model.hidden(choice[0][None], cache=cache)  # (1, 1, C)
                logits = model.output(h[:, -1])[0].float()  # (1, V), then (V,)

    def new_cache(self, model: Transformer, max_len: int | None, batch: int, fixed: bool | None) -> KVCache:
        """See `Transformer.new_cache`. The keys and values of a layer are on its device."""
        n_layers, n_kv_heads, head_dim, dtype = self.cache_sizes(model)
        sizes = n_layers, n_kv_heads, head_dim, model.max_seq_len if max_len is None else max_len
        fixed = self.fixed_cache if fixed is None else fixed
        devices = [next(block.parameters()).device for block in model.layers]
        attentions: list[Any] = [block.attention for block in model.layers]
        offsets = [a.key_offset(model.rope) for a in attentions] if self.cache_kind == "int8" else None
        how: dict[str, Any] = {"fixed": fixed, "kind": self.cache_kind, "check_memory": self.check_memory}
        return KVCache(*sizes, batch=batch, dtype=dtype, device=devices, key_offsets=offsets, **how)

    def cache_sizes(self, model: Transformer) -> tuple[int, int, int, torch.dtype]:
        """Layers, key/value heads, head_dim and dtype of the model's caches."""
        first: Any = model.layers[0]
        head_dim = model.config.head_dim
        return len(model.layers), first.attention.wk.out_features // head_dim, head_dim, model.norm.weight.dtype
