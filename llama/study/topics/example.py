"""The worked example: one batch of queries and keys rotated by Meta's function, and one number at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ... import rope
from ..figure import Data, Figure
from ..report import Report, Table
from . import TOPICS
from .base import Topic, columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

# Batch 2, 5 tokens, 2 query heads that share 1 key head, 8 entries per head. The values count up, so that each value
# identifies its entry.
XQ = torch.arange(160.0).reshape(2, 5, 2, 8)  # (B, T, H, D)
XK = torch.arange(80.0).reshape(2, 5, 1, 8)  # (B, T, KV, D)


def report() -> Report:
    """Six steps with their shapes, and the value of the element 28 + 29j at each step."""
    freqs_cis = rope.precompute_freqs_cis(8, 5)  # (T, D/2) complex
    paired = torch.view_as_complex(XQ.unflatten(-1, (-1, 2)))  # (B, T, H, D/2) complex
    xq_out, _ = rope.apply_rotary_emb(XQ, XK, freqs_cis)
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
        says=("Text 0, token 1, head 1, pair 2 has the values 28 and 29. Position 1 rotates it by 0.01 radians.",),
        tables=(steps,),
    )


STEPS = ("xq", "pairs", "complex numbers", "freqs_cis", "product", "pairs again", "xq_out")


def example_data() -> Data:
    """Text 0, token 1, head 1 at each step, one row per value; `shape` is the shape of the batch at that step."""
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
            rows.append(
                (step, str(tuple(tensor.shape)), cell, int(head.is_complex()), value.real, value.imag, int(marked))
            )
    return columns(("step", "shape", "cell", "complex", "real", "imaginary", "marked"), rows)


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
    ),
)
