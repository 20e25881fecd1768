"""Group F: whatever happens while a command writes, the target is the old file or the complete new one."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest

from llama import loader
from llama.generation.session import Session
from llama.system import temporary

from ..forked import Forked
from ..scripts import make_tiny
from .conftest import Try
from .harness import snapshot

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = ("--device", "cpu", "--dtype", "float32")
LEFT = re.compile(r"\.(convert|pull|session|writing)-.*\.tmp")  # a temporary folder, which a killed process may leave
State = dict[str, tuple[int, str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny.make(tmp_path / "source", "llama-3-8b")


@dataclasses.dataclass(frozen=True)
class Job:
    """A command that writes, the file or folder it writes to, and its old content."""

    args: tuple[str, ...]
    target: str
    old: dict[str, bytes]
    out: Path

    def lay(self) -> State:
        """Restore the folder to the old files alone."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        for name, content in self.old.items():
            (self.out / name).parent.mkdir(parents=True, exist_ok=True)
            (self.out / name).write_bytes(content)
        return snapshot(self.out)


@pytest.fixture(params=["convert", "quantize", "--save-session"])
def job(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Job:
    out = tmp_path / "out"
    if request.param == "--save-session":
        llm, session, old = loader.load(source, dtype="float32", device="cpu"), Session(), tmp_path / "old session"
        llm.generate("another text", max_new_tokens=1, session=session)
        session.save(old, llm.model)
        args = ("generate", "-m", source, *CPU, "--raw", "-n", "3", "--temp", "0", "--save-session", out / "s", "hello")
        return Job(tuple(map(str, args)), "s", {"s": old.read_bytes()}, out)
    if request.param == "quantize":
        return Job(("quantize", str(source), str(out / "q")), "q", {}, out)
    return Job(("convert", str(source), str(out / "m.gguf"), "--to", "gguf"), "m.gguf", {}, out)


def check_target(found: State, old: State, new: State, target: str) -> None:
    """Assert that a target is old or new, and that every other file is a temporary one."""

    def below(state: State, name: str) -> State:
        return {path: at for path, at in state.items() if path.split("/")[0] == name}

    assert below(found, target) in (below(old, target), below(new, target)), "neither old nor new"
    for name in found.keys() - below(found, target).keys():
        assert LEFT.fullmatch(name.split("/")[0]), f"{name} was not removed"


# ------------------------------------------------------------------------------------------------ killed processes
def test_a_killed_command_leaves_the_old_target_or_the_complete_new_one(forked: Forked, job: Job) -> None:
    """Only a temporary folder may be left beside it, and the next run succeeds."""
    rng, old = random.Random(1), job.lay()
    done = forked.run(job.args, None, kill=(10**9, 0, signal.SIGKILL))
    assert done.returncode == 0, done.stderr
    new = snapshot(job.out)
    for number in (signal.SIGKILL, signal.SIGTERM):
        job.lay()
        ended = forked.run(job.args, None, kill=(1 + int(done.steps * rng.random()), 0.002 * rng.random(), number))
        assert ended.returncode in (0, -number, 128 + number), ended.stderr
        check_target(snapshot(job.out), old, new, job.target)
        for left in job.out.glob(".*.tmp"):
            shutil.rmtree(left)
        made = job.out / job.target
        if made.exists() and job.target != "s":  # a conversion replaces nothing
            shutil.rmtree(made) if made.is_dir() else made.unlink()
        assert forked.run(job.args, None).returncode == 0
        assert snapshot(job.out) == new


# ------------------------------------------------------------------------------------------------------ a full disk
def test_a_failed_write_leaves_the_old_file(attempt: Try, job: Job) -> None:
    """`attempt` compares every byte of the folder with its old content."""
    job.lay()
    ended = attempt(*job.args, file_size=1500)  # stderr is a file, too
    assert ended.code in (1, 2)
    [line] = [line for line in ended.error.splitlines() if ": error: " in line]
    assert "File too large" in line
    assert str(job.out) in line


# ------------------------------------------------------------------------------------------ targets of every kind
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
@pytest.mark.parametrize("command", ["generate", "chat", "trace"])
def test_an_unwritable_target_is_refused_before_the_model_is_opened(attempt: Try, command: str) -> None:
    """/proc has write permission for root, but no file can be made in it."""
    option = "--json" if command == "trace" else "--save-session"
    text = () if command == "chat" else ("hello",)
    attempt(command, *text, "-m", "no-such-model", option, "/proc/x").refused("/proc", code=2)


def test_the_modes_of_new_files_follow_the_umask(attempt: Try, source: Path, tmp_path: Path) -> None:
    for to in ("hf", "gguf"):
        args = ("convert", source, tmp_path / to, "--to", to)
        assert attempt(*args, before="import os; os.umask(0o077)", writes=(to, f"{to}/*")).survived()
        for path in (tmp_path / to, *(tmp_path / to).rglob("*")):
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_replaced_file_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "file").chmod(mode)
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        temporary.write_atomically(tmp_path / name, name.encode())
        assert (tmp_path / "file").read_bytes() == name.encode()
        assert (tmp_path / "file").stat().st_mode & 0o777 == mode
    assert (tmp_path / "link").is_symlink()
