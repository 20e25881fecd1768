"""`study scale` and `clock` with -m: the settings and the frequencies are those of the checkpoint."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama.cli import main
from llama.study.checkpoint import own
from llama.study.perplexity import tiny_folder
from llama.study.topics import clock, find, scale

from . import by_hand

NAMES = ("scale", "clock")


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    """The tiny model with another base and with Llama 3.1's scaling."""
    folder = tmp_path / "scaled"
    shutil.copytree(tiny_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config.pop("rope_parameters", None)
    config |= {"rope_theta": 5e4, "rope_scaling": {**scaling, "original_max_position_embeddings": 128}}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    return folder


def llama3(head_dim: int, theta: float, context: int, factor: float) -> np.ndarray[Any, Any]:
    """Divisors of Llama 3.1's scaling, written out pair by pair."""
    divisors = []
    for w in by_hand.frequencies(head_dim, theta):
        turns = context * w / (2 * math.pi)
        kept = min(max((turns - 1) / 3, 0), 1)
        divisors.append(1 / (kept + (1 - kept) / factor))
    return np.array(divisors)


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_are_those_of_the_checkpoint(name: str, scaled: Path) -> None:
    report = find(name).report(model=str(scaled))
    assert report.settings["factor"] == 8
    if name != "clock":
        assert {key: report.settings[key] for key in ("head_dim", "theta", "context")} == {
            "head_dim": 32,
            "theta": 5e4,
            "context": 128,
        }
    said = " ".join(report.says)
    assert "heads of 32 entries, base θ = 50000, trained for 128 tokens, the scaling llama3; it can use 1,024" in said
    assert find(name).report(model="tiny-kjv").settings["factor"] == (3 if name == "clock" else 4)
    assert "no scaling" in " ".join(find(name).report(model="tiny-kjv").says)


def test_the_tables_and_figures_show_the_checkpoints_own_scaling(scaled: Path) -> None:
    right = llama3(32, 5e4, 128, 8.0)
    pairs, methods = find("scale").report(model=str(scaled)).tables
    assert pairs.columns[-1] == "this model"
    np.testing.assert_allclose([row[-1] for row in pairs.rows], right[[row[0] for row in pairs.rows]], rtol=1e-5)
    assert methods.rows[-1] == ("this model", 0, 1.0)
    hands = find("clock").report(model=str(scaled)).tables[0].rows
    waves = 2 * np.pi / by_hand.frequencies(32, 5e4) * right
    np.testing.assert_allclose([row[-1] for row in hands], waves[[0, 8, 15]], rtol=1e-5)
    data = scale.divisor_data(model=str(scaled))
    np.testing.assert_allclose(data["divisor"][data["method"] == "this model"], right, rtol=1e-5)
    data = clock.clock_data(model=str(scaled))
    np.testing.assert_allclose(data["period"][data["clock"] == "this model"], waves[[0, 8, 15]], rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_draws_the_checkpoint(name: str, scaled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", name, "-q", "-m", str(scaled)]) == 0
    out = capsys.readouterr().out
    assert "this model" in out
    assert max(map(len, out.splitlines())) <= 120
    assert main(["study", name, "-q", "-m", str(scaled), "--rope-factor", "2"]) == 0
    assert re.search(r"factor 2(\.0)?\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["scale", "-m", "tiny-kjv", "--head-dim", "64"], "--head-dim is set by the checkpoint of --model"),
        (["scale", "-m", "tiny-kjv", "--context", "512"], "--context is set by the checkpoint of --model"),
        (["clock", "-m", "no-such-model"], "no-such-model"),
        (["order", "-m", "tiny-kjv"], "study order does not accept --model"),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["study", *options]) != 0
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_dynamic_and_longrope_are_shown_at_the_full_length(tmp_path: Path) -> None:
    """Their frequencies depend on the length; the table shows those at the model's full context."""
    folder = tmp_path / "dynamic"
    shutil.copytree(tiny_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    found = own(str(folder))
    assert found.context == 128
    last = float(found.scaled()[0][-1]) / by_hand.frequencies(32, 1e4)[-1]
    assert 1 / last == pytest.approx(4 * 4 - 3, rel=1e-5)  # f n / L - (f - 1) at n = 4 L
