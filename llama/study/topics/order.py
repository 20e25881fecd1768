"""Order: without a position encoding, attention ignores the order of the words."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import attention
from .. import encodings
from ..figure import COLOURS, Canvas, Data, Figure, columns
from ..report import Report, Table
from .base import Topic

WORDS = ("dog", "is", "chasing", "cat")
OTHER = (3, 1, 2, 0)  # cat is chasing dog: the same words, first and last exchanged
TARGETS = {"none": "nothing", "sinusoidal": "x", "learned": "x", "rope": "q, k", "alibi": "score"}
D = 8


def drawn(width: int = D) -> tuple[Tensor, ...]:
    """Random embeddings of the words (N, C), and wq, wk, wv (D, C) with C = D, scaled so that scores are of order 1."""
    draw = torch.Generator().manual_seed(250)
    x = torch.randn(len(WORDS), width, generator=draw, dtype=torch.float64)  # (N, C)
    return x, *torch.randn(3, width, width, generator=draw, dtype=torch.float64) / width**0.5


def report() -> Report:
    """How far the output for a word differs between two orders of the same words, under five encodings."""
    x, wq, wk, wv = drawn()
    positions, other = torch.arange(len(WORDS)), list(OTHER)

    def gap(first: Tensor, second: Tensor) -> str:
        """The largest difference between two outputs (N, D); row i of the second belongs to word OTHER[i]."""
        return f"{float((second - first[other]).abs().max()):.2g}"

    rows = []
    for name, target in TARGETS.items():
        encoding = encodings.ENCODINGS[name](D)
        both = (encodings.attend(encoding, words, wq, wk, wv, positions) for words in (x, x[other]))
        rows.append((name, target, gap(*both)))
    rows.append(("none, causal mask", "visible keys", gap(causal(x, wq, wk, wv), causal(x[other], wq, wk, wv))))
    table = Table(
        "the same word in the two sentences", ("encoding", "changes", "largest difference of its output"), rows
    )
    return Report(
        [table],
        '"dog is chasing cat" and "cat is chasing dog" are the same words in two orders. Without positions each word'
        " has"
        " the same output in both. An encoding, or a causal mask, makes the outputs differ.",
    )


def causal(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """Outputs (N, D) of the library's attention with a causal mask and without an encoding."""
    q, k, v = ((x @ w.T)[None, None] for w in (wq, wk, wv))  # (B, H, T, D)
    positions = torch.arange(len(x))
    return attention.reference(q, k, v, attention.causal_mask(positions, positions))[0, 0]


def order_data() -> Data:
    """Attention weights of both sentences without positions and with RoPE, one row per cell."""
    x, wq, wk, _ = drawn()
    cells = []
    for name in ("none", "rope"):
        for sentence, order in enumerate((range(len(WORDS)), OTHER)):
            scores = encodings.scores(
                encodings.ENCODINGS[name](D), x[list(order)], wq, wk, torch.arange(len(WORDS))
            )  # (N, N)
            for m, row in enumerate(scores.softmax(-1).tolist()):
                cells += [(name, sentence, WORDS[order[m]], WORDS[order[n]], m, n, w) for n, w in enumerate(row)]
    return columns(("encoding", "sentence", "query", "key", "m", "n", "weight"), cells)


def order_draw(data: Data, canvas: Canvas) -> None:
    from matplotlib.patches import Rectangle

    panels = canvas.subplots(2, 2)
    titles = {"none": "without positions", "rope": "with RoPE"}
    for row, (name, title) in enumerate(titles.items()):
        for sentence in (0, 1):
            axes = panels[row][sentence]
            chosen = (data["encoding"] == name) & (data["sentence"] == sentence)
            words = data["query"][chosen & (data["n"] == 0)].tolist()
            axes.imshow(data["weight"][chosen].reshape(4, 4), cmap="Greys", vmin=0, vmax=1.3)
            for m, n, weight in zip(*(data[key][chosen] for key in ("m", "n", "weight")), strict=True):
                axes.text(n, m, f"{weight:.2f}", ha="center", va="center", color="white" if weight > 0.75 else "black")
            corner = words.index("cat") - 0.46, words.index("dog") - 0.46
            axes.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, linewidth=2.5, edgecolor="#b2182b"))
            axes.set_xticks(range(4), words)
            axes.set_yticks(range(4), words)
            axes.set_xlabel("key: the attended word", color=COLOURS["k"])
            axes.set_ylabel("query: the attending word", color=COLOURS["q"])
            axes.set_title(f"{' '.join(words)},\n{title}")


CAPTION = (
    "Attention weights in two orders of four words; the frame is the weight that dog gives to cat. Without positions,"
    " every pair of words keeps its weight. With RoPE the weights change."
)
TOPIC = Topic(report, (Figure("order", CAPTION, order_data, order_draw, size=(5.6, 5.8)),))
