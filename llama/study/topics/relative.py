"""Relative position: under which encodings a score depends only on the distance between two tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ... import rope
from .. import encodings, forms, measures
from ..figure import LINES, Data, Figure
from ..report import Report, Table, above, below, equal, wrapped
from ..sketch import shades
from . import TOPICS
from .base import Topic, check_head_dim, check_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

FAR = 4096  # the largest common shift at which the library's float32 is tested


def drawn(head_dim: int) -> tuple[Tensor, ...]:
    """One random token x (C,), and wq, wk, wv (D, C) with C = D.

    The topic puts the same token at every position, so that scores differ only because of the positions.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(head_dim, generator=draw, dtype=torch.float64)  # (C,)
    return x, *torch.randn(3, head_dim, head_dim, generator=draw, dtype=torch.float64) / head_dim**0.5


def scores_of(name: str, head_dim: int, theta: float, context: int) -> Tensor:
    """Scores of one repeated token: (N, N), row m the position of the query, column n that of the key."""
    x, wq, wk, _ = drawn(head_dim)
    encoding = encodings.make(name, head_dim, head_dim, theta)
    return encodings.scores(encoding, x.expand(context, -1), wq, wk, torch.arange(context))


def report(head_dim: int = 64, theta: float = 10000.0, context: int = 32) -> Report:
    """Spread of the scores at equal distance under five encodings, and the terms of an additive encoding."""
    check_head_dim(head_dim, 2, 256)
    check_range("--rope-theta", theta, 2.0, 1e12)
    check_range("--context", context, 12, 256)
    x, wq, wk, wv = drawn(head_dim)
    positions = torch.arange(context)
    scores = {name: scores_of(name, head_dim, theta, context) for name in encodings.ENCODINGS}  # (N, N) each
    spread = {name: measures.diagonal_spread(s) for name, s in scores.items()}
    p = measures.sinusoids(positions, head_dim, theta)  # (N, C)
    terms = encodings.additive_terms(x.expand(context, -1), p, wq, wk)  # four of (N, N)
    plain = p @ p.T  # (N, N): p_m . p_n, without a matrix between them
    rotary = encodings.make("rope", head_dim, head_dim, theta)
    tokens = _tokens(head_dim, context)  # (N, C)
    here, there = (encodings.attend(rotary, tokens, wq, wk, wv, positions + by) for by in (0, 5))  # (N, D) each
    all_terms = sum(terms.values(), torch.zeros(()))  # (N, N)
    by_distance = _gap(scores["rope"], _by_distance(head_dim, theta, context))
    by_cosines = _gap(plain, _cosines(head_dim, theta, context))
    by_terms = _gap(scores["sinusoidal"], all_terms / head_dim**0.5)
    in_float32, rounding = _by_library(head_dim, theta), 2 * (FAR + 7) * 2.0**-24  # two angles of m inv_freq
    return Report(
        "relative",
        TOPICS["relative"],
        settings={"head_dim": head_dim, "theta": theta, "positions": context},
        says=wrapped(
            "The score of two tokens is the dot product of a query q = W_q x at position m and a key k = W_k x at"
            " position n. RoPE reads each pair of entries as an arrow. It rotates the arrow of pair i by m ω_i in q and"
            " by n ω_i in k. Lengths stay, and the angle between the two arrows changes by (m - n) ω_i. So the score,"
            " the sum of |q_i| |k_i| cos(angle) over the pairs, depends on m and n only through m - n."
        )
        + wrapped(
            "Below, the same token x is at every position, so only positions change a score. An additive encoding"
            " (sinusoidal, learned) adds a vector p_m to the token at position m. Its scores do not depend on m - n"
            " only, since W_q^T W_k stands between p_m and p_n, and both mix with the tokens. ALiBi subtracts a slope"
            " times |m - n| from the score. RoPE also distinguishes keys before and after the query; p_m . p_n and"
            " ALiBi do not."
        )
        + ("Derived in lesson 4, docs/learn/04-rope-from-one-demand.md.",),
        tables=(
            Table(
                "scores of query m and key n, divided by sqrt(D)",
                ("encoding", "spread at equal m - n", "spread over all", "score 5 back minus score 5 ahead"),
                [
                    (name, *(f"{number:.2g}" for number in (spread[name], float(s.max() - s.min()), _sides(s))))
                    for name, s in scores.items()
                ],
            ),
            Table(
                "terms of (W_q (x + p_m)) . (W_k (x + p_n)), not divided by sqrt(D)",
                ("term", "spread at equal m - n"),
                [
                    ("p_m . p_n, without a matrix", f"{measures.diagonal_spread(plain):.2g}"),
                    ("W_q p_m . W_k p_n", f"{measures.diagonal_spread(terms['position-position']):.2g}"),
                    ("all four", f"{measures.diagonal_spread(all_terms):.2g}"),
                ],
            ),
        ),
        checks=(
            equal("000-19", "rope: spread at equal distance", spread["rope"], 0.0, 1e-9),
            equal("003-20", "rope: from |q_i| |k_i| cos((m - n) ω_i + phase)", by_distance, 0.0, 1e-4),
            below("000-19", f"float32, shifts up to {FAR:,}: change / (|q| |k|)", in_float32, rounding),
            equal("000-35", "R_m^T R_n - R_(n-m), m = 7, n = 3", _group_law(head_dim, theta), 0.0, 1e-12),
            equal("001-08", "R_17 first: change of the score", _turned_before(head_dim, theta, "shift"), 0.0, 1e-9),
            above("001-08", "another orthogonal matrix first", _turned_before(head_dim, theta, "other"), 1e-3),
            equal("000-06", "all positions shifted by 5: change of the outputs", _gap(here, there), 0.0, 1e-9),
            equal("004-10", "p_m . p_n from the sum of cos((m - n) ω_i)", by_cosines, 0.0, 1e-9),
            equal("003-18", "sinusoidal: score from the four terms", by_terms, 0.0, 1e-9),
            equal("001-07", "alibi: spread at equal distance", spread["alibi"], 0.0, 1e-9),
            above("000-10", "sinusoidal: spread at equal distance", spread["sinusoidal"], 1e-3),
            above("000-10", "learned: spread at equal distance", spread["learned"], 1e-3),
            equal("004-10", "p_m . p_n: at 5 minus at -5", _sides(plain), 0.0, 1e-9),
            equal(
                "004-10", "rope: the same, from sines", _sides(scores["rope"]), _sides_by_sines(head_dim, theta), 1e-4
            ),
        ),
    )


def _tokens(head_dim: int, context: int) -> Tensor:
    """Different random tokens (N, C), so that outputs depend on the weights."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(context, head_dim, generator=draw, dtype=torch.float64)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _sides(scores: Tensor) -> float:
    """The score of a key 5 tokens before the query minus that of a key 5 tokens after it."""
    return float(scores[10, 5] - scores[5, 10])


def _parts(head_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies ω (D/2,), and the products q_i k_i^* / sqrt(D) of the pairs as complex numbers (D/2,), in numpy."""
    x, wq, wk, _ = (t.numpy() for t in drawn(head_dim))
    q, k = (w @ x for w in (wq, wk))  # (D,) each
    product = (q[0::2] + 1j * q[1::2]) * (k[0::2] - 1j * k[1::2])
    return theta ** (-np.arange(0, head_dim, 2) / head_dim), product / np.sqrt(head_dim)


def _by_distance(head_dim: int, theta: float, context: int) -> Tensor:
    """RoPE's scores (N, N) from the distances: |q_i| |k_i| cos((m - n) ω_i + phase of q_i - phase of k_i)."""
    speeds, product = _parts(head_dim, theta)
    distance = np.subtract.outer(np.arange(context), np.arange(context))  # (N, N): m - n
    return torch.from_numpy((np.abs(product) * np.cos(distance[..., None] * speeds + np.angle(product))).sum(-1))


def _sides_by_sines(head_dim: int, theta: float) -> float:
    """cos(5 ω + phase) - cos(5 ω - phase) = -2 sin(5 ω) sin(phase)."""
    speeds, product = _parts(head_dim, theta)
    return float((-2 * np.sin(5 * speeds) * product.imag).sum())


def _cosines(head_dim: int, theta: float, context: int) -> Tensor:
    distance = np.subtract.outer(np.arange(context), np.arange(context))  # (N, N)
    return torch.from_numpy(np.cos(distance[..., None] * theta ** (-np.arange(0, head_dim, 2) / head_dim)).sum(-1))


def _by_library(head_dim: int, theta: float) -> float:
    """Largest change of a score / (|q| |k|) when both positions shift, by the functions that the model uses."""
    x, wq, wk, _ = drawn(head_dim)
    q, k = ((w @ x).float().view(1, 1, 1, -1) for w in (wq, wk))  # (B, T, H, D)
    table = rope.precompute_freqs_cis(head_dim, FAR + 8, theta)  # (S, D/2)
    shifts = [0, 1, 10, 100, 1000, FAR]
    products = []
    for shift in shifts:
        turned_q, _ = rope.apply_rotary_emb(q, k, table[shift + 7 : shift + 8])
        _, turned_k = rope.apply_rotary_emb(q, k, table[shift + 2 : shift + 3])
        products.append(float((turned_q.double() * turned_k.double()).sum()))
    return (max(products) - min(products)) / float(q.norm() * k.norm())


def _matrix(position: int, head_dim: int, theta: float) -> Tensor:
    angles = position * measures.frequencies(head_dim, theta)  # (D/2,)
    return forms.rotation_matrix(angles.cos(), angles.sin())  # (D, D)


def _group_law(head_dim: int, theta: float) -> float:
    at_m, at_n, between = (_matrix(position, head_dim, theta) for position in (7, 3, 3 - 7))
    return _gap(at_m.T @ at_n, between)


def _turned_before(head_dim: int, theta: float, kind: str) -> float:
    """Change of a score of positions 7 and 3 when q and k are both multiplied by a matrix before RoPE.

    With "shift" the matrix is R_17: rotations in the same planes add up, so this is a common shift of the positions.
    With "other" it is another orthogonal matrix, which mixes planes; with D = 2, and so one plane, it is a reflection.
    """
    x, wq, wk, _ = drawn(head_dim)
    draw = torch.Generator().manual_seed(2)
    other, _ = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=draw, dtype=torch.float64))  # (D, D)
    if head_dim == 2:
        other = torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    before = _matrix(17, head_dim, theta) if kind == "shift" else other
    at_m, at_n = _matrix(7, head_dim, theta), _matrix(3, head_dim, theta)
    q, k = wq @ x, wk @ x  # (D,) each
    return abs(float((at_m @ before @ q) @ (at_n @ before @ k) - (at_m @ q) @ (at_n @ k)))


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
            sketch=lambda data: shades(data, "m", "n", "score", ("panel",), 16, 16),
        ),
    ),
)
