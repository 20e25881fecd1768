"""Scale: how far each pair turns in training, and by how much each scaling divides its frequency.

Letters: D head_dim, theta the base, L = context the trained length, s = factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...checkpoint import open_checkpoint
from ...config import ModelConfig
from ...errors import UsageError
from ...rope_scaling import inverse_frequencies, kind_of, reach, trained_length
from ...tools.families import official
from ..figure import Axes, Canvas, Data, Figure, draw_lines, legend_above, pair_colour
from ..measures import seen_arc, stretching, turns, wavelengths
from ..perplexity import folder_of
from ..report import Report, Table
from .base import Topic, answering, check_head_dim, check_range

KINDS = {"linear": "PI", "ntk": "NTK-aware", "dynamic": "dynamic", "yarn": "YaRN", "llama3": "llama3"}
OPTIONS = {"head_dim": "--head-dim", "theta": "--rope-theta", "context": "--context"}


@dataclass(frozen=True)
class Stretch:
    """Heads of head_dim entries, trained at base theta on `context` tokens, to be used on `factor` times as many.

    Raises UsageError outside of its limits, within which each formula is valid: YaRN's ramp, for example, would be
    reversed if its last fast pair came after the last pair of the head.
    """

    head_dim: int = 128
    theta: float = 10000.0
    context: int = 2048
    factor: float = 4.0

    def __post_init__(self) -> None:
        check_head_dim(self.head_dim, 4, 1024)
        check_range("--rope-theta", self.theta, 100.0, 1e12)
        check_range("--context", self.context, 16, 2**20)
        check_range("--rope-factor", self.factor, 1.01, 1024.0)

    @property
    def target(self) -> int:
        """Tokens of the stretched context, rounded down."""
        return int(self.context * self.factor)

    def stretched(self, kind: str) -> tuple[Tensor, float]:
        """Frequencies at the target length (D/2,) float64, radians per position, and the factor of cos and sin."""
        inv_freq, attention_factor = inverse_frequencies(
            self.head_dim,
            self.theta,
            stretching(kind, self.factor) if kind != "default" else None,
            seq_len=self.target,
            max_seq_len=self.context,
        )
        return inv_freq.double(), attention_factor

    def frequencies(self, kind: str = "default") -> Tensor:
        """Frequencies at the target length: (D/2,) float64, radians per position."""
        return self.stretched(kind)[0]

    def slow(self) -> Tensor:
        """Whether each pair stays below one turn within the trained context, unscaled: (D/2,) bool."""
        return turns(self.frequencies(), self.context) < 1

    def unseen(self, inv_freq: Tensor) -> int:
        """Number of pairs that meet new angles at the target length under the frequencies inv_freq (D/2,).

        A pair that finished a turn has met every angle. A relative excess of 1e-6 counts as rounding.
        """
        met = self.target * inv_freq  # (D/2,) radians
        return int((self.slow() & (met > self.context * self.frequencies() * (1 + 1e-6))).sum())

    def some_pairs(self) -> list[int]:
        """A few pairs: those at the quarters of the range, and the first that doesn't finish a turn in training."""
        count = self.head_dim // 2
        first_slow = torch.nonzero(self.slow()).flatten().tolist()[:1]
        return sorted({0, count // 4, count // 2, 3 * count // 4, count - 1, *first_slow})


class Scaled(NamedTuple):
    """Settings; per method, frequencies (D/2,) and factor of cos and sin; name and configuration of a checkpoint."""

    stretch: Stretch
    by_method: dict[str, tuple[Tensor, float]]
    model: str | None
    config: ModelConfig | None


def _scaled(
    head_dim: int | None = None,
    theta: float | None = None,
    context: int | None = None,
    factor: float | None = None,
    model: str | None = None,
) -> Scaled:
    """Every method for the given settings, or for those of a checkpoint.

    If the checkpoint has a scaling, it is the last method; its frequencies are those at the full context.
    """
    settings: dict[str, Any] = {"head_dim": head_dim, "theta": theta, "context": context, "factor": factor}
    given, config = {name: value for name, value in settings.items() if value is not None}, None
    if model is not None:
        for name in OPTIONS.keys() & given:
            raise UsageError(
                f"{OPTIONS[name]} is set by the checkpoint of --model; leave {OPTIONS[name]} or --model out"
            )
        config = official().get(model) or open_checkpoint(folder_of(model)).config
        own = {"head_dim": config.head_dim, "theta": config.rope_theta, "context": int(trained_length(config))}
        factor = (config.rope_scaling or {}).get("factor")
        if isinstance(factor, int | float) and factor > 1:
            own["factor"] = float(factor)
        given = own | given
    stretch = Stretch(**given)
    found = {name: stretch.stretched(kind) for kind, name in KINDS.items()}
    if config is not None and kind_of(config.rope_scaling) != "default":
        lengths = {"seq_len": reach(config), "max_seq_len": config.max_seq_len}
        inv_freq, times = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling, **lengths)
        found["this model"] = inv_freq.double(), times
    return Scaled(stretch, found, model, config)


def _report(found: Scaled) -> Report:
    """Wavelength, turns and divisors of a few pairs, and how many pairs meet new angles under each scaling."""
    stretch, scaled, model, config = found
    plain, context = stretch.frequencies(), stretch.context
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
        f"of {len(plain)} pairs, {int(stretch.slow().sum())} make less than a turn in training",
        ("method", "pairs that meet new angles", "cos, sin times"),
        [(name, stretch.unseen(w), times) for name, (w, times) in (("unscaled", (plain, 1.0)), *scaled.items())],
    )
    says = (
        "A pair that finishes a turn in training has met every angle and needs no scaling. A slower pair meets new"
        " angles in a longer text, unless its frequency is divided by the full factor."
    )
    if config is not None:
        says += f" {model} has the scaling {kind_of(config.rope_scaling)} and can use {reach(config):,} tokens."
    return Report((pairs, methods), says, vars(stretch))


# ---------------------------------------------------------------------------------------------------- figure: divisor
def _divisors(found: Scaled) -> Data:
    """Columns: method, pair, divisor; slow, True if the unscaled pair stays below one turn in training."""
    stretch, scaled, *_ = found
    plain = stretch.frequencies()
    return {
        "method": np.repeat(list(scaled), len(plain)),
        "pair": np.tile(np.arange(len(plain)), len(scaled)),
        "divisor": torch.cat([plain / w for w, _ in scaled.values()]).numpy(),
        "slow": np.tile(stretch.slow().numpy(), len(scaled)),
    }


divisor_data = answering(_scaled, _divisors)


def divisor_draw(data: Data, canvas: Canvas) -> None:
    """Divisor over pair on a log axis, one line per method; pairs that need the full factor are shaded."""
    axes = canvas.subplots()
    count = int(data["pair"].max()) + 1
    methods = dict.fromkeys(data["method"].tolist())
    draw_lines(axes, data, "pair", "divisor", "method", methods, (max(count // 48, 1), max(count // 8, 1)))
    axes.set(xlim=(0, count - 1), xlabel="pair i (0 turns fastest)", ylabel="divisor of the frequency (log scale)")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0.93, max(float(data["divisor"].max()) * 1.15, 2))
    if data["slow"].any():
        axes.axvspan(int(data["pair"][data["slow"]].min()), count - 1, color="#e8e8e8", zorder=0)
        axes.text(count - 1, 0.96, "less than a turn in training ", ha="right", va="bottom", fontsize=8)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.9))  # below the line of PI


# --------------------------------------------------------------------------------------------------- figure: seen_arc
ARCS = {"default": "unscaled", "linear": "PI", "ntk": "NTK-aware", "yarn": "YaRN"}


def seen_arc_data(head_dim: int = 128, theta: float = 10000.0, context: int = 2048, factor: float = 4.0) -> Data:
    """Columns: method, pair; the arcs seen in training and met at the target length, in radians, at most 2 pi."""
    stretch = Stretch(head_dim, theta, context, factor)
    pairs = stretch.some_pairs()
    seen = seen_arc(stretch.frequencies(), context)[pairs].numpy()  # training was without scaling
    # PI's last position, L - 1/s, exceeds the last trained one, L - 1, by a part of a step, which is not counted
    met = [seen_arc(stretch.frequencies(kind), stretch.target + 1 - math.ceil(factor))[pairs].numpy() for kind in ARCS]
    return {
        "method": np.repeat(list(ARCS.values()), len(pairs)),
        "pair": np.tile(pairs, len(ARCS)),
        "seen": np.tile(seen, len(ARCS)),
        "met": np.concatenate(met),
    }


def seen_arc_draw(data: Data, canvas: Canvas) -> None:
    """One row per method, one circle per pair: the seen arc is filled, the met arc a ring, and new angles hatched."""
    methods, pairs = list(dict.fromkeys(data["method"])), list(dict.fromkeys(data["pair"]))
    grid = canvas.subplots(len(methods), len(pairs), squeeze=False)
    for axes, pair, seen, met in zip(grid.flat, data["pair"], data["seen"].tolist(), data["met"].tolist(), strict=True):
        _circle(axes, seen, met, pair_colour(pair, pairs[-1] + 1))
    for row, method in zip(grid, methods, strict=True):
        row[0].text(-1.6, 0, method, ha="right", va="center", fontsize=9)
    for axes, pair in zip(grid[0], pairs, strict=True):
        axes.set_title(f"pair {pair}")
    legend_above(canvas, grid[0][-1], 3)


def _circle(axes: Axes, seen: float, met: float, colour: str) -> None:
    from matplotlib.patches import Wedge

    degrees, new = 180 / math.pi, met > seen * (1 + 1e-6)
    axes.add_patch(Wedge((0, 0), 1, 0, 360, facecolor="none", edgecolor="#999999", linewidth=0.6))
    axes.add_patch(Wedge((0, 0), 1, 0, seen * degrees, facecolor=colour, edgecolor="none", label="met in training"))
    if new:
        red: dict[str, Any] = {"facecolor": "none", "edgecolor": "#b2182b", "hatch": "////", "lw": 0}
        axes.add_patch(Wedge((0, 0), 1, seen * degrees, met * degrees, **red, label="new"))
    ring: dict[str, Any] = {"width": 0.01, "facecolor": "none", "edgecolor": "#000000", "lw": 1.2}
    axes.add_patch(Wedge((0, 0), 1.18, 0, met * degrees, **ring, label="ring: met in the longer text"))
    full = 2 * math.pi - 1e-9
    words = "all seen" if seen >= full else f"{seen:.2g},\nthen " + ("all" if met >= full else f"{met:.2g}")
    axes.text(0, -1.32, words, ha="center", va="top", fontsize=8, color="#b2182b" if new else "#000000")
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    axes.set_axis_off()


TOPIC = Topic(
    answering(_scaled, _report),
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
            "Filled: angles that a pair met in training. Ring: angles that it meets at four times the length, without"
            " scaling and with three methods. Red: new angles. Below each circle: both arcs, in radians.",
            seen_arc_data,
            seen_arc_draw,
            size=(5.6, 5.2),
        ),
    ),
)
