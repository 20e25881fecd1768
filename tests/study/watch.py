"""Record one forward pass of the library's model: what each layer rotates, caches and attends to."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor, nn

from llama.cache import KVCache, LayerCache
from llama.model import Transformer
from llama.rope import Rope


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

    def rotated(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        q, k, freqs_cis = inputs
        seen.before.append((q, k))
        seen.rows.append((freqs_cis,) if isinstance(freqs_cis, Tensor) else freqs_cis)
        seen.steps.append("turn")

    def attended(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        for record, tensor in zip((seen.q, seen.k, seen.v), inputs, strict=False):
            record.append(tensor.clone())
        seen.steps.append("attend")

    def looked_up(rope: Rope, positions: Tensor, end: int) -> Any:
        seen.lookups.append((positions, end))
        seen.steps.append("look up")
        return freqs_cis(rope, positions, end)

    def cached(layer: LayerCache, *arguments: Any) -> Any:
        seen.steps.append("cache")
        return update(layer, *arguments)

    freqs_cis, update = Rope.freqs_cis, LayerCache.update
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Rope, "freqs_cis", looked_up))
        stack.enter_context(mock.patch.object(LayerCache, "update", cached))
        for block in model.layers:
            stack.callback(block.attention.apply_rotary_emb.register_forward_pre_hook(rotated).remove)
            stack.callback(block.attention.attend.register_forward_pre_hook(attended).remove)
        seen.logits = model(tokens, positions, cache)
    return seen
