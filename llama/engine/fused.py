"""The decoder for one text on a CUDA device in few kernels: a Runner on triton_kernels and cuBLAS.

A block is six kernels for one token. For a prompt it is four matrix products and flash attention, with four small
kernels in between. Weights that read the same x are joined and multiplied at once; the model's own layers become views
of the joined weights, so nothing is stored twice. Everything else (batches, positions out of order, a cache in 8 bits,
a model with hooks) runs as the model is written.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import causal_mask, sdpa
from ..cache import KVCache, LayerCache, MemoryCheck
from ..errors import UsageError
from ..model import Runner, Transformer, TransformerBlock
from ..rope import FreqsCis
from . import triton_kernels as kernels
from .cuda_graphs import GraphRunner
from .hooks import HookWatch
from .linears import BlockLinear
from .no_rope import unrotated
from .triton_kernels import Splits, Weight


class FusedBlock(NamedTuple):
    """The layers of a block as they are multiplied."""

    qkv: nn.Module  # the rows of wq, wk and wv, concatenated
    wo: nn.Module
    gate_up: nn.Module  # the rows of w_gate and w_up, concatenated
    down: nn.Module
    attention_norm: Tensor  # (C,)
    ffn_norm: Tensor
    rotates: bool  # False in a layer without RoPE


class FusedRunner(GraphRunner):
    """Runs a model on a CUDA device with fused kernels and preallocated buffers. Move or cast the model first.

    The first run compiles the kernels, which takes seconds; Triton caches them on disk. Threads may share a runner:
    `turn` lets one step at a time use the buffers, and results are copies. Raises UsageError if the kernels do not
    support the model or Triton is missing.
    """

    def __init__(self, model: Transformer, cache_kind: str = "model", check_memory: MemoryCheck | None = None):
        super().__init__(cache_kind, check_memory)
        self.hooked = HookWatch("the fused kernels and CUDA graphs", rounds=True)
        check_model(model)
        config, like = model.config, model.norm.weight
        self.eps, self.heads = config.norm_eps, config.n_heads
        self.blocks = [fused_block(block) for block in model.layers]  # type: ignore[arg-type]
        for layer in (model.output, *(part for block in self.blocks for part in block[:4])):
            if not kernels.supports(packed(layer)):
                raise UsageError(
                    f"the fused kernels can't multiply by this {type(layer).__name__}; leave compile (--compile) out"
                )
        self.h = like.new_empty(config.dim)  # (C,): the hidden state of one token
        self.q = like.new_empty(config.n_heads, config.head_dim)
        self.y = like.new_empty(config.n_heads, config.head_dim)
        self.inner = like.new_empty(config.hidden_dim)
        self.flash = has_flash(like, config.head_dim)
        self.splits = Splits.empty(config.n_heads, config.n_kv_heads, config.head_dim, like.device)
        self.still: tuple[FreqsCis, FreqsCis] = (), ()  # a RoPE table, and one of its size that rotates nothing

    def run(
        self,
        model: Transformer,
        tokens: Tensor,
        positions: Tensor,
        keys: Tensor | None,
        seq_len: int,
        cache: KVCache | None,
    ) -> Tensor:
        if cache is None or not self.fits(model, cache) or cache.end - cache.length != tokens.shape[1]:
            return super().run(model, tokens, positions, keys, seq_len, cache)
        model.rope.freqs_cis(positions[:0], seq_len)  # reads no rows, but extends the table
        h = model.tok_embeddings(tokens)[0].contiguous()  # (T, C); a padded weight gives rows with gaps
        if len(h) == 1:
            with self.turn(h.device):
                self.h.copy_(h[0])
                self.step(model, positions, cache)
                h = self.h[None].clone()
        else:
            mask = None if self.flash else causal_mask(positions, torch.arange(cache.end, device=h.device))  # (T, S)
            for block, layer in zip(self.blocks, cache.layers, strict=True):
                h = self.prompt(model, block, h, cache.length, layer, cache.end, mask)
        return kernels.rms_norm(h, model.norm.weight, self.eps)[None]

    def fits(self, model: Transformer, cache: KVCache) -> bool:
        """Whether the kernels may run: one text, keys and values in the model's dtype, a model without hooks."""
        return cache.batch == 1 and cache.kind == "model" and not model.rope.by_length and not self.hooked(model)

    def launch_logits(self, model: Transformer, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Logits (1, V) float32 after one token. CUDA graphs capture this: only values depend on the position."""
        if not self.fits(model, cache):
            return super().launch_logits(model, tokens, positions, cache)
        model.rope.freqs_cis(positions[:0], min(cache.slots, model.max_seq_len))  # reads no rows, extends the table
        with self.turn(cache.device):
            self.h.copy_(model.tok_embeddings(tokens).view(-1))
            self.step(model, positions, cache)
            logits = torch.empty(model.config.vocab_size, dtype=torch.float32, device=self.h.device)  # (V,)
            return kernels.linear(packed(model.output), self.h, logits, norm=model.norm.weight, eps=self.eps)[None]

    def step(self, model: Transformer, position: Tensor, cache: KVCache) -> None:
        """Take `h`, the embedding of one token, through all blocks."""
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            k, v = layer.k[0], layer.v[0]  # (KV, slots, D)
            table = self.table(model, block)
            kernels.qkv(packed(block.qkv), self.h, block.attention_norm, self.eps, table, position, self.q, k, v)
            kernels.attend(self.q, k, v, position, self.splits, self.y)
            kernels.linear(packed(block.wo), self.y, self.h, residual=self.h)
            kernels.linear(packed(block.gate_up), self.h, self.inner, norm=block.ffn_norm, eps=self.eps, gated=True)
            kernels.linear(packed(block.down), self.inner, self.h, residual=self.h)

    def table(self, model: Transformer, block: FusedBlock) -> tuple[Tensor, Tensor]:
        """The table of cos and sin, (positions, D/2) each; in a layer without RoPE one that rotates nothing."""
        table: FreqsCis = model.rope.table
        if not block.rotates:
            still = self.still  # a local reference, since another thread may replace it
            if still[0] is not table:  # it has grown
                self.still = still = table, unrotated(table)
            table = still[1]
        cos, sin = table
        return cos, sin

    def prompt(
        self,
        model: Transformer,
        block: FusedBlock,
        h: Tensor,
        first: int,
        layer: LayerCache,
        end: int,
        mask: Tensor | None,
    ) -> Tensor:
        """A block for tokens `first` to `end`: h (T, C) -> (T, C). mask (T, S), or None for flash attention."""
        table = self.table(model, block)
        k, v = layer.k, layer.v
        qkv = block.qkv(kernels.rms_norm(h, block.attention_norm, self.eps))  # (T, (H + 2 KV) D)
        q = kernels.rotate(qkv, table, first, k[0], v[0], self.heads)[None].transpose(1, 2)  # (1, H, T, D)
        k, v = k[:, :, :end], v[:, :, :end]  # (1, KV, S, D)
        y = flash_attention(q, k, v) if mask is None else sdpa(q, k, v, mask)  # (1, H, T, D)
        h = add_product(h, y.transpose(1, 2).flatten(-2)[0], block.wo)
        inner = kernels.swiglu(block.gate_up(kernels.rms_norm(h, block.ffn_norm, self.eps)))  # (T, F)
        return add_product(h, inner, block.down)

    def module_by_module(self) -> Runner:
        return Runner(self.cache_kind, self.check_memory)


def has_flash(weight: Tensor, head_dim: int) -> bool:
    """Whether flash attention supports this device, dtype and head size. It needs no mask and no repeated keys."""
    if not weight.is_cuda or weight.dtype == torch.float32 or head_dim % 8 or head_dim > 256:
        return False
    return torch.cuda.get_device_capability(weight.device) >= (8, 0)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last T of S tokens: q (B, H, T, D), k and v (B, KV, S, D) -> (B, H, T, D).

    F.scaled_dot_product_attention would align the causal mask with the first key. It may also choose cuDNN, which
    prepares a plan for each new T and S. This operator aligns the mask with the last key.
    """
    y: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p=0.0, is_causal=True)[0]
    return y


def check_model(model: Transformer) -> None:
    """Raise UsageError if the fused kernels do not support a model or Triton is missing."""
    if not kernels.ready():
        raise UsageError("compiling for CUDA requires Triton (pip install triton); leave compile (--compile) out")
    if model.rope.form != "real":
        raise UsageError(
            f"the fused kernels run the real form of RoPE and not {model.rope.form}; load it with rope='real'"
        )
    if model.config.head_dim % 4:
        raise UsageError(f"the fused kernels require a head_dim that is a multiple of 4, got {model.config.head_dim}")


def add_product(h: Tensor, x: Tensor, layer: nn.Module) -> Tensor:
    """h + layer(x), added inside the matrix product if possible: (T, C), (T, K) -> (T, C)."""
    if isinstance(layer, nn.Linear) and layer.bias is None:
        return torch.addmm(h, x, layer.weight.t())
    return h + layer(x)


def packed(layer: nn.Module) -> Weight:
    """The weight of a layer in the form that triton_kernels expects."""
    if isinstance(layer, BlockLinear):
        return layer.packed
    if not isinstance(layer, nn.Linear):
        raise UsageError(f"the fused kernels can't multiply by a {type(layer).__name__}; leave compile (--compile) out")
    return Weight(layer.weight, None, None, layer.bias, layer.out_features, layer.in_features, 16, layer.in_features)


def fused_block(block: TransformerBlock) -> FusedBlock:
    """The block with its layers joined."""
    attention, ffn = block.attention, block.feed_forward
    return FusedBlock(
        join([attention.wq, attention.wk, attention.wv]),
        attention.wo,
        join([ffn.w_gate, ffn.w_up]),
        ffn.w_down,
        block.attention_norm.weight,
        block.ffn_norm.weight,
        block.attention.apply_rotary_emb.rotates,
    )


def join(layers: Sequence[nn.Module]) -> nn.Module:
    """Return one layer whose outputs are those of several layers of the same kind, concatenated.

    The tensors of the layers become contiguous views of it. Raises UsageError if the layers are of different kinds.
    """
    kinds = [
        (type(layer), getattr(layer, "bits", None), getattr(layer, "group", None), {k for k, _ in tensors(layer)})
        for layer in layers
    ]
    if any(kind != kinds[0] for kind in kinds):
        raise UsageError(
            "the fused kernels require the same quantization for wq, wk and wv, and for w_gate and w_up;"
            " leave compile (--compile) out"
        )
    one: Any = copy.copy(layers[0])
    one._parameters, one._buffers = dict(one._parameters), dict(one._buffers)
    one.out_features = sum(layer.out_features for layer in layers)
    for name, first in tensors(layers[0]):
        parts: list[Tensor] = [getattr(layer, name) for layer in layers]
        whole = torch.cat(parts)  # (sum of N, ..)
        views = whole.split([len(part) for part in parts])
        for layer, tensor in zip([one, *layers], [whole, *views], strict=True):
            setattr(layer, name, nn.Parameter(tensor, False) if isinstance(first, nn.Parameter) else tensor)
    return one


def tensors(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a layer that are not None."""
    return [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
