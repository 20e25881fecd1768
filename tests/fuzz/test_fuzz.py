"""Every harness for a moment, every input that was once a finding, and proof that the fuzzer finds what is there."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama import errors

from . import NAMES, child, law
from .mutate import LARGEST, mutate

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # scales that are NaN

SECONDS = 0.4  # of processor time for each harness; `python -m tests.fuzz` takes as many as it is given
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=NAMES)
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Any:
    return load(request.param, tmp_path_factory)


def load(name: str, tmp_path_factory: pytest.TempPathFactory) -> law.Harness:
    loaded: law.Harness = importlib.import_module(f"tests.fuzz.{name}").Harness(tmp_path_factory.mktemp(name))
    for seed in loaded.seeds():
        for call in loaded.calls(seed):  # what is imported late is imported now
            with contextlib.suppress(errors.LlamaError):
                call()
    return loaded


def name_of(harness: law.Harness) -> str:
    return type(harness).__module__.rpartition(".")[2]


def test_the_seeds_give_a_result(harness: law.Harness) -> None:
    seeds = list(harness.seeds())
    assert seeds
    assert max(map(len, seeds)) < LARGEST
    for seed in seeds:
        assert law.check(harness, seed), seed[:200]


def test_what_was_found_once_keeps_the_law(harness: law.Harness) -> None:
    for data in child.found(name_of(harness)):
        law.check(harness, data)


def test_random_changes_keep_the_law(harness: law.Harness, record_property: Callable[[str, object], None]) -> None:
    end, tried = time.process_time() + SECONDS, 0
    for data in child.inputs(harness, name_of(harness), seed=0):
        try:
            law.check(harness, data)
        except law.Finding as finding:
            raise AssertionError(f"{finding}\n{data!r:.3000}") from finding
        tried += 1
        if time.process_time() > end:
            break
    record_property("inputs", tried)
    assert tried > len(list(harness.seeds()))


def test_found_inputs_belong_to_harnesses() -> None:
    assert {path.name for path in child.FOUND.iterdir()} <= set(NAMES)
    assert sum(path.stat().st_size for path in child.FOUND.glob("*/*")) < 200_000


# ----------------------------------------------------------------------------- a defect in the library, and it is found
def unchecked(name: str) -> Callable[..., Any]:
    return lambda raw, where="": json.loads(raw if isinstance(raw, bytes) else raw.read_bytes())


DEFECTS: dict[str, tuple[str, Any]] = {
    "gguf": ("llama.checkpoint.gguf._Reader.take", lambda self, count, what: _forward(self, count)),
    "config": (
        "llama.checkpoint.documents.Fields.whole",
        lambda self, key, default=None: self.values.get(key, default),
    ),
    "safetensors": ("llama.checkpoint.huggingface.read_json", unchecked("index")),
    "checklist": ("llama.tools.verify._is_plain", lambda name: True),
    "tokenizer": ("llama.tokenizer.sentencepiece.library_errors", lambda where, what: contextlib.nullcontext()),
    "template": ("llama.chat.template._changed", lambda value, change: value),
    "prompts": ("llama.checkpoint.documents.parse_json", unchecked("line")),
    "session": ("llama.generation.session.parse_json", unchecked("about")),
}


def _forward(reader: Any, count: int) -> int:
    reader.at += count
    return int(reader.at - count)


def test_every_harness_has_a_defect_to_find() -> None:
    assert set(DEFECTS) == set(NAMES)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NAMES)
def test_a_check_that_is_taken_away_is_a_finding(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = load(name, tmp_path_factory)
    monkeypatch.setattr(*DEFECTS[name])
    inputs = islice(child.inputs(harness, name, seed=0), 2000)
    with pytest.raises(law.Finding):
        deque((law.check(harness, data) for data in inputs), maxlen=0)


# --------------------------------------------------------------------------------------------------- the law by itself
class Panic(BaseException):
    """As the PanicException of Rust libraries."""


class TwoLines(errors.LlamaError):
    def __str__(self) -> str:
        return "one\ntwo"


def fails(error: BaseException) -> law.Call:
    def call() -> None:
        raise error

    return call


def busy() -> None:
    end = time.process_time() + 0.6
    while time.process_time() < end:
        pass


def network() -> None:
    with socket.socket() as one, contextlib.suppress(OSError):
        one.connect(("127.0.0.1", 9))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (fails(KeyError("x")), "KeyError"),
        (fails(Panic("x")), "Panic"),
        (fails(SystemExit(1)), "SystemExit"),
        (fails(RecursionError()), "RecursionError"),
        (fails(MemoryError()), "MemoryError"),
        (fails(TwoLines()), "not one printable line"),
        (fails(errors.UsageError("")), "not one printable line"),
        (busy, "processor time"),
        (lambda: np.ones(2**24).sum(), "of memory"),
        (lambda: Path(__file__).with_name("README").write_text(""), "for writing"),
        (lambda: os.open(os.path.expanduser("~/x"), os.O_WRONLY | os.O_CREAT), "for writing"),
        (lambda: Path("/etc/hostname").read_bytes(), "opened '/etc/hostname'"),
        (lambda: os.mkdir("/nowhere/x"), "os.mkdir"),
        (lambda: os.remove("/nowhere/x"), "os.remove"),
        (lambda: os.rename("/nowhere/x", "/nowhere/y"), "os.rename"),
        (lambda: os.system("exit 0"), "os.system"),
        (lambda: subprocess.run([sys.executable, "-c", ""], check=True), "subprocess.Popen"),
        (network, "socket."),
    ],
)
def test_what_the_law_forbids(call: law.Call, words: str) -> None:
    with pytest.raises(law.Finding, match=words):
        law.keep(call, (), 0.5, 50 * 2**20)


def test_what_the_law_allows(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"x")
    assert law.keep(lambda: (tmp_path / "input").read_bytes(), (str(tmp_path),), 1, 2**26)
    assert not law.keep(fails(errors.UsageError("one line")), (), 1, 2**26)
    (tmp_path / "output").write_text("not watched any more")


def test_the_text_of_every_error_is_printable() -> None:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.LlamaError):
            assert str(kind("a\nb\x1b[31m\u2028é\ud800\x80")) == "a b\\x1b[31m\\u2028é\\ud800\\x80"


# -------------------------------------------------------------------------------------------- the mutator, the runner
def test_changes_are_the_same_for_a_seed() -> None:
    seeds = [b'{"a": [1, 2, {"b": "c"}]}', b"\x00\x01\x02\x03" * 9, b""]

    def some(seed: int) -> list[bytes]:
        chance = random.Random(seed)
        return [mutate(data, seeds, [b"word"], chance) for data in seeds * 100]

    assert some(1) == some(1) != some(2)
    assert len(set(some(1))) > 200
    assert max(map(len, some(1))) <= LARGEST


def fuzz(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "way",
    [
        "--plain",
        pytest.param(
            "--jobs=1",
            marks=pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed"),
        ),
    ],
)
def test_the_runner_saves_what_it_finds_and_says_how_to_repeat_it(way: str, tmp_path: Path) -> None:
    done = fuzz("selftest", "--seconds=60", "--found", tmp_path, way)
    assert done.returncode == 1, done.stdout + done.stderr
    (saved,) = (tmp_path / "selftest").iterdir()
    assert saved.read_bytes().startswith(b"BAD")
    assert "KeyError" in done.stdout
    again = done.stdout.split("again: ")[1].strip()
    assert shlex.split(again) == ["python", "-m", "tests.fuzz", "selftest", "--repeat", str(saved)]
    assert fuzz(*shlex.split(again)[3:]).returncode == 1
    (tmp_path / "fine").write_bytes(b"B, and all is well")
    done = fuzz("selftest", "--repeat", tmp_path / "fine")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ok    selftest     1 inputs")
