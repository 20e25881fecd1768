"""Scale: what every scaling of the library does to every pair, to the scores, and to the length."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...rope_scaling import SCALINGS, inverse_frequencies
from .. import formulas
from ..figure import LINES, MARKERS, Data, Figure
from ..measures import frequencies
from ..report import Check, Report, Table, Value, below, equal
from ..stretch import Stretch
from .base import Topic, check_range

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


def report(head_dim: int = 128, theta: float = 10000.0, context: int = 2048, factor: float = 4.0) -> Report:
    """Divisor of a few pairs, factor of cos and sin, reach and unseen pairs of every kind of scaling."""
    stretch = _stretch(head_dim, theta, context, factor)
    pairs = stretch.some_pairs()
    rows: list[tuple[Value, ...]] = []
    for kind in SCALINGS:
        divisors = stretch.divisors(kind)  # (D/2,)
        some = [float(divisors[i]) for i in pairs]
        rows.append((kind, *some, stretch.stretched(kind)[1], stretch.reach(kind), stretch.unseen(kind)))
    table = Table(
        f"frequency divided by, at pair .., at {stretch.wanted:,} tokens",
        ("rope_type", *(str(i) for i in pairs), "cos, sin times", "reach", "unseen"),
        rows,
    )
    return Report(
        "scale",
        "what does every scaling do to every pair?",
        settings=stretch.settings,
        says=(
            "a scaling divides the D/2 frequencies, and may multiply cos and sin; it changes nothing else.",
            "Pairs that finish a turn in training need no divisor, the slower ones all of s. PI divides all,",
            "NTK-aware the last alone by all of s; YaRN and llama3 divide by parts; dynamic with a factor s of",
            "its own divides the last by s^2 - s + 1 once the text is s times as long (E23). longrope and",
            "divisors are lists from a file (here: an invented one, and llama3's). proportional stops pairs",
            "(here half of them): inf is a pair that does not turn. Unseen: pairs that still meet new angles.",
            *_left_out(stretch),
        ),
        tables=(table,),
        checks=(*_against_formulas(stretch), *_ways(stretch), *_by_parts()),
    )


def _stretch(head_dim: int, theta: float, context: int, factor: float) -> Stretch:
    """The settings. Raises UsageError on those of `Stretch`, and on a factor that stretches nothing."""
    check_range("--rope-factor", factor, 1.01, 1024.0)
    return Stretch(head_dim, theta, context, factor)


def _short_but_last(stretch: Stretch) -> list[int]:
    """Pairs short of a turn within the trained context, without the last of them."""
    return [int(pair) for pair in torch.nonzero(stretch.short()).flatten()[:-1]]


def _left_out(stretch: Stretch) -> tuple[str, ...]:
    """In words: which checks have no pair to speak of."""
    count = len(_short_but_last(stretch))
    missing = {0: "the 3 checks of E21 do not apply", 1: "1 of the 3 checks of E21 does not apply"}
    return (f"Pairs short of a turn, besides the last: {count}, so {missing[count]}.",) if count in missing else ()


def _yarn(stretch: Stretch, **more: object) -> tuple[np.ndarray, float]:
    """Divisors (D/2,) and the factor of cos and sin under the example of yarn with more parameters."""
    inv_freq, times = inverse_frequencies(stretch.head_dim, stretch.theta, {**stretch.scaling("yarn"), **more})
    return (stretch.frequencies() / inv_freq.double()).numpy(), times


def _against_formulas(stretch: Stretch) -> tuple[Check, ...]:
    """Every number of the table against numpy's."""
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
        equal("001-34", "kinds with another reach than expected", reached, 0),
        equal("001-19 E55", "kinds with another count of unseen pairs than numpy's", unseen, 0),
    )


def _ways(stretch: Stretch) -> tuple[Check, ...]:
    """What the notes say of PI, NTK-aware and dynamic."""
    D, theta, L, s = stretch.head_dim, stretch.theta, stretch.context, stretch.factor
    pinned = stretch == Stretch()
    plain, linear = stretch.frequencies(), stretch.frequencies("linear")  # (D/2,) each
    ntk = stretch.divisors("ntk")  # (D/2,)
    # the last frequency is base'^(-(D-2)/D), which gives base' back
    base = float(stretch.frequencies("ntk")[-1]) ** (-D / (D - 2))
    right_base = 40889.94 if pinned else theta * s ** (D / (D - 2))
    counts_as = float(stretch.wanted * linear[0])
    checks = [
        equal("001-18 E19", f"linear: token {stretch.wanted:,} counts as", counts_as, stretch.wanted / s, 1e-6 * L),
        equal("001-20", "linear: pair 0, radians a token", float(linear[0]), 0.25 if pinned else 1 / s, 1e-7),
        equal("001-30", "ntk: base that gives its frequencies", base, right_base, 1e-6 * right_base),
        equal("001-23", "ntk: pair 0 is divided by", float(ntk[0]), 1.0, 1e-6),
        equal("001-30", "ntk: the last pair is divided by", float(ntk[-1]), s, 1e-6 * s),
    ]
    between = _short_but_last(stretch)
    for pair, expected in zip(between[:1] + between[1:][-1:], (2.46, 3.91), strict=False):
        right = expected if pinned else s ** (2 * pair / (D - 2))
        what = f"ntk: pair {pair}, in need of s, is divided by"
        checks.append(equal("E21", what, float(ntk[pair]), right, 0.006 if pinned else 1e-6 * right))
    for pair in between[:1]:
        angle = theta ** (-2 * pair / D)
        right = 9.10 if pinned else stretch.wanted * angle / s ** (2 * pair / (D - 2))
        met = float(stretch.wanted * stretch.frequencies("ntk")[pair])
        what = f"ntk: pair {pair} reached {L * angle:.3g} radians, now"
        checks.append(equal("E21", what, met, right, 0.006 if pinned else 1e-6 * right))
    like = float(plain[-1] / frequencies(D, 500000.0)[-1])  # the factor for which NTK-aware's base would be 500,000
    right = 47.0 if pinned else (500000 / theta) ** ((D - 2) / D)
    last = float(stretch.divisors("dynamic")[-1])
    right_last = 13.0 if pinned else s * (stretch.wanted / L) - s + 1
    return (
        *checks,
        equal("E20", "a base of 500,000 is NTK-aware with s =", like, right, 0.05 if pinned else 1e-6 * right),
        equal("E23", "dynamic: the last pair is divided by", last, right_last, 1e-6 * right_last),
    )


def _by_parts() -> tuple[Check, ...]:
    """Two scalings that look different and are one, and one in two versions; at Llama 2's length, factor 4."""
    stretch = Stretch(128, 10000.0, 4096, 4.0)
    turn = formulas.turns(128, 10000.0, 4096)  # (64,)
    llama3, yarn = stretch.divisors("llama3").numpy(), stretch.divisors("yarn").numpy()  # (64,) each
    same = float(np.abs(llama3 / formulas.by_parts(turn, 1, 4, 4.0) - 1).max())
    apart = formulas.by_parts(turn, 1, 32, 4.0) / yarn
    most = f"YaRN: paper over code, at pair {apart.argmax()} (L = 4096)"
    return (
        below("OK12", "llama3 less by-parts of 1 and 4 turns, relative", same, 1e-6),
        equal("OK12", most, float(apart.max()), 1.733, 5e-4),
        equal("E32", "yarn, s = 4: scores are multiplied by", stretch.stretched("yarn")[1] ** 2, 1.2965, 5e-5),
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


def divisor_data(head_dim: int = 128, theta: float = 10000.0, context: int = 2048, factor: float = 4.0) -> Data:
    """method, pair, divisor; short: whether the pair, unscaled, is short of a turn within the trained context."""
    stretch = _stretch(head_dim, theta, context, factor)
    count = head_dim // 2
    return {
        "method": np.repeat(list(KINDS.values()), count),
        "pair": np.tile(np.arange(count), len(KINDS)),
        "divisor": torch.cat([stretch.divisors(kind) for kind in KINDS]).numpy(),
        "short": np.tile(stretch.short().numpy(), len(KINDS)),
    }


def divisor_draw(data: Data, canvas: Canvas) -> None:
    """Divisor over pair, a line a method; the pairs that need the whole factor shaded."""
    axes = canvas.subplots()
    count = int(data["pair"].max()) + 1
    for number, method in enumerate(KINDS.values()):
        rows = data["method"] == method
        axes.plot(
            data["pair"][rows],
            data["divisor"][rows],
            label=method,
            marker=MARKERS[number],
            markersize=4,
            markevery=(number * count // 48, max(count // 8, 1)),
            **LINES[number],
        )
    _log2(axes, float(data["divisor"].max()))
    _shade(axes, data)
    axes.set_xlabel("pair")
    axes.set_ylabel("frequency divided by (log scale)")
    axes.legend(loc="upper left")


def _log2(axes: Axes, highest: float) -> None:
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0.93, max(highest * 1.15, 2))


def _shade(axes: Axes, data: Data) -> None:
    short = data["pair"][data["short"]]
    last = int(data["pair"].max())
    axes.set_xlim(0, last)
    if len(short):
        axes.axvspan(int(short.min()), last, color="#e8e8e8", zorder=0)
        axes.text(last, 0.96, "less than a turn in training ", ha="right", va="bottom", fontsize=8)


# ------------------------------------------------------------------------------------------------------ figure: ramps
RAMPS = ("YaRN, the code", "YaRN, the paper", "llama3")


def ramps_data(head_dim: int = 128, theta: float = 10000.0, context: int = 4096, factor: float = 4.0) -> Data:
    """method, pair, divisor of the three ramps between keeping a pair and dividing it by the factor."""
    stretch = _stretch(head_dim, theta, context, factor)
    paper = formulas.by_parts(formulas.turns(head_dim, theta, context), 1, 32, factor)  # no model file means it
    divisors = (stretch.divisors("yarn").numpy(), paper, stretch.divisors("llama3").numpy())
    return {
        "method": np.repeat(RAMPS, head_dim // 2),
        "pair": np.tile(np.arange(head_dim // 2), len(RAMPS)),
        "divisor": np.concatenate(divisors),
        "short": np.tile(stretch.short().numpy(), len(RAMPS)),
    }


def ramps_draw(data: Data, canvas: Canvas) -> None:
    """Divisor over pair: the code's ramp, the paper's, Llama 3's."""
    axes = canvas.subplots()
    for number, method in enumerate(RAMPS):
        rows = data["method"] == method
        axes.plot(data["pair"][rows], data["divisor"][rows], label=method, **LINES[number])
    _log2(axes, float(data["divisor"].max()))
    _shade(axes, data)
    axes.set_xlabel("pair")
    axes.set_ylabel("frequency divided by (log scale)")
    axes.legend(loc="upper left")


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "divisor",
            "What each method divides each frequency by. Only the shaded pairs need the whole factor: they meet new"
            " angles. PI is flat, NTK-aware a power that reaches the factor at the last pair alone, YaRN and llama3"
            " climb where turns run out. Dynamic with factor s overshoots to s^2 - s + 1 at s times the length (001-23,"
            " E21, E23, E55).",
            divisor_data,
            divisor_draw,
        ),
        Figure(
            "ramps",
            "YaRN twice: between keeping a pair and dividing it, the code blends over the pair's index, from the pair"
            " of 32 turns to that of 1, the paper over the turns themselves; checkpoints mean the code. llama3 is the"
            " paper's formula with 4 turns for 32 (OK12).",
            ramps_data,
            ramps_draw,
        ),
    ),
)
