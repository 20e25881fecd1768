"""Other encodings that make a score depend on the distance: Shaw, Transformer-XL, T5 and ALiBi, in a few lines each.

Each function computes the scores of one head, (N, N) with row m for the query; positions are 0 .. N - 1. They are the
formulas of the papers in float64, for reading; no model uses them. Letters: N tokens, D head_dim, R distances.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..figure import Canvas, Data, Figure, columns, draw_lines
from ..measures import diagonal_spread, frequencies, sinusoids, turn
from ..report import Report, Table
from .base import Topic


def distance(n: int) -> Tensor:
    """m - n for each query m and key n: (N, N)."""
    at = torch.arange(n)
    return at[:, None] - at[None, :]


def shaw(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
    """q_m . (k_n + a), where a is the row of a trained table for the distance (arXiv:1803.02155).

    table (2 R + 1, D) has a row for each distance from -R to R; larger distances are clipped.
    """
    reach = len(table) // 2
    rows = table[distance(len(q)).clamp(-reach, reach) + reach]  # (N, N, D)
    return torch.einsum("md,mnd->mn", q, k[None] + rows)


def transformer_xl(q: Tensor, k: Tensor, wr: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """(q_m + u) . k_n + (q_m + v) . W_r r, where r is the sinusoid of the distance (arXiv:1901.02860).

    wr (D, C), u (D,) and v (D,) are trained; u and v replace the query's position.
    """
    r = sinusoids(distance(len(q)).flatten(), wr.shape[1]) @ wr.T  # (N * N, D)
    return (q + u) @ k.T + torch.einsum("md,mnd->mn", q + v, r.view(len(q), len(q), -1))


def t5_bucket(distances: Tensor, buckets: int = 32, furthest: int = 128) -> Tensor:
    """The bucket of each distance m - n >= 0 in a decoder (arXiv:1910.10683).

    Each small distance has a bucket of its own; larger distances share buckets on a logarithmic scale.
    """
    exact = buckets // 2
    far = exact + (torch.log(distances.clamp(min=1) / exact) / math.log(furthest / exact) * (buckets - exact)).long()
    return torch.where(distances < exact, distances, far.clamp(max=buckets - 1)).clamp(min=0)


def t5(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """q_m . k_n plus a trained number for the bucket of the distance; bias (buckets,)."""
    return q @ k.T + bias[t5_bucket(distance(len(q)), len(bias))]


def alibi_slopes(heads: int) -> Tensor:
    """2^(-8h/H) for h = 1 .. H, if H is a power of 2 (arXiv:2108.12409): (H,)."""
    return 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)


def alibi(q: Tensor, k: Tensor, slope: float) -> Tensor:
    """q_m . k_n minus slope times the distance."""
    return q @ k.T - slope * distance(len(q))


def report() -> Report:
    """How far two scores of the same distance differ, for equal queries and equal keys at all positions."""
    n, d, generator = 48, 16, torch.Generator().manual_seed(0)
    sizes = ((1, d), (1, d), (2 * 8 + 1, d), (d, 32), (d,), (d,), (32,))
    q, k, table, wr, u, v, bias = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in sizes)
    q, k, at, w = q.expand(n, -1), k.expand(n, -1), torch.arange(n), frequencies(d)
    p = sinusoids(at, d)
    found = (
        ("sinusoids, added", "nothing: each position alone", 0, (q + p) @ (k + p).T),
        ("Shaw", "a trained vector per distance, -8 .. 8", (2 * 8 + 1) * d, shaw(q, k, table)),
        ("Transformer-XL", "the sinusoid of the distance", d * 32 + 2 * d, transformer_xl(q, k, wr, u, v)),
        ("T5", "a trained number per bucket, 0 .. 31", 32, t5(q, k, bias)),
        ("ALiBi", "a fixed slope times the distance", 0, alibi(q, k, 0.25)),
        ("RoPE", "rotation", 0, turn(q, at, w) @ turn(k, at, w).T),
    )
    return Report(
        [
            Table(
                "one head",
                ("encoding", "what carries the distance", "trained numbers", "spread on a diagonal"),
                [(name, what, count, round(diagonal_spread(x), 9)) for name, what, count, x in found],
            )
        ],
        "The same query stands at every position, and the same key. If only the distance matters, all scores on one"
        " diagonal are equal, and their spread is 0.",
        {"head_dim": d, "tokens": n},
    )


def data() -> Data:
    """One row per line and distance."""
    at = torch.arange(257)
    lines = [("ALiBi", f"slope 1/{round(1 / s)}", -s * at) for s in alibi_slopes(8)[::2].tolist()]
    lines.append(("T5", "bucket", t5_bucket(at).double()))
    rows = [(panel, line, *row) for panel, line, values in lines for row in enumerate(values.tolist())]
    return columns(("panel", "line", "distance", "value"), rows)


def draw(table: Data, canvas: Canvas) -> None:
    panels = canvas.subplots(2, 1, sharex=True)
    for axes, panel, label in zip(panels, ("ALiBi", "T5"), ("added to the score", "bucket"), strict=True):
        rows = {name: column[table["panel"] == panel] for name, column in table.items()}
        draw_lines(axes, rows, "distance", "value", "line", dict.fromkeys(rows["line"].tolist()))
        axes.set_title(panel)
        axes.set_ylabel(label)
    panels[0].legend(ncols=2, loc="upper right")
    panels[0].set_ylim(-20, 12)
    panels[1].set_xlabel("distance (tokens)")


CAPTION = "What ALiBi adds to a score in four of eight heads, and the bucket of T5's trained number, by distance."
TOPIC = Topic(report, (Figure("others", CAPTION, data, draw, size=(5.4, 4.0)),))
