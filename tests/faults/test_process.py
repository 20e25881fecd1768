"""Group I: faults of a process and its streams, independent of what it computes."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pexpect
import pytest

from llama.cli.common import output, terminal

from ..forked import Forked
from ..patience import PATIENCE
from ..scripts import make_tiny
from .conftest import Try

CPU = ("--device", "cpu", "--dtype", "float32")
GENERATE = ("generate", *CPU, "--raw", "hello", "-n", "4", "--temp", "0")
# Commands that write to stdout in different ways; MODEL stands for the path of a small model.
COMMANDS = {
    "version": ("--version",),
    "generate": (*GENERATE, "-m", "MODEL"),
    "inspect --json": ("inspect", "MODEL", "--json"),
    "study": ("study",),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny.make(tmp_path / "model", "llama-3-8b")


def command(name: str, model: Path) -> tuple[str, ...]:
    return tuple(str(model) if word == "MODEL" else word for word in COMMANDS[name])


# ------------------------------------------------------------------------------------------------------ the streams
CLOSED_PIPE = (
    "import os, sys; r, w = os.pipe(); os.dup2(w, 1); os.close(r); os.close(w); sys.stdout = os.fdopen(1, 'w')"
)
CLOSED = "import os, sys; sys.stdout = None; os.close(1)"
FULL = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
READ_ONLY = "import os; os.dup2(os.open('/dev/null', os.O_RDONLY), 1)"


@pytest.mark.parametrize("name", COMMANDS)
def test_without_a_stdout_a_command_fails(attempt: Try, model: Path, name: str) -> None:
    """With a stdout it succeeds. A file that is opened later may get the descriptor of stdout."""
    good = attempt(*command(name, model))
    assert good.code == 0
    assert good.stdout
    attempt(*command(name, model), before=CLOSED).refused("standard output is closed")
    attempt(*command(name, model), before=READ_ONLY).refused("standard output: Bad file descriptor")
    if os.path.exists("/dev/full"):
        attempt(*command(name, model), before=FULL).refused("standard output: No space left on device")
    ended = attempt(*command(name, model), before=CLOSED_PIPE)
    assert ended.code == 141
    assert not {word for word in ("error", "Traceback", "Exception") if word in ended.error}


@pytest.mark.parametrize("args", [("generate",), ("generate", "--prompts", "-"), ("chat",), ("trace",)])
def test_a_closed_or_endless_stdin_is_refused(attempt: Try, model: Path, args: tuple[str, ...]) -> None:
    """An endless one is /dev/zero, and the address space is limited to 1 GiB more."""
    closed = "import os, sys; sys.stdin = None; os.close(0)"
    attempt(*args, "-m", model, before=closed).refused("standard input", "closed", code=2)
    if args != ("trace",):
        more = ("--chat-format", "llama3", *CPU) if args == ("chat",) else ()
        attempt(*args, *more, "-m", model, stdin=Path("/dev/zero")).refused("is endless", code=2)


def test_the_command_does_not_wait_for_a_prompt_from_a_terminal(model: Path) -> None:
    child = pexpect.spawn(
        sys.executable, ["-m", "llama", "generate", "-m", str(model)], encoding="utf-8", timeout=PATIENCE
    )
    child.expect('clearllama generate "your text"')
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 2


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.slow)])
def test_characters_that_the_encoding_lacks_are_escaped(attempt: Try, model: Path, encoding: str) -> None:
    """Compared with the same command in UTF-8; the text has characters that neither encoding has."""
    args = ("trace", "日本語 é – 😀", "-m", model, "--device", "cpu", "-q")
    narrow = f"import sys; [s.reconfigure(encoding={encoding!r}, errors='strict') for s in (sys.stdout, sys.stderr)]"
    plain, escaped = attempt(*args), attempt(*args, before=narrow)
    assert (plain.code, escaped.code) == (0, 0), escaped.error
    assert not plain.stdout.isascii()
    assert escaped.stdout == plain.stdout.decode().encode(encoding, "backslashreplace")


# --------------------------------------------------------------------------------------------- the limits of the tests
def test_the_limit_of_a_child_counts_cpu_time_and_not_the_time_it_waits(forked: Forked) -> None:
    assert forked.run((), None, 1, code="import time; time.sleep(1.2)").returncode == 0
    assert forked.run((), None, 1, code="while True: pass").returncode == -signal.SIGPROF


# ------------------------------------------------------------------------------------------------------ the signals
# Functions at whose beginning a signal is sent, once or twice, so that the moment is known: at which of their calls.
MOMENTS = {
    "load": "from llama import loader as m; name, call = 'build_plan', 1",
    "prefill": "from llama import generate as m; name, call = 'prefill', 1",
    "decode": "from llama.cli.common import terminal as m; name, call = 'write', 5",
}
AT = """
import os, signal
{moment}
real, calls = getattr(m, name), []
def sent(*args, **options):
    calls.append(args)
    for _ in range({count} if len(calls) == call else 0):
        os.kill(os.getpid(), {number})
    return real(*args, **options)
setattr(m, name, sent)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_ends_the_command_with_its_exit_code_and_no_traceback(
    attempt: Try, model: Path, moment: str, number: signal.Signals
) -> None:
    """What was printed before it is written."""
    command = (*GENERATE, "-q", "-m", model, "-n", "20")
    complete = attempt(*command).stdout
    for count in (1, 2) if number == signal.SIGINT else (1,):
        at = AT.format(moment=MOMENTS[moment], count=count, number=int(number))
        ended = attempt(*command, before=at)
        assert ended.code == 128 + number, ended.error
        assert ended.error.split("\n") in (["", "clearllama: interrupted", ""], [""])
        assert ("interrupted" in ended.error) == (number == signal.SIGINT)
        assert complete.startswith(ended.stdout)
        assert len(complete) > len(ended.stdout) > (0 if moment == "decode" else -1)


# ------------------------------------------------------------------------------------------------------------- JSON
def test_numbers_that_json_cannot_express_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    numbers, stats = [-math.inf, math.inf, math.nan, -0.5], SimpleNamespace(prompt_tokens=1, as_dict=dict)
    completion: Any = SimpleNamespace(
        text="a", tokens=[1], finish_reason="stop", logprobs=numbers, stats=stats, reasoning=None
    )
    terminal.write_json(output.as_dict(completion))
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert found["logprobs"] == [None] * 3 + [-0.5]
    with pytest.raises(ValueError, match="JSON compliant"):  # elsewhere such a number is an error
        terminal.write_json({"x": math.inf})
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------------------------ environment
NO_SOCKET = (
    "import os, sys\n"
    "def hook(event, args):\n"
    "    if event.startswith('socket.'):\n"
    "        os.write(2, b'a socket was used'); os._exit(99)\n"
    "sys.addaudithook(hook)\n"
)


@pytest.mark.parametrize("name", COMMANDS)
def test_local_files_are_used_without_the_network(
    attempt: Try, model: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attempt(*command(name, model), before=NO_SOCKET).survived()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path.parent / f"{tmp_path.name}.hf"))
    attempt("inspect", "org/name", before=NO_SOCKET).refused(
        "org/name", "there is no file, folder or complete local copy"
    )


def test_a_local_model_runs_without_a_home(
    attempt: Try, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system does not know the user, as in many containers. Only a cached model needs the home folder."""
    for name in ("HOME", "CLEARLLAMA_CACHE", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    unknown = "import pwd\ndef getpwuid(uid): raise KeyError(uid)\npwd.getpwuid = getpwuid\n"
    monkeypatch.chdir(tmp_path)
    assert attempt(*GENERATE, "-m", model, before=unknown).survived()
    attempt("pull", before=unknown + NO_SOCKET).refused("the home folder is not known", "CLEARLLAMA_CACHE", code=2)


def test_a_local_model_runs_without_a_writable_cache(
    attempt: Try, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file can be made in /proc, even by root. Commands that need the cache are refused."""
    if not os.path.isdir("/proc/self"):
        pytest.skip("needs /proc")
    monkeypatch.setenv("CLEARLLAMA_CACHE", "/proc/self/cache")
    attempt("pull", before=NO_SOCKET).refused("/proc/self/cache", "CLEARLLAMA_CACHE")
    assert attempt(*GENERATE, "-m", model).survived()


# -------------------------------------------------------------------------------------------------------- the extras
def test_figures_without_matplotlib_are_refused(attempt: Try, tmp_path: Path) -> None:
    """Python behaves as if the package were not installed."""
    missing = (
        "import importlib.util, sys; sys.modules['matplotlib'] = None; real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'matplotlib' else real(name, package)"
    )
    figure = ("study", "precision", "--figure")
    attempt(*figure, tmp_path / "x.png", before=missing).refused("pip install 'clearllama[study]'", code=2)
    assert attempt(*figure, tmp_path / "x.csv", before=missing, writes=("x.csv",)).survived()
