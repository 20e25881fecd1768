"""Pairing: the two layouts of the pairs in a head, and what happens if a model is read in the wrong layout."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ... import rope
from ...errors import UsageError
from ...inside.trace import surprisal
from ...loader import load
from ...model import Attention
from ..figure import Axes, Canvas, Data, Figure, pair_colour
from ..perplexity import TINY, folder_of
from ..report import Report, Table
from .base import Topic

TEXT = "And God said, Let there be light: and there was light. And God saw the light, that it was good."


def report(model: str = TINY) -> Report:
    """The two layouts, and how the perplexity of a model changes with the wrong one."""
    right, wrong = perplexities(model)
    return Report(
        (
            Table(
                "a head of 8 entries",
                ("entry", *(str(entry) for entry in range(8))),
                [
                    ("partner, interleaved", *(entry ^ 1 for entry in range(8))),
                    ("partner, half", *((entry + 4) % 8 for entry in range(8))),
                    ("index after interleaved to half", *pairing_data()["goes_to"].tolist()),
                ],
            ),
            Table(
                "perplexity of two sentences of Genesis",
                ("layout", "perplexity"),
                [("right", round(right, 1)), ("wrong", round(wrong, 1))],
            ),
        ),
        "Meta's files and GGUF files of the architecture llama pair entries 2i and 2i + 1 (interleaved); LLaMA files"
        " in Hugging Face's format pair i and i + D/2 (half). With the wrong layout a file loads without an error, the"
        " first token is right, and later scores are wrong.",
        {"model": model},
    )


@torch.no_grad()
def perplexities(model: str) -> tuple[float, float]:
    """Perplexity of TEXT, with a model as it is and with the rows of wq and wk in the other layout."""
    llm = load(folder_of(model), dtype="float32", device="cpu")
    ids = torch.tensor([llm.tokenizer.encode(TEXT)])  # (1, T)

    def perplexity() -> float:
        return float(surprisal(llm.model(ids)[0], ids[0]).mean().exp())

    right = perplexity()
    attentions = (module for module in llm.model.modules() if isinstance(module, Attention))
    for linear in (linear for attention in attentions for linear in (attention.wq, attention.wk)):
        if not isinstance(linear, nn.Linear):
            raise UsageError(f"{model}: expected weights that are not quantized, to reorder the rows of wq and wk")
        linear.weight.copy_(rope.to_half_layout(linear.weight, llm.model.config.head_dim))
    return right, perplexity()


def pairing_data() -> Data:
    """Columns: index of an entry, of its partner in each layout, and of the entry after the conversion (goes_to)."""
    entry = np.arange(8)
    goes_to = torch.argsort(rope.interleaved_to_half(torch.arange(8))).numpy()
    return {"entry": entry, "partner_interleaved": entry ^ 1, "partner_half": (entry + 4) % 8, "goes_to": goes_to}


def pairing_draw(data: Data, canvas: Canvas) -> None:
    """Above: the pairs of both layouts. Below: the permutation as arrows. Each colour is a pair."""
    grid = canvas.add_gridspec(2, 2, height_ratios=(1, 1.5))
    entry = data["entry"]
    meta = np.minimum(entry, data["partner_interleaved"]) // 2  # (8,) pair of each entry in Meta's layout
    halves = np.minimum(entry, data["partner_half"])  # (8,) pair in Hugging Face's
    for column, (title, partner, pair) in enumerate(
        (
            ("interleaved (Meta):\npairs 2i, 2i + 1", data["partner_interleaved"], meta),
            ("half (Hugging Face):\npairs i, i + D/2", data["partner_half"], halves),
        )
    ):
        axes = canvas.add_subplot(grid[0, column])
        _boxes(axes, 0, pair, [str(j) for j in entry])
        for a, b, of in zip(entry, partner, pair, strict=True):
            if a < b:
                _arc(axes, int(a), int(b), pair_colour(of, 4))
        _bare(axes, title, (-0.6, 2.0))
    axes = canvas.add_subplot(grid[1, :])
    _boxes(axes, 3, meta, [str(j) for j in entry])
    came = np.argsort(data["goes_to"])  # (8,) entry at each index after the permutation
    _boxes(axes, 0, meta[came], [str(j) for j in came])
    for a, b in zip(entry, data["goes_to"], strict=True):
        arrow = {"arrowstyle": "->", "color": pair_colour(meta[a], 4), "lw": 1.2}
        axes.annotate("", (b, 0.5), (a, 2.5), arrowprops=arrow)
    axes.text(-0.45, 3.65, "rows of wq and wk, or entries of q and k, in Meta's layout", ha="left", va="bottom")
    axes.text(-0.45, -0.65, "the same in Hugging Face's layout", ha="left", va="top")
    _bare(axes, "", (-1.2, 4.2))


def _boxes(axes: Axes, y: float, pair: np.ndarray, labels: list[str]) -> None:
    from matplotlib.patches import Rectangle

    for x, (which, label) in enumerate(zip(pair, labels, strict=True)):
        corner = (x - 0.45, y - 0.45)
        axes.add_patch(Rectangle(corner, 0.9, 0.9, facecolor=pair_colour(which, 4), edgecolor="none"))
        axes.text(x, y, label, ha="center", va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})


def _arc(axes: Axes, a: int, b: int, colour: str) -> None:
    t = np.linspace(0, np.pi, 50)
    middle, half = (a + b) / 2, (b - a) / 2
    axes.plot(middle + half * np.cos(t), 0.5 + np.sin(t) * (0.5 + 0.35 * half), color=colour, linewidth=1.5)


def _bare(axes: Axes, title: str, high: tuple[float, float]) -> None:
    axes.set(xlim=(-0.6, 7.6), ylim=high)
    axes.set_axis_off()
    axes.set_title(title)


CAPTION = (
    "A head of 8 entries; each color is a pair. To convert Meta's layout to Hugging Face's, move entry 2i to i and"
    " 2i + 1 to i + D/2, in both wq and wk."
)
TOPIC = Topic(report, (Figure("pairing", CAPTION, pairing_data, pairing_draw, size=(5.6, 4.2)),))
