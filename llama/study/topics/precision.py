"""Precision: how far cos and sin are from the truth, by position and by where the rounding happens."""

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
from ..figure import LINES, MARKERS, Data, Figure
from ..report import Report, Table, below, equal, holds, wrapped
from .base import Topic, check_head_dim, check_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

# Each way makes rows of the table for positions (N,) int64 and inv_freq (D/2,) float32: (N, D/2) complex.
Way = Callable[[Tensor, Tensor], Tensor]


def _float32(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """The library: frequencies made in float64 and rounded once, angles and turns in float32."""
    return freqs_cis_at(positions, inv_freq)


def _stored(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """The same, with cos and sin rounded to bfloat16 at the end, as they meet a model in bfloat16."""
    rows = freqs_cis_at(positions, inv_freq)  # (N, D/2)
    return torch.complex(rows.real.bfloat16().float(), rows.imag.bfloat16().float())


def _frequencies(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Frequencies in bfloat16: what `.to(torch.bfloat16)` makes of a buffer."""
    return freqs_cis_at(positions, inv_freq.bfloat16().float())


def _positions(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Positions in bfloat16, which has 8 bits: whole numbers above 256 lose their last digits."""
    return freqs_cis_at(positions.bfloat16().float(), inv_freq)


# Just below 1 float32 numbers are 2^-24 apart. Two good routines for cos may round one way and the other, and torch's
# frequencies and numpy's likewise: two such steps.
ULP = 2.0**-23

WAYS: dict[str, Way] = {
    "float32": _float32,
    "bfloat16 cos, sin": _stored,
    "bfloat16 frequencies": _frequencies,
    "bfloat16 positions": _positions,
}


def _check(head_dim: int, theta: float, context: int) -> None:
    """Raises UsageError on settings that the topic cannot take."""
    check_head_dim(head_dim, 4, 1024)
    check_range("--rope-theta", theta, 100.0, 1e12)
    check_range("--context", context, 512, 2**20)


def errors(rows: Tensor, positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Largest error of cos and sin over the pairs, by position: rows (N, D/2) complex against float64: (N,)."""
    angles = np.outer(positions.numpy(), formulas.frequencies(head_dim, theta))  # (N, D/2) radians
    cos = np.abs(rows.real.double().numpy() - np.cos(angles))  # (N, D/2)
    sin = np.abs(rows.imag.double().numpy() - np.sin(angles))
    return torch.as_tensor(np.maximum(cos, sin).max(-1))


def report(head_dim: int = 128, theta: float = 500000.0, context: int = 131072) -> Report:
    """Errors of four tables at a few positions, and what rounding predicts for them."""
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
    twice = _rounded_twice(head_dim, theta, last)
    right_twice = 3.7e-3 if pinned else reciprocal
    relative, radians = _bfloat16_at_8191()
    power, off = _positions_lost(context)
    return Report(
        "precision",
        "how exact are the angles, by position and by dtype?",
        settings={"head_dim": head_dim, "theta": theta, "context": context},
        says=wrapped(
            "an angle is position times frequency, so a frequency's rounding error grows with the position. At position"
            f" {last:,} float32 is off by {at_last['float32']:.2g}, frequencies in bfloat16 by"
            f" {at_last['bfloat16 frequencies']:.2g}, positions in bfloat16 by {at_last['bfloat16 positions']:.2g};"
            f" {_useless(positions.tolist(), errors_of)}. Rounding cos and sin themselves costs at most 2^-9 = 0.002"
            " more, at any position. So the library's table is no buffer and stays float32 (E30)."
        ),
        tables=(table,),
        checks=(
            equal("E30", f"float32 at {last:,}", at_last["float32"], single, ULP),
            below("E30", "float32: position times 2^-23 bounds it", at_last["float32"], (last + 1) * 2.0**-23),
            equal("E30", "frequencies 1/theta^x, rounded twice", twice, right_twice, 5e-5 if pinned else ULP),
            below("002-26", "bfloat16 cos, sin: at most 2^-9 more anywhere", _excess(errors_of), 1.001 * 2.0**-9),
            equal("E30", f"bfloat16 frequencies: at {last:,}", at_last["bfloat16 frequencies"], coarse, ULP),
            equal("E30", "the same, base 1e4: relative error", relative, 0.004, 4e-4),
            equal("E30", "the same, base 1e4: radians off at 8,191", radians, 10.0, 0.05),
            equal("E30", f"bfloat16 positions below {power:,}: off by up to", off, power // 512),
            holds("E30 002-23", "a model cast to bfloat16 keeps its float32 table, bit for bit", _stays()),
        ),
    )


def _useless(positions: list[int], errors_of: dict[str, list[float]]) -> str:
    """In words: the first position shown at which angles from bfloat16 are as wrong as cos is large."""
    lost = [m for m, *off in zip(positions, *list(errors_of.values())[2:], strict=True) if max(off) >= 1]
    return f"by {lost[0]:,} angles in bfloat16 mean nothing" if lost else "1 would be as large as cos itself"


def _emulated(position: int, exact: formulas.Array, frequency: npt.NDArray[np.float32]) -> float:
    """The largest error of cos and sin if frequencies are rounded so, angles, cos and sin to float32: numpy alone."""
    angle = (np.float32(position) * frequency).astype(np.float64)  # (D/2,) rounded to float32, then exact
    cos, sin = (f(angle).astype(np.float32) - f(position * exact) for f in (np.cos, np.sin))  # (D/2,) float64 each
    return float(max(np.abs(cos).max(), np.abs(sin).max()))


def _rounded_twice(head_dim: int, theta: float, position: int) -> float:
    """The error on frequencies made as Meta's and Hugging Face's code do: a power in float32, then its reciprocal."""
    power = (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)).float()  # (D/2,)
    at = torch.tensor([position])
    return float(errors(freqs_cis_at(at, 1.0 / power), at, head_dim, theta)[0])


def _bfloat16_at_8191() -> tuple[float, float]:
    """Largest error of bfloat16 frequencies, relative, and in radians at position 8,191; D = 128, base 1e4."""
    rounded = inverse_frequencies(128, 10000.0)[0].bfloat16().double().numpy()  # (64,)
    exact = formulas.frequencies(128, 10000.0)
    return float(np.abs(rounded / exact - 1).max()), 8191 * float(np.abs(rounded - exact).max())


def _positions_lost(context: int) -> tuple[int, int]:
    """The largest power of two up to the context, and by how many tokens bfloat16 moves a position just below it."""
    power = 1 << (context.bit_length() - 1)
    near = torch.arange(power - power // 128, power)
    return power, int((near - near.bfloat16().to(torch.int64)).abs().max())


def _excess(errors_of: dict[str, list[float]]) -> float:
    return max(b - a for a, b in zip(errors_of["float32"], errors_of["bfloat16 cos, sin"], strict=True))


def _stays() -> bool:
    """Whether a model cast to bfloat16 still turns by the float32 table, bit for bit."""
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
    """table, position (tokens), error: the largest of cos and sin over all pairs, against float64.

    A point is the worst of up to 12 positions, from its own to the next point's: some positions are exact by luck.
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
    """Error over position, both log, a line a table."""
    axes = canvas.subplots()
    for index, name in enumerate(WAYS):
        rows = data["table"] == name
        axes.loglog(
            data["position"][rows],
            data["error"][rows],
            label=name,
            marker=MARKERS[index],
            markersize=4,
            markevery=(2 * index, 8),
            **LINES[index],
        )
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
            " position and stays small. In bfloat16, frequencies or positions that are rounded before the product ruin"
            " the angle within a thousand tokens; cos and sin rounded after it cost the same everywhere (E30).",
            precision_data,
            precision_draw,
        ),
    ),
)
