"""The topics about attention and additive encodings: reports that can fail, independent figure data, and laws."""

from __future__ import annotations

import dataclasses
import math
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llama import attention, rope
from llama.errors import ConfigError, UsageError
from llama.study import encodings, figure, forms, measures, topics
from llama.study.report import show, text
from llama.study.topics import binary, example, heatmap, order, relative, shift, softmax, sqrtd
from llama.study.topics.base import options_of

from . import by_hand, drawing
from .by_hand import LAW, Array, bases, even_dims, gaussians, seeds

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("order", "sqrtd", "softmax", "heatmap", "binary", "shift", "relative", "example")
FIGURES = [(name, drawn.name) for name in NAMES for drawn in topics.find(name).figures]


def find(topic: str, name: str) -> figure.Figure:
    return next(found for found in topics.find(topic).figures if found.name == name)


def columns(line: str) -> int:
    """Columns of a line in a terminal, where a Chinese character has two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in line)


# --------------------------------------------------------------------------------------------------------- reports
@pytest.mark.parametrize("name", topics.TOPICS)
def test_a_report_fits_a_screen_and_shows_no_ids(name: str) -> None:
    """Ids of claims belong to docs/evidence/claims.md. The list of checks is only shown on request."""
    report = topics.find(name).report()
    assert len({bool(check.claim) for check in report.checks}) == 1  # all checks name a claim, or none does
    for checks in (False, True):
        lines = text(report, checks).splitlines()
        assert max(map(columns, lines)) <= 110
        assert not re.search(r"\b(00\d-\d\d|E\d\d|OK\d+|note \d)", "\n".join(lines))
        assert sum(line.startswith("  PASS  ") for line in lines) == checks * len(report.checks)
        if name != "bugs":
            assert len(lines) <= 48


def test_numbers_have_six_digits_and_thousands_separators() -> None:
    shown = {54410.1: "54,410.1", 2559203.4: "2,559,200", 1234.0: "1,234", 999.5: "999.5", 1e-7: "1e-07", 1e12: "1e+12"}
    assert {value: show(value) for value in shown} == shown
    assert show(-4321.5) == "-4,321.5"
    assert show(math.inf) == "inf"


@pytest.mark.parametrize("name", NAMES)
def test_every_check_holds_and_the_text_fits_a_screen(name: str) -> None:
    report = topics.find(name).report()
    assert report.passed, [check for check in report.checks if not check.passed]
    assert (report.topic, report.question) == (name, topics.TOPICS[name])
    lines = text(report).splitlines()
    assert len(lines) <= 40
    assert max(map(columns, lines)) <= 110
    for check in report.checks:
        assert re.fullmatch(r"\d{3}-\d\d", check.claim)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("order", {"head_dim": 2, "theta": 2.0}),
        ("order", {"head_dim": 128, "theta": 500000.0}),
        ("sqrtd", {"head_dim": 1}),
        ("sqrtd", {"head_dim": 48}),
        ("heatmap", {"head_dim": 4, "theta": 2.0, "context": 2}),
        ("heatmap", {"head_dim": 6, "theta": 1e12, "context": 300}),
        ("binary", {"head_dim": 4, "theta": 10000.0}),
        ("binary", {"head_dim": 6, "theta": 1e12}),
        ("binary", {"head_dim": 64, "theta": 2.0}),
        ("shift", {"head_dim": 2, "theta": 500000.0, "context": 64}),
        ("shift", {"head_dim": 32, "theta": 2.0, "context": 400}),
        ("relative", {"head_dim": 2, "theta": 2.0, "context": 12}),
        ("relative", {"head_dim": 128, "theta": 500000.0, "context": 100}),
    ],
)  # fmt: skip
def test_checks_pass_at_other_settings(name: str, numbers: dict[str, Any]) -> None:
    report = topics.find(name).report(**numbers)
    assert report.passed, [check for check in report.checks if not check.passed]
    shown = text(report)
    assert max(map(columns, shown.splitlines())) <= 110
    for key, value in numbers.items():
        assert f" {value}" in shown.splitlines()[1], key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -2, 3, 10**9, 2.5, math.nan, True, "8"])
def test_settings_out_of_range_are_rejected_in_one_line(name: str, value: Any) -> None:
    options = set(options_of(topics.find(name).report)) & {"head_dim", "context"}
    for option in options - ({"head_dim"} if (name, value) == ("sqrtd", 3) else set()):
        if (option, value) == ("context", 3) and name == "heatmap":
            continue
        with pytest.raises((UsageError, ConfigError)) as caught:
            topics.find(name).report(**{option: value})
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 150


@pytest.mark.parametrize("name", ["order", "heatmap", "binary", "shift", "relative"])
@pytest.mark.parametrize("theta", [0.0, 1.0, -5.0, math.nan, math.inf, 1e13, True, "10000"])
def test_a_base_out_of_range_is_rejected(name: str, theta: Any) -> None:
    with pytest.raises(UsageError, match=r"^--rope-theta of this topic must be a number from 2 to 1e\+12, got "):
        topics.find(name).report(theta=theta)


# ------------------------------------------------------------------------------- planted defects: a report must fail
def sines_of_double_speed(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    return heatmap.printed_table(positions, dim, base)


def sines_first_then_cosines(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    angles = positions.double()[:, None] * base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.cat((angles.sin(), angles.cos()), -1)


def cosines_before_sines(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    angles = positions.double()[:, None] * base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.stack((angles.cos(), angles.sin()), -1).flatten(-2)


def from_0_to_1(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    return (1 + torch.from_numpy(by_hand.table(int(positions.max()) + 1, dim, base))) / 2


def exponent_by_index(dim: int, theta: float = 10000.0, *_: Any, **__: Any) -> Tensor:
    return theta ** (-torch.arange(dim // 2, dtype=torch.float64) / dim)


def unscaled(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q.float() @ k.float().transpose(-2, -1)
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)


def scaled_by_model(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return (q @ k.transpose(-1, -2) / (8 * q.shape[-1]) ** 0.5).softmax(-1) @ v


def backwards(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    return original_apply(q, k, freqs_cis.conj())


def only_queries(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    return original_apply(q, k, freqs_cis)[0], k


def keys_never_turned(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    return original_turn(x, positions**2, inv_freq)


def jacobian_that_rounds(scores: Tensor) -> Tensor:
    p = scores.double().softmax(-1)
    return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


def jacobian_of_the_diagonal(scores: Tensor) -> Tensor:
    p = scores.double().softmax(-1)
    return torch.diag_embed(p - p**2)


def cosines_alone(cos: Tensor, sin: Tensor) -> Tensor:
    return cos.repeat_interleave(2, -1).diag()


def three_terms(x: Tensor, p: Tensor, wq: Tensor, wk: Tensor) -> dict[str, Tensor]:
    return {name: term for name, term in original_terms(x, p, wq, wk).items() if name != "position-content"}


original_apply, original_turn, original_terms = rope.apply_rotary_emb, encodings.turn, encodings.additive_terms
PLANTED: list[tuple[str, str, Callable[..., Any], set[str]]] = [
    # topic, what is replaced, its wrong replacement, claims that must then fail (among others)
    ("order", "llama.study.encodings.turn", lambda x, positions, inv_freq: x, {"000-03", "000-08"}),
    ("order", "llama.rope.apply_rotary_emb", backwards, {"000-08"}),
    ("order", "llama.attention.reference_weights", unscaled, {"000-08"}),
    ("order", "llama.study.encodings.attend", lambda encoding, x, *_: x, {"000-03", "000-07"}),
    ("sqrtd", "llama.attention.reference_weights", unscaled, {"003-09"}),
    ("sqrtd", "llama.attention.sdpa", scaled_by_model, {"003-02"}),
    ("sqrtd", "llama.study.measures.softmax_jacobian", jacobian_of_the_diagonal, {"003-05"}),
    ("softmax", "llama.study.measures.softmax_jacobian", jacobian_that_rounds, {"003-06"}),
    ("softmax", "llama.study.measures.softmax_jacobian", jacobian_of_the_diagonal, {"003-05"}),
    ("heatmap", "llama.study.measures.sinusoids", sines_of_double_speed, {"000-15", "004-01", "004-05", "000-09"}),
    ("heatmap", "llama.study.measures.sinusoids", cosines_before_sines, {"000-15", "004-05"}),
    ("heatmap", "llama.study.measures.sinusoids", from_0_to_1, {"000-15", "004-05"}),
    ("heatmap", "llama.study.measures.frequencies", exponent_by_index, {"004-01", "004-14", "003-12"}),
    ("heatmap", "llama.study.topics.heatmap.printed_table", measures.sinusoids, {"002-04"}),
    ("binary", "llama.study.measures.frequencies", exponent_by_index, {"003-12", "003-15"}),
    ("binary", "llama.study.measures.sinusoids", sines_of_double_speed, {"003-15"}),
    ("binary", "llama.study.measures.wavelengths", lambda inv_freq: 1 / inv_freq, {"003-12", "003-15"}),
    ("binary", "llama.study.topics.binary.bits", lambda n: n[:, None] >> 2 * np.arange(4) & 1, {"003-13"}),
    ("shift", "llama.study.forms.rotation_matrix", lambda cos, sin: original_matrix(cos, -sin), {"000-16"}),
    ("shift", "llama.study.measures.sinusoids", shift.triangle_table, {"000-16", "001-02", "003-17"}),
    ("shift", "llama.study.topics.shift.triangle_table", measures.sinusoids, {"001-01"}),
    ("shift", "llama.study.topics.shift.printed_table", measures.sinusoids, {"002-04"}),
    ("relative", "llama.study.encodings.turn", keys_never_turned, {"000-19", "003-20", "000-06"}),
    ("relative", "llama.study.encodings.turn", lambda x, p, w: original_turn(x, -p, w), {"003-20", "004-10"}),
    ("relative", "llama.rope.apply_rotary_emb", only_queries, {"000-19"}),
    ("relative", "llama.study.forms.rotation_matrix", cosines_alone, {"000-35"}),
    ("relative", "llama.study.measures.sinusoids", sines_of_double_speed, {"004-10"}),
    ("relative", "llama.study.encodings.additive_terms", three_terms, {"003-18"}),
    ("relative", "llama.study.measures.diagonal_spread", lambda scores: 0.0, {"000-10"}),
    ("example", "llama.rope.apply_rotary_emb", backwards, {"000-51"}),
    ("example", "llama.rope.half_to_interleaved", lambda x: x, {"002-42"}),
]  # fmt: skip
original_matrix = forms.rotation_matrix


@pytest.mark.parametrize(("topic", "target", "defect", "claims"), PLANTED)
def test_a_report_with_a_planted_defect_fails(
    topic: str, target: str, defect: Callable[..., Any], claims: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, defect)
    report = topics.find(topic).report()
    assert not report.passed
    assert {check.claim for check in report.checks if not check.passed} >= claims
    assert "FAIL" in text(report)


def test_every_topic_has_a_planted_defect() -> None:
    assert {topic for topic, *_ in PLANTED} == set(NAMES)


# --------------------------------------------------------------------------------------------------------- figures
@pytest.mark.parametrize(("topic", "name"), FIGURES)
def test_a_figure_has_labels_and_readable_text(
    topic: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure as Canvas
    from matplotlib.text import Text

    canvases: list[Canvas] = []
    monkeypatch.setattr(Canvas, "__init__", _remembering(canvases, Canvas.__init__))
    data = find(topic, name).data()
    drawn = dataclasses.replace(find(topic, name), data=lambda: data)
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        figure.save(drawn, tmp_path / f"{name}.{kind}")
        assert (tmp_path / f"{name}.{kind}").read_bytes().startswith(start)
    svg = (tmp_path / f"{name}.svg").read_text()
    assert not re.search(r"\d{3}-\d\d|\bE\d\d|[Nn]ote \d", drawn.caption)
    for axes in canvases[0].axes:
        if axes.axison and axes.get_label() != "<colorbar>":
            assert any(other.get_xlabel() for other in axes.get_shared_x_axes().get_siblings(axes))
            assert axes.get_ylabel() or axes.get_shared_y_axes().get_siblings(axes)
    drawing.check_drawn(name, data, canvases[0])
    for words in canvases[0].findobj(Text):
        if words.get_text():
            assert words.get_fontsize() >= 8, words
    if "$" not in canvases[0].axes[0].get_xlabel():
        assert canvases[0].axes[0].get_xlabel() in svg


def _remembering(canvases: list[Any], init: Callable[..., None]) -> Callable[..., None]:
    def remember(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        canvases.append(self)

    return remember


def test_the_legend_of_change_is_outside_the_plot() -> None:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(layout="constrained")
    example.change_draw(example.change_data(), canvas)
    canvas.draw_without_rendering()
    assert canvas.axes[0].get_legend() is None
    assert not canvas.legends[0].get_window_extent().overlaps(canvas.axes[0].get_window_extent())


def near(found: Any, expected: Any, within: float = 1e-12) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=within)


def test_figure_order_by_hand() -> None:
    data = order.order_data()
    x, wq, wk, _ = (t.numpy() for t in order.drawn(8))
    w = by_hand.frequencies(8)
    expected, keys = [], []
    for turns in (False, True):
        for words in ([0, 1, 2, 3], [3, 1, 2, 0]):
            q, k = x[words] @ wq.T, x[words] @ wk.T
            if turns:
                q, k = by_hand.rotated(q, range(4), w), by_hand.rotated(k, range(4), w)
            expected.append(by_hand.softmax(q @ k.T / math.sqrt(8)).ravel())
            keys += [order.WORDS[n] for _ in words for n in words]
    near(data["weight"], np.concatenate(expected), 1e-7)
    assert data["key"].tolist() == keys
    none, rotary = (data["encoding"] == name for name in ("none", "rope"))
    cells = zip(*(data[column] for column in ("encoding", "sentence", "query", "key", "weight")), strict=True)
    weight = {(e, s, q, k): w for e, s, q, k, w in cells}
    between = [(q, k) for q in order.WORDS for k in order.WORDS]
    assert max(abs(weight["none", 0, q, k] - weight["none", 1, q, k]) for q, k in between) < 1e-12
    assert max(abs(weight["rope", 0, q, k] - weight["rope", 1, q, k]) for q, k in between) > 0.1
    assert none.sum() == rotary.sum() == 32


def test_figure_sqrtd_by_hand() -> None:
    data = sqrtd.sqrtd_data()
    assert data["width"].tolist() == [4, 16, 64, 256, 1024]
    for row, width in enumerate(data["width"].tolist()):
        q, k = (t.double().numpy() for t in sqrtd.drawn(width))
        dots = np.einsum("bd,bsd->bs", q[:, 0, 0], k[:, 0])
        for kind, scores in (("raw", dots), ("scaled", dots / math.sqrt(width))):
            p = by_hand.softmax(scores)
            jacobians = np.stack([np.diag(row) - np.outer(row, row) for row in p])
            near(data[f"variance {kind}"][row], scores.var(ddof=1), 1e-9 * width)
            near(data[f"largest {kind}"][row], p.max(-1).mean(), 1e-5)
            near(data[f"norm {kind}"][row], np.sqrt((jacobians**2).sum((1, 2))).mean(), 1e-9)
    assert data["norm raw"][-1] < 0.1 < 0.2 < data["norm scaled"][-1]


def test_figure_jacobian_by_hand() -> None:
    data = softmax.jacobian_data()
    expected = []
    for scores in ([1, 2, 3], [0, 0, 50], [100, 100, 100]):
        p = [1 / sum(math.exp(other - mine) for other in scores) for mine in scores]
        for i in range(3):
            for j in range(3):
                apart = sum(p[other] for other in range(3) if other != i)
                expected.append(p[i] * apart if i == j else -p[i] * p[j])
    np.testing.assert_allclose(data["derivative"], expected, rtol=1e-13)
    assert abs(data["derivative"][9:18]).max() < 4e-22
    assert data["scores"][[0, 9, 18]].tolist() == ["1, 2, 3", "0, 0, 50", "100, 100, 100"]


@pytest.mark.parametrize(("d", "base", "length"), [(64, 1e4, 64), (8, 500.0, 20)])
def test_figure_heatmap_by_hand(d: int, base: float, length: int) -> None:
    data = heatmap.heatmap_data(head_dim=d, theta=base, context=length)
    right, broken = data["table"] == "right", data["table"] == "wrong"
    near(data["value"][right], by_hand.table(length, d, base).ravel())
    as_printed = np.empty((length, d))
    for position in range(length):
        for column in range(d):  # note 002 counts i = 0, 2, 4, ..; its exponents are 2 i (sine) and 2 (i + 1) (cosine)
            function = math.cos if column % 2 else math.sin
            as_printed[position, column] = function(position / base ** (2 * column / d))
    near(data["value"][broken], as_printed.ravel())
    assert data["position"][right].tolist() == [t for t in range(length) for _ in range(d)]


def test_the_errors_of_note_002s_table_are_those_in_the_errata() -> None:
    """E24, E25: 0, 0.848, 0.148, 0.015 in the sine columns over 16 positions; sin^2 + cos^2 from 0.00 to 1.98."""
    wrong = np.abs(heatmap.printed_table(torch.arange(16), 8).numpy() - by_hand.table(16, 8)).max(0)
    near(wrong[0::2], [0, 0.848, 0.148, 0.015], 5e-4)
    squares = heatmap.printed_table(torch.arange(200), 8).square().unflatten(-1, (-1, 2)).sum(-1)
    assert float(squares.min()) < 0.005
    assert float(squares.max()) > 1.97


def test_figure_hands_by_hand() -> None:
    data = heatmap.hands_data()
    rows = np.stack([by_hand.sinusoid(t, 6) for t in range(13)])
    near(data["sine"], rows[:, 0::2].ravel())
    near(data["cosine"], rows[:, 1::2].ravel())
    near(data["speed"][:3], [1, 0.0464158883, 0.00215443469], 1e-9)
    near(np.hypot(data["sine"], data["cosine"]), 1.0)


def test_figure_euler_by_hand() -> None:
    data = heatmap.euler_data()
    t = np.linspace(0, 4 * np.pi, 241)
    near(data["t"], t, 1e-5)
    near(data["real"] + 1j * data["imaginary"], np.exp(1j * t), 2e-6)
    plane, space = drawing.draw(find("heatmap", "euler")).axes
    circle, height, base = (np.stack(line.get_data()) for line in plane.lines)
    near(circle[0] + 1j * circle[1], np.exp(1j * t[:121]), 2e-6)  # one turn
    near(np.stack((height, base)), [[[0.5, 0.5], [0, math.sqrt(0.75)]], [[0, 0.5], [0, 0]]], 1e-2)
    for line, (real, imaginary) in zip(
        space.lines, ((np.cos(t), np.sin(t)), (np.cos(t), -1.5), (1.5, np.sin(t))), strict=True
    ):
        near(np.stack(line.get_data_3d()), np.broadcast_arrays(t, real, imaginary), 1e-5)


def test_figure_binary_by_hand() -> None:
    data = binary.binary_data()
    digits = [int(character) for number in range(16) for character in reversed(f"{number:04b}")]
    sines = [math.sin(number / radix**i) for radix in (2, 10) for number in range(16) for i in range(4)]
    near(data["value"], digits + sines)
    near(data["period"], [2 * 2**i for _ in range(16) for i in range(4)]
         + [2 * math.pi * radix**i for radix in (2, 10) for _ in range(16) for i in range(4)], 1e-9)  # fmt: skip


def test_figure_shift_by_hand() -> None:
    data = shift.shift_data()
    turns = np.outer(np.arange(200), by_hand.frequencies(8)) / (2 * math.pi)  # (N, d/2)
    triangle = [4 * np.abs((turns + quarter - 0.25) % 1 - 0.5) - 1 for quarter in (0, 0.25)]
    expected = {
        "sinusoid": by_hand.table(200, 8),
        "triangle wave": np.stack(triangle, -1).reshape(200, 8),
        "published": heatmap.printed_table(torch.arange(200), 8).numpy(),
    }
    for name, table in expected.items():
        for row, k in enumerate(data["k"].tolist()):
            left, sizes, _ = np.linalg.svd(table[:-k], full_matrices=False)
            left = left[:, sizes > 1e-10 * sizes[0]]
            near(data[name][row], np.abs(table[k:] - left @ (left.T @ table[k:])).max(), 1e-6)
    assert data["sinusoid"].max() < 1e-12
    assert data["triangle wave"].min() > 0.05
    near(data["triangle wave"][2], 0.19, 5e-3)  # E14


def scores_by_hand(name: str, d: int, length: int) -> Array:
    """Scores of one token at every position (N, N), by the formula of the encoding."""
    x, wq, wk, _ = (t.numpy() for t in relative.drawn(d))
    draw = torch.Generator().manual_seed(0)
    added = {
        "sinusoidal": by_hand.table(length, d),
        "learned": torch.randn(512, d, generator=draw, dtype=torch.float64).numpy()[:length],
    }
    h = x + added.get(name, np.zeros((length, d)))
    q, k = h @ wq.T, h @ wk.T
    if name == "rope":
        w = by_hand.frequencies(d)
        q, k = by_hand.rotated(q, range(length), w), by_hand.rotated(k, range(length), w)
    scores: Array = q @ k.T / math.sqrt(d)
    far = np.abs(np.subtract.outer(np.arange(length), np.arange(length)))
    return scores - 0.5 * far if name == "alibi" else scores


def test_figure_relative_by_hand() -> None:
    data = relative.relative_data()
    for name in encodings.ENCODINGS:
        chosen = data["encoding"] == name
        m = data["m"][chosen]
        n = m - data["distance"][chosen]
        assert sorted(set(m.tolist())) == [2, 18, 34]
        assert set(n.tolist()) == set(range(40))
        near(data["score"][chosen], scores_by_hand(name, 64, 40)[m, n], 1e-5)
        curves = {}
        for distance, score in zip(data["distance"][chosen].tolist(), data["score"][chosen].tolist(), strict=True):
            curves.setdefault(distance, []).append(score)
        scatter = max(max(scores) - min(scores) for scores in curves.values())
        assert scatter > 1 if name in ("sinusoidal", "learned") else scatter < 1e-12


def test_figure_toeplitz_by_hand() -> None:
    data = relative.toeplitz_data()
    p = by_hand.table(32, 64)
    none, additive, rotary = (scores_by_hand(name, 64, 32) for name in ("none", "sinusoidal", "rope"))
    near(data["score"], np.concatenate([scores.ravel() for scores in (none, p @ p.T / 8, additive, rotary)]), 1e-5)
    assert list(dict.fromkeys(data["panel"].tolist())) == ["none", "p.p", "additive", "rope"]


def test_figure_example_by_hand() -> None:
    data = example.example_data()
    numbers = np.arange(24.0, 32.0)  # sample 0, token 1, head 1 of arange(160).reshape(2, 5, 2, 8)
    paired = numbers[0::2] + 1j * numbers[1::2]
    cis = np.exp(1j * np.array([1, 0.1, 0.01, 0.001]))
    back = np.stack(((paired * cis).real, (paired * cis).imag), -1).ravel()
    expected = np.concatenate([numbers, numbers, paired, cis, paired * cis, back, back])
    near(data["real"] + 1j * data["imaginary"], expected, 1e-5)
    real, pairs, complex_ = (2, 5, 2, 8), (2, 5, 2, 4, 2), (2, 5, 2, 4)
    shapes = [real, pairs, complex_, (1, 5, 1, 4), complex_, pairs, real]
    assert [data["shape"][data["step"] == step][0] for step in range(7)] == [str(shape) for shape in shapes]
    marked = data["marked"] == 1
    near(data["real"][marked] + 1j * data["imaginary"][marked],
         [28, 29, 28, 29, 28 + 29j, np.exp(0.01j), 27.708604844975795 + 29.27854543534996j,
          27.708604844975795, 29.27854543534996, 27.708604844975795, 29.27854543534996], 1e-5)  # fmt: skip


def test_figure_rotation2d_by_hand() -> None:
    data = example.rotation2d_data()
    xq = np.arange(160.0).reshape(2, 5, 2, 4, 2)[0, :, 1]  # (T, D/2, 2)
    for row, (token, pair) in enumerate([(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (1, 0), (1, 1), (1, 2), (1, 3)]):
        a, b = xq[token, pair]
        angle = token * 10.0**-pair
        assert (data["token"][row], data["pair"][row]) == (token, pair)
        near(data["angle"][row], angle, 1e-7)
        near([data["x1"][row], data["x2"][row]], [a, b])
        turned = (a + 1j * b) * np.exp(1j * angle)
        near(data["turned x1"][row] + 1j * data["turned x2"][row], turned, 2e-5)


def test_figure_change_by_hand() -> None:
    data = example.change_data()
    expected = [2 * abs(math.sin(m * 10.0**-i / 2)) for m in range(64) for i in range(4)]
    near(data["change"], expected, 1e-6)


# ------------------------------------------------------------------------------------------------------------ laws
@LAW
@given(seed=seeds, order=st.permutations(range(5)), d=even_dims)
def test_attention_without_positions_permutes_with_its_input(seed: int, order: list[int], d: int) -> None:
    x, wq, wk, wv = gaussians(seed, 5, d), *gaussians(seed + 1, 3, d, d) / d**0.5
    nothing, at = encodings.make("none", d, d), torch.arange(5)
    first, second = (encodings.attend(nothing, t, wq, wk, wv, at) for t in (x, x[order]))
    torch.testing.assert_close(second, first[order], rtol=0, atol=1e-12)


@LAW
@given(seed=seeds, d=even_dims, base=bases, by=st.integers(0, 4096), name=st.sampled_from(["rope", "alibi"]))
def test_scores_of_relative_encodings_do_not_change_when_all_positions_shift(
    seed: int, d: int, base: float, by: int, name: str
) -> None:
    x, wq, wk = gaussians(seed, 6, d), *gaussians(seed + 1, 2, d, d) / d**0.5
    encoding, at = encodings.make(name, d, d, base), torch.arange(6)
    here, there = (encodings.scores(encoding, x, wq, wk, positions) for positions in (at, at + by))
    torch.testing.assert_close(here, there, rtol=0, atol=1e-9)


@LAW
@given(seed=seeds, d=even_dims)
def test_the_sum_of_the_four_terms_is_the_additive_product(seed: int, d: int) -> None:
    x, wq, wk = gaussians(seed, 6, d), *gaussians(seed + 1, 2, d, d) / d**0.5
    p = torch.from_numpy(by_hand.table(6, d))
    product = encodings.scores(encodings.make("sinusoidal", d, d), x, wq, wk, torch.arange(6)) * d**0.5
    torch.testing.assert_close(sum(encodings.additive_terms(x, p, wq, wk).values()), product, rtol=0, atol=1e-9)


@LAW
@given(scores=st.lists(st.floats(-300, 300), min_size=2, max_size=6), shift_by=st.floats(-100, 100))
def test_a_jacobian_sums_to_zero_and_depends_only_on_differences(scores: list[float], shift_by: float) -> None:
    x = torch.tensor(scores, dtype=torch.float64)
    jacobian = measures.softmax_jacobian(x)
    assert float(jacobian.sum(-1).abs().max()) < 1e-15
    assert float(jacobian.abs().max()) <= 0.25 + 1e-15
    assert torch.equal(jacobian, jacobian.T)
    torch.testing.assert_close(measures.softmax_jacobian(x + shift_by), jacobian, rtol=0, atol=1e-12)


def test_a_batch_of_jacobians_equals_single_ones() -> None:
    scores = gaussians(0, 3, 4, 5)
    batch = measures.softmax_jacobian(scores)
    assert batch.shape == (3, 4, 5, 5)
    assert torch.equal(batch[1, 2], measures.softmax_jacobian(scores[1, 2]))


@LAW
@given(d=even_dims, base=bases, t=st.integers(0, 4096), k=st.integers(-64, 4096))
def test_one_matrix_shifts_every_position(d: int, base: float, t: int, k: int) -> None:
    here, there = by_hand.sinusoid(t, d, base), by_hand.sinusoid(t + k, d, base)
    near(shift.shift_matrix(d, base, k).numpy() @ here, there, 1e-9)


@LAW
@given(d=st.sampled_from([4, 6, 8, 64, 128]), base=bases, more=st.integers(0, 5), seed=seeds)
def test_positions_are_recovered_from_rounded_hands(d: int, base: float, more: int, seed: int) -> None:
    radix = base ** (2 / d)
    marks = max(8, math.floor(radix) + 2) + more
    longest = 2 * math.pi * base ** (1 - 2 / d)
    positions = by_hand.rng(seed).integers(0, min(100_000, math.floor(longest)), 50)
    assert binary.read_back(positions, d, base, marks).tolist() == positions.tolist()


def test_with_too_few_marks_positions_are_lost() -> None:
    """The bound on the marks is needed: radix 100 with 8 marks on a circle loses positions."""
    positions = np.arange(600)
    assert (binary.read_back(positions, 4, 1e4, 8) != positions).any()
    assert (binary.read_back(positions, 4, 1e4, 102) == positions).all()


@LAW
@given(d=even_dims, base=bases, t=st.integers(0, 8192))
def test_every_row_of_the_table_has_squared_length_half_its_width(d: int, base: float, t: int) -> None:
    row = measures.sinusoids(torch.tensor([t]), d, base)[0]
    assert float(row.square().sum()) == pytest.approx(d / 2, abs=1e-9)
    near(row.numpy(), by_hand.sinusoid(t, d, base), 1e-9)


@pytest.mark.parametrize("width", [2, 16, 200])
def test_scores_of_vectors_are_those_of_normals(width: int) -> None:
    """Given q, the products with random keys are normals of deviation |q|; the report relies on it."""
    draw = by_hand.rng(5)
    q, k = draw.standard_normal((2000, width)), draw.standard_normal((2000, 32, width))
    p = by_hand.softmax(np.einsum("bd,bsd->bs", q, k))
    jacobians = p[:, :, None] * np.eye(32) - p[:, :, None] * p[:, None, :]
    limit = sqrtd.limit(width)
    near(p.max(-1).mean(), limit["largest raw"], 0.03)
    near(np.linalg.norm(jacobians, axis=(1, 2)).mean(), limit["norm raw"], 0.03)


def test_scores_are_divided_by_the_width_of_the_head() -> None:
    """E36: divided by the model's width, the variance with 8 heads would be 0.125."""
    q, k = (t[:4].double() for t in sqrtd.drawn(64))
    expected = by_hand.softmax(np.einsum("bd,bsd->bs", q[:, 0, 0].numpy(), k[:, 0].numpy()) / 8)
    near(attention.reference_weights(q, k)[:, 0, 0].double().numpy(), expected, 1e-6)
