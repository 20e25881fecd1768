"""The prompt of a command: argument, files and standard input."""

from __future__ import annotations

import argparse
import codecs
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama.cli.common import terminal
from llama.cli.common.arguments import PROMPT
from llama.cli.common.files import read_prompt
from llama.cli.common.parser import Parser, add
from llama.errors import UsageError

from .conftest import Run


def arguments(*words: str) -> argparse.Namespace:
    terminal.show_log(quiet=False)
    parser = Parser()
    add(parser, PROMPT)
    return argparse.Namespace(**vars(parser.parse_args(words)), command="generate")


NOTE = "clearllama: standard input is not part of the prompt; to read it, add -f -\n"


@pytest.mark.parametrize(
    ("words", "prompt", "reads"),
    [
        ((), "one\ntwo", True),
        (("-",), "one\ntwo", True),
        (("Sum:",), "Sum:", False),
        (("-p", "Sum:"), "Sum:", False),
        (("Sum:", "-f", "-"), "Sum:\n\none\ntwo", True),
        (("Sum:", "-f", "more", "-f", "-", "-f", "more"), "Sum:\n\nMORE\n\none\ntwo\n\nMORE", True),
        (("-", "-f", "more"), "one\ntwo\n\nMORE", True),
        (("-f", "more"), "MORE", False),
        (("", "-f", "empty"), "", False),
    ],
)
def test_standard_input_is_read_by_name_or_without_a_prompt(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    prompt: str,
    reads: bool,
) -> None:
    """What is not read stays for the shell's loop that owns it, and a line on stderr says so."""
    monkeypatch.chdir(tmp_path)
    for name, data in {"more": "MORE\n", "empty": ""}.items():
        Path(name).write_text(data)
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\n")
    os.close(writer)
    before = os.dup(0)
    os.dup2(reader, 0)
    try:
        with os.fdopen(reader, "rb") as pipe:
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=pipe, isatty=pipe.isatty))
            assert read_prompt(arguments(*words)) == prompt
            assert pipe.read() == (b"" if reads else b"one\ntwo\n")
    finally:
        os.dup2(before, 0)
        os.close(before)
    assert capfd.readouterr().err == ("" if reads else NOTE)


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
        (("a", "-p", "b"), "given twice"),
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
