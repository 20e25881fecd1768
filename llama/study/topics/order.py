"""Order: without a position encoding, attention ignores the order of the words."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ... import attention, rope
from .. import encodings
from ..figure import Data, Figure
from ..report import Report, Table, above, equal, holds
from ..sketch import shades
from . import TOPICS
from .base import Topic, check_head_dim, check_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

WORDS = ("dog", "is", "chasing", "cat")  # 狗 在 追 猫, dog chases cat
OTHER = (3, 1, 2, 0)  # 猫 在 追 狗: the same words, first and last exchanged
TARGETS = {"none": "nothing", "sinusoidal": "x", "learned": "x", "rope": "q, k", "alibi": "score"}


def drawn(head_dim: int) -> tuple[Tensor, ...]:
    """Random embeddings of the words (N, C), and wq, wk, wv (D, C) with C = D, scaled so that scores are of order 1."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(len(WORDS), head_dim, generator=draw, dtype=torch.float64)  # (N, C)
    return x, *torch.randn(3, head_dim, head_dim, generator=draw, dtype=torch.float64) / head_dim**0.5


def report(head_dim: int = 8, theta: float = 10000.0) -> Report:
    """The output for each word in two orders of the same words, under five encodings."""
    check_head_dim(head_dim, 2, 1024)
    check_range("--rope-theta", theta, 2.0, 1e12)
    x, wq, wk, wv = drawn(head_dim)
    positions, other = torch.arange(len(WORDS)), list(OTHER)
    rows, gaps, rotary = [], {}, x
    for name, target in TARGETS.items():
        encoding = encodings.make(name, head_dim, head_dim, theta)
        first = encodings.attend(encoding, x, wq, wk, wv, positions)  # (N, D)
        second = encodings.attend(encoding, x[other], wq, wk, wv, positions)  # (N, D), row i: word OTHER[i]
        gaps[name] = _largest(second - first[other])
        rows.append((name, target, gaps[name], gaps[name] > 1e-9))
        rotary = first if name == "rope" else rotary
    nothing = encodings.make("none", head_dim, head_dim)
    plain = encodings.attend(nothing, x, wq, wk, wv, positions)
    every = max(
        _largest(encodings.attend(nothing, x[list(p)], wq, wk, wv, positions) - plain[list(p)])
        for p in permutations(range(len(WORDS)))
    )
    _, causal = _by_library(x, wq, wk, wv, theta, turned=False, causal=True)
    _, reordered = _by_library(x[other], wq, wk, wv, theta, turned=False, causal=True)
    weights, outputs = _by_library(x, wq, wk, wv, theta)
    strict = attention.causal_mask(positions - 1, positions)  # n < m: the first word has no key
    blind = attention.reference_weights((x @ wq.T)[None, None], (x @ wk.T)[None, None], strict)  # (B, H, T, S)
    return Report(
        "order",
        TOPICS["order"],
        settings={"head_dim": head_dim, "theta": theta},
        says=(
            "狗在追猫 (the dog is chasing the cat) and 猫在追狗 (the cat is chasing the dog): the same words.",
            "Without positions each word has the same output in both: attention sees a bag of words. Any",
            "position encoding makes the outputs differ. So does a causal mask, which hides later words.",
        ),
        tables=(
            Table(
                "the same word in the two sentences",
                ("encoding", "changes", "largest difference of its output", "distinguished"),
                rows,
            ),
        ),
        checks=(
            equal("000-03", "none: largest difference over all 24 orders", every, 0.0, 1e-12),
            *(above("000-03", f"{name}: largest difference", gaps[name], 1e-3) for name in list(TARGETS)[1:]),
            equal("000-08", "rope: largest difference from the library", _largest(rotary - outputs), 0.0, 1e-5),
            equal("000-07", "none: difference from numpy", _largest(plain - _by_numpy(x, wq, wk, wv)), 0.0, 1e-12),
            equal("000-07", "weights in a row: one per word", weights.shape[-1], len("狗在追猫")),
            equal("000-07", "sum of a row, largest difference from 1", _largest(weights.sum(-1) - 1), 0.0, 1e-6),
            holds("002-02", "without n = m the first row is NaN", bool(blind[0, 0, 0].isnan().all())),
            above("000-03", "none with a causal mask: largest difference", _largest(reordered - causal[other]), 1e-3),
            equal("000-17", "狗在追猫: distance from 狗 to 猫", "狗在追猫".index("猫") - "狗在追猫".index("狗"), 3),
            equal(
                "000-17",
                "猫被狗追, with the same meaning: this distance",
                "猫被狗追".index("猫") - "猫被狗追".index("狗"),
                -2,
            ),
        ),
    )


def _by_library(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, theta: float, *, turned: bool = True, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Weights (N, N) and outputs (N, D) by the functions that the model uses, in float32."""
    n, d = len(x), wq.shape[0]
    q, k, v = ((x @ w.T).float().view(1, n, 1, d) for w in (wq, wk, wv))  # (B, T, H, D)
    if turned:
        q, k = rope.apply_rotary_emb(q, k, rope.precompute_freqs_cis(d, n, theta))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
    mask = attention.causal_mask(torch.arange(n), torch.arange(n)) if causal else None
    return attention.reference_weights(q, k, mask)[0, 0], attention.reference(q, k, v, mask)[0, 0].double()


def _by_numpy(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """Outputs (N, D) without positions, with softmax written out."""
    q, k, v = ((x @ w.T).numpy() for w in (wq, wk, wv))  # (N, D)
    exp = np.exp(q @ k.T / np.sqrt(q.shape[1]))  # (N, N)
    return torch.from_numpy(exp @ v / exp.sum(1, keepdims=True))


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def order_data(head_dim: int = 8, theta: float = 10000.0) -> Data:
    """Attention weights of both sentences without positions and with RoPE, one row per cell."""
    x, wq, wk, _ = drawn(head_dim)
    cells = []
    for name in ("none", "rope"):
        encoding = encodings.make(name, head_dim, head_dim, theta)
        for sentence, order in enumerate((range(len(WORDS)), OTHER)):
            scores = encodings.scores(encoding, x[list(order)], wq, wk, torch.arange(len(WORDS)))  # (N, N)
            for m, row in enumerate(scores.softmax(-1).tolist()):
                cells += [(name, sentence, WORDS[order[m]], WORDS[order[n]], m, n, w) for n, w in enumerate(row)]
    names = ("encoding", "sentence", "query", "key", "m", "n", "weight")
    return {name: np.array(column) for name, column in zip(names, zip(*cells, strict=True), strict=True)}


def order_draw(data: Data, canvas: Canvas) -> None:
    panels = canvas.subplots(2, 2)
    titles = {"none": "without positions", "rope": "with RoPE"}
    for row, (name, title) in enumerate(titles.items()):
        for sentence in (0, 1):
            axes = panels[row][sentence]
            chosen = (data["encoding"] == name) & (data["sentence"] == sentence)
            words = data["query"][chosen & (data["n"] == 0)]
            axes.imshow(data["weight"][chosen].reshape(4, 4), cmap="Greys", vmin=0, vmax=1)
            for m, n, weight in zip(*(data[key][chosen] for key in ("m", "n", "weight")), strict=True):
                axes.text(n, m, f"{weight:.3f}", ha="center", va="center", color="white" if weight > 0.6 else "black")
            m, n = list(words).index("dog"), list(words).index("cat")
            axes.add_patch(_frame(n, m))
            axes.set_xticks(range(4), words)
            axes.set_yticks(range(4), words)
            axes.set_xlabel("key: the attended word")
            axes.set_ylabel("query: the attending word")
            axes.set_title(f"{' '.join(words)},\n{title}")


def _frame(column: int, row: int) -> object:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, fill=False, linewidth=2.5, edgecolor="black")


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "order",
            "Attention weights of four words in two orders; the frame marks how much dog attends to cat. Without"
            " positions the right panel is the left one with first and last word exchanged: every pair of words keeps"
            " its weight. With RoPE the weights depend on the positions of the words.",
            order_data,
            order_draw,
            size=(5.6, 5.4),
            sketch=lambda data: shades(data, "m", "n", "weight", ("encoding", "sentence")),
        ),
    ),
)
