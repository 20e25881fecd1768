"""Digits: the sinusoidal table compared with binary numbers, its radix and its number of digits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import measures
from ..figure import Data, Figure
from ..report import Report, Table, equal, wrapped
from ..sketch import shades
from . import TOPICS
from .base import Topic, check_head_dim, check_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def bits(numbers: np.ndarray, count: int = 4) -> np.ndarray:
    """The lowest `count` binary digits of numbers (N,), least significant first: (N, count)."""
    digits: np.ndarray = numbers[:, None] >> np.arange(count) & 1
    return digits


def report(head_dim: int = 128, theta: float = 10000.0) -> Report:
    """Periods of the digits, radix, number of digits; and positions recovered from angles read to a few marks."""
    check_head_dim(head_dim, 4, 1024)
    check_range("--rope-theta", theta, 2.0, 1e12)
    waves = measures.wavelengths(measures.frequencies(head_dim, theta))  # (d/2,)
    radix = theta ** (2 / head_dim)
    periods = _periods(bits(np.arange(64)))
    numbers = torch.arange(16)
    table = measures.sinusoids(numbers, head_dim, theta)  # (N, d)
    marks = max(8, math.floor(radix) + 2)
    positions = np.arange(min(4096, math.floor(2 * math.pi * theta ** (1 - 2 / head_dim))))
    wrong = int((read_back(positions, head_dim, theta, marks) != positions).sum())
    span, steps = float(waves[-1] / waves[0]), waves[1:] / waves[:-1]
    returns = _returns(waves, head_dim, theta)
    return Report(
        "binary",
        TOPICS["binary"],
        settings={"width d": head_dim, "theta": theta},
        says=wrapped(
            "A binary digit repeats after 2, 4, 8, ... numbers, a pair after 2 pi, 2 pi beta, 2 pi beta^2, ..."
            " positions, with beta = θ^(2/d). So a position is a number of d/2 digits of radix beta, and each digit"
            f" is the angle of a hand. Reading every hand to 1/{marks} of a turn determines the position exactly."
        ),
        tables=(
            Table(
                "digits and hands",
                ("digit or pair", "period of the bit", "wavelength of the pair", "ratio to the previous"),
                [
                    (i, periods[i], float(waves[i]), "" if i == 0 else f"{float(waves[i] / waves[i - 1]):.6g}")
                    for i in range(min(4, head_dim // 2))
                ],
            ),
            Table(
                "the number system of the table",
                ("", "radix", "digits", "longest period / shortest"),
                [
                    ("computed", radix, len(waves), f"{span:.4g}"),
                    (
                        "as published, with 2 pi",
                        2 * math.pi * radix,
                        head_dim,
                        _power(2 * math.pi * radix, head_dim - 1),
                    ),
                ],
            ),
        ),
        checks=(
            equal("003-13", "periods of four bits", ", ".join(map(str, periods)), "2, 4, 8, 16"),
            equal("003-12", "largest change of a pair after one wavelength", returns, 0.0, 1e-5),
            equal("003-15", "ratio of successive wavelengths, smallest", float(steps.min()), radix, 1e-5 * radix),
            equal("003-15", "ratio of successive wavelengths, largest", float(steps.max()), radix, 1e-5 * radix),
            equal("003-15", "the first period is 2 pi", float(waves[0]), 2 * math.pi, 1e-6),
            equal("003-15", "longest period / shortest / θ", span / theta, theta ** (-2 / head_dim), 1e-5),
            equal("003-15", "digits", len(waves), head_dim // 2),
            equal("003-13", "smallest entry of rows 0 .. 15: -1, not 0", float(table.min()), -1.0, 1e-4),
            equal(
                "003-15",
                f"wrong positions of {len(positions):,}, from hands rounded to 1/{marks} of a turn",
                wrong,
                0,
            ),
        ),
    )


def _periods(columns: np.ndarray) -> list[int]:
    """The smallest shift that leaves a column unchanged, for each column of (N, count)."""
    n = len(columns)
    return [next((p for p in range(1, n) if np.array_equal(c[p:], c[:-p])), n) for c in columns.T]


def _returns(waves: torch.Tensor, dim: int, theta: float) -> float:
    """The largest change of pair i after i's wavelength, over all pairs."""
    now = measures.sinusoids(torch.tensor([3.0]), dim, theta)[0].view(-1, 2)  # (d/2, 2)
    later = measures.sinusoids(3.0 + waves, dim, theta).view(len(waves), -1, 2)  # (d/2, d/2, 2), row i: wavelength i
    return float((later.diagonal().T - now).abs().max())


def _power(radix: float, digits: int) -> str:
    return f"10^{digits * math.log10(radix):.0f}"


def read_back(positions: np.ndarray, dim: int, theta: float, marks: int) -> np.ndarray:
    """Recover positions (N,) from the angles of all hands, each rounded to the nearest of `marks` marks: (N,).

    The estimate is refined from the slowest hand, which makes less than one turn, to the fastest. Each hand
    determines the error of the estimate so far, up to full turns. This works if the error of the slower hand, half
    a mark, times beta, plus half a mark of this hand, is below half a turn: marks > beta + 1. The remaining error is
    half a mark of pair 0, which is below half a position if marks > 2 pi.
    """
    speeds = theta ** (-np.arange(0, dim, 2) / dim)  # (d/2,) radians a position
    table = measures.sinusoids(torch.from_numpy(positions), dim, theta).numpy()  # (N, d)
    angles = np.arctan2(table[:, 0::2], table[:, 1::2]) % (2 * np.pi)  # (N, d/2)
    seen = np.round(angles * marks / (2 * np.pi)) * (2 * np.pi / marks)  # (N, d/2)
    estimate = np.zeros(len(positions))
    for i in reversed(range(len(speeds))):
        off = seen[:, i] - estimate * speeds[i]  # (N,) radians
        full_turns = np.round(off / (2 * np.pi)) if i < len(speeds) - 1 else 0.0
        estimate += (off - 2 * np.pi * full_turns) / speeds[i]
    return np.round(estimate)


def binary_data() -> Data:
    """Rows 0 .. 15: four bits, and the sine columns of four pairs of radix 2 (base 16) and radix 10 (base 10000)."""
    number, digit = np.meshgrid(np.arange(16), np.arange(4), indexing="ij")
    sines = [measures.sinusoids(torch.arange(16), 8, base)[:, 0::2].numpy() for base in (16.0, 10000.0)]  # (N, 4) each
    return {
        "panel": np.repeat(["bits", "radix 2", "radix 10"], number.size),
        "number": np.tile(number.ravel(), 3),
        "digit": np.tile(digit.ravel(), 3),
        "value": np.concatenate([bits(np.arange(16)).ravel(), *(s.ravel() for s in sines)]),
        "period": np.concatenate(
            [2 ** (digit.ravel() + 1.0), *(2 * np.pi * float(radix) ** digit.ravel() for radix in (2, 10))]
        ),
    }


def binary_draw(data: Data, canvas: Canvas) -> None:
    panels = canvas.subplots(1, 3, sharey=True)
    titles = {"bits": "bits", "radix 2": "sines, radix 2", "radix 10": "sines, radix 10"}
    images = []
    for axes, (panel, title) in zip(panels, titles.items(), strict=True):
        chosen = data["panel"] == panel
        values = data["value"][chosen].reshape(16, 4)
        least = 0 if panel == "bits" else -1
        images.append(axes.imshow(values, cmap="gray", vmin=least, vmax=1, aspect="auto", interpolation="nearest"))
        for row, column in np.ndindex(16, 4):
            value = values[row, column]
            dark = (value - least) / (1 - least) < 0.45
            words = f"{value:.0f}" if panel == "bits" else f"{value:+.2f}"
            axes.text(column, row, words, ha="center", va="center", color="white" if dark else "black", fontsize=8)
        periods = data["period"][chosen][:4]
        axes.set_xticks(range(4), [f"{i}\n{period:.4g}" for i, period in enumerate(periods)])
        axes.set_yticks(range(16))
        axes.set_title(title)
        axes.set_xlabel("bit, its period (numbers)" if panel == "bits" else "pair, its period (positions)")
    panels[0].set_ylabel("number, or position (tokens)")
    canvas.colorbar(images[-1], ax=panels, label="sine")


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "binary",
            "The bits of a number, the lowest on the left: each changes half as fast as the one before it. So do the"
            " sines of a table of radix 2, but between -1 and 1 instead of 0 and 1. With base 10000 and four pairs"
            " the radix is 10, and the third and fourth digits hardly change in 16 steps.",
            binary_data,
            binary_draw,
            size=(7.5, 4.6),
            sketch=lambda data: shades(data, "number", "digit", "value", ("panel",)),
        ),
    ),
)
