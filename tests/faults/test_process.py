"""Group I: faults of a process and its streams, independent of what it computes."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pexpect
import pytest

from llama.cli import answers, streams

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
def test_a_closed_stdin_is_refused(attempt: Try, model: Path, args: tuple[str, ...]) -> None:
    closed = "import os, sys; sys.stdin = None; os.close(0)"
    attempt(*args, "-m", model, before=closed).refused("standard input", "closed", code=2)


@pytest.mark.parametrize("args", [("generate",), ("generate", "--prompts", "-"), ("chat",)])
def test_an_endless_stdin_is_refused(attempt: Try, model: Path, args: tuple[str, ...]) -> None:
    """The stdin is /dev/zero, and the address space is limited to 1 GiB more."""
    more = ("--chat-format", "llama3", *CPU) if args == ("chat",) else ()
    attempt(*args, *more, "-m", model, stdin=Path("/dev/zero")).refused("is endless", code=2)


def test_the_command_does_not_wait_for_a_prompt_from_a_terminal(model: Path) -> None:
    child = pexpect.spawn(sys.executable, ["-m", "llama", "generate", "-m", str(model)], encoding="utf-8", timeout=60)
    child.expect('clearllama generate "your text"')
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 2


def test_chat_refuses_input_that_is_not_utf_8(attempt: Try, model: Path) -> None:
    args = ("chat", "-m", model, *CPU, "--chat-format", "llama3", "-n", "3", "-q")
    attempt(*args, stdin=b"\xff\n").refused("not UTF-8: byte 0 is 0xff", code=2)


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.slow)])
def test_characters_that_the_encoding_lacks_are_escaped(attempt: Try, model: Path, encoding: str) -> None:
    """Compared with the same command in UTF-8; the text has characters that neither encoding has."""
    args = ("trace", "日本語 é – 😀", "-m", model, "--device", "cpu", "-q")
    narrow = f"import sys; [s.reconfigure(encoding={encoding!r}, errors='strict') for s in (sys.stdout, sys.stderr)]"
    plain, escaped = attempt(*args), attempt(*args, before=narrow)
    assert (plain.code, escaped.code) == (0, 0), escaped.error
    assert not plain.stdout.isascii()
    assert escaped.stdout == plain.stdout.decode().encode(encoding, "backslashreplace")


# ------------------------------------------------------------------------------------------------------ the signals
# Functions at whose beginning a signal is sent, once or twice, so that the moment is known.
MOMENTS = {
    "load": "from llama import loader as m; name = 'build_plan'",
    "prefill": "from llama import generate as m; name = 'prefill'",
    "decode": "from llama.cli import streams as m; name = 'write'",
}
AT = """
import os, signal
{moment}
real = getattr(m, name)
def sent(*args, **options):
    for _ in range({count}):
        os.kill(os.getpid(), {number})
    return real(*args, **options)
setattr(m, name, sent)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_ends_the_command_with_its_exit_code_and_no_traceback(
    attempt: Try, model: Path, moment: str, number: signal.Signals
) -> None:
    for count in (1, 2) if number == signal.SIGINT else (1,):
        at = AT.format(moment=MOMENTS[moment], count=count, number=int(number))
        ended = attempt(*GENERATE, "-q", "-m", model, before=at)
        assert ended.code == 128 + number, ended.error
        assert "Traceback" not in ended.error
        assert ended.error.split("\n") in (["", "clearllama: interrupted", ""], [""])
        assert ("interrupted" in ended.error) == (number == signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_output_before_a_signal_is_written(attempt: Try, model: Path, number: signal.Signals) -> None:
    complete = attempt(*GENERATE, "-q", "-m", model, "-n", "20").stdout
    at = (
        "import os\nfrom llama.cli import streams\nreal, pieces = streams.write, []\n"
        "def write(text):\n    real(text); pieces.append(text)\n"
        f"    len(pieces) == 5 and os.kill(os.getpid(), {int(number)})\n"
        "streams.write = write"
    )
    part = attempt(*GENERATE, "-q", "-m", model, "-n", "20", before=at)
    assert part.code == 128 + number
    assert part.stdout
    assert complete.startswith(part.stdout)
    assert len(part.stdout) < len(complete)


# ------------------------------------------------------------------------------------- terminals and progress bars
@pytest.mark.parametrize(
    ("env", "bars"),
    [({"TERM": "dumb"}, False), pytest.param({"TERM": "xterm", "NO_COLOR": "1"}, True, marks=pytest.mark.slow)],
)
def test_a_dumb_terminal_gets_no_progress_bars_and_no_terminal_gets_colours(
    model: Path, tmp_path: Path, env: dict[str, str], bars: bool
) -> None:
    args = ["-m", "llama", "convert", str(model), str(tmp_path / "new"), "--to", "gguf"]
    child = pexpect.spawn(sys.executable, args, encoding="utf-8", timeout=60, env={**os.environ, **env})
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert ("weight/s" in child.before) == bars
    assert "\x1b[3" not in child.before
    assert "weights were read back and are equal" in child.before


# ------------------------------------------------------------------------------------------------------------- JSON
@pytest.mark.parametrize("number", [-math.inf, math.inf, math.nan])
def test_numbers_that_json_cannot_express_are_null(number: float, capsys: pytest.CaptureFixture[str]) -> None:
    stats = SimpleNamespace(prompt_tokens=1, as_dict=dict)
    completion = SimpleNamespace(text="a", tokens=[1, 2], finish_reason="stop", logprobs=[number, -0.5], stats=stats)
    facts = answers.as_dict(completion)  # type: ignore[arg-type]
    streams.write_json(facts)
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert found["logprobs"] == [None, -0.5]
    with pytest.raises(ValueError, match="JSON compliant"):  # elsewhere such a number is an error
        streams.write_json({"x": number})
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
def test_local_files_are_used_without_the_network(attempt: Try, model: Path, name: str) -> None:
    assert attempt(*command(name, model), before=NO_SOCKET).survived()


@pytest.mark.parametrize("name", ["org/name", "no-such-model"])
def test_missing_models_are_refused_offline(
    attempt: Try, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path.parent / f"{tmp_path.name}.hf"))
    attempt("generate", "a", "-m", name, before=NO_SOCKET).refused(name, "there is no file or folder")


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
    refused = attempt(*GENERATE, "-m", model, "--compile").refused(
        "/proc/self/cache", "leave compile (--compile) out", code=2
    )
    assert "CLEARLLAMA_CACHE" in refused


# -------------------------------------------------------------------------------------------------------- the extras
def without(*names: str) -> str:
    """Code that makes Python behave as if these packages were not installed."""
    return (
        "import importlib.util, sys\nreal = importlib.util.find_spec\n"
        f"for name in {names!r}: sys.modules[name] = None\n"
        f"importlib.util.find_spec = lambda name, package=None: None if name in {names!r} else real(name, package)\n"
    )


def test_figures_without_matplotlib_are_refused(attempt: Try, tmp_path: Path) -> None:
    for name in ("x.png", "x.svg", "folder"):
        args = ("study", "precision", "--figure", tmp_path / name)
        attempt(*args, before=without("matplotlib")).refused("pip install 'clearllama[study]'", code=2)
    table = attempt(
        "study", "precision", "--figure", tmp_path / "x.csv", before=without("matplotlib"), writes=("x.csv",)
    )
    assert table.survived()


# ------------------------------------------------------------------------------------------------------------ quiet
def test_quiet_also_silences_the_log_of_the_library(attempt: Try, model: Path) -> None:
    """The log line of a compilation is written without compiling."""
    log = (
        "import logging; from llama import loader\nreal = loader.build_plan\n"
        "def build_plan(*args, **options):\n"
        "    logging.getLogger('llama.engine.compiled').info('clearllama: compiling the decoding step')\n"
        "    return real(*args, **options)\n"
        "loader.build_plan = build_plan"
    )
    assert "clearllama: compiling the decoding step\n" in attempt(*GENERATE, "-m", model, before=log).error
    assert attempt(*GENERATE, "-q", "-m", model, before=log).error == ""
