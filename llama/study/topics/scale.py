"""Scale: how each scaling of the library changes the frequencies, the scores and the usable length."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...rope_scaling import SCALINGS, inverse_frequencies, reach
from .. import formulas
from ..checkpoint import Own, with_model
from ..figure import Data, Figure, draw_lines
from ..measures import frequencies
from ..report import Check, Report, Table, Value, below, equal, wrapped
from ..sketch import curves
from ..stretch import Stretch
from . import TOPICS
from .base import Topic, check_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@with_model
def report(
    head_dim: int = 128, theta: float = 10000.0, context: int = 2048, factor: float = 4.0, own: Own | None = None
) -> Report:
    """Divisors of a few pairs, factor of cos and sin, reach and unseen pairs of each kind of scaling."""
    stretch = _stretch(head_dim, theta, context, factor)
    pairs = stretch.some_pairs()
    rows: list[tuple[Value, ...]] = []
    for kind in SCALINGS:
        divisors = stretch.divisors(kind)  # (D/2,)
        some = [float(divisors[i]) for i in pairs]
        rows.append((kind, *some, stretch.stretched(kind)[1], stretch.reach(kind), stretch.unseen(kind)))
    if own is not None and own.kind != "default":
        inv_freq, times = own.scaled()
        some = [float((stretch.frequencies() / inv_freq)[i]) for i in pairs]
        rows.append((f"{own.kind}, this model", *some, times, reach(own.config), stretch.unseen_of(inv_freq)))
    table = Table(
        f"divisor of the frequency at pair .., at {stretch.target:,} tokens",
        ("rope_type", *(str(i) for i in pairs), "cos, sin times", "reach", "unseen"),
        rows,
    )
    return Report(
        "scale",
        TOPICS["scale"],
        settings=stretch.settings,
        says=(
            *wrapped(
                "A scaling divides the D/2 frequencies and may multiply cos and sin; it changes nothing else. Pairs"
                " that finish a turn in training need no divisor; slower pairs need the full factor s. PI divides all"
                " pairs by s, NTK-aware only the last one; YaRN and llama3 use a ramp. dynamic with factor s divides"
                " the last pair by s^2 - s + 1 when the text is s times as long. longrope and divisors are lists"
                " from a file (here: a made-up list, and llama3's). proportional stops pairs (here half of them); inf"
                " marks a pair that does not turn. Unseen: pairs that still meet new angles."
            ),
            *(wrapped(own.says) if own else ()),
            *_left_out(stretch),
        ),
        tables=(table,),
        checks=(*_against_formulas(stretch), *_ways(stretch), *_by_parts()),
    )


def _stretch(head_dim: int, theta: float, context: int, factor: float) -> Stretch:
    """The settings. Raises UsageError as `Stretch` does, and on a factor that does not stretch."""
    check_range("--rope-factor", factor, 1.01, 1024.0)
    return Stretch(head_dim, theta, context, factor)


def _short_but_last(stretch: Stretch) -> list[int]:
    """Pairs that don't finish a turn within the trained context, except the last one."""
    return [int(pair) for pair in torch.nonzero(stretch.short()).flatten()[:-1]]


def _left_out(stretch: Stretch) -> tuple[str, ...]:
    """A sentence on the checks that are left out because there is no pair for them."""
    count = len(_short_but_last(stretch))
    missing = {
        0: "the 3 checks of such pairs do not apply",
        1: "1 of the 3 checks of such pairs does not apply",
    }
    return (f"Without the last, {count} pairs turn less than once, so {missing[count]}.",) if count in missing else ()


def _yarn(stretch: Stretch, **more: object) -> tuple[np.ndarray, float]:
    """Divisors (D/2,) and the factor of cos and sin under the example of yarn with additional parameters."""
    inv_freq, times = inverse_frequencies(stretch.head_dim, stretch.theta, {**stretch.scaling("yarn"), **more})
    return (stretch.frequencies() / inv_freq.double()).numpy(), times


def _against_formulas(stretch: Stretch) -> tuple[Check, ...]:
    """Checks of all numbers of the table against numpy."""
    numbers = (stretch.head_dim, stretch.theta, stretch.context, stretch.factor)
    divided, times, reached, unseen = 0.0, 0.0, 0, 0
    for kind in SCALINGS:
        ours, right = stretch.divisors(kind).numpy(), formulas.divisors(kind, *numbers)  # (D/2,) each
        turning = np.isfinite(right)
        error = float(np.abs(ours[turning] / right[turning] - 1).max())
        divided = max(divided, error if np.array_equal(np.isfinite(ours), turning) else math.inf)
        right_times = formulas.attention_factor(kind, stretch.context, stretch.factor)
        times = max(times, abs(stretch.stretched(kind)[1] - right_times))
        full = stretch.context if kind in ("default", "proportional") else int(stretch.context * stretch.factor)
        reached += stretch.reach(kind) != full
        unseen += stretch.unseen(kind) != formulas.unseen(kind, *numbers)
    D, theta, L, s = numbers
    between, _ = _yarn(stretch, truncate=False)
    divided = max(divided, float(np.abs(between / formulas.yarn_ramp(D, theta, L, s, truncate=False) - 1).max()))
    _, weighed = _yarn(stretch, mscale=0.707, mscale_all_dim=1.5)
    times = max(times, abs(weighed - formulas.yarn_sharpness(s, 0.707, 1.5)))
    return (
        below("002-15", "divisors of all kinds and yarn untruncated: error", divided, 1e-6),
        below("002-25", "factors of cos and sin, and yarn with mscale: error", times, 1e-12),
        equal("001-34", "number of kinds whose reach is not as expected", reached, 0),
        equal("001-19", "number of kinds whose unseen pairs differ from numpy", unseen, 0),
    )


def _ways(stretch: Stretch) -> tuple[Check, ...]:
    """Checks of claims about PI, NTK-aware and dynamic."""
    D, theta, L, s = stretch.head_dim, stretch.theta, stretch.context, stretch.factor
    pinned = stretch == Stretch()
    plain, linear = stretch.frequencies(), stretch.frequencies("linear")  # (D/2,) each
    ntk = stretch.divisors("ntk")  # (D/2,)
    # the last frequency is base'^(-(D-2)/D), which determines base'
    base = float(stretch.frequencies("ntk")[-1]) ** (-D / (D - 2))
    right_base = 40889.94 if pinned else theta * s ** (D / (D - 2))
    effective = float(stretch.target * linear[0])
    checks = [
        equal("001-18", f"linear: position of {stretch.target:,}", effective, stretch.target / s, 1e-6 * L),
        equal("001-20", "linear: pair 0, radians per token", float(linear[0]), 0.25 if pinned else 1 / s, 1e-7),
        equal("001-30", "ntk: base with the same frequencies", base, right_base, 1e-6 * right_base),
        equal("001-23", "ntk: divisor of pair 0", float(ntk[0]), 1.0, 1e-6),
        equal("001-30", "ntk: divisor of the last pair", float(ntk[-1]), s, 1e-6 * s),
    ]
    between = _short_but_last(stretch)
    for pair, expected in zip(between[:1] + between[1:][-1:], (2.46, 3.91), strict=False):
        right = expected if pinned else s ** (2 * pair / (D - 2))
        what = f"ntk: divisor of pair {pair}, which needs s"
        checks.append(equal("001-23", what, float(ntk[pair]), right, 0.006 if pinned else 1e-6 * right))
    for pair in between[:1]:
        angle = theta ** (-2 * pair / D)
        right = 9.10 if pinned else stretch.target * angle / s ** (2 * pair / (D - 2))
        met = float(stretch.target * stretch.frequencies("ntk")[pair])
        what = f"ntk: radians of pair {pair}, {L * angle:.3g} in training"
        checks.append(equal("001-23", what, met, right, 0.006 if pinned else 1e-6 * right))
    like = float(plain[-1] / frequencies(D, 500000.0)[-1])  # the factor for which NTK-aware's base is 500,000
    right = 47.0 if pinned else (500000 / theta) ** ((D - 2) / D)
    last = float(stretch.divisors("dynamic")[-1])
    right_last = 13.0 if pinned else s * (stretch.target / L) - s + 1
    return (
        *checks,
        equal("001-23", "NTK-aware factor for a base of 500,000", like, right, 0.05 if pinned else 1e-6 * right),
        equal("001-35", "dynamic: divisor of the last pair", last, right_last, 1e-6 * right_last),
    )


def _by_parts() -> tuple[Check, ...]:
    """Checks at Llama 2's length and factor 4: llama3 equals by-parts, and YaRN's paper and code differ."""
    stretch = Stretch(128, 10000.0, 4096, 4.0)
    turn = formulas.turns(128, 10000.0, 4096)  # (64,)
    llama3, yarn = stretch.divisors("llama3").numpy(), stretch.divisors("yarn").numpy()  # (64,) each
    same = float(np.abs(llama3 / formulas.by_parts(turn, 1, 4, 4.0) - 1).max())
    apart = formulas.by_parts(turn, 1, 32, 4.0) / yarn
    most = f"YaRN: paper / code, at pair {apart.argmax()} (L = 4096)"
    return (
        below("002-15", "llama3 is by-parts of 1 and 4 turns: relative error", same, 1e-6),
        equal("002-15", most, float(apart.max()), 1.733, 5e-4),
        equal("002-25", "yarn, s = 4: factor of the scores", stretch.stretched("yarn")[1] ** 2, 1.2965, 5e-5),
    )


# ---------------------------------------------------------------------------------------------------- figure: divisor
KINDS = {
    "linear": "PI",
    "ntk": "NTK-aware",
    "dynamic": "dynamic, at s L",
    "yarn": "YaRN",
    "longrope": "longrope (example)",
    "llama3": "llama3",
}


@with_model
def divisor_data(
    head_dim: int = 128, theta: float = 10000.0, context: int = 2048, factor: float = 4.0, own: Own | None = None
) -> Data:
    """method, pair, divisor; short: whether the pair, unscaled, stays below one turn within the trained context."""
    stretch = _stretch(head_dim, theta, context, factor)
    divisors = {name: stretch.divisors(kind) for kind, name in KINDS.items()}
    if own is not None and own.kind != "default":
        divisors["this model"] = stretch.frequencies() / own.scaled()[0]
    return {
        "method": np.repeat(list(divisors), head_dim // 2),
        "pair": np.tile(np.arange(head_dim // 2), len(divisors)),
        "divisor": torch.cat(list(divisors.values())).numpy(),
        "short": np.tile(stretch.short().numpy(), len(divisors)),
    }


def divisor_draw(data: Data, canvas: Canvas) -> None:
    """Divisor over pair, one line per method."""
    count = int(data["pair"].max()) + 1
    _draw_divisors(data, canvas, dict.fromkeys(data["method"].tolist()), (max(count // 48, 1), max(count // 8, 1)))


def _draw_divisors(
    data: Data, canvas: Canvas, methods: Iterable[str], markevery: tuple[int, int] | None = None
) -> None:
    """Divisor over pair on a log axis, one line per method; pairs that need the full factor are shaded."""
    axes = canvas.subplots()
    draw_lines(axes, data, "pair", "divisor", "method", methods, markevery)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0.93, max(float(data["divisor"].max()) * 1.15, 2))
    short = data["pair"][data["short"]]
    last = int(data["pair"].max())
    axes.set_xlim(0, last)
    if len(short):
        axes.axvspan(int(short.min()), last, color="#e8e8e8", zorder=0)
        axes.text(last, 0.96, "less than a turn in training ", ha="right", va="bottom", fontsize=8)
    axes.set_xlabel("pair")
    axes.set_ylabel("divisor of the frequency (log scale)")
    axes.legend(loc="upper left")


# ------------------------------------------------------------------------------------------------------ figure: ramps
RAMPS = ("YaRN, the code", "YaRN, the paper", "llama3")


@with_model
def ramps_data(
    head_dim: int = 128, theta: float = 10000.0, context: int = 4096, factor: float = 4.0, own: Own | None = None
) -> Data:
    """method, pair, divisor, short, for the three ramps between leaving a pair and dividing it by the factor."""
    stretch = _stretch(head_dim, theta, context, factor)
    paper = formulas.by_parts(formulas.turns(head_dim, theta, context), 1, 32, factor)  # not used by any model file
    divisors = (stretch.divisors("yarn").numpy(), paper, stretch.divisors("llama3").numpy())
    return {
        "method": np.repeat(RAMPS, head_dim // 2),
        "pair": np.tile(np.arange(head_dim // 2), len(RAMPS)),
        "divisor": np.concatenate(divisors),
        "short": np.tile(stretch.short().numpy(), len(RAMPS)),
    }


def ramps_draw(data: Data, canvas: Canvas) -> None:
    """Divisor over pair: the ramp of YaRN's code, of its paper, and of Llama 3."""
    _draw_divisors(data, canvas, RAMPS)


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "divisor",
            "The divisor of each frequency, by method. Only the shaded pairs need the full factor: they meet new"
            " angles. PI is constant. NTK-aware is a power that reaches the factor only at the last pair. YaRN and"
            " llama3 rise where pairs make few turns. Dynamic with factor s overshoots to s^2 - s + 1 at s times the"
            " length.",
            divisor_data,
            divisor_draw,
            sketch=lambda data: curves(data, "pair", "divisor", "method", log="y"),
        ),
        Figure(
            "ramps",
            "YaRN's ramp between unchanged and divided pairs. In the code it is linear in the pair's index, from the"
            " pair with 32 turns to the pair with 1 turn; in the paper it is linear in the turns. Checkpoints are"
            " trained with the code's ramp. llama3 is the paper's formula with 4 turns instead of 32.",
            ramps_data,
            ramps_draw,
        ),
    ),
)
