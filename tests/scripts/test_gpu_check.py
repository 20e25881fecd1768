"""scripts/gpu_check.py without a GPU: rows are kept whatever happens to a part, and every limit can fail."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_parts import Part, Row, Run, info
from torch.utils.flop_counter import FlopCounterMode

from llama.attention import Attend, reference
from llama.config import ModelConfig
from llama.engine import kernels

from .. import tiny
from . import gpu_check, gpu_parts

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = Run(torch.device("cpu"), True)
GPU = Run(torch.device("cuda"))
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes minutes, and other tests cover the kernels."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


Check = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run parts, given as generators, and return the exit code and the report."""

    def run(parts: dict[str, Callable[[Run], Iterator[Row]]], *args: str, seconds: float = 5) -> tuple[int, Any]:
        table = {name: Part(rows, "correctness", seconds) for name, rows in parts.items()}
        monkeypatch.setattr(gpu_check, "PARTS", table)
        code = gpu_check.main(["--device", "cpu", "--out", str(tmp_path), *args])
        (file,) = tmp_path.glob("*.json")
        return code, json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return run


def good(run: Run) -> Iterator[Row]:
    yield info("first", 1.0)
    yield info("second", math.nan)


def values(report: dict[str, Any], part: str) -> dict[str, Any]:
    """Return the values of a part's rows, by name, without the seconds it took."""
    return {row["what"]: row["value"] for row in report["parts"].get(part, []) if row["what"] != "finished"}


# ---------------------------------------------------------------------------------------------------- rows are kept
def test_every_row_is_on_disk_before_the_next_is_measured(tmp_path: Path, check: Check) -> None:
    def counting(run: Run) -> Iterator[Row]:
        for _ in range(3):
            yield info(str(time.monotonic()), len((tmp_path / "rows.jsonl").read_bytes().splitlines()))

    (tmp_path / "rows.jsonl").touch()
    _, report = check({"counting": counting})
    assert list(values(report, "counting").values()) == [0, 1, 2]
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines][-1] == "finished"
    assert all({"part", "what", "value", "unit", "limit", "passed"} <= line.keys() for line in lines)


def test_a_row_is_synchronized_with_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    gpu_check.append(tmp_path / "rows.jsonl", "part", info("what", 1.0))
    assert sizes == [(tmp_path / "rows.jsonl").stat().st_size]


def killed(run: Run) -> Iterator[Row]:
    yield info("before", 1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def hanging(run: Run) -> Iterator[Row]:
    yield info("started", subprocess.Popen(["sleep", "600"]).pid)
    time.sleep(600)


def raising(run: Run) -> Iterator[Row]:
    yield info("before", 1.0)
    raise RuntimeError("the device\nfell off")


def ending(run: Run) -> Iterator[Row]:
    yield info("before", 1.0)
    os._exit(3)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (killed, "the process ended with SIGKILL"),
        (raising, "RuntimeError: the device"),
        (ending, "the process ended with 3"),
    ],
)
def test_a_part_that_fails_keeps_its_rows_and_does_not_stop_the_others(
    part: Callable[[Run], Iterator[Row]], why: str, check: Check
) -> None:
    code, report = check({"bad": part, "good": good})
    assert code == 1
    assert values(report, "bad") == {"before": 1.0, "error": why}
    assert values(report, "good") == {"first": 1.0, "second": "nan"}
    assert report["failed"] == ["bad: error"]


def test_a_part_that_hangs_ends_after_twice_its_estimate_and_so_do_its_processes(check: Check) -> None:
    began = time.perf_counter()
    code, report = check({"bad": hanging, "good": good}, seconds=1)
    assert 2 < time.perf_counter() - began < 100
    assert code == 1
    assert values(report, "bad")["error"] == "not finished after 2 s"
    assert values(report, "good") == {"first": 1.0, "second": "nan"}
    status = Path(f"/proc/{values(report, 'bad')['started']}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_a_later_call_continues(check: Check, capfd: pytest.CaptureFixture[str]) -> None:
    assert check({"bad": raising, "good": good, "new": good}, "--only", "bad", "good")[0] == 1
    capfd.readouterr()
    code, report = check({"bad": good, "good": raising, "new": good})  # now the first succeeds
    assert code == 0
    assert list(values(report, "bad")) == ["before", "first", "second"]  # the error of the first try is gone
    assert "error" not in values(report, "good")  # it did not run again
    ran = [line.split(":")[0].strip() for line in capfd.readouterr().out.splitlines() if ": finished" in line]
    assert ran == ["new", "bad"]  # what failed comes last
    assert check({"good": raising}, "--again")[0] == 1


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path, check: Check) -> None:
    check({"good": good})
    file = tmp_path / "rows.jsonl"
    file.write_bytes(file.read_bytes() + b'{"part": "good", "what": "thi')
    code, report = check({"good": good, "other": good})
    assert code == 0
    assert values(report, "good") == values(report, "other") == {"first": 1.0, "second": "nan"}


def test_a_part_starts_only_if_its_estimate_fits(check: Check, capfd: pytest.CaptureFixture[str]) -> None:
    code, report = check({"good": good}, "--minutes", "0.5", seconds=31)
    assert code == 0
    assert report["parts"] == {}
    out = capfd.readouterr().out
    assert "*   31 good" in out
    assert "good: postponed to a later call: it takes about 31 s" in out


def test_nothing_runs_after_the_ceilings_failed(check: Check) -> None:
    code, report = check({"ceilings": raising, "good": good})
    assert code == 1
    assert list(report["parts"]) == ["ceilings"]


def test_without_cuda_it_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SystemExit):
        gpu_check.main(["--out", str(tmp_path)])
    assert "not built for CUDA" in capsys.readouterr().err


def test_packages_are_imported_from_wheels(tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "NAME = 'from the wheel'")
    monkeypatch.setattr(sys, "path", [*sys.path])

    def importing(run: Run) -> Iterator[Row]:
        import carried  # type: ignore[import-not-found]

        yield info("name", carried.NAME)

    _, report = check({"importing": importing}, "--wheels", str(tmp_path))
    assert values(report, "importing") == {"name": "from the wheel"}


# ------------------------------------------------------------------------------------------------ every limit can fail
def test_limits_decide_whether_a_result_passes() -> None:
    assert gpu_parts.at_least("", 0.85, 0.85).passed
    assert not gpu_parts.at_least("", 0.84, 0.85).passed
    assert not gpu_parts.at_least("", math.nan, 0.85).passed
    assert gpu_parts.at_most("", 0.01, 0.02).passed
    assert not gpu_parts.at_most("", math.nan, 0.02).passed
    assert not gpu_parts.holds("", False).passed
    assert GPU.judge(gpu_parts.at_least("", 0.1, 0.85)).passed is False
    assert CPU.judge(gpu_parts.at_least("", 0.1, 0.85)).passed is None  # speeds have no limit on a CPU


def spoiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the weights of each model that a function returns differ from those of the others."""
    seeds = itertools.count(1)

    def other(*args: Any, **options: Any) -> Any:
        model, generator = function(*args, **options), torch.Generator().manual_seed(next(seeds))
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1 + torch.randn(tensor.shape, generator=generator).to(tensor))
        return model

    return other


# Rows of correctness that compare no two models; other tests show that NaN is an error.
ALONE = ("NaN is an error", "caches are on the devices of their layers")


@pytest.mark.parametrize(
    "name", ["plain", "quantized", "tokens", "batch", "threads", "devices", "gpu layers", "quantizing"]
)
def test_every_check_of_correctness_passes_and_fails_with_other_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "quantizing" and not kernels.ready():
        pytest.skip("requires a C++ compiler")
    rows = [row for row in gpu_parts.PARTS[name].rows(CPU) if row.passed is not None]
    assert rows
    assert [row.what for row in rows if not row.passed] == []
    for helper in ("random_model", "copied"):
        monkeypatch.setattr(gpu_parts, helper, spoiled(getattr(gpu_parts, helper)))
    rows = [row for row in gpu_parts.PARTS[name].rows(CPU) if row.passed is not None]
    assert [row.what for row in rows if row.passed and not row.what.endswith(ALONE)] == []


def measured(**changed: float) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows whose values just meet every goal, except for factors on the decoding or the prefill of some parts."""
    more, less = 1.00001, 0.99999
    speeds = {
        **{"8B bf16: fused": 110.0, "8B int8: fused": 176.0 * more, "8B int4: fused": 264.0 * more},
        **{"8B bf16: Inductor": 100.0 * less, "1B bf16: fused": 120.0, "1B bf16: Inductor": 100.0 * less},
        **{f"8B bf16: {way}": 110.0 * less for way in THEIRS},
        **{f"1B bf16: {way}": 120.0 * less for way in THEIRS},
    }
    return {
        part: {row: {"value": speed * changed.get(f"{part}, {row}", 1.0)} for row in ("decoding", "prefill of 4,096")}
        for part, speed in speeds.items()
    }


THEIRS = ("transformers", "transformers without cuDNN")
KEEP = "the fused kernels are fast enough to keep (8B: 1.1, 1B: 1.2 times Inductor)"


@pytest.mark.parametrize(
    ("slower", "failed"),
    [
        ("8B bf16: fused, decoding", {"8B bf16, fused over Inductor", KEEP}),
        ("1B bf16: fused, decoding", {"1B bf16, fused over Inductor", KEEP}),
        ("8B int8: fused, decoding", {"8B int8 over bf16"}),
        ("8B int4: fused, decoding", {"8B int4 over bf16"}),
        ("8B bf16: fused, prefill of 4,096", set()),
        ("1B bf16: fused, prefill of 4,096", set()),
    ],
)
def test_every_goal_that_compares_parts_can_fail(slower: str, failed: set[str]) -> None:
    def failures(found: dict[str, dict[str, dict[str, Any]]]) -> set[str]:
        return {row.what for row in gpu_check.decisions(found, GPU) if row.passed is False}

    part, row = slower.split(", ", 1)
    if "bf16" in part:
        failed = failed | {f"{part[:7]}, {row}, over {theirs}" for theirs in THEIRS}
    assert failures(measured()) == set()
    assert failures(measured(**{slower: 0.9999})) == failed


def test_speeds_that_were_not_measured_are_not_compared() -> None:
    assert list(gpu_check.decisions({}, GPU)) == []
    found = {part: rows for part, rows in measured().items() if part != "1B bf16: Inductor"}
    assert KEEP not in [row.what for row in gpu_check.decisions(found, GPU)]


@pytest.mark.parametrize(
    ("size", "limits"),
    [
        ("8B", {"share of the copy bandwidth": ">= 0.85", "prefill of 4,096: share of the matmul rate": ">= 0.7"}),
        ("1B", {"share of the copy bandwidth": ">= 0.78"}),
    ],
)
def test_the_shares_of_the_ceilings_have_limits(
    size: str, limits: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "judge", lambda self, row: row)  # as on a GPU
    monkeypatch.setattr(gpu_parts, "decode_s", lambda *args, **options: 1e-3)
    for ceiling, passed in ((1.0, True), (1e30, False)):
        run = Run(torch.device("cpu"), True, bandwidth=ceiling, matmul=ceiling)
        judged = [row for row in gpu_parts.PARTS[f"{size} bf16: fused"].rows(run) if row.passed is not None]
        assert {row.what: row.limit for row in judged} == limits
        assert {row.passed for row in judged} == {passed}


@pytest.mark.parametrize("change", ["warp=8", "stages"])
def test_a_setting_to_change_must_exist(change: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        next(gpu_parts.change(Run(torch.device("cpu"), True, (change,))))


# ------------------------------------------------------------------------------------------------- measures and models
def test_the_kernels_of_a_step_are_told_apart() -> None:
    """Two layers, three steps: wo and down have the same name and grid and take turns."""
    step = [("_qkv", 24), ("_attend", 8), ("_linear", 16), ("_linear", 56), ("_linear", 16)] * 2 + [("_linear", 99)]
    took = [3.0, 1.0, 2.0, 7.0, 5.0] * 2 + [9.0]
    runs = [(*launch, duration) for launch, duration in zip(step, took, strict=True)] * 3
    launches = [gpu_parts.Launch(name, (grid, 1, 1), float(at), us) for at, (name, grid, us) in enumerate(runs)]
    rows = gpu_parts.kernel_rows(reversed(launches), 3, 2, [30, 20, 70, 50, 90], 2e7)
    times = {row.what: (row.value, row.unit) for row in rows if row.what.endswith("time")}
    assert times == {
        "_qkv (24, 1, 1) qkv: time": (3.0, "us, 2 in a step"),
        "_attend (8, 1, 1): time": (1.0, "us, 2 in a step"),
        "_linear (16, 1, 1) wo: time": (2.0, "us, 2 in a step"),
        "_linear (56, 1, 1) gate, up: time": (7.0, "us, 2 in a step"),
        "_linear (16, 1, 1) down: time": (5.0, "us, 2 in a step"),
        "_linear (99, 1, 1) output: time": (9.0, "us, 1 in a step"),
    }
    rows = list(gpu_parts.kernel_rows(launches, 3, 2, [30, 20, 70, 50, 90], 2e7))
    assert [row.value for row in rows if "share" in row.what] == pytest.approx([0.5] * 5)  # 10 bytes in 1 us each
    assert rows[-1] == info("all kernels of a step", 2 * (3 + 1 + 2 + 7 + 5) + 9, "us")


@pytest.mark.parametrize("tied", [False, True])
def test_the_operations_of_a_prompt_equal_those_that_torch_counts(tied: bool) -> None:
    config = ModelConfig(32, 2, 4, 2, 8, 48, 64, tie_embeddings=tied)
    model = gpu_parts.random_model(CPU, config, torch.float32)
    for layer in range(config.n_layers):  # the counter does not see fused kernels
        model.set_submodule(f"layers.{layer}.attention.attend", Attend(reference))
    with FlopCounterMode(display=False) as counter:
        model.output(model.hidden(tiny.random_tokens(20, config))[:, -1])
    assert counter.get_total_flops() == gpu_parts.linear_flops(config, 20) + gpu_parts.score_flops(config, 20)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", [None, "int8", "int4", "Q6_K"])
def test_random_models_are_reproducible_and_their_weights_have_the_right_spread(scheme: str | None, tied: bool) -> None:
    config = ModelConfig(64, 2, 4, 2, 16, 96, 128, tie_embeddings=tied)
    model = gpu_parts.random_model(CPU, config, torch.float32, scheme)
    logits = model(tiny.random_tokens(9, config))
    assert bool(torch.isfinite(logits).all())
    again = gpu_parts.random_model(CPU, config, torch.float32, scheme)
    assert torch.equal(again(tiny.random_tokens(9, config)), logits)
    assert float(model.layers[0].feed_forward.w_up.weight.std()) == pytest.approx(0.2, rel=0.1)
    assert torch.equal(model.tok_embeddings.weight, model.output.weight) == tied


# -------------------------------------------------------------------------------------------------------- a bare copy
# A process that has used the GPU can't fork processes that use it.
PROGRAM = """
import os, runpy, sys
sys.modules["gguf"] = sys.modules["platformdirs"] = None
import torch
def touched(*args, first=os.getpid()):
    if os.getpid() == first:
        raise AssertionError("the first process touched the GPU")
    return 0
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = touched
sys.argv[:] = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_copy(folder: Path, *args: str) -> tuple[str, gpu_check.Found]:
    """Run the script from a copy without installation, without gguf and platformdirs; return its output and rows."""
    for name in ("llama", "configs", "scripts"):
        shutil.copytree(ROOT / name, folder / "copy" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "program.py").write_text(PROGRAM)
    script = str(folder / "copy" / "scripts" / "gpu_check.py")
    command = [sys.executable, "program.py", script, "--device", "cpu", "--tiny", "--out", "out", *args]
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, gpu_check.read(folder / "out" / "rows.jsonl")


def test_it_runs_from_a_copy_that_is_not_installed(tmp_path: Path) -> None:
    _, found = run_copy(tmp_path, "--only", "plain", "gpu layers")
    assert list(found) == ["ceilings", "plain", "gpu layers"]
    for form in ("complex", "real", "half", "elementwise", "matrix"):
        assert sum(f", rope {form}:" in what for what in found["plain"]) == 4


@pytest.mark.slow  # other tests run some of the parts
def test_every_part_runs_from_a_copy_that_is_not_installed(tmp_path: Path) -> None:
    out, found = run_copy(tmp_path, "--only", *{part.group for part in gpu_parts.PARTS.values()} - {"always"})
    assert [*gpu_parts.PARTS] == [name for name in found if name != "decision"]
    assert all("finished" in rows and "error" not in rows for part, rows in found.items() if part != "decision")
    judged = {f"{row['part']}: {row['what']}" for rows in found.values() for row in rows.values() if row["passed"]}
    assert any("transformers: logits" in what for what in judged)
    assert not any("share" in what or "over" in what for what in judged)  # speeds have no limit on a CPU
    assert KEEP in found["decision"]
    assert "0 failed" in out
