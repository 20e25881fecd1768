"""Scale: how far each pair turns in training, and by how much each scaling divides its frequency."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint import Own, with_model
from ..figure import Data, Figure, draw_lines
from ..measures import seen_arc, turns, wavelengths
from ..report import Report, Table, wrapped
from ..stretch import Stretch
from . import TOPICS
from .base import Topic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

KINDS = {"linear": "PI", "ntk": "NTK-aware", "dynamic": "dynamic", "yarn": "YaRN", "llama3": "llama3"}


def _stretched(stretch: Stretch, own: Own | None) -> dict[str, tuple[Tensor, float]]:
    """Frequencies (D/2,) and the factor of cos and sin, by method; the checkpoint's own scaling last."""
    found = {name: stretch.stretched(kind) for kind, name in KINDS.items()}
    if own is not None and own.kind != "default":
        found["this model"] = own.scaled()
    return found


@with_model
def report(
    head_dim: int = 128, theta: float = 10000.0, context: int = 2048, factor: float = 4.0, own: Own | None = None
) -> Report:
    """Wavelength, turns and divisors of a few pairs, and how many pairs meet new angles under each scaling."""
    stretch = Stretch(head_dim, theta, context, factor)
    plain, scaled = stretch.frequencies(), _stretched(stretch, own)
    waves, turned = wavelengths(plain), turns(plain, context)  # (D/2,) each
    pairs = Table(
        f"a turn in so many tokens; turns in {context:,} tokens; divisor of the frequency at {stretch.target:,} tokens",
        ("pair", "wavelength", "turns", *scaled),
        [
            (i, float(waves[i]), float(turned[i]), *(float(plain[i] / w[i]) for w, _ in scaled.values()))
            for i in stretch.some_pairs()
        ],
    )
    methods = Table(
        f"of {head_dim // 2} pairs, {int(stretch.slow().sum())} make less than a turn in training",
        ("method", "pairs that meet new angles", "cos, sin times"),
        [(name, stretch.unseen(w), times) for name, (w, times) in (("unscaled", (plain, 1.0)), *scaled.items())],
    )
    return Report(
        "scale",
        TOPICS["scale"],
        settings=stretch.settings,
        says=(
            *wrapped(own.says if own else ""),
            *wrapped(
                "A pair that finishes a turn in training has met every angle and needs no scaling. A slower pair meets"
                " new angles in a longer text, unless its frequency is divided by the full factor."
            ),
        ),
        tables=(pairs, methods),
    )


# ---------------------------------------------------------------------------------------------------- figure: divisor
@with_model
def divisor_data(
    head_dim: int = 128, theta: float = 10000.0, context: int = 2048, factor: float = 4.0, own: Own | None = None
) -> Data:
    """method, pair, divisor; slow: whether the pair, unscaled, stays below one turn within the trained context."""
    stretch = Stretch(head_dim, theta, context, factor)
    scaled = _stretched(stretch, own)
    return {
        "method": np.repeat(list(scaled), head_dim // 2),
        "pair": np.tile(np.arange(head_dim // 2), len(scaled)),
        "divisor": torch.cat([stretch.frequencies() / w for w, _ in scaled.values()]).numpy(),
        "slow": np.tile(stretch.slow().numpy(), len(scaled)),
    }


def divisor_draw(data: Data, canvas: Canvas) -> None:
    """Divisor over pair on a log axis, one line per method; pairs that need the full factor are shaded."""
    axes = canvas.subplots()
    count = int(data["pair"].max()) + 1
    methods = dict.fromkeys(data["method"].tolist())
    draw_lines(axes, data, "pair", "divisor", "method", methods, (max(count // 48, 1), max(count // 8, 1)))
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0.93, max(float(data["divisor"].max()) * 1.15, 2))
    axes.set_xlim(0, count - 1)
    if data["slow"].any():
        axes.axvspan(int(data["pair"][data["slow"]].min()), count - 1, color="#e8e8e8", zorder=0)
        axes.text(count - 1, 0.96, "less than a turn in training ", ha="right", va="bottom", fontsize=8)
    axes.set_xlabel("pair")
    axes.set_ylabel("divisor of the frequency (log scale)")
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.9))  # below the line of PI


# --------------------------------------------------------------------------------------------------- figure: seen_arc
ARCS = {"default": "unscaled", "linear": "PI", "ntk": "NTK-aware", "yarn": "YaRN"}


def seen_arc_data(head_dim: int = 128, theta: float = 10000.0, context: int = 2048, factor: float = 4.0) -> Data:
    """method, pair; seen and met: arc covered in training and at the target length, in radians, at most 2 pi."""
    stretch = Stretch(head_dim, theta, context, factor)
    pairs = stretch.some_pairs()
    seen = seen_arc(stretch.frequencies(), context)[pairs].numpy()  # training was without scaling
    # PI's last position is L - 1/s, past the last trained one by a fraction of a step: it is not counted
    met = [seen_arc(stretch.frequencies(kind), stretch.target + 1 - math.ceil(factor))[pairs].numpy() for kind in ARCS]
    return {
        "method": np.repeat(list(ARCS.values()), len(pairs)),
        "pair": np.tile(pairs, len(ARCS)),
        "seen": np.tile(seen, len(ARCS)),
        "met": np.concatenate(met),
    }


def seen_arc_draw(data: Data, canvas: Canvas) -> None:
    """One row per method, one circle per pair: the seen arc is filled, the met arc outlined, and new angles hatched."""
    methods, pairs = list(dict.fromkeys(data["method"])), list(dict.fromkeys(data["pair"]))
    grid = canvas.subplots(len(methods), len(pairs), squeeze=False)
    rows = zip(data["method"], data["pair"], data["seen"], data["met"], strict=True)
    for axes, (_, _, seen, met) in zip(grid.flat, rows, strict=True):
        _circle(axes, float(seen), float(met))
    for row, method in zip(grid, methods, strict=True):
        row[0].text(-1.6, 0, method, ha="right", va="center", fontsize=9)
    for axes, pair in zip(grid[0], pairs, strict=True):
        axes.set_title(f"pair {pair}")


def _circle(axes: Axes, seen: float, met: float) -> None:
    from matplotlib.patches import Wedge

    degrees, new = 180 / math.pi, met > seen * (1 + 1e-6)
    axes.add_patch(Wedge((0, 0), 1, 0, 360, facecolor="none", edgecolor="#999999", linewidth=0.6))
    axes.add_patch(Wedge((0, 0), 1, 0, seen * degrees, facecolor="#bbbbbb", edgecolor="none"))
    if new:
        red: dict[str, Any] = {"facecolor": "none", "edgecolor": "#b2182b", "hatch": "////", "lw": 0}
        axes.add_patch(Wedge((0, 0), 1, seen * degrees, met * degrees, **red))
    axes.add_patch(Wedge((0, 0), 1.18, 0, met * degrees, width=0.01, facecolor="none", edgecolor="#000000", lw=1.2))
    full = 2 * math.pi - 1e-9
    words = "all seen" if seen >= full else f"{seen:.2g},\nthen " + ("all" if met >= full else f"{met:.2g}")
    axes.text(0, -1.32, words, ha="center", va="top", fontsize=8, color="#b2182b" if new else "#000000")
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    axes.set_axis_off()


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "divisor",
            "The divisor of each frequency. The shaded pairs meet new angles and need the full factor. NTK-aware"
            " reaches it only at the last pair.",
            divisor_data,
            divisor_draw,
        ),
        Figure(
            "seen_arc",
            "Grey: angles that a pair met in training. Red: angles that it meets for the first time at four times the"
            " length. Below each circle: both arcs, in radians.",
            seen_arc_data,
            seen_arc_draw,
            size=(5.6, 5.2),
        ),
    ),
)
