"""Relative position: under which encodings a score depends only on the distance between two tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import encodings, measures
from ..figure import COLOURS, LINES, MARKERS, THIN, Canvas, Data, Figure, columns
from ..report import Report, Table
from .base import Topic

D = 64  # width of the head and of the token


def scores_of(name: str, context: int = 32) -> Tensor:
    """Scores of one random token at every position: (N, N), row m the query, column n the key.

    The token is the same everywhere, so that scores differ only because of the positions.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(D, generator=draw, dtype=torch.float64)  # (C,) with C = D
    wq, wk = torch.randn(2, D, D, generator=draw, dtype=torch.float64) / D**0.5  # (D, C) each
    return encodings.scores(encodings.ENCODINGS[name](D), x.expand(context, -1), wq, wk, torch.arange(context))


def report() -> Report:
    """Spread of the scores at equal distance under five encodings."""
    rows = []
    for name in encodings.ENCODINGS:
        scores = scores_of(name)
        spreads = measures.diagonal_spread(scores), float(scores.max() - scores.min())
        rows.append((name, *(f"{number:.2g}" for number in (*spreads, float(scores[10, 5] - scores[5, 10])))))
    return Report(
        [
            Table(
                "scores of one token at 32 positions, divided by sqrt(D), D = 64",
                ("encoding", "spread at equal m - n", "spread over all", "score 5 back minus score 5 ahead"),
                rows,
            )
        ],
        "RoPE rotates pair i of a query at position m by m ω_i and of a key at position n by n ω_i. The angle between"
        " them changes by (m - n) ω_i, so the score depends on m - n only. Vectors added to the token (sinusoidal,"
        " learned) mix with it and with W_q and W_k, so the score depends on m and n.",
    )


PANELS = {
    "none": "no encoding",
    "p.p": "$p_m \\cdot p_n$",
    "additive": "$(x + p_m)^T A\\,(x + p_n)$",
    "rope": "RoPE",
}


def toeplitz_data() -> Data:
    """Four matrices of scores, one row per cell."""
    p = measures.sinusoids(torch.arange(32), D)  # (N, C)
    matrices = (scores_of("none"), p @ p.T / D**0.5, scores_of("sinusoidal"), scores_of("rope"))
    rows = [
        (panel, m, n, score)
        for panel, matrix in zip(PANELS, matrices, strict=True)
        for m, row in enumerate(matrix.tolist())
        for n, score in enumerate(row)
    ]
    return columns(("panel", "m", "n", "score"), rows)


def toeplitz_draw(data: Data, canvas: Canvas) -> None:
    size = int(data["m"].max()) + 1
    for axes, (panel, title) in zip(canvas.subplots(2, 2).flat, PANELS.items(), strict=True):
        scores = data["score"][data["panel"] == panel].reshape(size, size)
        flat = float(np.ptp(scores)) < 1e-9
        middle = float(scores.mean())
        limits = {"vmin": middle - 1, "vmax": middle + 1} if flat else {}
        image = axes.imshow(scores, cmap="gray", **limits)
        axes.set_title(title)
        axes.set_xlabel("position n of the key (tokens)", color=COLOURS["k"])
        axes.set_ylabel("position m of the query", color=COLOURS["q"])
        canvas.colorbar(image, ax=axes, label="score", shrink=0.85)


def relative_data() -> Data:
    """Scores under five encodings for three positions of the query, against the distance."""
    rows = [
        (name, m, m - n, score)
        for name in encodings.ENCODINGS
        for m in (12, 20, 28)
        for n, score in enumerate(scores_of(name, 40)[m].tolist())
    ]
    return columns(("encoding", "m", "distance", "score"), rows)


AT = 6  # the distance of the vertical line
TITLES = {"none": "no encoding", "rope": "RoPE", "alibi": "ALiBi"}  # other encodings: their names


def relative_draw(data: Data, canvas: Canvas) -> None:
    *panels, last = canvas.subplots(2, 3).flat
    styles = [LINES[0], LINES[1], LINES[6]]  # colours that do not mean q, k or v
    for axes, name in zip(panels, dict.fromkeys(data["encoding"].tolist()), strict=True):
        axes.axvline(AT, **THIN)
        for number, (m, style) in enumerate(zip(dict.fromkeys(data["m"].tolist()), styles, strict=True)):
            chosen = (data["encoding"] == name) & (data["m"] == m)
            mark = {"marker": MARKERS[number], "markersize": 8 - 1.5 * number, "markevery": [m - AT]}
            axes.plot(data["distance"][chosen], data["score"][chosen], linewidth=1.4, label=f"m = {m}", **style, **mark)
        low, high = axes.get_ylim()
        if high - low < 0.5:
            axes.set_ylim((low + high) / 2 - 1, (low + high) / 2 + 1)
        axes.set_title(TITLES.get(name, name))
        axes.set(xlabel="m − n (tokens)", ylabel="score")
    last.axis("off")
    last.legend(*panels[0].get_legend_handles_labels(), loc="center", title="position of the query")


RELATIVE = (
    "Scores of one token at every position, for three positions m of the query. Marked: the key six tokens back. With"
    " RoPE and with ALiBi the three curves coincide; RoPE's differ before and after the query. With added codes each m"
    " has its own curve."
)
TOEPLITZ = (
    "Scores of one word at every position, each panel with its own scale. If a score depends only on the distance, each"
    " diagonal has one shade. Bottom left, where the codes are added to the word, the diagonals change. A = W_q^T W_k."
)
TOPIC = Topic(
    report,
    (
        Figure("relative", RELATIVE, relative_data, relative_draw, size=(6.0, 4.8)),
        Figure("toeplitz", TOEPLITZ, toeplitz_data, toeplitz_draw, size=(5.8, 5.0)),
    ),
)
