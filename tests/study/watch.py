"""Record one forward pass of the library's model: what each layer rotates, caches and attends to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from llama.cache import KVCache, LayerCache
from llama.model import Transformer


@dataclass
class Pass:
    """The record of a pass; each list has one entry per layer, and `steps` is the order of all of them.

    before   (q (B, T, H, D), k (B, T, KV, D)), the outputs of wq and wk
    rows     the rows of the table that rotate them
    q, k, v  the inputs of attention, heads first: (B, H, T, D), (B, KV, S, D) twice
    lookups  (positions, end) of every lookup in the table
    """

    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    rows: list[tuple[Tensor, ...]] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    lookups: list[tuple[Tensor, int]] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    logits: Tensor = field(default_factory=Tensor)


def watch(model: Transformer, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None) -> Pass:
    """Run the model once and record it. The model is unchanged afterwards."""
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
        seen.lookups.append((positions, end))
        seen.steps.append("look up")
        return look(positions, end)

    def caching(layer: LayerCache) -> Any:
        update = layer.update

        def wrapped(*arguments: Any) -> Any:
            seen.steps.append("cache")
            return update(*arguments)

        return wrapped

    def attending(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        for record, tensor in ((seen.q, q), (seen.k, k), (seen.v, v)):
            record.append(tensor.clone())
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
