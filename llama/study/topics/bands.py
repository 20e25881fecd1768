"""Fast and slow pairs in a trained model: what each pair can add to a score, and what is lost when pairs don't rotate.

The question is that of "Round and Round We Go" (arXiv:2410.06205), which answers it for Gemma 7B.
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoint import Checkpoint, open_checkpoint
from ...errors import UsageError
from ...inside.trace import recording, surprisal
from ...loader import build
from ..figure import Canvas, Data, Figure, columns, pair_colour
from ..measures import wavelengths
from ..perplexity import TINY, folder_of, read_text, tiny_folder
from ..report import Report, Table
from ..results import data as stored
from .base import Topic, answering, check_range

LONGEST = 1024  # tokens; each head has T x T weights
PARTS = ("none", "fastest quarter", "second quarter", "third quarter", "slowest quarter", "all")


def passage(model: str, text: Path | None, length: int | None) -> tuple[Checkpoint, Tensor]:
    """A checkpoint, and tokens (T,) from the middle of a text: by default up to 256 of tiny-kjv's held-out text."""
    checkpoint = open_checkpoint(folder_of(model))
    length = min(checkpoint.config.max_seq_len, 256) if length is None else length
    check_range("--length", length, 8, LONGEST)
    text = text or tiny_folder() / "held-out.txt"
    ids = checkpoint.tokenizer().encode(read_text(text).decode())
    if len(ids) < length:
        raise UsageError(
            f"{text} has {len(ids)} tokens, and length (--length) is {length}; use a longer text or lower it"
        )
    start = (len(ids) - length) // 2
    return checkpoint, torch.tensor(ids[start : start + length])


class Heads(NamedTuple):
    """How heads use pairs, and the loss when the pairs of a part (see PARTS) don't rotate.

    inv_freq  (D/2,)
    share     the share of each pair in each head's sum of |q_i||k_i|, (L * H, D/2)
    previous  for each stopped part, the weight of each head on the previous token, (L * H,)
    losses    the loss for each stopped part, (6,) nats per token
    """

    model: str
    trained: int
    inv_freq: Tensor
    share: Tensor
    previous: dict[str, Tensor]
    losses: Tensor


@lru_cache(maxsize=1)
@torch.inference_mode()
def _heads(model: str = TINY, text: Path | None = None, length: int | None = None) -> Heads:
    """Measure the heads of a model on a text."""
    checkpoint, tokens = passage(model, text, length)
    net = build(checkpoint, "cpu", "float32", max_seq_len=len(tokens))
    if net.rope.by_length:
        raise UsageError(f"bands needs fixed frequencies, but those of {model} depend on the length; use another model")
    inv_freq, _ = net.rope.frequencies(len(tokens))  # (D/2,)
    (rows,) = net.rope.table  # (T, D/2) complex
    previous, losses = {}, []
    for number, part in enumerate(PARTS):
        first, last = (0, 4) if part == "all" else (max(number - 1, 0), number)  # quarters
        stopped = slice(first * len(inv_freq) // 4, last * len(inv_freq) // 4)
        turned = rows.clone()
        turned[:, stopped] = rows[0, stopped]  # every position has the angle of position 0
        net.rope.table = (turned,)
        with recording(net) as seen:
            losses.append(surprisal(net(tokens[None])[0], tokens).mean())
        previous[part] = torch.stack([w.diagonal(-1, -2, -1).mean(-1) for w in seen.weights]).flatten()
        if part == "none":
            norms = torch.stack(seen.pair_norms).flatten(0, 1)  # (L * H, D/2)
    share, trained = norms / norms.sum(-1, keepdim=True), checkpoint.config.max_seq_len
    return Heads(model, trained, inv_freq, share, previous, torch.stack(losses))


def _kinds(previous: Tensor) -> dict[str, Tensor]:
    """Split heads by their weight on the previous token (heads,): indices of the top sixteenth, and of all others."""
    order = previous.argsort(descending=True)
    count = max(1, len(order) // 16)
    return {f"{count} most on the previous token": order[:count], "all others": order[count:]}


def _report(found: Heads) -> Report:
    """Use of fast and slow pairs by previous-token heads and by all others, and the loss when pairs don't rotate."""
    model, trained, inv_freq, share, previous, losses = found
    quarter = len(inv_freq) // 4
    kinds = _kinds(previous["none"])
    used = (previous["none"], share[:, :quarter].sum(-1), share[:, -quarter:].sum(-1))  # (heads,) each
    most = {part: float(weights[next(iter(kinds.values()))].mean()) for part, weights in previous.items()}
    waves = wavelengths(inv_freq)
    strong = share.mean(0).topk(3).indices.tolist()
    return Report(
        (
            Table(
                "weight on the previous token, and shares of |q_i||k_i|",
                ("heads", "previous token", "fastest quarter", "slowest quarter"),
                [(kind, *(round(float(x[heads].mean()), 3) for x in used)) for kind, heads in kinds.items()],
            ),
            Table(
                "the same model with some pairs stopped",
                ("stopped", "loss (nats per token)", "previous token, same heads"),
                [(part, round(float(loss), 3), round(most[part], 3)) for part, loss in zip(PARTS, losses, strict=True)],
            ),
        ),
        f"|q_i||k_i| / sqrt(D) is the most that pair i can add to a score. Pairs {strong[0]}, {strong[1]} and"
        f" {strong[2]} have the largest shares. The fastest quarter ends at a wavelength of"
        f" {float(waves[quarter - 1]):.3g} tokens, the slowest begins at {float(waves[-quarter]):,.0f}; the trained"
        f" context is {trained:,}.",
        {"model": model, "pairs": len(inv_freq), "heads": len(share)},
    )


def _data(found: Heads) -> Data:
    """Panel "pairs": per kind of head and pair x, the mean share y, and the quantiles low (10 %) and high (90 %).

    Panel "heads": per head, x is the share of the fastest quarter and y the weight on the previous token.
    """
    share, previous = found.share, found.previous
    rows: list[tuple[object, ...]] = []
    for kind, heads in _kinds(previous["none"]).items():
        of_kind = share[heads]  # (heads, D/2)
        low, high = of_kind.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64), dim=0)  # (D/2,) each
        for pair, cells in enumerate(zip(of_kind.mean(0), low, high, strict=True)):
            rows.append(("pairs", kind, pair, *(round(float(cell), 5) for cell in cells)))
        fast = of_kind[:, : share.shape[1] // 4].sum(1)
        for x, y in zip(fast.tolist(), previous["none"][heads].tolist(), strict=True):
            rows.append(("heads", kind, round(x, 4), *[round(y, 4)] * 3))
    return columns(("panel", "kind", "x", "y", "low", "high"), rows)


data = answering(_heads, _data)


def draw(table: Data, canvas: Canvas) -> None:
    """Shares by pair for each kind of head, and each head by its use of fast pairs."""
    *panels, lower = canvas.subplots(3, 1)
    for axes, kind, colour in zip(panels, dict.fromkeys(table["kind"].tolist()), ("#b2182b", "#666666"), strict=True):
        rows = (table["kind"] == kind) & (table["panel"] == "pairs")
        x, low, high = (table[column][rows] for column in ("x", "low", "high"))
        axes.bar(x, table["y"][rows], color=[pair_colour(pair, len(x)) for pair in range(len(x))])
        axes.vlines(x, low, high, color=colour, linewidth=0.8)
        axes.set(xlabel="pair i (0 turns fastest)", ylabel="share of |qᵢ||kᵢ|", title=f"heads: {kind}")
        rows = (table["kind"] == kind) & (table["panel"] == "heads")
        lower.scatter(table["x"][rows], table["y"][rows], s=12, marker="o", color=colour, label=kind)
    lower.set(xlabel="share of the fastest quarter of the pairs", ylabel="weight on the\nprevious token")
    lower.legend(title="heads", loc="upper left")


# The stored results are those of: clearllama study bands -m smollm2-135m-instruct --figure FILE.csv
CAPTION = (
    "Above: how much each pair can add to a score, for two kinds of heads. Bar: the mean of the heads; thin line: the"
    " middle 80 %. Below: each point is a head."
)
SMOLLM2 = f"SmolLM2-135M-Instruct, 270 heads. {CAPTION}"
DEFAULT = f"{CAPTION} By default this is tiny-kjv, which has 16 heads."
TOPIC = Topic(
    answering(_heads, _report),
    (
        Figure("bands", DEFAULT, data, draw, size=(5.4, 6.6)),
        Figure("bands_smollm2", SMOLLM2, partial(stored, "bands-smollm2.csv"), draw, size=(5.4, 6.6)),
    ),
)
