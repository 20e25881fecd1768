"""Wavelengths: the number of tokens in which each pair makes a full turn, and which pairs never finish one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import formulas
from ..checkpoint import Own, with_model
from ..figure import Data, Figure, draw_lines
from ..measures import frequencies, seen_arc, turns, wavelengths
from ..report import Report, Table, below, equal, wrapped
from ..sketch import curves
from ..stretch import Stretch
from . import TOPICS
from .base import Topic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# model -> base and trained context; all three have heads of 128 entries
MODELS = {"LLaMA": (1e4, 2048), "Llama 2": (1e4, 4096), "Llama 3": (5e5, 8192)}
METHODS = {"default": "unscaled", "linear": "PI", "ntk": "NTK-aware", "yarn": "YaRN", "llama3": "llama3"}


@with_model
def report(
    head_dim: int = 128, theta: float = 10000.0, context: int = 2048, factor: float = 4.0, own: Own | None = None
) -> Report:
    """Wavelength, turns and seen arc of a few pairs, unscaled and under four scalings."""
    stretch = Stretch(head_dim, theta, context, factor)
    pinned = stretch == Stretch()
    inv_freq = stretch.frequencies()  # (D/2,)
    waves, turned = wavelengths(inv_freq), turns(inv_freq, context)  # (D/2,) each
    arc = seen_arc(inv_freq, context)  # (D/2,)
    by_method = {name: wavelengths(stretch.frequencies(kind)) for kind, name in METHODS.items()} | _of(own)
    scaled = list(by_method)[1:]

    pairs = Table(
        f"wavelength in tokens; turns and seen arc (radians) in {context:,} tokens",
        ("pair", "unscaled", "turns", "seen arc", *scaled),
        [
            (i, float(waves[i]), float(turned[i]), float(arc[i]), *(float(by_method[name][i]) for name in scaled))
            for i in stretch.some_pairs()
        ],
    )
    models = Table(
        "three models, 64 pairs each",
        ("model", "base", "context", "pairs below one turn", "longest wavelength"),
        [
            (name, base, length, _short(base, length), float(wavelengths(frequencies(128, base)).max()))
            for name, (base, length) in MODELS.items()
        ],
    )
    ratios = inv_freq[1:] / inv_freq[:-1]  # (D/2 - 1,)
    spread = float(ratios.max() - ratios.min())
    last = 2 * math.pi * theta ** ((head_dim - 2) / head_dim)
    ratio = theta ** (-2 / head_dim)
    # a pair stays below one turn if 2 pi θ^(2i/D) > L, that is i > D ln(L / 2 pi) / (2 ln theta)
    finish = min(head_dim // 2, 1 + math.floor(head_dim * math.log(context / (2 * math.pi)) / (2 * math.log(theta))))
    unseen = {kind: formulas.unseen(kind, head_dim, theta, context, factor) for kind in METHODS}
    worst = max(
        float(
            np.abs(stretch.divisors(kind).numpy() / formulas.divisors(kind, head_dim, theta, context, factor) - 1).max()
        )
        for kind in METHODS
    )
    return Report(
        "wavelengths",
        TOPICS["wavelengths"],
        settings=stretch.settings,
        says=(*wrapped(own.says if own else ""), *wrapped(
            "Pair i makes a full turn in 2 pi θ^(2i/D) tokens: the wavelengths grow by a constant ratio from pair"
            " to pair. A pair that finishes a turn within the trained context has met every angle. Slower pairs meet"
            " new angles in a longer text, and only these need a scaling. A low frequency is a LARGE i."
        )),
        tables=(pairs, models),
        checks=(
            equal("003-12", "wavelength of pair 0 is 2 pi tokens", float(waves[0]), 2 * math.pi, 1e-6),
            equal("001-25", "that of the last pair", float(waves[-1]), 54410.0 if pinned else last, 1e-5 * last),
            equal("003-12", "the same at D = 512, base 1e4", float(wavelengths(frequencies(512))[-1]), 60611.5, 0.1),
            equal("004-14", "ratio of successive frequencies", float(ratios[0]), 0.866 if pinned else ratio, 5e-5),
            below("004-14", "largest minus smallest such ratio", spread, 1e-6),
            equal("004-14", "lowest ω_i at D = 2, 8, 512", _lowest(2, 8, 512), "1, 0.001, 0.000104"),
            equal("001-16", "pairs below one turn in the three models", _column(models, 3), "23, 18, 29"),
            equal("001-19", "pairs that finish a turn", int((turned >= 1).sum()), 41 if pinned else finish),
            equal("001-19", "turns of pair 0", float(turned[0]), 326.0 if pinned else context / (2 * math.pi), 0.1),
            equal(
                "001-19",
                f"pairs that meet new angles at {stretch.target:,} tokens, unscaled",
                stretch.unseen("default"),
                23 if pinned else unseen["default"],
            ),
            equal(
                "001-23",
                "the same under PI, NTK-aware, YaRN, llama3",
                ", ".join(str(stretch.unseen(kind)) for kind in list(METHODS)[1:]),
                "0, 22, 0, 0" if pinned else ", ".join(str(unseen[kind]) for kind in list(METHODS)[1:]),
            ),
            below("002-15", "all wavelengths, relative error against numpy", worst, 1e-6),
        ),
    )  # fmt: skip


def _of(own: Own | None) -> dict[str, torch.Tensor]:
    """The wavelengths of a checkpoint that has a scaling: name -> (D/2,)."""
    return {} if own is None or own.kind == "default" else {"this model": wavelengths(own.scaled()[0])}


def _short(base: float, length: int) -> int:
    return int((turns(frequencies(128, base), length) < 1).sum())


def _column(table: Table, number: int) -> str:
    return ", ".join(str(row[number]) for row in table.rows)


def _lowest(*dims: int) -> str:
    return ", ".join(f"{float(frequencies(dim).min()):.3g}" for dim in dims)


# ------------------------------------------------------------------------------------------------ figure: wavelengths
@with_model
def wavelengths_data(
    head_dim: int = 128, theta: float = 10000.0, context: int = 2048, factor: float = 4.0, own: Own | None = None
) -> Data:
    """method, pair, wavelength (tokens); trained and target length (tokens), the same in every row."""
    stretch = Stretch(head_dim, theta, context, factor)
    waves = {name: wavelengths(stretch.frequencies(kind)) for kind, name in METHODS.items()} | _of(own)
    count = head_dim // 2 * len(waves)
    return {
        "method": np.repeat(list(waves), head_dim // 2),
        "pair": np.tile(np.arange(head_dim // 2), len(waves)),
        "wavelength": torch.cat(list(waves.values())).numpy(),
        "trained": np.full(count, context),
        "target": np.full(count, stretch.target),
    }


def wavelengths_draw(data: Data, canvas: Canvas) -> None:
    """Wavelength over pair, one line per method; the two lengths as horizontal lines."""
    axes = canvas.subplots()
    last = int(data["pair"].max())
    axes.set_yscale("log")
    marks = (max((last + 1) // 40, 1), max((last + 1) // 8, 1))
    draw_lines(axes, data, "pair", "wavelength", "method", dict.fromkeys(data["method"].tolist()), marks)
    for word in ("trained", "target"):
        length = int(data[word][0])
        axes.axhline(length, color="#000000", linewidth=0.6)
        axes.annotate(
            f"{word}: {length:,} tokens",
            (0, length),
            xytext=(2, 2),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_xlim(0, last)
    axes.set_xlabel("pair")
    axes.set_ylabel("wavelength (tokens)")
    axes.legend(loc="lower right")


# --------------------------------------------------------------------------------------------------- figure: seen_arc
ARCS = ("default", "linear", "ntk", "yarn")


@with_model
def seen_arc_data(
    head_dim: int = 128, theta: float = 10000.0, context: int = 2048, factor: float = 4.0, own: Own | None = None
) -> Data:
    """method, pair; seen and met: arc covered in training and at the target length, in radians, at most 2 pi.

    trained (tokens) is the same in every row.
    """
    stretch = Stretch(head_dim, theta, context, factor)
    pairs = stretch.some_pairs()
    seen = seen_arc(stretch.frequencies(), context)[pairs].numpy()  # training was without scaling
    met = [seen_arc(stretch.frequencies(kind), stretch.target)[pairs].numpy() for kind in ARCS]
    return {
        "method": np.repeat([METHODS[kind] for kind in ARCS], len(pairs)),
        "pair": np.tile(pairs, len(ARCS)),
        "seen": np.tile(seen, len(ARCS)),
        "met": np.concatenate(met),
        "trained": np.full(len(pairs) * len(ARCS), context),
    }


def seen_arc_draw(data: Data, canvas: Canvas) -> None:
    """One row per method, one circle per pair: the seen arc is filled, the met arc outlined, and new angles hatched."""
    methods, pairs = list(dict.fromkeys(data["method"])), list(dict.fromkeys(data["pair"]))
    grid = canvas.subplots(len(methods), len(pairs), squeeze=False)
    for row, method in enumerate(methods):
        for column, pair in enumerate(pairs):
            here = (data["method"] == method) & (data["pair"] == pair)
            seen, met = float(data["seen"][here][0]), float(data["met"][here][0])
            # PI ends at L - 1/s trained steps, past the last step L - 1 by a fraction of one: not counted as new
            new = met > seen * (1 + 1 / (int(data["trained"][0]) - 1)) * (1 + 1e-6)
            _circle(grid[row][column], seen, met, new)
        grid[row][0].text(-1.6, 0, method, ha="right", va="center", fontsize=9)
    for column, pair in enumerate(pairs):
        grid[0][column].set_title(f"pair {pair}")


def _circle(axes: Axes, seen: float, met: float, new: bool) -> None:
    from matplotlib.patches import Wedge

    degrees = 180 / math.pi
    axes.add_patch(Wedge((0, 0), 1, 0, 360, facecolor="none", edgecolor="#999999", linewidth=0.6))
    axes.add_patch(Wedge((0, 0), 1, 0, seen * degrees, facecolor="#bbbbbb", edgecolor="none"))
    if new:
        axes.add_patch(
            Wedge((0, 0), 1, seen * degrees, met * degrees, facecolor="none", edgecolor="#b2182b", hatch="////", lw=0)
        )
    axes.add_patch(Wedge((0, 0), 1.18, 0, met * degrees, width=0.01, facecolor="none", edgecolor="#000000", lw=1.2))
    axes.text(0, -1.32, _arcs(seen, met), ha="center", va="top", fontsize=8, color="#b2182b" if new else "#000000")
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    axes.set_axis_off()


def _arcs(seen: float, met: float) -> str:
    full = 2 * math.pi - 1e-9
    if seen >= full:
        return "all seen"
    return f"{seen:.2g},\nthen " + ("all" if met >= full else f"{met:.2g}")


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "wavelengths",
            "Tokens in which a pair makes one turn. Unscaled, the pairs above the line of the trained length have not"
            " met every angle. PI lengthens all waves by the same factor, NTK-aware by a factor that"
            " grows with the pair, YaRN and llama3 only the slow ones.",
            wavelengths_data,
            wavelengths_draw,
            sketch=lambda data: curves(data, "pair", "wavelength", "method", log="y"),
        ),
        Figure(
            "seen_arc",
            "Angles of the distance, counterclockwise from the right. Grey: angles that a pair met in training."
            " Outline: angles met at the target length, hatched where they are new; below, both arcs in radians. Fast"
            " pairs have seen all angles. PI and YaRN keep each slow pair within the grey arc; under NTK-aware all slow"
            " pairs but the last leave it.",
            seen_arc_data,
            seen_arc_draw,
            size=(5.6, 5.2),
        ),
    ),
)
