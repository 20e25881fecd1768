"""`generate --prompts`: order, ids, errors per line, and resuming an interrupted run."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama import cli
from llama.cli.common import loading
from llama.text import Llama

from .conftest import Run

Lines = list[dict[str, Any]]
Command = Callable[..., int]


@pytest.fixture
def main(tiny_llm: Llama, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command in this process on a loaded model. Returns the exit code."""
    monkeypatch.setattr(loading, "prepare", lambda _: (tiny_llm, lambda: None))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}

    def run(*args: str) -> int:
        try:
            return cli.main(["generate", "--quiet", *args])
        except SystemExit as left:
            return int(left.code or 0)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    return run


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a model is loaded."""
    monkeypatch.setattr(loading, "prepare", lambda _: pytest.fail("loaded"))


def write(path: Path, lines: Lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> Lines:
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.splitlines()]


def comparable(answers: Lines) -> Lines:
    """Answers without the statistics that differ between runs, except the seed."""
    return [{**answer, "stats": answer.get("stats", {}).get("seed")} for answer in answers]


def mixed(count: int, seed: int = 0) -> Lines:
    rng = random.Random(seed)
    made: Lines = []
    for i in range(count):
        line: dict[str, Any] = {"prompt": "hello " * rng.randint(0, 6) + rng.choice("abcdef")}
        if rng.random() < 0.3:
            line = {"messages": [{"role": "system", "content": "the"}, {"role": "user", "content": line["prompt"]}]}
        if rng.random() < 0.5:
            line = {"id": rng.choice([f"name {i}", 1000 + i]), **line}
        if rng.random() < 0.5:
            line |= {"max_new_tokens": rng.randint(0, 9), "temperature": 2.0, "seed": i}
        if rng.random() < 0.3:
            line |= {"stop": ["e", "\n"], "top_p": 0.9}
        made.append(line)
    return made


# ------------------------------------------------------------------------------------------------ prompts and answers
@pytest.mark.parametrize("size", ["1", "3", "50"])
def test_answers_have_the_ids_and_order_of_the_prompts_and_equal_single_runs(
    main: Command, tiny_llm: Llama, tmp_path: Path, size: str
) -> None:
    lines = mixed(12)
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    options = ("-n", "7", "--temp", "2", "--seed", "30", "--logprobs")
    assert main("--prompts", str(source), "--output", str(target), "--batch-size", size, *options) == 0
    answers = read(target)
    assert [answer["id"] for answer in answers] == [line.get("id", n) for n, line in enumerate(lines, 1)]
    for number, (line, answer) in enumerate(zip(lines, answers, strict=True), 1):
        kind = "prompt" if "prompt" in line else "messages"
        assert list(answer) == [
            "id", kind, "text", "tokens", "prompt_tokens", "finish_reason", "logprobs", "stats"
        ]  # fmt: skip
        assert answer[kind] == line[kind]
        own = {key: value for key, value in line.items() if key not in ("id", "prompt", "messages")}
        messages = line.get("messages") or [{"role": "user", "content": line["prompt"]}]
        settings = {"max_new_tokens": 7, "temperature": 2.0, "seed": 30 + number - 1, "logprobs": True, **own}
        alone = tiny_llm.chat(messages, **settings)
        assert (answer["text"], answer["tokens"]) == (alone.text, alone.tokens)
        assert answer["finish_reason"] == alone.finish_reason
        assert answer["logprobs"] == pytest.approx(alone.logprobs, abs=1e-4)
        assert answer["stats"]["seed"] == settings["seed"]
        assert answer["prompt_tokens"] == alone.stats.prompt_tokens
        assert set(answer["stats"]) == set(alone.stats.as_dict())


def test_raw_prompts_and_system_messages(main: Command, tiny_llm: Llama, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in", [{"prompt": "hello"}, {"prompt": "a", "system": "own"}]), tmp_path / "out"
    assert main("--prompts", str(source), "--output", str(target), "-n", "5", "--system", "common") == 0
    for answer, system, prompt in zip(read(target), ("common", "own"), ("hello", "a"), strict=True):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        assert answer["tokens"] == tiny_llm.chat(messages, max_new_tokens=5).tokens
    write(source, [{"prompt": "hello"}])
    target.unlink()
    assert main("--prompts", str(source), "--output", str(target), "-n", "5", "--raw") == 0
    assert read(target)[0]["tokens"] == tiny_llm.generate("hello", max_new_tokens=5).tokens


def test_prompts_from_a_pipe_are_answered_on_stdout(clearllama: Run, tiny_gguf: Path) -> None:
    """Ids keep their type, and a byte order mark is ignored."""
    prompts = b'\xef\xbb\xbf{"prompt": "caf\xc3\xa9"}\r\n{"id": "1", "prompt": "\xe2\x80\xa8b"}'
    args = ("generate", "-m", str(tiny_gguf), "--prompts", "-", "--output", "-", "-n", "3")
    result = clearllama(*args, stdin=prompts)
    assert result.returncode == 0
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(answer["id"], answer["prompt"]) for answer in answers] == [(1, "caf\xe9"), ("1", "\u2028b")]
    assert b"2 prompts, 6 new tokens" in result.stderr
    raw = clearllama(*args, "--raw", stdin=b'{"prompt": "a"}\n{"prompt": "a", "system": "b"}')
    assert (raw.returncode, raw.stdout) == (2, b"")
    assert b"line 2 needs a chat, but " in raw.stderr


def test_a_prompt_that_cannot_run_becomes_an_error_in_the_output(
    main: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: Lines = [{"id": "long", "prompt": "x " * 400}, {"prompt": "hello"}]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    args = ("--prompts", str(source), "--output", str(target), "-n", "4", "--batch-size", "2")
    assert main(*args) == 1
    answers = read(target)
    assert ["text" in answer for answer in answers] == [False, True]
    assert "must hold prompt and answer" in answers[0]["error"]
    assert capsys.readouterr().err.startswith("clearllama: error: 1 of 2 prompts failed")
    before = target.read_bytes()
    assert main(*args) == 1  # errors of an earlier run count, and nothing is run again
    assert target.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "is empty; expected an object"),
        ('{"prompt": "a", "prompt": "b"}', "a key occurs twice"),
        ('{"prompt": "a", "promt": "b"}', "unknown key 'promt'"),
        ('{"id": 3}', "expected either"),
        ('{"messages": "a"}', "must be"),
        ('{"messages": [{"role": "user", "content": "a"}], "system": "a"}', "include a system message"),
        ('{"prompt": "a", "id": true}', "id must be"),
        ('{"prompt": "a", "id": 1}', "line 1 has the same id 1"),
        ('{"prompt": "a", "temperature": NaN}', "temperature must be"),
        ('{"prompt": "a", "id": "\\udfff"}', "id must be valid Unicode"),
    ],
)
def test_a_bad_line_is_reported_before_anything_is_loaded_or_written(
    tmp_path: Path, refuse: None, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(f'{{"prompt": "fine"}}\n{line}\n{{"prompt": "fine"}}\n')
    assert cli.main(["generate", "--prompts", str(source), "--output", str(target)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert f"{source} line 2" in error
    assert not target.exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("hello",), "leave PROMPT out"),
        (("--draft", "ngram"), "leave --draft out"),
        (("--output", "no/such/folder/x"), "--output no/such/folder/x: expected a file in an existing folder"),
        (("--batch-size", "0"), "--batch-size must be"),
        (("--output", "IN"), "is missing; choose another --output"),
    ],
)
def test_contradicting_options_are_refused(
    tmp_path: Path, refuse: None, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    given = [str(source) if arg == "IN" else arg for arg in args]
    assert cli.main(["generate", "--prompts", str(source), *given]) == 2
    assert message in capsys.readouterr().err
    for alone in (("--output", "x"), ("--batch-size", "4")):
        assert cli.main(["generate", "hello", *alone]) == 2
        assert "needs --prompts" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- resuming
@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_resumes_wherever_the_output_was_cut(step: int, main: Command, tmp_path: Path) -> None:
    lines: Lines = [{"id": "\xe9", "prompt": "a"}, {"prompt": "x" * 260}, {"prompt": "b", "temperature": 3.0}]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    args = ("--prompts", str(source), "--output", str(target), "-n", "1", "--batch-size", "2", "--seed", "1")
    assert main(*args) == 1
    record = tmp_path / "out.jsonl.run.json"
    complete, made_with, expected = target.read_bytes(), record.read_bytes(), comparable(read(target))
    ends = [0, *(at + 1 for at, byte in enumerate(complete) if byte == ord("\n"))]
    near_ends = {at for end in ends for at in (end - 1, end, end + 1) if 0 <= at <= len(complete)}
    for cut in sorted(near_ends | set(range(0, len(complete), step))):
        target.write_bytes(complete[:cut])
        record.write_bytes(made_with)
        assert main(*args) == 1
        assert comparable(read(target)) == expected, cut
        kept = max(end for end in ends if end <= cut)
        assert target.read_bytes()[:kept] == complete[:kept]


def test_a_rerun_answers_the_ids_without_an_answer(
    main: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts may be added and reordered; an answered id may not get another prompt."""
    old: Lines = [{"id": "b", "prompt": "b"}, {"id": "a", "prompt": "a"}]
    new: Lines = [{"id": "c", "prompt": "c"}, *old[::-1], {"id": "d", "prompt": "d"}]
    source, target = write(tmp_path / "in", old), tmp_path / "out"
    args = ["--prompts", str(source), "--output", str(target), "-n", "1"]
    assert main(*args) == 0
    write(source, new)
    assert cli.main(["generate", *args]) == 0
    assert "resuming, 2 of 4 prompts are already answered" in capsys.readouterr().err
    assert [answer["id"] for answer in read(target)] == ["b", "a", "c", "d"]
    content = target.read_bytes()
    write(source, [*new[:3], {"id": "d", "prompt": "other"}])
    assert main(*args) == 2
    error = capsys.readouterr().err
    assert 'made with the prompt "d"; this run has "other"' in error
    assert target.read_bytes() == content


def test_a_second_writer_is_refused(main: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    source, target = write(tmp_path / "in", [{"prompt": "a"}]), tmp_path / "out"
    with open(target, "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main("--prompts", str(source), "--output", str(target)) == 2
        assert "is being written by another clearllama" in capsys.readouterr().err
    assert main("--prompts", str(source), "--output", str(target), "-n", "1") == 0
    assert len(read(target)) == 1


def test_a_full_disk_is_an_error_and_leaves_complete_lines(clearllama: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"prompt": f"hello {i}"} for i in range(20)]), tmp_path / "out.jsonl"
    command = ("generate", "-m", str(tiny_gguf), "--prompts", str(source), "-n", "3", "--output", str(target))
    limited = clearllama(*command, file_size=2000)
    assert limited.returncode == 1
    assert str(target).encode() in limited.stderr.splitlines()[-1]
    assert 0 < target.read_bytes().count(b"\n") < 20
    assert clearllama(*command).returncode == 0
    assert [answer["id"] for answer in read(target)] == list(range(1, 21))
