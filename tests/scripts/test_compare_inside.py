"""scripts/compare_inside.py: every name is compared, and nnsight gives the same numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from llama import study
from llama.tools.convert import convert

from . import compare_inside


def test_every_name_is_compared() -> None:
    assert list(study.SITES) == ["embed", *compare_inside.LAYER, "final_norm", "logits"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nnsight_gives_the_same_tensors_and_grid(
    default_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nnsight")
    convert(default_gguf, tmp_path / "hf", "hf", dtype=torch.float32)
    monkeypatch.setattr(sys, "argv", ["compare_inside.py", str(tmp_path / "hf")])
    assert compare_inside.main() == 0
    assert "patching grid, 30 layers x 5 tokens" in capsys.readouterr().out
