"""The derivative of softmax: how much a weight changes when a score changes, and when it vanishes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .. import measures
from ..figure import Data, Figure
from ..report import Report, Table, equal, holds, wrapped
from ..sketch import shades
from . import TOPICS
from .base import Topic

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

# similar scores, one score far above the others, and large scores
SCORES = ((1.0, 2.0, 3.0), (0.0, 0.0, 50.0), (100.0, 100.0, 100.0))


def report() -> Report:
    """The Jacobian of softmax for three rows of scores: closed form, autograd, and finite differences."""
    rows, far, slope = [], 0.0, 0.0
    for scores in SCORES:
        x = torch.tensor(scores, dtype=torch.float64)
        jacobian = measures.softmax_jacobian(x)  # (N, N)
        rows.append((_joined(scores), _joined(x.softmax(-1).tolist()), _largest(jacobian), _push(scores)))
        far = max(far, _largest(jacobian - _by_autograd(x)))
        slope = max(slope, float(np.abs(jacobian.numpy() - _by_differences(scores)).max()))
    many = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4  # (B, N)
    jacobians = measures.softmax_jacobian(many)  # (B, N, N)
    near, one_hot, large = (measures.softmax_jacobian(torch.tensor(scores)) for scores in SCORES)  # (N, N) each
    half = measures.softmax_jacobian(torch.zeros(2))  # (2, 2)
    sums, tiny = _largest(jacobians.sum(-2)), _largest(one_hot) / (2 * math.exp(-50))
    return Report(
        "softmax",
        TOPICS["softmax"],
        says=wrapped(
            "The derivative of weight i by score j is p_i (i = j) - p_i p_j: when one weight grows, the others shrink."
            " If one score is far above the others, all derivatives are 0, and training gets no gradient. Large scores"
            " alone are harmless: three equal scores of 100 have the same derivatives as three of 0."
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
            equal("003-05", "closed form against finite differences", slope, 0.0, 1e-8),
            equal("003-05", "1, 2, 3: derivative of weight 3 by score 3", float(near[2, 2]), _logistic_slope(), 1e-15),
            equal("003-05", "1,000 random rows: largest sum of a column", sums, 0.0, 1e-15),
            holds("003-05", "1,000 random rows: no entry is above 1/4", _largest(jacobians) <= 0.25 + 1e-15),
            equal("003-05", "two equal scores: p (1 - p) at p = 1/2", _largest(half), 0.25),
            equal("003-06", "0, 0, 50: largest entry / (2 e^-50)", tiny, 1.0, 1e-12),
            equal("003-06", "100, 100, 100: largest entry, 1/3 - 1/9", _largest(large), 2 / 9, 1e-15),
            equal("003-06", "100, 100, 100 against 0, 0, 0: difference", _shifted(), 0.0, 1e-15),
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
    """Central differences (p(x + h e_j) - p(x - h e_j)) / 2h, with an error of order h^2: (N, N)."""
    x, moves = np.array(scores), step * np.eye(len(scores))
    return np.stack([(_softmax(x + move) - _softmax(x - move)) / (2 * step) for move in moves], axis=1)


def _logistic_slope() -> float:
    """The derivative of weight 3 of (1, 2, 3) by its score: that of a logistic function of 3 - log(e + e^2)."""
    against = 3 - math.log(math.e + math.e**2)
    return 1 / (2 + math.exp(against) + math.exp(-against))


def _push(scores: tuple[float, ...]) -> float:
    """Change of the first weight when its score is raised by 0.1."""
    x = np.array(scores)
    return float((_softmax(x + 0.1 * np.eye(3)[0]) - _softmax(x))[0])


def _shifted() -> float:
    far, near = (measures.softmax_jacobian(torch.full((3,), value)) for value in (100.0, 0.0))
    return _largest(far - near)


def _joined(numbers: tuple[float, ...] | list[float]) -> str:
    return ", ".join(f"{x:.3g}" for x in numbers)


def jacobian_data() -> Data:
    """The nine derivatives of each of the three rows of scores."""
    rows = [
        (_joined(scores), i, j, value)
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
        axes.set_xlabel("the score that changes")
    panels[0].set_ylabel("the weight that responds")
    canvas.colorbar(images[0], ax=panels, label="derivative (weight per score)", location="bottom", shrink=0.6)


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "jacobian",
            "Derivative of weight i by score j. Left, similar scores: all weights change. Middle, one score far above"
            " the others: no weight changes, and there is no gradient. Right, large but equal scores: the same as at 0,"
            " so only differences of scores matter.",
            jacobian_data,
            jacobian_draw,
            size=(5.8, 3.0),
            sketch=lambda data: shades(data, "i", "j", "derivative", ("scores",)),
        ),
    ),
)
