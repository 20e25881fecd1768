"""The command trace: options rejected before a model is loaded, and texts longer than the trained context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llama.cli import main
from llama.loader import load_model
from llama.study.perplexity import tiny_folder

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = (tiny_folder() / "held-out.txt").read_text()[:200]


def test_a_text_beyond_the_context_is_traced_with_and_without_a_scaling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    options = ["--rope-scaling", "yarn", "--rope-factor", "4", "--json", str(file), "-q"]
    assert main(["trace", TEXT, "-m", str(tiny_folder()), *options]) == 0
    facts = json.loads(file.read_text())
    tokens = torch.tensor([list(TEXT.encode())])
    sums = []
    for scaling in ({"rope_type": "yarn", "factor": 4.0}, {"rope_type": "default"}):
        model = load_model(tiny_folder(), dtype="float32", max_seq_len=200, rope_scaling=scaling)
        logprobs = model(tokens).log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])
        sums.append(-float(logprobs.sum()))
    numbers = json.dumps(facts)
    assert "yarn" in numbers
    changed, untouched = sums
    assert changed < untouched  # the unscaled model fails beyond its trained length
    out = capsys.readouterr().out
    assert "KL(before || after)" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ablate-head", "x"], "LAYER.HEAD"),
        (["--layers", "3"], "FIRST:END"),
        (["--no-rope", "--rope-theta", "5"], "--no-rope removes the rotation"),
        (["--rope-theta", "1e301"], "below 1e300"),
        (["--html", "same", "--json", "same"], "both name same"),
    ],
)
def test_wrong_options_are_one_line(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["trace", "hello", "-q", "-m", str(tiny_folder()), *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_model_in_the_current_folder_has_the_name_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_folder())
    assert main(["trace", "hello", "-m", ".", "--json", str(tmp_path / "a.json"), "-q"]) == 0
    assert "tiny-kjv" in capsys.readouterr().out
