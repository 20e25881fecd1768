"""Precision: the error of cos and sin, by position and by what is rounded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...rope import freqs_cis_at
from ...rope_scaling import inverse_frequencies
from ..figure import Canvas, Data, Figure, draw_lines
from ..report import Report, Table
from .base import Topic


def _stored(rows: Tensor) -> Tensor:
    """Finished cos and sin (N, D/2), rounded to bfloat16."""
    return torch.complex(rows.real.bfloat16().float(), rows.imag.bfloat16().float())


# Each function computes freqs_cis (N, D/2) complex from positions (N,) int64 and inv_freq (D/2,) float32. The first one
# is the library's. `.to(torch.bfloat16)` rounds frequencies in a buffer to bfloat16.
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "float32": freqs_cis_at,
    "bfloat16 cos, sin": lambda positions, inv_freq: _stored(freqs_cis_at(positions, inv_freq)),
    "bfloat16 frequencies": lambda positions, inv_freq: freqs_cis_at(positions, inv_freq.bfloat16().float()),
    "bfloat16 positions": lambda positions, inv_freq: freqs_cis_at(positions.bfloat16().float(), inv_freq),
}
D, THETA, CONTEXT = 128, 500000.0, 131072  # Llama 3.1


def errors(name: str, positions: Tensor) -> np.ndarray:
    """Largest error of cos and sin over all pairs, against float64, by position: (N,)."""
    rows = WAYS[name](positions, inverse_frequencies(D, THETA)[0]).numpy()  # (N, D/2) complex
    exact = np.outer(positions.numpy(), THETA ** (-np.arange(0, D, 2) / D))  # (N, D/2) radians
    off: np.ndarray = np.maximum(np.abs(rows.real - np.cos(exact)), np.abs(rows.imag - np.sin(exact))).max(-1)
    return off


def report() -> Report:
    """Errors of four tables at a few positions."""
    positions = torch.tensor([(CONTEXT >> shift) - 1 for shift in (9, 7, 5, 4, 2, 0)])  # (N,)
    rows = list(zip(positions.tolist(), *(errors(name, positions).tolist() for name in WAYS), strict=True))
    return Report(
        [Table("largest error of cos and sin over all pairs", ("position", *WAYS), rows)],
        "An angle is position times frequency, so the error of a rounded frequency grows with the position. An error"
        " of 1 makes the angle useless. Rounding only the finished cos and sin to bfloat16 adds at most 2^-9 = 0.002"
        " at any position. The library's table stays float32 when a model is cast.",
        settings={"head_dim": D, "theta": THETA, "context": CONTEXT},
    )


def precision_data() -> Data:
    """Columns: table, position, error: the largest error of cos and sin over all pairs, against float64.

    A point is the worst of up to 12 neighboring positions, since single positions may happen to be exact.
    """
    edges = np.unique(np.geomspace(1, CONTEXT, 61).round().astype(np.int64))  # (bins + 1,)
    tried = np.linspace(edges[:-1], edges[1:] - 1, 12).round().astype(np.int64)  # (12, bins)
    found = [errors(name, torch.as_tensor(tried.ravel())).reshape(tried.shape) for name in WAYS]
    return {
        "table": np.repeat(list(WAYS), len(edges) - 1),
        "position": np.concatenate([np.take_along_axis(tried, off.argmax(0)[None], 0)[0] for off in found]),
        "error": np.concatenate([off.max(0) for off in found]),
    }


def precision_draw(data: Data, canvas: Canvas) -> None:
    """Error over position, both log, one line per table."""
    axes = canvas.subplots()
    axes.set(xscale="log", yscale="log", xlabel="position (tokens, log scale)")
    draw_lines(axes, data, "position", "error", "table", WAYS, (2, 8))
    axes.axhline(1, color="#000000", linewidth=0.6)
    axes.annotate(
        "as large as cos itself", (1, 1), xytext=(2, 2), textcoords="offset points", fontsize=8, ha="left", va="bottom"
    )
    axes.set_ylabel("largest error of cos and sin (log scale)")
    axes.legend(loc="lower right")


CAPTION = (
    "Largest error of cos and sin of all pairs, by position (Llama 3.1: 64 pairs, base 500,000). Rounding"
    " positions or frequencies to bfloat16 makes the angles of some fast pairs useless within a thousand"
    " tokens."
)
TOPIC = Topic(report, (Figure("precision", CAPTION, precision_data, precision_draw, size=(5.8, 3.8)),))
