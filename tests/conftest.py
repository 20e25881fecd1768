"""Fixtures that several files share; what is expensive is made once."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; threads of their own would only get in the way
    os.environ["OMP_NUM_THREADS"] = "1"

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton, where it is installed, then runs its kernels on the CPU

from llama import loader
from llama.hub import named as hub
from llama.text import Llama

from . import tiny
from .forked import Forked

torch.set_grad_enabled(False)
hypothesis.settings.register_profile("clearllama", deadline=None)  # shared machines stumble
hypothesis.settings.load_profile("clearllama")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--row", metavar="ID", help="only the cases of a fault, A03, or of any")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if row := config.getoption("--row"):
        items[:] = [item for item in items if any(row in (mark.args[0], "any") for mark in item.iter_markers("row"))]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tests of tiny models: two threads cost more in waiting for each other than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 0.1 million parameters with a byte-level vocabulary and a chat template."""
    return tiny.write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_llm(tiny_gguf: Path) -> Llama:
    return loader.load(tiny_gguf, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The default model's file; fetched if this machine has never run it."""
    return hub.pull(hub.DEFAULT)


@pytest.fixture(scope="session")
def default_llm(default_gguf: Path) -> Llama:
    return loader.load(default_gguf, dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def _row(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Write down for docs/reliability.md which fault a test is a case of."""
    for mark in request.node.iter_markers("row"):
        record_property("row", mark.args[0])


Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """A process that has imported torch, to fork the command off."""
    server = Forked()
    yield server
    server.close()


@pytest.fixture(scope="session")
def clearllama(request: pytest.FixtureRequest) -> Run:
    """Run the command in a process of its own, as a user does; where it can, forked off one with torch imported."""

    def run(*args: str, stdin: bytes | None = None, env: dict[str, str] | None = None, **more: Any):
        if hasattr(os, "fork"):
            return request.getfixturevalue("forked").run(args, stdin, env=env, **more)
        return subprocess.run(
            [sys.executable, "-m", "llama", *args],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            env={**os.environ, **(env or {})},
            timeout=120,
            check=False,
            **more,
        )

    return run
