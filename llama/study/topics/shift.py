"""The shift: the sinusoidal code of position t + k is a linear function, the same for all t, of that of t."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .. import forms, measures
from ..figure import LINES, MARKERS, Data, Figure
from ..report import Report, Table, above, equal, wrapped
from ..sketch import curves
from . import TOPICS
from .base import Topic, check_head_dim, check_range
from .heatmap import printed_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

OFFSETS = (1, 3, 10, 30)


def triangle_table(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """A table of triangle waves with the periods of the sinusoidal table, instead of sine and cosine: (N, d)."""
    angles = positions.double()[:, None] * base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # (N, d/2)
    waves = torch.stack((angles.sin().asin(), (angles + math.pi / 2).sin().asin()), dim=-1)  # (N, d/2, 2)
    return waves.flatten(-2) * 2 / math.pi  # (N, d): from -1 to 1


def tables(positions: Tensor, dim: int, base: float) -> dict[str, Tensor]:
    """The three tables to compare, each (N, d)."""
    return {
        "sinusoid": measures.sinusoids(positions, dim, base),
        "triangle wave": triangle_table(positions, dim, base),
        "published": printed_table(positions, dim, base),
    }


def shift_matrix(dim: int, base: float, k: int) -> Tensor:
    """The matrix M_k with code(t + k) = M_k code(t) for every t: (d, d).

    A pair is (sin, cos), so it turns clockwise: the blocks are RoPE's for the negated angle,
    [[cos, sin], [-sin, cos]] of k w_i.
    """
    angles = k * base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # (d/2,)
    return forms.rotation_matrix(angles.cos(), -angles.sin())


def residual(table: Tensor, k: int) -> float:
    """The largest residual of the best linear map from rows t to rows t + k, by least squares.

    Directions with singular values below 1e-10 of the largest are ignored: in float64 they are rounding errors.
    """
    now, later = table[:-k], table[k:]  # (N - k, d) each
    best = torch.linalg.lstsq(now, later, rcond=1e-10, driver="gelsd").solution  # (d, d)
    return float((later - now @ best).abs().max())


def report(head_dim: int = 8, theta: float = 10000.0, context: int = 200) -> Report:
    """Residuals of the best linear map for three tables, and the map itself for the sinusoid."""
    check_head_dim(head_dim, 2, 32)
    check_range("--rope-theta", theta, 2.0, 1e12)
    check_range("--context", context, max(64, 4 * head_dim), 2048)
    rows = tables(torch.arange(context), head_dim, theta)  # (N, d) each
    left = {name: {k: residual(table, k) for k in OFFSETS} for name, table in rows.items()}
    maps = {k: shift_matrix(head_dim, theta, k) for k in (*OFFSETS, 13)}
    sine = rows["sinusoid"]
    exact = max(float((sine[k:] - sine[:-k] @ maps[k].T).abs().max()) for k in OFFSETS)
    later = np.exp(-1j * 3 * theta ** (-np.arange(0, head_dim, 2) / head_dim))  # (d/2,): clockwise by 3 w_i
    turned = torch.view_as_complex(sine.unflatten(-1, (-1, 2))).numpy() * later  # (N, d/2): sin + j cos, turned
    code = torch.view_as_real(torch.from_numpy(turned)).flatten(-2)  # (N, d)
    return Report(
        "shift",
        TOPICS["shift"],
        settings={"width d": head_dim, "theta": theta, "positions": context},
        says=wrapped(
            "Yes, by the angle addition formulas: the same matrix M_k, which rotates each pair by k ω_i, is valid for"
            " every t. Periodic columns are not enough: a triangle wave of the same periods has no such matrix, and"
            " neither has a published table where sine and cosine of a pair differ in frequency (exercise cosine)."
        ),
        tables=(
            Table(
                "largest residual of the best linear map from t to t + k (entries are between -1 and 1)",
                ("table", *(f"k = {k}" for k in OFFSETS)),
                [(name, *(f"{left[name][k]:.2g}" for k in OFFSETS)) for name in rows],
            ),
        ),
        checks=(
            equal("000-16", "sinusoid: residual of M_k, all k", exact, 0.0, 1e-10),
            equal("001-02", "sinusoid: residual of the best map, k = 3", left["sinusoid"][3], 0.0, 1e-8),
            above("001-01", "triangle wave: the same", left["triangle wave"][3], 0.01),
            above("002-04", "published: the same", left["published"][3], 0.01),
            *(
                equal(claim, f"{name}: from numpy's SVD", left[name][3], _projected(rows[name].numpy(), 3), 1e-5)
                for claim, name in (("001-01", "triangle wave"), ("002-04", "published"))
            ),
            equal("003-17", "M_3 is clockwise: e^(-3j ω) (sin + j cos)", _gap(code[:-3], sine[3:]), 0.0, 1e-10),
            equal("003-17", "M_10 M_3 - M_13", _gap(maps[10] @ maps[3], maps[13]), 0.0, 1e-12),
            equal("003-17", "M_3 M_3^T - 1: a rotation", _gap(maps[3] @ maps[3].T, torch.eye(head_dim)), 0.0, 1e-12),
        ),
    )


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _projected(table: np.ndarray, k: int) -> float:
    """The residual by projection: the part of rows t + k outside of the column space of rows t."""
    now, later = table[:-k], table[k:]  # (N - k, d) each
    u, sizes, _ = np.linalg.svd(now, full_matrices=False)
    u = u[:, sizes > 1e-10 * sizes[0]]
    return float(np.abs(later - u @ (u.T @ later)).max())


def shift_data(head_dim: int = 8, theta: float = 10000.0, context: int = 200) -> Data:
    """The residual for offsets 1 .. 40, one row per offset."""
    offsets = np.arange(1, 41)
    rows = tables(torch.arange(context), head_dim, theta)  # (N, d) each
    return {"k": offsets, **{name: np.array([residual(t, k) for k in offsets.tolist()]) for name, t in rows.items()}}


def shift_draw(data: Data, canvas: Canvas) -> None:
    axes = canvas.subplots()
    for i, name in enumerate(name for name in data if name != "k"):
        axes.plot(data["k"], data[name], marker=MARKERS[i], markersize=3.5, label=name, **LINES[i])
    axes.set_yscale("log")
    axes.set_ylim(1e-16, 10)
    axes.set_xlabel("offset k (tokens)")
    axes.set_ylabel("largest residual (entries of -1 to 1)")
    canvas.legend(loc="outside upper center", ncols=3)


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "shift",
            "Residual of the best linear map from the code of t to the code of t + k. For sinusoids it is rounding"
            " error at every offset. For triangle waves of the same periods, and for a published table with a mistake,"
            " it is a tenth of the size of the entries or more.",
            shift_data,
            shift_draw,
            sketch=lambda data: curves(data, "k", ("sinusoid", "triangle wave", "published"), log="y"),
        ),
    ),
)
