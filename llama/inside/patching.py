"""Activation patching: which part of the residual stream carries the answer (arXiv:2202.05262, arXiv:2404.15255).

Two texts of equally many tokens have different answers. The residual stream of the source, before one layer at one
token, is put into the model's run on the target. The number in the grid is the effect on the difference of the two
answers' logits: 0 is the difference after the target, 1 the difference after the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import NumericalError, UsageError
from ..model import Transformer
from ..text import Llama
from ..tokenizer import Tokenizer
from .hooks import Place, activations, patch, transformer

LEGEND = ". = -5 to 5 %, 1 to 9 = tenths, # = 95 % or more, - = below -5 %"
ROWS = 16  # positions that one pass patches, each in its own row of a batch


@dataclass(frozen=True)
class Grid:
    """The result of `patching_grid` for T tokens and L layers that ran.

    source, target  ids (T,) each
    answers         the most probable id after the source, and after the target
    differences     logit of the first answer minus logit of the second, after the source and after the target
    layers          numbers of the layers
    restored        (L, T) float64: row l for the residual stream before layer layers[l]
    """

    source: list[int]
    target: list[int]
    answers: tuple[int, int]
    differences: tuple[float, float]
    layers: list[int]
    restored: Tensor


@torch.inference_mode()
def patching_grid(model: Transformer | Llama, source: Sequence[int], target: Sequence[int]) -> Grid:
    """Put the residual stream of the source into the run on the target, at each layer and token.

    restored = (d - d_target) / (d_source - d_target), for the difference d of the answers' logits after the last token.
    Raises UsageError if the texts have no tokens, not equally many, or the same answer, NumericalError if a logit is
    not finite.
    """
    model = transformer(model)
    if not target or len(source) != len(target):
        raise UsageError(
            f"patching compares texts token by token: expected equally many tokens, got {len(source)} and"
            f" {len(target)}; reword one of the texts"
        )
    device = model.tok_embeddings.weight.device
    runs, logits = [], []
    for ids in (source, target):
        with activations(model, "resid_pre.*") as seen:
            logits.append(_last_logits(model, torch.tensor([ids], device=device))[0])  # (V,)
        runs.append(seen)
    sites = list(seen)
    if not all(bool(torch.isfinite(row).all()) for row in logits):
        raise NumericalError("the logits of these texts are not finite; try dtype='float32' (--dtype float32)")
    first, second = (int(row.argmax()) for row in logits)
    if first == second:
        raise UsageError(
            f"both texts have the same most probable next token, id {first}, so patching has nothing to restore;"
            " choose texts with different answers"
        )
    ours, theirs = (float(row[first] - row[second]) for row in logits)
    tokens = torch.tensor([target], device=device).expand(ROWS, -1)  # (ROWS, T)
    restored = torch.zeros(len(sites), len(target), dtype=torch.float64)
    for row, site in enumerate(sites):
        put, old = (run[site][0] for run in runs)  # (T, C) each
        differ = (put != old).any(-1).nonzero().flatten().tolist()  # elsewhere, patching changes nothing
        for start in range(0, len(differ), ROWS):
            at = differ[start : start + ROWS]

            def replaced(h: Tensor, place: Place, at: list[int] = at, put: Tensor = put) -> Tensor:  # h (rows, T, C)
                rows = torch.arange(len(at), device=h.device)
                return h.index_put((rows, torch.tensor(at, device=h.device)), put[at])

            with patch(model, {site: replaced}):
                patched = _last_logits(model, tokens[: len(at)])  # (rows, V)
            found = (patched[:, first] - patched[:, second]).double().cpu()  # (rows,)
            restored[row, at] = (found - theirs) / (ours - theirs)
    layers = [int(site.split(".")[1]) for site in sites]
    return Grid(list(source), list(target), (first, second), (ours, theirs), layers, restored)


def _last_logits(model: Transformer, tokens: Tensor) -> Tensor:
    """Logits after the last token: (B, T) -> (B, V) float32."""
    found: Tensor = model.output(model.hidden(tokens)[:, -1])
    return found.float()


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
