"""Take a part out of a model, or turn it otherwise, for as long as a `with` block lasts.

    with ablated(model, [(3, 5)]), only_layers(model, range(8)):
        logits = model(tokens)

No second model is made: the very modules that run are changed, and put back on the way out, also after an exception.
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
from ..model import Transformer
from ..rope import Rope
from ..rope_scaling import with_rope


@contextlib.contextmanager
def ablated(model: Transformer, heads: Iterable[tuple[int, int]]) -> Iterator[None]:
    """The output of each (layer, head) is zero where wo reads it; all other heads run as ever.

    heads are query heads; the key/value head that one shares with others is left alone. Layers keep their own numbers
    under `only_layers`. Raises UsageError on a layer that does not run or a head that does not exist.
    """
    by_layer: dict[int, set[int]] = {}
    for layer, head in heads:
        _check_head(layer, head, model.config)
        by_layer.setdefault(layer, set()).add(head)
    blocks: list[Any] = list(model.layers)
    running = {block.attention.layer: block.attention for block in blocks}
    if missing := sorted(set(by_layer) - set(running)):
        raise UsageError(f"layer {missing[0]} does not run, so none of its heads can be ablated; only {_span(running)}")
    with contextlib.ExitStack() as stack:
        for layer, numbers in by_layer.items():
            silence = _silence(sorted(numbers), model.config.head_dim)
            stack.callback(running[layer].wo.register_forward_pre_hook(silence).remove)
        yield


def _silence(heads: Sequence[int], head_dim: int) -> Any:
    def hook(wo: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        by_head = inputs[0].unflatten(-1, (-1, head_dim)).clone()  # (B, T, H, D)
        by_head[..., heads, :] = 0
        return (by_head.flatten(-2),)  # (B, T, H * D)

    return hook


@contextlib.contextmanager
def only_layers(model: Transformer, layers: Sequence[int]) -> Iterator[None]:
    """Only these blocks run, in this order; the embedding, the last norm and the output run as ever.

    Raises UsageError when there are none, or one that the model lacks.
    """
    everything = model.layers
    if not layers or not all(0 <= layer < len(everything) for layer in layers):
        raise UsageError(f"layers must be among 0 to {len(everything) - 1}, at least one; got {list(layers)}")
    model.set_submodule("layers", nn.ModuleList([everything[layer] for layer in layers]))
    try:
        yield
    finally:
        model.set_submodule("layers", everything)


class _Still(Rope):
    """A Rope whose pairs don't turn: every angle is 0. A scaling's factor for cos and sin is kept."""

    def frequencies(self, seq_len: int) -> tuple[Tensor, float]:
        inv_freq, factor = super().frequencies(seq_len)
        return torch.zeros_like(inv_freq), factor


@contextlib.contextmanager
def without_rope(model: Transformer) -> Iterator[None]:
    """Nothing is rotated, so attention does not know where a token stands; the causal mask alone tells order."""
    with _turned_by(model, model.config, _Still):
        yield


@contextlib.contextmanager
def other_rope(
    model: Transformer, theta: float | None = None, scaling: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Another base or scaling of the rotation, as `llama.load` takes them; None leaves that part as it is."""
    with _turned_by(model, with_rope(model.config, scaling, theta), Rope):
        yield


@contextlib.contextmanager
def _turned_by(model: Transformer, config: ModelConfig, kind: type[Rope]) -> Iterator[None]:
    """Replace the model's table of freqs_cis, and the config that describes it."""
    before = model.rope, model.config
    rope = kind(
        before[0].form,
        config.head_dim,
        before[0].max_seq_len,
        config.rope_theta,
        config.rope_scaling,
        config.max_seq_len,
    )
    try:
        model.rope, model.config = rope, config
        yield
    finally:
        model.rope, model.config = before


# ------------------------------------------------------------------------------------------- asked for together
@dataclass(frozen=True)
class Intervention:
    """What to change, all at once.

    heads    (layer, head) pairs to ablate
    layers   the blocks to run, None for all
    no_rope  rotate nothing
    theta, scaling  another base or scaling of the rotation, None for the model's own
    """

    heads: tuple[tuple[int, int], ...] = ()
    layers: Sequence[int] | None = None
    no_rope: bool = False
    theta: float | None = None
    scaling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.no_rope and (self.theta is not None or self.scaling is not None):
            raise UsageError("--no-rope rotates nothing, so another theta or scaling of the rotation has no effect")

    def __bool__(self) -> bool:
        return bool(self.told())

    def told(self) -> list[str]:
        """Each change in words."""
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
        """The model under all of the changes."""
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
    """ "3.5" -> (3, 5): layer and head, from 0. Raises UsageError naming the range."""
    try:
        layer, head = head_numbers(text)
    except UsageError as error:
        raise UsageError(f"{error}; {_ranges(config)}") from None
    _check_head(layer, head, config)
    return layer, head


def head_numbers(text: str) -> tuple[int, int]:
    """ "3.5" -> (3, 5), of whatever model. Raises UsageError on any other form."""
    match = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})", text)
    if match is None:
        raise UsageError(f"a head is written LAYER.HEAD, both from 0, as 3.5; got {text!r:.60}")
    return int(match[1]), int(match[2])


def parse_layers(text: str, config: ModelConfig) -> range:
    """ "0:8" -> range(0, 8), as Python slices: either end may be left out. Raises UsageError naming the range."""
    try:
        first, last = layer_numbers(text)
    except UsageError as error:
        raise UsageError(f"{error}; {_ends(config)}") from None
    end = config.n_layers if last is None else last
    if end > config.n_layers:
        raise UsageError(f"layers {text} reach beyond the model; {_ends(config)}")
    if first >= end:
        raise UsageError(f"layers {text} select none; {_ends(config)}, and FIRST must be below END")
    return range(first, end)


def layer_numbers(text: str) -> tuple[int, int | None]:
    """ "2:8" -> (2, 8), ":8" -> (0, 8), "2:" -> (2, None), of whatever model. UsageError on any other form."""
    match = re.fullmatch(r"([0-9]{0,9}):([0-9]{0,9})", text)
    if match is None:
        raise UsageError(f"layers are written FIRST:END, as 0:8 for layers 0 to 7; got {text!r:.60}")
    return int(match[1] or 0), int(match[2]) if match[2] else None


def _ends(config: ModelConfig) -> str:
    return f"FIRST and END lie between 0 and {config.n_layers}"


def _ranges(config: ModelConfig) -> str:
    return f"layers are 0 to {config.n_layers - 1} and heads 0 to {config.n_heads - 1}"


def _check_head(layer: int, head: int, config: ModelConfig) -> None:
    if not (0 <= layer < config.n_layers and 0 <= head < config.n_heads):
        raise UsageError(f"head {layer}.{head} does not exist in this model; {_ranges(config)}")


def _span(layers: Iterable[int]) -> str:
    """ "layer 3 runs", or "layers 0 to 7 run"."""
    numbers = list(layers)
    return f"layer {numbers[0]} runs" if len(numbers) == 1 else f"layers {numbers[0]} to {numbers[-1]} run"
