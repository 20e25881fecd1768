"""Group F: whatever happens while a command writes, the target is the old file or the complete new one."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Job:
    """A command that writes, the file or folder it writes to, and its old content."""

    args: tuple[Any, ...]
    target: str
    old: dict[str, bytes]


def session_job(source: Path, out: Path) -> Job:
    args = ("generate", "-m", source, *CPU, "--raw", "-n", "3", "--temp", "0", "--save-session", out / "s")
    llm = loader.load(source, dtype="float32", device="cpu")
    session = Session()
    llm.generate("another text", max_new_tokens=1, session=session)
    session.save(source.parent / "old session", llm.model)
    return Job((*args, "hello"), "s", {"s": (source.parent / "old session").read_bytes()})


JOBS: dict[str, Callable[[Path, Path], Job]] = {
    "convert": lambda source, out: Job(("convert", source, out / "m.gguf", "--to", "gguf"), "m.gguf", {}),
    "quantize": lambda source, out: Job(("quantize", source, out / "q"), "q", {}),
    "--save-session": session_job,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny.make(tmp_path / "source", "llama-3-8b")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def lay(job: Job, out: Path) -> State:
    """Restore the folder to the old files alone."""
    for path in out.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, content in job.old.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(content)
    return snapshot(out)


def below(state: State, target: str) -> State:
    return {name: value for name, value in state.items() if name == target or name.startswith(f"{target}/")}


def check_target(found: State, old: State, new: State, target: str) -> None:
    """Assert that a target is old or new, and that every other file is a temporary one."""
    assert below(found, target) in (below(old, target), below(new, target)), "neither old nor new"
    for name in found.keys() - below(found, target).keys():
        assert LEFT.fullmatch(name.split("/")[0]), f"{name} was not removed"


# ------------------------------------------------------------------------------------------------ killed processes
@pytest.mark.parametrize("name", JOBS)
def test_a_killed_command_leaves_the_old_target_or_the_complete_new_one(
    forked: Forked, source: Path, out: Path, name: str
) -> None:
    """The next run succeeds and removes all temporary files of the killed one."""
    job, rng = JOBS[name](source, out), random.Random(1)
    args, old = tuple(map(str, job.args)), lay(job, out)
    done = forked.run(args, None, kill=(10**9, 0, signal.SIGKILL))
    assert done.returncode == 0, done.stderr
    new = snapshot(out)
    for number in (signal.SIGKILL, signal.SIGTERM):
        lay(job, out)
        ended = forked.run(args, None, kill=(1 + int(done.steps * rng.random()), 0.002 * rng.random(), number))
        assert ended.returncode in (0, -number, 128 + number), ended.stderr
        check_target(snapshot(out), old, new, job.target)
        age(out)
        if (out / job.target).exists() and name != "--save-session":  # a conversion replaces nothing
            shutil.rmtree(out / job.target) if (out / job.target).is_dir() else (out / job.target).unlink()
        assert forked.run(args, None).returncode == 0
        assert snapshot(out) == new, "temporary files were not removed"


def age(folder: Path) -> None:
    """Let the temporary folders be so old that another process removes them."""
    for path in folder.glob(".*.tmp"):
        os.utime(path, (0, 0))


# ------------------------------------------------------------------------------------------------------ a full disk
@pytest.mark.parametrize("name", JOBS)
def test_a_failed_write_leaves_the_old_file(attempt: Try, source: Path, out: Path, name: str) -> None:
    """`attempt` compares every byte of the folder with its old content."""
    job = JOBS[name](source, out)
    lay(job, out)
    ended = attempt(*job.args, file_size=1500)  # stderr is a file, too
    assert ended.code in (1, 2)
    [line] = [line for line in ended.error.splitlines() if ": error: " in line]
    assert "File too large" in line
    assert str(out) in line


# ------------------------------------------------------------------------------------------------------ two at once
def test_only_old_folders_of_this_prefix_are_removed(tmp_path: Path) -> None:
    def left(name: str, old: bool = True) -> Path:
        (tmp_path / name / "part").mkdir(parents=True)
        if old:
            os.utime(tmp_path / name, (0, 0))
        return tmp_path / name

    kept = [left(name) for name in (".t-abc", ".u-abc.tmp", "away")]
    (link := tmp_path / ".t-link.tmp").symlink_to("away")
    gone, fresh = left(".t-abc.tmp"), left(".t-new.tmp", old=False)
    with temporary.own_temporary(tmp_path, ".t") as one:
        assert not gone.exists()
        with temporary.own_temporary(tmp_path, ".t") as two:
            assert one.is_dir()
            two.rename(tmp_path / "moved")  # a folder that was moved is not an error
        assert one.is_dir()
    assert sorted(tmp_path.iterdir()) == sorted([*kept, link, fresh, tmp_path / "moved"])


# ------------------------------------------------------------------------------------------ targets of every kind
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
@pytest.mark.parametrize("command", ["generate", "chat", "trace"])
def test_an_unwritable_target_is_refused_before_the_model_is_opened(attempt: Try, command: str) -> None:
    """/proc has write permission for root, but no file can be made in it."""
    option = "--json" if command == "trace" else "--save-session"
    text = () if command == "chat" else ("hello",)
    attempt(command, *text, "-m", "no-such-model", option, "/proc/x").refused("/proc", code=2)


def test_the_modes_of_new_files_follow_the_umask(attempt: Try, source: Path, tmp_path: Path) -> None:
    for name in ("convert", "quantize"):
        out = tmp_path / name
        out.mkdir()
        job = JOBS[name](source, out)
        assert attempt(*job.args, before="import os; os.umask(0o077)", writes=(f"{out.name}/*",)).survived()
        for path in out.rglob("*"):
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


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    temporary.write_atomically(tmp_path / "pipe", b"through")
    reader.join(20)
    assert got == [b"through"]
