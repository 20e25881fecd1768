"""The worked example: one batch of queries and keys turned by Meta's function, one number followed through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ... import rope
from ...rope_scaling import inverse_frequencies
from ..figure import LINES, Data, Figure
from ..measures import turn
from ..report import Report, Table, equal, holds
from .base import Topic

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

# Batch 2, 5 tokens, 2 query heads that share 1 key head, 8 entries a head; the numbers count up, so that each
# shows where it came from.
XQ = torch.arange(160.0).reshape(2, 5, 2, 8)  # (B, T, H, D)
XK = torch.arange(80.0).reshape(2, 5, 1, 8)  # (B, T, KV, D)


def report() -> Report:
    """Six steps with their shapes, and the element 28 + 29j followed through."""
    inv_freq, _ = inverse_frequencies(8)
    freqs_cis = rope.precompute_freqs_cis(8, 5)  # (T, D/2) complex
    paired = torch.view_as_complex(XQ.unflatten(-1, (-1, 2)))  # (B, T, H, D/2) complex
    xq_out, xk_out = rope.apply_rotary_emb(XQ, XK, freqs_cis)
    cos, sin = freqs_cis.real, freqs_cis.imag  # (T, D/2) each
    by_matrix, _ = rope.apply_rotary_emb_matrix(XQ, XK, cos, sin)
    q, k = rope.interleaved_to_half(XQ), rope.interleaved_to_half(XK)
    by_half, _ = rope.apply_rotary_pos_emb(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), unsqueeze_dim=2)
    truth = torch.stack([turn(XQ[:, :, head], torch.arange(5), inv_freq) for head in range(2)], 2)  # float64

    element, factor = complex(paired[0, 1, 1, 2]), complex(freqs_cis[1, 2])
    steps = Table(
        "from xq to xq_out",
        ("step", "shape", "the element"),
        (
            ("xq", "(2, 5, 2, 8)", "28, 29"),
            ("pairs", "(2, 5, 2, 4, 2)", "(28, 29)"),
            ("complex numbers", "(2, 5, 2, 4)", element),
            ("freqs_cis, broadcast", "(1, 5, 1, 4)", factor),
            ("product", "(2, 5, 2, 4)", element * factor),
            ("xq_out", "(2, 5, 2, 8)", ", ".join(f"{x:.4f}" for x in xq_out[0, 1, 1, 4:6].tolist())),
        ),
    )
    return Report(
        "example",
        "what happens to one query, number by number?",
        says=("sample 0, token 1, head 1, pair 2 holds 28 and 29; position 1 turns pair 2 by 0.01 radians",),
        tables=(steps,),
        checks=(
            equal("000-41", "angle of pair 2 per position", float(inv_freq[2]), 0.01, 1e-9),
            equal("000-46", "the element as a complex number", element, 28 + 29j),
            equal("000-48", "its turn cos 0.01 + i sin 0.01", factor, 0.9999500004 + 0.0099998333j, 1e-7),
            equal("000-48", "the product", element * factor, 27.708604844975795 + 29.27854543534996j, 1e-5),
            equal("000-51", "all 240 numbers against float64, largest error", _error(xq_out, xk_out), 0.0, 2e-5),
            holds("000-52", "position 0 is unchanged, bit for bit", torch.equal(xq_out[:, 0], XQ[:, 0])),
            holds("000-54", "another sample, another head: the same turn", _same_turn(paired, xq_out)),
            equal("000-32", "as a matrix, largest difference", float((by_matrix - truth).abs().max()), 0.0, 2e-5),
            equal(
                "002-42",
                "by halves, reordered back, largest difference",
                float((rope.half_to_interleaved(by_half) - truth).abs().max()),
                0.0,
                2e-5,
            ),
        ),
    )


def _error(xq_out: torch.Tensor, xk_out: torch.Tensor) -> float:
    """The largest error of the 160 + 80 numbers, against angles and products in numpy's float64."""
    angles = np.outer(np.arange(5), 10000.0 ** (-np.arange(0, 8, 2) / 8))  # (T, D/2)
    worst = 0.0
    for x, out in ((XQ, xq_out), (XK, xk_out)):
        a, b = x.double().numpy()[..., 0::2], x.double().numpy()[..., 1::2]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        right = np.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(x.shape)
        worst = max(worst, float(np.abs(right - out.double().numpy()).max()))
    return worst


def _same_turn(paired: torch.Tensor, xq_out: torch.Tensor) -> bool:
    turns = torch.view_as_complex(xq_out.unflatten(-1, (-1, 2))) / paired  # (B, T, H, D/2)
    return bool(torch.allclose(turns[:, 1:], turns[:1, 1:, :1], atol=1e-5))


def change_data() -> Data:
    """2 |sin(position * inv_freq / 2)|: how far a pair of length 1 moves, by position."""
    inv_freq = inverse_frequencies(8)[0].double().numpy()
    position, pair = np.meshgrid(np.arange(64), np.arange(4), indexing="ij")
    return {
        "position": position.ravel(),
        "pair": pair.ravel(),
        "change": 2 * np.abs(np.sin(position * inv_freq[pair] / 2)).ravel(),
    }


def change_draw(data: Data, canvas: Canvas) -> None:
    axes = canvas.subplots()
    for pair in range(4):
        rows = data["pair"] == pair
        axes.plot(data["position"][rows], data["change"][rows], label=f"pair {pair}", **LINES[pair])
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("change of a pair of length 1")
    axes.legend(ncols=4, loc="upper right")


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "change",
            "The angle of a pair falls with its index; the change of its entries does not. Pair 0 is back where it"
            " started after 6.28 positions while pair 1 is at its furthest after 31 (000-53, E08).",
            change_data,
            change_draw,
        ),
    ),
)
