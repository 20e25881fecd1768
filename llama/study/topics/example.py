"""The worked example: one batch of queries and keys rotated by Meta's function, and one number at every step."""

from __future__ import annotations

import numpy as np
import torch

from ... import rope
from ..figure import Canvas, Data, Figure, columns, pair_colour
from ..report import Report, Table
from .base import Topic

# Batch 2, 5 tokens, 2 query heads that share 1 key head, 8 entries per head. The values are 0, 1, 2, ..: each
# value is the index of its entry.
XQ = torch.arange(160.0).reshape(2, 5, 2, 8)  # (B, T, H, D)
XK = torch.arange(80.0).reshape(2, 5, 1, 8)  # (B, T, KV, D)


def report() -> Report:
    """Seven steps with their shapes, and the value of the element 28 + 29j at each step."""
    data, rows = example_data(), []
    for step, name in enumerate(STEPS):
        chosen = (data["step"] == step) & (data["marked"] == 1)
        parts = (data["real"], data["imaginary"]) if data["complex"][chosen][0] else (data["real"],)
        numbers = np.stack([part[chosen] for part in parts]).ravel()
        rows.append((name, data["shape"][chosen][0], ", ".join(f"{x:.6g}" for x in numbers)))
    return Report(
        [Table("from xq to xq_out", ("step", "shape", "the element (real, imaginary)"), rows)],
        "Text 0, token 1, head 1, pair 2 has the values 28 and 29. Position 1 rotates it by 0.01 radians.",
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
            kind = head.is_complex()
            marked = cell == 2 if kind else cell in (4, 5)
            rows.append((step, str(tuple(tensor.shape)), cell, int(kind), value.real, value.imag, int(marked)))
    return columns(("step", "shape", "cell", "complex", "real", "imaginary", "marked"), rows)


def example_draw(data: Data, canvas: Canvas) -> None:
    from matplotlib.patches import Rectangle

    axes = canvas.subplots()
    between = ("in pairs", "a, b as a + jb", "times (for all texts and heads)", "equals", "a + jb as a, b", "flattened")
    for step, name in enumerate(STEPS):
        chosen = np.flatnonzero(data["step"] == step)
        top = -1.35 * step
        axes.text(0, top + 0.5, name, va="bottom", weight="bold")
        axes.text(8, top + 0.5, data["shape"][chosen[0]], ha="right", va="bottom")
        if step:
            axes.text(2.3, top + 0.5, between[step - 1], va="bottom", style="italic")
        for at in chosen:
            width, marked = 2 if data["complex"][at] else 1, bool(data["marked"][at])
            left = width * int(data["cell"][at])
            air = 0.06 if name.startswith("pairs") else 0.0  # a gap between pairs, not within one
            corner = (left + (air if left % 2 == 0 else 0.0), top - 0.3)
            box = Rectangle(corner, width - air, 0.75, edgecolor=pair_colour(left // 2, 4))
            if marked:
                box.set(facecolor="#e6dcef", linewidth=3, zorder=2)
            else:
                box.set(facecolor="white", linewidth=1.4)
            axes.add_patch(box)
            digits = 0 if step < 3 else 5 if name == "freqs_cis" else 4
            words = f"{data['real'][at]:.{digits}f}"
            words += f"{data['imaginary'][at]:+.{digits}f}j" if width == 2 else ""
            axes.text(left + width / 2, top + 0.07, words, ha="center", va="center", fontsize=8, zorder=3)
    axes.set_xlim(-0.1, 8.1)
    axes.set_ylim(-1.35 * 6 - 0.5, 1)
    axes.axis("off")


CAPTION = (
    "One head of one token, step by step, with the shape of the batch on the right. Each color is a pair. The marked"
    " pair 28, 29 is rotated by 0.01 radians."
)
TOPIC = Topic(report, (Figure("example", CAPTION, example_data, example_draw, size=(5.4, 5.6)),))
