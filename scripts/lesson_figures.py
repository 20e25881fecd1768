"""Pictures of the lessons that belong to no topic of the study, and `find`, which knows all pictures by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llama.study import measures, topics
from llama.study.figure import Data, Figure, columns
from llama.study.topics import order, ppl, scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


# ------------------------------------------------------------------------------------------------ lesson 1: two dogs
def dogs_data() -> Data:
    """The output vector of "dog" in both sentences, with and without RoPE, one row per entry."""
    x, wq, wk, wv = order.drawn(8)
    positions, rows = torch.arange(4), []
    for rope in (False, True):
        for sentence, places in enumerate((list(range(4)), list(order.OTHER))):
            q, k, v = (x[places] @ w.T for w in (wq, wk, wv))  # (N, D)
            if rope:
                q, k = (measures.turn(t, positions, measures.frequencies(8)) for t in (q, k))
            out = (q @ k.T / 8**0.5).softmax(-1) @ v  # (N, D)
            rows += [(rope, sentence, entry, value) for entry, value in enumerate(out[places.index(0)].tolist())]
    return dict(zip(("rope", "sentence", "entry", "value"), map(np.array, zip(*rows, strict=True)), strict=True))


def dogs_draw(data: Data, canvas: Canvas) -> None:
    panels = canvas.subplots(1, 2, sharey=True)
    for axes, rope in zip(panels, (False, True), strict=True):
        for sentence, (words, style) in enumerate(
            (("dog is chasing cat", "#2166ac"), ("cat is chasing dog", "#e08214"))
        ):
            rows = (data["rope"] == rope) & (data["sentence"] == sentence)
            axes.bar(data["entry"][rows] + 0.4 * sentence - 0.2, data["value"][rows], 0.38, color=style, label=words)
        axes.axhline(0, color="#000000", linewidth=0.8)
        axes.set_title("with RoPE" if rope else "without positions")
        axes.set_xlabel('entry of the output of "dog"')
        axes.set_xticks(range(8))
    panels[0].set_ylabel("value")
    panels[1].legend(loc="upper right")


# ----------------------------------------------------------------------------------------------- lesson 4: two arrows
Q, K, STEP = np.array([1.0, 0.35]), np.array([0.9, 1.1]), 0.35  # one query, one key; radians per position


def arrows_data() -> Data:
    """The rotated query and key, and their dot product, at four pairs of positions (m, n)."""
    places = ((0, 0), (5, 1), (10, 6), (1, 5))
    q, k = (
        measures.turn(torch.tensor(np.tile(v, (4, 1))), torch.tensor(at), torch.tensor([STEP])).numpy()
        for v, at in ((Q, [m for m, _ in places]), (K, [n for _, n in places]))
    )
    columns = {"m": [m for m, _ in places], "n": [n for _, n in places], "dot": (q * k).sum(1)}
    columns |= {"q1": q[:, 0], "q2": q[:, 1], "k1": k[:, 0], "k2": k[:, 1]}
    return {name: np.array(column) for name, column in columns.items()}


def arrows_draw(data: Data, canvas: Canvas) -> None:
    """q is thick with a filled head, k thin with an open one, as on the page of `study --html`."""
    for i, axes in enumerate(canvas.subplots(1, 4)):
        q, k = (complex(data[f"{name}1"][i], data[f"{name}2"][i]) for name in "qk")
        between = np.angle(k / q) * np.linspace(0, 1, 25)
        sector = 0.5 * q / abs(q) * np.exp(1j * between)
        axes.fill([0, *sector.real], [0, *sector.imag], color="#cccccc", linewidth=0)
        for name, tip, colour, face, width in (
            ("k", k, "#000000", "#ffffff", 1.2),
            ("q", q, "#2166ac", "#2166ac", 2.6),
        ):
            how = {"arrowstyle": "-|>", "ec": colour, "fc": face, "lw": width, "mutation_scale": 14}
            axes.annotate("", (tip.real, tip.imag), (0, 0), arrowprops={**how, "shrinkA": 0, "shrinkB": 0})
            letter = tip * (1 + 0.3 / abs(tip))
            axes.text(letter.real, letter.imag, name, color=colour, ha="center", va="center", fontsize=16)
        axes.add_artist(_circle())
        m, n = data["m"][i], data["n"][i]
        axes.set(xlim=(-1.85, 1.85), ylim=(-1.2, 1.85), aspect="equal")
        axes.set_title("not\nrotated" if m == n == 0 else f"q at {m}\nk at {n}", fontsize=14)  # read on a phone
        axes.set_xlabel(f"q · k = {data['dot'][i]:.2f}".replace("-", "−"), fontsize=13)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[["left", "bottom"]].set_visible(False)


def _circle() -> Any:
    from matplotlib.patches import Circle

    return Circle((0, 0), 1, fill=False, edgecolor="#bbbbbb", linewidth=0.8)


# ------------------------------------------------------------------------------------ lesson 6: the way of q, k, v
BOXES = (  # x, y, text, marked: from top to bottom, narrow enough for a phone
    (1.5, 6.0, "x", 0), (0.3, 5.0, "wq", 0), (1.5, 5.0, "wk", 0), (2.7, 5.0, "wv", 0), (0.3, 4.0, "RoPE", 1),
    (1.5, 4.0, "RoPE", 1), (1.5, 3.0, "cache of k", 0), (2.7, 3.0, "cache of v", 0),
    (0.9, 2.0, "softmax(q · k / √D)", 0), (1.8, 1.0, "weighted sum", 0), (1.8, 0.0, "wo", 0),
)  # fmt: skip
WAYS = (  # from one box to another, and what goes there
    (0, 1, ""), (0, 2, ""), (0, 3, ""), (1, 4, "q"), (2, 5, "k"), (3, 7, "v"), (5, 6, "k'"), (4, 8, "q'"), (6, 8, ""),
    (8, 9, ""), (7, 9, ""), (9, 10, ""),
)  # fmt: skip


def block_data() -> Data:
    """The boxes of the drawing."""
    return {
        name: np.array(column)
        for name, column in zip(("x", "y", "text", "marked"), zip(*BOXES, strict=True), strict=True)
    }


def block_draw(data: Data, canvas: Canvas) -> None:
    axes = canvas.subplots()
    boxes = []
    for x, y, text, marked in zip(*data.values(), strict=True):
        box = {"boxstyle": "round,pad=0.45", "facecolor": "#fddbc7" if marked else "#f0f0f0", "edgecolor": "#555555"}
        weight = "bold" if marked else "normal"
        boxes.append(axes.text(x, y, text, ha="center", va="center", bbox=box, weight=weight, zorder=3))
    axes.set(xlim=(-0.2, 3.3), ylim=(-0.4, 6.4))
    axes.axis("off")
    for a, b, word in WAYS:
        (x, y), end = BOXES[a][:2], BOXES[b][:2]
        ends = {"patchA": boxes[a].get_bbox_patch(), "patchB": boxes[b].get_bbox_patch(), "shrinkA": 0, "shrinkB": 2}
        axes.annotate("", end, (x, y), arrowprops={"arrowstyle": "-|>", "color": "#888888", **ends})
        if word:
            axes.text(x + 0.1 + 0.15 * (end[0] > x), y - 0.55, word, style="italic")


# ------------------------------------------------------------------------------------------ lesson 7: five methods
def reach_data() -> Data:
    """The measurement of the lesson; both use the same windows."""
    return ppl.TOPIC.figure().data(windows=4, length=512, methods=("none", "linear:4", "ntk:4", "ntk:16", "yarn:4"))


def divisors_data() -> Data:
    """The divisors of `clearllama study scale`, without the method that depends on the length."""
    data = scale.divisor_data()
    rows = data["method"] != "dynamic"
    return {name: column[rows] for name, column in data.items()}


# ---------------------------------------------------------------------------------------- lesson 9: three kinds of keys
AIMED = 500  # the distance that the third key is made for


def decay_data() -> Data:
    """line, distance (tokens), value: expected scores of three kinds of keys; low, high: a standard deviation off."""
    at, inv_freq = torch.arange(1001), measures.frequencies(64, 1e5)
    equal, aimed = (64 * measures.mean_cosine(inv_freq, at - d).numpy() for d in (0, AIMED))
    lines = {"k = q": (equal, 0), f"k made for {AIMED}": (aimed, 0), "k unrelated to q": (0 * equal, 64**0.5)}
    rows = [
        (line, distance, value, value - deviation, value + deviation)
        for line, (values, deviation) in lines.items()
        for distance, value in zip(at.tolist(), values.round(3), strict=True)
    ]
    return columns(("line", "distance", "value", "low", "high"), rows)


def decay_draw(data: Data, canvas: Canvas) -> None:
    """Expected score over distance, one line for each kind of key."""
    axes = canvas.subplots()
    styles = (("#000000", 1.0, "-"), ("#b2182b", 1.6, "-"), ("#666666", 1.2, "--"))
    for name, (color, width, dashes) in zip(dict.fromkeys(data["line"].tolist()), styles, strict=True):
        x, y, low, high = (data[column][data["line"] == name] for column in ("distance", "value", "low", "high"))
        axes.plot(x, y, label=name, color=color, linewidth=width, linestyle=dashes)
    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)  # of the last line
    axes.set(xlim=(0, 1000), ylim=(-10, 66), xlabel="distance r (tokens)", ylabel="expected score q · k")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=3)


FIGURES = {
    figure.name: figure
    for figure in (
        Figure(
            "dogs",
            "The output of attention for the word dog, eight numbers. Without positions it is the same in both"
            " sentences. With RoPE it differs.",
            dogs_data,
            dogs_draw,
            size=(5.4, 2.8),
        ),
        Figure(
            "arrows",
            "Each arrow turns by 0.35 radians per position. First: no rotation. In the second and third picture, q is"
            " four positions after k, and q · k is the same. In the fourth, q is four positions before k.",
            arrows_data,
            arrows_draw,
            size=(6.4, 2.35),
        ),
        Figure(
            "block",
            "The attention of a LLaMA. RoPE rotates q and k, between their projections and their dot product. v goes"
            " past it.",
            block_data,
            block_draw,
            size=(4.2, 4.6),
        ),
        Figure(
            "reach",
            "Perplexity by position. Right of the line: positions that training did not have.",
            reach_data,
            ppl.draw,
            size=(6.4, 3.2),
        ),
        Figure(
            "divisors",
            "Divisor of each frequency of LLaMA 1, for four times its length. Shaded: the slow pairs, which need 4.",
            divisors_data,
            scale.divisor_draw,
            size=(5.6, 3.6),
        ),
        Figure(
            "decay",
            "Expected score of a query and three kinds of keys: 64 numbers of variance 1, base 100,000. Band: most"
            " unrelated keys (one standard deviation to each side of the mean).",
            decay_data,
            decay_draw,
            size=(5.6, 3.6),
        ),
    )
}


def find(name: str) -> Figure:
    """The picture of that name: one of this file, or of a topic."""
    known = {figure.name: figure for topic in topics.TOPICS for figure in topics.find(topic).figures}
    return (known | FIGURES)[name]
