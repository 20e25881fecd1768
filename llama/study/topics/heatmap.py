"""The sinusoidal table as a picture and as hands of a clock, compared with a published table that has two bugs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ... import rope
from .. import measures
from ..figure import LINES, MARKERS, Data, Figure
from ..report import Report, Table, above, equal, wrapped
from ..sketch import shades
from . import TOPICS
from .base import Topic, check_head_dim, check_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def printed_table(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """A published table with two mistakes: (N, d).

    Its loop variable i counts columns 0, 2, 4, ... and its exponent doubles i again; the cosine of the same
    pair has another exponent. So the sine in column i has base^(-2i/d) and its cosine base^(-2(i + 1)/d).
    """
    columns = torch.arange(dim, dtype=torch.float64)
    angles = positions.double()[:, None] * base ** (-2 * columns / dim)  # (N, d)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos())


def report(head_dim: int = 64, theta: float = 10000.0, context: int = 128) -> Report:
    """Rows, columns and frequencies of the table, each checked with another formula; and a table with two bugs."""
    check_head_dim(head_dim, 4, 512)
    check_range("--rope-theta", theta, 2.0, 1e12)
    check_range("--context", context, 2, 1024)
    inv_freq = measures.frequencies(head_dim, theta)  # (d/2,)
    positions = torch.arange(context)
    table, printed = (make(positions, head_dim, theta) for make in (measures.sinusoids, printed_table))  # (N, d) each
    truth = _by_numpy(head_dim, theta, context)
    lengths = table.square().sum(-1) / (head_dim / 2)  # (N,)
    hand = torch.complex(table[:2, 0], table[:2, 1])  # (2,): sin + j cos at positions 0 and 1
    sines, cosines = truth[:, 0::4], truth[:, 3::4]  # (N, d/4) each: columns of pairs 0, 2, 4, ..; of 1, 3, 5, ..
    wrong_sines, wrong_cosines = printed[:, 0::2][:, : sines.shape[1]], printed[:, 1::2][:, : cosines.shape[1]]
    squares = printed.square().unflatten(-1, (-1, 2)).sum(-1)  # (N, d/2): sin^2 + cos^2
    low, high = _printed_squares(head_dim, theta, context)
    falls, fall = (inv_freq[1:] / inv_freq[:-1]).log(), -2 * math.log(theta) / head_dim
    waves = measures.wavelengths(inv_freq)  # (d/2,)
    longest = float(waves[-1]) / (2 * math.pi * theta)
    nearest = _nearest_by_sines(head_dim, theta, context)
    pairs = sorted({0, 1, head_dim // 4, head_dim // 2 - 1})
    return Report(
        "heatmap",
        TOPICS["heatmap"],
        settings={"width d": head_dim, "theta": theta, "positions": context},
        says=wrapped(
            "Each row is a position, and each two columns are a pair: sine and cosine of position times the pair's"
            " speed. The columns on the left change quickly from row to row, those on the right hardly at all: each"
            " pair is a hand with its own speed, the frequency ω_i. A published table doubles the"
            " exponents of the sines and uses other exponents for the cosines (exercises step and cosine)."
        ),
        tables=(
            Table(
                "frequencies ω_i in radians a position",
                ("pair", "columns", "ω_i", "wavelength", "published with mistakes: sine", "cosine"),
                [
                    (
                        i,
                        f"{2 * i}, {2 * i + 1}",
                        float(inv_freq[i]),
                        float(waves[i]),
                        theta ** (-4 * i / head_dim),
                        theta ** (-(4 * i + 2) / head_dim),
                    )
                    for i in pairs
                ],
            ),
        ),
        checks=(
            equal("000-15", "largest difference from the formula in numpy", _gap(table, truth), 0.0, 1e-9),
            equal("004-01", "frequencies / RoPE's, furthest from 1", _speeds(table, inv_freq), 1.0, 1e-6),
            equal("004-05", "squared length of a row / (d/2), furthest from 1", _gap(lengths, 1.0), 0.0, 1e-12),
            equal(
                "004-05", "pair 0 as sin + j cos: angle of one step", float((hand[1] / hand[0]).angle()), -1.0, 1e-12
            ),
            equal("004-14", "log of ω_(i+1) / ω_i, largest", float(falls.max()), fall, 1e-5),
            equal("004-14", "log of ω_(i+1) / ω_i, smallest", float(falls.min()), fall, 1e-5),
            above("004-14", "lowest frequency times θ", float(inv_freq[-1]) * theta, 1.0),
            equal("003-12", "longest wavelength / (2 pi θ)", longest, theta ** (-2 / head_dim), 1e-5),
            equal("000-09", "distance of the two nearest rows", _nearest(table), nearest, 1e-6),
            equal("002-04", "published sine j minus correct sine 2j", _gap(wrong_sines, sines), 0.0, 1e-9),
            equal("002-04", "published cosine j minus correct cosine 2j + 1", _gap(wrong_cosines, cosines), 0.0, 1e-9),
            equal("002-04", "published sin^2 + cos^2 of a pair, smallest", float(squares.min()), low, 1e-9),
            equal("002-04", "published sin^2 + cos^2 of a pair, largest", float(squares.max()), high, 1e-9),
        ),
    )


def _by_numpy(dim: int, theta: float, context: int) -> Tensor:
    """The table (N, d) of position / theta^(2i/d), as in arXiv:1706.03762, from complex exponentials."""
    turned = np.exp(1j * np.arange(context)[:, None] / theta ** (np.arange(0, dim, 2) / dim))  # (N, d/2)
    return torch.from_numpy(np.stack((turned.imag, turned.real), -1).reshape(context, dim))


def _gap(a: Tensor, b: Tensor | float) -> float:
    return float((a - b).abs().max())


def _speeds(table: Tensor, inv_freq: Tensor) -> float:
    """Angle from row 0 to row 1 / RoPE's angle: the ratio furthest from 1."""
    angle = torch.atan2(table[1, 0::2], table[1, 1::2])  # (d/2,): row 0 points at (0, 1)
    ratio = angle / inv_freq
    return float(ratio[(ratio - 1).abs().argmax()])


def _nearest(table: Tensor) -> float:
    """Distance between the two rows that are nearest to each other."""
    between = torch.cdist(table, table, compute_mode="donot_use_mm_for_euclid_dist")  # (N, N)
    return float(between.fill_diagonal_(torch.inf).min())


def _nearest_by_sines(dim: int, theta: float, context: int) -> float:
    """The same from the lengths of chords: rows k apart differ by 2 sin(k w_i / 2) in pair i."""
    k = np.arange(1, context)[:, None]
    return float(2 * np.sqrt((np.sin(k * theta ** (-np.arange(0, dim, 2) / dim) / 2) ** 2).sum(1)).min())


def _printed_squares(dim: int, theta: float, context: int) -> tuple[float, float]:
    """Smallest and largest sin^2 a + cos^2 b = 1 + (cos 2b - cos 2a) / 2 for the angles of `printed_table`."""
    a, b = (np.outer(np.arange(context), theta ** (-np.arange(first, 2 * dim, 4) / dim)) for first in (0, 2))
    squares = 1 + (np.cos(2 * b) - np.cos(2 * a)) / 2
    return float(squares.min()), float(squares.max())


def heatmap_data(head_dim: int = 64, theta: float = 10000.0, context: int = 64) -> Data:
    """Both tables, one row per cell."""
    position, column = np.meshgrid(np.arange(context), np.arange(head_dim), indexing="ij")
    tables = [make(torch.arange(context), head_dim, theta) for make in (measures.sinusoids, printed_table)]
    return {
        "table": np.repeat(["right", "wrong"], position.size),
        "position": np.tile(position.ravel(), 2),
        "column": np.tile(column.ravel(), 2),
        "value": np.concatenate([table.numpy().ravel() for table in tables]),
    }


def heatmap_draw(data: Data, canvas: Canvas) -> None:
    panels = canvas.subplots(1, 2, sharey=True)
    shape = int(data["position"].max()) + 1, int(data["column"].max()) + 1
    titles = {"right": "the correct table", "wrong": "a table with two bugs"}
    images = []
    for axes, (table, title) in zip(panels, titles.items(), strict=True):
        values = data["value"][data["table"] == table].reshape(shape)  # (N, d)
        images.append(axes.imshow(values, cmap="gray", vmin=-1, vmax=1, aspect="auto", interpolation="nearest"))
        axes.set_title(title)
        axes.set_xlabel("column of the table (entry of the vector)")
    panels[0].set_ylabel("position (tokens)")
    canvas.colorbar(images[0], ax=panels, label="entry")


def hands_data(theta: float = 10000.0) -> Data:
    """Tips of three hands (d = 6) at positions 0 .. 12: x is the sine, y the cosine."""
    position, pair = np.meshgrid(np.arange(13), np.arange(3), indexing="ij")
    table = measures.sinusoids(torch.arange(13), 6, theta).numpy()  # (N, d)
    return {
        "pair": pair.ravel(),
        "position": position.ravel(),
        "sine": table[:, 0::2].ravel(),
        "cosine": table[:, 1::2].ravel(),
        "speed": measures.frequencies(6, theta).numpy()[pair].ravel(),
    }


def hands_draw(data: Data, canvas: Canvas) -> None:
    circle = np.linspace(0, 2 * np.pi, 200)
    for pair, axes in enumerate(canvas.subplots(1, 3, sharey=True)):
        chosen = data["pair"] == pair
        x, y, position = (data[key][chosen] for key in ("sine", "cosine", "position"))
        axes.plot(np.sin(circle), np.cos(circle), color="#999999", linewidth=0.8)
        axes.plot(x, y, marker=MARKERS[pair], markersize=3.5, color=LINES[pair]["color"], linestyle="none")
        axes.plot([0, x[-1]], [0, y[-1]], **LINES[pair])
        # Labels must not overlap: one at every position, or only at the first and the last.
        apart = np.hypot(x[1] - x[0], y[1] - y[0]) > 0.2
        if apart:
            for at, across, up in zip(position, x, y, strict=True):
                axes.text(1.17 * across, 1.17 * up, str(at), ha="center", va="center")
        else:
            axes.text(1.1 * x[0] - 0.06, 1.1 * y[0], "0", ha="right", va="center")
            axes.text(1.1 * x[-1] + 0.06, 1.1 * y[-1], str(position[-1]), ha="left", va="center")
        axes.set_aspect("equal")
        axes.set_xlim(-1.4, 1.4)
        axes.set_ylim(-1.4, 1.4)
        axes.set_title(f"pair {pair}: {data['speed'][chosen][0]:.4f} rad a position")
        axes.set_xlabel("sine entry")
        if pair == 0:
            axes.set_ylabel("cosine entry")


def euler_data() -> Data:
    """e^(it) for t from 0 to 4 pi, by the library's freqs_cis."""
    t = torch.linspace(0, 4 * math.pi, 241)
    cis = rope.freqs_cis_at(t, torch.ones(1))[:, 0]  # (N,) complex64
    return {"t": t.double().numpy(), "real": cis.real.double().numpy(), "imaginary": cis.imag.double().numpy()}


def euler_draw(data: Data, canvas: Canvas) -> None:
    t, real, imaginary = data["t"], data["real"], data["imaginary"]
    turn = t <= 2 * np.pi + 1e-6
    in_space: dict[Any, dict[str, Any]] = {"helix": {"projection": "3d"}}
    panels: Any = canvas.subplot_mosaic([["circle", "helix"]], width_ratios=(1, 1.5), per_subplot_kw=in_space)
    axes, space = panels["circle"], panels["helix"]
    axes.plot(real[turn], imaginary[turn], **LINES[0])
    at = int(np.abs(t - np.pi / 3).argmin())
    axes.annotate("", (real[at], imaginary[at]), (0, 0), arrowprops={"arrowstyle": "->", "linewidth": 1.5})
    axes.plot([real[at], real[at]], [0, imaginary[at]], **LINES[1])
    axes.plot([0, real[at]], [0, 0], **LINES[2])
    axes.text(real[at] + 0.05, imaginary[at] / 2, "sin t", va="center")
    axes.text(real[at] / 2, -0.12, "cos t", ha="center", va="center")
    axes.text(1.08 * real[at], 1.1 * imaginary[at], "$e^{it}$, t = π/3", va="center")
    axes.set_aspect("equal")
    axes.set_xlim(-1.25, 1.6)
    axes.set_ylim(-1.25, 1.4)
    axes.set_xlabel("real part")
    axes.set_ylabel("imaginary part")
    axes.set_title("complex plane: a circle")
    space.plot(t, real, imaginary, **LINES[0])
    space.plot(t, real, np.full_like(t, -1.5), **LINES[2])
    space.plot(t, np.full_like(t, 1.5), imaginary, **LINES[1])
    space.set_ylim(-1.5, 1.5)
    space.set_zlim(-1.5, 1.5)
    space.set_xticks(np.pi * np.arange(5), ["0", "π", "2π", "3π", "4π"])
    space.set_yticks([-1, 0, 1])
    space.set_zticks([-1, 0, 1])
    space.set_xlabel("t (radians)", labelpad=10)
    space.set_ylabel("real part")
    space.set_zlabel("imaginary part")
    space.set_box_aspect((2.2, 1, 1), zoom=0.86)
    space.view_init(elev=20, azim=-55)
    space.set_title("over t: a helix", y=0.88)


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "heatmap",
            "Each row is a position. Left: the correct table, with fast columns on the left and nearly constant ones on"
            " the right. Right: a published table with two bugs. Its frequencies fall twice as fast, so that most"
            " columns hardly change, and sine and cosine of a pair have different frequencies.",
            heatmap_data,
            heatmap_draw,
            size=(7.5, 4.2),
            sketch=lambda data: shades(data, "position", "column", "value", ("table",)),
        ),
        Figure(
            "hands",
            "Six entries are three hands; their tips at positions 0 to 12. With the sine on the x axis and the cosine"
            " on the y axis, a hand starts at twelve o'clock and moves clockwise. The first makes almost two turns, the"
            " second moves by half a radian, the third hardly moves.",
            hands_data,
            hands_draw,
            size=(7.5, 3.5),
        ),
        Figure(
            "euler",
            "Euler's formula, e^(it) = cos t + i sin t. Left: in the complex plane it is a point on the unit circle."
            " Right: over t it is a helix, whose projections are the cosine and the sine.",
            euler_data,
            euler_draw,
            size=(7.5, 3.9),
        ),
    ),
)
