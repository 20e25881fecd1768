"""The decoder on a CPU in few operations: a Runner on the C++ kernels.

A block with packed weights is one operation (cpp/block.h); with other weights, it is nine. All of them run on the
kernels' threads, for one token, a prompt or a batch, and round their results where model.py does.
Packed weights that read the same x are joined and multiplied at once; the model's layers become views of them.

If layers or weights were replaced, if the model has hooks or computes gradients, it runs as model.py is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import causal_mask
from ..cache import KVCache, LayerCache, MemoryCheck, QuantizedKV
from ..errors import UsageError
from ..model import Pick, Runner, Transformer
from ..quant.tiles import TILE
from ..system.pages import empty_in_large_pages
from . import kernels
from .cpu_attention import FEW_QUERIES, kernel_attention
from .linears import FEW_ROWS, FewRowsLinear, TileLinear
from .watch import ModelWatch

QKV, GATE_UP = ("wq", "wk", "wv"), ("w_gate", "w_up")  # layers that read the same x
ops: Any = torch.ops.clearllama


class TokenInputs(NamedTuple):
    """What every block needs to know about the new tokens."""

    angles: Sequence[Tensor]  # cos and sin, (T, D/2) or (B, T, D/2)
    positions: Tensor  # (T,) or (B, T)
    mask: Tensor | None  # (T, S) or (B, 1, T, S)
    eps: float


class FusedBlock(NamedTuple):
    """The layers of a block as the kernels use them."""

    block: Any  # TransformerBlock
    rotates: bool  # False in a layer without RoPE
    qkv: TileLinear | None  # wq, wk and wv, if they are joined
    gate_up: TileLinear | None
    tiles: list[Tensor]  # the four packed weights of the operation `block`; none if it can't run this block
    formats: list[int]

    @classmethod
    def of(cls, block: Any, join: bool) -> FusedBlock:
        attention, ffn = block.attention, block.feed_forward
        qkv, gate_up = (
            join_layers(part, names) if join else None for part, names in ((attention, QKV), (ffn, GATE_UP))
        )
        layers = [layer for layer in (qkv, attention.wo, gate_up, ffn.w_down) if isinstance(layer, TileLinear)]
        head_dim, formats = attention.head_dim, []
        if len(layers) < 4 or any(layer.bias is not None for layer in layers) or head_dim % 16 or head_dim > 256:
            layers = []
        for layer in layers:
            formats += [*layer.format, layer.out_features]
        rotates = attention.apply_rotary_emb.rotates
        return cls(block, rotates, qkv, gate_up, [layer.tiles for layer in layers], formats)


class KernelRunner(Runner):
    """Runs a model on the C++ kernels. The results are those of `Runner`, except for the order of sums.

    join  whether packed weights that read the same x are joined, which copies them
    """

    def __init__(
        self,
        model: Transformer,
        cache_kind: str = "model",
        check_memory: MemoryCheck | None = None,
        join: bool = True,
    ):
        super().__init__(cache_kind, check_memory)
        self.blocks = [FusedBlock.of(block, join) for block in model.layers]
        self.supported = supports(model)
        self.any_rows = self.supported and (kernels.has_tiles() or kernels.widen())
        self.packed = all(isinstance(layer, TileLinear) for layer in linears(model.layers))
        self.dtype = model.norm.weight.dtype
        self.watch = ModelWatch(model, "the fused C++ kernels")

    def run(
        self,
        model: Transformer,
        tokens: Tensor,
        positions: Tensor,
        keys: Tensor | None,
        seq_len: int,
        cache: KVCache | None,
    ) -> Tensor:
        if not self.unchanged(model) or not self.fits(tokens.numel()) or has_gradients(model):
            return super().run(model, tokens, positions, keys, seq_len, cache)
        with kernels.own_threads():
            rows = model.rope.freqs_cis(positions, seq_len)
            angles = tuple(torch.view_as_real(rows).unbind(-1)) if isinstance(rows, Tensor) else rows
            mask = None if keys is None else causal_mask(positions, keys).contiguous()
            inputs = TokenInputs(angles, positions.contiguous(), mask, model.config.norm_eps)
            still = inputs._replace(angles=unrotated(angles)) if model.config.no_rope_layers else inputs
            few = positions.shape[-1] <= FEW_QUERIES  # for more, the kernels' attention rounds to bfloat16
            # The kernels change h in place. An embedding may return rows with gaps between them.
            h = model.tok_embeddings(tokens).flatten(0, 1).clone(memory_format=torch.contiguous_format)  # (B T, C)
            added: Tensor | None = None  # the result of a block's feed_forward, which the next operation adds to h
            for i, block in enumerate(self.blocks):
                layer = None if cache is None else cache.layers[i]
                own = inputs if block.rotates else still
                if block.tiles and layer is not None and (few or h.dtype != torch.float32):
                    added = one_operation(block, own, h, added, layer)
                else:
                    added = nine_operations(block, own, h, added, layer)
            return ops.add_norm(h, added, model.norm.weight, inputs.eps).view(*tokens.shape, -1)

    def fits(self, rows: int) -> bool:
        """Whether the kernels run this many rows; otherwise PyTorch multiplies many rows by a bfloat16 weight."""
        return self.supported and rows > 0 and (self.packed or rows <= FEW_ROWS or self.any_rows)

    def threads(self, rows: int) -> contextlib.AbstractContextManager[None]:
        """Give the threads to whoever runs so many rows. PyTorch's threads and the kernels' must not take turns."""
        return kernels.own_threads() if self.fits(rows) else contextlib.nullcontext()

    def decode(
        self, model: Transformer, logits: Tensor, cache: KVCache, steps: int, pick: Pick
    ) -> Generator[list[Any]]:
        chosen = super().decode(model, logits, cache, steps, pick)
        while True:
            with self.threads(1):  # logits are long enough for PyTorch to use several threads
                values = next(chosen, None)
            if values is None:
                return
            yield values

    def next_logits(self, model: Transformer, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        with self.threads(tokens.numel()):
            return super().next_logits(model, tokens, positions, cache)

    def unchanged(self, model: Transformer) -> bool:
        """Whether the model is still the one that this runner was made for, without hooks.

        Raises UsageError if a model with packed weights was cast: they can't follow.
        """
        if model.norm.weight.dtype == self.dtype:
            return self.watch.unchanged(model)
        if any(isinstance(layer, TileLinear) for layer in model.modules()):
            raise UsageError(
                f"the model was loaded in {self.dtype} and can't be cast to {model.norm.weight.dtype}:"
                " load it in that dtype (dtype=...), or with llama.load_model"
            )
        return False


def has_gradients(model: Transformer) -> bool:
    """Whether PyTorch records operations on a weight. The kernels have no derivatives."""
    return torch.is_grad_enabled() and any(weight.requires_grad for weight in model.parameters())


def one_operation(fused: FusedBlock, inputs: TokenInputs, h: Tensor, added: Tensor | None, cache: LayerCache) -> Tensor:
    """A block with packed weights: h (B T, C) is changed in place -> what is to be added to it."""
    norms = [fused.block.attention_norm.weight, fused.block.ffn_norm.weight]
    end = cache.buffers[0].shape[2] if cache.visible is None else cache.visible
    y: Tensor = ops.block(
        h,
        added,
        norms,
        inputs.eps,
        fused.tiles,
        fused.formats,
        *inputs.angles,
        inputs.positions,
        inputs.mask,
        *cache.buffers[:2],
        *(cache.buffers[2:] or (None, None)),
        end,
    )
    return y


def nine_operations(
    fused: FusedBlock, inputs: TokenInputs, h: Tensor, added: Tensor | None, cache: LayerCache | None
) -> Tensor:
    """The same for any weights and caches."""
    attention, ffn = fused.block.attention, fused.block.feed_forward
    T, D = inputs.positions.shape[-1], attention.head_dim
    x = ops.add_norm(h, added, fused.block.attention_norm.weight, inputs.eps)  # (B T, C)
    q, k, v = products(attention, QKV, fused.qkv, x.view(-1, T, x.shape[-1]))  # (B, T, H D), (B, T, KV D) twice
    keys: Any
    values: Any
    if cache is None:
        keys, values = (x.new_empty(len(x), x.shape[-1] // D, T, D) for x in (k, v))
        q = ops.rotate(q, k, v, *inputs.angles, None, keys, values)  # (B, T, H, D)
    else:  # the kernel writes to the cache, in 8 bits if it has scales
        buffers = cache.buffers if len(cache.buffers) == 4 else (*cache.buffers, None, None)
        q = ops.rotate(q, k, v, *inputs.angles, inputs.positions, *buffers, cache.key_offset)
        keys, values, *scales = (buffer[:, :, : cache.visible] for buffer in cache.buffers)
        if scales:
            keys, values = QuantizedKV(keys, scales[0]), QuantizedKV(values, scales[1])
    y = kernel_attention(q.transpose(1, 2), keys, values, inputs.mask)  # (B, H, T, D)
    y = attention.wo(y.transpose(1, 2).reshape(len(x), -1))  # (B T, C)
    x = ops.add_norm(h, y, fused.block.ffn_norm.weight, inputs.eps)
    gate, up = products(ffn, GATE_UP, fused.gate_up, x)  # (B T, F)
    y = ffn.w_down(ops.swiglu(gate, up))
    return y


def products(parent: nn.Module, names: Sequence[str], joined: TileLinear | None, x: Tensor) -> Sequence[Tensor]:
    """x times the weights of several layers."""
    layers: list[Any] = [parent._modules[name] for name in names]
    if joined is None:
        return [layer(x) for layer in layers]
    return joined(x).split([layer.out_features for layer in layers], -1)


def join_layers(parent: nn.Module, names: Sequence[str]) -> TileLinear | None:
    """One layer whose outputs are those of several, concatenated; they become views of it. None if they differ."""
    layers: list[TileLinear] = [layer for name in names if isinstance(layer := parent._modules[name], TileLinear)]
    kinds = {layer.format for layer in layers}
    if len(layers) < len(names) or len(kinds) > 1 or any(layer.out_features % TILE for layer in layers):
        return None
    parts = [layer.tiles for layer in layers]
    tiles = empty_in_large_pages(sum(map(len, parts)), parts[0].shape[1])
    torch.cat(parts, out=tiles)
    for layer, part in zip(layers, tiles.split([len(part) for part in parts]), strict=True):
        layer.tiles = part
    sizes, bias = [layer.out_features for layer in layers], None
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if biases:  # a model has them in all of these layers, or in none
        bias = torch.cat(biases)
        for layer, part in zip(layers, bias.split(sizes), strict=True):
            layer.bias = part
    return TileLinear(tiles, (sum(sizes), layers[0].in_features), kinds.pop(), bias)


def unrotated(freqs_cis: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """cos and sin that rotate nothing, bit for bit: for layers without RoPE, in code that rotates every layer."""
    cos, sin = freqs_cis
    return torch.ones_like(cos), torch.zeros_like(sin)


def linears(layers: nn.Module) -> list[nn.Module]:
    """The linear layers in a module."""
    return [module for module in layers.modules() if hasattr(module, "out_features")]


def supports(model: Transformer) -> bool:
    """Whether the kernels run a model: they know its layers, dtype and form of RoPE."""
    if model.rope.form not in ("complex", "real") or model.norm.weight.dtype == torch.float16:
        return False
    return all(isinstance(layer, TileLinear | FewRowsLinear) for layer in linears(model.layers)) and kernels.ready()
