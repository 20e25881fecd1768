"""Activation patching: which part of the residual stream carries the answer (arXiv:2202.05262, arXiv:2404.15255).

Two texts, source and target, have the same number of tokens and different answers. The residual stream of the source,
before one layer at one token, is put into the model's run on the target. The grid shows how far this moves the
difference of the two answers' logits: 0 means as after the target, 1 means as after the source.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..attention import causal_mask
from ..errors import NumericalError, UsageError
from ..model import Transformer
from ..text import Llama
from ..tokenizer import Tokenizer
from .exact import float32_logits
from .hooks import transformer

LEGEND = ". = -5 to 5 %, 1 to 9 = tenths, # = 95 % or more, - = below -5 %"
Result = TypeVar("Result")
ROWS = 16  # positions that are patched at once, each in its own row of a batch


@dataclass(frozen=True)
class Grid:
    """The result of `patching_grid` for T tokens and L layers that ran.

    source, target  ids (T,) each
    answers         (the most probable id after the source, the most probable id after the target)
    differences     logit of the first answer minus logit of the second: (after the source, after the target)
    layers          numbers of the layers
    restored        (L, T) float64: row l for the residual stream before layer layers[l]
    """

    source: list[int]
    target: list[int]
    answers: tuple[int, int]
    differences: tuple[float, float]
    layers: list[int]
    restored: Tensor


def patching_grid(model: Transformer | Llama, source: Sequence[int] | Tensor, target: Sequence[int] | Tensor) -> Grid:
    """Put the residual stream of the source into the run on the target, at each layer and token: ids (T,) or (1, T).

    restored = (d - d_target) / (d_source - d_target), where d is the difference of the answers' logits after the last
    token. Raises UsageError if the texts have no tokens, different lengths or the same answer, and NumericalError if a
    logit is not finite.
    """
    return result(patching_steps(model, one_text(source), one_text(target)))


def result(steps: Generator[tuple[int, int], None, Result]) -> Result:
    """Do all steps, and return what the generator returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def one_text(ids: Sequence[int] | Tensor) -> list[int]:
    """The ids of one text, given as a sequence or a tensor (T,) or (1, T). Raises UsageError for another shape."""
    found = torch.as_tensor(ids)
    if found.shape[:-1].numel() != 1:
        raise UsageError(f"expected the ids of one text, (T,) or (1, T), got {tuple(found.shape)}")
    return found.flatten().tolist()  # (T,)


@torch.inference_mode()
def patching_steps(
    model: Transformer | Llama,
    source: Sequence[int],
    target: Sequence[int],
    answers: tuple[int | None, int | None] = (None, None),
) -> Generator[tuple[int, int], None, Grid]:
    """Compute `patching_grid` in steps of one layer and at most ROWS rows. Yields (steps done, all steps).

    answers  ids in place of the most probable ones, (after the source, after the target)

    Layers before a patched layer are not computed again.
    """
    model = transformer(model)
    if not target or len(source) != len(target):
        raise UsageError(
            f"patching compares texts token by token: expected equally many tokens, got {len(source)} and"
            f" {len(target)}; reword one of the texts"
        )
    S, L = len(target), len(model.layers)
    start = next((t for t in range(S) if source[t] != target[t]), S - 1)  # the first token that differs
    earlier, rest = [Earlier() if start else None for _ in range(L)], range(start, S)

    both = torch.tensor([source, target], device=model.tok_embeddings.weight.device)  # (2, T)
    h, states = model.tok_embeddings(both[:1, :start]), [model.tok_embeddings(both[:, start:])]
    for layer in range(L):
        h = run(model, layer, h, range(start), S, earlier[layer]) if start else h  # (1, start, C)
        states.append(run(model, layer, states[-1], rest, S, earlier[layer]))  # (2, T, C) before each
    logits = last_logits(model, states[-1])  # (2, V)
    if not bool(logits.isfinite().all()):
        raise NumericalError("the logits of these texts are not finite; try dtype='float32' (--dtype float32)")
    first, second = (int(row.argmax()) if id is None else id for row, id in zip(logits, answers, strict=True))
    if first == second:
        raise UsageError(
            f"both texts have the same most probable next token, id {first}, so patching has nothing to restore;"
            " choose texts with different answers"
        )
    ours, theirs = (logits[:, first] - logits[:, second]).tolist()
    if ours == theirs:
        raise UsageError("the difference of the two logits is the same after both texts, so nothing can move it")
    # Where the states are equal, patching changes nothing
    differ = [(h[0] != h[1]).any(-1).nonzero().flatten() for h in states[:-1]]
    parts = [(layer, at) for layer, found in enumerate(differ) for at in found.split(ROWS)]
    done, count = 0, sum(L - layer for layer, _ in parts)
    restored = torch.zeros(L, S, dtype=torch.float64)
    for layer, at in parts:
        x = states[layer][1].repeat(len(at), 1, 1)  # (rows, T, C)
        x[torch.arange(len(at)), at] = states[layer][0, at]
        for later in range(layer, L):
            x = run(model, later, x, rest, S, earlier[later])  # (rows, T, C)
            done += 1
            yield done, count
        found = last_logits(model, x)  # (rows, V)
        difference = (found[:, first] - found[:, second]).double().cpu()  # (rows,)
        restored[layer, start + at.cpu()] = (difference - theirs) / (ours - theirs)
    numbers = [block.attention.layer for block in model.layers]
    return Grid(list(source), list(target), (first, second), (ours, theirs), numbers, restored)


def run(model: Transformer, layer: int, h: Tensor, tokens: range, length: int, earlier: Earlier | None) -> Tensor:
    """Run one block on some tokens of texts: (B, T, C) -> (B, T, C). `earlier` has the keys of earlier tokens."""
    block = model.layers[layer]
    device = block.attention_norm.weight.device
    keys = torch.arange(tokens.stop, device=device)  # (S,)
    positions = keys[tokens.start :]  # (T,)
    freqs_cis, mask = model.rope.freqs_cis(positions, length), causal_mask(positions, keys)  # (T, D/2), (T, S)
    return block(h.to(device), freqs_cis, mask, positions, earlier)


def last_logits(model: Transformer, h: Tensor) -> Tensor:
    """The logits after the last token, in float32: (B, T, C) -> (B, V)."""
    return float32_logits(model, model.norm(h[:, -1].to(model.norm.weight.device)))


class Earlier:
    """A layer's cache for rows with the same earlier tokens. Only the first pass adds keys and values.

    kept  keys and values (1, KV, S - T, D) of the earlier tokens, in place of a first pass
    """

    def __init__(self, kept: Sequence[Tensor] = ()):
        self.kept = kept

    def update(self, k: Tensor, v: Tensor, positions: Tensor) -> Sequence[Tensor]:
        """(B, KV, T, D) twice -> (B, KV, S, D) twice."""
        if not self.kept:
            self.kept = k, v
            return self.kept
        return [torch.cat((old.expand(len(x), -1, -1, -1), x), 2) for old, x in zip(self.kept, (k, v), strict=True)]


def facts(grid: Grid, tokenizer: Tokenizer) -> dict[str, Any]:
    """The grid for JSON, with the texts of the ids in place of the ids; restored (L, T)."""
    named = {name: list(map(tokenizer.shown, getattr(grid, name))) for name in ("source", "target", "answers")}
    restored = [[round(value, 6) for value in row] for row in grid.restored.tolist()]
    return {**named, "differences": list(grid.differences), "layers": grid.layers, "restored": restored}


def cell(value: float) -> str:
    """A value of the grid as one character, see LEGEND."""
    if value < -0.05:
        return "-"
    return "." if value < 0.05 else "#" if value >= 0.95 else str(int(10 * value + 0.5))
