"""`generate --prompts`: order, ids, errors per line, and resuming an interrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from llama import cli, loader
from llama.cli import batch
from llama.text import Llama

from . import tiny
from .conftest import Run

Lines = list[dict[str, Any]]
Command = Callable[..., int]


@pytest.fixture
def main(tiny_llm: Llama, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command in this process on a loaded model. Returns the exit code."""
    monkeypatch.setattr(loader, "load", lambda *_, **__: tiny_llm)
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
    result = clearllama(
        "generate", "-m", str(tiny_gguf), "--prompts", "-", "-n", "3", stdin=b'{"prompt": "caf\xc3\xa9"}\r\n{"prompt": "b"}'
    )  # fmt: skip
    assert result.returncode == 0
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(answer["id"], answer["prompt"]) for answer in answers] == [(1, "caf\xe9"), (2, "b")]
    assert b"2 prompts, 6 new tokens" in result.stderr


def test_a_terminal_shows_a_progress_bar(tiny_gguf: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [{"prompt": "hello"}] * 3)
    args = ["-m", "llama", "generate", "-m", str(tiny_gguf), "--prompts", str(source), "-n", "4"]
    child = pexpect.spawn(sys.executable, [*args, "--output", str(tmp_path / "out")], timeout=60, dimensions=(24, 120))
    child.expect(rb"prompts: 100%.*3/3.*tok/s")
    child.expect(pexpect.EOF)
    assert child.wait() == 0
    assert len(read(tmp_path / "out")) == 3


def test_a_prompt_that_cannot_run_becomes_an_error_in_the_output(
    main: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"prompt": "hello"}
    lines: Lines = [
        {"id": "long", "prompt": "x " * 400}, good, {"prompt": "x" * 300}, good,
        {"messages": [{"role": "user", "content": "x" * 300}]}, good, {"prompt": "x" * 300},
    ]  # fmt: skip
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    args = ("--prompts", str(source), "--output", str(target), "-n", "4", "--batch-size", "2")
    assert main(*args) == 1
    answers = read(target)
    assert [set(answer) & {"error", "text"} for answer in answers] == [
        {"error"}, {"text"}, {"error"}, {"text"}, {"error"}, {"text"}, {"error"}
    ]  # fmt: skip
    assert "must hold prompt and answer" in answers[0]["error"]
    assert answers[0]["id"] == "long"
    assert "must hold prompt and answer" in answers[4]["error"]
    message = "4 of 7 prompts failed; the key 'error' in their output lines gives the reason"
    assert capsys.readouterr().err == f"clearllama: error: {message}\n"
    before = target.read_bytes()
    assert main(*args) == 1  # errors of an earlier run count, and nothing is run again
    assert target.read_bytes() == before


def test_an_output_of_errors_only_is_complete(main: Command, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in", [{"prompt": "x" * 300}] * 3), tmp_path / "out"
    assert main("--prompts", str(source), "--output", str(target)) == 1
    assert [answer["id"] for answer in read(target) if "error" in answer] == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "line 2 is empty"),
        (b"   ", "line 2 is empty"),
        (b"hello", "line 2 is not valid JSON"),
        (b'{"prompt": "a"', "line 2 is not valid JSON"),
        (b'["a"]', "line 2 must be an object, got ['a']"),
        (b'{"prompt": "\xff"}', "line 2 is not valid JSON"),
        (b'{"prompt": "a", "prompt": "b"}', "a key occurs twice"),
        (b'{"prompt": "a", "temperature": NaN}', "got nan"),
        (b'{"prompt": "a", "promt": "b"}', "line 2: unknown key 'promt'"),
        (b'{"id": 3}', "line 2 (id 3): expected either"),
        (b'{"prompt": "a", "messages": []}', "line 2: expected either"),
        (b'{"prompt": 5}', "line 2: prompt must be a string"),
        (b'{"prompt": null}', "line 2: prompt must be a string"),
        (b'{"messages": "a"}', "line 2: messages must be a list"),
        (b'{"prompt": "a", "id": null}', "line 2: id must be"),
        (b'{"prompt": "a", "id": true}', "line 2: id must be"),
        (b'{"prompt": "a", "id": 1.5}', "line 2: id must be"),
        (b'{"prompt": "a", "system": 1}', "line 2: system must be"),
        (b'{"messages": [], "system": "a"}', "line 2: a system message belongs in messages"),
        (b'{"prompt": "a", "temperature": -1}', "line 2: temperature must be"),
        (b'{"prompt": "a", "max_new_tokens": true}', "line 2: max_new_tokens must be"),
        (b'{"prompt": "a", "top_p": "x"}', "line 2: top_p must be"),
        (b'{"prompt": "a", "seed": -1}', "line 2: seed must be"),
        (b'{"prompt": "a", "stop": ""}', "line 2: stop must be"),
        (b'{"prompt": "a", "stop": ["b", 1]}', "line 2: stop must be"),
        (b'{"prompt": "a", "stop": null}', "line 2: stop must be a string or a list of strings, got null"),
        (b'{"prompt": ["a"]}', 'line 2: prompt must be a string, got ["a"]'),
        (b'{"prompt": "a", "temperature": null}', "line 2: temperature must be a number, got null"),
        (b'{"prompt": "a", "top_k": true}', "line 2: top_k must be a number, got true"),
        (b'{"prompt": "a", "id": "x", "seed": {}}', 'line 2 (id "x"): seed must be a number, got {}'),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "line 2 is not valid JSON"),
        (b'{"prompt": "a\\ud800"}', "line 2: 'prompt' contains '\\ud800', half of a surrogate pair"),
        (b'{"prompt": "a", "id": "\\udfff"}', "line 2: 'id' contains '\\udfff', half of"),
        (b'{"prompt": "a", "stop": ["b", "\\ud83d"]}', "line 2: 'stop' contains '\\ud83d', half of"),
        (b'{"prompt": "a", "system": "\\ud83d"}', "line 2: 'system' contains '\\ud83d', half of"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "line 2: 'messages' contains '\\ud83d', half of"),
        (b'{"prompt": "a", "\\udc00": 1}', "line 2: '\\udc00' contains '\\udc00', half of"),
        (b'{"id": 7, "messages": []}', "line 2 (id 7): messages must be a list with at least one message"),
        (b'{"messages": [{"role": "nobody", "content": "x"}]}', "line 2: message 0: role must be one of system, user,"),
        (b'{"messages": [{"content": "x"}]}', "line 2: message 0: role must be a string, got none"),
        (b'{"messages": [{"role": null, "content": "x"}]}', "line 2: message 0: role must be a string, got null"),
        (b'{"messages": [{"role": "user"}]}', "line 2: message 0: content must be a string, got none"),
        (b'{"messages": [{"role": "user", "content": null}]}', "line 2: message 0: content must be a string, got null"),
        (b'{"messages": [{"role": "user", "content": [{}]}]}', "line 2: message 0: content must be a string, got [{}]"),
        (b'{"messages": ["hello"]}', 'line 2: message 0 must be an object with role and content, got "hello"'),
        (b'{"prompt": "a", "id": 1}', "line 2 and line 1 both have the id 1 (default: the line number)"),
        (b'{"prompt": "a", "id": 3}', "line 3 and line 2 both have the id 3 (default: the line number)"),
    ],
)
def test_a_bad_line_is_reported_before_anything_is_loaded_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: bytes, message: str
) -> None:
    monkeypatch.setattr(loader, "load", lambda *_, **__: pytest.fail("loaded"))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'{"prompt": "fine"}\n' + line + b'\n{"prompt": "fine"}\n')
    assert cli.main(["generate", "--prompts", str(source), "--output", str(target)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert str(source) in error
    assert not target.exists()


def test_an_integer_id_and_a_string_id_are_different(
    main: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in", [{"prompt": "a"}, {"id": "1", "prompt": "b"}, {"id": "x", "prompt": "c"}])
    assert main("--prompts", str(source), "--output", str(tmp_path / "out"), "-n", "1") == 0
    assert [answer["id"] for answer in read(tmp_path / "out")] == [1, "1", "x"]
    write(source, [{"id": "x", "prompt": "a"}, {"prompt": "b"}, {"id": "x", "prompt": "a"}])
    assert main("--prompts", str(source), "-n", "1") == 2
    assert 'line 3 and line 1 both have the id "x"' in capsys.readouterr().err


def test_a_byte_order_mark_before_the_first_line_is_ignored(main: Command, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "\xef\xbb\xbfb"}\n')
    assert main("--prompts", str(source), "--output", str(tmp_path / "out"), "-n", "1") == 0
    assert [answer["prompt"] for answer in read(tmp_path / "out")] == ["a", "\ufeffb"]


NEEDS_A_CHAT = [
    ({"messages": [{"role": "user", "content": "b"}]}, "this model has no chat template"),
    ({"prompt": "a", "system": "b"}, "model has no chat template"),
]


@pytest.mark.parametrize(("line", "message"), NEEDS_A_CHAT)
def test_a_missing_chat_template_is_reported_before_weights_are_read(
    clearllama: Run, tmp_path: Path, line: dict[str, Any], message: str
) -> None:
    base = tiny.write_gguf(tmp_path / "base.gguf", metadata={"tokenizer.chat_template": None})
    source, target = write(tmp_path / "in", [{"prompt": "a"}, {"id": "b", **line}]), tmp_path / "out"
    args = ("generate", "-m", str(base), "--prompts", str(source), "--output", str(target), "-n", "1")
    result = clearllama(*args, env={"CLEARLLAMA_KERNELS": "sse9"})  # loading weights would refuse this
    assert result.returncode == 2
    [error] = result.stderr.decode().splitlines()
    assert error.startswith(f'clearllama: error: {source} line 2 (id "b"): ')
    assert message in error
    assert not target.exists()
    result = clearllama(*args, "--chat-format", "llama2")  # the vocabulary lacks the control tokens of this format
    assert result.returncode == 2
    assert b"line 2" in result.stderr


def test_roles_that_the_template_refuses_are_reported_before_anything_is_loaded(
    main: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_llm: Llama
) -> None:
    template = "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('the user speaks first') }}{% endif %}x"
    monkeypatch.setattr(batch, "chat_of", lambda args: Chat(tiny_llm.tokenizer, template, None))
    monkeypatch.setattr(loader, "load", lambda *_, **__: pytest.fail("loaded"))
    lines: Lines = [
        {"messages": [{"role": role, "content": "b"}]} for role in ("user", "user", "system", "assistant", "user")
    ]
    assert main("--prompts", str(write(tmp_path / "in", lines))) == 2
    error = capsys.readouterr().err
    assert "line 4 (id 4): " in error
    assert "the user speaks first" in error


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("hello",), "leave the PROMPT argument out"),
        (("-p", "hello"), "leave --prompt out"),
        (("--suffix", "x"), "leave --suffix out"),
        (("--draft", "ngram"), "leave --draft out"),
        (("--save-session", "x"), "leave --save-session out"),
        (("--load-session", "x"), "leave --load-session out"),
        (("--output", ""), "--output '': No such file"),
        (("--output", "no/such/folder/x"), "--output 'no/such/folder/x': No such file"),
        (("--json",), "leave --json out"),
        (("--batch-size", "0"), "--batch-size must be"),
        (("--batch-size", "99999"), "--batch-size must be"),
        (("--raw", "--system", "x"), "leave --raw out"),
        (("--temp", "-1"), "temperature must be"),
        (("--output", "IN"), "--output and --prompts name the same file"),
        (("--output", "."), "not a regular file"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl: No such file"),
        (("--prompts", "/dev/zero"), "is a device"),
        (("--prompts", os.devnull), "is a device"),
    ],
)
def test_contradicting_options_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(loader, "load", lambda *_, **__: pytest.fail("loaded"))
    source = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    given = [str(source) if arg == "IN" else arg for arg in args]
    assert cli.main(["generate", "--prompts", str(source), *given]) == 2
    assert message in capsys.readouterr().err


def test_the_output_dash_is_standard_output(
    main: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    assert main("--prompts", str(source), "--output", "-", "-n", "2") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "a"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("args", [("--output", "x"), ("--batch-size", "4")])
def test_options_for_many_prompts_need_prompts(capsys: pytest.CaptureFixture[str], args: tuple[str, ...]) -> None:
    assert cli.main(["generate", "hello", *args]) == 2
    assert "needs --prompts" in capsys.readouterr().err


def test_messages_need_a_chat(main: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}])
    for args in (("--raw",), ("--system", "x")):
        assert main("--prompts", str(source), *args) == 2
        assert "line 2" in capsys.readouterr().err
    write(source, [{"prompt": "a", "system": "b"}])
    assert main("--prompts", str(source), "--raw") == 2
    source.write_bytes(b"")
    assert main("--prompts", str(source)) == 2
    assert "is empty" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- resuming
@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_resumes_wherever_the_output_was_cut(
    step: int, main: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llm: Llama
) -> None:
    lines: Lines = [{"id": "\xe9", "prompt": "a"}, {"prompt": "x" * 260}, {"prompt": "b", "temperature": 3.0}]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    args = ("--prompts", str(source), "--output", str(target), "-n", "1", "--batch-size", "2", "--seed", "1")
    assert main(*args) == 1
    parsed = cli.build_parser().parse_args(["generate", "--quiet", *args])
    record = tmp_path / "out.jsonl.run.json"
    complete, made_with = target.read_bytes(), record.read_bytes()
    expected = comparable(read(target))
    ends = [at + 1 for at, byte in enumerate(complete) if byte == ord("\n")]
    encoded: list[int] = []
    encode = batch.encode
    monkeypatch.setattr(batch, "encode", lambda *a, **k: encoded.append(1) or encode(*a, **k))
    assert len(complete) > 600
    near_ends = {at for end in (0, *ends) for at in (end - 1, end, end + 1) if 0 <= at <= len(complete)}
    for cut in sorted(near_ends | set(range(0, len(complete), step))):
        target.write_bytes(complete[:cut])
        record.write_bytes(made_with)
        encoded.clear()
        assert parsed.run(parsed) == 1
        assert comparable(read(target)) == expected, cut
        done = sum(end <= cut for end in ends)
        kept = ends[done - 1] if done else 0
        assert target.read_bytes()[:kept] == complete[:kept]
        assert (done == 3) == (not encoded)  # answered prompts are not encoded again


def test_resuming_reports_the_removed_line_and_the_answers_kept(
    main: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write(tmp_path / "in", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "out"
    args = ["generate", "--prompts", str(source), "--output", str(target), "-n", "1"]
    assert main(*args[1:]) == 0
    target.write_bytes(target.read_bytes()[:-7])
    capsys.readouterr()
    assert cli.main(args) == 0
    error = capsys.readouterr().err
    assert "removed the incomplete last line" in error
    assert "resuming, 1 of 2 prompts are already answered" in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a poem\nof mine\n", "line 1 is not an answer"),
        (b"a poem without an end", "line 1 is not an answer"),
        (b'{"id": 1, "prompt": "b", "text": ""}\n', "line 1 has the prompt 'b'"),
        (b'{"id": 2, "prompt": "a", "text": ""}\n', "line 1 has the id 2"),
        (b'{"id": "1", "prompt": "a", "text": ""}\n', "line 1 has the id '1'"),
        (b'{"prompt": "a", "text": ""}\n', "line 1 has the id None"),
        (b'{"id": 1, "prompt": "a"}\n', "line 1 is not an answer"),
        (
            b'{"id": 1, "prompt": "a", "error": "x"}\n{"id": 2, "prompt": "c", "text": ""}\n',
            "line 2 has the prompt 'c'",
        ),
        (b'{"id": 1, "prompt": "a", "error": "x"}\n{"id": 2, "prompt": "c', "line 2 is not an answer"),
        (b'{"id": 1, "prompt": "a", "error": "x"}\n\n', "line 2 is not an answer"),
        (b'{"id": 1, "prompt": "a", "error": "x"}\n{"id": 2, "prompt": "b", "text": ""}\n{"id', "it has a line 3"),
    ],
)
def test_a_file_with_other_content_is_not_changed(
    main: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "out.jsonl"
    target.write_bytes(content)
    assert main("--prompts", str(source), "--output", str(target)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "--output" in error
    assert target.read_bytes() == content


def start(args: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "llama", "generate", *args], stderr=subprocess.PIPE)


def wait_until_larger(path: Path, size: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a file has more than `size` bytes or the process has ended."""
    until = time.monotonic() + 60
    while process.poll() is None and (not path.exists() or path.stat().st_size <= size):
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.mark.slow
def test_runs_that_are_killed_repeatedly_complete_the_same_file(main: Command, tiny_gguf: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", mixed(120, seed=3))
    once, target = tmp_path / "once.jsonl", tmp_path / "out.jsonl"
    model = ["-m", str(tiny_gguf), "--dtype", "float32"]
    args = [*model, "--prompts", str(source), "-n", "20", "--temp", "2", "--seed", "5"]
    assert main(*args, "--output", str(once)) == 0
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        process = start([*args, "--output", str(target)])
        wait_until_larger(target, target.stat().st_size if target.exists() else 0, process)
        process.send_signal(number)
        code = process.wait()
        assert code in (0, -number, 128 + number)
        data = target.read_bytes()
        answers = [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
        assert comparable(answers) == comparable(read(once)[: len(answers)])
    assert start([*args, "--output", str(target)]).wait() == 0
    assert comparable(read(target)) == comparable(read(once))


@pytest.mark.parametrize("to_file", [True, False])
def test_an_interrupt_reports_how_far_an_output_is(
    main: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], to_file: bool
) -> None:
    real = Llama.answers

    def interrupted(*args: Any, **options: Any) -> Iterator[Any]:
        for number, piece in real(*args, **options):
            yield number, piece
            if piece.completion is not None:
                raise KeyboardInterrupt

    monkeypatch.setattr(Llama, "answers", interrupted)
    source, target = write(tmp_path / "in", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "out"
    output = ["--output", str(target)] if to_file else []
    assert cli.main(["generate", "--prompts", str(source), *output, "-n", "1", "--batch-size", "1"]) == 130
    message = f"{target} has 1 of 2 answers; run the same command again to resume"
    assert (message in capsys.readouterr().err) == to_file


def test_a_second_writer_is_refused(main: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    source, target = write(tmp_path / "in", [{"prompt": "a"}]), tmp_path / "out"
    with open(target, "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main("--prompts", str(source), "--output", str(target)) == 2
        assert "is being written by another clearllama" in capsys.readouterr().err
    assert main("--prompts", str(source), "--output", str(target), "-n", "1") == 0
    assert len(read(target)) == 1


def test_two_processes_at_once_leave_one_complete_output(tiny_gguf: Path, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in", mixed(30)), tmp_path / "out"
    args = ["-m", str(tiny_gguf), "--prompts", str(source), "--output", str(target), "-n", "30"]
    both = [start(args), start(args)]
    ends = [(process.communicate()[1], process.returncode) for process in both]
    assert sorted(code for _, code in ends) in ([0, 2], [0, 0])  # [0, 0]: the second started after the first had ended
    assert all(code == 0 or b"is being written by another" in error for error, code in ends)
    assert len(read(target)) == 30


def test_a_full_disk_is_an_error_and_leaves_complete_lines(clearllama: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"prompt": f"hello {i}"} for i in range(20)]), tmp_path / "out.jsonl"
    command = ("generate", "-m", str(tiny_gguf), "--prompts", str(source), "-n", "3", "--output", str(target))
    limited = clearllama(*command, file_size=2000)
    assert limited.returncode == 1
    assert str(target).encode() in limited.stderr.splitlines()[-1]
    assert 0 < len(read(target)) < 20
    assert clearllama(*command).returncode == 0
    assert [answer["id"] for answer in read(target)] == list(range(1, 21))
