"""Commands under torchrun: the answers of one process, and one line and a quick end if a rank fails."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llama.cli import build_parser
from llama.cli.common import ranks
from llama.errors import UsageError

from .patience import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchrun on one Linux host")
ROOT = Path(__file__).resolve().parent.parent
SLOW = pytest.mark.slow


def launch(size: int, command: str, *args: Any, run: str = "-m llama", **more: Any) -> subprocess.Popen[str]:
    """Start a command in `size` processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | more.pop("env", {})
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    words = [*torchrun, *run.split(), *command.split(), *map(str, args)]
    return subprocess.Popen(words, env={**env, "PYTHONPATH": str(ROOT)}, text=True, **pipes)


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    next(line for line in process.stderr if text in line)


def end(process: subprocess.Popen[str], text: str | None = None) -> tuple[str, list[str], list[str]]:
    """Wait until all processes have ended: stdout, our lines on stderr, and those that are errors."""
    out, err = process.communicate(text, timeout=PATIENCE)
    lines = [line for line in err.splitlines() if line.startswith("clearllama: ")]
    return out, lines, [line for line in lines if "error" in line or "interrupted" in line]


GENERATE = "generate --raw --dtype float32 --device cpu -m"


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=SLOW)])
def test_an_answer_is_that_of_one_process_and_rank_0_writes_it(size: int, tiny_gguf: Path, clearllama: Any) -> None:
    command = f"{GENERATE} {tiny_gguf} - -n 20 --json --temp 1 --seed 3"
    alone = clearllama(*command.split(), stdin=b"hello there")
    out, lines, _ = end(launch(size, command), "hello there")
    assert json.loads(out)["tokens"] == json.loads(alone.stdout)["tokens"]
    assert len(lines) == len(alone.stderr.decode().splitlines())
    assert f", {size} processes, loaded in" in lines[0]


@SLOW
def test_a_batch_resumes_and_has_the_answers_of_one_process(tiny_gguf: Path, tmp_path: Path, clearllama: Any) -> None:
    prompts = [{"prompt": "hello " * i, "max_new_tokens": 3 + i, "temperature": i % 2, "seed": i} for i in range(1, 10)]
    (tmp_path / "prompts").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    command, found = f"{GENERATE} {tiny_gguf} --batch-size 3 --prompts {tmp_path}/prompts", tmp_path / "answers"
    alone = [json.loads(line)["tokens"] for line in clearllama(*command.split()).stdout.splitlines()]
    for _ in range(2):
        lines, errors = end(launch(2, command, "--output", found))[1:]
        answers = found.read_text().splitlines()
        assert [json.loads(line)["tokens"] for line in answers] == alone
        assert not errors
        found.write_text("\n".join(answers[:4]) + "\n" + answers[4][:-5])
    assert "4 of 9 prompts are already answered" in " ".join(lines)


@SLOW
def test_a_chat_is_that_of_one_process(tiny_gguf: Path, clearllama: Any, tmp_path: Path) -> None:
    turns = 'hello\n"""\ntwo\nlines\n"""\n/nothing\n/retry\n/save x\nbye\n'
    command = f"chat -m {tiny_gguf} --dtype float32 --device cpu -n 9 --temp 0 --no-history"
    alone = clearllama(*command.split(), stdin=turns.encode(), cwd=tmp_path).stdout.decode()
    out, _, errors = end(launch(2, command), turns)
    assert out == alone
    assert len(errors) == 2  # /nothing, and /save, which several processes do not support


@SLOW
@pytest.mark.parametrize(
    ("size", "fault"),
    [(2, "1 decode kill"), (4, "2 load kill"), (4, "0 decode kill"), (2, "1 prefill kill"), (2, "1 decode raise")],
)
def test_a_rank_that_fails_ends_all_with_one_line(size: int, fault: str, tiny_gguf: Path, tmp_path: Path) -> None:
    env, command = {"CLEARLLAMA_TEST_FAULT": f"{fault} {tmp_path}/note"}, f"{GENERATE} {tiny_gguf} hello -n 100"
    process = launch(size, command, run="-m tests.dying_rank", env=env)
    _, _, errors = end(process)
    assert time.time() - (tmp_path / "note").stat().st_mtime < PATIENCE / 2
    assert process.returncode != 0
    expected = "rank 1: out of memory (simulated)" if "raise" in fault else "another rank ended"
    assert [expected in line for line in errors] == [True]


@SLOW
@pytest.mark.parametrize("command", ["generate --raw hello", "chat"])
@pytest.mark.parametrize(("number", "line"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "torchrun was stopped")])
def test_a_signal_to_torchrun_ends_all_ranks(number: int, line: str, command: str, tiny_gguf: Path) -> None:
    read, write = os.pipe()  # generate would read it to its end
    stdin = read if command == "chat" else subprocess.DEVNULL
    process = launch(2, f"{command} -m {tiny_gguf} --dtype float32 --device cpu -n 220 --temp 0", stdin=stdin)
    wait_for(process, "loaded in" if command == "chat" else "plain text")
    os.write(write, b"hello\n")
    time.sleep(0.5)  # in the middle of the answer
    started = time.monotonic()
    process.send_signal(number)
    assert [line in error for error in end(process)[2]] == [True]
    assert time.monotonic() - started < PATIENCE / 2


@SLOW
def test_other_options_are_one_line(tiny_gguf: Path, tmp_path: Path) -> None:
    script = tmp_path / "rank.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -m llama {GENERATE} {tiny_gguf} hello -n $((RANK + 8))\n")
    script.chmod(0o755)
    errors = end(launch(2, "", run=f"--no-python {script}"))[2]
    assert errors == [
        "clearllama: error: rank 1 and rank 0 have different options; start all ranks with the same options"
    ]


# ------------------------------------------------------------------------------------------------------- one process
def parsed(command: str) -> argparse.Namespace:
    return build_parser().parse_args(command.split())


ONE_ONLY = ("--compile", "--gpu-layers 0", "--draft x", "--steer x", "--save-session x", "--load-session x")
REFUSED = [
    ("generate x --tensor-parallel 8", 1, r"type: torchrun --nproc-per-node 8 -m llama generate 'a b'$"),
    ("chat --tensor-parallel 4", 2, "found 2; type: torchrun --nproc-per-node 4 "),
    ("perplexity x", 2, "clearllama perplexity runs in one process; start it without torchrun"),
    *((f"chat {option}", 2, f"{option.split()[0]} does not support several processes") for option in ONE_ONLY),
]


def test_what_does_not_fit_the_number_of_processes_is_refused() -> None:
    for command, size, message in REFUSED:
        with pytest.raises(UsageError, match=message):
            ranks.check(parsed(command), ["generate", "a b"], size)
    for command, size in (("chat --tensor-parallel 2", 2), ("chat", 2), ("chat --compile", 1), ("bench", 1)):
        ranks.check(parsed(command), [], size)
