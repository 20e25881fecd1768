"""Other sources confirm the doctor's facts, and a library with a planted defect fails its self-test."""

from __future__ import annotations

import dataclasses
import getpass
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from llama import __version__
from llama.cli import doctor as command
from llama.engine import kernels
from llama.generate import generate
from llama.tools import doctor, selftest
from llama.tools.doctor import Finding

from .conftest import Run
from .patience import PATIENCE

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parent.parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_report_has_no_name_of_the_user_or_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ann"))
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.setattr(platform, "node", lambda: "anns-pc")
    text = "built: /home/ann/.cache/x.so by ann on anns-pc; annotated /data/ann/y"
    assert command.anonymous(text) == "built: ~/.cache/x.so by USER on HOST; annotated /data/USER/y"


# ------------------------------------------------------------------------------------------------------- facts
def test_the_facts_are_those_of_the_system(clearllama: Run) -> None:
    done = clearllama("doctor", "--no-self-test", "--json")
    assert (done.stderr, done.returncode) == (b"", 0), done.stdout
    report = json.loads(done.stdout)
    assert list(report) == ["clearllama", "ok", "findings"]
    assert (report["clearllama"], report["ok"]) == (__version__, True)
    assert list(report["findings"][0]) == ["status", "group", "item", "message", "remedy"]
    found = {(one["group"], one["item"]): one for one in report["findings"]}
    assert {group for group, _ in found} == {"versions", "kernels"}
    for need in map(Requirement, importlib.metadata.requires("clearllama") or []):
        if not need.marker:
            assert found["versions", need.name]["message"].startswith(f"{importlib.metadata.version(need.name)}, ")


@pytest.mark.parametrize(
    ("installed", "needed", "status"),
    [("2.9.1", ">=2.10,<2.14", "note"), ("2.13.0+cpu", "<2.14,>=2.10", "ok"), ("2.14.0", ">=2.10,<2.14", "note"),
     (None, ">=1", "fail"), (None, '>=1; extra == "study"', "note"), (None, '>=1; extra == "test"', None)],
)  # fmt: skip
def test_versions_are_compared_with_the_bounds(
    installed: str | None, needed: str, status: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: [f"thing{needed}"])
    found = {one.item: one for one in doctor.versions()}
    assert found["thing"].status == status if status else "thing" not in found
    assert status in ("ok", None) or "pip install" in found["thing"].remedy


# ------------------------------------------------------------------------------------------------- the self-test
def results() -> dict[str, str]:
    return {one.item: one.status for one in selftest.selftest()}


def test_the_library_passes() -> None:
    assert set(results().values()) <= {"ok", "note"}
    on_gpu = len(selftest.WAYS) + len(selftest.CHECKS) if torch.cuda.is_available() else 0
    assert len(results()) == len(selftest.WAYS) + on_gpu


@pytest.mark.skipif(not kernels.ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_wrong_products_of_the_kernels_fail(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    product = kernels.linear_tiles
    monkeypatch.setattr(kernels, "linear_tiles", lambda *args: product(*args) * factor)
    assert {name for name, status in results().items() if status == "fail"} >= {"int8 on cpu"}


def test_the_checks_of_an_accelerator_with_the_cpu_in_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a planted fault makes fail, with what works without it."""
    monkeypatch.setattr(selftest, "LARGE", dataclasses.replace(selftest.CONFIG, max_seq_len=1024))
    selftest.write_model(tmp_path)
    cpu = torch.device("cpu")

    def found() -> dict[str, Finding]:
        with torch.inference_mode():
            return {one.item: one for one in selftest.accelerator(str(tmp_path), cpu)}

    assert {one.status for one in found().values()} == {"ok"}
    assert [*found()] == ["batch on cpu", "draft on cpu", "speed on cpu"]  # only CUDA compiles
    assert selftest.check_compile(str(tmp_path), cpu) == "gives the logits of the plain step"
    monkeypatch.setattr(selftest, "speculate", lambda model, prompt, *_: generate(model, prompt[1:], *_[:1]))
    monkeypatch.setattr(selftest, "measure", lambda *_, **__: 1 / 0)
    failed = {name: one.remedy for name, one in found().items() if one.status == "fail"}
    assert failed == {"draft on cpu": "use no --draft", "speed on cpu": "use a smaller model, or --device cpu"}


# ---------------------------------------------------------------------------------------- probes that crash or hang
@linux
@pytest.mark.parametrize(
    ("how", "ending"),
    [
        ("os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
        ("exec('raise ImportError(1)')", "exit code 1: ImportError: 1"),
        ("time.sleep(600)", "did not end within 3 s"),
    ],
)
def test_a_child_that_ends_early_is_one_finding(how: str, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps(["ok", "a", "b", "c"])
    monkeypatch.setattr(doctor, "CHILD", f"import os, signal, time; print({line!r}, flush=True); {how} # {{}}")
    monkeypatch.setattr(doctor, "SECONDS", 3 if "sleep" in how else PATIENCE)
    *_, first, last = doctor.examine()
    assert (first, last.status) == (Finding("ok", "a", "b", "c"), "fail")
    assert ending in last.message


# ------------------------------------------------------------------------------------------------------ the command
@linux
@pytest.mark.slow
def test_the_doctor_runs_without_a_home_a_cache_a_compiler_and_a_network(tmp_path: Path) -> None:
    """All of these at once, with the self-test: what is missing is a note, and nothing fails."""
    (tmp_path / "file").write_text("")
    env = {"PATH": "/nonexistent", "CLEARLLAMA_CACHE": str(tmp_path / "file" / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "llama", "doctor", "--json"]
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, env=env, check=False, timeout=250, cwd=tmp_path)
    assert (done.stderr, done.returncode) == (b"", 0), done.stdout
    found = {(one["group"], one["item"]): one["status"] for one in json.loads(done.stdout)["findings"]}
    for key in (("kernels", "C++"), ("self-test", "int8 on cpu")):
        assert found[key] == "note", found[key]
    assert found["self-test", "float32 on cpu"] == "ok"
    assert os.listdir(tmp_path) == ["file"]
