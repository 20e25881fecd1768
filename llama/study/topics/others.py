"""Other encodings that make a score depend on the distance: Shaw, Transformer-XL, T5, ALiBi, xPos, in a few lines each.

Each function computes the scores of one head, (N, N) with row m for the query; positions are 0 .. N - 1. They are the
formulas of the papers in float64, for reading; no model uses them. Letters: N tokens, D head_dim, R distances.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..figure import Data, Figure, draw_lines
from ..measures import diagonal_spread, frequencies, mean_cosine, sinusoids, turn
from ..report import Report, Table, above, below, equal, holds, wrapped
from . import TOPICS
from .base import Topic, check_head_dim, columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def distance(n: int) -> Tensor:
    """m - n for each query m and key n: (N, N)."""
    at = torch.arange(n)
    return at[:, None] - at[None, :]


def shaw(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
    """q_m . (k_n + a), where a is the row of a trained table for the distance (arXiv:1803.02155).

    table (2 R + 1, D) has the distances -R .. R; distances beyond are clipped to them.
    """
    reach = len(table) // 2
    rows = table[distance(len(q)).clamp(-reach, reach) + reach]  # (N, N, D)
    return torch.einsum("md,mnd->mn", q, k[None] + rows)


def transformer_xl(q: Tensor, k: Tensor, wr: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """(q_m + u) . k_n + (q_m + v) . W_r r, where r is the sinusoid of the distance (arXiv:1901.02860).

    wr (D, C) is trained, and so are u and v (D,), which replace the query's position.
    """
    r = sinusoids(distance(len(q)).flatten(), wr.shape[1]) @ wr.T  # (N * N, D)
    return (q + u) @ k.T + torch.einsum("md,mnd->mn", q + v, r.view(len(q), len(q), -1))


def t5_bucket(distances: Tensor, buckets: int = 32, furthest: int = 128) -> Tensor:
    """The bucket of each distance m - n >= 0 in a decoder (arXiv:1910.10683): one each at first, then in logarithms."""
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


def xpos_decay(dim: int, gamma: float = 0.4) -> Tensor:
    """The factor of each pair per 512 positions (arXiv:2212.10554): (D/2,), least for the fastest pair."""
    return (torch.arange(0, dim, 2, dtype=torch.float64) / dim + gamma) / (1 + gamma)


def xpos(q: Tensor, k: Tensor, scale: float = 512.0) -> Tensor:
    """RoPE, with q multiplied by decay^(m / 512) and k divided by decay^(n / 512): the score decays in the distance."""
    at = torch.arange(len(q), dtype=torch.float64)
    factor = xpos_decay(q.shape[1]).pow(at[:, None] / scale).repeat_interleave(2, dim=1)  # (N, D)
    w = frequencies(q.shape[1])
    return (turn(q, at, w) * factor) @ (turn(k, at, w) / factor).T


def kernels(distances: Tensor, dim: int = 64) -> dict[str, Tensor]:
    """The mean score of q = k by distance, 1 at distance 0, for RoPE and xPos: (N,) each."""
    w, decay = frequencies(dim), xpos_decay(dim)
    faded = decay.pow(distances.double()[:, None] / 512)  # (N, D/2)
    return {"RoPE": mean_cosine(w, distances), "xPos": (torch.cos(distances.double()[:, None] * w) * faded).mean(-1)}


def report(head_dim: int = 16) -> Report:
    """Whether each encoding depends on the distance alone, for equal queries and equal keys at all positions."""
    check_head_dim(head_dim, 4, 256)
    draw = torch.Generator().manual_seed(0)
    n, d = 48, head_dim
    q, k = (torch.randn(1, d, generator=draw, dtype=torch.float64).expand(n, -1) for _ in range(2))
    table, wr = (torch.randn(*s, generator=draw, dtype=torch.float64) for s in ((2 * 8 + 1, d), (d, 32)))
    u, v, bias = (torch.randn(s, generator=draw, dtype=torch.float64) for s in (d, d, 32))
    found = {
        "Shaw": ("a trained vector per distance, -8 .. 8", (2 * 8 + 1) * d, shaw(q, k, table)),
        "Transformer-XL": ("the sinusoid of the distance", d * 32 + 2 * d, transformer_xl(q, k, wr, u, v)),
        "T5": ("a trained number per bucket, 0 .. 31", 32, t5(q, k, bias)),
        "ALiBi": ("a fixed slope times the distance", 0, alibi(q, k, 0.25)),
        "xPos": ("rotation and decay", 0, xpos(q, k)),
        "RoPE": ("rotation", 0, turn(q, torch.arange(n), frequencies(d)) @ turn(k, torch.arange(n), frequencies(d)).T),
    }
    p = sinusoids(torch.arange(n), d)  # (N, D)
    added = diagonal_spread((q + p) @ (k + p).T)
    buckets = t5_bucket(torch.arange(0, 512))
    return Report(
        "others",
        TOPICS["others"],
        settings={"head_dim": d, "tokens": n},
        says=wrapped(
            "The same query stands at every position, and the same key. If only the distance matters, all scores on one"
            " diagonal are equal. T5 and ALiBi add a number to the score, whatever q and k are; the others let the"
            f" effect of a distance depend on q. The trained numbers of one head of {d} entries: 17 vectors for Shaw; a"
            f" matrix {d} x 32 for a sinusoid of 32 entries, and two vectors, for Transformer-XL."
        ),
        tables=(
            Table(
                "one head",
                ("encoding", "what carries the distance", "trained numbers", "spread on a diagonal"),
                [
                    ("sinusoids, added", "nothing: each position alone", 0, round(added, 2)),
                    *(
                        (name, what, count, round(diagonal_spread(scores), 9))
                        for name, (what, count, scores) in found.items()
                    ),
                ],
            ),
        ),
        checks=(
            *(
                below("", f"{name}: largest difference of two scores of one distance", diagonal_spread(scores), 1e-12)
                for name, (_, _, scores) in found.items()
            ),
            above("", "sinusoids, added: largest difference of two scores of one distance", added, 1),
            holds("", "T5: the buckets of the distances 0 .. 15 are exact", buckets[:16].tolist() == list(range(16))),
            equal("", "T5: the last bucket begins at the distance", int((buckets == 31).nonzero()[0]), 113),
            equal("", "ALiBi with 8 heads: the sum of the slopes", float(alibi_slopes(8).sum()), 1 - 2.0**-8, 1e-12),
            below(
                "",
                "xPos: largest score at distance 4096 / at 0",
                float((xpos_decay(d) ** 8).mean()),
                0.5,
            ),
        ),
    )


def data() -> Data:
    """One row per line and distance."""
    distances = torch.arange(0, 513)
    lines: list[tuple[str, str, Tensor]] = [
        ("ALiBi", f"slope 1/{round(1 / s)}", -s * distances) for s in alibi_slopes(8)[::2].tolist()
    ]
    lines.append(("T5", "bucket", t5_bucket(distances).double()))
    lines += [("rotation", name, values) for name, values in kernels(distances).items()]
    rows = [(panel, line, *row) for panel, line, values in lines for row in enumerate(values.tolist())]
    return columns(("panel", "line", "distance", "value"), rows)


def draw(table: Data, canvas: Canvas) -> None:
    panels = canvas.subplots(3, 1, sharex=True, height_ratios=(4, 3, 4))
    titles = {"ALiBi": "added to the score", "T5": "bucket", "rotation": "score of q = k"}
    for axes, (panel, label) in zip(panels, titles.items(), strict=True):
        rows = {name: column[table["panel"] == panel] for name, column in table.items()}
        draw_lines(axes, rows, "distance", "value", "line", dict.fromkeys(rows["line"].tolist()))
        axes.set_title({"rotation": "RoPE and xPos"}.get(panel, panel))
        axes.set_ylabel(label)
        if panel != "T5":
            axes.legend(ncols=2, loc="upper right")
    panels[0].set_ylim(-20, 6)
    panels[-1].set_xlabel("distance (tokens)")


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "others",
            "How a distance enters the score. ALiBi subtracts a fixed slope times the distance, with another slope in"
            " each head; every other one of eight heads is drawn. T5 adds a trained number, one for each bucket of"
            " distances; the buckets widen. RoPE's score varies with the angles and does not vanish; xPos makes the"
            " fast pairs fade.",
            data,
            draw,
            size=(5.4, 6.6),
        ),
    ),
)
