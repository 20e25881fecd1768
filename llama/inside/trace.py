"""Record one forward pass: surprisals, the logit lens, attention weights, and the angles of RoPE.

The tensors are recorded as in hooks.py. The logits equal those of the untraced model, bit for bit.

Letters: T tokens, L layers that ran, H query heads, D head_dim, C model dim, V vocabulary. Logarithms are natural, so
surprisals and divergences are in nats, unless a name contains bits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig
from ..engine.linears import make_embedding
from ..engine.nonfinite import locate
from ..errors import NumericalError, UsageError
from ..model import Transformer
from ..sampling import logprob_of
from ..tokenizer import Tokenizer
from .hooks import Activations, activations
from .intervene import Intervention
from .patching import LEGEND, cell

LENS_CHUNK = 8  # number of tokens whose lens is computed at once
LENS_TOKENS = 32  # a longer text has a lens for its last tokens only: a row costs as much as the model's output layer
RECORDED = ("resid_post", "pattern", "rot_q", "rot_k", "z", "mlp_out")  # sites of each layer


# ------------------------------------------------------------------------------------------------- one forward pass
@dataclass
class Recording:
    """The record of a forward pass, layer by layer. Of a batch, it shows the first row.

    layers  numbers of the blocks in the order in which they run; a block may run several times
    """

    layers: list[int]
    tensors: Activations

    def rows(self, name: str) -> list[Tensor]:
        """For each layer, the first row of the named tensor: "pattern" (H, T, T), "z" (T, H, D), .."""
        calls = {layer: iter(self.tensors.calls[f"{name}.{layer}"]) for layer in self.layers}
        return [next(calls[layer])[0] for layer in self.layers]

    @property
    def hidden(self) -> list[Tensor]:
        """(T, C) each: the embedding, then the output of each block."""
        return [self.tensors["embed"][0], *self.rows("resid_post")]

    @property
    def weights(self) -> list[Tensor]:
        """(H, T, T) float32 each: row t has the weights of token t on tokens 0 .. t."""
        return self.rows("pattern")

    @property
    def pair_norms(self) -> list[Tensor]:
        """The function `pair_norms` of each layer: (H, D/2) float64 each."""
        return [pair_norms(q, k) for q, k in zip(self.rows("rot_q"), self.rows("rot_k"), strict=True)]


@contextlib.contextmanager
def recording(model: Transformer, sites: Sequence[str] = RECORDED) -> Iterator[Recording]:
    """Record the next forward pass, which is over a complete text, or over the last tokens of a text after a cache."""
    with activations(model, ["embed", *(f"{site}.*" for site in sites)]) as tensors:
        yield Recording([block.attention.layer for block in model.layers], tensors)


def pair_norms(q: Tensor, k: Tensor) -> Tensor:
    """For each pair i: the mean of |q_i| |k_i| over all T (T + 1) / 2 combinations of a query and a visible key.

    q (T, H, D) and k (T, KV, D) may be rotated or not, since rotations preserve lengths. Returns (H, D/2) float64.
    Pair i adds at most |q_i| |k_i| / sqrt(D) to a score, so the means show which frequencies a head uses.
    """
    lengths_q, lengths_k = (x.double().unflatten(-1, (-1, 2)).norm(dim=-1) for x in (q, k))  # (T, .., D/2) each
    sums = lengths_k.cumsum(dim=0).repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (T, H, D/2)
    products = (lengths_q * sums).sum(dim=0)  # (H, D/2): query t sees keys 0 .. t
    return products / (len(q) * (len(q) + 1) / 2)


# -------------------------------------------------------------------------------------------- derived quantities
def surprisal(logits: Tensor, ids: Tensor) -> Tensor:
    """-ln p of each token except the first, given the tokens before it: logits (T, V), ids (T,) -> (T - 1,) nats."""
    return -logprob_of(logits[:-1].double(), ids[1:])


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of two distributions given by their logarithms (.., T, V): (.., T) nats."""
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)  # rounding can return -1e-7


def rank_of(logits: Tensor, ids: Tensor) -> Tensor:
    """The rank of ids (.., T) in each row of logits (.., T, V), 1 for the most probable: (.., T)."""
    return 1 + (logits > logits.gather(-1, ids[..., None])).sum(-1)


@dataclass(frozen=True)
class Lens:
    """The logit lens: the next token predicted from the residual stream after each layer, for N tokens.

    There are M = L + 1 rows. Row 0 is read from the embedding before any block; row M - 1 is the model's prediction. In
    a `Trace`, the N tokens are the last LENS_TOKENS, otherwise all T. The tensors are on the CPU.

    top_ids, top_p  (M, N, K) the most probable tokens and their probabilities
    rank            (M, N) rank of the final answer, the model's most probable token
    kl              (M, N) KL(final || this layer), nats
    """

    top_ids: Tensor
    top_p: Tensor
    rank: Tensor
    kl: Tensor


def logit_lens(model: Transformer, hidden: Sequence[Tensor], logits: Tensor, top: int = 3) -> Lens:
    """Apply the last norm and the output matrix to the output of each block (nostalgebraist, 2020).

    Each entry of `hidden` is (T, C); `logits` is (T, V).
    """
    found = []
    for h, finals in zip(torch.stack([*hidden], dim=1).split(LENS_CHUNK), logits.split(LENS_CHUNK), strict=True):
        rows = model.output(model.norm(h)).float()  # (t, M, V)
        for seen, final in zip(rows, finals, strict=True):  # (M, V), (V,): one token's rows fit into the CPU's cache
            log_p = seen.log_softmax(-1)
            best, rank = log_p.topk(min(top, seen.shape[-1])), rank_of(seen, final.argmax().expand(len(seen)))
            row = best.indices, best.values.exp(), rank, divergence(final.log_softmax(-1), log_p)
            found.append([x.tolist() for x in row])  # lists: small tensors would fragment the memory that `seen` reuses
    return Lens(*(torch.tensor(parts).transpose(0, 1) for parts in zip(*found, strict=True)))


def readout(model: Transformer, seen: Recording, answer: int, against: int | None = None) -> Tensor:
    """The vector (C,) float32 whose product with a term of the last hidden state is the term's part of a logit.

    The logit is that of the id `answer` after the last token; if `against` is given, its logit is subtracted. The last
    norm keeps the scale of the recorded pass (arXiv:2211.00593, section 3.1), so the products of all terms add up to
    the logit.
    """
    scale = torch.rsqrt(seen.hidden[-1][-1].float().square().mean() + model.norm.eps)
    ids = torch.tensor([answer] if against is None else [answer, against], device=model.norm.weight.device)
    rows = make_embedding(model.output, torch.float32)(ids).float()  # (1 or 2, C): rows of the output matrix
    row = rows[0] if against is None else rows[0] - rows[1]
    return row * model.norm.weight.float() * scale


def head_readouts(model: Transformer, direction: Tensor) -> list[Tensor]:
    """The `readout` of each head: `direction` multiplied by each layer's wo, without the bias: (H, D) float32 each.

    The last hidden state is a sum; one of its terms is a head's output (D,) multiplied by the head's part of wo. So
    the product of a head's output with the head's readout is what the head adds to the logit.
    """
    rows, D = torch.arange(len(direction), device=direction.device), model.config.head_dim
    return [
        (direction @ make_embedding(block.attention.wo, torch.float32)(rows).float()).unflatten(-1, (-1, D))
        for block in model.layers  # (C,) @ (C, H * D) each
    ]


def direct_effects(model: Transformer, seen: Recording, direction: Tensor) -> Tensor:
    """What each head adds to the logit of the readout `direction` after the last token: (L, H) float32."""
    readouts = head_readouts(model, direction)
    return torch.stack([(z[-1].float() * own).sum(-1) for z, own in zip(seen.rows("z"), readouts, strict=True)])


def source_effects(model: Transformer, seen: Recording, direction: Tensor, values: Sequence[Tensor]) -> Tensor:
    """`direct_effects`, divided among the source tokens: (L, H, S) float32. The sum over S is the effect of the head.

    A head's output is the sum over its source tokens of weight times value.

    values  (KV, S, D) for each layer
    """
    effects = []
    for pattern, z, v, own in zip(seen.weights, seen.rows("z"), values, head_readouts(model, direction), strict=True):
        added = v.float().repeat_interleave(len(own) // len(v), 0) @ own[..., None]  # (H, S, D) @ (H, D, 1)
        runs = z[-1].ne(0).any(-1, keepdim=True)  # (H, 1): False for a head that is switched off; it adds nothing
        effects.append(pattern[:, -1] * added[..., 0] * runs)  # (H, S)
    return torch.stack(effects)


def distance_profile(weights: Tensor, skip_first: bool = False) -> Tensor:
    """Mean weight at each distance, over the queries that have a token at that distance: (.., T, T) -> (.., T).

    skip_first  leave out token 0, which many heads use as an attention sink (arXiv:2309.17453): -> (.., T - 1)
    """
    first = int(skip_first)
    distances = range(weights.shape[-1] - first)
    if not distances:
        return weights[..., 0, :0]
    return torch.stack([weights.diagonal(-d, -2, -1)[..., first:].mean(-1) for d in distances], dim=-1)


def sink(weights: Tensor) -> Tensor:
    """Mean weight on token 0, over the queries that see more than token 0: (.., T, T) -> (..)."""
    return weights[..., min(1, weights.shape[-1] - 1) :, 0].mean(-1)


def spread(weights: Tensor) -> Tensor:
    """Effective number of attended tokens, e^(entropy of a query's weights), mean over queries: (.., T, T) -> (..)."""
    return torch.special.entr(weights).sum(-1).exp().mean(-1)


# ------------------------------------------------------------------------------------------------- the complete trace
@dataclass(frozen=True)
class Trace:
    """A text and the record of the model's pass over it.

    ids (T,), logits (T, V) float32, weights (L, H, T, T), pair_norms (L, H, D/2), inv_freq (D/2,)
    effects  (L, H) direct effects on a difference of logits after the last token: most probable minus second token
    config   the configuration of the model with its changes
    before   (T, V) the logits without the changes; None if there are no changes
    changes  a description of each change
    """

    ids: Tensor
    logits: Tensor
    layers: list[int]
    lens: Lens
    weights: Tensor
    pair_norms: Tensor
    effects: Tensor
    inv_freq: Tensor
    attention_factor: float
    config: ModelConfig
    before: Tensor | None
    changes: Sequence[str]


def trace(model: Transformer, ids: Sequence[int], intervention: Intervention | None = None) -> Trace:
    """Run the model over a text and record it; with an intervention, also compute the unchanged model's logits.

    Raises UsageError on an empty text, NumericalError on logits that are not finite.
    """
    check(model, ids)
    tokens = torch.tensor([ids], device=model.tok_embeddings.weight.device)  # (1, T)
    intervention = intervention or Intervention()
    changes = intervention.descriptions()
    with torch.inference_mode():
        before = model(tokens)[0] if changes else None
        with intervention.on(model):
            with recording(model) as seen:
                logits = model(tokens)[0]  # (T, V)
            found = evaluate(model, ids, seen, logits, before, changes)
    if not bool((logits if before is None else before).isfinite().all()):
        raise NumericalError(f"the logits of this text are not finite; {locate(model, ids)}")
    if changes and not bool(logits.isfinite().all()):
        raise NumericalError(
            "the logits are not finite under this intervention, but they are finite without it; choose another one"
        )
    return found


def check(model: Transformer, ids: Sequence[int]) -> None:
    """Raise UsageError on an empty text, ContextLengthError on one that is too long."""
    if not ids:
        raise UsageError("the prompt has no tokens, so there is nothing to trace; expected a text")
    model.rope.freqs_cis(torch.arange(len(ids)), len(ids))


@torch.inference_mode()
def evaluate(
    model: Transformer,
    ids: Sequence[int],
    seen: Recording,
    logits: Tensor,
    before: Tensor | None = None,
    changes: Sequence[str] = (),
) -> Trace:
    """Compute a Trace from the record of a pass over a text and the logits (T, V)."""
    last = slice(-LENS_TOKENS, None)
    lens = logit_lens(model, [h[last] for h in seen.hidden], logits[last])
    first, second = logits[-1].topk(2).indices.tolist()  # a difference: a number added to all logits does not change it
    effects = direct_effects(model, seen, readout(model, seen, first, second))
    inv_freq, factor = model.rope.frequencies(len(ids))
    maps, pairs = torch.stack(seen.weights), torch.stack(seen.pair_norms)
    tokens = torch.tensor(ids, device=logits.device)
    return Trace(
        tokens, logits, seen.layers, lens, maps, pairs, effects, inv_freq, factor, model.config, before, changes
    )


TOP = 8  # number of most probable next tokens at each position


def facts(trace: Trace, tokenizer: Tokenizer, about: Mapping[str, Any]) -> dict[str, Any]:
    """The trace for JSON, with indices as in `Trace`, but without the attention maps.

    about      the model's name and sizes, included unchanged
    texts      id -> the text of its token, for every id that occurs
    tokens     ids (T,); surprisal (T,) in nats and rank (T,), both null for token 0, which has no prediction; next_ids
               and next_p (T, 8), the predictions after each token
    lens       top_ids and top_p (L+1, N, 3), rank and kl (L+1, N) for the last N = min(T, 32) tokens; row 0 is the
               embedding, the other rows are the layers
    heads      (L, H) each: sink, previous and itself, the mean weights on token 0, on the token before and on the token
               itself; spread, the effective number of attended tokens; effects, on the logit of the first of the last
               next_ids minus that of the second. By distance: profile (L, H, T), profile_without_first (L, H, T-1).
               By pair: pair_norms (L, H, D/2)
    rope       inv_freq (D/2,); turns (D/2,), the full turns between the first and the last token
    change     null, or told: descriptions of the changes; kl (T,): KL(before || after) of the prediction after each
               token; before and after, in the form of `tokens`
    """
    weights = trace.weights
    length = len(trace.ids)
    tokens = _predictions(trace.logits, trace.ids)
    lens = trace.lens
    change = None
    used = {*tokens["ids"], *(id for row in tokens["next_ids"] for id in row), *lens.top_ids.flatten().tolist()}
    if trace.before is not None:
        before = _predictions(trace.before, trace.ids)
        used |= {id for row in before["next_ids"] for id in row}
        kl = divergence(*(x.double().log_softmax(-1) for x in (trace.before, trace.logits)))
        change = {"told": trace.changes, "kl": _numbers(kl), "before": before, "after": tokens}
    return {
        **about,
        "layers": trace.layers,
        "texts": {str(id): tokenizer.shown(id) for id in sorted(used)},
        "tokens": tokens,
        "lens": {"top_ids": lens.top_ids.tolist(), "top_p": _numbers(lens.top_p), "rank": lens.rank.tolist()}
        | {"kl": _numbers(lens.kl)},
        "heads": {
            "sink": _numbers(sink(weights)),
            "previous": _numbers(weights.diagonal(-1, -2, -1).mean(-1)) if length > 1 else None,
            "itself": _numbers(weights.diagonal(0, -2, -1).mean(-1)),
            "spread": _numbers(spread(weights)),
            "profile": _numbers(distance_profile(weights).round(decimals=5)),
            "profile_without_first": _numbers(distance_profile(weights, skip_first=True).round(decimals=5)),
            "pair_norms": _numbers(trace.pair_norms, 4),
            "effects": _numbers(trace.effects),
        },
        "rope": {
            "theta": trace.config.rope_theta,
            "scaling": trace.config.rope_scaling and dict(trace.config.rope_scaling),
            "attention_factor": trace.attention_factor,
            "inv_freq": _numbers(trace.inv_freq, 9),
            "turns": _numbers((length - 1) * trace.inv_freq.double() / (2 * math.pi)),
        },
        "change": change,
    }


def _predictions(logits: Tensor, ids: Tensor) -> dict[str, Any]:
    best = logits.log_softmax(-1).topk(min(TOP, logits.shape[-1]))
    return {
        "ids": ids.tolist(),
        "surprisal": [None, *_numbers(surprisal(logits, ids))],
        "rank": [None, *rank_of(logits[:-1], ids[1:]).tolist()],
        "next_ids": best.indices.tolist(),
        "next_p": _numbers(best.values.exp()),
    }


def attention_rows(weights: Tensor) -> list[Any]:
    """The maps as nested lists (L, H, T, t + 1): row t has the weights on tokens 0 .. t; later tokens have weight 0."""
    return [[[_numbers(row[: t + 1], 5) for t, row in enumerate(head)] for head in layer] for layer in weights.float()]


def packed_maps(weights: Tensor) -> bytes:
    """The maps (L, H, T, T) with one byte for each weight w: 10 + 100 w if w >= 0.0995, else 26 sqrt(w), rounded.

    So weights from 0.1 on have two exact decimals, and smaller weights have eight steps. Only unmasked weights are
    stored, key by key: for key s, those of the queries s .. T - 1. These are L * H * T (T + 1) / 2 bytes.
    """
    s, t = torch.triu_indices(*weights.shape[-2:])
    seen = weights.float().cpu()[..., t, s]  # (L, H, T (T + 1) / 2)
    codes = torch.where(seen >= 0.0995, 10 + (100 * seen).round(), (26 * seen.sqrt()).round())
    return codes.clamp(0, 110).byte().numpy().tobytes()


def _numbers(tensor: Tensor, digits: int = 6) -> Any:
    """Nested lists of numbers, rounded to `digits` significant digits; further digits are float32 noise."""
    values = tensor.double().cpu().numpy()
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log10(np.abs(values)))
    scale = 10.0 ** (digits - 1 - np.where(np.isfinite(exponents), exponents, 0))
    return (np.round(values * scale) / scale).tolist()


# -------------------------------------------------------------------------------------------------------- as text
def summary(facts: Mapping[str, Any]) -> str:
    """A trace as text for a terminal: tokens, predictions, logit lens, heads, angles, and the change."""
    tokens, lens, heads, rope = facts["tokens"], facts["lens"], facts["heads"], facts["rope"]
    layers, length = facts["layers"], len(tokens["ids"])

    def quoted(id: int) -> str:
        return show(facts["texts"][str(id)])

    def best(ids: Sequence[int], p: Sequence[float], count: int) -> str:
        return ", ".join(f"{quoted(id)} {q:.2f}" for id, q in zip(ids[:count], p[:count], strict=True))

    ran = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
    lines = [f"{length} token{'s' * (length != 1)} through {ran} of {facts['model']}"]
    change = facts["change"]
    if change is not None:
        lines.append("changed: " + "; ".join(change["told"]))
    lines += [
        "",
        f"{'token':>5}  {'bits':>6}{'' if change is None else '     was'}  {'rank':>6}  {'text':<16} expected",
    ]
    for t, id in enumerate(tokens["ids"]):
        cells, expected = f"{'':>6}{'' if change is None else ' ' * 8}  {'':>6}", ""
        if t > 0:
            was = "" if change is None else f"  {change['before']['surprisal'][t] / math.log(2):>6.2f}"
            cells = f"{tokens['surprisal'][t] / math.log(2):>6.2f}{was}  {tokens['rank'][t]:>6,}"
            expected = best(tokens["next_ids"][t - 1], tokens["next_p"][t - 1], 3)
        lines.append(f"{t:>5}  {cells}  {quoted(id):<16} {expected}".rstrip())
    if patching := facts.get("patching"):
        lines += _grid(patching)
    lines += ["", f"next: {best(tokens['next_ids'][-1], tokens['next_p'][-1], 5)}"]
    if change is not None:
        before = change["before"]
        lines.append(f" was: {best(before['next_ids'][-1], before['next_p'][-1], 5)}")
        mean = sum(change["kl"]) / length
        lines.append(f"  KL(before || after) of the next token: {change['kl'][-1]:.3g} nats; mean {mean:.3g}")
    last = [rank[-1] for rank in lens["rank"]]
    settled = next(m for m in range(len(last)) if all(rank == 1 for rank in last[m:]))
    where = "already in the embedding" if settled == 0 else f"from layer {layers[settled - 1]} on"
    lines.append(f"logit lens: {quoted(tokens['next_ids'][-1][0])} is the most probable {where}")
    lines.append(_on_heads(layers, heads, length))
    turning = sum(turn >= 1 for turn in rope["turns"])
    lines.append(
        f"rope: {turning} of {len(rope['turns'])} pairs turn at least once over these positions,"
        f" pair 0 {rope['turns'][0]:.3g} times, the last {rope['turns'][-1]:.2g} times"
    )
    return "\n".join(lines) + "\n"


def _grid(patching: Mapping[str, Any]) -> list[str]:
    """The patching grid, one row for each token and one character for each layer."""
    own, other = patching["answers"][1], patching["answers"][0]
    layers, rows = patching["layers"], zip(*patching["restored"], strict=True)
    lines = [
        "",
        "patching: each cell copies the residual stream of the other text, before one layer at one token, into"
        " this run",
        f"effect on the logit difference {show(other)} - {show(own)}: 0 % as in this text, 100 % as in the other text",
        f"legend: {LEGEND}",
        f"token  layers {layers[0]} to {layers[-1]}",
    ]
    for t, (row, now, then) in enumerate(zip(rows, patching["target"], patching["source"], strict=True)):
        replaced = "" if now == then else f" from {show(then)}"
        lines.append(f"{t:>5}  {''.join(map(cell, row))}  {show(now)}{replaced}")
    return lines


def _on_heads(layers: Sequence[int], heads: Mapping[str, Any], length: int) -> str:
    if length == 1:
        return "attention: one token sees only itself"

    def strongest(name: str) -> str:
        grid = np.array(heads[name])
        layer, head = divmod(int(grid.argmax()), grid.shape[1])
        return f"{layers[layer]}.{head} ({grid[layer, head]:.2f})"

    return (
        f"attention: token 0 has {np.mean(heads['sink']):.0%} of the weight of later tokens, most from head"
        f" {strongest('sink')}; head {strongest('previous')} has the most weight on the previous token"
    )


def show(text: str) -> str:
    """A token in quotes, on one line, with control characters escaped."""
    return '"' + "".join(c if c.isprintable() else repr(c)[1:-1] for c in text) + '"'
