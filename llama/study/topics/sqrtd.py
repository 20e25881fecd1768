"""The division by the square root of the head width: scores of random vectors and softmax, with and without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ... import attention
from .. import measures
from ..figure import LINES, MARKERS, Data, Figure
from ..report import Report, Table, above, below, equal
from ..sketch import curves
from . import TOPICS
from .base import Topic, check_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

DRAWS, KEYS = 400, 32  # random queries, and random keys per query
HEADS = 8  # for the check that the width is the head's and not the model's


def drawn(width: int) -> tuple[Tensor, Tensor]:
    """Queries (B, 1, 1, D) and keys (B, 1, S, D), entries of mean 0 and variance 1."""
    draw = torch.Generator().manual_seed(width)
    q = torch.randn(DRAWS, 1, 1, width, generator=draw)  # (B, H, T, D)
    return q, torch.randn(DRAWS, 1, KEYS, width, generator=draw)  # (B, KV, S, D)


def measured(q: Tensor, k: Tensor) -> dict[str, float]:
    """For the library's attention: variance of the scores, mean largest weight, mean norm of softmax's Jacobian.

    The library divides by sqrt(D). Results without the division are computed with queries sqrt(D) times as long.
    """
    width = q.shape[-1]
    dots = (q.double() @ k.double().transpose(-1, -2)).squeeze((1, 2))  # (B, S)
    numbers = {}
    for kind, stretch in (("raw", width**0.5), ("scaled", 1.0)):
        numbers[f"variance {kind}"] = float((dots * stretch / width**0.5).var())
        weights = attention.reference_weights(q * stretch, k).squeeze((1, 2))  # (B, S)
        numbers[f"largest {kind}"] = float(weights.amax(-1).mean())
        jacobian = measures.softmax_jacobian(dots * stretch / width**0.5)  # (B, S, S)
        numbers[f"norm {kind}"] = float(jacobian.flatten(1).norm(dim=-1).mean())
    return numbers


def limit(width: int, draws: int = 4000) -> dict[str, float]:
    """The same without vectors: given q, the scores of random keys are independent normals with variance |q|^2.

    So a score is a standard normal variable times the square root of a chi-squared variable of D degrees of freedom.
    """
    draw = np.random.default_rng(0)
    normals = draw.standard_normal((draws, KEYS)) * np.sqrt(draw.chisquare(width, (draws, 1)))  # (B, S)
    numbers = {}
    for kind, divide in (("raw", 1.0), ("scaled", width**0.5)):
        largest, norms = of_powers(normals / divide)
        numbers[f"largest {kind}"], numbers[f"norm {kind}"] = float(largest.mean()), float(norms.mean())
    return numbers


def of_powers(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Largest weight (B,) and norm of the Jacobian (B,) of scores (B, S), without computing the matrix.

    |diag(p) - p p^T|^2 = sum p^2 - 2 sum p^3 + (sum p^2)^2.
    """
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)  # (B, S)
    two, three = (p**2).sum(1), (p**3).sum(1)
    return p.max(1), np.sqrt((two - 2 * three + two**2).clip(0))  # rounding may return -1e-17 for 0


def report(head_dim: int = 128) -> Report:
    """Variance, largest weight and Jacobian of scores over random vectors of four widths."""
    check_range("--head-dim", head_dim, 1, 1024)
    widths = sorted({16, 64, 1024, head_dim})
    found = {width: measured(*drawn(width)) for width in widths}
    expected = limit(head_dim)
    q, k = drawn(head_dim)
    dots = (q.double() @ k.double().transpose(-1, -2)).squeeze((1, 2))  # (B, S)
    heads = _variance_by_head(head_dim)
    norm = float(of_powers(dots.numpy() / head_dim**0.5)[1].mean())
    columns = [f"{what} {kind}" for what in ("variance", "largest", "norm") for kind in ("raw", "scaled")]
    return Report(
        "sqrtd",
        TOPICS["sqrtd"],
        settings={"head_dim": head_dim, "queries": DRAWS, "keys": KEYS},
        says=(
            "The dot product of two random vectors of D entries has variance D. Without the division, one key",
            "gets nearly all the weight in wide heads, and the derivative of softmax falls towards 0. Divided by",
            "sqrt(D), the scores have the same distribution at every width.",
        ),
        tables=(
            Table(
                "raw q . k, scaled q . k / sqrt(D): variance, mean largest p, mean norm of softmax's Jacobian",
                ("D", *(name.replace("largest", "largest p") for name in columns)),
                [(width, *(round(found[width][name], 3) for name in columns)) for width in widths],
            ),
        ),
        checks=(
            equal("003-07", "mean of q . k / sqrt(D)", float(dots.mean()) / head_dim**0.5, 0.0, 0.1),
            *(
                equal("003-08", f"D = {d}: variance of q . k / D", found[d]["variance raw"] / d, 1.0, 0.2)
                for d in widths
            ),
            equal("003-08", "the same for keys of equal entries", _equal_entries(head_dim), 1.0, 0.1),
            *(
                equal("003-09", f"D = {head_dim}: {_LONG[name]}, against normals", found[head_dim][name], value, 0.05)
                for name, value in expected.items()
            ),
            equal("003-05", "Jacobian's norm, scaled, from powers of p", found[head_dim]["norm scaled"], norm, 1e-9),
            above("003-09", "largest weight, raw, at D = 1024", found[1024]["largest raw"], 0.9),
            below("003-09", "largest weight, scaled, at D = 1024", found[1024]["largest scaled"], 0.2),
            equal("003-02", f"{HEADS} heads: variance / head width", heads / head_dim, 1.0, 0.1),
            equal("003-02", f"{HEADS} heads: variance / model width", heads / (HEADS * head_dim), 1 / HEADS, 0.02),
            equal("003-02", "torch's kernel also divides by sqrt(D): difference", _kernel(q, k), 0.0, 1e-5),
        ),
    )


_LONG = {
    "largest raw": "largest weight, raw",
    "largest scaled": "largest weight, scaled",
    "norm raw": "Jacobian's norm, raw",
    "norm scaled": "Jacobian's norm, scaled",
}


def _equal_entries(width: int) -> float:
    """Variance of q . k / D when all entries of a key are the same random number."""
    draw = torch.Generator().manual_seed(1)
    total, count = 0.0, 0
    for _ in range(20):  # in parts, to limit the memory for wide heads
        q = torch.randn(1000, width, generator=draw, dtype=torch.float64)
        k = torch.randn(1000, 1, generator=draw, dtype=torch.float64).expand(-1, width)
        total, count = total + float((q * k).sum(-1).square().sum()), count + 1000
    return total / count / width


def _variance_by_head(head_dim: int) -> float:
    """Variance of q . k of one head, in a model with HEADS heads."""
    draw = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 1000, HEADS * head_dim, generator=draw)  # (B, C) each
    return float((q * k).unflatten(-1, (HEADS, head_dim)).sum(-1).var())


def _kernel(q: Tensor, k: Tensor) -> float:
    """Largest difference between the fused kernel's weights and the formula in numpy; one-hot values extract them."""
    queries, keys = q.squeeze((1, 2)), k[0, 0]  # (B, D), (S, D): all queries with the keys of the first
    weights = attention.sdpa(queries[None, None], keys[None, None], torch.eye(KEYS)[None, None])[0, 0]  # (B, S)
    exp = np.exp(queries.double().numpy() @ keys.double().numpy().T / np.sqrt(q.shape[-1]))  # (B, S)
    return float(np.abs(weights.double().numpy() - exp / exp.sum(1, keepdims=True)).max())


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
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "sqrtd",
            f"Random queries and {KEYS} random keys each. Without the division by √D the variance grows as D, the"
            " largest weight approaches 1, and the derivative of softmax falls towards 0. With it, all three are"
            " constant.",
            sqrtd_data,
            sqrtd_draw,
            size=(5.4, 6.2),
            sketch=lambda data: curves(data, "width", ("largest raw", "largest scaled"), log="x"),
        ),
    ),
)
