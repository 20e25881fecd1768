"""Decay: a bound on the score falls with the distance; whether scores fall is measured on the vectors of a model."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...loader import build
from ..figure import LINES, Data, Figure, draw_lines
from ..inside import activations
from ..measures import decay_bound, frequencies, mean_cosine
from ..perplexity import TINY
from ..report import Report, Table, wrapped
from ..results import table as stored_table
from . import TOPICS
from .base import Topic, columns
from .heads import passage

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

DRAWS = 500  # combinations of a query, two keys and a distance
NEARER, KEPT = "a key scores higher at r than at 2r", "two keys keep the order of distance 0"


@lru_cache(maxsize=1)
@torch.inference_mode()
def _compared(model: str, text: Path | None, length: int | None) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Queries and keys of a text, moved to other distances by RoPE alone.

    Returns frequencies (D/2,), the trained length, and for each octave of distances from 2^n on (n, 2): how often a
    key scores higher at distance r than at 2 r, and how often two keys have the same order at r as at 0.
    """
    checkpoint, tokens = passage(model, text, length)
    net = build(checkpoint, "cpu", "float32", max_seq_len=len(tokens))
    with activations(net, ["q.*", "k.*"]) as seen:
        net(tokens[None])
    inv_freq = net.rope.frequencies(len(tokens))[0].double()  # (D/2,)
    draw = torch.Generator().manual_seed(0)
    query, one, other = torch.randint(1, len(tokens), (3, DRAWS), generator=draw)  # not token 0, a sink in many heads
    octaves = int(np.log2(128 * checkpoint.config.max_seq_len)) + 1
    start = 2.0 ** torch.arange(octaves, dtype=torch.float64)[:, None]  # (n, 1)
    r = (start * (1 + torch.rand(DRAWS, generator=draw, dtype=torch.float64))).round()  # (n, DRAWS)
    found = torch.zeros(octaves, 2, dtype=torch.float64)
    layers = [layer for layer in range(net.config.n_layers) if layer not in net.config.no_rope_layers]
    for layer in layers:
        q, k = (
            torch.view_as_complex(seen[f"{name}.{layer}"][0].double().unflatten(-1, (-1, 2)).contiguous())
            for name in "qk"
        )  # (T, H, D/2), (T, KV, D/2)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).conj()
        first, second = q[query] * k[one], q[query] * k[other]  # (DRAWS, H, D/2)
        for octave, distances in enumerate(r):
            turn = torch.polar(torch.ones(1, dtype=torch.float64), distances[:, None, None] * inv_freq)
            near, twice, rival = (x.sum(-1).real for x in (first * turn, first * turn**2, second * turn))  # (DRAWS, H)
            order = (first - second).sum(-1).real
            found[octave, 0] += (near > twice).double().mean() / len(layers)
            found[octave, 1] += ((near - rival) * order > 0).double().mean() / len(layers)
    return inv_freq, checkpoint.config.max_seq_len, found


def report(model: str = TINY, text: Path | None = None, length: int | None = None) -> Report:
    """RoFormer's bound for the model's frequencies, and how often scores prefer the nearer position."""
    inv_freq, trained, found = _compared(model, text, length)
    rows = []
    for octave in range(0, len(found), 2):
        r = torch.linspace(2**octave, 2 ** (octave + 1), 64)
        bound = float(decay_bound(inv_freq, r).mean()) / ((len(inv_freq) + 1) / 2)
        shares = (f"{share:.2f}" for share in (bound, *found[octave].tolist()))
        rows.append((f"{2**octave:,} to {2 ** (octave + 1):,}", *shares))
    return Report(
        "decay",
        TOPICS["decay"],
        settings={"model": model, "pairs": len(inv_freq), "trained context": trained},
        says=wrapped(
            "The bound is relative to distance 0. The other columns are shares of random combinations of a query and"
            " keys of the text, over all heads; a coin has 0.5."
        ),
        tables=(Table("by distance r (tokens)", ("r", "bound", "key higher at r than 2r", "order of 0 kept"), rows),),
    )


def order_data(model: str = TINY, text: Path | None = None, length: int | None = None) -> Data:
    """line, distance (tokens, the start of an octave), share of combinations, context (the trained length)."""
    _, trained, found = _compared(model, text, length)
    rows = [
        (line, 2**octave, round(float(found[octave, column]), 4), trained)
        for column, line in enumerate((NEARER, KEPT))
        for octave in range(len(found))
    ]
    return columns(("line", "distance", "share", "context"), rows)


def stored() -> Data:
    """`order_data` of SmolLM2-135M: clearllama study decay -m smollm2-135m-instruct --figure FILE.csv."""
    rows = [tuple(row.values()) for row in stored_table("decay-smollm2.csv")]
    return columns(("line", "distance", "share", "context"), [(row[0], *map(float, row[1:])) for row in rows])


def order_draw(table: Data, canvas: Canvas) -> None:
    """Both shares over the distance, with the coin's and the trained context."""
    axes = canvas.subplots()
    draw_lines(axes, table, "distance", "share", "line", (NEARER, KEPT))
    axes.axhline(0.5, color="#888888", linewidth=0.7)
    axes.axvline(table["context"][0], color="#888888", linewidth=0.7)
    axes.text(table["context"][0], 0.02, " trained context", color="#555555")
    axes.set(xscale="log", ylim=(0, 1), xlabel="distance r (tokens, log scale)", ylabel="share of combinations")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2))


def bound_data() -> Data:
    """line, distance (tokens), value: the bound for 64 pairs / its value at 0, and the score of a built key."""
    distances = torch.arange(4097)
    edges = np.unique(np.geomspace(1, 4097, 61).round().astype(int))  # its many small rises would hide the trend
    middle = np.sqrt(edges[:-1] * (edges[1:] - 1))  # (bins,) tokens
    rows: list[tuple[object, ...]] = []
    for base in (1e4, 5e5, 1e6):
        bound = decay_bound(frequencies(128, base), distances).numpy()
        means = np.add.reduceat(bound[:-1], edges[:-1]) / np.diff(edges) / bound[0]
        rows += [(f"bound, base {base:,.0f}", *row) for row in zip(middle, means, strict=True)]
    at = torch.from_numpy(np.unique(np.r_[np.geomspace(1, 4096, 300).round().astype(int), 450:550]))
    score = mean_cosine(frequencies(128), at - 500)
    rows += [("score of a key built for 500", *row) for row in zip(at.tolist(), score.tolist(), strict=True)]
    return columns(("line", "distance", "value"), rows)


def bound_draw(data: Data, canvas: Canvas) -> None:
    """Value over distance (log): three bounds, and the score of the key as a thin line."""
    axes = canvas.subplots()
    *bounds, key = dict.fromkeys(data["line"].tolist())
    draw_lines(axes, data, "distance", "value", "line", bounds)
    rows = data["line"] == key
    axes.plot(data["distance"][rows], data["value"][rows], label=key, color=LINES[6]["color"], linewidth=0.7)
    axes.set(
        xscale="log", xlim=(1, 4096), xlabel="distance (tokens, log scale)", ylabel="relative to the largest value"
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.18), ncols=2)


CAPTION = "Queries and keys of a text, moved to distance r by RoPE alone; means over heads and random combinations."
TOPIC = Topic(
    report,
    figures=(
        Figure("order_kept", CAPTION, order_data, order_draw, size=(5.6, 4.0)),
        Figure("order_kept_smollm2", f"SmolLM2-135M, 270 heads. {CAPTION}", stored, order_draw, size=(5.6, 4.0)),
        Figure(
            "decay",
            "RoFormer's bound on a score of 64 pairs, averaged over bins of distances: it falls, more slowly for a"
            " larger base. The thin line is the score of a key that was built to be highest at distance 500.",
            bound_data,
            bound_draw,
            size=(5.6, 4.0),
        ),
    ),
)
