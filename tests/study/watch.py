"""One forward pass of the library's model, with what each layer turned and attended to written down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from llama.cache import KVCache, LayerCache
from llama.model import Transformer


@dataclass
class Pass:
    """What happened, in order; each list has one entry a layer, and `steps` the order over all of them.

    before   (q (B, T, H, D), k (B, T, KV, D)) as they came from wq and wk
    rows     the table's rows that turned them
    q, k, v  what attention was given, heads first: (B, H, T, D), (B, KV, S, D) twice
    asked    (positions, end) of every look into the table
    """

    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    rows: list[tuple[Tensor, ...]] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    asked: list[tuple[Tensor, int]] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    logits: Tensor = field(default_factory=Tensor)


def watch(model: Transformer, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None) -> Pass:
    """Run the model once and tell what was turned, cached and attended to; the model is left as it was."""
    seen = Pass()
    rope, first = model.rope, model.layers[0].attention
    apply, look, attend = rope.apply, rope.rows, first.attend
    layers = [] if cache is None else cache.layers

    def turning(q: Tensor, k: Tensor, *rows: Tensor) -> Any:
        seen.before.append((q, k))
        seen.rows.append(rows)
        seen.steps.append("turn")
        return apply(q, k, *rows)

    def looking(positions: Tensor, end: int) -> Any:
        seen.asked.append((positions, end))
        seen.steps.append("look up")
        return look(positions, end)

    def caching(layer: LayerCache) -> Any:
        update = layer.update

        def wrapped(*arguments: Any) -> Any:
            seen.steps.append("cache")
            return update(*arguments)

        return wrapped

    def attending(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        for kept, tensor in ((seen.q, q), (seen.k, k), (seen.v, v)):
            kept.append(tensor.clone())
        seen.steps.append("attend")
        return attend(q, k, v, mask)

    try:
        rope.apply, rope.rows = turning, looking
        for block in model.layers:
            block.attention.attend = attending
        for layer in layers:
            layer.update = caching(layer)  # type: ignore[method-assign]
        seen.logits = model(tokens, positions, cache)
    finally:
        rope.apply = apply
        del rope.rows
        for block in model.layers:
            block.attention.attend = attend
        for layer in layers:
            del layer.update
    return seen
