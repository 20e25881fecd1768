"""Variants of RoPE: a rotation of a part of each head, and a rotation in two dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..figure import COLOURS, THIN, Canvas, Data, Figure, columns, draw_lines, legend_above
from ..measures import frequencies, rotated, turn
from ..report import Report, Table
from .base import Topic

SHARES = (1.0, 0.5, 0.25)  # rotated part of a head: 1 in LLaMA, 0.4 in Phi-2, 0.25 in GPT-NeoX and GPT-J
SIDE = 17  # patches along each side of the image


def partly_turned(x: Tensor, positions: Tensor, part: int) -> Tensor:
    """Rotate the first `part` entries of x (N, D), with the frequencies of a head of that width; keep the others."""
    return torch.cat((turn(x[:, :part], positions, frequencies(part)), x[:, part:].double()), dim=-1)


def score_at_distances(share: float, distances: Tensor) -> Tensor:
    """The score of q = k = (1, .., 1) at each distance if a share of the head rotates; 1 at distance 0: (N,)."""
    keys = partly_turned(torch.ones(len(distances), 64), distances, round(share * 64))
    return keys.mean(-1)


def axial(dim: int, theta: float = 100.0) -> Tensor:
    """Frequencies of each pair along x and y, so that place (x, y) rotates it by (x, y) @ frequencies: (2, D/2).

    Half of the pairs rotate by x, the others by y.
    """
    half = frequencies(dim // 2, theta)  # (D/4,)
    return torch.block_diag(half[None], half[None])


def mixed(dim: int, theta: float = 100.0) -> Tensor:
    """The frequencies of `axial`, along directions that are spread evenly over the half circle: (2, D/2)."""
    size = frequencies(dim // 2, theta).repeat(2)  # (D/2,)
    golden = torch.arange(dim // 2, dtype=torch.float64) * (5**0.5 - 1) / 2 % 1
    return torch.stack((size * torch.cos(torch.pi * golden), size * torch.sin(torch.pi * golden)))


def report() -> Report:
    """Scores by distance for each rotated part."""
    scores = [score_at_distances(share, torch.arange(2049)) for share in SHARES]
    return Report(
        [
            Table(
                "score of q = k with base 10000, for a head of 64",
                ("distance", *(f"{share:g} rotated" for share in SHARES)),
                [(n, *(round(float(line[n]), 3) for line in scores)) for n in (0, 1, 8, 64, 512, 2048)],
            )
        ],
        "The smaller the rotated part of a head, the less its scores depend on the distance.",
    )


def partial_data() -> Data:
    """One row per rotated part and distance."""
    at = torch.arange(257)
    rows = [(f"{s:g} rotated", *row) for s in SHARES for row in enumerate(score_at_distances(s, at).tolist())]
    return columns(("part", "distance", "score"), rows)


def partial_draw(data: Data, canvas: Canvas) -> None:
    axes = canvas.subplots()
    draw_lines(axes, data, "distance", "score", "part", [f"{share:g} rotated" for share in SHARES])
    axes.axhline(0, **THIN)
    axes.set(xlabel="distance (tokens)", ylabel="score of q = k, 1 at distance 0")
    legend_above(canvas, axes, 3, title="part of the head")


def plane_data() -> Data:
    """One row per form and patch: its place, and the score of q = k with the patch in the middle."""
    places = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).flip(1)  # (SIDE^2, 2): x, y, row by row
    rows = []
    for name, freqs in (("axial", axial(64)), ("mixed directions", mixed(64))):
        turned = rotated(torch.ones(len(places), 64), places.double() @ freqs)  # (N, D)
        scores = turned @ turned[len(places) // 2] / 64  # (N,)
        rows += [(name, *place, score) for place, score in zip(places.tolist(), scores.tolist(), strict=True)]
    return columns(("form", "x", "y", "score"), rows)


def plane_draw(data: Data, canvas: Canvas) -> None:
    panels = canvas.subplots(1, 2)
    for axes, name in zip(panels, ("axial", "mixed directions"), strict=True):
        scores = data["score"][data["form"] == name].reshape(SIDE, SIDE)
        image = axes.imshow(scores, cmap="gray", vmin=-0.2, vmax=1)
        axes.set_title(name)
        axes.set(xticks=range(0, SIDE, 4), yticks=range(0, SIDE, 4))
        axes.set_xlabel("x of the key's patch", color=COLOURS["k"])
        axes.set_ylabel("y of the key's patch", color=COLOURS["k"])
    canvas.colorbar(image, ax=list(panels), label="score of q = k", location="bottom", shrink=0.6)


PARTIAL = "The score by distance if all entries of q and k are equal; the whole head, half or a quarter rotates."
PLANE = "The score of a patch in the middle of an image with every patch, for equal vectors."
TOPIC = Topic(
    report,
    (
        Figure("partial", PARTIAL, partial_data, partial_draw, size=(5.6, 3.4)),
        Figure("plane", PLANE, plane_data, plane_draw, size=(5.8, 4.0)),
    ),
)
