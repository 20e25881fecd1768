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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_folder())
    options = ["--rope-scaling", "yarn", "--rope-factor", "4", "--json", str(tmp_path / "out.json"), "-q"]
    assert main(["trace", TEXT, "-m", ".", *options]) == 0
    assert "KL(before || after)" in capsys.readouterr().out
    facts = json.loads((tmp_path / "out.json").read_text())
    assert facts["model"] == "tiny-kjv"
    tokens = torch.tensor([list(TEXT.encode())])
    for name, scaling in (("after", {"rope_type": "yarn", "factor": 4.0}), ("before", {"rope_type": "default"})):
        model = load_model(tiny_folder(), dtype="float32", max_seq_len=200, rope_scaling=scaling)
        logprobs = model(tokens).log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
        assert facts["change"][name]["surprisal"][1:] == pytest.approx((-logprobs).tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ablate-head", "x"], "LAYER.HEAD"),
        (["--layers", "3"], "FIRST:END"),
        (["--no-rope", "--rope-theta", "5"], "--no-rope removes the rotation"),
        (["--html", "same", "--json", "same"], "both name same"),
        (["--max-tokens", "2"], "more than --max-tokens 2"),
    ],
)
def test_wrong_options_are_one_line(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["trace", "hello", "-q", "-m", str(tiny_folder()), *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
