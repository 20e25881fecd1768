"""The number of threads: one per core that the process may use, unless a quota, a variable or an option limits it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import llama
from llama.cli import main
from llama.system import cores
from llama.system.cores import available_cores
from llama.tools import benchmark

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")
GROUPS = {  # a container with a namespace of its own; one without
    "v2": ("0::/\n", "sys/fs/cgroup/"),
    "v1": ("4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n", "sys/fs/cgroup/cpu/"),
}


def machine(root: Path, siblings: list[str], group: str = "", quota: str = "") -> Path:
    """Write the files of a machine: for each CPU, the CPUs of its core; the quota and the period of a control group."""
    for cpu, text in enumerate(siblings):
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{text}\n")
    if group:
        own, folder = GROUPS[group]
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(own)
        (root / folder).mkdir(parents=True)
        if group.startswith("v2"):
            (root / folder / "cpu.max").write_text(f"{quota}\n")
        else:
            for name, value in zip(("cpu.cfs_quota_us", "cpu.cfs_period_us"), quota.split(), strict=False):
                (root / folder / name).write_text(f"{value}\n")
    return root


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("quota", "count"),
    [
        *[("200000 100000", 2), ("5000 100000", 1), ("25000 10000", 3)],
        *((quota, 6) for quota in ("max 100000", "-1 100000", "900000 100000", "", "5 0", "1")),
    ],
)
def test_a_quota_limits_the_threads(tmp_path: Path, group: str, quota: str, count: int) -> None:
    assert available_cores(range(6), machine(tmp_path, [str(cpu) for cpu in range(6)], group, quota)) == count


@settings(max_examples=20)
@given(core_of=st.lists(st.integers(0, 5), min_size=1, max_size=12), data=st.data())
def test_the_threads_are_the_cores_of_the_allowed_cpus(
    tmp_path_factory: pytest.TempPathFactory, core_of: list[int], data: st.DataObject
) -> None:
    """core_of[i] is the core of CPU i. Without the system's list, each CPU counts as a core."""
    allowed = data.draw(st.sets(st.sampled_from(range(len(core_of))), min_size=1))
    siblings = [",".join(str(cpu) for cpu, other in enumerate(core_of) if other == core) for core in core_of]
    root = machine(tmp_path_factory.mktemp("machine"), siblings)
    assert available_cores(allowed, root) == len({core_of[cpu] for cpu in allowed})
    assert available_cores(allowed, root / "none") == len(allowed)


# ----------------------------------------------------------------------------------------------- where it is applied
@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch):
    """Restore the number of threads; forget the default that was chosen."""
    before = torch.get_num_threads()
    for name in cores.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    cores.default_threads.cache_clear()
    yield
    torch.set_num_threads(before)
    cores.default_threads.cache_clear()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("variable", [*cores.VARIABLES, None])
def test_variables_of_the_user_come_before_the_quota(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    """PyTorch has read them."""
    if variable:
        monkeypatch.setenv(variable, "3")
    torch.set_num_threads(3)
    monkeypatch.setattr(cores, "available_cores", lambda allowed: 7)
    assert cores.default_threads() == (3 if variable else 7)


@pytest.mark.usefixtures("threads")
def test_the_command_sets_the_threads_and_the_library_does_not(
    monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda allowed: 3)
    torch.set_num_threads(2)
    llama.load(tiny_gguf).generate("a", max_new_tokens=1)
    llama.load_model(tiny_gguf)
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(benchmark, "measure", lambda *_: {})
    for options, line in (([], "3 threads"), (["--threads", "1"], "1 thread")):
        assert main(["bench", "-m", str(tiny_gguf), *options]) == 0
        assert torch.get_num_threads() == int(line[0])
        assert f"clearllama: {line}\n" in capsys.readouterr().err


@linux
def test_the_affinity_of_a_process_counts() -> None:
    one = sorted(os.sched_getaffinity(0))[:1]
    code = f"import os; os.sched_setaffinity(0, {one}); from llama.system import cores; print(cores.default_threads())"
    env = {name: value for name, value in os.environ.items() if name not in cores.VARIABLES}
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout == b"1\n"
