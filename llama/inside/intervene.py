"""Context managers that change a model temporarily: ablate heads, skip layers, change or remove RoPE.

    with ablated(model, [(3, 5)]), only_layers(model, range(8)):
        logits = model(tokens)

The model is changed in place and restored at the end of the `with` block, also after an exception.
Layers and heads count from 0, as in the code: head 3.5 is head 5 of layer 3.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..errors import UsageError
from ..loader import with_rope
from ..model import Transformer
from ..rope import Rope
from .hooks import Function, Place, marked, patch


@contextlib.contextmanager
def ablated(model: Transformer, heads: Iterable[tuple[int, int]]) -> Iterator[None]:
    """Set the output of each (layer, head) to zero before wo. (layer, n_heads) stands for the output of the MLP.

    `heads` are query heads; the key/value heads that they share are not changed. In `only_layers`, layers keep their
    original numbers. Raises UsageError on a layer that does not run or a head that does not exist.
    """
    heads, by_layer, mlp = set(heads), dict[int, set[int]](), model.config.n_heads
    for layer, head in heads:
        if head != mlp:
            _check_head(layer, head, model.config)
        by_layer.setdefault(layer, set()).add(head)
    running = [block.attention.layer for block in model.layers]
    if missing := sorted(set(by_layer) - set(running)):
        raise UsageError(f"layer {missing[0]} does not run, so its heads can't be ablated; only {_span(running)}")

    def zeroed(z: Tensor, at: Place) -> Tensor:  # (B, T, H, D)
        return z.index_fill(2, torch.tensor(sorted(by_layer[at.layer] - {mlp}), device=z.device), 0)  # type: ignore[index]

    changes: dict[str, Function] = {f"z.{layer}": zeroed for layer, off in by_layer.items() if off - {mlp}}
    changes |= {f"mlp_out.{layer}": lambda x, at: x.zero_() for layer, off in by_layer.items() if mlp in off}
    with patch(model, changes, f"heads {sorted(heads)} ablated"):
        yield


@contextlib.contextmanager
def only_layers(model: Transformer, layers: Sequence[int]) -> Iterator[None]:
    """Run only these blocks, in this order, between the embedding and the last norm.

    Raises UsageError if `layers` is empty, or names a layer that the model does not have.
    """
    everything = model.layers
    if not layers or not all(0 <= layer < len(everything) for layer in layers):
        raise UsageError(f"layers must be one or more of 0 to {len(everything) - 1}, got {list(layers)}")
    model.set_submodule("layers", nn.ModuleList([everything[layer] for layer in layers]))
    try:
        with marked(model, f"layers {list(layers)}"):
            yield
    finally:
        model.set_submodule("layers", everything)


class _ZeroAngles(Rope):
    """A Rope in which every angle is 0. If the scaling has a factor of cos and sin, the factor still applies."""

    def frequencies(self, seq_len: int) -> tuple[Tensor, float]:
        inv_freq, factor = super().frequencies(seq_len)
        return torch.zeros_like(inv_freq), factor


@contextlib.contextmanager
def other_rope(
    model: Transformer,
    theta: float | None = None,
    scaling: Mapping[str, Any] | None = None,
    kind: type[Rope] = Rope,
) -> Iterator[None]:
    """Use another base or scaling of the rotation, as in `llama.load`; None keeps the model's."""
    rope, before = model.rope, model.config
    config = with_rope(before, scaling, theta)
    table = config.rope_theta, config.rope_scaling, config.max_seq_len
    model.rope, model.config = kind(rope.form, config.head_dim, rope.max_seq_len, *table), config
    try:
        yield
    finally:
        model.rope, model.config = rope, before


@contextlib.contextmanager
def without_rope(model: Transformer) -> Iterator[None]:
    """Do not rotate q and k: attention has no positions, and only the causal mask depends on the tokens' order."""
    with other_rope(model, kind=_ZeroAngles), marked(model, "no rope"):
        yield


# ------------------------------------------------------------------------------------------- several changes at once
@dataclass(frozen=True)
class Intervention:
    """Changes that apply together.

    heads    (layer, head) pairs to ablate
    layers   the blocks to run, None for all
    no_rope  do not rotate q and k
    theta, scaling  another base or scaling of the rotation, None for the model's
    """

    heads: tuple[tuple[int, int], ...] = ()
    layers: Sequence[int] | None = None
    no_rope: bool = False
    theta: float | None = None
    scaling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.no_rope and (self.theta is not None or self.scaling is not None):
            raise UsageError(
                "no_rope (--no-rope) removes the rotation: leave theta and scaling (--rope-theta, --rope-scaling) out"
            )

    def descriptions(self) -> list[str]:
        """A description of each change."""
        words = [f"head {layer}.{head} ablated" for layer, head in self.heads]
        if self.layers is not None:
            words.append(f"only {_span(self.layers)}")
        if self.no_rope:
            words.append("nothing is rotated")
        if self.theta is not None:
            words.append(f"rope theta {self.theta:g}")
        if self.scaling is not None:
            parts = {key: value for key, value in self.scaling.items() if not isinstance(value, list)}
            kind = parts.pop("rope_type", parts.pop("type", "default"))
            words.append(", ".join([f"rope scaling {kind}", *(f"{key} {value}" for key, value in parts.items())]))
        return words

    @contextlib.contextmanager
    def on(self, model: Transformer) -> Iterator[None]:
        """Apply all changes to the model."""
        with contextlib.ExitStack() as stack:
            if self.no_rope:
                stack.enter_context(without_rope(model))
            if self.theta is not None or self.scaling is not None:
                stack.enter_context(other_rope(model, self.theta, self.scaling))
            if self.layers is not None:
                stack.enter_context(only_layers(model, self.layers))
            stack.enter_context(ablated(model, self.heads))
            yield


def parse_head(text: str, config: ModelConfig) -> tuple[int, int]:
    """ "3.5" -> (3, 5): layer and head, from 0. Raises UsageError with the valid range."""
    match = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})", text)
    if match is None:
        raise UsageError(
            f"expected a head as LAYER.HEAD, both from 0, for example 3.5; got {text!r:.60}; {_ranges(config)}"
        )
    _check_head(int(match[1]), int(match[2]), config)
    return int(match[1]), int(match[2])


def parse_layers(text: str, config: ModelConfig) -> range:
    """ "0:8" -> range(0, 8); as in a slice, either end may be left out. Raises UsageError with the valid range."""
    match = re.fullmatch(r"([0-9]{0,9}):([0-9]{0,9})", text)
    first, end = (int(match[1] or 0), int(match[2] or config.n_layers)) if match else (0, 0)
    if not first < end <= config.n_layers:
        raise UsageError(
            f"expected layers as FIRST:END, for example 0:8 for layers 0 to 7; got {text!r:.60}; FIRST must be below"
            f" END, and END at most {config.n_layers}"
        )
    return range(first, end)


def _ranges(config: ModelConfig) -> str:
    return f"layers are 0 to {config.n_layers - 1} and heads 0 to {config.n_heads - 1}"


def _check_head(layer: int, head: int, config: ModelConfig) -> None:
    if not (0 <= layer < config.n_layers and 0 <= head < config.n_heads):
        raise UsageError(f"head {layer}.{head} does not exist in this model; {_ranges(config)}")


def _span(layers: Iterable[int]) -> str:
    """ "layer 3 runs", or "layers 0 to 7 run"."""
    numbers = list(layers)
    return f"layer {numbers[0]} runs" if len(numbers) == 1 else f"layers {numbers[0]} to {numbers[-1]} run"
