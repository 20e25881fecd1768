"""Other sources confirm the doctor's facts, and a library with a planted defect fails its self-test."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from llama import __version__, model, rope, weights
from llama.cache import KVCache, LayerCache
from llama.cli import main
from llama.engine import compiled, kernels
from llama.hub import models as hub
from llama.system.folders import cache_folder
from llama.tools import doctor, facts, selftest
from llama.tools.facts import Finding

from .conftest import Run

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parent.parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# ------------------------------------------------------------------------------------------------------- facts
@pytest.fixture(scope="module")
def found(clearllama: Run) -> dict[tuple[str, str], dict[str, str]]:
    """(group, item) -> finding, from the command without its self-test."""
    done = clearllama("doctor", "--no-self-test", "--json")
    assert done.stderr == b""
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert list(report) == ["clearllama", "ok", "findings"]
    assert (report["clearllama"], report["ok"]) == (__version__, True)
    assert "self-test" not in {one["group"] for one in report["findings"]}
    return {(one["group"], one["item"]): one for one in report["findings"]}


def test_versions_are_compared_with_the_declared_bounds(found: dict[tuple[str, str], dict[str, str]]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"]:
        need = Requirement(text)
        one = found["versions", need.name]
        version = importlib.metadata.version(need.name)
        assert re.split("[ ,]", one["told"])[0] == version
        assert (one["status"] == "ok") == need.specifier.contains(version, prereleases=True)
        for bound in need.specifier:
            assert str(bound) in one["told"]
    assert found["versions", "torch"]["told"].startswith(torch.__version__)
    assert found["versions", "Python"]["told"].startswith(".".join(map(str, sys.version_info[:3])))


@linux
def test_the_machine_is_described_as_by_the_system(found: dict[tuple[str, str], dict[str, str]]) -> None:
    text = Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^(?:flags|Features)\s*:(.*)", text, re.MULTILINE)[1].split())  # type: ignore[index]
    if "avx2" in flags:
        names = {"AVX2": "avx2", "AVX-512": "avx512f", "VNNI": "avx512_vnni", "BF16": "avx512_bf16", "AMX": "amx_tile"}
        instructions = found["kernels", "processor"]["told"]
        assert instructions == ", ".join(f"{name} {'yes' if flag in flags else 'no'}" for name, flag in names.items())
    if name := re.search(r"^model name\s*: (.+)", text, re.MULTILINE):
        assert name[1].strip() in found["machine", "processor"]["told"]
    usable = int(subprocess.run(["nproc"], capture_output=True, check=True, env={"PATH": os.environ["PATH"]}).stdout)
    assert found["machine", "cores"]["told"] == f"{text.count('processor	:')}, {usable} of them for this process"
    assert os.uname().release in found["machine", "system"]["told"]
    total = int(re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1]) / 2**20  # type: ignore[index]
    free = re.match(r"([\d,.]+) (GiB|MiB)", found["memory", "free"]["told"])
    assert free
    assert 0 < float(free[1].replace(",", "")) / (1 if free[2] == "GiB" else 1024) <= total


def test_the_cache_folder_and_its_models_are_listed(found: dict[tuple[str, str], dict[str, str]]) -> None:
    one = found["cache", "folder"]
    assert one["told"].startswith(f"{cache_folder()}: ")
    assert found["cache", "state"]["told"].startswith(f"{Path(platformdirs.user_state_dir('clearllama'))}: ")
    here = hub.find(hub.DEFAULT)
    assert found["cache", hub.DEFAULT]["told"].startswith("not downloaded" if here is None else str(here))


def test_the_size_of_a_folder_is_counted_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_bytes(bytes(5 * 2**20))
    (tmp_path / "d").write_bytes(bytes(2 * 2**20))
    (tmp_path / "e").symlink_to(tmp_path / "d")
    status, message, remedy = facts.folder_state(tmp_path)
    assert (status, remedy) == ("ok", "")
    assert message.startswith(f"{tmp_path}: 7 MiB, writable, ")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "c", "d", "e"]
    missing = tmp_path / "x" / "y"
    assert facts.folder_state(missing)[1].startswith(f"{missing}: does not exist yet, writable")
    assert not missing.parent.exists()
    status, message, remedy = facts.folder_state(tmp_path / "d" / "y")  # below a file
    assert status == "note"
    assert "not writable" in message
    assert str(tmp_path / "d") in remedy


@pytest.mark.parametrize(
    ("installed", "bounds", "status"),
    [("2.9.1", ">=2.10,<2.14", "fail"), ("2.10.0", ">=2.10,<2.14", "ok"), ("2.13.0+cpu", "<2.14,>=2.10", "ok"),
     ("2.14.0", ">=2.10,<2.14", "note"), ("3.1.10", ">=3.1.6", "ok"), ("0.2.0", ">=0.2.1", "fail"), ("1", "", "ok")],
)  # fmt: skip
def test_a_version_below_its_lower_bound_fails(
    installed: str, bounds: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    monkeypatch.setattr(facts, "declared_requirements", lambda _: (">=3.11", [f"thing{bounds}"]))
    one = next(one for one in facts.versions() if one.item == "thing")
    assert one.status == status
    assert ("pip install 'thing" in one.remedy) == (status != "ok")
    lower = [bound[2:] for bound in bounds.split(",") if bound.startswith(">=")]
    assert (status == "fail") == any(Version(installed) < Version(bound) for bound in lower)


def test_a_missing_dependency_fails_and_a_missing_extra_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["nowhere-to-be-found>=1", 'nowhere-either>=2; extra == "study"', 'unused>=1; extra == "test"']
    monkeypatch.setattr(facts, "declared_requirements", lambda _: ("", needs))
    found = {one.item: one for one in facts.versions()}
    assert (found["nowhere-to-be-found"].status, found["nowhere-either"].status) == ("fail", "note")
    assert found["nowhere-either"].remedy == "pip install 'clearllama[study]'"
    assert "unused" not in found


# ------------------------------------------------------------------------------------------------- the self-test
def test_the_doctor_runs_every_check() -> None:
    assert list(doctor.TESTS) == list(selftest.CHECKS)


@pytest.mark.parametrize(
    "name", [name if name != "compile" else pytest.param(name, marks=pytest.mark.slow) for name in selftest.CHECKS]
)
def test_the_library_passes(name: str) -> None:
    one = selftest.run(name)
    assert one.status == "ok" or (name == "compile" and kernels.compiler() is None), one


def rotate_backwards(form: str, patch: pytest.MonkeyPatch) -> None:
    apply, layout, table = rope.FORMS[form]
    patch.setitem(rope.FORMS, form, (table, lambda q, k, *rows: apply(q, k, *rows[:-1], -rows[-1]), layout))


def scale(owner: Any, name: str, factor: float, patch: pytest.MonkeyPatch) -> None:
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args: original(*args) * factor)


def delay_values(patch: pytest.MonkeyPatch) -> None:
    """The cache stores each value one slot too late."""
    update = LayerCache.update

    def delayed(self: LayerCache, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> Any:
        return update(self, k, v.roll(1, 2) if v.shape[2] > 1 else v, positions)

    patch.setattr(LayerCache, "update", delayed)


def overwrite_slots(patch: pytest.MonkeyPatch) -> None:
    """The cache stores every pass in the slots of the first one."""
    place = KVCache.place
    patch.setattr(KVCache, "place", lambda self, tokens, positions=None: place(self, tokens, positions) * 0)


def increase_angles(patch: pytest.MonkeyPatch) -> None:
    """Every form of RoPE rotates by angles that are slightly too large."""
    table = rope.freqs_cis_at
    patch.setattr(
        rope, "freqs_cis_at", lambda positions, inv_freq, *factor: table(positions, inv_freq * 1.001, *factor)
    )


def unmask(patch: pytest.MonkeyPatch) -> None:
    mask = model.causal_mask
    patch.setattr(model, "causal_mask", lambda *args: mask(*args) | True)


DEFECTS: dict[str, tuple[str, Any]] = {
    "one form rotates backwards": ("rope", lambda patch: rotate_backwards("half", patch)),
    "all angles are slightly too large": ("rope", increase_angles),
    "values are cached one slot too late": ("cache", delay_values),
    "slots are overwritten": ("cache", overwrite_slots),
    "queries attend to later keys": ("cache", unmask),
    "rows of wq and wk are not reordered": (
        "safetensors",
        lambda patch: patch.setattr(weights, "to_layout", lambda n, t, *_: t),
    ),
    "weights are read with a wrong scale": ("safetensors", lambda patch: scale(weights, "cast", 1.0001, patch)),
    "the kernels' product is 5 % too large": ("quantized", lambda patch: scale(kernels, "linear_blocks", 1.05, patch)),
    "the bfloat16 kernel changes the sign": ("quantized", lambda patch: scale(kernels, "linear_bf16", -1, patch)),
}


@pytest.mark.parametrize("what", DEFECTS)
def test_a_defect_fails_its_check(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = DEFECTS[what]
    if name == "quantized" and not kernels.ready():
        pytest.skip("needs the C++ kernels")
    plant(monkeypatch)
    one = selftest.run(name)
    assert one.status == "fail", one
    assert one.remedy


@pytest.mark.slow
def test_a_wrong_compiled_step_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    scale(compiled, "forward", 1.01, monkeypatch)
    assert selftest.run("compile").status == "fail"


def test_nan_is_never_close() -> None:
    with pytest.raises(selftest.Wrong, match="differ by nan"):
        selftest.check_close("they", torch.tensor([1.0, float("nan")]), torch.ones(2), 1)


# ---------------------------------------------------------------------------------------- probes that crash or hang
def planted(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the child's probes by probes that find nothing, then run the code there."""
    made = "import os, signal, subprocess, sys, time; from llama.tools import doctor, facts; F = facts.Finding; "
    made += "[group.update({name: (lambda name=name: iter([F('ok', 'x', name, '')])) for name in group})"
    made += " for group in (doctor.PROBES, doctor.TESTS)]; "
    monkeypatch.setattr(doctor, "SERVE", f"{made}{code}; doctor.serve(NAMES)")


ORDER = [*doctor.PROBES, *doctor.TESTS]


def examine(seconds: float = 5) -> list[Finding]:
    return list(doctor.in_children(ORDER, seconds))


@pytest.mark.parametrize(
    ("how", "ending"),
    [
        ("os.kill(os.getpid(), signal.SIGILL)", "ended by SIGILL"),
        ("os.abort()", "ended by SIGABRT"),
        ("os._exit(3)", "exit code 3"),
        ("(sys.stderr.write('no such driver\\n'), sys.stderr.flush(), os._exit(3))", "(no such driver)"),
    ],
)
@pytest.mark.parametrize("name", ["devices", "cache"])
def test_a_probe_that_ends_its_process_is_one_finding(
    name: str, how: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = "PROBES" if name in doctor.PROBES else "TESTS"
    planted(f"doctor.{group}[{name!r}] = lambda: {how}", monkeypatch)
    found = examine()
    assert [one.item for one in found] == ORDER
    (bad,) = [one for one in found if one.status != "ok"]
    assert (bad.status, bad.item) == ("fail", name)
    assert ending in bad.message
    assert bad.group == ("self-test" if name in doctor.TESTS else "torch")


def test_a_probe_that_raises_is_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(
        "doctor.PROBES['devices'] = lambda: 1 / 0; doctor.TESTS['cache'] = lambda: iter([F('fail', 'x', 'y', 'z')])",
        monkeypatch,
    )
    found = examine()
    assert [one.status for one in found] == ["ok", "fail", "ok", "ok", "ok", "fail", *["ok"] * (len(ORDER) - 6)]
    assert found[1].message == "could not be done: ZeroDivisionError: division by zero"


def test_an_import_error_of_torch_is_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SERVE", "raise ImportError('libtorch.so: no such file')")
    (one,) = examine()
    assert (one.status, one.item) == ("fail", "import")
    assert "ImportError: libtorch.so: no such file" in one.message


@linux
@pytest.mark.slow
def test_a_probe_that_hangs_is_killed_with_its_own_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hang = f"subprocess.run(['sh', '-c', 'echo $$ $PPID >> {pids}; exec sleep 600'])"
    planted(f"doctor.PROBES['devices'] = doctor.TESTS['cache'] = lambda: {hang}", monkeypatch)
    monkeypatch.setattr(doctor, "ANSWER", 3.0)
    started = time.monotonic()
    found = {one.item: one for one in examine(2)}
    assert time.monotonic() - started < 60
    assert list(found) == ORDER
    assert found["devices"].status == "fail"
    assert found["devices"].message == "no answer within 3 s"
    assert found["kernels"].status == found["rope"].status == "ok"
    for name in ORDER[ORDER.index("cache") :]:  # no time is left for the others
        assert found[name].status == "note"
        assert found[name].message == "skipped: the self-test reached its time limit, 2 s"
    for pid in pids.read_text().split():
        assert not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text()


def test_an_interrupt_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    planted("doctor.PROBES['devices'] = lambda: time.sleep(600)", monkeypatch)
    made: list[doctor.Child] = []
    init = doctor.Child.__init__
    monkeypatch.setattr(doctor.Child, "__init__", lambda self, names: (made.append(self), init(self, names))[1])
    findings = doctor.in_children(ORDER, 5)
    assert next(findings).item == "memory"
    with pytest.raises(KeyboardInterrupt):
        findings.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert made[0].process.poll() == 1 or made[0].process.poll() == -signal.SIGKILL


# ------------------------------------------------------------------------------------------------------ the command
def test_no_probe_uses_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for probe in doctor.WITHOUT_TORCH.values():
        assert "fail" not in {one.status for one in probe()}


@linux
@pytest.mark.slow
def test_the_doctor_runs_without_a_home_a_cache_a_compiler_and_a_network(tmp_path: Path) -> None:
    """All of these at once, with the self-test: what is missing is a note, and nothing fails."""
    (tmp_path / "file").write_text("")
    env = {"PATH": "/nonexistent", "CLEARLLAMA_CACHE": str(tmp_path / "file" / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "llama", "doctor", "--seconds", "60", "--json"]
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, env=env, check=False, timeout=250, cwd=tmp_path)
    assert done.stderr == b""
    assert done.returncode == 0, done.stdout
    found = {(one["group"], one["item"]): one for one in json.loads(done.stdout)["findings"]}
    for key in (("cache", "folder"), ("kernels", "C++"), ("compiler", "C++"), ("self-test", "compile")):
        assert found[key]["status"] == "note", found[key]
    for name in ("rope", "cache", "safetensors"):
        assert found["self-test", name]["status"] == "ok", found["self-test", name]
    assert os.listdir(tmp_path) == ["file"]


def test_the_exit_code_shows_whether_anything_failed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def findings(*statuses: Any) -> list[Finding]:
        return [Finding(status, "group", "item", "a message\nof two\x1b lines", "do this") for status in statuses]

    for statuses, code, last in (
        (("ok", "note"), 0, "nothing failed: 1 ok, 1 note"),
        (("ok", "fail", "note", "note"), 1, "1 FAILED: 1 ok, 2 notes"),
    ):
        monkeypatch.setattr(doctor, "examine", lambda *_, statuses=statuses: iter(findings(*statuses)))
        assert main(["doctor"]) == code
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(statuses) + 1
        assert lines[-1] == last
        assert lines[0] == "ok    group     item: a message of two\\x1b lines; do this"
        assert main(["doctor", "--json"]) == code
        assert json.loads(capsys.readouterr().out)["ok"] == (code == 0)
    for bad in ("0", "-1", "nan", "inf"):
        assert main(["doctor", "--seconds", bad]) == 2
