"""Fixtures that several files share. Expensive ones are created once per session."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers already use all cores
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of a hundred processes compiles the package again

import gc
import logging
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from playwright.sync_api import Browser, Page, sync_playwright

from llama import loader
from llama.hub import models as hub
from llama.text import Llama

from . import tiny
from .forked import Forked
from .patience import PATIENCE

torch.set_grad_enabled(False)
hypothesis.settings.register_profile("clearllama", deadline=None)  # times vary on shared machines
hypothesis.settings.load_profile("clearllama")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than there are cores, because some tests wait for other processes."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exempt what is imported and collected from garbage collection: millions of objects that stay."""
    gc.disable()
    found = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return found


def pytest_unconfigure() -> None:
    """Let the interpreter delete them at exit; else triton, which transformers imports, reports leaked objects."""
    gc.unfreeze()


def pytest_runtest_setup() -> None:
    """Undo what a command that ran in this process set: the library's log, and ignored signals.

    nohup and shells without job control start programs with ignored signals, too. An ignored signal stays ignored in
    child processes, whose reactions are tested; a signal with a handler gets its default there.
    """
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)
    log = logging.getLogger("llama")
    log.handlers.clear()
    log.setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: with tiny models, synchronizing threads costs more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return a headless Chromium, which pip does not install. Without one, skip the test, or fail if CI is set."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no Chromium on this machine: apt install chromium")
    root = os.name == "posix" and os.geteuid() == 0  # Chromium's sandbox does not run as the superuser
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"] if root else [])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def kept_tabs() -> dict[str, Page]:
    """Tabs of `open_page` that later tests load again."""
    return {}


@pytest.fixture
def open_page(browser: Browser, kept_tabs: dict[str, Page]) -> Iterator[Callable[..., Page]]:
    """Open a page by its address. At the end there must be no errors or warnings, and no requests to other origins.

    expected  pattern of errors that do not count
    keep      load the page in the tab of an earlier test with the same options, which takes a third of the time; what
              the page stores is kept, too
    """
    faults: list[str] = []
    contexts = []
    listeners = []

    def opened(
        url: str, expected: str = "(?!)", reduced_motion: Any = "reduce", keep: bool = False, **how: Any
    ) -> Page:
        key = repr((reduced_motion, how))
        if keep and key in kept_tabs:
            tab = kept_tabs[key]
            tab.goto("about:blank")  # else an address that differs in its fragment is not loaded
        else:
            context = browser.new_context(reduced_motion=reduced_motion, **how)
            tab = context.new_page()
            if keep:
                kept_tabs[key] = tab
            else:
                contexts.append(context)
        tab.set_default_timeout(PATIENCE * 1000)

        def note(text: str) -> None:
            if not re.search(expected, text):
                faults.append(text)

        own = url.partition("#")[0], "data:", "blob:"
        for event, listener in (
            ("console", lambda message: note(message.text) if message.type in ("error", "warning") else None),
            ("pageerror", lambda error: note(str(error))),
            ("request", lambda request: None if request.url.startswith(own) else note(request.url)),
        ):
            tab.on(event, listener)
            listeners.append((tab, event, listener))
        tab.goto(url)
        if how.get("java_script_enabled", True):
            tab.wait_for_selector("html[data-ready]")
        return tab

    yield opened
    for tab, event, listener in listeners:
        tab.remove_listener(event, listener)
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model of 0.1 million parameters with a byte-level vocabulary and a chat template."""
    return tiny.write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_llm(tiny_gguf: Path) -> Llama:
    return loader.load(tiny_gguf, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """Return the default model's file; download it if necessary."""
    return hub.pull(hub.DEFAULT)


@pytest.fixture(scope="session")
def default_llm(default_gguf: Path) -> Llama:
    return loader.load(default_gguf, dtype="float32", device="cpu")


Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Return a server that forks the command from a process with torch imported."""
    server = Forked()
    yield server
    server.close()


@pytest.fixture(scope="session")
def clearllama(request: pytest.FixtureRequest) -> Run:
    """Return a function that runs the command in a process of its own; forked if the system can."""

    def run(*args: str, stdin: bytes | None = None, env: dict[str, str] | None = None, **more: Any):
        if hasattr(os, "fork"):
            return request.getfixturevalue("forked").run(args, stdin, env=env, **more)
        return subprocess.run(
            [sys.executable, "-m", "llama", *args],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            env={**os.environ, **(env or {})},
            timeout=PATIENCE,
            check=False,
            **more,
        )

    return run
