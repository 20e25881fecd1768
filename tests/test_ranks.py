"""Commands under torchrun: the answers of one process, and one line and a quick end if a rank fails."""

from __future__ import annotations

import argparse
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama.cli import build_parser, ranks
from llama.engine import parallel, runtime
from llama.errors import UsageError

from . import tiny

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchrun on one Linux host")
ROOT = Path(__file__).resolve().parent.parent
SLOW = pytest.mark.slow
OPTIONS = ("--dtype", "float32", "--device", "cpu")


def launch(size: int, *args: Any, module: str = "llama", **more: Any) -> subprocess.Popen[str]:
    """Start a command with torchrun."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    run += ["--no-python", module] if "/" in module else ["-m", module]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | more.pop("env", {})
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen([*run, *map(str, args)], env={**env, "PYTHONPATH": str(ROOT)}, text=True, **pipes)


def end(process: subprocess.Popen[str], text: str | None = None) -> tuple[str, list[str], str]:
    """Wait for torchrun: stdout, our lines on stderr, and all of stderr."""
    out, err = process.communicate(text, timeout=100)
    return out, [line for line in err.splitlines() if line.startswith("clearllama: ")], err


def errors(lines: list[str]) -> list[str]:
    return [line for line in lines if "error" in line or "interrupted" in line]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=SLOW)])
def test_an_answer_is_that_of_one_process_and_rank_0_writes_it(size: int, tiny_gguf: Path, clearllama: Any) -> None:
    args = (
        "generate",
        "-",
        "--raw",
        "-m",
        str(tiny_gguf),
        *OPTIONS,
        "-n",
        "20",
        "--json",
        "--temp",
        "1",
        "--seed",
        "3",
    )
    alone = clearllama(*args, stdin=b"hello there")
    out, lines, err = end(launch(size, *args, stdin=subprocess.PIPE), "hello there")
    assert json.loads(out)["tokens"] == json.loads(alone.stdout)["tokens"], err
    assert len(lines) == len(alone.stderr.decode().splitlines())
    assert f", {size} processes, loaded in" in lines[0]


@SLOW
def test_a_batch_resumes_and_has_the_answers_of_one_process(tiny_gguf: Path, tmp_path: Path, clearllama: Any) -> None:
    prompts = [{"prompt": "hello " * i, "max_new_tokens": 3 + i, "temperature": i % 2, "seed": i} for i in range(1, 10)]
    (tmp_path / "prompts").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    args = ("generate", "--raw", "-m", str(tiny_gguf), *OPTIONS, "--batch-size", "3", "--prompts")
    alone = clearllama(*args, str(tmp_path / "prompts")).stdout.decode().splitlines()
    found = tmp_path / "answers"
    for _ in range(2):
        lines = end(launch(2, *args, tmp_path / "prompts", "--output", found))[1]
        assert not errors(lines)
        answers = found.read_text().splitlines()
        assert [json.loads(a)["tokens"] for a in answers] == [json.loads(a)["tokens"] for a in alone]
        found.write_text("\n".join(answers[:4]) + "\n" + answers[4][:-5])
    assert "4 of 9 prompts are already answered" in " ".join(lines)


@SLOW
def test_a_chat_is_that_of_one_process(tiny_gguf: Path, clearllama: Any) -> None:
    turns = 'hello\n"""\ntwo\nlines\n"""\n/nothing\n/retry\n/save x\nbye\n'
    args = ("chat", "-m", str(tiny_gguf), *OPTIONS, "-n", "9", "--temp", "0", "--no-history")
    alone = clearllama(*args, stdin=turns.encode()).stdout.decode()
    out, lines, _ = end(launch(2, *args, stdin=subprocess.PIPE), turns)
    assert out == alone
    assert len(errors(lines)) == 2  # /nothing, and /save, which several processes do not support
    keyboard, terminal = pty.openpty()
    process = launch(2, *args, stdin=terminal)
    os.write(keyboard, b"hello\n")
    assert process.stderr is not None
    for text in process.stderr:
        if "prompt tokens" in text:
            break
    os.write(keyboard, b"/exit\n")
    assert alone.startswith(end(process)[0].strip())
    assert process.returncode == 0


PHASES = [(2, "1 decode kill"), (4, "2 load kill"), (4, "0 decode kill"), (2, "1 prefill kill"), (2, "1 decode raise")]


@SLOW
@pytest.mark.parametrize(("size", "fault"), PHASES)
def test_a_rank_that_fails_ends_all_with_one_line(size: int, fault: str, tiny_gguf: Path) -> None:
    args = ("generate", "hello", "--raw", "-m", tiny_gguf, *OPTIONS, "-n", "100")
    started = time.monotonic()
    process = launch(size, *args, module="tests.dying_rank", env={"CLEARLLAMA_TEST_FAULT": fault})
    _, lines, err = end(process)
    assert time.monotonic() - started < 15 + 10  # 10 to start
    assert process.returncode != 0
    assert len(errors(lines)) == 1, err
    expected = "rank 1: out of memory (simulated)" if "raise" in fault else "another rank ended"
    assert expected in errors(lines)[0]


@SLOW
@pytest.mark.parametrize(("number", "line"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "torchrun was stopped")])
def test_a_signal_to_torchrun_ends_all_ranks(number: int, line: str, tiny_gguf: Path) -> None:
    process = launch(2, "generate", "hello", "--raw", "-m", tiny_gguf, *OPTIONS, "-n", "250")
    assert process.stderr is not None
    for text in process.stderr:
        if "processes, loaded" in text:
            break
    started = time.monotonic()
    process.send_signal(number)
    _, lines, err = end(process)
    assert time.monotonic() - started < 15
    assert len(errors(lines)) == 1, err
    assert line in errors(lines)[0]


@SLOW
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("-n 8", "rank 1 has other options than rank 0"),
        ("cd other", "rank 1 has other model files than rank 0"),
        ("cd missing", "rank 1: "),
    ],
)
def test_other_options_or_files_are_one_line(other: str, message: str, tmp_path: Path) -> None:
    for seed, folder in enumerate((".", "other", "missing")):
        (tmp_path / folder).mkdir(exist_ok=True)
        if folder != "missing":
            tiny.write_gguf(tmp_path / folder / "m.gguf", tiny.CONFIG, tiny.weights(tiny.CONFIG, seed=seed))
    command = f"{sys.executable} -m llama generate hello --raw -m m.gguf {' '.join(OPTIONS)}"
    first, changed = (f"{other} && ", "") if other.startswith("cd") else ("", other)
    script = tmp_path / "rank.sh"
    script.write_text(f"#!/bin/sh\nif [ $RANK = 1 ]; then {first} exec {command} {changed}; fi\nexec {command}\n")
    script.chmod(0o755)
    _, lines, err = end(launch(2, module=str(script), cwd=tmp_path))
    assert len(errors(lines)) == 1, err
    assert message in errors(lines)[0]


# ------------------------------------------------------------------------------------------------------- one process
def parsed(command: str) -> argparse.Namespace:
    return build_parser().parse_args(command.split())


@pytest.mark.parametrize(
    ("command", "size", "message"),
    [
        ("generate x --tensor-parallel 8", 1, r"type: torchrun --nproc-per-node 8 -m llama generate 'a b'$"),
        ("chat --tensor-parallel 4", 2, "found 2; type: torchrun --nproc-per-node 4 "),
        ("chat --pipeline-parallel 2", 1, "use --tensor-parallel with torchrun, or vLLM"),
        ("bench", 2, "clearllama bench runs in one process; start it without torchrun"),
        ("perplexity x", 2, "clearllama perplexity runs in one process"),
        *((f"generate x --{name} y", 2, f"--{name} does not support") for name in ("draft", "steer", "save-session")),
        ("generate x --compile", 2, "--compile does not support several processes"),
        ("generate x --gpu-layers 0", 2, "--gpu-layers does not support several processes"),
    ],
)
def test_what_does_not_fit_the_number_of_processes_is_refused(command: str, size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ranks.check(parsed(command), ["generate", "a b"], size)


def test_what_fits_is_accepted() -> None:
    for command, size in (
        ("generate x --tensor-parallel 2", 2),
        ("chat", 2),
        ("generate x --compile", 1),
        ("bench", 1),
    ):
        ranks.check(parsed(command), [], size)
    ranks.check(parsed("plan -m x --gpus 8xH100 --tensor-parallel 4 --pipeline-parallel 2"), [], 1)
    assert ranks.first(parsed("chat"), lambda: 5) == 5


def test_ranks_share_the_cores_and_only_rank_0_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: list[str] = []
    world = SimpleNamespace(on_this_host=2, device="cpu", check_same=lambda what, fact: facts.append(fact))
    monkeypatch.setattr(parallel, "join", lambda *args: world)
    monkeypatch.setattr(ranks, "available_cores", lambda allowed: 6)
    threads: list[int] = []
    monkeypatch.setattr(runtime, "set_threads", threads.append)
    for number, (chosen, variable) in enumerate((("", "1"), ("", "5"), ("--threads 1", "1"))):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        args = parsed(f"generate --prompts x --output y {chosen}")
        ranks.join(args, None, number, 2)
        assert (args.output, args.quiet) == (None if number else "y", bool(number))
    assert threads == [3]  # half of the cores, unless the user has chosen
    assert facts[0] == facts[2]  # the number of threads may differ
