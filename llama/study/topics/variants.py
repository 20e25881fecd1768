"""Variants of RoPE: a rotation of some pairs only, of some layers only, and in two dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...attention import causal_mask
from ...config import ModelConfig
from ...model import Transformer
from ..figure import Data, Figure, draw_lines
from ..measures import frequencies, mean_cosine, turn
from ..report import Report, Table, above, below, equal, wrapped
from . import TOPICS
from .base import Topic, check_range, columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

SHARES = (1.0, 0.5, 0.25)  # rotated part of a head: LLaMA; Phi-2 is near 0.4; GPT-NeoX and GPT-J (64 of 256)
SIDE = 17  # patches of a side of the image


# ------------------------------------------------------------------------------------------------- partial rotation
def partly_turned(x: Tensor, positions: Tensor, rotated: int, theta: float = 10000.0) -> Tensor:
    """Rotate the first `rotated` entries of x (N, D), with the frequencies of a head of that width; keep the others."""
    return torch.cat((turn(x[:, :rotated], positions, frequencies(rotated, theta)), x[:, rotated:].double()), dim=-1)


def score_at_distances(rotated: int, distances: Tensor, dim: int = 64) -> Tensor:
    """The score of q = k = (1, .., 1) at each distance, 1 at distance 0: (N,)."""
    x = torch.ones(1, dim, dtype=torch.float64)
    keys = partly_turned(x.expand(len(distances), -1), distances, rotated)
    return (keys @ x[0]) / dim


# ------------------------------------------------------------------------------------------- layers without rotation
def change_by_layer(no_rope_layers: tuple[int, ...], n_layers: int = 8) -> list[float]:
    """How much the output of each layer changes when all distances become 4 times as large, relative to the output.

    The layers have random weights, and each reads the same 24 random vectors.
    """
    config = ModelConfig(32, n_layers, 2, 2, 16, 64, 8, max_seq_len=128, no_rope_layers=no_rope_layers)
    draw = torch.Generator().manual_seed(0)
    net = Transformer(config).requires_grad_(False).eval()
    for weight in net.parameters():
        if weight.dim() == 2:
            weight.normal_(std=2 * weight.shape[1] ** -0.5, generator=draw)
    h, at = torch.randn(1, 24, config.dim, generator=draw), torch.arange(24)  # (B, T, C)
    near, far = (net.rope.freqs_cis(positions, 128) for positions in (at, 4 * at))
    mask, found = causal_mask(at, at), []
    for block in net.layers:
        one, other = (block.attention(h, rows, mask, at, None) for rows in (near, far))  # type: ignore[operator]
        found.append(float((one - other).norm() / one.norm()))
    return found


# ---------------------------------------------------------------------------------------------------- two dimensions
def axial(dim: int, theta: float = 100.0) -> Tensor:
    """Frequencies of each pair along x and y: (2, D/2). Half of the pairs rotate by x, the others by y."""
    half = frequencies(dim // 2, theta)  # (D/4,)
    zero = torch.zeros_like(half)
    return torch.stack((torch.cat((half, zero)), torch.cat((zero, half))))


def mixed(dim: int, theta: float = 100.0) -> Tensor:
    """The same frequencies along directions that are spread evenly over the half circle: (2, D/2)."""
    size = frequencies(dim // 2, theta).repeat(2)  # (D/2,)
    golden = torch.arange(dim // 2, dtype=torch.float64) * (5**0.5 - 1) / 2 % 1
    return torch.stack((size * torch.cos(torch.pi * golden), size * torch.sin(torch.pi * golden)))


def turn_2d(x: Tensor, places: Tensor, freqs: Tensor) -> Tensor:
    """Rotate vectors x (N, D) to places (N, 2): pair i by the angle freqs[0, i] x + freqs[1, i] y."""
    angles = places.double() @ freqs  # (N, D/2)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)  # (N, D)


def grid(side: int = SIDE) -> Tensor:
    """The places of the patches of an image, row by row: (side * side, 2), with (x, y)."""
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack((x, y), dim=-1).flatten(0, 1)


def report(head_dim: int = 64, theta: float = 100.0) -> Report:
    """Checks of the three variants; head_dim and theta are those of two dimensions."""
    check_range("--head-dim", head_dim, 8, 1024)
    check_range("--rope-theta", theta, 2.0, 1e12)
    draw = torch.Generator().manual_seed(0)
    distances = torch.arange(0, 2049)
    scores = {share: score_at_distances(round(64 * share), distances) for share in SHARES}
    cosines = {share: mean_cosine(frequencies(round(64 * share)), distances) for share in SHARES}
    alike, every_fourth = change_by_layer(()), change_by_layer((3, 7))
    places = grid()
    moved = places + torch.tensor([5, -3])
    q, k = torch.randn(2, len(places), head_dim // 4 * 4, generator=draw, dtype=torch.float64)
    errors = {}
    for name, freqs in (("axial", axial(q.shape[1], theta)), ("mixed", mixed(q.shape[1], theta))):
        one, other = (turn_2d(q, at, freqs) @ turn_2d(k, at, freqs).T for at in (places, moved))  # (N, N) each
        errors[name] = _largest(one - other)
    transposed = places.flip(1)
    swapped = turn_2d(q, transposed, axial(q.shape[1], theta)) @ turn_2d(k, transposed, axial(q.shape[1], theta)).T
    straight = turn_2d(q, places, axial(q.shape[1], theta)) @ turn_2d(k, places, axial(q.shape[1], theta)).T
    return Report(
        "variants",
        TOPICS["variants"],
        settings={"head_dim in two dimensions": q.shape[1], "base θ in two dimensions": f"{theta:g}"},
        says=wrapped(
            "The smaller the rotated part of a head, the less its scores depend on the distance. In a layer without"
            " RoPE they do not depend on it at all. In two dimensions each pair has a frequency along x and one"
            " along y, and scores depend on the difference of the positions."
        ),
        tables=(
            Table(
                "score of q = k with base 10000, for a head of 64",
                ("distance", *(f"{share:g} rotated" for share in SHARES)),
                [(n, *(round(float(scores[share][n]), 3) for share in SHARES)) for n in (0, 1, 8, 64, 512, 2048)],
            ),
            Table(
                "change of a layer's output when distances become 4 times as large",
                ("layer", "RoPE in all layers", "no RoPE in layers 3 and 7"),
                [(i, round(a, 3), round(b, 3)) for i, (a, b) in enumerate(zip(alike, every_fourth, strict=True))],
            ),
        ),
        checks=(
            *(
                equal(
                    "",
                    f"rotated part {share:g}: score against the mean cosine, largest difference",
                    _largest(scores[share] - share * cosines[share] - (1 - share)),
                    0.0,
                    1e-9,
                )
                for share in SHARES
            ),
            equal("", "layers without RoPE: change of the output", max(every_fourth[3], every_fourth[7]), 0.0),
            above("", "layers with RoPE: least change of the output", min(alike), 0.05),
            below("", "axial: change of scores when the image is shifted", errors["axial"], 1e-12),
            below("", "mixed: change of scores when the image is shifted", errors["mixed"], 1e-12),
            above("", "change of scores when x and y are exchanged", _largest(swapped - straight), 1),
        ),
    )


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def partial_data() -> Data:
    """One row per rotated part and distance."""
    distances = torch.arange(0, 257)
    rows = [
        (f"{share:g} rotated", at, score)
        for share in SHARES
        for at, score in enumerate(score_at_distances(round(64 * share), distances).tolist())
    ]
    return columns(("part", "distance", "score"), rows)


def partial_draw(data: Data, canvas: Canvas) -> None:
    axes = canvas.subplots()
    draw_lines(axes, data, "distance", "score", "part", [f"{share:g} rotated" for share in SHARES])
    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.set_xlabel("distance (tokens)")
    axes.set_ylabel("score of q = k, 1 at distance 0")
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, title="part of the head")


def layers_data() -> Data:
    """One row per layer and model."""
    models = {"RoPE in all layers": (), "no RoPE in layers 3 and 7": (3, 7)}
    rows = [(name, *row) for name, listed in models.items() for row in enumerate(change_by_layer(listed))]
    return columns(("model", "layer", "change"), rows)


def layers_draw(data: Data, canvas: Canvas) -> None:
    axes = canvas.subplots()
    for index, name in enumerate(dict.fromkeys(data["model"].tolist())):
        rows = data["model"] == name
        axes.plot(
            data["layer"][rows],
            data["change"][rows],
            label=name,
            marker="os"[index],
            linestyle="none",
            markersize=(9, 5)[index],
            markerfacecolor=("none", "#b2182b")[index],
            color=("#000000", "#b2182b")[index],
        )
    axes.set_ylim(bottom=-0.03)
    axes.set_xlabel("layer")
    axes.set_ylabel("relative change of the output")
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)


def plane_data() -> Data:
    """One row per form and patch: its place, and the score of q = k with the patch in the middle."""
    places, rows = grid(), []
    ones = torch.ones(len(places), 64, dtype=torch.float64)
    for name, freqs in (("axial", axial(64)), ("mixed directions", mixed(64))):
        turned = turn_2d(ones, places, freqs)  # (N, D)
        scores = turned @ turned[len(places) // 2] / 64  # (N,)
        rows += [(name, *place, score) for place, score in zip(places.tolist(), scores.tolist(), strict=True)]
    return columns(("form", "x", "y", "score"), rows)


def plane_draw(data: Data, canvas: Canvas) -> None:
    panels = canvas.subplots(1, 2)
    for axes, name in zip(panels, dict.fromkeys(data["form"].tolist()), strict=True):
        rows = data["form"] == name
        image = axes.imshow(data["score"][rows].reshape(SIDE, SIDE), cmap="viridis", vmin=-0.2, vmax=1)
        axes.set_title(name)
        axes.set_xticks(range(0, SIDE, 4))
        axes.set_yticks(range(0, SIDE, 4))
        axes.set_xlabel("x of the key's patch")
        axes.set_ylabel("y of the key's patch")
    canvas.colorbar(image, ax=list(panels), label="score of q = k", location="bottom", shrink=0.6)


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "partial",
            "The score of equal vectors by distance. The part of the head that is not rotated adds a constant: it"
            " compares contents, at any distance. The rotated part has the full range of frequencies.",
            partial_data,
            partial_draw,
            size=(5.6, 3.8),
        ),
        Figure(
            "layers",
            "All distances become 4 times as large. The output of layers with RoPE changes. The output of layers"
            " without RoPE is the same, so these layers meet no unknown angle in a long text.",
            layers_data,
            layers_draw,
            size=(5.6, 3.4),
        ),
        Figure(
            "plane",
            "The score of a patch in the middle of an image with all patches, for equal vectors. Axial: half of the"
            " pairs turn by x, half by y, which leaves a cross. Mixed: each pair turns along a direction of its own"
            " (fixed here, not trained), and the score falls in all directions.",
            plane_data,
            plane_draw,
            size=(5.8, 4.0),
        ),
    ),
)
