"""The prompt of a command: argument, files and standard input."""

from __future__ import annotations

import argparse
import codecs
import io
import json
import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama.cli.common import files, terminal
from llama.cli.common.arguments import PROMPT
from llama.cli.common.files import read_prompt
from llama.cli.common.parser import Parser, add
from llama.errors import UsageError

from .conftest import Run
from .patience import PATIENCE


def arguments(*words: str) -> argparse.Namespace:
    terminal.show_log(quiet=False)
    parser = Parser()
    add(parser, PROMPT)
    return argparse.Namespace(**vars(parser.parse_args(words)), command="generate")


NOTE = "clearllama: standard input ({} characters) ends the prompt; < /dev/null leaves it out\n"


@contextmanager
def standard_input(descriptor: int) -> Iterator[None]:
    """Make an open file or pipe standard input; close it at the end."""
    before = os.dup(0)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    with pytest.MonkeyPatch.context() as patch, os.fdopen(0, "rb", closefd=False) as stream:
        patch.setattr(sys, "stdin", SimpleNamespace(buffer=stream, isatty=stream.isatty))
        yield
    os.dup2(before, 0)
    os.close(before)


def pipe(data: bytes) -> int:
    """The end to read of a pipe with this content."""
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    return reader


@pytest.mark.parametrize(
    ("words", "prompt", "noted"),
    [
        ((), "one\ntwo", False),
        (("-",), "one\ntwo", False),
        (("Sum:",), "Sum:\n\none\ntwo", True),
        (("-p", "Sum:"), "Sum:\n\none\ntwo", True),
        (("Sum:", "-f", "-"), "Sum:\n\none\ntwo", False),
        (("Sum:", "-f", "more", "-f", "-", "-f", "more"), "Sum:\n\nMORE\n\none\ntwo\n\nMORE", False),
        (("-", "-f", "more"), "one\ntwo\n\nMORE", False),
        (("Sum:", "-f", "more"), "Sum:\n\nMORE\n\none\ntwo", True),
        (("", "-f", "empty"), "one\ntwo", True),
    ],
)
@pytest.mark.parametrize("source", ["pipe", "file"])
def test_standard_input_follows_the_prompt_or_stands_at_its_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    source: str,
    words: tuple[str, ...],
    prompt: str,
    noted: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in {"more": "MORE\n", "empty": "", "input": "one\ntwo\n"}.items():
        Path(name).write_text(data)
    with standard_input(pipe(b"one\ntwo\n") if source == "pipe" else os.open("input", os.O_RDONLY)):
        assert read_prompt(arguments(*words)) == prompt
    assert capfd.readouterr().err == (NOTE.format(8) if noted else "")


def test_what_adds_nothing_to_a_prompt(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch) -> None:
    """An empty pipe or file, a device, a socket, a terminal, and standard input that is closed."""
    (tmp_path / "empty").touch()
    near, far = socket.socketpair()
    far.send(b"text")
    _, terminal = os.openpty()
    empty, null = os.open(tmp_path / "empty", os.O_RDONLY), os.open("/dev/zero", os.O_RDONLY)
    for descriptor in (pipe(b""), empty, null, near.detach(), terminal):
        with standard_input(descriptor):
            assert read_prompt(arguments("Sum:")) == "Sum:"
    monkeypatch.setattr(sys, "stdin", None)
    assert read_prompt(arguments("Sum:")) == "Sum:"
    assert capfd.readouterr().err == ""


def test_a_loop_over_a_file_keeps_its_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The shell has read one line. What is left stays, and a line on stderr says so."""
    (tmp_path / "lines").write_bytes(b"one\ntwo\n")
    with standard_input(os.open(tmp_path / "lines", os.O_RDONLY)):
        assert os.read(0, 4) == b"one\n"
        assert read_prompt(arguments("one")) == "one"
        assert os.read(0, 9) == b"two\n"
        assert "not part of the prompt, since a part of the file was read before" in capfd.readouterr().err
        assert read_prompt(arguments("two")) == "two"
    assert capfd.readouterr().err == ""


def test_a_line_says_that_a_pipe_is_awaited(monkeypatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.01)
    reader, writer = os.pipe()
    with standard_input(reader), ThreadPoolExecutor() as pool:
        prompt = pool.submit(read_prompt, arguments("Sum:"))
        said = ""
        while "waiting for standard input, a pipe; < /dev/null leaves it out\n" not in said:
            said += capfd.readouterr().err
        os.write(writer, b"late")
        os.close(writer)
        assert prompt.result(PATIENCE) == "Sum:\n\nlate"


@pytest.mark.parametrize("data", [b"one", b"one\n", b"one\r\n", b"\xef\xbb\xbfone\r\n"])
def test_every_source_of_a_prompt_has_the_same_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """A byte order mark and one line end are not part of the text; spaces and further line ends are."""
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False))
    assert read_prompt(arguments("-f", str(tmp_path / "file"))) == read_prompt(arguments("-")) == "one"
    assert read_prompt(arguments(" one \n\r\n")) == " one \n"
    for_argument = data.removeprefix(codecs.BOM_UTF8).decode()
    assert read_prompt(arguments(for_argument)) == "one"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-f", "no-such-file"), "no-such-file: No such file"),
        (("-f", "/dev/null"), "is a device"),
        (("-f", os.devnull.replace("null", "")), "Is a directory"),
    ],
)
def test_wrong_sources_are_errors(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_prompt(arguments(*words))


def test_commands_use_the_joined_prompt(clearllama: Run, tiny_gguf: Path) -> None:
    command = ("generate", "-m", str(tiny_gguf), "--json", "-n", "5", "--temp", "2", "--seed", "1")
    whole, joined = clearllama(*command, "the\n\nhello"), clearllama(*command, "the", "-f", "-", stdin=b"hello\n")
    assert {**json.loads(whole.stdout), "stats": None} == {**json.loads(joined.stdout), "stats": None}
    done = clearllama("trace", "-m", str(tiny_gguf), "the", "-f", "-", "--json", stdin=b"hello\n")
    assert json.loads(done.stdout)["prompt"] == "the\n\nhello"
