"""Position encodings compared by training: the same small model, data and steps, with only the encoding exchanged."""

from __future__ import annotations

import numpy as np

from ..figure import LINES, THIN, Canvas, Data, Figure, columns, legend_above
from ..report import Report, Table
from ..results import json_lines
from .base import Topic

FILE = "encodings.jsonl"  # written by scripts/compare_encodings.py
TRAINED, BUCKET = 128, 16  # the context in training; each stored loss is a mean over BUCKET positions
STRETCHES = ((0, 128), (128, 160), (160, 256), (256, 384), (384, 512))
NAMES = {
    "none": "no encoding",
    "sinusoidal": "sinusoidal",
    "learned": "learned",
    "alibi": "ALiBi",
    "rope": "RoPE",
    "rope+yarn": "RoPE, YaRN x4 afterwards",
}


def losses() -> dict[str, np.ndarray]:
    """Map each encoding to its loss in nats per byte: (seeds, buckets of 16 positions)."""
    runs = json_lines(FILE)
    found = {name: [run["loss"] for run in runs if run["encoding"] == name] for name in NAMES if name != "rope+yarn"}
    found["rope+yarn"] = [run["loss_yarn"] for run in runs if run["encoding"] == "rope"]
    return {name: np.array(rows) for name, rows in found.items()}


def report() -> Report:
    """Mean loss over stretches of positions, for each encoding, and the standard deviation over the seeds."""
    run, rows = json_lines(FILE)[0], list[tuple[str | float, ...]]()
    for name, found in losses().items():
        means = [found[:, first // BUCKET : last // BUCKET].mean(1) for first, last in STRETCHES]  # (seeds,) each
        numbers = [*(float(mean.mean()) for mean in means), float(means[0].std(ddof=1))]
        rows.append((NAMES[name], *(round(number, 3) for number in numbers)))
    table = Table(
        "loss by position", ("encoding", *(f"{a}..{b - 1}" for a, b in STRETCHES), "sd of seeds, 0..127"), rows
    )
    return Report(
        [table],
        "Loss in nats per byte on a book that was not used for training. The context in training is 128 bytes. Stored"
        " results of scripts/compare_encodings.py.",
        {"parameters": run["parameters"], "steps": run["steps"], "batch": run["batch"]},
    )


def data() -> Data:
    """One row per encoding and bucket: its middle position, the mean loss of the seeds, and the extremes."""
    rows = [
        (NAMES[name], (bucket + 0.5) * BUCKET, values.mean(), values.min(), values.max())
        for name, found in losses().items()
        for bucket, values in enumerate(found.T)  # values (seeds,)
    ]
    return columns(("encoding", "position", "loss", "least", "most"), rows)


def draw(table: Data, canvas: Canvas) -> None:
    axes = canvas.subplots()
    for label, style in zip(NAMES.values(), LINES, strict=False):
        rows = table["encoding"] == label
        x = table["position"][rows]
        axes.fill_between(x, table["least"][rows], table["most"][rows], color=style["color"], alpha=0.15, linewidth=0)
        axes.plot(x, table["loss"][rows], label=label, **style)
    axes.axvline(TRAINED, **THIN)
    axes.text(TRAINED - 4, 3.4, "trained\ncontext", ha="right", va="top")
    axes.set(xlabel="position in the window (bytes)", ylabel="loss (nats per byte)")
    legend_above(canvas, axes, 2)


CAPTION = "Five encodings, trained alike on 128 bytes and tested on 512. Bands: the extremes of three seeds."
TOPIC = Topic(report, (Figure("trained", CAPTION, data, draw, size=(5.6, 4.6)),))
