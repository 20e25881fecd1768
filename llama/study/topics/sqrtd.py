"""The division by the square root of the head width: scores of random vectors and softmax, with and without it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .. import measures
from ..figure import LINES, MARKERS, Canvas, Data, Figure, columns, legend_above
from ..report import Report, Table
from .base import Topic

DRAWS, KEYS = 400, 32  # random queries, and random keys per query
# similar scores, one score far above the others, and large scores
SCORES = ((1.0, 2.0, 3.0), (0.0, 0.0, 50.0), (100.0, 100.0, 100.0))


def drawn(width: int) -> tuple[Tensor, Tensor]:
    """Queries (B, 1, D) and keys (B, S, D), entries of mean 0 and variance 1."""
    draw = torch.Generator().manual_seed(width)
    return torch.randn(DRAWS, 1, width, generator=draw), torch.randn(DRAWS, KEYS, width, generator=draw)


def measured(q: Tensor, k: Tensor) -> dict[str, float]:
    """Variance of the scores, mean largest weight and mean norm of softmax's Jacobian, raw and divided by sqrt(D)."""
    dots = (q.double() @ k.double().transpose(-1, -2)).squeeze(1)  # (B, S)
    numbers = {}
    for kind, scores in (("raw", dots), ("scaled", dots / q.shape[-1] ** 0.5)):
        numbers[f"variance {kind}"] = float(scores.var())
        numbers[f"largest {kind}"] = float(scores.softmax(-1).amax(-1).mean())
        numbers[f"norm {kind}"] = float(measures.softmax_jacobian(scores).flatten(1).norm(dim=-1).mean())
    return numbers


def report() -> Report:
    """Variance, largest weight and Jacobian of scores over random vectors, and the Jacobian of three rows of scores."""
    found = {width: measured(*drawn(width)) for width in (16, 64, 128, 1024)}
    jacobians = {scores: measures.softmax_jacobian(torch.tensor(scores)) for scores in SCORES}  # (N, N) each
    return Report(
        (
            Table(
                "raw q . k, scaled q . k / sqrt(D): variance, mean largest weight, mean norm of softmax's Jacobian",
                ("D", *found[16]),
                [(width, *(round(number, 3) for number in numbers.values())) for width, numbers in found.items()],
            ),
            Table(
                "the Jacobian of softmax",
                ("scores", "weights", "largest derivative"),
                [
                    (_joined(scores), _joined(torch.tensor(scores).softmax(-1).tolist()), float(jacobian.abs().max()))
                    for scores, jacobian in jacobians.items()
                ],
            ),
        ),
        "The dot product of two random vectors of D entries has variance D. Without the division, one key gets nearly"
        " all the weight in wide heads, and the derivative of softmax falls towards 0. Divided by sqrt(D), the scores"
        " have the same distribution at every width. Only differences of scores matter: large but equal scores are"
        " harmless.",
        {"queries": DRAWS, "keys": KEYS},
    )


def _joined(numbers: Sequence[float]) -> str:
    return ", ".join(f"{x:.3g}" for x in numbers)


def sqrtd_data() -> Data:
    """The measured values for widths 4 to 1024, one row per width."""
    widths = [4, 16, 64, 256, 1024]
    found = [measured(*drawn(width)) for width in widths]
    return {"width": np.array(widths), **{name: np.array([row[name] for row in found]) for name in found[0]}}


def sqrtd_draw(data: Data, canvas: Canvas) -> None:
    panels = canvas.subplots(3, 1, sharex=True)
    names = {
        "variance": "variance of the scores",
        "largest": "mean largest weight",
        "norm": "derivative of softmax\n(mean norm of the Jacobian)",
    }
    for axes, (what, label) in zip(panels, names.items(), strict=True):
        for i, (kind, formula) in enumerate((("raw", "without the division"), ("scaled", "divided by √D"))):
            axes.plot(data["width"], data[f"{what} {kind}"], marker=MARKERS[i], label=formula, **LINES[i])
        axes.set_xscale("log", base=2)
        axes.set_xticks(data["width"], data["width"])
        axes.set_ylabel(label)
        if what == "variance":
            axes.set_yscale("log", base=2)
        else:
            axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("width of the head D (entries)")
    legend_above(canvas, panels[0], 2)


def jacobian_data() -> Data:
    """The nine derivatives of each row of SCORES."""
    rows = [
        (_joined(scores), i, j, value)
        for scores in SCORES
        for i, row in enumerate(measures.softmax_jacobian(torch.tensor(scores)).tolist())
        for j, value in enumerate(row)
    ]
    return columns(("scores", "i", "j", "derivative"), rows)


def jacobian_draw(data: Data, canvas: Canvas) -> None:
    panels = canvas.subplots(1, 3)
    images = []
    for axes, scores in zip(panels, dict.fromkeys(data["scores"].tolist()), strict=True):
        chosen = data["scores"] == scores
        derivatives = data["derivative"][chosen].reshape(3, 3)
        images.append(axes.imshow(derivatives, cmap="gray", vmin=-0.25, vmax=0.25))
        for i, j, value in zip(*(data[key][chosen] for key in ("i", "j", "derivative")), strict=True):
            text = f"{value:.3f}" if abs(value) >= 1e-3 else "0"
            axes.text(j, i, text, ha="center", va="center", color="white" if value < 0.015 else "black")
        axes.set_title(f"scores {scores}")
        axes.set_xticks(range(3), range(1, 4))
        axes.set_yticks(range(3), range(1, 4))
        axes.set_xlabel("the score that changes")
    panels[0].set_ylabel("the weight that responds")
    canvas.colorbar(images[0], ax=panels, label="derivative (weight per score)", location="bottom", shrink=0.6)


SQRTD = (
    f"Random queries and {KEYS} random keys. Without the division one key gets all the weight in a wide head, and the"
    " derivative of softmax falls towards 0."
)
JACOBIAN = (
    "Derivative of weight i by score j. Middle: one score is far above the others, and all derivatives are nearly 0."
    " Right: large but equal scores have the derivatives of equal small scores."
)
TOPIC = Topic(
    report,
    (
        Figure("sqrtd", SQRTD, sqrtd_data, sqrtd_draw, size=(5.4, 6.2)),
        Figure("jacobian", JACOBIAN, jacobian_data, jacobian_draw, size=(5.8, 3.0)),
    ),
)
