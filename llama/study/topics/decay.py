"""Decay: how a score depends on the distance, and how it does not."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from ... import rope
from .. import formulas
from ..figure import LINES, Data, Figure
from ..measures import decay_bound, frequencies, mean_cosine
from ..report import Report, Table, below, equal, wrapped
from ..sketch import curves
from . import TOPICS
from .base import Topic, check_head_dim, check_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

SPREAD = (1, 50, 100)  # factors of the base: 1e4, 5e5 (Llama 3), 1e6
ENTRIES = 2**21  # head_dim times distances: the bound is computed at every distance


def _bases(head_dim: int, theta: float, context: int) -> list[float]:
    """The bases to compare. Raises UsageError on settings out of range."""
    check_head_dim(head_dim, 4, 1024)
    check_range("--rope-theta", theta, 100.0, 1e10)
    check_range("--context", context, 16, ENTRIES // head_dim)
    return [theta * times for times in SPREAD]


def _built_for(context: int) -> int:
    """The distance for which the key of the example is built."""
    return min(500, context // 2)


def report(head_dim: int = 128, theta: float = 10000.0, context: int = 4096) -> Report:
    """RoFormer's bound by distance for three bases, and a key whose score is highest at a large distance."""
    bases = _bases(head_dim, theta, context)
    pinned = (head_dim, theta, context) == (128, 10000.0, 4096)
    distances = torch.arange(context + 1)
    bounds = [decay_bound(frequencies(head_dim, base), distances) for base in bases]  # (context + 1,) each
    right = [_bound(head_dim, base, context) for base in bases]
    built = _built_for(context)
    key = mean_cosine(frequencies(head_dim, theta), distances - built)  # (context + 1,)

    shown = sorted({0, 1, context, *(4**k for k in range(1, 9) if 4**k < context), built, 2 * built})
    half = context // 2
    near, far = (
        [float(bound[part].mean()) for bound in bounds] for part in (slice(1, half + 1), slice(half + 1, None))
    )
    table = Table(
        f"mean of the {head_dim // 2} partial sums, and the score of a key built for distance {built}",
        ("distance", *(f"base {base:g}" for base in bases), "built key"),
        [
            *((d, *(float(bound[d]) for bound in bounds), float(key[d])) for d in shown if d <= context),
            (f"mean of 1 .. {half:,}", *near, float(key[1 : half + 1].mean())),
            (f"mean of {half + 1:,} .. {context:,}", *far, float(key[half + 1 :].mean())),
        ],
    )
    means = [float(bound[1:].mean()) for bound in bounds]
    halves = [int(torch.nonzero(bound < bound[0] / 2).flatten()[:1].sum()) for bound in bounds]  # 0: never
    rises = int((bounds[0][1:] > bounds[0][:-1]).sum())
    # float32 frequencies have a relative error of 2^-24, and so have the angles; the errors of a sum add up at most
    rounding = context * 2.0**-24 * float(formulas.frequencies(head_dim, bases[2]).sum()) + 1e-9
    slowest = [float(frequencies(head_dim, base)[-1]) for base in bases]
    right_slowest = (1.15e-4, 0, 1.24e-6) if pinned else [base ** (-(head_dim - 2) / head_dim) for base in bases]
    apart, over = _random_scores(head_dim, theta, context)
    return Report(
        "decay",
        TOPICS["decay"],
        settings={"head_dim": head_dim, "theta": theta, "context": context},
        says=wrapped(
            "RoFormer bounds a score by the mean of |S_n|, where S_n sums e^(j distance ω) over the first n pairs."
            f" The bound is not monotonic: for base {theta:g} it rises at {rises:,} of {context:,} steps."
            f" {_on_average(near, far)}; {_by_base(means)}."
            " A score need not follow its bound: a key rotated back by n has its highest score at distance n. So the"
            " bound can decay without a decay of attention."
        ),
        tables=(table,),
        checks=(
            *(
                equal("001-14", f"mean bound over 1 .. {context:,}, base {base:g}", mean, expected, tolerance)
                for base, mean, expected, tolerance in zip(
                    bases,
                    means,
                    (5.59, 8.56, 9.17) if pinned else [float(bound[1:].mean()) for bound in right],
                    [0.005 if pinned else rounding] * 3,
                    strict=True,
                )
            ),
            equal(
                "001-14",
                "first distance below half, by base",
                ", ".join(map(str, halves)),
                "16, 34, 35" if pinned else ", ".join(str(int((bound < bound[0] / 2).argmax())) for bound in right),
            ),
            *(
                equal("001-12", f"slowest pair, base {bases[i]:g}", slowest[i], right_slowest[i], 0.005 * slowest[i])
                for i in (0, 2)
            ),
            equal(
                "001-12",
                f"rises of the bound in {context:,} steps, base {theta:g}",
                rises,
                2020 if pinned else int((np.diff(right[0]) > 0).sum()),
                0 if pinned else 2 + context // 500,
            ),
            below("001-14", "all bounds against float64, largest error", _apart(bounds, right), rounding),
            equal("001-12", "distance at which the built key has its highest score", int(key.argmax()), built),
            equal(
                "001-12",
                f"score of the built key at 0 / at {built}",
                float(key[0] / key[built]),
                float(np.cos(built * formulas.frequencies(head_dim, theta)).mean()),
                1e-4,
            ),
            below("001-15", "rotated q . k minus Re sum q conj(k) e^(j(m-n)ω)", apart, 1e-3 * head_dim**0.5),
            below("001-12", "random q, k: largest score / bound", over, 1.0),
        ),
    )  # fmt: skip


def _on_average(near: list[float], far: list[float]) -> str:
    """A sentence on whether the bound falls from the near to the far half of the distances, by its mean per base."""
    falls = sum(b < 0.95 * a for a, b in zip(near, far, strict=True))
    bases = {0: "no base", len(near): "every base"}.get(falls, f"{falls} of {len(near)} bases")
    return f"From the near half of the distances to the far half its mean falls for {bases}"


def _by_base(means: list[float]) -> str:
    """A clause on whether a larger base has a larger bound; a difference below 0.5 % does not count."""
    grows = all(1.005 * a < b for a, b in pairwise(means))
    return f"over all distances it {'is' if grows else 'is not'} larger for each larger base"


def _bound(head_dim: int, base: float, context: int) -> formulas.Array:
    """RoFormer's section 3.4.3 in numpy: the mean over n of |S_n| at distances 0 .. context."""
    total = np.zeros(context + 1, dtype=np.complex128)
    sizes = np.zeros(context + 1)
    for frequency in formulas.frequencies(head_dim, base):
        total += np.exp(1j * frequency * np.arange(context + 1))
        sizes += np.abs(total)
    return sizes / (head_dim // 2)


def _random_scores(head_dim: int, theta: float, context: int) -> tuple[float, float]:
    """Scores of one random query and key at 64 distances: largest difference from the formula, largest score / bound.

    Summation by parts gives |score| <= max |h_(i+1) - h_i| * sum |S_n| with h_i = q_i conj(k_i), h_(D/2) = 0.
    """
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, head_dim))
    at = np.unique(np.geomspace(1, min(context, 4096), 64).round()).astype(int)  # (n,) distances
    rows = rope.precompute_freqs_cis(head_dim, int(at.max()) + 1, theta)[torch.as_tensor(at)]  # (n, D/2)
    queries = torch.as_tensor(q, dtype=torch.float32).expand(1, len(at), 1, head_dim)  # (1, n, 1, D) at m = distance
    turned, _ = rope.apply_rotary_emb(queries, queries, rows)
    scores = (turned[0, :, 0].double() * torch.as_tensor(k, dtype=torch.float32)).sum(-1)  # (n,): the key at n = 0
    h = (q[0::2] + 1j * q[1::2]) * (k[0::2] - 1j * k[1::2])  # (D/2,)
    by_formula = (h * np.exp(1j * np.outer(at, formulas.frequencies(head_dim, theta)))).sum(-1).real  # (n,)
    step = np.abs(np.diff(np.append(h, 0))).max()
    bound = step * _bound(head_dim, theta, int(at.max()))[at] * (head_dim // 2)
    return _apart([scores], [by_formula]), float((np.abs(scores.numpy()) / bound).max())


def _apart(ours: list[torch.Tensor], right: list[formulas.Array]) -> float:
    return max(float(np.abs(a.numpy() - b).max()) for a, b in zip(ours, right, strict=True))


def decay_data(head_dim: int = 128, theta: float = 10000.0, context: int = 4096) -> Data:
    """line, distance (tokens), value: the bound / its value at 0; the key's score / its maximum.

    A point of a bound is its mean over one of 60 bins on the log axis; its many small rises would hide the trend.
    """
    bases = _bases(head_dim, theta, context)
    built = _built_for(context)
    edges = np.unique(np.geomspace(1, context + 1, 61).round().astype(int))  # (bins + 1,)
    middle = np.sqrt(edges[:-1] * (edges[1:] - 1))  # (bins,) tokens
    near = np.arange(max(built - 50, 1), min(built + 50, context))  # the peak is a few tokens wide
    at = np.unique(np.concatenate((np.geomspace(1, context, 300).round().astype(int), near)))
    names, distances, values = [], [], []
    for base in bases:
        bound = decay_bound(frequencies(head_dim, base), torch.arange(context + 1)).numpy()
        names += [f"bound, base {base:g}"] * len(middle)
        distances.append(middle)
        values.append(np.add.reduceat(bound, edges[:-1]) / np.diff(edges) / bound[0])
    names += [f"a key built for {built}"] * len(at)
    distances.append(at)
    values.append(mean_cosine(frequencies(head_dim, theta), torch.as_tensor(at) - built).numpy())
    return {"line": np.array(names), "distance": np.concatenate(distances), "value": np.concatenate(values)}


def decay_draw(data: Data, canvas: Canvas) -> None:
    """Value over distance (log): three bounds, and the score of the key as a thin line."""
    axes = canvas.subplots()
    names = list(dict.fromkeys(data["line"]))
    for number_, name in enumerate(names):
        rows = data["line"] == name
        style = {"color": "#555555", "linewidth": 0.7} if name == names[-1] else LINES[number_]
        axes.semilogx(data["distance"][rows], data["value"][rows], label=name, **style)
    axes.set_xlim(1, int(data["distance"].max()))
    axes.set_xlabel("distance (tokens, log scale)")
    axes.set_ylabel("bound, relative to distance 0; score, to its maximum")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=2)


TOPIC = Topic(
    report,
    figures=(
        Figure(
            "decay",
            "RoFormer's bound on a score, averaged over bins of distances. In heads of many pairs it falls on average,"
            " and its mean is larger for a larger base. The bound is drawn without its factor"
            " that depends on q and k. The thin line is the score of a key that was built to be highest at one"
            " distance.",
            decay_data,
            decay_draw,
            size=(5.6, 4.0),
            sketch=lambda data: curves(data, "distance", "value", "line"),
        ),
    ),
)
