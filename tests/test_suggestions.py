"""A wrong option or command: one line that names the right one."""

from __future__ import annotations

import pytest

from llama import cli


def error_of(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a command prints when it ends with exit code 2."""
    with pytest.raises(SystemExit) as left:
        cli.main(words.split())
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1)
    return err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("generate hi --top_p 0.9", "unrecognized arguments: --top_p 0.9; did you mean --top-p?"),
        ("generate hi --max-tokens 5", "did you mean --max-new-tokens?"),
        ("generate hello there", "unrecognized arguments: there; a prompt of several words needs quotes"),
        ("chat Hello", "unrecognized arguments: Hello (see clearllama chat --help)"),
        ("plan -m x --gpus H100 --gpus-per-host 4", "; plan divides the bytes evenly"),
        ("-m x generate hi", "expected a command first, as in clearllama generate TEXT, got '-m'"),
        ("genrate hi", "got 'genrate'; did you mean generate?"),
        ("frobnicate", "got 'frobnicate' (see clearllama --help)"),
    ],
)
def test_a_wrong_word_is_explained(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in error_of(words, capsys)


@pytest.mark.parametrize("words", ["-mtiny.gguf x", "-n5 x", "-qn 5 x", "x --stop=-ngl", "-5", "-p x", "-- -ngl"])
def test_right_options_pass(words: str) -> None:
    assert cli.parse(["generate", *words.split()]).command == "generate"
