"""Precision: the error of cos and sin, by position and by what is rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...rope import Rope, freqs_cis_at
from ...rope_scaling import inverse_frequencies
from .. import formulas
from ..figure import Data, Figure, draw_lines
from ..report import Report, Table, below, equal, holds, wrapped
from ..sketch import curves
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


# Just below 1, float32 numbers are 2^-24 apart. cos in torch and in numpy may differ by one such step, and so may
# their frequencies: two steps in all.
ULP = 2.0**-23

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


def errors(rows: Tensor, positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Largest error of cos and sin over all pairs, for rows (N, D/2) complex against float64, by position: (N,)."""
    angles = np.outer(positions.numpy(), formulas.frequencies(head_dim, theta))  # (N, D/2) radians
    cos = np.abs(rows.real.double().numpy() - np.cos(angles))  # (N, D/2)
    sin = np.abs(rows.imag.double().numpy() - np.sin(angles))
    return torch.as_tensor(np.maximum(cos, sin).max(-1))


def report(head_dim: int = 128, theta: float = 500000.0, context: int = 131072) -> Report:
    """Errors of four tables at a few positions, compared with a prediction from the rounding steps."""
    _check(head_dim, theta, context)
    pinned = (head_dim, theta, context) == (128, 500000.0, 131072)
    inv_freq, _ = inverse_frequencies(head_dim, theta)
    last = context - 1
    positions = torch.tensor(sorted({(context >> shift) - 1 for shift in (9, 7, 5, 4, 2)} | {last}))  # (N,)
    errors_of = {
        name: errors(way(positions, inv_freq), positions, head_dim, theta).tolist() for name, way in WAYS.items()
    }
    table = Table(
        "largest error of cos and sin over all pairs",
        ("position", *WAYS),
        [(m, *(errors_of[name][n] for name in WAYS)) for n, m in enumerate(positions.tolist())],
    )
    at_last = {name: found[-1] for name, found in errors_of.items()}
    frequencies = formulas.frequencies(head_dim, theta)  # (D/2,)
    single = _emulated(last, frequencies, frequencies.astype(np.float32))
    coarse = _emulated(last, frequencies, formulas.bfloat16(frequencies).astype(np.float32))
    reciprocal = _emulated(last, frequencies, np.float32(1) / (1 / frequencies).astype(np.float32))
    twice = _reciprocal_error(head_dim, theta, last)
    right_twice = 3.7e-3 if pinned else reciprocal
    relative, radians = _bfloat16_at_8191()
    power, off = _positions_lost(context)
    return Report(
        "precision",
        TOPICS["precision"],
        settings={"head_dim": head_dim, "theta": theta, "context": context},
        says=wrapped(
            "An angle is position times frequency, so the error of a rounded frequency grows with the position. At"
            f" position {last:,} the error is {at_last['float32']:.2g} with float32,"
            f" {at_last['bfloat16 frequencies']:.2g} with bfloat16 frequencies, and"
            f" {at_last['bfloat16 positions']:.2g} with bfloat16 positions; {_useless(positions.tolist(), errors_of)}."
            " Rounding only cos and sin adds at most 2^-9 = 0.002, at any position. A cast of the model rounds"
            " its buffers. So the library's table is not a buffer, and stays float32."
        ),
        tables=(table,),
        checks=(
            equal("002-17", f"float32 at {last:,}", at_last["float32"], single, ULP),
            below("002-17", "float32: bounded by position times 2^-23", at_last["float32"], (last + 1) * 2.0**-23),
            equal("002-17", "frequencies 1/θ^x, rounded twice", twice, right_twice, 5e-5 if pinned else ULP),
            below("002-26", "bfloat16 cos, sin: additional error", _excess(errors_of), 1.001 * 2.0**-9),
            equal("002-17", f"bfloat16 frequencies at {last:,}", at_last["bfloat16 frequencies"], coarse, ULP),
            equal("002-17", "bfloat16 frequencies, base 1e4: relative error", relative, 0.004, 4e-4),
            equal("002-17", "the same at position 8,191: error in radians", radians, 10.0, 0.05),
            equal("002-17", f"bfloat16 positions below {power:,}: largest error", off, power // 512),
            holds("002-23", "a model cast to bfloat16 keeps its float32 table, bit for bit", _stays()),
        ),
    )


def _useless(positions: list[int], errors_of: dict[str, list[float]]) -> str:
    """A clause on the first position in the table at which the error with bfloat16 angles is at least 1."""
    lost = [m for m, *off in zip(positions, *list(errors_of.values())[2:], strict=True) if max(off) >= 1]
    return f"from position {lost[0]:,} on, bfloat16 angles are useless" if lost else "cos itself is at most 1"


def _emulated(position: int, exact: formulas.Array, frequency: npt.NDArray[np.float32]) -> float:
    """Largest error of cos and sin for these rounded frequencies, with angles, cos and sin in float32, in numpy."""
    angle = (np.float32(position) * frequency).astype(np.float64)  # (D/2,) rounded to float32, then exact
    cos, sin = (f(angle).astype(np.float32) - f(position * exact) for f in (np.cos, np.sin))  # (D/2,) float64 each
    return float(max(np.abs(cos).max(), np.abs(sin).max()))


def _reciprocal_error(head_dim: int, theta: float, position: int) -> float:
    """The error with frequencies as in Meta's and Hugging Face's code: a power in float32, then its reciprocal."""
    power = (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)).float()  # (D/2,)
    at = torch.tensor([position])
    return float(errors(freqs_cis_at(at, 1.0 / power), at, head_dim, theta)[0])


def _bfloat16_at_8191() -> tuple[float, float]:
    """Largest relative error of bfloat16 frequencies, and the error in radians at position 8,191; D = 128, base 1e4."""
    coarse = inverse_frequencies(128, 10000.0)[0].bfloat16().double().numpy()  # (64,)
    exact = formulas.frequencies(128, 10000.0)
    return float(np.abs(coarse / exact - 1).max()), 8191 * float(np.abs(coarse - exact).max())


def _positions_lost(context: int) -> tuple[int, int]:
    """The largest power of two up to the context, and the error of a bfloat16 position just below it, in tokens."""
    power = 1 << (context.bit_length() - 1)
    near = torch.arange(power - power // 128, power)
    return power, int((near - near.bfloat16().to(torch.int64)).abs().max())


def _excess(errors_of: dict[str, list[float]]) -> float:
    return max(b - a for a, b in zip(errors_of["float32"], errors_of["bfloat16 cos, sin"], strict=True))


def _stays() -> bool:
    """Whether a model cast to bfloat16 keeps its float32 table, bit for bit."""
    from ...config import ModelConfig
    from ...model import Transformer

    config = ModelConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, hidden_dim=16, vocab_size=8)
    model = Transformer(config).to(torch.bfloat16)
    fresh = Rope("complex", config.head_dim, config.max_seq_len, config.rope_theta)
    at = torch.tensor([500, 1000])  # rows that the table has from the start: later ones would be made afresh
    kept = model.rope.freqs_cis(at, 1001)
    expected = fresh.freqs_cis(at, 1001)
    return isinstance(kept, Tensor) and isinstance(expected, Tensor) and torch.equal(kept, expected)


def precision_data(head_dim: int = 128, theta: float = 500000.0, context: int = 131072) -> Data:
    """table, position (tokens), error: the largest error of cos and sin over all pairs, against float64.

    A point is the maximum over up to 12 positions between it and the next point, since single positions may happen
    to be exact.
    """
    _check(head_dim, theta, context)
    inv_freq, _ = inverse_frequencies(head_dim, theta)
    edges = np.unique(np.geomspace(1, context, 61).round().astype(np.int64))  # (bins + 1,)
    tried = np.linspace(edges[:-1], edges[1:] - 1, 12).round().astype(np.int64)  # (12, bins)
    positions = torch.as_tensor(tried.ravel())
    found = [
        errors(way(positions, inv_freq), positions, head_dim, theta).numpy().reshape(tried.shape).max(0)
        for way in WAYS.values()
    ]
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
            "The largest error of cos and sin over the pairs of a head, by position. In float32 it grows with the"
            " position and stays small. Frequencies or positions rounded to bfloat16 before the product make the angle"
            " useless within a thousand tokens; positions up to 256 are exact in bfloat16. Rounding only the finished"
            " cos and sin adds a constant error.",
            precision_data,
            precision_draw,
            size=(5.8, 3.8),
            sketch=lambda data: curves(data, "position", "error", "table", log="xy"),
        ),
    ),
)
