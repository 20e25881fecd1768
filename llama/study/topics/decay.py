"""Decay: a bound on the score falls with the distance; whether scores fall is measured on the vectors of a model."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...inside import activations
from ...loader import build
from ..figure import THIN, Canvas, Data, Figure, columns, draw_lines
from ..measures import decay_bound, wavelengths
from ..perplexity import TINY
from ..report import Report, Table
from ..results import data as stored
from .bands import passage
from .base import Topic, answering

DRAWS = 500  # combinations of a query, two keys and a distance
NEARER, KEPT = "a key scores higher at r than at 2r", "two keys keep the order of distance 0"


class Compared(NamedTuple):
    """Queries and keys of a text, moved to other distances by RoPE alone.

    inv_freq   (D/2,)
    shares     for each octave of distances from 2^n on (n, 2): how often a key scores higher at distance r than at 2 r,
               and how often two keys have the same order at r as at 0
    strongest  the strongest pair i of each head (heads, 3): i, |mean q_i conj(k_i)| / mean |q_i| |k_i|, and the angle
               of mean q_i conj(k_i)
    """

    model: str
    trained: int
    inv_freq: Tensor
    shares: Tensor
    strongest: Tensor


@lru_cache(maxsize=1)
@torch.inference_mode()
def _compared(model: str = TINY, text: Path | None = None, length: int | None = None) -> Compared:
    """Compare scores of a model's queries and keys by distance."""
    checkpoint, tokens = passage(model, text, length)
    net = build(checkpoint, "cpu", "float32", max_seq_len=len(tokens))
    with activations(net, ["q.*", "k.*"]) as seen:
        net(tokens[None])
    inv_freq = net.rope.frequencies(len(tokens))[0].double()  # (D/2,)
    draw = torch.Generator().manual_seed(0)
    query, one, other = torch.randint(1, len(tokens), (3, DRAWS), generator=draw)  # not token 0, an attention sink
    octaves = int(np.log2(128 * checkpoint.config.max_seq_len)) + 1
    start = 2.0 ** torch.arange(octaves, dtype=torch.float64)[:, None]  # (n, 1)
    r = (start * (1 + torch.rand(DRAWS, generator=draw, dtype=torch.float64))).round()  # (n, DRAWS)
    found, strongest = torch.zeros(octaves, 2, dtype=torch.float64), []
    layers = [layer for layer in range(net.config.n_layers) if layer not in net.config.no_rope_layers]
    for layer in layers:
        q, k = (
            torch.view_as_complex(seen[f"{name}.{layer}"][0].double().unflatten(-1, (-1, 2)).contiguous())
            for name in "qk"
        )  # (T, H, D/2), (T, KV, D/2)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).conj()
        most, mean = q.abs().mean(0) * k.abs().mean(0), q.mean(0) * k.mean(0)  # (H, D/2) each
        pair = most.argmax(-1, keepdim=True)  # (H, 1)
        agreement, angle = (x.gather(-1, pair) for x in (mean.abs() / most, mean.angle().rad2deg()))
        strongest.append(torch.cat((pair, agreement, angle), dim=-1))
        first, second = q[query] * k[one], q[query] * k[other]  # (DRAWS, H, D/2)
        for octave, distances in enumerate(r):
            turn = torch.polar(torch.ones(1, dtype=torch.float64), distances[:, None, None] * inv_freq)
            near, twice, rival = (x.sum(-1).real for x in (first * turn, first * turn**2, second * turn))  # (DRAWS, H)
            order = (first - second).sum(-1).real
            found[octave, 0] += (near > twice).double().mean() / len(layers)
            found[octave, 1] += ((near - rival) * order > 0).double().mean() / len(layers)
    return Compared(model, checkpoint.config.max_seq_len, inv_freq, found, torch.cat(strongest))


def _report(found: Compared) -> Report:
    """RoFormer's bound for the model's frequencies, and how often scores prefer the nearer position."""
    model, trained, inv_freq, shares, strongest = found
    rows = []
    for octave in range(0, len(shares), 2):
        r = torch.linspace(2**octave, 2 ** (octave + 1), 64)
        bound = float(decay_bound(inv_freq, r).mean()) / ((len(inv_freq) + 1) / 2)
        texts = (f"{share:.2f}" for share in (bound, *shares[octave].tolist()))
        rows.append((f"{2**octave:,} to {2 ** (octave + 1):,}", *texts))
    pairs = []
    for pair, heads in Counter(strongest[:, 0].int().tolist()).most_common(4):
        agreement, angle = strongest[strongest[:, 0] == pair, 1:].quantile(0.5, dim=0).tolist()
        turn = float(wavelengths(inv_freq)[pair])
        pairs.append((pair, heads, f"{agreement:.2f}", f"{angle:.0f}", f"{turn:,.0f}"))
    return Report(
        (
            Table("by distance r (tokens)", ("r", "bound", "key higher at r than 2r", "order of 0 kept"), rows),
            Table("strongest pair of each head", ("pair", "heads", "agreement", "angle", "wavelength"), pairs),
        ),
        "The bound is relative to distance 0. The other columns are shares of random combinations of a query and keys"
        " of the text, over all heads; chance is 0.5. Agreement is 1 if q_i conj(k_i) has the same angle for all"
        " tokens; at an angle of 90 degrees the pair adds -sin(r ω), which falls until r ω is a quarter turn.",
        {"model": model, "pairs": len(inv_freq), "trained context": trained},
    )


def _order(found: Compared) -> Data:
    """Columns: line; distance, the start of an octave; share of the combinations; context, the trained length."""
    rows = [
        (line, 2**octave, round(share, 4), found.trained)
        for line, shares in zip((NEARER, KEPT), found.shares.T.tolist(), strict=True)
        for octave, share in enumerate(shares)
    ]
    return columns(("line", "distance", "share", "context"), rows)


order_data = answering(_compared, _order)


def order_draw(table: Data, canvas: Canvas) -> None:
    """Each share over the distance, with lines at 0.5 and at the trained context."""
    panels = canvas.subplots(2, 1, sharex=True)
    for axes, line in zip(panels, (NEARER, KEPT), strict=True):
        draw_lines(axes, table, "distance", "share", "line", (line,), (0, 1))
        axes.axhline(0.5, **THIN)
        axes.axvline(table["context"][0], **THIN)
        axes.text(1, 0.48, "a coin", va="top")
        axes.set(xscale="log", ylim=(0, 1), ylabel="share of combinations", title=f"How often {line}")
    panels[0].text(table["context"][0], 0.97, "trained context ", ha="right", va="top")
    panels[1].set_xlabel("distance r (tokens, log scale)")


# The stored results are those of: clearllama study decay -m smollm2-135m-instruct --figure FILE.csv
CAPTION = "Queries and keys of a text, moved to distance r by RoPE alone. Points: one for each doubling of r."
SMOLLM2 = f"SmolLM2-135M-Instruct. {CAPTION}"
TOPIC = Topic(
    answering(_compared, _report),
    (
        Figure("order_kept", CAPTION, order_data, order_draw, size=(5.4, 4.6)),
        Figure("order_kept_smollm2", SMOLLM2, partial(stored, "decay-smollm2.csv"), order_draw, size=(5.4, 4.6)),
    ),
)
