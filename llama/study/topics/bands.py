"""Fast and slow pairs in a trained model: the lengths of q and k by pair, and what is lost without a part of the pairs.

The question is that of "Round and Round We Go" (arXiv:2410.06205), which answers it for Gemma 7B.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...attention import reference_weights
from ...checkpoint import open_checkpoint
from ...errors import UsageError
from ...loader import build
from ...model import Transformer
from ..figure import LINES, Data, Figure
from ..measures import wavelengths
from ..perplexity import TINY, read_text, source, tiny_folder
from ..report import Report, Table, above, below, equal, wrapped
from ..results import table as stored_table
from . import TOPICS
from .base import Topic, check_range, columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

LONGEST = 1024  # tokens; each head has T x T weights
FAR = 1e9  # a divisor that stops a pair


class Heads(NamedTuple):
    """Means over a text.

    q, k (L, H, D/2), the lengths of each pair; previous (L, H), the weight on the token before; loss, nats per token
    """

    q: Tensor
    k: Tensor
    previous: Tensor
    loss: float


@torch.inference_mode()
def measured(model: Transformer, tokens: Tensor) -> Heads:
    """Read tokens (T,) and record the heads by hooks on `attend`, where q and k are rotated."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def hook(module: Any, inputs: Any, output: Tensor) -> None:
        q, k, _, mask = inputs  # (B, H, T, D), (B, KV, T, D)
        lengths = [x[0].double().unflatten(-1, (-1, 2)).norm(dim=-1).mean(1) for x in (q, k)]  # (H, D/2), (KV, D/2)
        lengths[1] = lengths[1].repeat_interleave(len(lengths[0]) // len(lengths[1]), dim=0)
        weights = reference_weights(q, k, mask)[0]  # (H, T, T)
        found.append((*lengths, weights.diagonal(-1, -2, -1).double().mean(-1)))

    blocks: list[Any] = list(model.layers)
    hooks = [block.attention.attend.register_forward_hook(hook) for block in blocks]
    try:
        logits = model(tokens[None])[0, :-1]  # (T - 1, V)
    finally:
        for handle in hooks:
            handle.remove()
    loss = float(torch.nn.functional.cross_entropy(logits.double(), tokens[1:]))
    q, k, previous = (torch.stack(parts).cpu() for parts in zip(*found, strict=True))
    return Heads(q, k, previous, loss)


# the parts of the pairs that are stopped, as shares of all pairs from the fastest on
PARTS: Mapping[str, tuple[float, float]] = {
    "none": (0, 0),
    "fastest quarter": (0, 0.25),
    "second quarter": (0.25, 0.5),
    "third quarter": (0.5, 0.75),
    "slowest quarter": (0.75, 1),
    "all": (0, 1),
}


@lru_cache(maxsize=1)
def _heads(model: str, text: Path | None, length: int | None) -> tuple[Tensor, int, dict[str, Heads]]:
    """Frequencies (D/2,), the trained length, and the heads with each part of the pairs stopped."""
    folder, text = source(model, text or tiny_folder() / "held-out.txt")
    checkpoint = open_checkpoint(folder)
    length = min(checkpoint.config.max_seq_len, 256) if length is None else length
    check_range("--length", length, 8, LONGEST)
    ids = checkpoint.tokenizer().encode(read_text(text).decode())
    if len(ids) < length:
        raise UsageError(f"{text} has {len(ids)} tokens, and --length is {length}; use a longer text or lower --length")
    start = (len(ids) - length) // 2
    tokens, found = torch.tensor(ids[start : start + length]), {}
    for name, (first, last) in PARTS.items():
        net = build(checkpoint, "cpu", "float32", max_seq_len=length)
        if net.rope.by_length:
            raise UsageError(
                f"the topic bands needs fixed frequencies, but those of {model} depend on the length; use another model"
            )
        inv_freq, factor = net.rope.frequencies(length)  # (D/2,)
        if name == "none":
            plain = inv_freq
        stopped = inv_freq.double().clone()
        stopped[round(first * len(stopped)) : round(last * len(stopped))] /= FAR
        net.rope.table = _rows(net, stopped, factor, length)
        found[name] = measured(net, tokens)
    return plain, checkpoint.config.max_seq_len, found


def _rows(net: Transformer, inv_freq: Tensor, factor: float, length: int) -> tuple[Tensor, ...]:
    """The table of the model's rotation for other frequencies (D/2,)."""
    angles = torch.arange(length)[:, None] * inv_freq  # (T, D/2) float64
    return (torch.polar(torch.full_like(angles, factor), angles).to(torch.complex64),)


def report(model: str = TINY, text: Path | None = None, length: int | None = None) -> Report:
    """Use of fast and slow pairs by heads that look at the previous token and by the others, and the loss without."""
    inv_freq, trained, found = _heads(model, text, length)
    plain = found["none"]
    quarter = len(inv_freq) // 4
    share = plain.q * plain.k / (plain.q * plain.k).sum(-1, keepdim=True)  # (L, H, D/2)
    fast, slow = share[..., :quarter].sum(-1), share[..., -quarter:].sum(-1)  # (L, H)
    previous = plain.previous.flatten()  # (L * H,)
    order = previous.argsort(descending=True)
    count = max(1, len(order) // 16)
    top, rest = order[:count], order[count:]
    kinds = {f"top {count} by previous-token weight": top, "all others": rest}
    waves = wavelengths(inv_freq)
    shipped = model == TINY and text is None and length is None
    return Report(
        "bands",
        TOPICS["bands"],
        settings={"model": model, "pairs": len(inv_freq), "heads": plain.previous.numel()},
        says=wrapped(
            "The share of a quarter of the pairs is its sum of |q_i||k_i|, divided by that of all pairs; 0.25 means"
            f" even use. The fastest quarter ends at a wavelength of {float(waves[quarter - 1]):.3g} tokens, the"
            f" slowest begins at {float(waves[-quarter]):,.0f}; the context is {trained:,}. Stopped pairs are not"
            " rotated here, although the model was trained with their rotation."
        ),
        tables=(
            Table(
                "weight on the previous token, and shares of |q_i||k_i|",
                ("heads", "previous-token weight", "fastest quarter", "slowest quarter"),
                [
                    (name, *(round(float(x.flatten()[chosen].mean()), 3) for x in (plain.previous, fast, slow)))
                    for name, chosen in kinds.items()
                ],
            ),
            Table(
                "the same model with some pairs stopped",
                ("stopped", "loss (nats per token)", "previous-token weight of those heads"),
                [
                    (name, round(heads.loss, 3), round(float(heads.previous.flatten()[top].mean()), 3))
                    for name, heads in found.items()
                ],
            ),
        ),
        checks=(
            equal(
                "",
                "largest change of |q| in layer 0 by stopping pairs",
                float((found["all"].q[0] - plain.q[0]).abs().max()),
                0.0,
                1e-4,
            ),
            above("", "loss without rotation / loss", found["all"].loss / plain.loss, 1),
            *(
                (
                    above("", "fastest quarter: positional heads / others", _ratio(fast, top, rest), 1),
                    below(
                        "",
                        "weight on the previous token, without the fastest quarter / with",
                        float(found["fastest quarter"].previous.flatten()[top].mean() / previous[top].mean()),
                        0.8,
                    ),
                )
                if shipped
                else ()
            ),
        ),
    )


def _ratio(x: Tensor, one: Tensor, other: Tensor) -> float:
    return float(x.flatten()[one].mean() / x.flatten()[other].mean())


def data(model: str = TINY, text: Path | None = None, length: int | None = None) -> Data:
    """Panel "pairs": per kind of head and pair x, the mean share y, and the tenths low and high of the heads.

    Panel "heads": per head, x the share of the fastest quarter, y the weight on the previous token.
    """
    _, _, found = _heads(model, text, length)
    plain = found["none"]
    share = (plain.q * plain.k / (plain.q * plain.k).sum(-1, keepdim=True)).flatten(0, 1)  # (L * H, D/2)
    previous = plain.previous.flatten()  # (L * H,)
    order = previous.argsort(descending=True)
    count = max(1, len(order) // 16)
    rows: list[tuple[object, ...]] = []
    for kind, chosen in ((f"{count} most on the previous token", order[:count]), ("all others", order[count:])):
        of_kind = share[chosen]  # (heads, D/2)
        low, high = of_kind.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64), dim=0)  # (D/2,) each
        for pair, cells in enumerate(zip(of_kind.mean(0), low, high, strict=True)):
            rows.append(("pairs", kind, pair, *(round(float(cell), 5) for cell in cells)))
        fast = of_kind[:, : share.shape[1] // 4].sum(1)
        for x, y in zip(fast.tolist(), previous[chosen].tolist(), strict=True):
            rows.append(("heads", kind, round(x, 4), *[round(y, 4)] * 3))
    return columns(("panel", "kind", "x", "y", "low", "high"), rows)


def stored() -> Data:
    """`data` of SmolLM2-135M: clearllama study bands -m smollm2-135m-instruct --figure FILE.csv."""
    rows = stored_table("bands-smollm2.csv")
    return columns(tuple(rows[0]), [(*list(row.values())[:2], *map(float, list(row.values())[2:])) for row in rows])


def draw(table: Data, canvas: Canvas) -> None:
    upper, lower = canvas.subplots(2, 1, height_ratios=(4, 3))
    for index, kind in enumerate(dict.fromkeys(table["kind"].tolist())):
        style = LINES[index + 1]
        rows = (table["kind"] == kind) & (table["panel"] == "pairs")
        x = table["x"][rows]
        upper.fill_between(x, table["low"][rows], table["high"][rows], color=style["color"], alpha=0.15, linewidth=0)
        upper.plot(x, table["y"][rows], label=kind, **style)
        rows = (table["kind"] == kind) & (table["panel"] == "heads")
        lower.scatter(table["x"][rows], table["y"][rows], s=12, marker="os"[index], color=style["color"])
    upper.set_xlabel("pair i (0 turns fastest)")
    upper.set_ylabel("share of |qᵢ||kᵢ| over all pairs")
    upper.set_ylim(bottom=0)
    canvas.legend(
        *upper.get_legend_handles_labels(),
        loc="outside upper center",
        ncols=2,
        title="heads (line: mean; band: the middle 8 of 10 heads)",
    )
    lower.set_xlabel("share of the fastest quarter of the pairs")
    lower.set_ylabel("weight on the previous token")


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "bands",
            "Above: how much each pair can add to a score, by kind of head. Below: each point is a head. By default"
            " this is the tiny model of the study, which has 16 heads.",
            data,
            draw,
            size=(5.4, 6.0),
        ),
        Figure(
            "bands_smollm2",
            "SmolLM2-135M-Instruct, 270 heads. Above: the pairs 23 and 24 have the largest shares. Below: each point"
            " is a head. No head looks at the previous token without fast pairs, since only fast pairs tell neighbours"
            " apart; but some heads with fast pairs look elsewhere.",
            stored,
            draw,
            size=(5.4, 6.0),
        ),
    ),
)
