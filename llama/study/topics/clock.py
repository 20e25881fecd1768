"""The clock: a 12-hour clock as RoPE with three pairs, and how methods to stretch a context slow its hands."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..checkpoint import Own, with_model
from ..figure import Data, Figure
from ..measures import frequencies, wavelengths
from ..report import Report, Table, equal, wrapped
from ..sketch import bars
from . import TOPICS
from .base import Topic, check_head_dim, check_range

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

HANDS = ("second", "minute", "hour")
BASE = 60.0**3  # base of three pairs with a ratio of 60 between their periods
CLOCK = [1.0, 1.0, 0.2]  # divisors for a clock: its hour hand is 12 times slower than its minute hand, not 60 times
STEPS = (1.0, 1.5, 2.0)  # factor by which a published clock slows each hand relative to the previous one
NOW = 10 * 3600 + 8 * 60 + 42  # the time that the figure shows, in seconds


@with_model
def report(factor: float = 3.0, own: Own | None = None) -> Report:
    """Periods of the hands unscaled, under PI, under NTK-aware, and on a published clock of factor 3."""
    check_range("--rope-factor", factor, 1.01, 1024.0)
    if own is not None:
        return _of_model(own, factor)
    now, stretched = _now(), _stretched(factor)
    pi, ntk = stretched["PI"], stretched["NTK-aware"]
    note = _published()
    table = Table(
        "period of each hand in seconds, and its ratio to the period now",
        ("hand", "now", "PI", "", "NTK-aware", "", "steps x 1, 1.5, 2", ""),
        [
            (hand, now[i], *(cell for way in (pi, ntk, note) for cell in (way[i], f"x {way[i] / now[i]:.4g}")))
            for i, hand in enumerate(HANDS)
        ],
    )
    pinned = factor == 3
    last, step = 43200 * factor, 360 / pi[0]
    base60, base216000 = (", ".join(f"{x:.0f}" for x in _seconds(frequencies(6, base))) for base in (60.0, BASE))
    return Report(
        "clock",
        TOPICS["clock"],
        settings={"factor": factor},
        says=wrapped(
            "Three hands are three pairs, D = 6. A position is a second, and the trained context has 43,200. To"
            f" distinguish {factor:g} times as many positions, PI slows all hands by the same factor: the second hand"
            f" then moves {step:.3g} degrees a second instead of 6. NTK-aware leaves the second hand unchanged and"
            " slows only the last hand by the full factor. The last columns, for a factor of 3, are a published clock:"
            " it multiplies the ratio between the periods of a hand and the hand before by 1, 1.5 and 2. These factors"
            " multiply, so the periods become 1, 1.5 and 3 times as long, not 1, 1.5 and 2. A clock is not exactly"
            " RoPE: its periods grow by 60 and then by 12."
        ),
        tables=(table,),
        checks=(
            equal("001-26", "number of seconds that the clock distinguishes", now[2], float(60 * 60 * 12), 0.01),
            equal("001-28", "the same, steps x 1, 1.5, 2", note[2], 60.0 * (60 * 1.5) * (2 * 12), 0.03),
            equal("001-27", "PI: degrees a second of the second hand", step, 2.0 if pinned else 6 / factor, 1e-5),
            equal("001-27", "NTK-aware: the same", 360 / ntk[0], 6.0, 1e-5),
            equal("001-27", "PI: minute hand, relative to now", pi[1] / now[1], factor, 1e-6 * factor),
            # s^(2i/(D-2)) with i = 1, D = 6
            equal("001-28", "NTK-aware: the same", ntk[1] / now[1], 1.732 if pinned else factor**0.5, 1e-4 * factor),
            equal("001-28", "steps x 1, 1.5, 2: hour hand, relative to now (not 2)", note[2] / now[2], 3.0, 1e-5),
            equal("001-30", "NTK-aware: period of the hour hand", ntk[2], last, 1e-6 * last),
            equal("001-18", "PI: period of the hour hand", pi[2], last, 1e-6 * last),
            equal("001-26", "RoPE of base 60, D = 6: periods", base60, "60, 235, 920"),
            equal("001-26", "of base 60^3 = 216,000", base216000, "60, 3600, 216000"),
        ),
    )  # fmt: skip


def _hands(own: Own) -> list[int]:
    """The pairs of a checkpoint that are its hands: the fastest, the middle one and the slowest."""
    count = own.config.head_dim // 2
    return [0, count // 2, count - 1]


def _periods(own: Own, factor: float) -> dict[str, list[float]]:
    """Periods in tokens of three pairs of a checkpoint, by method: unscaled, PI, NTK-aware, and its own scaling."""
    check_head_dim(own.config.head_dim, 6, 1024)
    dim, base = own.config.head_dim, own.config.rope_theta
    ways = {
        "now": frequencies(dim, base),
        "PI": frequencies(dim, base, {"rope_type": "linear", "factor": factor}),
        "NTK-aware": frequencies(dim, base, {"rope_type": "ntk", "factor": factor}),
    }
    if own.kind != "default":
        ways["this model"] = own.scaled()[0]
    return {name: [float(wavelengths(inv_freq)[i]) for i in _hands(own)] for name, inv_freq in ways.items()}


def _of_model(own: Own, factor: float) -> Report:
    """The clock of a checkpoint: three of its pairs as hands, with periods in tokens."""
    periods = _periods(own, factor)
    now, pi, ntk = periods["now"], periods["PI"], periods["NTK-aware"]
    dim, pairs = own.config.head_dim, _hands(own)
    slower = factor ** (2 * pairs[1] / (dim - 2))
    cells = {
        name: [(f"{p:,.1f}", f"x {p / n:.4g}") for p, n in zip(periods[name], now, strict=True)] for name in periods
    }
    others = list(periods)[1:]
    return Report(
        "clock",
        TOPICS["clock"],
        settings={"model": own.name, "factor": factor},
        says=wrapped(
            f"{own.says} Its fastest, middle and slowest pair are the hands; a position is a token. PI slows all hands"
            f" by {factor:g}. NTK-aware leaves the fastest hand unchanged and slows only the last one by the full"
            " factor."
        ),
        tables=(
            Table(
                "period of each hand in tokens, and its ratio to the period without scaling",
                ("hand", "pair", "now", *(head for name in others for head in (name, ""))),
                [
                    (hand, pairs[i], cells["now"][i][0], *(cell for name in others for cell in cells[name][i]))
                    for i, hand in enumerate(HANDS)
                ],
            ),
        ),
        checks=(
            equal("001-27", "period of the fastest hand: one turn in 2 pi tokens", now[0], 2 * math.pi, 1e-5),
            equal("001-27", "PI: middle hand, relative to now", pi[1] / now[1], factor, 1e-6 * factor),
            equal("001-27", "NTK-aware: fastest hand, relative to now", ntk[0] / now[0], 1.0, 1e-6),
            equal("001-28", "NTK-aware: middle hand, relative to now", ntk[1] / now[1], slower, 1e-5 * slower),
            equal("001-30", "NTK-aware: slowest hand, relative to now", ntk[2] / now[2], factor, 1e-5 * factor),
        ),
    )


def _seconds(inv_freq: torch.Tensor) -> list[float]:
    """Periods of three pairs in seconds, (3,), scaled so that pair 0 turns once in 60 seconds."""
    return [float(x) for x in wavelengths(inv_freq) * 60 / (2 * math.pi)]


def _now() -> list[float]:
    return _seconds(frequencies(6, BASE, {"rope_type": "divisors", "divisors": CLOCK}))


def _published() -> list[float]:
    """Periods of the published clock, in seconds. Factors are relative to the previous hand, so they multiply."""
    slower = [float(divisor) for divisor in np.array(CLOCK) * np.cumprod(STEPS)]
    return _seconds(frequencies(6, BASE, {"rope_type": "divisors", "divisors": slower}))


def _stretched(factor: float) -> dict[str, list[float]]:
    """Periods of the clock in seconds, by method: each hand is slowed by the divisor of its pair in the library."""
    plain = frequencies(6, BASE)
    ways = {"PI": "linear", "NTK-aware": "ntk"}
    return {
        name: [
            period * float(divisor)
            for period, divisor in zip(
                _now(), plain / frequencies(6, BASE, {"rope_type": kind, "factor": factor}), strict=True
            )
        ]
        for name, kind in ways.items()
    }


# ------------------------------------------------------------------------------------------------------ figure: clock
PANELS = ("now", "PI", "NTK-aware")


@with_model
def clock_data(factor: float = 3.0, own: Own | None = None) -> Data:
    """clock, hand; period (seconds, or tokens of a checkpoint); its ratio to now; angle now and step, in degrees."""
    check_range("--rope-factor", factor, 1.01, 1024.0)
    if own is not None:
        periods = {name: np.array(period) for name, period in _periods(own, factor).items()}
    else:
        periods = {name: np.array(period) for name, period in {"now": _now(), **_stretched(factor)}.items()}
        if factor == 3:
            periods["published"] = np.array(_published())
    now = periods["now"]  # (3,)
    stacked = np.concatenate(list(periods.values()))
    return {
        "clock": np.repeat(list(periods), len(HANDS)),
        "hand": np.tile(HANDS, len(periods)),
        "period": stacked,
        "times": stacked / np.tile(now, len(periods)),
        "angle": 360 * (NOW / stacked % 1),
        "step": 360 / stacked,
    }


def clock_draw(data: Data, canvas: Canvas) -> None:
    """Three clocks at the same second, and the periods of their hands below."""
    grid = canvas.add_gridspec(2, 3, height_ratios=(3, 1.25))
    for column, name in enumerate(PANELS):
        _face(canvas.add_subplot(grid[0, column]), data, name)
    axes = canvas.add_subplot(grid[1, :])
    axes.set_axis_off()
    cells = []
    for name in PANELS:
        rows = data["clock"] == name
        periods = zip(data["period"][rows], data["times"][rows], strict=True)
        cells.append([name, *(f"{period:,.0f}  (x {times:.4g})" for period, times in periods)])
    table = axes.table(cells, colLabels=["periods", *HANDS], loc="center", cellLoc="center", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(9)


def _face(axes: Axes, data: Data, name: str) -> None:
    widths = {"hour": (0.5, 4.0), "minute": (0.8, 2.2), "second": (0.92, 0.9)}  # length, points
    for hour in range(12):
        x, y = _point(hour * 30)
        axes.plot([0.94 * x, x], [0.94 * y, y], color="#666666", linewidth=1)
    axes.plot(*np.array([_point(a) for a in range(361)]).T, color="#666666", linewidth=0.8)
    for hand, (length, width) in widths.items():
        row = (data["clock"] == name) & (data["hand"] == hand)
        x, y = _point(float(data["angle"][row][0]))
        axes.plot([0, length * x], [0, length * y], color="#000000", linewidth=width, solid_capstyle="round")
    second = (data["clock"] == name) & (data["hand"] == "second")
    angle, step = float(data["angle"][second][0]), float(data["step"][second][0])
    for later in range(1, 6):  # the second hand in the next five seconds
        x, y = _point(angle + later * step)
        axes.plot([0.92 * x], [0.92 * y], marker="o", markersize=2.5, color="#b2182b")
    axes.set(xlim=(-1.08, 1.08), ylim=(-1.08, 1.08), aspect="equal")
    axes.set_axis_off()
    axes.set_title(f"{name}\nsecond hand: {step:.3g}° a step")


def _point(degrees: float) -> tuple[float, float]:
    """The point at an angle on the unit circle, clockwise from the top."""
    return math.sin(math.radians(degrees)), math.cos(math.radians(degrees))


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "clock",
            "The same second on three clocks. Dots: the second hand in the next five seconds. PI slows every hand and"
            " crowds the dots. NTK-aware leaves the second hand unchanged and applies the full factor only to the hour"
            " hand. Below: the period of each hand, and how many times as long as now.",
            clock_data,
            clock_draw,
            size=(5.6, 3.9),
            sketch=lambda data: bars(data, ("clock", "hand"), "times"),
        ),
    ),
)
