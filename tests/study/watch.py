"""Record a forward pass of the library's model: what each layer rotates, caches and attends to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from llama.cache import KVCache
from llama.model import Transformer
from llama.rope import FreqsCis


@dataclass
class Pass:
    """The record of a forward pass. Each list has one entry per layer; `steps` is the order of all of them.

    before     the inputs of the rotation, q (B, T, H, D) and k (B, T, KV, D)
    freqs_cis  the third input of the rotation
    q, k, v    the inputs of attention, heads first: (B, H, T, D), (B, KV, S, D) twice
    lookups    (positions, end) of every call of `Rope.freqs_cis`
    """

    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    freqs_cis: list[FreqsCis] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    lookups: list[tuple[Tensor, int]] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    logits: Tensor = field(default_factory=Tensor)


def watch(model: Transformer, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None) -> Pass:
    """Run the model once and record the pass. Model and cache have no hooks afterwards."""
    seen, rope = Pass(), model.rope
    layers = [] if cache is None else cache.layers
    look_up = rope.freqs_cis

    def lookup(positions: Tensor, end: int) -> FreqsCis:
        seen.lookups.append((positions, end))
        seen.steps.append("look up")
        return look_up(positions, end)

    def rotation(_: nn.Module, inputs: tuple[Tensor, Tensor, FreqsCis]) -> None:
        q, k, freqs_cis = inputs
        seen.before.append((q, k))
        seen.freqs_cis.append(freqs_cis)
        seen.steps.append("rotate")

    def recorded(update: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            seen.steps.append("cache")
            return update(*arguments)

        return wrapped

    def attention(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        for record, tensor in zip((seen.q, seen.k, seen.v), inputs[:3], strict=True):
            record.append(tensor.clone())
        seen.steps.append("attend")

    hooks = [block.attention.apply_rotary_emb.register_forward_pre_hook(rotation) for block in model.layers]
    hooks += [block.attention.attend.register_forward_pre_hook(attention) for block in model.layers]
    try:
        rope.freqs_cis = lookup  # type: ignore[method-assign]
        for layer in layers:
            layer.update = recorded(layer.update)  # type: ignore[method-assign]
        seen.logits = model(tokens, positions, cache)
    finally:
        del rope.freqs_cis
        for layer in layers:
            del layer.update
        for hook in hooks:
            hook.remove()
    return seen
