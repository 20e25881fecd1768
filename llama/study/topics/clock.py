"""The clock: a 12-hour clock as RoPE with three pairs, and how methods to stretch a context slow its hands."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..checkpoint import Own, with_model
from ..figure import Data, Figure
from ..measures import frequencies, wavelengths
from ..report import Report, Table, wrapped
from . import TOPICS
from .base import Topic, check_head_dim, check_range

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

HANDS = {"second": (0.92, 0.9), "minute": (0.8, 2.2), "hour": (0.5, 4.0)}  # length and width in the picture
SECONDS = np.array([60.0, 3600.0, 43200.0])  # period of each hand
NOW = 10 * 3600 + 8 * 60 + 42  # the time that the figure shows, in seconds
WAYS = {"PI": "linear", "NTK-aware": "ntk"}


def _periods(factor: float, own: Own | None) -> dict[str, np.ndarray]:
    """Method -> period of each hand (3,): seconds of the clock, or tokens of a checkpoint.

    The hands of a checkpoint are its fastest, its middle and its slowest pair.
    """
    check_range("--rope-factor", factor, 1.01, 1024.0)
    dim, base = (6, 60.0**3) if own is None else (own.config.head_dim, own.config.rope_theta)
    check_head_dim(dim, 6, 1024)
    hands = [0, dim // 4, dim // 2 - 1]
    plain = frequencies(dim, base)
    now = SECONDS if own is None else wavelengths(plain)[hands].numpy()
    scaled = {name: frequencies(dim, base, {"rope_type": kind, "factor": factor}) for name, kind in WAYS.items()}
    if own is not None and own.kind != "default":
        scaled["this model"] = own.scaled()[0]
    return {"now": now, **{name: now * (plain / w)[hands].numpy() for name, w in scaled.items()}}


@with_model
def report(factor: float = 3.0, own: Own | None = None) -> Report:
    """Periods of the hands unscaled, under PI and under NTK-aware."""
    periods = _periods(factor, own)
    unit = "seconds" if own is None else "tokens"
    return Report(
        "clock",
        TOPICS["clock"],
        settings={"factor": factor},
        says=wrapped(
            ("Three hands are three pairs; a position is a second." if own is None else own.says)
            + " PI slows all hands by the factor, so the second hand creeps. NTK-aware leaves the fastest hand"
            " unchanged and slows only the last one by the full factor."
        ),
        tables=(
            Table(
                f"period of each hand in {unit}",
                ("hand", *periods),
                [(hand, *(float(period[i]) for period in periods.values())) for i, hand in enumerate(HANDS)],
            ),
        ),
    )


@with_model
def clock_data(factor: float = 3.0, own: Own | None = None) -> Data:
    """clock, hand; period (seconds, or tokens of a checkpoint); angle now and step, in degrees."""
    periods = _periods(factor, own)
    stacked = np.concatenate(list(periods.values()))
    return {
        "clock": np.repeat(list(periods), len(HANDS)),
        "hand": np.tile(list(HANDS), len(periods)),
        "period": stacked,
        "angle": 360 * (NOW / stacked % 1),
        "step": 360 / stacked,
    }


def clock_draw(data: Data, canvas: Canvas) -> None:
    """One clock for each method, at the same second."""
    names = list(dict.fromkeys(data["clock"].tolist()))
    for axes, name in zip(canvas.subplots(1, len(names)), names, strict=True):
        _face(axes, {column: values[data["clock"] == name] for column, values in data.items()})
        axes.set_title(name)


def _face(axes: Axes, data: Data) -> None:
    for hour in range(12):
        x, y = _point(hour * 30)
        axes.plot([0.94 * x, x], [0.94 * y, y], color="#666666", linewidth=1)
    axes.plot(*np.array([_point(a) for a in range(361)]).T, color="#666666", linewidth=0.8)
    for hand, angle in zip(data["hand"], data["angle"], strict=True):
        length, width = HANDS[hand]
        x, y = _point(angle)
        axes.plot([0, length * x], [0, length * y], color="#000000", linewidth=width, solid_capstyle="round")
    for later in range(1, 6):  # the second hand in the next five seconds
        x, y = _point(data["angle"][0] + later * data["step"][0])
        axes.plot([0.92 * x], [0.92 * y], marker="o", markersize=2.5, color="#b2182b")
    axes.set(xlim=(-1.08, 1.08), ylim=(-1.08, 1.08), aspect="equal")
    axes.set_axis_off()


def _point(degrees: float) -> tuple[float, float]:
    """The point at an angle on the unit circle, clockwise from the top."""
    return math.sin(math.radians(degrees)), math.cos(math.radians(degrees))


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "clock",
            "The same second on three clocks. Dots: the second hand in the next five seconds. PI crowds them; NTK-aware"
            " leaves the second hand unchanged.",
            clock_data,
            clock_draw,
            size=(5.6, 2.4),
        ),
    ),
)
