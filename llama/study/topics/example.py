"""The worked example: one batch of queries and keys rotated by Meta's function, and one number at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import rope
from ...rope_scaling import inverse_frequencies
from .. import forms
from ..figure import LINES, Data, Figure
from ..report import Report, Table, equal, holds
from ..sketch import curves
from . import TOPICS
from .base import Topic

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

# Batch 2, 5 tokens, 2 query heads that share 1 key head, 8 entries per head. The values count up, so that each value
# identifies its entry.
XQ = torch.arange(160.0).reshape(2, 5, 2, 8)  # (B, T, H, D)
XK = torch.arange(80.0).reshape(2, 5, 1, 8)  # (B, T, KV, D)


def report() -> Report:
    """Six steps with their shapes, and the value of the element 28 + 29j at each step."""
    inv_freq, _ = inverse_frequencies(8)
    freqs_cis = rope.precompute_freqs_cis(8, 5)  # (T, D/2) complex
    paired = torch.view_as_complex(XQ.unflatten(-1, (-1, 2)))  # (B, T, H, D/2) complex
    xq_out, xk_out = rope.apply_rotary_emb(XQ, XK, freqs_cis)
    element, factor = complex(paired[0, 1, 1, 2]), complex(freqs_cis[1, 2])
    steps = Table(
        "from xq to xq_out",
        ("step", "shape", "the element"),
        (
            ("xq", "(2, 5, 2, 8)", "28, 29"),
            ("pairs", "(2, 5, 2, 4, 2)", "(28, 29)"),
            ("complex numbers", "(2, 5, 2, 4)", element),
            ("freqs_cis, broadcast", "(1, 5, 1, 4)", factor),
            ("product", "(2, 5, 2, 4)", element * factor),
            ("xq_out", "(2, 5, 2, 8)", ", ".join(f"{x:.4f}" for x in xq_out[0, 1, 1, 4:6].tolist())),
        ),
    )
    return Report(
        "example",
        TOPICS["example"],
        says=("Sample 0, token 1, head 1, pair 2 has the values 28 and 29. Position 1 turns it by 0.01 radians.",),
        tables=(steps,),
        checks=(
            equal("000-41", "angle of pair 2 per position", float(inv_freq[2]), 0.01, 1e-9),
            equal("000-46", "the element as a complex number", element, 28 + 29j),
            equal("000-48", "its freqs_cis, cis 0.01", factor, 0.9999500004 + 0.0099998333j, 1e-7),
            equal("000-48", "the product", element * factor, 27.708604844975795 + 29.27854543534996j, 1e-5),
            equal("000-51", "all 240 numbers against float64, largest error", _error(xq_out, xk_out), 0.0, 2e-5),
            holds("000-52", "position 0 is unchanged, bit for bit", torch.equal(xq_out[:, 0], XQ[:, 0])),
            holds("000-54", "all samples and heads are rotated alike", _same_turn(paired, xq_out)),
            *(
                equal(claim, f"{what}, largest error", _error(*rotate(freqs_cis.real, freqs_cis.imag)), 0.0, 4e-5)
                for rotate, claim, what in FORMS
            ),
        ),
    )


def _half(cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    """XQ and XK in the half layout, rotated, and back in the interleaved layout."""
    q, k = (rope.interleaved_to_half(x) for x in (XQ, XK))
    turned = rope.apply_rotary_pos_emb(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), unsqueeze_dim=2)
    return [rope.half_to_interleaved(x) for x in turned]


# the other forms of the rotation: (cos, sin) (T, D/2) -> XQ and XK rotated; claim, description
FORMS: tuple[tuple[Callable[..., Sequence[torch.Tensor]], str, str], ...] = (
    (lambda cos, sin: rope.apply_rotary_emb_real(XQ, XK, cos, sin), "000-51", "without complex numbers"),
    (lambda cos, sin: [forms.apply_matrix(x, cos, sin) for x in (XQ, XK)], "000-32", "as a matrix"),
    (
        lambda cos, sin: [forms.apply_elementwise(x, cos, sin) for x in (XQ, XK)],
        "000-51",
        "x cos + (a quarter turn of x) sin",
    ),
    (_half, "002-42", "half layout, reordered back"),
)


def _error(xq_out: torch.Tensor, xk_out: torch.Tensor) -> float:
    """The largest error of the 160 + 80 numbers, against angles and products in numpy's float64."""
    angles = np.outer(np.arange(5), 10000.0 ** (-np.arange(0, 8, 2) / 8))  # (T, D/2)
    worst = 0.0
    for x, out in ((XQ, xq_out), (XK, xk_out)):
        a, b = x.double().numpy()[..., 0::2], x.double().numpy()[..., 1::2]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        right = np.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(x.shape)
        worst = max(worst, float(np.abs(right - out.double().numpy()).max()))
    return worst


def _same_turn(paired: torch.Tensor, xq_out: torch.Tensor) -> bool:
    turns = torch.view_as_complex(xq_out.unflatten(-1, (-1, 2))) / paired  # (B, T, H, D/2)
    return bool(torch.allclose(turns[:, 1:], turns[:1, 1:, :1], atol=1e-5))


def change_data() -> Data:
    """How far a pair of length 1 moves, by position: 2 |sin(position * inv_freq / 2)|."""
    inv_freq = inverse_frequencies(8)[0].double().numpy()
    position, pair = np.meshgrid(np.arange(64), np.arange(4), indexing="ij")
    return {
        "position": position.ravel(),
        "pair": pair.ravel(),
        "change": 2 * np.abs(np.sin(position * inv_freq[pair] / 2)).ravel(),
    }


def change_draw(data: Data, canvas: Canvas) -> None:
    axes = canvas.subplots()
    for pair in range(4):
        rows = data["pair"] == pair
        axes.plot(data["position"][rows], data["change"][rows], label=f"pair {pair}", **LINES[pair])
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("change of a pair of length 1")
    canvas.legend(loc="outside upper center", ncols=4)


STEPS = ("xq", "pairs", "complex numbers", "freqs_cis", "product", "pairs again", "xq_out")


def example_data() -> Data:
    """Sample 0, token 1, head 1 at each step, one row per value; `shape` is the shape of the batch at that step."""
    freqs_cis = rope.precompute_freqs_cis(8, 5).view(1, 5, 1, 4)  # (1, T, 1, D/2) complex
    pairs = XQ.unflatten(-1, (-1, 2))  # (B, T, H, D/2, 2)
    paired = torch.view_as_complex(pairs)  # (B, T, H, D/2) complex
    product = paired * freqs_cis  # (B, T, H, D/2) complex
    xq_out, _ = rope.apply_rotary_emb(XQ, XK, freqs_cis[0, :, 0])  # (B, T, H, D)
    rows = []
    for step, tensor in enumerate((XQ, pairs, paired, freqs_cis, product, torch.view_as_real(product), xq_out)):
        head = tensor[0, 1, min(1, tensor.shape[2] - 1)].flatten()  # (D,), or (D/2,) complex
        for cell, value in enumerate(head.tolist()):
            marked = cell == 2 if head.is_complex() else cell in (4, 5)
            rows.append((step, str(tuple(tensor.shape)), cell, int(head.is_complex()), *_parts(value), int(marked)))
    names = ("step", "shape", "cell", "complex", "real", "imaginary", "marked")
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _parts(value: complex) -> tuple[float, float]:
    return complex(value).real, complex(value).imag


def example_draw(data: Data, canvas: Canvas) -> None:
    from matplotlib.patches import Rectangle

    axes = canvas.subplots()
    between = (
        "in pairs",
        "a, b as a + jb",
        "times (the same for every text and head)",
        "equals",
        "a + jb as a, b",
        "flattened",
    )
    for step, name in enumerate(STEPS):
        chosen = np.flatnonzero(data["step"] == step)
        top = -1.35 * step
        axes.text(-0.25, top + 0.12, name, ha="right", va="bottom", weight="bold")
        axes.text(-0.25, top - 0.02, data["shape"][chosen[0]], ha="right", va="top")
        if step:
            axes.text(4, top + 0.86, between[step - 1], ha="center", va="center", style="italic", fontsize=8)
        for at in chosen:
            is_complex = bool(data["complex"][at])
            width, real, imaginary = 2 if is_complex else 1, data["real"][at], data["imaginary"][at]
            cell = int(data["cell"][at])
            left = width * cell
            marked = bool(data["marked"][at])
            air = 0.06 if name.startswith("pairs") else 0.0  # a gap between pairs, not within one
            axes.add_patch(
                Rectangle(
                    (left + (air if cell % 2 == 0 else 0.0), top - 0.3),
                    width - air,
                    0.75,
                    facecolor="#c8c8c8" if marked else "white",
                    edgecolor="black",
                    linewidth=2.0 if marked else 0.8,
                    zorder=2 if marked else 1,
                )
            )
            digits = 0 if step < 3 else 5 if name == "freqs_cis" else 4
            words = f"{real:.{digits}f}" + (f"{imaginary:+.{digits}f}j" if is_complex else "")
            axes.text(left + width / 2, top + 0.07, words, ha="center", va="center", fontsize=8, zorder=3)
    axes.set_xlim(-3.2, 8.1)
    axes.set_ylim(-1.35 * 6 - 0.5, 0.7)
    axes.axis("off")


def rotation2d_data() -> Data:
    """Head 1 of sample 0, before and after the rotation: pair 0 of its five tokens, and the four pairs of token 1."""
    xq_out, _ = rope.apply_rotary_emb(XQ, XK, rope.precompute_freqs_cis(8, 5))  # (B, T, H, D)
    before, after = (x[0, :, 1].unflatten(-1, (-1, 2)).double().numpy() for x in (XQ, xq_out))  # (T, D/2, 2) each
    token, pair = np.array([*range(5), 1, 1, 1, 1]), np.array([0] * 5 + [0, 1, 2, 3])
    return {
        "panel": np.array(["tokens"] * 5 + ["pairs"] * 4),
        "token": token,
        "pair": pair,
        "angle": token * inverse_frequencies(8)[0].double().numpy()[pair],
        "x1": before[token, pair, 0],
        "x2": before[token, pair, 1],
        "turned x1": after[token, pair, 0],
        "turned x2": after[token, pair, 1],
    }


def rotation2d_draw(data: Data, canvas: Canvas) -> None:
    panels = canvas.subplots(1, 2)
    for axes, panel in zip(panels, ("tokens", "pairs"), strict=True):
        rows = np.flatnonzero(data["panel"] == panel)
        for i, row in enumerate(rows.tolist()):
            a, b, angle = (data[key][row] for key in ("x1", "x2", "angle"))
            way = np.exp(1j * np.linspace(0, angle, 60)) * (a + 1j * b)  # from the pair to the turned pair
            axes.plot(way.real, way.imag, linewidth=1.0, **LINES[i])
            axes.plot(a, b, "o", color="black", markerfacecolor="white", markersize=5)
            axes.plot(data["turned x1"][row], data["turned x2"][row], "o", color="black", markersize=5)
            if panel == "tokens":
                axes.plot([0, data["turned x1"][row]], [0, data["turned x2"][row]], color="#999999", linewidth=0.8)
            _label(axes, data, row)
        axes.set_aspect("equal")
        axes.set_xlabel("first entry of the pair")
        axes.set_ylabel("second entry of the pair")
    panels[0].axhline(0, color="#cccccc", linewidth=0.6, zorder=0)
    panels[0].axvline(0, color="#cccccc", linewidth=0.6, zorder=0)
    panels[0].set_xlim(-125, 125)
    panels[0].set_ylim(-125, 125)
    panels[0].set_title("pair 0 of tokens 0 .. 4: by 0 .. 4 radians")
    panels[1].set_xlim(20.5, 34)
    panels[1].set_ylim(22.5, 36)
    panels[1].set_title("four pairs of token 1: each by its own angle")


# label of each pair: the point it is at (before or after the rotation), offset in points, horizontal alignment
LABELS = (("x", 8, -4, "left"), ("turned x", -4, 8, "left"), ("x", 8, -4, "left"), ("turned x", 4, 8, "center"))


def _label(axes: Any, data: Data, row: int) -> None:
    x, y = data["turned x1"][row], data["turned x2"][row]
    if data["panel"][row] == "tokens":
        length = np.hypot(x, y)
        away = 1 + 11 / length  # outside its own arc
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.text(away * x, away * y, str(data["token"][row]), ha="center", va="center", weight="bold", bbox=white)
        return
    pair = data["pair"][row]
    at, right, up, side = LABELS[pair]
    words = f"pair {pair}: {data['angle'][row]:.3g} rad\nto {x:.2f}, {y:.2f}"
    point = data[f"{at}1"][row], data[f"{at}2"][row]
    low = "top" if up < 0 else "bottom"
    axes.annotate(words, point, (right, up), textcoords="offset points", ha=side, va=low, fontsize=8)


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "example",
            "One head of one token, step by step, with the shape of the batch on the left. The marked pair 28, 29 is"
            " rotated by 0.01 radians.",
            example_data,
            example_draw,
            size=(7.5, 5.4),
        ),
        Figure(
            "rotation2d",
            "RoFormer's first figure with the values of the example, head 1 of sample 0. Hollow: before the rotation;"
            " filled: after it. A pair keeps its length. The angle grows with the position, and falls from pair to"
            " pair.",
            rotation2d_data,
            rotation2d_draw,
            size=(7.5, 4.5),
        ),
        Figure(
            "change",
            "The angle of a pair falls with its index; the change of its entries does not. Pair 0 returns to its"
            " start after 6.28 positions, while pair 1 is furthest from its start after 31.",
            change_data,
            change_draw,
            size=(5.6, 3.6),
            sketch=lambda data: curves(data, "position", "change", "pair"),
        ),
    ),
)
