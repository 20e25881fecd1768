"""The numbers of the topics relative, example, pairing, precision and sqrtd, and of lessons 4 and 5, against numpy."""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest
import torch

import llama
from llama.cli import main
from llama.hub import DEFAULT
from llama.study import measures, topics
from llama.study.figure import image
from llama.study.topics import pairing, precision, relative, sqrtd
from llama.text import Llama

from . import by_hand

D = 8


def rotation(position: float) -> by_hand.Array:
    return by_hand.rotation(position, by_hand.frequencies(D))


@pytest.mark.parametrize("name", sorted(topics.TOPICS.keys() - {"ppl"}))
def test_a_report_has_tables_and_every_figure_is_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = matplotlib.figure.Figure  # its default layout takes half of the time
    monkeypatch.setattr("matplotlib.figure.Figure", lambda figsize, layout: plain(figsize=figsize))
    topic = topics.find(name)
    assert topic.report().tables
    for figure in topic.figures:
        data = figure.data()
        assert len({len(column) for column in data.values()}) == 1
        assert b"<svg" in image(figure, data, "svg")


@pytest.mark.parametrize("folder", ["new", "existing.png"])
def test_a_folder_gets_every_figure_and_a_file_the_main_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    drawn = lambda figure, data, kind: f"{figure.name} {len(data['score'])} {kind}".encode()  # noqa: E731
    monkeypatch.setattr("llama.study.figure.image", drawn)
    (tmp_path / "existing.png").mkdir()
    assert main(["study", "relative", "--figure", str(tmp_path / folder)]) == 0
    files = {file.name: file.read_text() for file in (tmp_path / folder).iterdir()}
    assert files == {"relative.png": "relative 600 png", "toeplitz.png": "toeplitz 4096 png"}
    err = capsys.readouterr().err
    assert all(f"{tmp_path / folder / name}: figure {name.removesuffix('.png')}\n" in err for name in files)
    assert main(["study", "relative", "--figure", str(tmp_path / "one.svg"), "-q"]) == 0
    assert (tmp_path / "one.svg").read_text() == "relative 600 svg"


def test_rope_scores_depend_on_the_distance_and_added_codes_do_not() -> None:
    spread = {name: measures.diagonal_spread(relative.scores_of(name)) for name in ("rope", "sinusoidal")}
    assert spread["rope"] < 1e-12 < 1 < spread["sinusoidal"]


def test_the_score_of_two_positions_is_one_rotation_by_n_minus_m() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, D))
    rows, at = torch.tensor(np.stack((q, k))), torch.tensor([2, 7])
    rotated = measures.turn(rows, at, measures.frequencies(D)).numpy()
    score = rotated[0] @ rotated[1]
    np.testing.assert_allclose([q @ rotation(5) @ k, (rotation(102) @ q) @ (rotation(107) @ k)], score)
    assert abs(q @ rotation(-5) @ k - score) > 0.1  # the wrong sign
    np.testing.assert_allclose(q @ rotation(5) @ q, q @ rotation(-5) @ q)  # which q = k does not show


def test_the_example_ends_with_the_published_pair() -> None:
    assert topics.find("example").report().tables[0].rows[-1][2] == "27.7086, 29.2785"
    data = topics.find("example").figure("example").data()
    expected = rotation(1) @ np.arange(24, 32)
    np.testing.assert_allclose(data["real"][data["step"] == 6], expected, atol=2e-5)


@pytest.mark.slow
def test_the_wrong_layout_ruins_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Perplexity is 392 instead of 17.7 on 400 words of the Apache license, but France keeps its capital (lesson 5)."""
    loaded: list[Llama] = []
    monkeypatch.setattr(pairing, "load", lambda *args, **given: loaded.append(llama.load(*args, **given)) or loaded[0])
    words = (Path(llama.__file__).parent.parent / "LICENSE").read_text().split()
    monkeypatch.setattr(pairing, "TEXT", " ".join(words[:400]))
    right, wrong = pairing.perplexities(DEFAULT)
    assert (round(right, 1), round(wrong)) == (17.7, 392)
    assert loaded[0].generate("The capital of France is", max_new_tokens=1, temperature=0).text == " Paris"


def test_errors_of_angles_are_those_of_their_rounded_factors() -> None:
    at, theta = torch.tensor([255, 8191, 131071]), 500000.0
    exact = theta ** (-np.arange(0, 128, 2) / 128)
    coarse = torch.tensor(exact, dtype=torch.float32).bfloat16().float().numpy()
    for way, rounded in (("float32", exact.astype(np.float32)), ("bfloat16 frequencies", coarse)):
        angles = (at.numpy()[:, None].astype(np.float32) * rounded).astype(np.float64)
        expected = np.maximum(*(np.abs(f(angles) - f(np.outer(at, exact))) for f in (np.cos, np.sin))).max(-1)
        np.testing.assert_allclose(precision.errors(way, at), expected, atol=2.0**-23)
    finished = precision.errors("bfloat16 cos, sin", at)
    assert (finished < 2.0**-9 * 1.001 + precision.errors("float32", at)).all()


@pytest.mark.parametrize("width", [16, 1024])
def test_scores_have_the_distribution_of_normals_times_the_length_of_the_query(width: int) -> None:
    """Given q, the scores of random keys are independent normals with variance |q|^2, which is chi-squared."""
    found, draw = sqrtd.measured(*sqrtd.drawn(width)), np.random.default_rng(0)
    normals = draw.standard_normal((4000, sqrtd.KEYS)) * np.sqrt(draw.chisquare(width, (4000, 1)))
    for kind, scores in (("raw", normals), ("scaled", normals / width**0.5)):
        p = np.exp(scores - scores.max(1, keepdims=True))
        assert found[f"largest {kind}"] == pytest.approx((p.max(1) / p.sum(1)).mean(), abs=0.03)
        assert found[f"variance {kind}"] == pytest.approx(scores.var(), rel=0.05)
