"""The decoder's layers on a CPU in one operation: a Runner on the C++ kernels (cpp/layers.h).

One call runs all layers, for one token, a prompt or a batch, and rounds its results where model.py does. It needs
packed weights or weights in 16 bits, and takes them from the model's own modules. If layers or weights were replaced,
if the model has hooks or computes gradients, it runs as model.py is written.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import KVCache
from ..errors import UsageError
from ..model import RMSNorm, Runner, Transformer
from ..rope import FreqsCis
from . import kernels
from .linears import FEW_ROWS, FewRowsLinear, TileLinear
from .watch import ModelWatch

LINEARS = ("attention.wq", "attention.wk", "attention.wv", "attention.wo",
           "feed_forward.w_gate", "feed_forward.w_up", "feed_forward.w_down")  # fmt: skip
ops: Any = torch.ops.clearllama


class KernelRunner(Runner):
    """Runs the layers of a model on the C++ kernels. The results are those of `Runner`, except for the order of sums.

    complete  whether the kernels run complete layers. If a linear layer is wrapped (engine/parallel.py), or for an
              unusual head_dim, each layer runs as a module, whose linear layers use the kernels
    """

    def __init__(self, model: Transformer):
        blocks = model.layers
        layers = [block.get_submodule(name) for block in blocks for name in LINEARS]
        D, none = model.config.head_dim, torch.empty(0)
        self.complete = D % 16 == 0 and D <= 256 and all(isinstance(x, TileLinear | FewRowsLinear) for x in layers)
        layers = layers if self.complete else []
        packed = all(isinstance(layer, TileLinear) for layer in linears(model.layers))
        self.any_rows = packed or kernels.has_tiles() or kernels.widen()
        self.weights = [x.tiles if isinstance(x, TileLinear) else x.weight for x in layers]
        kinds = [x.format if isinstance(x, TileLinear) else (16, 0, 0, 0, 0) for x in layers]
        numbers = [[*kind, x.out_features] for kind, x in zip(kinds, layers, strict=True)]
        self.formats = torch.tensor(numbers).view(-1, len(LINEARS), 6)  # (L, 7, 6)
        biased = any(x.bias is not None for x in layers)
        self.biases = [none if x.bias is None else x.bias for x in layers] if biased else []
        self.norms = [norm.weight for block in blocks for norm in (block.attention_norm, block.ffn_norm)]
        heads = [norm for block in blocks for norm in (block.attention.q_norm, block.attention.k_norm)]
        self.head_norms = [norm.weight for norm in heads if isinstance(norm, RMSNorm)]
        self.rotates = [int(block.attention.apply_rotary_emb.rotates) for block in blocks]
        self.eps, self.dtype = model.config.norm_eps, model.norm.weight.dtype
        self.watch = ModelWatch(model.layers)

    def layers(
        self,
        model: Transformer,
        h: Tensor,
        freqs_cis: FreqsCis,
        mask: Tensor | None,
        positions: Tensor,
        cache: KVCache | None,
    ) -> Tensor:
        tokens = h.shape[0] * h.shape[1]
        if not (self.complete and self.unchanged(model) and self.fits(tokens)) or has_gradients(model):
            return super().layers(model, h, freqs_cis, mask, positions, cache)
        cos, sin = torch.view_as_real(freqs_cis).unbind(-1) if isinstance(freqs_cis, Tensor) else freqs_cis
        keys, values, scales, offsets, end = self.slots(model, h, cache)
        if cache is None:
            positions = torch.arange(h.shape[1])  # (T,): slots of a cache for this pass only
        x = h.flatten(0, 1).clone(memory_format=torch.contiguous_format)  # (B T, C); changed in place
        mask = None if mask is None else mask.contiguous()
        weights = self.weights, self.formats, self.biases, self.norms, self.head_norms
        at = cos, sin, positions.contiguous(), mask
        with kernels.own_threads():
            ops.layers(x, *weights, self.eps, self.rotates, *at, keys, values, scales, offsets, end)
        return x.view(h.shape)

    def slots(self, model: Transformer, h: Tensor, cache: KVCache | None) -> tuple[Any, ...]:
        """For each layer its keys, values, scales and offsets, and for all layers the number of slots they see."""
        if cache is None:  # every layer uses the same memory
            B, T, _ = h.shape
            _, KV, D, dtype = model.cache_sizes
            keys, values = torch.empty(2, B, KV, T, D, dtype=dtype)
            return [keys] * len(model.layers), [values] * len(model.layers), [], [], T
        buffers = [layer.buffers for layer in cache.layers]
        offsets = [layer.key_offset for layer in cache.layers]
        none = torch.empty(0)
        known = [none if x is None else x for x in offsets] if any(x is not None for x in offsets) else []
        scales = [scale for both in buffers for scale in both[2:]]
        return [both[0] for both in buffers], [both[1] for both in buffers], scales, known, cache.visible

    def fits(self, tokens: int) -> bool:
        """Whether the kernels run this many tokens; otherwise PyTorch multiplies many rows by a bfloat16 weight."""
        return tokens > 0 and (tokens <= FEW_ROWS or self.any_rows)

    def threads(self, tokens: int) -> contextlib.AbstractContextManager[None]:
        """Alternating between PyTorch's threads and the kernels' is slow, so the kernels get all cores for the pass."""
        return kernels.own_threads() if self.fits(tokens) else contextlib.nullcontext()

    def unchanged(self, model: Transformer) -> bool:
        """Whether the model is still the one that this runner was made for, without hooks.

        Raises UsageError if a model with packed weights was cast, since packed weights can't be cast.
        """
        if model.norm.weight.dtype == self.dtype:
            return self.watch.unchanged(model.layers)
        if any(isinstance(layer, TileLinear) for layer in model.modules()):
            raise UsageError(
                f"the model was loaded in {self.dtype} and can't be cast to {model.norm.weight.dtype}:"
                " load it in that dtype (dtype=...), or with llama.load_model"
            )
        return False


def has_gradients(model: Transformer) -> bool:
    """Whether PyTorch records operations on a weight. The kernels have no derivatives."""
    return torch.is_grad_enabled() and any(weight.requires_grad for weight in model.parameters())


def linears(layers: nn.Module) -> list[nn.Module]:
    """The linear layers in a module."""
    return [module for module in layers.modules() if hasattr(module, "out_features")]


def supports(model: Transformer) -> bool:
    """Whether the kernels run a model: they know its linear layers, dtype and form of RoPE."""
    if model.rope.form not in ("complex", "real") or model.norm.weight.dtype == torch.float16:
        return False
    return all(isinstance(layer, TileLinear | FewRowsLinear) for layer in linears(model.layers)) and kernels.ready()
