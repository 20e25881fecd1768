"""scripts/gpu_check.py without a GPU: every part runs, a failing part does not stop the others, limits work."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llama.attention import Attend, reference
from llama.config import ModelConfig

from .. import tiny
from . import gpu_check

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = gpu_check.Run(torch.device("cpu"), True, False)


@pytest.fixture(autouse=True)
def _without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes minutes, and other tests cover the kernels."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def check(tmp_path: Path, *args: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out.json"
    code = gpu_check.main(["--device", "cpu", "--tiny", "--inline", "--out", str(out), *args])
    return code, json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.slow  # other tests run some of the parts
def test_every_part_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(tmp_path)
    assert code == 0
    assert report["failed"] == []
    assert [part["part"] for part in report["parts"]] == list(gpu_check.PARTS)
    assert all(part["rows"] and part["error"] is None for part in report["parts"])
    judged = [row["what"] for part in report["parts"] for row in part["rows"] if row["passed"]]
    for form in ("complex", "real", "half", "elementwise", "matrix"):
        assert sum(f"rope {form}:" in what for what in judged) == 2
    assert any("transformers" in what for what in judged)
    assert any("temperature" in what for what in judged)
    assert not any("share" in what or "times" in what for what in judged)  # speeds have no limit on a CPU
    assert report["machine"]["torch"] == torch.__version__
    assert "0 failed" in capsys.readouterr().out


def test_a_part_runs_in_a_process_of_its_own_until_its_time_limit(tmp_path: Path) -> None:
    found = gpu_check.in_a_process("ceilings", CPU, 60)
    assert found["error"] is None
    assert found["bandwidth"] > 1e6
    assert found["matmul"] > 1e6
    late = gpu_check.in_a_process("ceilings", CPU, 0.01)
    assert late["error"].startswith("not finished after")


def test_a_failing_part_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: gpu_check.Run) -> list[gpu_check.Row]:
        raise RuntimeError("the device\nfell off")

    monkeypatch.setitem(gpu_check.PARTS, "8B", (broken, 1))
    monkeypatch.setitem(gpu_check.PARTS, "fused", (lambda run: [gpu_check.at_most("error", math.nan, 1.0)], 1))
    code, report = check(tmp_path, "--only", "8B", "fused", "speculative")
    assert code == 1
    assert report["failed"] == ["error", "8B: RuntimeError: the device"]
    assert [part["part"] for part in report["parts"]] == ["ceilings", "8B", "fused", "speculative"]
    assert report["parts"][-1]["rows"][0]["what"].startswith("1B")


def test_parts_without_time_left_are_reported_as_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(tmp_path, "--minutes", "-1")
    assert code == 0
    assert all("skipped" in part["rows"][0]["what"] for part in report["parts"])
    assert capsys.readouterr().out.count("skipped") == len(gpu_check.PARTS)


def test_without_a_gpu_it_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_check.main([])
    assert "no CUDA device" in capsys.readouterr().err


def test_limits_decide_whether_a_result_passes() -> None:
    assert gpu_check.at_least("", 0.85, 0.85).passed
    assert not gpu_check.at_least("", 0.84, 0.85).passed
    assert not gpu_check.at_least("", math.nan, 0.85).passed
    assert gpu_check.at_most("", 0.01, 0.02).passed
    assert not gpu_check.at_most("", math.nan, 0.02).passed
    assert not gpu_check.holds("", False).passed
    on_gpu = gpu_check.Run(torch.device("cuda"), False, False)
    assert on_gpu.judge(gpu_check.at_least("", 0.1, 0.85)).passed is False
    assert CPU.judge(gpu_check.at_least("", 0.1, 0.85)).passed is None


@pytest.mark.parametrize("tied", [False, True])
def test_the_operations_of_a_prompt_equal_those_that_torch_counts(tied: bool) -> None:
    config = ModelConfig(32, 2, 4, 2, 8, 48, 64, tie_embeddings=tied)
    model = gpu_check.random_model(CPU, config, torch.float32)
    for layer in range(config.n_layers):  # the counter does not see fused kernels
        model.set_submodule(f"layers.{layer}.attention.attend", Attend(reference))
    with FlopCounterMode(display=False) as counter:
        model.output(model.hidden(tiny.random_tokens(20, config))[:, -1])
    assert counter.get_total_flops() == gpu_check.linear_flops(config, 20) + gpu_check.score_flops(config, 20)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_random_models_are_reproducible_and_their_weights_have_the_right_spread(scheme: str | None, tied: bool) -> None:
    config = ModelConfig(64, 2, 4, 2, 16, 96, 128, tie_embeddings=tied)
    model = gpu_check.random_model(CPU, config, torch.float32, scheme)
    logits = model(tiny.random_tokens(9, config))
    assert bool(torch.isfinite(logits).all())
    again = gpu_check.random_model(CPU, config, torch.float32, scheme)
    assert torch.equal(again(tiny.random_tokens(9, config)), logits)
    spread = float(model.layers[0].feed_forward.w_up.weight.std())
    assert 0.01 < spread < (0.03 if scheme else 0.3)
    assert torch.equal(model.tok_embeddings.weight, model.output.weight) == tied
