"""--json means the same in every command: one JSON value on stdout and nothing else there; errors on stderr."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from llama import cli

from . import tiny
from .conftest import Run

Words = Callable[[str, Path], tuple[str, ...]]  # a model and a free folder -> the arguments of a command

# What each command needs; those that take seconds are in SLOW.
SMALL = ("--prompt-tokens", "8", "--new-tokens", "2", "--reps", "1", "--dtype", "float32")
RUNS: dict[str, Words] = {
    "generate": lambda model, new: ("generate", "-m", model, "hello", "-n", "3", "--logprobs"),
    "chat": lambda model, new: ("chat", "-m", model, "-n", "3"),
    "inspect": lambda model, new: ("inspect", model),
    "plan": lambda model, new: ("plan", "-m", model, "--gpus", "1xH100", "--context", "64"),
    "convert": lambda model, new: ("convert", model, str(new / "x.gguf"), "--to", "gguf"),
    "quantize --list": lambda model, new: ("quantize", "--list"),
    "list": lambda model, new: ("list",),
    "verify": lambda model, new: ("verify", model),
    "tokenize": lambda model, new: ("tokenize", "-m", model, "hello"),
    "perplexity": lambda model, new: ("perplexity", str(new / "text"), "-m", model),
    "study": lambda model, new: ("study", "pairing"),
    "study bugs": lambda model, new: ("study", "bugs", "step"),
    "trace": lambda model, new: ("trace", "-m", model, "hello"),
    "explain": lambda model, new: ("explain", "-m", model, "--text", "hello"),
}
SLOW: dict[str, Words] = {
    "doctor": lambda model, new: ("doctor", "--no-self-test"),
    "bench": lambda model, new: ("bench", "-m", model, *SMALL),
    "quantize": lambda model, new: ("quantize", model, str(new / "x"), "--scheme", "int8"),
}
# Arguments that make commands fail after they have begun; the others get a wrong model
WRONG: dict[str, Words] = {
    "perplexity": lambda model, new: ("perplexity", str(new / "text"), "-m", model, "--window", "9999"),
    "plan": lambda model, new: ("plan", "-m", model, "--gpus", "1xNone"),
    "convert": lambda model, new: ("convert", model, str(new / "text"), "--to", "gguf"),
    "quantize": lambda model, new: ("quantize", model, str(new / "x"), "--scheme", "none-such"),
    "bench": lambda model, new: ("bench", "-m", model, *SMALL[2:], "--prompt-tokens", "9999"),
    "study": lambda model, new: ("study", "none-such"),
    "trace": lambda model, new: ("trace", "-m", model, "hello the", "--max-tokens", "1"),
    "explain": lambda model, new: ("explain", "-m", model, "--text", "hello", "--layer", "99"),
}


def value_of(done: subprocess.CompletedProcess[bytes]) -> object:
    """The only JSON value on stdout. Python's NaN and Infinity are no JSON."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    text = done.stdout.decode()
    assert text.endswith("\n")
    return json.loads(text, parse_constant=refuse)


def test_every_command_with_the_option_is_tested() -> None:
    parsers = cli.build_parser().commands
    having = {name for name, parser in parsers.items() if "--json" in parser.format_help()}
    assert having == {name.split()[0] for name in (*RUNS, *SLOW)}


@pytest.fixture
def new(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text("the hello the hello the " * 3)
    return tmp_path


@pytest.mark.parametrize("name", RUNS)
def test_json_is_one_value_on_stdout(clearllama: Run, tiny_gguf: Path, new: Path, name: str) -> None:
    turn = b"hello\n" if name == "chat" else None  # each turn is a value
    done = clearllama(*RUNS[name](str(tiny_gguf), new), "--json", stdin=turn)
    assert done.returncode in (0, 1), done
    assert isinstance(value_of(done), dict)
    assert not any(line.startswith((b"{", b"[")) for line in done.stderr.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_json_of_longer_runs_is_one_value_on_stdout(clearllama: Run, new: Path, name: str) -> None:
    model = tiny.write_gguf(new / "wide.gguf", tiny.WIDE)
    done = clearllama(*SLOW[name](str(model), new), "--json")
    assert isinstance(value_of(done), dict), done


@pytest.mark.parametrize("name", [*WRONG, "inspect", "verify", "generate", "chat"])
def test_a_failure_leaves_stdout_empty(clearllama: Run, tiny_gguf: Path, new: Path, name: str) -> None:
    words = WRONG[name](str(tiny_gguf), new) if name in WRONG else RUNS[name]("no-such-model", new)
    done = clearllama(*words, "--json", "--quiet")
    assert done.returncode in (1, 2)
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1
    assert b"error: " in done.stderr
