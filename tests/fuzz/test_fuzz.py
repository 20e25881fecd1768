"""Run every harness briefly, repeat past findings, and prove that the fuzzer finds planted defects."""

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
from llama.chat import sandbox

from . import NAMES, child, law
from .mutate import LARGEST, mutate

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # from NaN scales

SECONDS = 0.4  # processor time per harness; `python -m tests.fuzz` runs longer
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=NAMES)
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Any:
    return load(request.param, tmp_path_factory)


def load(name: str, tmp_path_factory: pytest.TempPathFactory) -> law.Harness:
    """Return a harness that has processed its seeds once."""
    loaded: law.Harness = importlib.import_module(f"tests.fuzz.{name}").Harness(tmp_path_factory.mktemp(name))
    for seed in loaded.seeds():
        for call in loaded.calls(seed):  # completes lazy imports before the measurements
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


def test_past_findings_keep_the_law(harness: law.Harness) -> None:
    for data in child.found(name_of(harness)):
        law.check(harness, data)


def test_random_mutations_keep_the_law(harness: law.Harness, record_property: Callable[[str, object], None]) -> None:
    seeds = len(list(harness.seeds()))
    end, last, tried = time.process_time() + SECONDS, time.monotonic() + 4 * SECONDS, 0
    for data in child.inputs(harness, name_of(harness), seed=0):
        try:
            law.check(harness, data)
        except law.Finding as finding:
            raise AssertionError(f"{finding}\n{data!r:.3000}") from finding
        tried += 1
        if tried > seeds and (time.process_time() > end or time.monotonic() > last):  # a harness may wait for a child
            break
    record_property("inputs", tried)
    assert tried > seeds


def test_every_saved_input_belongs_to_a_harness() -> None:
    assert {path.name for path in child.FOUND.iterdir()} <= set(NAMES)
    assert sum(path.stat().st_size for path in child.FOUND.glob("*/*")) < 200_000


# ---------------------------------------------------------------------------------------------------- planted defects
def unchecked(name: str) -> Callable[..., Any]:
    return lambda raw, where="": json.loads(raw if isinstance(raw, bytes) else raw.read_bytes())


def _spelled(template: str, values: Any, controls: Any, now: Any) -> list[tuple[str, bool]]:
    """Take every control string of the text for one of the template."""
    pieces = sandbox.answer({"template": template, "values": values, "now": "2026-01-01"}).get("pieces", [("", False)])
    return [(piece, piece in controls) for piece in sandbox.Controls(list(controls)).split(pieces[0][0])]


DEFECTS: dict[str, tuple[str, Any]] = {
    "gguf": ("llama.checkpoint.gguf._Reader.take", lambda self, count, what: _forward(self, count)),
    "config": (
        "llama.checkpoint.documents.Fields.integer",
        lambda self, key, default=None: self.values.get(key, default),
    ),
    "safetensors": ("llama.checkpoint.huggingface.read_json", unchecked("index")),
    "torchfile": ("llama.checkpoint.torchfile._described", lambda value, path: value),
    "checklist": ("llama.tools.verify._is_plain", lambda name: True),
    "tokenizer": ("llama.tokenizer.sentencepiece.library_errors", lambda where, what: contextlib.nullcontext()),
    "template": ("llama.chat.template._rendered", _spelled),
    "prompts": ("llama.checkpoint.documents.parse_json", unchecked("line")),
    "session": ("llama.generation.session.parse_json", unchecked("about")),
    "requests": ("llama.server.requests._fields", lambda body, known, model: {k: body[k] for k in body if body[k]}),
}


def _forward(reader: Any, count: int) -> int:
    reader.at += count
    return int(reader.at - count)


def test_every_harness_has_a_planted_defect() -> None:
    assert set(DEFECTS) == set(NAMES)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [*NAMES[:4], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[4:])])
def test_a_removed_check_becomes_a_finding(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = load(name, tmp_path_factory)
    monkeypatch.setattr(*DEFECTS[name])
    inputs = islice(child.inputs(harness, name, seed=0), 2000)
    with pytest.raises(law.Finding):
        deque((law.check(harness, data) for data in inputs), maxlen=0)


# ------------------------------------------------------------------------------------------------------------- the law
class Panic(BaseException):
    """Stands for the PanicException of Rust libraries."""


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
def test_the_law_forbids(call: law.Call, words: str) -> None:
    with pytest.raises(law.Finding, match=words):
        law.check_call(call, (), 0.5 if call is busy else 5, 50 * 2**20)


def test_the_law_allows_results_errors_and_reads_of_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"x")
    assert law.check_call(lambda: (tmp_path / "input").read_bytes(), (str(tmp_path),), 1, 2**26)
    assert not law.check_call(fails(errors.UsageError("one line")), (), 1, 2**26)
    (tmp_path / "output").write_text("the audit hook is off after a call")


def test_the_text_of_every_error_is_printable() -> None:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.LlamaError):
            assert str(kind("a\nb\x1b[31m\u2028é\ud800\x80")) == "a b\\x1b[31m\\u2028é\\ud800\\x80"


# -------------------------------------------------------------------------------------------- the mutator, the runner
def test_mutations_are_reproducible_by_seed() -> None:
    seeds = [b'{"a": [1, 2, {"b": "c"}]}', b"\x00\x01\x02\x03" * 9, b""]

    def mutated(seed: int) -> list[bytes]:
        chance = random.Random(seed)
        return [mutate(data, seeds, [b"word"], chance) for data in seeds * 100]

    assert mutated(1) == mutated(1) != mutated(2)
    assert len(set(mutated(1))) > 200
    assert max(map(len, mutated(1))) <= LARGEST


def fuzz(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "option",
    [
        "--plain",
        pytest.param(
            "--jobs=1",
            marks=pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed"),
        ),
    ],
)
def test_the_runner_saves_a_finding_and_prints_how_to_repeat_it(option: str, tmp_path: Path) -> None:
    done = fuzz("selftest", "--seconds=60", "--found", tmp_path, option)
    assert done.returncode == 1, done.stdout + done.stderr
    (saved,) = (tmp_path / "selftest").iterdir()
    assert saved.read_bytes().startswith(b"BAD")
    assert "KeyError" in done.stdout
    repeat = shlex.split(done.stdout.split("repeat: ")[1].strip())
    assert repeat == ["python", "-m", "tests.fuzz", "selftest", "--repeat", str(saved)]
    assert fuzz(*repeat[3:]).returncode == 1
    (tmp_path / "fine").write_bytes(b"B is valid")
    done = fuzz("selftest", "--repeat", tmp_path / "fine")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ok    selftest     1 inputs")
