"""The prompt of a command: argument, files and standard input, and a standard input that belongs to somebody else."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from llama.cli import piped
from llama.cli.prompt import add_prompt_options, read_prompt
from llama.errors import UsageError

from .conftest import Run

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

# Prints the prompt as one line of JSON, or the error. llama.cli is imported without its commands, which take longer.
ASK = """
import argparse, json, sys, types
package = types.ModuleType("llama.cli")
package.__path__ = [sys.argv.pop(1)]
sys.modules["llama.cli"] = package
from llama.cli import piped
from llama.cli.prompt import add_prompt_options, read_prompt
from llama.errors import UsageError
piped.WAIT = 0.3
parser = argparse.ArgumentParser()
add_prompt_options(parser)
args = argparse.Namespace(**vars(parser.parse_args()), quiet=False, command="generate")
try:
    print(json.dumps(read_prompt(args)))
except UsageError as error:
    sys.exit(str(error))
"""


@dataclass
class Case:
    """A shell command in which $ASK is the command with a prompt, the prompts it finds, and a part of its stderr."""

    script: str
    prompts: list[str]
    says: str = ""
    shell: str = "sh"


BOTH, PART, OTHER = ["Sum:\n\none\ntwo"], "is part of the prompt: 7 characters", "is not part of the prompt: "
CASES = {
    "pipe": Case("cat notes | $ASK Sum:", BOTH, PART),
    "redirection": Case("$ASK Sum: < notes", BOTH, PART),
    "here document": Case("$ASK Sum: << END\none\ntwo\nEND", BOTH, PART, shell="bash"),
    "option": Case("cat notes | $ASK -p Sum:", BOTH, PART),
    "slow writer": Case("(sleep 2; cat notes) | $ASK Sum:", BOTH, PART),
    "wrapper": Case("cat notes | timeout 60 $ASK Sum:", BOTH, PART),
    "loop over a file": Case('while read -r x; do $ASK "$x"; done < notes', ["one", "two"], OTHER + "a part of"),
    "loop over a pipe": Case('cat notes | while read -r x; do $ASK "$x"; done', ["one", "two"], "may need it; to read it"),
    "script on standard input": Case(
        "(echo '$ASK one'; echo '$ASK two') | bash", ["one", "two"], "bash, which started", shell="bash"
    ),
    "script in a pipe": Case("cat notes | sh -c '$ASK a; $ASK b'", ["a", "b"], "sh, which started"),
    "xargs": Case("cat notes | xargs -n 1 $ASK", ["one", "two"]),
    "null device": Case("$ASK hi < /dev/null", ["hi"]),
    "closed": Case("$ASK hi <&-", ["hi"]),
    "empty file": Case("$ASK hi < empty", ["hi"]),
    "empty pipe": Case("true | $ASK hi", ["hi"]),
    "empty pipe of the caller": Case("true | (sleep 0.2; $ASK a; $ASK b)", ["a", "b"]),
    "empty line": Case("echo | $ASK hi", ["hi"]),
    "end of the caller's file": Case("(cat > /dev/null; $ASK hi) < notes", ["hi"]),
    "file": Case("$ASK -f notes < /dev/null", ["one\ntwo"]),
    "argument and file": Case("$ASK Sum: --file notes < /dev/null", BOTH),
    "all three": Case("cat notes | $ASK Sum: -f more -f more", ["Sum:\n\nMORE\n\nMORE\n\none\ntwo"], PART),
    "dash as file": Case("cat notes | $ASK Sum: -f -", BOTH),
    "dash in a loop": Case("cat notes | while read -r x; do $ASK \"$x\" -f -; done", ["one\n\ntwo"]),
    "dash as prompt": Case("cat notes | $ASK - -f more", ["one\ntwo\n\nMORE"]),
    "no argument": Case("cat notes | sh -c '$ASK'", ["one\ntwo"]),
    "not text": Case("$ASK hi < binary", [], "standard input is not UTF-8: byte 0"),
}  # fmt: skip


@linux
def test_standard_input_is_used_where_it_belongs_to_the_command(tmp_path: Path) -> None:
    """All cases run at once, since some of them wait."""
    for name, data in {"notes": b"one\ntwo\n", "more": b"MORE\n", "empty": b"", "binary": b"\xff\n"}.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "ask.py").write_text(ASK)
    env = {**os.environ, "ASK": f"{sys.executable} -S {tmp_path / 'ask.py'} {Path(piped.__file__).parent}"}
    env["PYTHONPATH"] = str(Path(piped.__file__).parents[2])
    settings = {"cwd": tmp_path, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = {
        name: subprocess.Popen([case.shell, "-c", case.script], stdin=subprocess.DEVNULL, **settings)  # type: ignore[call-overload]
        for name, case in CASES.items()
        if shutil.which(case.shell)
    }
    for name, process in running.items():
        out, err = process.communicate(timeout=60)
        case = CASES[name]
        assert [json.loads(line) for line in out.splitlines()] == case.prompts, (name, err)
        assert case.says in err, name
        waited = err.splitlines()[:1] == ["clearllama: waiting for standard input from another program"]
        assert len(err.splitlines()) - waited == 0 if not case.says else err, (name, err)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_prompt_options(parser)
    return argparse.Namespace(**vars(parser.parse_args(words)), quiet=False, command="generate")


class Stdin:
    """A standard input with a descriptor."""

    def __init__(self, descriptor: int):
        self.buffer = os.fdopen(descriptor, "rb")
        self.fileno, self.isatty = self.buffer.fileno, self.buffer.isatty


@linux
def test_an_open_pipe_without_data_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(piped, "WAIT", 0.01)
    reader, writer = os.pipe()
    near, far = socket.socketpair()
    for descriptor in (reader, near.detach()):
        monkeypatch.setattr(sys, "stdin", Stdin(descriptor))
        assert read_prompt(arguments("hi")) == "hi"
        assert "no data arrived within" in capsys.readouterr().err
    os.close(writer)
    far.close()


@linux
def test_a_pipe_that_another_program_writes_is_awaited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(piped, "WAIT", 0.01)
    reader, writer = os.pipe()
    child = subprocess.Popen(["sh", "-c", "sleep 0.3; echo late"], stdout=writer)
    os.close(writer)
    monkeypatch.setattr(sys, "stdin", Stdin(reader))
    assert read_prompt(arguments("Sum:")) == "Sum:\n\nlate"
    assert "waiting for standard input from another program" in capsys.readouterr().err
    child.wait()


def test_data_of_a_socket_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = socket.socketpair()
    far.sendall(b"notes\n")
    far.close()
    monkeypatch.setattr(sys, "stdin", Stdin(near.detach()))
    assert read_prompt(arguments("Sum:")) == "Sum:\n\nnotes"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-", "-f", "-"), "standard input was named twice"),
        (("-f", "-", "-f", "-"), "standard input was named twice"),
        (("a", "-p", "b"), "given twice"),
        (("-f", "no-such-file"), "no-such-file: No such file"),
        (("-f", "/dev/null"), "is a device"),
        (("-f", os.devnull.replace("null", "")), "Is a directory"),
    ],
)
def test_wrong_sources_are_errors(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_prompt(arguments(*words))


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match=r"--file .*empty is empty"):
        read_prompt(arguments("hi", "-f", str(tmp_path / "empty")))


def test_generate_answers_the_joined_prompt(clearllama: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("hello\n")
    command = ("generate", "-m", str(tiny_gguf), "--json", "-n", "5", "--temp", "2", "--seed", "1")
    whole = json.loads(clearllama(*command, "the\n\nhello").stdout)
    for words, stdin in ((("the",), b"hello\n"), (("the", "-f", str(tmp_path / "notes")), None)):
        done = clearllama(*command, *words, stdin=stdin)
        answer = json.loads(done.stdout)
        assert {**answer, "stats": None} == {**whole, "stats": None}
        assert (b"is part of the prompt: 5 characters" in done.stderr) == (stdin is not None)
    assert (
        b"--prompts reads the prompts from x: leave --file out"
        in clearllama(*command[:3], "--prompts", "x", "-f", "y").stderr
    )


def test_trace_reads_the_same_sources(clearllama: Run, tiny_gguf: Path) -> None:
    done = clearllama("trace", "-m", str(tiny_gguf), "the", "--json", stdin=b"hello\n")
    assert json.loads(done.stdout)["prompt"] == "the\n\nhello"
