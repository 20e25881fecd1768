"""One decoding step of a layer, compiled once for a CUDA device and launched by CUDA graphs.

Inductor compiles the block when it is first called, once for all layers. A CUDA graph is recorded for each layer and
each cache, since it contains the addresses of weights, keys and values; so answers of similar length use one cache.
Prompts run as in model.py: their time goes into matrix products, which compiling does not make faster.

No test has run this file on a GPU.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..cache import KVCache
from ..errors import UsageError
from ..model import Attention, Cache, FeedForward, Runner, Transformer, TransformerBlock
from ..rope import FreqsCis
from .cpu_runner import has_gradients
from .watch import ModelWatch


class GraphRunner(Runner):
    """Runs one new token of a fixed cache as one compiled step for each layer, and everything else as `Runner`.

    Raises UsageError if compiled code would skip a module of the model.
    """

    def __init__(self, model: Transformer):
        for name, module in model.layers[0].named_modules():
            if list(module.children()) and not isinstance(module, TransformerBlock | Attention | FeedForward):
                raise UsageError(f"{name} is wrapped in a {type(module).__name__}, which compiled code would not call")
        if model.rope.form == "complex":
            raise UsageError("compiled code runs the real form of RoPE; load the model with rope='real'")
        self.watch = ModelWatch(model.layers, "the compiled step")
        self.step: Any = torch.compile(TransformerBlock.forward, mode="reduce-overhead")

    def layers(
        self, model: Transformer, h: Tensor, freqs_cis: FreqsCis, mask: Tensor | None, positions: Tensor, cache: Cache
    ) -> Tensor:
        one = h.shape[1] == 1 and mask is not None and cache is not None and cache.layers[0].visible is None
        if cache is None or not one or not self.watch.unchanged(model.layers) or has_gradients(model):
            return super().layers(model, h, freqs_cis, mask, positions, cache)
        torch.compiler.cudagraph_mark_step_begin()  # graphs may overwrite what they returned for the last token
        for block, layer in zip(model.layers, cache.layers, strict=True):
            for buffer in layer.buffers:
                torch._dynamo.mark_static_address(buffer)  # otherwise, each graph would copy the cache
            h = self.step(block, h, freqs_cis, mask, positions, layer)  # (B, 1, C)
        return h.clone()  # the next step overwrites the memory of the graphs


class FixedCaches:
    """Makes fixed caches for `Transformer.make_cache`, and reuses their memory: see the top of this file."""

    def __init__(self) -> None:
        self.made: dict[object, tuple[KVCache, weakref.ref[KVCache]]] = {}  # for each key: a cache, and its last view

    def __call__(self, *sizes: int, batch: int = 1, **options: Any) -> KVCache:
        """A view of an empty cache for sizes[-1] tokens. While an earlier view is in use, the cache is a new one."""
        if options.get("fixed") is False:  # the cache of a batch, which grows with its answers
            return KVCache(*sizes, batch=batch, **options)
        key = *sizes[:-1], batch, options.get("dtype"), options.get("kind")
        room = 1 << (sizes[-1] - 1).bit_length()  # a power of two, so that most answers fit into the same cache
        sizes = *sizes[:-1], room
        whole, last = self.made.get(key, (None, lambda: None))
        if whole is None or whole.max_len < room or last() is not None:
            whole = KVCache(*sizes, batch=batch, **{**options, "fixed": True})
        for row in range(batch):
            whole.clear_row(row)  # NaN must not stay in a masked slot
        view = whole.rows(0, batch)
        self.made[key] = whole, weakref.ref(view)
        return view
