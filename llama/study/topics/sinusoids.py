"""Sinusoids: the table of the first Transformer, read as hands of a clock and as digits, and its law of shifts.

The code of position t + k is M_k times the code of t, with the same matrix for every t.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .. import measures
from ..figure import MARKERS, THIN, Canvas, Data, Figure, columns, pair_colour
from ..report import Report, Table
from .base import Topic, check_head_dim, check_range

POSITIONS = 200  # rows of the tables that `misfit` compares


def shift_matrix(dim: int, base: float, k: int) -> Tensor:
    """The matrix M_k with code(t + k) = M_k code(t) for every t: (d, d).

    A pair is (sin, cos), so it turns clockwise: the blocks are RoPE's for the negated angle,
    [[cos, sin], [-sin, cos]] of k w_i.
    """
    angles = -k * base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # (d/2,)
    return measures.rotated(torch.eye(dim), angles).T  # column by column: the rotated unit vectors


def triangles(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """A table of triangle waves with the periods of the sinusoidal table: (N, d)."""
    return torch.asin(measures.sinusoids(positions, dim, base)) * 2 / math.pi


def misfit(table: Tensor, k: int) -> float:
    """Largest error of the best linear map from rows t to rows t + k, by least squares.

    Directions with singular values below 1e-10 of the largest are ignored: in float64 they are rounding errors.
    """
    now, later = table[:-k], table[k:]  # (N - k, d) each
    best = torch.linalg.lstsq(now, later, rcond=1e-10, driver="gelsd").solution  # (d, d)
    return float((later - now @ best).abs().max())


def report(head_dim: int = 128, theta: float = 10000.0) -> Report:
    """Frequency and wavelength of some pairs, and the misfit of three tables."""
    check_head_dim(head_dim, 4, 1024)
    check_range("--rope-theta", theta, 2.0, 1e12)
    inv_freq = measures.frequencies(head_dim, theta)  # (d/2,)
    waves = measures.wavelengths(inv_freq)  # (d/2,)
    pairs = sorted({0, 1, head_dim // 8, head_dim // 4, head_dim // 2 - 1})
    makers = {"sines": measures.sinusoids, "triangle waves": triangles}
    tables = {name: make(torch.arange(POSITIONS), 8, theta) for name, make in makers.items()}  # (N, 8) each
    return Report(
        (
            Table(
                f"hands: {head_dim // 2} digits of radix {theta ** (2 / head_dim):.6g}",
                ("pair", "frequency (radians a position)", "positions for a turn"),
                [(i, float(inv_freq[i]), float(waves[i])) for i in pairs],
            ),
            Table(
                "largest error of the best linear map from t to t + 3 (width 8, entries from -1 to 1)",
                ("table", "error"),
                [(name, f"{misfit(table, 3):.2g}") for name, table in tables.items()],
            ),
        ),
        "A pair of entries is a hand of a clock. Each hand needs beta times as long for a turn as the one before, so"
        " the hands are digits of radix beta = θ^(2/d). A shift by k positions is one linear map, a rotation of each"
        " hand. Periodic columns are not enough for this: triangle waves have no such map.",
        {"width d": head_dim, "theta": theta},
    )


def hands_data() -> Data:
    """Tips of three hands (d = 6) at positions 0 .. 12: x is the sine, y the cosine."""
    table, speeds = measures.sinusoids(torch.arange(13), 6), measures.frequencies(6)
    rows = [(i, t, *table[t, 2 * i : 2 * i + 2].tolist(), float(speeds[i])) for i in range(3) for t in range(13)]
    return columns(("pair", "position", "sine", "cosine", "speed"), rows)


def hands_draw(data: Data, canvas: Canvas) -> None:
    circle = np.linspace(0, 2 * np.pi, 200)
    for pair, axes in enumerate(canvas.subplots(1, 3, sharey=True)):
        x, y, position, speed = (data[key][data["pair"] == pair] for key in ("sine", "cosine", "position", "speed"))
        axes.plot(np.sin(circle), np.cos(circle), **THIN)
        colour = pair_colour(pair, 3)
        axes.plot(x, y, marker=MARKERS[pair], markersize=3.5, color=colour, linestyle="none")
        axes.plot([0, x[-1]], [0, y[-1]], color=colour, linewidth=1.5 + pair)
        # Labels must not overlap: one at every position, or only at the first and the last.
        if np.hypot(x[1] - x[0], y[1] - y[0]) > 0.2:
            for at, across, up in zip(position, x, y, strict=True):
                axes.text(1.21 * across, 1.21 * up, str(at), ha="center", va="center")
        else:
            axes.text(1.1 * x[0] - 0.06, 1.1 * y[0], "0", ha="right", va="center")
            axes.text(1.1 * x[-1] + 0.06, 1.1 * y[-1], str(position[-1]), ha="left", va="center")
        axes.set(aspect="equal", xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), xlabel="sine entry", xticks=[], yticks=[])
        axes.set_title(f"pair {pair}\n{speed[0]:.4f} rad per position")
        if pair == 0:
            axes.set_ylabel("cosine entry")


def digits_data() -> Data:
    """Numbers 0 .. 15: four bits, and the sines of the four pairs of a table of radix 2 (base 16, d = 8)."""
    sines = measures.sinusoids(torch.arange(16), 8, 16.0)[:, 0::2]  # (N, 4)
    rows = [("bits", n, i, float(n >> i & 1), 2.0 ** (i + 1)) for n in range(16) for i in range(4)]
    rows += [("sines", n, i, float(sines[n, i]), 2 * math.pi * 2.0**i) for n in range(16) for i in range(4)]
    return columns(("panel", "number", "digit", "value", "period"), rows)


def digits_draw(data: Data, canvas: Canvas) -> None:
    for axes, panel, least in zip(canvas.subplots(1, 2, sharey=True), ("bits", "sines"), (0, -1), strict=True):
        chosen = data["panel"] == panel
        values = data["value"][chosen].reshape(16, 4)
        axes.imshow(values, cmap="gray", vmin=least, vmax=1, aspect="auto", interpolation="nearest")
        for row, column in np.ndindex(16, 4):
            value = values[row, column]
            shown = f"{value:.0f}" if panel == "bits" else f"{value:+.2f}"
            dark = (value - least) / (1 - least) < 0.53
            axes.text(column, row, shown, ha="center", va="center", color="white" if dark else "black", fontsize=8)
        axes.set_xticks(range(4), [f"{i}\n{period:.4g}" for i, period in enumerate(data["period"][chosen][:4])])
        axes.set_yticks(range(16))
        axes.set_title({"bits": "bits of a number", "sines": "sines of a position"}[panel])
        axes.set_xlabel(("bit" if panel == "bits" else "pair") + ", and its period")
        if panel == "bits":
            axes.set_ylabel("number, or position")


HANDS = (
    "The code of a position, here six numbers, is three hands of a clock. Dots are their tips at positions 0 to 12; all"
    " start at twelve o'clock and move clockwise."
)
DIGITS = (
    "Left: the bits of 0 to 15, the lowest bit first. Right: the sines of a table with base θ = 16 and C = 8. In both,"
    " each column changes half as fast as the one before it."
)
TOPIC = Topic(
    report,
    (
        Figure("hands", HANDS, hands_data, hands_draw, size=(5.6, 2.6)),
        Figure("digits", DIGITS, digits_data, digits_draw, size=(5.6, 4.6)),
    ),
)
