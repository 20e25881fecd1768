"""A wrong option or command: one line that names the right one."""

from __future__ import annotations

import pytest

from llama import cli
from llama.cli import suggestions

PARSER = cli.build_parser()
KNOWN = {name: suggestions.options_of(parser) for name, parser in suggestions.commands_of(PARSER).items()}


def error_of(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a command prints when it ends with exit code 2."""
    with pytest.raises(SystemExit) as left:
        cli.main(words.split())
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1)
    return err


def test_every_suggestion_is_an_option_and_no_other_name_is_one() -> None:
    assert set(suggestions.ALSO_CALLED) <= KNOWN["generate"] | KNOWN["convert"]
    assert not suggestions.OURS.keys() & (KNOWN["generate"] | KNOWN["chat"])
    names = " ".join(suggestions.ALSO_CALLED.values()).split()
    assert len(names) == len(set(names)) == len(suggestions.OURS)  # each name means one option


@pytest.mark.parametrize("command", KNOWN)
def test_every_option_is_found_from_its_other_spellings(command: str) -> None:
    for option in KNOWN[command]:
        if option.startswith("--"):
            for wrong in (option.replace("-", "_").replace("__", "--", 1), option[1:], option.upper(), f"{option}=5"):
                assert suggestions.suggest(wrong, KNOWN[command]) == option


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("generate hi --top_p 0.9", "--top-p"),
        ("generate hi --max-tokens 5", "--max-new-tokens"),
        ("generate hi --max_tokens=5", "--max-new-tokens"),
        ("generate hi --n-predict 5", "--max-new-tokens"),
        ("generate hi --n_predict 5", "--max-new-tokens"),
        ("generate hi --ctx-size 5", "--max-seq-len"),
        ("generate hi -c 5", "--max-seq-len"),
        ("generate hi --n-gpu-layers 5", "--gpu-layers"),
        ("generate hi -ngl 5", "--gpu-layers"),  # argparse reads -n gl
        ("generate hi -hf a/b", "--model"),  # argparse reads -h
        ("generate hi -md x.gguf", "--draft"),  # argparse reads -m d
        ("generate hi -top_p 1", "--top-p"),
        ("generate hi --temperatur=1", "--temperature"),
        ("generate hi --promt x", "--prompt"),
        ("chat -sys x", "--system"),
        ("generate -help", "--help"),
        ("inspect --contxt 5", "--context"),
        ("--versio", "--version"),
    ],
)
def test_a_wrong_option_suggests_the_right_one(words: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = next(word for word in words.split() if word.startswith("-")).partition("=")[0]
    assert f"error: unrecognized arguments: {wrong}; did you mean {meant}?" in error_of(words, capsys)


def test_several_wrong_options_are_all_named(capsys: pytest.CaptureFixture[str]) -> None:
    line = error_of("generate hi --top_p 1 --foo --ctx-size 3 there", capsys)
    assert "unrecognized arguments: --top_p, --foo, --ctx-size; did you mean --top-p and --max-seq-len?" in line


@pytest.mark.parametrize(
    ("command", "option"),
    [("generate hi", "--stream"), ("chat", "--raw"), ("inspect", "--device"), ("generate hi", "--foo=1")],
)
def test_nothing_is_suggested_for_an_option_unlike_all_others(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_of(f"{command} {option}", capsys)
    assert f"unrecognized arguments: {option}" in line
    assert "did you mean" not in line


def test_a_prompt_given_to_chat_is_told_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unrecognized arguments: Hello; chat takes no prompt: type it" in error_of("chat Hello", capsys)


@pytest.mark.parametrize("words", ["-m x generate hi", "--json generate hi", "--model=x generate hi"])
def test_an_option_before_the_command_is_explained(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = words.split()[0].partition("=")[0]
    assert f"error: {option} belongs after a command, as in: clearllama generate {option} ..." in error_of(
        words, capsys
    )


def test_a_misspelled_command_suggests_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "error: unknown command 'genrate'; did you mean generate?" in error_of("genrate hi", capsys)
    assert "did you mean" not in error_of("frobnicate", capsys)


@pytest.mark.parametrize("words", ["-mtiny.gguf x", "-n5 x", "-qn 5 x", "x -- -ngl", "x --stop=-ngl", "-5", "-p x"])
def test_right_options_pass(words: str) -> None:
    suggestions.check(PARSER, ["generate", *words.split()])
    _, rest = PARSER.parse_known_args(["generate", *words.split()])
    assert rest == (["-ngl"] if words == "x -- -ngl" else [])  # there it is a second prompt
