"""The heads of a trained model: the distances at which they attend, and the frequencies that they use."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...checkpoint import open_checkpoint
from ...errors import UsageError
from ...hub import resolve
from ...loader import build
from ...model import Transformer
from ..figure import LINES, Data, Figure
from ..measures import wavelengths
from ..perplexity import TINY, read_text, tiny_folder
from ..report import Check, Report, Table, above, below, equal, wrapped
from ..sketch import curves
from ..trace import distance_profile, recording
from . import TOPICS
from .base import Topic, check_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

LONGEST = 1024  # tokens; each head has T x T weights


@lru_cache(maxsize=1)
@torch.inference_mode()
def _recorded(model: str, text: Path | None, length: int | None) -> tuple[Transformer, Tensor, Tensor, Tensor]:
    """The model, the ids of the text (T,), all attention weights (L, H, T, T), and |q_i| |k_i| (L, H, D/2)."""
    folder = tiny_folder() if model == TINY else resolve(model)
    text = text or tiny_folder() / "held-out.txt"
    checkpoint = open_checkpoint(folder)
    length = min(checkpoint.config.max_seq_len, 256) if length is None else length
    check_range("--length", length, 2, LONGEST)
    ids = checkpoint.tokenizer().encode(read_text(text).decode())
    if len(ids) < length:
        raise UsageError(f"{text} has {len(ids)} tokens, and --length is {length}; use a longer text or lower --length")
    start = (len(ids) - length) // 2
    tokens = torch.tensor(ids[start : start + length])
    net = build(checkpoint, dtype="float32", max_seq_len=length)
    with recording(net) as seen:
        net(tokens[None].to(net.tok_embeddings.weight.device))
    return net, tokens, torch.stack(seen.weights), torch.stack(seen.pair_norms)


def report(model: str = TINY, text: Path | None = None, length: int | None = None) -> Report:
    """Attention weight by distance, and the largest contribution of each pair to a score."""
    net, tokens, weights, norms = _recorded(model, text, length)
    L, H, T, _ = weights.shape
    inv_freq, _ = net.rope.frequencies(T)
    slow = wavelengths(inv_freq) > net.config.max_seq_len  # (D/2,): no full turn within the context
    share = norms / norms.sum(-1, keepdim=True)  # (L, H, D/2)
    profile = distance_profile(weights)  # (L, H, T)
    distance = torch.arange(T)
    mean_distance = (weights * (distance[:, None] - distance[None, :])).sum(-1).mean(-1)  # (L, H)
    rows = [
        (
            layer,
            round(float(profile[layer, :, :2].sum(-1).mean()), 3),
            round(float(mean_distance[layer].min()), 1),
            round(float(mean_distance[layer].max()), 1),
            round(float(share[layer, :, slow].sum(-1).mean()), 3),
        )
        for layer in range(L)
    ]
    near, far = float(mean_distance.min()), float(mean_distance.max())
    by_pair = share.mean((0, 1))  # (D/2,)
    peak = float(wavelengths(inv_freq)[by_pair.argmax()]) / net.config.max_seq_len
    least, most = float(by_pair.min()), float(by_pair.max())
    shipped = model == TINY and text is None and length is None
    shown = rows if len(rows) <= 8 else [rows[i * (len(rows) - 1) // 7] for i in range(8)]
    return Report(
        "heads",
        TOPICS["heads"],
        says=wrapped(
            "|q_i||k_i| / sqrt(D) is the most that pair i can add to a score at any positions. Pairs that do not"
            " finish a turn within the context are slow; the last column is their share of the sum over all pairs."
            f" Measured: the most used pair is used {most / least:.3g} times as much as the least used, its wavelength"
            f" is {peak:.3g} contexts, and the mean distance of the nearest head is {near / far:.2g} times that of the"
            " furthest. Random weights use all pairs about evenly, and their heads attend about equally far."
            + (
                " The last checks apply to this model on this text only."
                if shipped
                else " These numbers are checked only for tiny-kjv on its own text; the checks here hold for any model."
            )
        ),
        tables=(
            Table(
                f"{L} layers of {H} heads on {T} tokens",
                ("layer", "weight within 1 token", "nearest head (tokens)", "furthest", "slow pairs"),
                shown,
            ),
        ),
        checks=(
            equal("000-07", "sum of the weights of a query, largest error", _sum_error(weights), 0.0, 1e-5),
            equal(
                "001-15", "layer 0's weights from distances alone: error", _by_distance(net, tokens, weights), 0.0, 1e-4
            ),
            *(_of_training(most / least, peak, near / far) if shipped else ()),
        ),
        settings={"model": model, "tokens": T, "slow pairs": f"{int(slow.sum())} of {len(slow)}"},
    )


def _of_training(use: float, peak: float, reach: float) -> tuple[Check, ...]:
    """Checks for the model that comes with the package; other models need not pass them."""
    return (
        above("001-16", "use of the most used pair / the least used", use, 1.5),
        above("001-16", "wavelength of the most used pair, in contexts: it finishes no turn", peak, 1.0),
        below("001-16", "the same: it is not the slowest pair", peak, 6.0),
        below("000-10", "heads differ: mean distance, nearest / furthest", reach, 0.5),
    )


def _sum_error(weights: Tensor) -> float:
    return float((weights.double().sum(-1) - 1).abs().max())


def _by_distance(net: Transformer, tokens: Tensor, weights: Tensor) -> float:
    """Largest error of layer 0's weights against numpy, where no vector is rotated and scores depend on distances."""
    first: Any = net.layers[0]
    block = first.attention
    x = first.attention_norm(net.tok_embeddings(tokens[None].to(net.tok_embeddings.weight.device)))
    q, k = (linear(x)[0].double().cpu().numpy() for linear in (block.wq, block.wk))  # (T, H * D), (T, KV * D)
    T, D = len(q), block.head_dim
    q, k = (np.ascontiguousarray(y.reshape(T, -1, D)).view(np.complex128) for y in (q, k))  # (T, H, D/2) complex
    k = k.repeat(q.shape[1] // k.shape[1], axis=1)
    inv_freq, factor = net.rope.frequencies(T)
    apart = np.arange(T)[:, None] - np.arange(T)[None, :]  # (T, T) m - n
    turn = factor**2 * np.exp(1j * apart[..., None] * inv_freq.double().numpy())  # (T, T, D/2)
    scores = np.einsum("mhi,nhi,mni->hmn", q, k.conj(), turn).real / np.sqrt(D)  # (H, T, T)
    scores[:, apart < 0] = -np.inf
    expected = np.exp(scores - scores.max(-1, keepdims=True))
    expected /= expected.sum(-1, keepdims=True)
    return float(np.abs(expected - weights[0].double().cpu().numpy()).max())


def data(model: str = TINY, text: Path | None = None, length: int | None = None) -> Data:
    """One row per head and distance ("attention"), and per head and pair ("share"); x is the distance or the pair."""
    _, _, weights, norms = _recorded(model, text, length)
    profile = distance_profile(weights, skip_first=True)  # (L, H, T - 1)
    share = norms / norms.sum(-1, keepdim=True)  # (L, H, D/2)
    columns: dict[str, list[np.ndarray]] = {"panel": [], "layer": [], "head": [], "x": [], "y": []}
    for panel, values in (("attention", profile), ("share", share)):
        layer, head, x = np.meshgrid(*(np.arange(n) for n in values.shape), indexing="ij")
        columns["panel"].append(np.full(values.numel(), panel))
        for name, column in (("layer", layer), ("head", head), ("x", x), ("y", values.double().cpu().numpy())):
            columns[name].append(column.ravel())
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def sketch(table: Data) -> list[str]:
    """Share of the scores by pair, mean over the heads of a layer, for up to four layers."""
    rows = table["panel"] == "share"
    shown = {"pair": table["x"][rows], "share": table["y"][rows], "layer": table["layer"][rows]}
    return curves(shown, "pair", "share", "layer", most=4)


def draw(table: Data, canvas: Canvas) -> None:
    left, right = canvas.subplots(1, 2)
    layers = int(table["layer"].max()) + 1
    chosen = sorted({round(i * (layers - 1) / 3) for i in range(4)})
    for axes, panel, shift in ((left, "attention", 1), (right, "share", 0)):
        rows = table["panel"] == panel
        for layer in range(layers):
            for head in range(int(table["head"].max()) + 1):
                one = rows & (table["layer"] == layer) & (table["head"] == head)
                axes.plot(table["x"][one] + shift, table["y"][one], color="#cccccc", linewidth=0.6, zorder=1)
        for index, layer in enumerate(chosen):
            of_layer = rows & (table["layer"] == layer)
            x = np.unique(table["x"][of_layer])
            mean = [table["y"][of_layer & (table["x"] == value)].mean() for value in x]
            axes.plot(x + shift, mean, label=f"layer {layer}", zorder=2, **LINES[index])
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_ylim(bottom=max(1e-5, float(table["y"][table["panel"] == "attention"].min())))
    left.set_xlabel("distance + 1 (tokens)")
    left.set_ylabel("mean attention weight")
    right.set_xlabel("pair i (0 turns fastest)")
    right.set_ylabel("share of the pair in the products of lengths")
    right.set_ylim(bottom=0)
    right.legend(title="mean over heads")


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "attention_by_distance",
            "Grey: single heads. Left: most weight is on near tokens, but heads differ by orders of magnitude at a"
            " given distance. Token 0 is left out, since many heads use it as a sink. Right: how much each pair can"
            " add to a score; the most used pairs are the first that do not finish a turn within the context.",
            data,
            draw,
            size=(8.0, 3.8),
            sketch=sketch,
        ),
    ),
)
