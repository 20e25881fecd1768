"""Several processes as a user starts them: their output, and that they all end if one of them fails."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama.cli import ranks
from llama.errors import UsageError

from . import forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
HERE = Path(__file__).resolve().parent
PROMPT = ("generate", "hello there", "--raw", "--dtype", "float32", "--device", "cpu")


class Launched:
    """A command in its own process. It and the processes it starts are marked by an environment variable."""

    def __init__(self, *args: str, module: tuple[str, ...] = ("-m", "llama"), stdin: Any = None, **env: str):
        self.mark = f"CLEARLLAMA_TEST_MARK={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        cleaned = {key: v for key, v in os.environ.items() if key not in ("OMP_NUM_THREADS", *ranks.NEEDED)}
        path = os.pathsep.join([str(HERE / "faulty"), str(HERE.parent)])
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *module, *args],
            env={**cleaned, "PYTHONPATH": path, name: value, **env},
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, timeout: float = 60) -> tuple[int, str, list[str]]:
        """Wait for the end: exit code, stdout and the lines of stderr. No marked process may be left."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        finally:
            self.clear()
        assert self.left == [], "processes were left"
        return self.process.returncode, out, err.splitlines()

    def marked(self) -> list[int]:
        """The marked processes that are alive."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or self.mark.encode() not in (entry / "environ").read_bytes():
                    continue
                if (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX":  # zombie or dead
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def wait_for(self, count: int, seconds: float = 20) -> list[int]:
        """Wait until there are `count` marked processes, and return them."""
        deadline = time.monotonic() + seconds
        while len(found := self.marked()) != count and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def clear(self) -> None:
        self.left = self.wait_for(0, 3)
        for pid in self.left:
            os.kill(pid, signal.SIGKILL)


class Forked(Launched):
    """The same, forked off a process that has imported torch. Only the end of the command can be observed."""

    def __init__(self, server: forked.Forked, *args: str, **env: str):
        self.mark = f"CLEARLLAMA_TEST_MARK={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        path = os.pathsep.join([str(HERE / "faulty"), str(HERE.parent)])
        self.server = server
        self.server.start(args, seconds=60, env={"PYTHONPATH": path, name: value, **env})

    def end(self, timeout: float = 60) -> tuple[int, str, list[str]]:
        done = self.server.finish()
        self.clear()
        assert self.left == [], "processes were left"
        return done.returncode, done.stdout.decode(), done.stderr.decode().splitlines()


@pytest.fixture
def chatting(tiny_gguf: Path) -> Iterator[Launched]:
    """A conversation of two processes before its second turn."""
    options = ("--dtype", "float32", "--device", "cpu", "-n", "4", "--temp", "0", "--tensor-parallel", "2")
    launched = Launched("chat", "-m", str(tiny_gguf), *options, stdin=subprocess.PIPE)
    assert launched.process.stdin is not None
    assert launched.process.stderr is not None
    launched.process.stdin.write("hello\n")
    launched.process.stdin.flush()
    for line in launched.process.stderr:
        if "prompt tokens" in line:
            break
    yield launched
    launched.process.kill()
    launched.process.communicate()
    launched.clear()


def test_two_processes_give_the_answer_of_one(tiny_gguf: Path, forked: forked.Forked, clearllama: Any) -> None:
    args = (*PROMPT, "-m", str(tiny_gguf), "-n", "12", "--json")
    one = clearllama(*args)
    code, out, err = Forked(forked, *args, "--tensor-parallel", "2").end()
    assert code == one.returncode == 0, err
    assert json.loads(out)["tokens"] == json.loads(one.stdout)["tokens"]
    assert any(", 2 processes," in line for line in err)
    assert len(err) == len(one.stderr.decode().splitlines())  # only rank 0 reports


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_torchrun_can_start_the_ranks(number: int, tiny_gguf: Path, clearllama: Any) -> None:
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number), "-m", "llama")
    args = (*PROMPT, "-m", str(tiny_gguf), "-n", "12", "--json")
    code, out, err = Launched(*args, "--pipeline-parallel", "2", module=module).end()
    assert code == 0, err
    assert json.loads(out)["tokens"] == json.loads(clearllama(*args).stdout)["tokens"]
    assert any(f", {number} processes in 2 stages," in line for line in err)


FAULTS = [("1 prefill 13", "exit code 13")]
MORE_FAULTS = [
    ("1 load kill", "SIGKILL"),
    ("1 decode kill", "SIGKILL"),
    ("1 load 13", "exit code 13"),
    ("1 prefill kill", "SIGKILL"),
    ("1 decode 13", "exit code 13"),
    ("0 load kill", "SIGKILL"),
    ("0 decode kill", "SIGKILL"),
]


@pytest.mark.parametrize(
    ("fault", "cause"), [*FAULTS, *(pytest.param(*f, marks=pytest.mark.slow) for f in MORE_FAULTS)]
)
def test_a_rank_that_ends_stops_all_with_one_line(
    fault: str, cause: str, tiny_gguf: Path, forked: forked.Forked
) -> None:
    args = (*PROMPT, "-m", str(tiny_gguf), "-n", "100", "--quiet", "--tensor-parallel", "2")
    started = time.monotonic()
    code, _, err = Forked(forked, *args, CLEARLLAMA_TEST_FAULT=fault).end()
    assert time.monotonic() - started < 30
    assert code == 1
    assert len(err) == 1, err
    assert err[0].startswith(f"clearllama: error: rank {fault[0]} ")
    assert cause in err[0]
    assert err[0].endswith("; the other ranks were stopped")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["1 load raise", "1 decode raise"])
def test_an_error_of_one_rank_names_the_rank(fault: str, tiny_gguf: Path) -> None:
    args = (*PROMPT, "-m", str(tiny_gguf), "-n", "100", "--quiet", "--tensor-parallel", "2")
    code, _, err = Launched(*args, CLEARLLAMA_TEST_FAULT=fault).end(30)
    assert code == 1
    assert len(err) == 1, err
    assert "rank 1" in err[0]
    assert "simulated" in err[0]


@pytest.mark.slow
def test_a_conversation_listens_locally_continues_after_an_interrupt_and_ends_with_its_parent(
    chatting: Launched,
) -> None:
    pids = chatting.wait_for(3)
    assert len(pids) == 3
    sockets = {link for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir() if (link := os.readlink(fd))}
    listening = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = row.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
                listening.append(columns[1].split(":")[0])
    assert listening
    assert set(listening) <= {"0100007F", "00000000000000000000000001000000"}
    process, stderr = chatting.process, chatting.process.stderr
    assert process.stdin is not None
    assert stderr is not None
    process.send_signal(signal.SIGINT)  # discards the typed line; the conversation continues
    time.sleep(0.3)
    process.stdin.write("and again\n")
    process.stdin.flush()
    assert any("prompt tokens" in line for line in stderr)
    process.kill()
    assert chatting.wait_for(0, 10) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_to_the_parent_ends_all_ranks(number: signal.Signals, tiny_gguf: Path) -> None:
    args = (*PROMPT, "-m", str(tiny_gguf), "-n", "200", "--tensor-parallel", "2")
    launched = Launched(*args)
    assert launched.process.stderr is not None
    assert ", 2 processes," in launched.process.stderr.readline()
    launched.process.send_signal(number)
    code, _, err = launched.end(20)
    assert code == 128 + number
    assert all("Traceback" not in line and "rror" not in line for line in err), err


@pytest.mark.slow
def test_an_interrupt_in_the_middle_of_an_answer_leaves_the_ranks_in_step(tiny_gguf: Path, clearllama: Any) -> None:
    options = ("chat", "-m", str(tiny_gguf), "--dtype", "float32", "--device", "cpu", "-n", "150", "--temp", "0")
    launched = Launched(*options, "--tensor-parallel", "2", stdin=subprocess.PIPE)
    process = launched.process
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(3):
        process.stdin.write("hello\n")
        process.stdin.flush()
        process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
    out, err = process.communicate("/clear\nhello\n", timeout=60)
    launched.clear()
    assert process.returncode == 0, err
    assert err.count(": stopped") == 3
    expected = clearllama(*options, stdin=b"hello\n").stdout.decode()
    assert len(expected) > 50
    assert out.endswith(expected)


# ------------------------------------------------------------------------------- refused before ranks are started
def test_a_wrong_number_of_processes_is_refused_before_ranks_are_started(
    tiny_gguf: Path, forked: forked.Forked
) -> None:
    code, _, err = Forked(forked, *PROMPT, "-m", str(tiny_gguf), "--tensor-parallel", "3").end()
    assert code == 2
    assert len(err) == 1
    assert "4 heads, 2 key/value heads" in err[0]
    assert err[0].endswith("sizes that work: 1, 2, 4")


@pytest.mark.parametrize("name", ranks.ONE_PROCESS_ONLY)
def test_options_for_one_process_are_refused(name: str) -> None:
    from llama.cli import build_parser

    option = "--" + name.replace("_", "-")
    value = {"compile": [], "gpu_layers": ["0"]}.get(name, ["x.safetensors"])
    args = build_parser().parse_args(["generate", "x", "--tensor-parallel", "2", option, *value])
    with pytest.raises(UsageError, match=f"{option} does not support several processes"):
        ranks.start(args, [], 2, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_absent_gpu_is_refused_before_ranks_are_started(tiny_gguf: Path, forked: forked.Forked) -> None:
    args = (*PROMPT[:3], "-m", str(tiny_gguf), "--tensor-parallel", "2", "--device", "cuda")
    code, _, err = Forked(forked, *args).end()
    assert code == 2
    cause = "" if torch.backends.cuda.is_built() else " because PyTorch was built without CUDA"
    assert err == [f"clearllama: error: device 'cuda' is not available{cause}; available here: cpu"]


ENVIRONMENTS = [
    ({"RANK": "0"}, "the environment has RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    (
        {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        "the environment has WORLD_SIZE, MASTER_ADDR but not RANK, MASTER_PORT",
    ),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "MASTER_PORT .* 'x', expected"),
    (
        {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        "RANK 2 .* out of range; with WORLD_SIZE 2 it is 0 to 1",
    ),
]


@pytest.mark.parametrize(("given", "message"), ENVIRONMENTS)
def test_an_incomplete_environment_is_refused(
    given: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ranks.NEEDED:
        monkeypatch.delenv(name, raising=False)
    assert ranks.environment() is None
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        ranks.environment()


def test_an_address_without_a_rank_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ranks.NEEDED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert ranks.environment() is None


@pytest.mark.slow
def test_a_rank_waits_for_the_others_for_a_limited_time(tiny_gguf: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        free = str(bound.getsockname()[1])
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free}
    code, _, err = Launched(*PROMPT, "-m", str(tiny_gguf), **env, CLEARLLAMA_JOIN_SECONDS="2").end(30)
    assert code == 1
    assert len(err) == 1, err
    assert "rank 0 of 2 did not connect to the others within 2 s" in err[0]


@pytest.mark.slow
def test_a_port_in_use_is_reported(tiny_gguf: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(bound.getsockname()[1])}
        code, _, err = Launched(*PROMPT, "-m", str(tiny_gguf), **env).end(30)
    assert code == 1
    assert len(err) == 1, err
    assert f"MASTER_PORT {env['MASTER_PORT']}" in err[0]
    assert "in use" in err[0]


@pytest.mark.slow
def test_commands_for_one_process_are_refused_in_several(tiny_gguf: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    code, _, err = Launched("bench", "-m", str(tiny_gguf), **env).end(30)
    assert code == 2
    assert "clearllama bench runs in one process, but 2 were started" in err[0]


@pytest.mark.parametrize(
    ("code", "written", "message"),
    [
        (1, "clearllama: warning: x\nclearllama: error: no such file\n", "no such file"),
        (1, "clearllama: loaded\nTraceback\n", "rank 1 ended with exit code 1"),
        (1, "", "rank 1 ended with exit code 1"),
        (-9, "clearllama: error: x\n", "rank 1 was killed by SIGKILL (out of memory?)"),
        (-15, "", "rank 1 was killed by SIGTERM"),
    ],
)
def test_the_last_line_of_the_rank_that_failed_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, written: str, message: str
) -> None:
    (tmp_path / "1").write_text(written)
    result = SimpleNamespace(failures={1: SimpleNamespace(exitcode=code)}, stderrs={1: str(tmp_path / "1")})
    assert ranks._exit_code(argparse.Namespace(debug=False), result) == 1
    assert capsys.readouterr().err == f"clearllama: error: {message}; the other ranks were stopped\n"
