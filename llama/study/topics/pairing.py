"""Pairing: the two layouts of the pairs in a head, and what happens if a model is read in the wrong layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ... import rope
from ...config import ModelConfig
from ...model import Transformer
from .. import forms, formulas
from ..figure import Data, Figure
from ..report import Report, Table, equal, holds, wrapped
from . import TOPICS
from .base import Topic, check_head_dim, check_range

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

DISTANCES = (0, 1, 4, 16, 64, 256, 1024)

# A random model that runs in a moment, and in which every part affects the logits.
CONFIG = ModelConfig(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=96, vocab_size=320, max_seq_len=256
)
BATCH, LENGTH = 8, 64
TOKENS = (0, 1, 4, 16, 63)  # positions at which the table shows the KL divergence


def report(head_dim: int = 128, theta: float = 10000.0) -> Report:
    """The two layouts, the permutation between them, and how scores and logits change without it."""
    check_head_dim(head_dim, 4, 512)
    check_range("--rope-theta", theta, 100.0, 1e12)
    names = Table(
        "a head of 8 entries",
        ("entry", *(str(j) for j in range(8))),
        [
            ("partner in its pair, interleaved", *_partners(forms.quarter_turn)),
            ("partner in its pair, half", *_partners(rope.rotate_half)),
            ("index after interleaved to half", *_goes_to(8)),
            ("entry at this index after it", *rope.interleaved_to_half(torch.arange(8)).tolist()),
        ],
    )
    changes = [_change(head_dim, theta, distance) for distance in DISTANCES]
    right = [_change_by_formula(head_dim, theta, distance) for distance in DISTANCES]
    damage = Table(
        f"random q, k of {head_dim} entries, not permuted: change of a score / the score (both rms)",
        ("distance", *(str(distance) for distance in DISTANCES)),
        [("change", *(f"{change:.3f}" for change in changes))],
    )
    by_distance = "more so at larger distances" if changes == sorted(changes) else "not more so at larger distances"
    activations, weights, differ = _tensors(head_dim, theta)
    kl, agree, logits = _models()
    by_token = Table(
        "a random model, wq and wk not permuted: KL to the correct next token (nats, mean of 8 texts)",
        ("token", *(str(t) for t in TOKENS)),
        [("KL", *(f"{float(kl[:, t].mean()):.3f}" for t in TOKENS))],
    )
    return Report(
        "pairing",
        TOPICS["pairing"],
        settings={"head_dim": head_dim, "theta": theta},
        says=wrapped(
            "Meta's files pair neighbours (2i, 2i + 1), Hugging Face's pair halves (i, i + D/2). Both are RoPE; the"
            " layout must be the one that wq and wk were trained with. Permuting their rows converts one layout to the"
            " other. A missing permutation raises no error: the first token is correct, and the scores of other tokens"
            f" are partly noise, {by_distance}."
        ),
        tables=(names, damage, by_token),
        checks=(
            equal("001-10", "entries permuted, half layout: difference", activations, 0.0, 1e-5),
            equal("001-10", "wq permuted minus product permuted", weights, 0.0, 1e-5),
            equal("001-10", "not permuted: largest difference", differ, _differ(head_dim, theta), 1e-4),
            equal(
                "001-10",
                "scores: the table minus its closed form",
                max(abs(a - b) for a, b in zip(changes, right, strict=True)),
                0.0,
                1e-4,
            ),
            holds("001-10", "not permuted, distance 0: the score does not change", changes[0] < 1e-6),
            equal("001-10", "model permuted: largest change of a logit", logits, 0.0, 1e-4),
            equal("001-10", "model not permuted, first token: KL", float(kl[:, 0].max()), 0.0, 1e-9),
            equal("001-10", f"model not permuted, {LENGTH} tokens: mean KL (nats)", float(kl.mean()), KL, 1e-4),
            equal("001-10", "model not permuted: share of equal top tokens", agree, AGREE, 0.01),
        ),
    )


def _partners(quarter_turn: Any) -> list[int]:
    """The partner of each of 8 entries: where the library's quarter turn of a pair moves the entry."""
    turned = quarter_turn(torch.eye(8))  # (8, 8): row j is the unit vector of entry j, turned to its partner
    return turned.abs().argmax(-1).tolist()


def _goes_to(head_dim: int) -> list[int]:
    """The index of each entry after `interleaved_to_half`."""
    return torch.argsort(rope.interleaved_to_half(torch.arange(head_dim))).tolist()


def _turn_half(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate x (1, T, H, D) in Hugging Face's form."""
    cos, sin = torch.cat((freqs_cis.real,) * 2, -1), torch.cat((freqs_cis.imag,) * 2, -1)  # (T, D) each
    return rope.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0]


def _tensors(head_dim: int, theta: float) -> tuple[float, float, float]:
    """Largest differences with permuted activations, with permuted weights, and without a permutation."""
    rng = np.random.default_rng(0)
    x = torch.as_tensor(rng.standard_normal((1, 32, 4, head_dim)), dtype=torch.float32)  # (1, T, H, D)
    freqs_cis = rope.precompute_freqs_cis(head_dim, 32, theta)  # (T, D/2)
    turned, _ = rope.apply_rotary_emb(x, x, freqs_cis)
    permuted = _turn_half(rope.interleaved_to_half(x), freqs_cis)
    h = torch.as_tensor(rng.standard_normal((5, 32)), dtype=torch.float32)  # (N, C)
    w = torch.as_tensor(rng.standard_normal((2 * head_dim, 32)) / 32**0.5, dtype=torch.float32)  # (2 D, C)
    by_rows = (h @ rope.to_half_layout(w, head_dim).T).unflatten(-1, (2, head_dim))  # (N, 2, D)
    by_entries = rope.interleaved_to_half((h @ w.T).unflatten(-1, (2, head_dim)))  # (N, 2, D)
    return (
        float((permuted - rope.interleaved_to_half(turned)).abs().max()),
        float((by_rows - by_entries).abs().max()),
        float((_turn_half(x, freqs_cis) - turned).abs().max()),
    )


def _differ(head_dim: int, theta: float) -> float:
    """The last value of `_tensors` in numpy: the same x, both layouts written out."""
    x = np.random.default_rng(0).standard_normal((1, 32, 4, head_dim)).astype(np.float32).astype(np.float64)
    angles = np.outer(np.arange(32), formulas.frequencies(head_dim, theta))[:, None]  # (T, 1, D/2)
    turned = [np.empty_like(x), np.empty_like(x)]
    for out, (first, second) in zip(turned, _slices(head_dim), strict=True):
        pair = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)  # (1, T, H, D/2)
        out[..., first], out[..., second] = pair.real, pair.imag
    return float(np.abs(turned[0] - turned[1]).max())


def _slices(head_dim: int) -> tuple[tuple[slice, slice], ...]:
    """First and second entries of all pairs: interleaved, half."""
    half = head_dim // 2
    return (slice(0, None, 2), slice(1, None, 2)), (slice(0, half), slice(half, None))


def _change(head_dim: int, theta: float, distance: int) -> float:
    """rms of q . (R' - R) k / rms of q . R k for independent entries of variance 1: |R' - R| / |R| (Frobenius).

    R and R' are the library's rotations of the unit vectors at that distance, in the interleaved and the half layout.
    """
    units = torch.eye(head_dim).reshape(1, 1, head_dim, head_dim)  # (1, 1, H = D, D)
    row = rope.precompute_freqs_cis(head_dim, distance + 1, theta)[-1:]  # (1, D/2)
    right, _ = rope.apply_rotary_emb(units, units, row)
    return float((_turn_half(units, row) - right).norm() / right.norm())


def _change_by_formula(head_dim: int, theta: float, distance: int) -> float:
    """The same in closed form, sqrt(2 - 2 tr(R^T R') / D), with both rotation matrices written out in numpy."""
    angles = distance * formulas.frequencies(head_dim, theta)  # (D/2,)
    matrices = [np.zeros((head_dim, head_dim)), np.zeros((head_dim, head_dim))]
    entries = np.arange(head_dim)
    for matrix, (first, second) in zip(matrices, _slices(head_dim), strict=True):
        a, b = entries[first], entries[second]
        matrix[a, a] = matrix[b, b] = np.cos(angles)
        matrix[b, a], matrix[a, b] = np.sin(angles), -np.sin(angles)
    return float(np.sqrt(max(2 - 2 * (matrices[0] * matrices[1]).sum() / head_dim, 0)))


# ---------------------------------------------------------------------------------------------------- complete models
# The results of a second decoder with the same weights, in numpy's float64: tests/study/test_topics_frequencies.py.
KL, AGREE = 0.38073511, 111 / 512


def random_state(config: ModelConfig = CONFIG, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Random weights in Meta's layout, by parameter name, and random tokens (B, T)."""
    rng = np.random.default_rng(seed)
    state = {}
    for name, parameter in Transformer(config).state_dict().items():
        noise = rng.standard_normal(parameter.shape)
        value = 1 + 0.2 * noise if parameter.dim() == 1 else noise / parameter.shape[-1] ** 0.5
        state[name] = torch.as_tensor(value, dtype=torch.float32)
    return state, torch.as_tensor(rng.integers(0, config.vocab_size, (BATCH, LENGTH)))


def _models() -> tuple[Tensor, float, float]:
    """Compare models in the half layout with the model in the interleaved layout.

    Returns KL (B, T) in nats to the correct distributions and the share of equal top tokens, both without permuting
    wq and wk; and the largest change of a logit with permuted wq and wk.
    """
    state, tokens = random_state()
    turning = (".wq.weight", ".wk.weight")
    permuted = {
        name: rope.to_half_layout(weight, CONFIG.head_dim) if name.endswith(turning) else weight
        for name, weight in state.items()
    }
    right = _logits("complex", state, tokens)  # (B, T, V)
    by_halves, wrong = _logits("half", permuted, tokens), _logits("half", state, tokens)
    p, q = right.log_softmax(-1), wrong.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)  # (B, T)
    agree = float((right.argmax(-1) == wrong.argmax(-1)).double().mean())
    return kl, agree, float((by_halves - right).abs().max())


@torch.no_grad()
def _logits(form: str, state: dict[str, Tensor], tokens: Tensor) -> Tensor:
    model = Transformer(CONFIG, rope=form).eval()
    model.load_state_dict(state)
    return model(tokens).double()


# ---------------------------------------------------------------------------------------------------- figure: pairing
def pairing_data() -> Data:
    """entry (its index), its partner in both layouts, and its index after the permutation (goes_to)."""
    return {
        "entry": np.arange(8),
        "partner_interleaved": np.array(_partners(forms.quarter_turn)),
        "partner_half": np.array(_partners(rope.rotate_half)),
        "goes_to": np.array(_goes_to(8)),
    }


HATCHES = ("", "////", "\\\\\\\\", "xxxx")
SHADES = ("#ffffff", "#d9d9d9", "#f7f7f7", "#bdbdbd")


def pairing_draw(data: Data, canvas: Canvas) -> None:
    """Above: the pairs of both layouts. Below: the permutation as arrows. A hatch is a pair of Meta's layout."""
    grid = canvas.add_gridspec(2, 2, height_ratios=(1, 1.5))
    entry = data["entry"]
    meta = np.minimum(entry, data["partner_interleaved"]) // 2  # (8,) pair of each entry in Meta's layout
    halves = np.minimum(entry, data["partner_half"])  # (8,) pair in Hugging Face's
    for column, (title, partner, pair) in enumerate(
        (
            ("interleaved (Meta): pairs 2i, 2i + 1", data["partner_interleaved"], meta),
            ("half (Hugging Face): pairs i, i + D/2", data["partner_half"], halves),
        )
    ):
        axes = canvas.add_subplot(grid[0, column])
        _boxes(axes, 0, pair, [str(j) for j in entry])
        for a, b in zip(entry, partner, strict=True):
            if a < b:
                _arc(axes, int(a), int(b))
        _bare(axes, title, (-0.6, 2.0))
    axes = canvas.add_subplot(grid[1, :])
    _boxes(axes, 3, meta, [str(j) for j in entry])
    came = np.argsort(data["goes_to"])  # (8,) entry at each index after the permutation
    _boxes(axes, 0, meta[came], [str(j) for j in came])
    for a, b in zip(entry, data["goes_to"], strict=True):
        axes.annotate("", (b, 0.5), (a, 2.5), arrowprops={"arrowstyle": "->", "color": "#000000", "lw": 1})
    axes.text(-0.45, 3.65, "rows of wq and wk, or entries of q and k, in Meta's layout", ha="left", va="bottom")
    axes.text(-0.45, -0.65, "the same in Hugging Face's layout", ha="left", va="top")
    _bare(axes, "", (-1.2, 4.2))


def _boxes(axes: Axes, y: float, pair: np.ndarray, labels: list[str]) -> None:
    from matplotlib.patches import Rectangle

    for x, (which, label) in enumerate(zip(pair, labels, strict=True)):
        corner = (x - 0.45, y - 0.45)
        box = Rectangle(corner, 0.9, 0.9, facecolor=SHADES[which], hatch=HATCHES[which], edgecolor="#555555")
        axes.add_patch(box)
        axes.text(x, y, label, ha="center", va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})


def _arc(axes: Axes, a: int, b: int) -> None:
    t = np.linspace(0, np.pi, 50)
    middle, half = (a + b) / 2, (b - a) / 2
    axes.plot(middle + half * np.cos(t), 0.5 + np.sin(t) * (0.5 + 0.35 * half), color="#000000", linewidth=1)


def _bare(axes: Axes, title: str, high: tuple[float, float]) -> None:
    axes.set(xlim=(-0.6, 7.6), ylim=high)
    axes.set_axis_off()
    axes.set_title(title)


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "pairing",
            "A head of 8 entries; a hatch is a pair. To convert Meta's layout to Hugging Face's, move entry 2i to i and"
            " 2i + 1 to i + D/2, in both wq and wk.",
            pairing_data,
            pairing_draw,
            size=(7.0, 4.4),
        ),
    ),
)
