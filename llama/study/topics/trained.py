"""Position encodings compared by training: the same small model, data and steps, with only the encoding exchanged."""

from __future__ import annotations

import statistics
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..figure import LINES, Data, Figure
from ..report import Report, Table, above, below, wrapped
from ..results import json_lines
from . import TOPICS
from .base import Topic, columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

FILE = "encodings.jsonl"  # written by scripts/compare_encodings.py
TRAINED, BUCKET = 128, 16  # the context in training, and the positions of each stored mean
NAMES = {
    "none": "no encoding",
    "sinusoidal": "sinusoidal",
    "learned": "learned",
    "alibi": "ALiBi",
    "rope": "RoPE",
    "rope+yarn": "RoPE, YaRN x4 afterwards",
}


@lru_cache(maxsize=1)
def losses() -> dict[str, np.ndarray]:
    """Encoding -> loss in nats per byte: (seeds, buckets of 16 positions). A seed counts if all its runs are there."""
    lines = json_lines(FILE)
    seeds = sorted({line["seed"] for line in lines})
    whole = [s for s in seeds if len({line["encoding"] for line in lines if line["seed"] == s}) == len(NAMES) - 1]
    found: dict[str, list[Any]] = {name: [] for name in NAMES}
    for line in sorted(lines, key=lambda line: line["seed"]):
        if line["seed"] in whole:
            found[line["encoding"]].append(line["loss"])
            if "loss_yarn" in line:
                found["rope+yarn"].append(line["loss_yarn"])
    return {name: np.array(rows) for name, rows in found.items()}


def report() -> Report:
    """Mean loss over stretches of positions, for each encoding; the deviation is that of the seeds."""
    runs, found = json_lines(FILE), losses()
    stretches = ((0, 128), (128, 160), (160, 256), (256, 384), (384, 512))

    def mean(name: str, first: int, last: int) -> np.ndarray:
        return found[name][:, first // BUCKET : last // BUCKET].mean(1)  # (seeds,)

    rows = []
    for name, label in NAMES.items():
        cells = [float(mean(name, *stretch).mean()) for stretch in stretches]
        spread = statistics.stdev(mean(name, 0, TRAINED).tolist()) if len(found[name]) > 1 else 0.0
        rows.append((label, *(round(cell, 3) for cell in cells), round(spread, 3)))
    near = {name: float(mean(name, 0, TRAINED).mean()) for name in NAMES}
    far = {name: float(mean(name, 384, 512).mean()) for name in NAMES}
    return Report(
        "trained",
        TOPICS["trained"],
        settings={
            "parameters": min(run["parameters"] for run in runs),
            "with the learned table": max(run["parameters"] for run in runs),
            "context": TRAINED,
            "steps": runs[0]["steps"],
            "batch": runs[0]["batch"],
            "seeds": len(found["rope"]),
        },
        says=wrapped(
            "Loss in nats per byte on a book that was not used for training, by position; lower is better. The book is"
            " cut into windows of 512 bytes, so all positions read about the same text. Stored results;"
            " scripts/compare_encodings.py repeats them. The learned table has rows up to 512, of which training used"
            " 128."
        ),
        tables=(
            Table(
                "loss by position",
                ("encoding", *(f"{a}..{b - 1}" for a, b in stretches), "sd of seeds, 0..127"),
                rows,
            ),
        ),
        checks=(
            *(
                above("", f"{NAMES[name]} / RoPE, within the context", near[name] / near["rope"], 1)
                for name in ("none", "sinusoidal", "learned")
            ),
            above("", "RoPE at 384..511 / within the context", far["rope"] / near["rope"], 1.2),
            below("", "ALiBi at 384..511 / within the context", far["alibi"] / near["alibi"], 1.02),
            below("", "YaRN afterwards / RoPE, at 384..511", far["rope+yarn"] / far["rope"], 0.9),
        ),
    )


def data() -> Data:
    """One row per encoding and bucket: its middle position, the mean loss of the seeds, and the extremes."""
    rows = [
        (label, (bucket + 0.5) * BUCKET, values.mean(), values.min(), values.max())
        for name, label in NAMES.items()
        for bucket, values in enumerate(losses()[name].T)  # values (seeds,)
    ]
    return columns(("encoding", "position", "loss", "least", "most"), rows)


def draw(table: Data, canvas: Canvas) -> None:
    axes = canvas.subplots()
    for index, label in enumerate(NAMES.values()):
        rows = table["encoding"] == label
        x, style = table["position"][rows], LINES[index]
        axes.fill_between(x, table["least"][rows], table["most"][rows], color=style["color"], alpha=0.15, linewidth=0)
        axes.plot(x, table["loss"][rows], label=label, **style)
    axes.axvline(TRAINED, color="#999999", linewidth=0.8)
    axes.text(TRAINED - 4, 3.4, "trained\ncontext", ha="right", va="top")
    axes.set_xlabel("position in the window (bytes)")
    axes.set_ylabel("loss (nats per byte)")
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "trained",
            "Five encodings, trained alike on 128 bytes and tested on 512. Lines are means over the seeds, bands their"
            " extremes. Within the context RoPE and ALiBi are best. Beyond it ALiBi stays level, and the others get"
            " worse at once or soon. RoPE needs a scaling there, such as YaRN, which needs no training.",
            data,
            draw,
            size=(5.6, 4.6),
        ),
    ),
)
