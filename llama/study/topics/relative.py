"""Relative position: under which encodings a score depends only on the distance between two tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .. import encodings, measures
from ..figure import LINES, Data, Figure
from ..report import Report, Table, wrapped
from . import TOPICS
from .base import Topic, check_head_dim, check_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def scores_of(name: str, head_dim: int, theta: float, context: int) -> Tensor:
    """Scores of one random token at every position: (N, N), row m the query, column n the key.

    The token is the same everywhere, so that scores differ only because of the positions.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(head_dim, generator=draw, dtype=torch.float64)  # (C,) with C = D
    wq, wk = torch.randn(2, head_dim, head_dim, generator=draw, dtype=torch.float64) / head_dim**0.5  # (D, C) each
    encoding = encodings.make(name, head_dim, head_dim, theta)
    return encodings.scores(encoding, x.expand(context, -1), wq, wk, torch.arange(context))


def report(head_dim: int = 64, theta: float = 10000.0, context: int = 32) -> Report:
    """Spread of the scores at equal distance under five encodings."""
    check_head_dim(head_dim, 2, 256)
    check_range("--rope-theta", theta, 2.0, 1e12)
    check_range("--context", context, 12, 256)
    rows = []
    for name in encodings.ENCODINGS:
        scores = scores_of(name, head_dim, theta, context)
        spreads = measures.diagonal_spread(scores), float(scores.max() - scores.min())
        rows.append((name, *(f"{number:.2g}" for number in (*spreads, float(scores[10, 5] - scores[5, 10])))))
    return Report(
        "relative",
        TOPICS["relative"],
        settings={"head_dim": head_dim, "theta": theta, "positions": context},
        says=wrapped(
            "RoPE rotates pair i of a query at position m by m ω_i and of a key at position n by n ω_i. The angle"
            " between them changes by (m - n) ω_i, so the score depends on m - n only. Vectors added to the token"
            " (sinusoidal, learned) mix with it and with W_q and W_k, so the score depends on m and n."
        ),
        tables=(
            Table(
                "scores of one token at every position, divided by sqrt(D)",
                ("encoding", "spread at equal m - n", "spread over all", "score 5 back minus score 5 ahead"),
                rows,
            ),
        ),
    )


PANELS = {
    "none": "no encoding",
    "p.p": "$p_m \\cdot p_n$",
    "additive": "$(x + p_m)^T A\\,(x + p_n)$",
    "rope": "RoPE",
}


def toeplitz_data(head_dim: int = 64, theta: float = 10000.0, context: int = 32) -> Data:
    """Four matrices of scores, one row per cell."""
    p = measures.sinusoids(torch.arange(context), head_dim, theta)  # (N, C)
    matrices = (
        scores_of("none", head_dim, theta, context),
        p @ p.T / head_dim**0.5,
        scores_of("sinusoidal", head_dim, theta, context),
        scores_of("rope", head_dim, theta, context),
    )
    m, n = np.meshgrid(np.arange(context), np.arange(context), indexing="ij")
    return {
        "panel": np.repeat(list(PANELS), m.size),
        "m": np.tile(m.ravel(), 4),
        "n": np.tile(n.ravel(), 4),
        "score": np.concatenate([matrix.numpy().ravel() for matrix in matrices]),
    }


def toeplitz_draw(data: Data, canvas: Canvas) -> None:
    size = int(data["m"].max()) + 1
    for axes, (panel, title) in zip(canvas.subplots(2, 2).flat, PANELS.items(), strict=True):
        scores = data["score"][data["panel"] == panel].reshape(size, size)
        flat = float(np.ptp(scores)) < 1e-9
        middle = float(scores.mean())
        limits = {"vmin": middle - 1, "vmax": middle + 1} if flat else {}
        image = axes.imshow(scores, cmap="gray", **limits)
        axes.set_title(title)
        axes.set_xlabel("position n of the key (tokens)")
        axes.set_ylabel("position m of the query")
        canvas.colorbar(image, ax=axes, label="score", shrink=0.85)


def relative_data(head_dim: int = 64, theta: float = 10000.0) -> Data:
    """Scores under five encodings for three positions of the query, against the distance."""
    context = 40
    m, n = np.meshgrid((2, 18, 34), np.arange(context), indexing="ij")
    names = list(encodings.ENCODINGS)
    return {
        "encoding": np.repeat(names, m.size),
        "m": np.tile(m.ravel(), len(names)),
        "distance": np.tile((m - n).ravel(), len(names)),
        "score": np.concatenate(
            [scores_of(name, head_dim, theta, context).numpy()[m.ravel(), n.ravel()] for name in names]
        ),
    }


TITLES = {"none": "no encoding", "rope": "RoPE", "alibi": "ALiBi"}  # of the others: their names


def relative_draw(data: Data, canvas: Canvas) -> None:
    *panels, last = canvas.subplots(2, 3).flat
    queries = sorted(set(data["m"].tolist()))
    for axes, name in zip(panels, dict.fromkeys(data["encoding"].tolist()), strict=True):
        for m, style in zip(queries, LINES, strict=False):
            chosen = (data["encoding"] == name) & (data["m"] == m)
            axes.plot(data["distance"][chosen], data["score"][chosen], linewidth=1.4, label=f"m = {m}", **style)
        low, high = axes.get_ylim()
        if high - low < 0.5:
            axes.set_ylim((low + high) / 2 - 1, (low + high) / 2 + 1)
        axes.set_title(TITLES.get(name, name))
        axes.set_xlabel("m - n (tokens)")
        axes.set_ylabel("score")
    last.axis("off")
    last.legend(*panels[0].get_legend_handles_labels(), loc="center", title="position of the query")


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "relative",
            "Scores of one token at every position, for three positions m of the query. With RoPE and with ALiBi the"
            " three curves coincide; RoPE's differ before and after the query. With added codes each m has its own"
            " curve.",
            relative_data,
            relative_draw,
            size=(6.0, 4.8),
        ),
        Figure(
            "toeplitz",
            "Scores of one token at every position, divided by the square root of D. If a score depends only on the"
            " distance, each diagonal has one value. This holds without an encoding, for the plain product of two"
            " sinusoidal codes, and for RoPE. In a layer that adds the codes, A = W_q^T W_k stands between them and"
            " the token is mixed in: diagonals are not constant.",
            toeplitz_data,
            toeplitz_draw,
            size=(5.8, 5.0),
        ),
    ),
)
