"""The topic heads on the tiny model: checks, and figure data against sums written out."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file

from llama.cli import main
from llama.loader import load_model
from llama.rope import Rope
from llama.study.figure import save
from llama.study.perplexity import tiny_folder
from llama.study.topics import find, heads

from .. import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _clear_cache() -> None:
    heads._recorded.cache_clear()


def test_the_claims_hold_on_the_tiny_model() -> None:
    report = find("heads").report()
    assert report.passed, report.checks
    assert len(report.checks) == 6
    assert "The last checks apply to this model on this text only." in " ".join(report.says)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's files with random weights."""
    folder = tmp_path_factory.mktemp("random")
    for file in tiny_folder().glob("*.json"):
        shutil.copy(file, folder)
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(old.shape, generator=draw) / old.shape[-1] ** 0.5 if old.dim() == 2 else torch.ones(old.shape)
        for name, old in load_file(tiny_folder() / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def test_random_weights_pass_the_general_checks_and_not_those_of_a_trained_model(random_model: Path) -> None:
    report = heads.report(str(random_model), tiny_folder() / "held-out.txt")
    assert [check.claim for check in report.checks] == ["000-07", "001-15"]
    assert report.passed
    prose = " ".join(report.says)
    assert "checked only for tiny-kjv" in prose
    found = re.search(r"is used ([\d.]+) times .* wavelength is ([\d.]+) contexts.* head is ([\d.]+) times", prose)
    assert found
    checked = heads._of_training(*map(float, found.groups()))
    assert sum(check.passed for check in checked) < len(checked), prose


@pytest.mark.parametrize("length", [2, 20, 64])
def test_at_another_length_only_the_general_checks_run(length: int) -> None:
    report = heads.report(length=length)
    assert report.passed
    assert len(report.checks) == 2


def test_the_weights_from_distances_differ_at_another_angle(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Rope.frequencies

    def shifted(rope: Rope, length: int) -> Any:
        inv_freq, factor = real(rope, length)
        return inv_freq * 1.01, factor

    heads._recorded("tiny-kjv", None, None)  # cached before the patch, so that the model uses the correct angles
    monkeypatch.setattr(Rope, "frequencies", shifted)
    failed = [check.claim for check in find("heads").report().checks if not check.passed]
    assert failed == ["001-15"]


def test_figure_data_are_means_over_tokens() -> None:
    table = heads.data(length=40)
    text = (tiny_folder() / "held-out.txt").read_bytes()
    tokens = torch.tensor([list(text[(len(text) - 40) // 2 :][:40])])
    model = load_model(tiny_folder(), dtype="float32", max_seq_len=40)
    layer, head = 0, 2  # the input of layer 0 is the embedding
    x = model.layers[0].attention_norm(model.tok_embeddings(tokens))
    q, k = (w(x).unflatten(-1, (-1, 32)) for w in (model.layers[0].attention.wq, model.layers[0].attention.wk))
    q, k = tiny.rotate(model.rope, q, k, torch.arange(40), 40)
    q, k = q[0, :, head].double().numpy(), k[0, :, head].double().numpy()  # (T, D)
    weights = np.zeros((40, 40))
    for m in range(40):
        e = np.exp((k[: m + 1] @ q[m]) / np.sqrt(32))
        weights[m, : m + 1] = e / e.sum()
    norms = np.zeros(16)
    for m in range(40):
        for n in range(m + 1):
            for i in range(16):
                norms[i] += np.hypot(*q[m, 2 * i : 2 * i + 2]) * np.hypot(*k[n, 2 * i : 2 * i + 2])
    mine = (table["layer"] == layer) & (table["head"] == head)
    found = table["y"][mine & (table["panel"] == "attention")]
    profile = [np.mean([weights[n + d, n] for n in range(1, 40 - d)]) for d in range(39)]
    np.testing.assert_allclose(found, profile, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(table["y"][mine & (table["panel"] == "share")], norms / norms.sum(), rtol=1e-5)


def test_the_curves_are_the_rows_of_their_panel() -> None:
    table = heads.data(length=24)
    canvas = Figure()
    heads.draw(table, canvas)
    for axes, panel, shift in zip(canvas.axes, ("attention", "share"), (1, 0), strict=True):
        drawn = [np.stack(line.get_data()) for line in axes.lines]
        mine = table["panel"] == panel
        for layer in range(int(table["layer"].max()) + 1):
            of_layer = mine & (table["layer"] == layer)
            curves = [of_layer & (table["head"] == head) for head in range(int(table["head"].max()) + 1)]
            expected = [np.stack((table["x"][one] + shift, table["y"][one])) for one in curves]
            expected.append(np.mean(expected, axis=0))  # the mean over heads
            for curve in expected:
                assert any(len(one.T) == len(curve.T) and np.allclose(one, curve) for one in drawn)


@pytest.mark.parametrize("ending", ["png", "svg", "csv", "json"])
def test_the_figure_is_written(tmp_path: Path, ending: str) -> None:
    save(find("heads").figures[0], tmp_path / f"heads.{ending}", length=32)
    assert (tmp_path / f"heads.{ending}").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "1"], "--length of this topic must be an integer from 2 to 1024"),
        (["--length", "5000"], "--length of this topic must be an integer from 2 to 1024"),
        (["--text", "no-such-file"], "expected a text file"),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["study", "heads", "-q", *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_the_weights_from_distances_include_the_factor_of_a_scaling(tmp_path: Path) -> None:
    shutil.copytree(tiny_folder(), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    report = find("heads").report(model=str(tmp_path / "m"), text=tiny_folder() / "held-out.txt", length=200)
    assert all(check.passed for check in report.checks if check.claim in ("000-07", "001-15"))


def test_a_text_ships_for_any_model(random_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shipped, given = (heads.data(str(random_model), text, 32) for text in (None, tiny_folder() / "held-out.txt"))
    np.testing.assert_array_equal(shipped["y"], given["y"])
    assert main(["study", "heads", "-q", "-m", str(random_model), "--length", "32"]) == 0
    assert "share: o layer 0, x layer 1, + layer 2, * layer 3" in capsys.readouterr().out


def test_the_sketch_is_the_mean_share_of_a_layer() -> None:
    table = heads.data(length=24)
    lines = heads.sketch(table)
    rows = (table["panel"] == "share") & (table["layer"] == 3)  # the last layer is drawn over the others
    means = [table["y"][rows & (table["x"] == pair)].mean() for pair in range(16)]
    area = [line.split("|", 1)[1].ljust(72) for line in lines if "|" in line]
    heights = [next(11 - row for row in range(12) if area[row][round(pair / 15 * 71)] == "*") for pair in range(16)]
    assert np.corrcoef(heights, means)[0, 1] > 0.98  # heights are rounded to 12 rows
