"""Softmax's derivative: how much a weight moves when a score moves, and when nothing moves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .. import measures
from ..figure import Data, Figure
from ..report import Report, Table, equal, holds
from .base import Topic

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

# Scores near each other, one far above the others, and all of them large.
SCORES = ((1.0, 2.0, 3.0), (0.0, 0.0, 50.0), (100.0, 100.0, 100.0))


def report() -> Report:
    """The Jacobian of three rows of scores: closed form, autograd, and differences of the weights themselves."""
    rows, far, slope = [], 0.0, 0.0
    for scores in SCORES:
        x = torch.tensor(scores, dtype=torch.float64)
        jacobian = measures.softmax_jacobian(x)  # (N, N)
        rows.append((_words(scores), _words(x.softmax(-1).tolist()), _largest(jacobian), _push(scores)))
        far = max(far, _largest(jacobian - _by_autograd(x)))
        slope = max(slope, float(np.abs(jacobian.numpy() - _by_differences(scores)).max()))
    many = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4  # (B, N)
    jacobians = measures.softmax_jacobian(many)  # (B, N, N)
    near, one_hot, large = (measures.softmax_jacobian(torch.tensor(scores)) for scores in SCORES)  # (N, N) each
    half = measures.softmax_jacobian(torch.zeros(2))  # (2, 2)
    sums, tiny = _largest(jacobians.sum(-2)), _largest(one_hot) / (2 * math.exp(-50))
    return Report(
        "softmax",
        "how much does a weight move when a score moves?",
        says=(
            "Raising score j moves weight i by p_i (i = j) - p_i p_j: what one gains, the others lose. Where",
            "one score stands far above the others all of that is 0, and nothing can be learned from it.",
            "Large alone does no harm: three equal scores of 100 move their weights as much as three of 0.",
        ),
        tables=(
            Table(
                "three rows of scores",
                ("scores", "weights", "largest derivative", "first weight, its score raised by 0.1"),
                rows,
            ),
        ),
        checks=(
            equal("003-05", "closed form against autograd, largest difference", far, 0.0, 1e-15),
            equal("003-05", "against differences of the weights", slope, 0.0, 1e-8),
            equal("003-05", "1, 2, 3: derivative of weight 3 by score 3", float(near[2, 2]), _logistic_slope(), 1e-15),
            equal("003-05", "1,000 random rows: sum of a column, furthest from 0", sums, 0.0, 1e-15),
            holds("003-05", "none of their entries is above 1/4", _largest(jacobians) <= 0.25 + 1e-15),
            equal("003-05", "which two equal scores reach, p (1 - p) at 1/2", _largest(half), 0.25),
            equal("003-06", "0, 0, 50: largest, over 2 e^-50", tiny, 1.0, 1e-12),
            equal("E37", "100, 100, 100: largest, 1/3 - 1/9", _largest(large), 2 / 9, 1e-15),
            equal("E37", "the same as of 0, 0, 0, difference", _shifted(), 0.0, 1e-15),
        ),
    )


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _by_autograd(x: Tensor) -> Tensor:
    with torch.enable_grad():
        jacobian: Tensor = torch.autograd.functional.jacobian(lambda scores: scores.softmax(-1), x)
    return jacobian


def _softmax(scores: np.ndarray) -> np.ndarray:
    exp = np.exp(scores - scores.max())
    weights: np.ndarray = exp / exp.sum()
    return weights


def _by_differences(scores: tuple[float, ...], step: float = 1e-5) -> np.ndarray:
    """(p(x + h e_j) - p(x - h e_j)) / 2h, right to h^2: (N, N)."""
    x, moves = np.array(scores), step * np.eye(len(scores))
    return np.stack([(_softmax(x + move) - _softmax(x - move)) / (2 * step) for move in moves], axis=1)


def _logistic_slope() -> float:
    """Weight 3 of (1, 2, 3) is a logistic function of its own score against log(e + e^2); its slope there."""
    against = 3 - math.log(math.e + math.e**2)
    return 1 / (2 + math.exp(against) + math.exp(-against))


def _push(scores: tuple[float, ...]) -> float:
    """How much the first weight moves when its score is raised by 0.1."""
    x = np.array(scores)
    return float((_softmax(x + 0.1 * np.eye(3)[0]) - _softmax(x))[0])


def _shifted() -> float:
    far, near = (measures.softmax_jacobian(torch.full((3,), value)) for value in (100.0, 0.0))
    return _largest(far - near)


def _words(numbers: tuple[float, ...] | list[float]) -> str:
    return ", ".join(f"{x:.3g}" for x in numbers)


def jacobian_data() -> Data:
    """Nine derivatives for each of the three rows of scores."""
    rows = [
        (_words(scores), i, j, value)
        for scores in SCORES
        for i, row in enumerate(measures.softmax_jacobian(torch.tensor(scores)).tolist())
        for j, value in enumerate(row)
    ]
    names = ("scores", "i", "j", "derivative")
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def jacobian_draw(data: Data, canvas: Canvas) -> None:
    panels = canvas.subplots(1, 3)
    images = []
    for axes, scores in zip(panels, dict.fromkeys(data["scores"].tolist()), strict=True):
        chosen = data["scores"] == scores
        derivatives = data["derivative"][chosen].reshape(3, 3)
        images.append(axes.imshow(derivatives, cmap="gray", vmin=-0.25, vmax=0.25))
        for i, j, value in zip(*(data[key][chosen] for key in ("i", "j", "derivative")), strict=True):
            text = f"{value:.3f}" if abs(value) >= 1e-3 else f"{value:.0e}"
            axes.text(j, i, text, ha="center", va="center", color="white" if value < -0.05 else "black")
        axes.set_title(f"scores {scores}")
        axes.set_xticks(range(3), range(1, 4))
        axes.set_yticks(range(3), range(1, 4))
        axes.set_xlabel("score j that is raised")
    panels[0].set_ylabel("weight i that moves")
    canvas.colorbar(images[0], ax=panels, label="derivative (weight per score)", shrink=0.75)


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "jacobian",
            "How much weight i moves when score j is raised. Near each other: everything moves. One far above: nothing"
            " does, and no gradient comes back. Large but equal: as much as at 0, so it is the differences that count"
            " (003-05, 003-06, E37).",
            jacobian_data,
            jacobian_draw,
            size=(7.5, 3.4),
        ),
    ),
)
