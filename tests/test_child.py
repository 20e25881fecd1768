"""The limited child process: each limit ends a request with a reason, and the next request is answered."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llama.system import child
from llama.system.child import Child, ChildError

from .patience import until

LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="only Linux limits the address space")
ENDLESS = "sum(iter(int, 1))"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Start a child whose worker evaluates expressions."""
    made = []

    def make(source: str = "", seconds: float = 0.2, space: int = 2**25) -> Child:
        worker = tmp_path / "worker.py"
        worker.write_text(f"import os, signal, time\n{source}\ndef answer(request):\n    return eval(request)\n")
        made.append(Child(worker, ["jinja2"], seconds, space))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ENDLESS, "it ran for more than 0.2 seconds"),
        (ENDLESS + " " * 200_000, "it ran for more than 0.4 seconds"),
        pytest.param("len('x' * 2**26)", "it needed more than 32 MiB", marks=LINUX),
        ("'x' * 2**21", "it wrote more than 1,048,"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "nested too deeply .its process crashed, exit code -11"),
        ("1 / 0", "exit code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "it was killed"),
    ],
)
def test_a_limit_ends_one_request(start: Callable[..., Child], request_: str, reason: str) -> None:
    process = start()
    assert process.ask("1 + 1") == 2
    with pytest.raises(ChildError, match=reason):
        process.ask(request_)
    assert process.ask(r"'\ud800'") == "\ud800"


def test_a_process_that_waits_is_killed(start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    process = start()
    process.start()
    monkeypatch.setattr(child, "WAIT", 0.5)
    with pytest.raises(ChildError, match="because it took more than 0"):
        process.ask("time.sleep(30)")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limits")
def test_code_reads_and_writes_no_file(start: Callable[..., Child], tmp_path: Path) -> None:
    """Not even a file that is open already."""
    secret, target = tmp_path / "secret", tmp_path / "target"
    secret.write_text("secret")
    process = start(f"leak = open({str(target)!r}, 'wb', 0)")
    for request in (f"open({str(secret)!r}).read()", "os.pipe()", "leak.write(b'x')"):
        with pytest.raises(ChildError):
            process.ask(request)
    assert target.read_bytes() == b""


def test_it_sees_neither_the_environment_nor_the_module_path(
    start: Callable[..., Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SECRET", "1")
    assert start("import jinja2").ask("'SECRET' in os.environ or 'torch' in __import__('sys').modules") is False


def test_an_interrupted_request_leaves_no_reply_for_the_next(start: Callable[..., Child]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    process, before = start(), signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            process.ask(f"os.kill({os.getpid()}, signal.SIGALRM) or time.sleep(1) or 'late'")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert process.ask("'next'") == "next"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_starts_its_own(start: Callable[..., Child]) -> None:
    process = start()
    mine = process.ask("os.getpid()")
    read, write = os.pipe()
    pid = os.fork()
    if not pid:  # no exception may leave this branch
        try:
            os.write(write, str(process.ask("os.getpid()")).encode())
            process.stop()
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    assert int(os.read(read, 100)) != mine
    assert process.ask("os.getpid()") == mine
    os.close(read)


@LINUX
def test_it_ends_with_all_that_it_started(start: Callable[..., Child]) -> None:
    process = start()
    grandchild = process.ask("os.fork() or time.sleep(60)")
    assert process.stop() == -signal.SIGKILL
    assert process.stop() is None
    status = Path(f"/proc/{grandchild}/stat")
    until(lambda: not status.exists() or status.read_text().split()[2] == "Z")


def test_without_a_process_there_is_a_reason(start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent")
    with pytest.raises(ChildError, match="could not be started"):
        start().ask("1")
