"""Precision: the error of cos and sin, by position and by what is rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...rope import freqs_cis_at
from ...rope_scaling import inverse_frequencies
from ..figure import Data, Figure, draw_lines
from ..report import Report, Table, wrapped
from . import TOPICS
from .base import Topic, check_head_dim, check_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

# Each way computes freqs_cis for positions (N,) int64 and inv_freq (D/2,) float32: (N, D/2) complex.
Way = Callable[[Tensor, Tensor], Tensor]


def _float32(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """The library: frequencies computed in float64 and rounded once; angles, cos and sin in float32."""
    return freqs_cis_at(positions, inv_freq)


def _stored(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """The same, with cos and sin rounded to bfloat16 at the end, as in a model with a bfloat16 table."""
    rows = freqs_cis_at(positions, inv_freq)  # (N, D/2)
    return torch.complex(rows.real.bfloat16().float(), rows.imag.bfloat16().float())


def _frequencies(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Frequencies rounded to bfloat16, as `.to(torch.bfloat16)` does to a buffer."""
    return freqs_cis_at(positions, inv_freq.bfloat16().float())


def _positions(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Positions rounded to bfloat16, which has 8 significant bits: integers above 256 lose their last bits."""
    return freqs_cis_at(positions.bfloat16().float(), inv_freq)


WAYS: dict[str, Way] = {
    "float32": _float32,
    "bfloat16 cos, sin": _stored,
    "bfloat16 frequencies": _frequencies,
    "bfloat16 positions": _positions,
}


def _check(head_dim: int, theta: float, context: int) -> None:
    """Raise UsageError on settings out of range."""
    check_head_dim(head_dim, 4, 1024)
    check_range("--rope-theta", theta, 100.0, 1e12)
    check_range("--context", context, 512, 2**20)


def errors(way: Way, positions: Tensor, head_dim: int, theta: float) -> np.ndarray:
    """Largest error of cos and sin over all pairs, against float64, by position: (N,)."""
    rows = way(positions, inverse_frequencies(head_dim, theta)[0]).numpy()  # (N, D/2) complex
    exact = np.outer(positions.numpy(), theta ** (-np.arange(0, head_dim, 2) / head_dim))  # (N, D/2) radians
    off: np.ndarray = np.maximum(np.abs(rows.real - np.cos(exact)), np.abs(rows.imag - np.sin(exact))).max(-1)
    return off


def report(head_dim: int = 128, theta: float = 500000.0, context: int = 131072) -> Report:
    """Errors of four tables at a few positions."""
    _check(head_dim, theta, context)
    positions = torch.tensor(sorted({(context >> shift) - 1 for shift in (9, 7, 5, 4, 2, 0)}))  # (N,)
    found = [errors(way, positions, head_dim, theta).tolist() for way in WAYS.values()]
    return Report(
        "precision",
        TOPICS["precision"],
        settings={"head_dim": head_dim, "theta": theta, "context": context},
        says=wrapped(
            "An angle is position times frequency, so the error of a rounded frequency grows with the position. An"
            " error of 1 makes the angle useless. Rounding only the finished cos and sin to bfloat16 adds at most 2^-9"
            " = 0.002 at any position. The library's table stays float32 when a model is cast."
        ),
        tables=(
            Table(
                "largest error of cos and sin over all pairs",
                ("position", *WAYS),
                list(zip(positions.tolist(), *found, strict=True)),
            ),
        ),
    )


def precision_data(head_dim: int = 128, theta: float = 500000.0, context: int = 131072) -> Data:
    """table, position (tokens), error: the largest error of cos and sin over all pairs, against float64.

    A point is the maximum over up to 12 positions between it and the next point, since single positions may happen
    to be exact.
    """
    _check(head_dim, theta, context)
    edges = np.unique(np.geomspace(1, context, 61).round().astype(np.int64))  # (bins + 1,)
    tried = np.linspace(edges[:-1], edges[1:] - 1, 12).round().astype(np.int64)  # (12, bins)
    positions = torch.as_tensor(tried.ravel())
    found = [errors(way, positions, head_dim, theta).reshape(tried.shape).max(0) for way in WAYS.values()]
    return {
        "table": np.repeat(list(WAYS), len(edges) - 1),
        "position": np.tile(edges[:-1], len(WAYS)),
        "error": np.concatenate(found),
    }


def precision_draw(data: Data, canvas: Canvas) -> None:
    """Error over position, both log, one line per table."""
    axes = canvas.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    draw_lines(axes, data, "position", "error", "table", WAYS, (2, 8))
    axes.axhline(1, color="#000000", linewidth=0.6)
    axes.annotate(
        "as large as cos itself", (1, 1), xytext=(2, 2), textcoords="offset points", fontsize=8, ha="left", va="bottom"
    )
    axes.set_xlabel("position (tokens, log scale)")
    axes.set_ylabel("largest error of cos and sin (log scale)")
    axes.legend(loc="lower right")


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "precision",
            "Error of cos and sin by position, the largest of all pairs. Rounding positions or frequencies to bfloat16"
            " makes the angle useless within a thousand tokens.",
            precision_data,
            precision_draw,
            size=(5.8, 3.8),
        ),
    ),
)
