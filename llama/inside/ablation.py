"""What the answer loses without each head and each MLP layer, and what each head looks at.

The direct effect of a head (trace.py) leaves out how later layers use the head's output, and how other heads compensate
for its absence. Ablation includes both: it replaces the head's output by zero, or by its mean, and runs all later
layers again.

Letters: B rows, T tokens, L layers, H heads, D head_dim, C model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..cache import KVCache
from ..errors import NumericalError, UsageError
from ..model import Transformer
from ..text import Llama
from .hooks import Place, patch, transformer
from .patching import Earlier, last_logits, one_text, result, run
from .trace import direct_effects, readout, recording, sink

STEP = 256  # limit of the work in a step: as much as all layers on so many tokens, which is a chunk of a prompt
ROWS = 2**12  # limit of rows times keys in one pass; above it, allocating memory takes longer than computing


@dataclass(frozen=True)
class AblationGrid:
    """Effects on the difference of two logits after the last token of a text. Column H is the MLP layer.

    difference  logit of `token` minus logit of `against`
    direct      (L, H + 1) what each part adds to the difference directly, without later layers
    total       (L, H + 1) what the difference loses if the part is ablated; positive if the part supports `token`
    previous    (L, H) mean weight on the previous token
    first       (L, H) mean weight on the first token
    induction   (L, H) mean weight on the tokens that followed the same token earlier; None if no token occurs twice
    """

    difference: float
    direct: Tensor
    total: Tensor
    previous: Tensor
    first: Tensor
    induction: Tensor | None


def ablation_grid(
    model: Transformer | Llama,
    ids: Sequence[int] | Tensor,
    token: int,
    against: int,
    mean: bool = False,
    position: int | None = None,
) -> AblationGrid:
    """Ablate every head and every MLP layer, one at a time, and compare the logits of `token` and `against`.

    ids       of one text, (T,) or (1, T)
    mean      replace an output by its mean over the text, not by zero
    position  ablate at this position only (default: at all positions)

    Raises UsageError on a text of fewer than two tokens, NumericalError if a logit is not finite.
    """
    return result(ablation_steps(model, one_text(ids), token, against, mean, position))


@torch.inference_mode()
def ablation_steps(
    model: Transformer | Llama,
    ids: Sequence[int],
    token: int,
    against: int,
    mean: bool = False,
    position: int | None = None,
) -> Generator[tuple[int, int], None, AblationGrid]:
    """Compute `ablation_grid` in steps; yields (steps done, all steps). Layers before the ablated one run only once."""
    model = transformer(model)
    if len(ids) < 2:
        raise UsageError("an ablation grid needs a text of at least two tokens")
    T, device = len(ids), model.tok_embeddings.weight.device
    tokens = torch.tensor([ids], device=device)  # (1, T)
    L, at = len(model.layers), slice(None) if position is None else slice(position, position + 1)
    most = max(1, STEP * L // T)  # largest number of rows in a step
    parts = model.config.n_heads + 1
    groups = [range(start, min(start + most, parts)) for start in range(0, parts, most)]
    done, count = 0, len(groups) * L * (L + 1) // 2
    scores = []  # one entry for each layer

    def measured(weights: Tensor, place: Place) -> Tensor:  # (1, H, T, T)
        own = weights[0]
        scores.append(torch.stack((own.diagonal(-1, -2, -1).mean(-1), sink(own), _induction(own, tokens[0]))))
        return weights

    with recording(model, ("resid_post", "z", "mlp_out")) as seen, patch(model, {"pattern.*": measured}):
        model.hidden(tokens)
    states, direction = seen.hidden, readout(model, seen, token, against)  # (T, C) before each block and last; (C,)
    mlps = torch.stack([mlp[-1].float() @ direction for mlp in seen.rows("mlp_out")])  # (L,)
    direct = torch.cat((direct_effects(model, seen, direction), mlps[:, None]), 1)  # (L, H + 1)
    difference = _difference(model, states[-1][None], token, against)  # (1,)
    logits = []
    for number, block in enumerate(model.layers):
        layer, found = block.attention.layer, []
        for rows in groups:
            without = partial(_without, first=rows.start, at=at, mean=mean)
            mlp = partial(without, first=rows.start - parts + 1)  # column H
            with patch(model, {f"z.{layer}": without, f"mlp_out.{layer}": mlp}):
                x = states[number].expand(len(rows), -1, -1)
                x = run(model, number, x, range(T), T, None)  # (B, T, C): row i without part rows[i]
            for later in range(number + 1, L + 1):
                done += 1
                yield done, count
                if later < L:
                    x = run(model, later, x, range(T), T, None)  # (B, T, C)
            found.append(_difference(model, x, token, against))  # (B,)
        logits.append(torch.cat(found))
    previous, first, induction = torch.stack(scores, 1)  # (L, H) each
    repeated = None if bool(induction.isnan().any()) else induction
    total = difference - torch.stack(logits)  # (L, H + 1)
    if not bool(total.isfinite().all()):
        raise NumericalError("the logits of this text are not finite without a head or MLP layer")
    return AblationGrid(float(difference), direct, total, previous, first, repeated)


@torch.inference_mode()
def without_sources(
    model: Transformer, ids: Sequence[int], cache: KVCache, sources: Sequence[int], token: int, against: int
) -> Iterator[Tensor]:
    """The difference of two logits after a text if the last token reads nothing from one token, for each of `sources`.

    In all heads of all layers, the last token's weight on this token becomes 0; the other weights stay. Unlike a direct
    effect, the result includes how later layers use the output. Earlier tokens still read from the token.

    cache    holds the keys and values of the ids before the last one
    sources  positions of the tokens that are not read, one at a time

    Yields the differences in parts (B,), one for each pass.
    """
    S, device = len(ids), cache.device
    dtype = model.norm.weight.dtype
    layers = [Earlier([x[:1, :, : S - 1].to(dtype) for x in layer.floats()]) for layer in cache.layers]
    for part in torch.tensor(sources, device=device).split(max(1, ROWS // S)):  # (B,)
        read = torch.arange(S, device=device) != part[:, None, None, None]  # (B, 1, 1, S)
        with patch(model, {"pattern.*": partial(lambda read, weights, at: weights * read, read)}):  # (B, H, 1, S)
            h = model.tok_embeddings(torch.full((len(part), 1), ids[-1], device=device))  # (B, 1, C)
            for number, layer in enumerate(layers):
                h = run(model, number, h, range(S - 1, S), S, layer)  # (B, 1, C)
            found = _difference(model, h, token, against)  # (B,)
        yield found


def _difference(model: Transformer, h: Tensor, token: int, against: int) -> Tensor:
    """The difference of two logits after the last token: (B, T, C) -> (B,) float32."""
    logits = last_logits(model, h)  # (B, V)
    return logits[:, token] - logits[:, against]


def _without(x: Tensor, place: Place, first: int, at: slice, mean: bool) -> Tensor:
    """Replace head `first` + i in row i of heads (B, T, H, D); an MLP's output (B, T, C) counts as one head."""
    heads = x if x.dim() == 4 else x[:, :, None]  # (B, T, H or 1, ..)
    for row in range(max(0, -first), min(len(x), heads.shape[2] - first)):
        heads[row, at, first + row] = heads[row, :, first + row].mean(0) if mean else 0
    return x


def _induction(weights: Tensor, ids: Tensor) -> Tensor:
    """The induction score of each head (arXiv:2209.11895): (H, T, T), (T,) -> (H,); NaN if no token occurs twice."""
    same = (ids[:, None] == ids).tril(-1)  # (T, T): token s is an earlier occurrence of token t
    followed = same.roll(1, -1)  # (T, T): token s follows such an occurrence
    return (weights * followed).sum(-1)[:, same.any(-1)].mean(-1)
