"""The heads of a trained model: the distances at which they attend, and the frequencies that they use."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...checkpoint import Checkpoint, open_checkpoint
from ...errors import UsageError
from ...hub import resolve
from ...loader import build
from ...model import Transformer
from ..figure import LINES, Data, Figure
from ..measures import wavelengths
from ..perplexity import TINY, read_text, tiny_folder
from ..report import Report, Table, wrapped
from ..trace import distance_profile, recording
from . import TOPICS
from .base import Topic, check_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

LONGEST = 1024  # tokens; each head has T x T weights


def passage(model: str, text: Path | None, length: int | None) -> tuple[Checkpoint, Tensor]:
    """A checkpoint, and tokens (T,) from the middle of a text, by default 256 that tiny-kjv wasn't trained on."""
    checkpoint = open_checkpoint(tiny_folder() if model == TINY else resolve(model))
    length = min(checkpoint.config.max_seq_len, 256) if length is None else length
    check_range("--length", length, 8, LONGEST)
    text = text or tiny_folder() / "held-out.txt"
    ids = checkpoint.tokenizer().encode(read_text(text).decode())
    if len(ids) < length:
        raise UsageError(f"{text} has {len(ids)} tokens, and --length is {length}; use a longer text or lower --length")
    start = (len(ids) - length) // 2
    return checkpoint, torch.tensor(ids[start : start + length])


@lru_cache(maxsize=1)
@torch.inference_mode()
def _recorded(model: str, text: Path | None, length: int | None) -> tuple[Transformer, Tensor, Tensor]:
    """The model, all attention weights (L, H, T, T), and |q_i| |k_i| (L, H, D/2)."""
    checkpoint, tokens = passage(model, text, length)
    net = build(checkpoint, "cpu", "float32", max_seq_len=len(tokens))
    with recording(net) as seen:
        net(tokens[None])
    return net, torch.stack(seen.weights), torch.stack(seen.pair_norms)


def report(model: str = TINY, text: Path | None = None, length: int | None = None) -> Report:
    """Attention weight by distance, and the largest contribution of slow pairs to a score, by layer."""
    net, weights, norms = _recorded(model, text, length)
    L, H, T, _ = weights.shape
    slow = wavelengths(net.rope.frequencies(T)[0]) > net.config.max_seq_len  # (D/2,)
    share = norms / norms.sum(-1, keepdim=True)  # (L, H, D/2)
    near = distance_profile(weights)[..., :2].sum(-1)  # (L, H)
    positions = torch.arange(T)
    distance = (weights * (positions[:, None] - positions)).sum(-1).mean(-1)  # (L, H)
    columns = (near.mean(-1), distance.amin(-1), distance.amax(-1), share[..., slow].sum(-1).mean(-1))  # (L,) each
    return Report(
        "heads",
        TOPICS["heads"],
        settings={"model": model, "tokens": T, "slow pairs": f"{int(slow.sum())} of {len(slow)}"},
        says=wrapped(
            "|q_i||k_i| / sqrt(D) is the most that pair i can add to a score. Slow pairs don't finish a turn within the"
            " trained context; the last column is their share of the sum over all pairs."
        ),
        tables=(
            Table(
                f"{L} layers of {H} heads",
                ("layer", "weight within 1 token", "nearest head (mean distance)", "furthest", "share of slow pairs"),
                [(layer, *(round(float(column[layer]), 3) for column in columns)) for layer in range(L)],
            ),
        ),
    )


def data(model: str = TINY, text: Path | None = None, length: int | None = None) -> Data:
    """One row per head and distance ("attention"), and per head and pair ("share"); x is the distance or the pair."""
    _, weights, norms = _recorded(model, text, length)
    profile = distance_profile(weights, skip_first=True)  # (L, H, T - 1)
    share = norms / norms.sum(-1, keepdim=True)  # (L, H, D/2)
    parts = []
    for panel, values in (("attention", profile), ("share", share)):
        layer, head, x = (axis.ravel() for axis in np.indices(values.shape))
        parts.append((np.full(values.numel(), panel), layer, head, x, values.double().numpy().ravel()))
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return dict(zip(("panel", "layer", "head", "x", "y"), columns, strict=True))


def draw(table: Data, canvas: Canvas) -> None:
    """Each head in grey, and the mean over the heads of four layers."""
    left, right = canvas.subplots(1, 2)
    layers = int(table["layer"].max()) + 1
    for axes, panel, shift in ((left, "attention", 1), (right, "share", 0)):
        rows = table["panel"] == panel
        heads = int(table["head"].max()) + 1
        y = table["y"][rows].reshape(layers, heads, -1)
        x = np.arange(y.shape[-1]) + shift
        axes.plot(x, y.reshape(layers * heads, -1).T, color="#cccccc", linewidth=0.6, zorder=1)
        for index, layer in enumerate(sorted({round(i * (layers - 1) / 3) for i in range(4)})):
            axes.plot(x, y[layer].mean(0), label=f"layer {layer}", zorder=2, **LINES[index])
    left.set(xscale="log", yscale="log", xlabel="distance + 1 (tokens)", ylabel="mean attention weight")
    left.set_ylim(bottom=max(1e-5, float(table["y"][table["panel"] == "attention"].min())))
    right.set(xlabel="pair i (0 turns fastest)", ylabel="share of |qᵢ||kᵢ| over all pairs")
    right.set_ylim(bottom=0)
    right.legend(title="mean over heads")


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "attention_by_distance",
            "Grey: single heads. Left: how far each head looks; token 0 is left out, since many heads use it as a sink."
            " Right: how much each pair can add to a score.",
            data,
            draw,
            size=(8.0, 3.8),
        ),
    ),
)
