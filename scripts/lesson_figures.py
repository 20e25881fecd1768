"""Pictures of the lessons that belong to no topic of the study, and `find`, which finds any picture by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from llama.study import measures, topics
from llama.study.figure import COLOURS, THIN, Data, Figure, columns, legend_above, pair_colour
from llama.study.topics import order, ppl, scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Draw = Callable[[Data, "Canvas"], None]


FIGURES: dict[str, Figure] = {}


def picture(data: Callable[[], Data], size: tuple[float, float], caption: str) -> Callable[[Draw], Draw]:
    """Register the figure that the decorated function draws. The figure's name is that of `data`, without "_data"."""

    def register(draw: Draw) -> Draw:
        name = data.__name__.removesuffix("_data")
        FIGURES[name] = Figure(name, caption, data, draw, size)
        return draw

    return register


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
    return columns(("rope", "sentence", "entry", "value"), rows)


@picture(
    dogs_data,
    (5.4, 3.0),
    "The output of attention for the word dog, eight numbers. Without positions it is the same in both sentences. "
    "With RoPE it differs.",
)
def dogs_draw(data: Data, canvas: Canvas) -> None:
    panels = canvas.subplots(1, 2, sharey=True)
    for axes, rope in zip(panels, (False, True), strict=True):
        for sentence, (words, style) in enumerate(
            (("dog is chasing cat", "#000000"), ("cat is chasing dog", "#b2182b"))
        ):
            rows = (data["rope"] == rope) & (data["sentence"] == sentence)
            axes.bar(data["entry"][rows] + 0.4 * sentence - 0.2, data["value"][rows], 0.38, color=style, label=words)
        axes.axhline(0, color="#000000", linewidth=0.8)
        axes.set_title("with RoPE" if rope else "without positions")
        axes.set_xlabel('entry of the output of "dog"')
        axes.set_xticks(range(8))
    panels[0].set_ylabel("value")
    legend_above(canvas, panels[0], 2)


# ------------------------------------------------------------------------------- lesson 2: the product of two codes
def codes_product_data() -> Data:
    """Columns: distance in positions; product, p_s · p_t of sinusoidal codes of width 128."""
    codes = measures.sinusoids(torch.arange(401), 128)  # (N, C)
    return columns(("distance", "product"), enumerate((codes @ codes[0]).tolist()))


@picture(
    codes_product_data,
    (5.6, 2.8),
    "The dot product of two codes of width 128 by their distance: on the whole it falls, but in waves.",
)
def codes_product_draw(data: Data, canvas: Canvas) -> None:
    axes = canvas.subplots()
    axes.plot(data["distance"], data["product"], color="#000000", linewidth=1.2)
    axes.set(xlim=(0, 400), ylim=(0, 66), xlabel="distance t - s (positions)", ylabel="$p_s \\cdot p_t$")


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


@picture(
    arrows_data,
    (6.4, 2.35),
    "q is blue, k is orange; the circle has radius 1. Each arrow turns by 0.35 radians per position. First: no "
    "rotation. In the second and third picture, q is four positions after k, and q · k is the same. In the "
    "fourth, q is four positions before k.",
)
def arrows_draw(data: Data, canvas: Canvas) -> None:
    """q is thick with a filled head, k thin with an open one, as on the page of `study --html`."""
    for i, axes in enumerate(canvas.subplots(1, 4)):
        q, k = (complex(data[f"{name}1"][i], data[f"{name}2"][i]) for name in "qk")
        between = np.angle(k / q) * np.linspace(0, 1, 25)
        sector = 0.5 * q / abs(q) * np.exp(1j * between)
        axes.fill([0, *sector.real], [0, *sector.imag], color="#cccccc", linewidth=0)
        for name, tip, face, width in (("k", k, "#ffffff", 1.6), ("q", q, COLOURS["q"], 2.6)):
            colour = COLOURS[name]
            how = {"arrowstyle": "-|>", "ec": colour, "fc": face, "lw": width, "mutation_scale": 14}
            axes.annotate("", (tip.real, tip.imag), (0, 0), arrowprops={**how, "shrinkA": 0, "shrinkB": 0})
            letter = tip * (1 + 0.3 / abs(tip))
            axes.text(letter.real, letter.imag, name, color=colour, ha="center", va="center", fontsize=16)
        circle(axes, 1.85, (-1.2, 1.85))
        m, n = data["m"][i], data["n"][i]
        axes.set_title("not\nrotated" if m == n == 0 else f"q at {m}\nk at {n}", fontsize=14)  # read on a phone
        axes.set_xlabel(f"q · k = {data['dot'][i]:.2f}".replace("-", "−"), fontsize=13)


def circle(axes: Axes, x: float = 1.1, y: tuple[float, float] = (-1.1, 1.1)) -> None:
    """Draw the unit circle, without ticks or a frame."""
    from matplotlib.patches import Circle

    axes.add_artist(Circle((0, 0), 1, fill=False, edgecolor="#bbbbbb", linewidth=0.8))
    axes.set(xlim=(-x, x), ylim=y, aspect="equal", xticks=[], yticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)


# ------------------------------------------------------------------------------------ lesson 6: the way of q, k, v
BOXES = (  # x, y, text, and the vector it belongs to: from top to bottom, narrow enough for a phone
    (1.5, 6.0, "x", ""), (0.3, 5.0, "wq", "q"), (1.5, 5.0, "wk", "k"), (2.7, 5.0, "wv", "v"), (0.3, 4.0, "RoPE", "q"),
    (1.5, 4.0, "RoPE", "k"), (1.5, 3.0, "cache of k", "k"), (2.7, 3.0, "cache of v", "v"),
    (0.9, 2.0, "softmax(q · k / √D)", ""), (1.8, 1.0, "weighted sum", ""), (1.8, 0.0, "wo", ""),
)  # fmt: skip
WAYS = (  # the two boxes that an arrow joins, and its label
    (0, 1, ""), (0, 2, ""), (0, 3, ""), (1, 4, "q"), (2, 5, "k"), (3, 7, "v"), (5, 6, "k'"), (4, 8, "q'"), (6, 8, ""),
    (8, 9, ""), (7, 9, ""), (9, 10, ""),
)  # fmt: skip


def block_data() -> Data:
    """The boxes of the drawing."""
    return columns(("x", "y", "text", "of"), BOXES)


@picture(
    block_data,
    (4.2, 4.6),
    "The attention of a LLaMA: q is blue, k orange and v green. RoPE rotates q and k, between their projections "
    "and their dot product. v goes past it.",
)
def block_draw(data: Data, canvas: Canvas) -> None:
    axes = canvas.subplots()
    boxes = []
    for x, y, text, of in zip(*data.values(), strict=True):
        face, weight = ("#e6dcef", "bold") if text == "RoPE" else ("#f0f0f0", "normal")
        edge = COLOURS.get(of, "#555555")
        box = {"boxstyle": "round,pad=0.45", "facecolor": face, "edgecolor": edge, "linewidth": 1.5}
        boxes.append(axes.text(x, y, text, ha="center", va="center", bbox=box, weight=weight, zorder=3))
    axes.set(xlim=(-0.2, 3.3), ylim=(-0.4, 6.4))
    axes.axis("off")
    for a, b, word in WAYS:
        (x, y), end, colour = BOXES[a][:2], BOXES[b][:2], COLOURS.get(BOXES[a][3] or BOXES[b][3], "#777777")
        ends = {"patchA": boxes[a].get_bbox_patch(), "patchB": boxes[b].get_bbox_patch(), "shrinkA": 0, "shrinkB": 2}
        axes.annotate("", end, (x, y), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.5, **ends})
        if word:
            axes.text(x + 0.1 + 0.15 * (end[0] > x), y - 0.55, word, style="italic", color=colour, fontsize=11)


# ------------------------------------------------------------------------------------------ lesson 7: five methods
def reach_data() -> Data:
    """The perplexities of the lesson, measured in the same windows as there."""
    return ppl.TOPIC.figure().data(windows=4, length=512, methods=("none", "linear:4", "ntk:4", "ntk:16", "yarn:4"))


picture(
    reach_data,
    (5.4, 3.6),
    "Perplexity by position. Right of the line: positions that training did not have.",
)(ppl.draw)


def divisors_data() -> Data:
    """The divisors of `clearllama study scale`, without those of lesson 8."""
    data = scale.divisor_data()
    rows = ~np.isin(data["method"], ["dynamic", "llama3"])
    return {name: column[rows] for name, column in data.items()}


picture(
    divisors_data,
    (5.6, 3.6),
    "Divisor of each frequency of LLaMA 1, for four times its length. Shaded: the slow pairs, which need 4.",
)(scale.divisor_draw)


# -------------------------------------------------------------------------------------------------- lesson 7: clocks
HANDS = (60, 3600, 43200)  # seconds for a turn
CLOCKS = {"as trained": (1, 1, 1), "PI": (3, 3, 3), "NTK-aware": (1, 3**0.5, 3)}  # the divisor of each hand
TIMES = {"10 seconds": 10, "24 hours": 86400}


def clock_data() -> Data:
    """Columns: time, clock, hand, period (seconds for a turn), turns of the hand since twelve o'clock."""
    rows = [
        (time, clock, hand, HANDS[hand] * divisor, seconds / (HANDS[hand] * divisor))
        for time, seconds in TIMES.items()
        for clock, divisors in CLOCKS.items()
        for hand, divisor in enumerate(divisors)
    ]
    return columns(("time", "clock", "hand", "period", "turns"), rows)


@picture(
    clock_data,
    (5.2, 3.5),
    "A clock is trained for 12 hours and used for 36. Above: the seconds that each hand needs for a turn. The "
    "thin hand is the fastest. As trained, 24 hours look like 0. PI slows all hands by 3: after 10 seconds, the "
    "thin hand shows 3.3. NTK-aware slows them by 1, √3 and 3: both times can be read.",
)
def clock_draw(data: Data, canvas: Canvas) -> None:
    for row, time in zip(canvas.subplots(2, 3), TIMES, strict=True):
        for axes, clock in zip(row, CLOCKS, strict=True):
            circle(axes)
            dial = np.exp(2j * np.pi * np.arange(12) / 12)
            axes.plot(0.94 * dial.real, 0.94 * dial.imag, ".", markersize=2, color=THIN["color"])
            chosen = (data["time"] == time) & (data["clock"] == clock)
            for hand in (2, 1, 0):  # the fast hand is long and thin
                tip = (0.92, 0.7, 0.45)[hand] * np.exp(2j * np.pi * (0.25 - data["turns"][chosen][hand]))
                style = {"color": pair_colour(hand, 3), "linewidth": (1.3, 2.4, 5)[hand]}
                axes.plot([0, tip.real], [0, tip.imag], solid_capstyle="round", **style)
            if time == "10 seconds":
                axes.set_title(f"{clock}\n" + ", ".join(f"{period:,.0f}" for period in data["period"][chosen]))
        row[0].set_ylabel(f"after\n{time}", rotation=0, ha="right", va="center")


# ------------------------------------------------------------------------------- lesson 7: a quarter of the distance
def quarter_data() -> Data:
    """Columns: distance, pair, angle (radians); at 1/4, and at the integer where pair 0 has nearly the angle of 1/4."""
    omega, whole = measures.frequencies(128).numpy(), np.arange(2048)
    like = int(np.abs((whole - 0.25 + np.pi) % (2 * np.pi) - np.pi).argmin())
    return columns(("distance", "pair", "angle"), [(d, i, d * omega[i]) for d in (0.25, like) for i in (0, 3, 6, 9)])


@picture(
    quarter_data,
    (5.2, 3.0),
    "Angles of four fast pairs of LLaMA 1. Above: at a distance of 1/4, which neighbors have under PI with s = 4. "
    "Below: at the training distance where pair 0 is nearest to this angle. The others have other angles there.",
)
def quarter_draw(data: Data, canvas: Canvas) -> None:
    rows, pairs = dict.fromkeys(data["distance"].tolist()), dict.fromkeys(data["pair"].tolist())
    grid = canvas.subplots(len(rows), len(pairs))
    for axes, pair, angle in zip(grid.flat, data["pair"], data["angle"], strict=True):
        circle(axes)
        axes.plot([0, np.cos(angle)], [0, np.sin(angle)], color=pair_colour(pair, 64), linewidth=2.5)
    for axes, pair in zip(grid[0], pairs, strict=True):
        axes.set_title(f"pair {pair}")
    for axes, distance in zip(grid[:, 0], ("1/4", f"{max(rows):,.0f}"), strict=True):
        axes.set_ylabel(f"distance\n{distance}", rotation=0, ha="right", va="center")


# --------------------------------------------------------------------------------------- lesson 8: published models
def published_data() -> Data:
    """The columns of `divisors`, for three models of D = 128, base 500,000 and 8,192 trained tokens."""
    stretch = scale.Stretch(128, 500000.0, 8192, 8.0)
    plain, many = stretch.frequencies(), scale.Stretch(128, 500000.0, 8192, 32.0)
    lines = {
        "Llama 3.1 8B: llama3, factor 8": stretch.frequencies("llama3"),
        "Llama 3.2 3B: llama3, factor 32": many.frequencies("llama3"),
        "OLMo 3 7B: YaRN, factor 8": stretch.frequencies("yarn"),
    }
    slow = stretch.slow().tolist()
    rows = [(name, i, float(plain[i] / w[i]), slow[i]) for name, w in lines.items() for i in range(len(plain))]
    return columns(("method", "pair", "divisor", "slow"), rows)


picture(
    published_data,
    (5.6, 3.6),
    "Divisor of each frequency in three models with 64 pairs, base 500,000 and original length 8,192. Shaded: the "
    "slow pairs.",
)(scale.divisor_draw)


# ---------------------------------------------------------------------------------------- lesson 9: three kinds of keys
AIMED = 500  # distance for which the third key is made


def decay_data() -> Data:
    """Columns: line, distance; value, the expected score; low and high, one standard deviation below and above it."""
    at, inv_freq = torch.arange(1001), measures.frequencies(64, 1e5)
    equal, aimed = (64 * measures.mean_cosine(inv_freq, at - d).numpy() for d in (0, AIMED))
    lines = {"k = q": (equal, 0), f"k made for {AIMED}": (aimed, 0), "k unrelated to q": (0 * equal, 64**0.5)}
    rows = [
        (line, distance, value, value - deviation, value + deviation)
        for line, (values, deviation) in lines.items()
        for distance, value in zip(at.tolist(), values.round(3), strict=True)
    ]
    return columns(("line", "distance", "value", "low", "high"), rows)


@picture(
    decay_data,
    (5.6, 3.6),
    "Expected score of a query and three kinds of keys: 64 numbers of variance 1, base 100,000. Band: most "
    "unrelated keys (one standard deviation to each side of the mean).",
)
def decay_draw(data: Data, canvas: Canvas) -> None:
    """Expected score over distance, one line for each kind of key."""
    axes = canvas.subplots()
    styles = (("#000000", 1.0, "-"), ("#b2182b", 1.6, "-"), ("#666666", 1.2, "--"))
    for name, (color, width, dashes) in zip(dict.fromkeys(data["line"].tolist()), styles, strict=True):
        x, y, low, high = (data[column][data["line"] == name] for column in ("distance", "value", "low", "high"))
        axes.plot(x, y, label=name, color=color, linewidth=width, linestyle=dashes)
    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)  # around the last line
    axes.set(xlim=(0, 1000), ylim=(-10, 66), xlabel="distance r (tokens)", ylabel="expected score q · k")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=3)


def find(name: str) -> Figure:
    """The picture of that name, from this file or from a topic."""
    known = {figure.name: figure for topic in topics.TOPICS for figure in topics.find(topic).figures}
    return (known | FIGURES)[name]
