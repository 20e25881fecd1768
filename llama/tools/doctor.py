"""Examine this machine: report the facts about it, then run the self-test.

Every probe that imports torch runs in a child process. If a driver hangs, a library aborts or the processor lacks an
instruction, only the child ends, which is a finding too, and another child continues with the next probe.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from . import facts
from .facts import REPORT, Finding, Probe, guarded

SECONDS = 10.0  # for all checks of the self-test
ANSWER = 60.0  # seconds for each other probe; the first one imports torch, which is slow from a cold disk
BROKEN = "check whether python -c 'import torch' works; if not, reinstall torch"


def _test(name: str) -> Probe:
    def probe() -> Iterator[Finding]:
        from . import selftest  # imports torch

        yield selftest.run(name)

    return probe


WITHOUT_TORCH: dict[str, Probe] = {"versions": facts.versions, "machine": facts.machine, "cache": facts.caches}
# What a child runs; `build` only prepares the self-test. The slowest test is the last one.
PROBES: dict[str, Probe] = {
    "memory": facts.memory, "devices": facts.devices, "kernels": facts.kernels_and_compiler, "build": facts.build
}  # fmt: skip
TESTS = {name: _test(name) for name in ("rope", "cache", "safetensors", "quantized", "device", "compile")}


def examine(self_test: bool = True, seconds: float = SECONDS) -> Iterator[Finding]:
    """Yield each finding as soon as it is known. seconds: the time limit of the self-test.

    Nothing is written outside of the cache folder and the folder for temporary files.
    """
    for group, probe in WITHOUT_TORCH.items():
        yield from guarded(group, probe)
    if importlib.util.find_spec("torch") is not None:  # otherwise the versions have reported it
        names = [*PROBES, *TESTS] if self_test else [name for name in PROBES if name != "build"]
        yield from in_children(names, seconds)


def in_children(names: Sequence[str], seconds: float) -> Iterator[Finding]:
    """The findings of some probes, with a new child after each probe that ends its process; `seconds` for all tests."""
    left, tests_end = list(names), None
    while left:
        started = time.monotonic()
        child, current, deadline = Child(left), None, started + ANSWER
        try:
            while (line := child.next(deadline)) is not None:
                if "begin" not in line:
                    yield Finding(**line)
                    continue
                if tests_end is not None and current is None:
                    tests_end += time.monotonic() - started  # the self-test does not pay for importing torch again
                current = str(line["begin"])
                left.remove(current)
                deadline = time.monotonic() + ANSWER
                if current in TESTS:
                    deadline = tests_end = tests_end or time.monotonic() + seconds
            late = time.monotonic() > deadline
            code = child.end(grace=0 if late else 5)
        finally:
            child.end()
        if code == 0 and not late:
            return
        if late and current in TESTS:
            message = f"skipped: the self-test reached its time limit, {seconds:g} s"
            for name in (current, *left):
                yield Finding(
                    "note",
                    "self-test",
                    name,
                    message,
                    "--seconds 60 allows more time; the next run is faster, since compiled code is cached",
                )
            return
        message = f"no answer within {ANSWER:g} s" if late else f"the process ended early: {child.ending(code)}"
        if current is None:
            yield Finding("fail", "torch", "import", message, BROKEN)
            return  # another child would fail in the same way
        if current in TESTS:
            yield Finding("fail", "self-test", current, message, REPORT)
        else:
            yield Finding("fail", "torch", current, message, BROKEN)


# ------------------------------------------------------------------------------------------------------ the child
def serve(names: Sequence[str]) -> None:
    """Run probes in the child: print one JSON line at the beginning of each, and one for each finding."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries goes to stderr
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that temporary files are removed
    for name in names:
        print(json.dumps({"begin": name}), file=out, flush=True)
        for finding in guarded(name, (PROBES | TESTS)[name]):
            print(json.dumps(dataclasses.asdict(finding)), file=out, flush=True)


SERVE = "from llama.tools import doctor; doctor.serve(NAMES)"


class Child:
    """A process that serves probes; its output is read line by line."""

    def __init__(self, names: Sequence[str]):
        paths = [os.path.abspath(path) for path in sys.path]
        code = f"import sys; sys.path[:] = {paths!r}; {SERVE.replace('NAMES', repr(list(names)))}"
        # In a session of its own, so that a compiler that the child has started can be killed with it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=hasattr(os, "setsid"),
        )
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.errors: list[str] = []  # the last lines of stderr
        self.readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self.readers:
            reader.start()

    def next(self, deadline: float) -> dict[str, Any] | None:
        """The next line; None at the end of the output or after the deadline."""
        try:
            return self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith(b"{"):
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def _read_errors(self) -> None:
        for line in self.process.stderr or ():
            self.errors = [*self.errors[-20:], line.decode(errors="replace").strip()]

    def end(self, grace: float = 0) -> int | None:
        """End the process and all that it has started; return its exit code. grace: seconds to wait for it first."""
        for number in (0, signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
            if number:
                self._signal(number)
            try:
                self.process.wait(5 if number else grace)
                break
            except subprocess.TimeoutExpired:
                continue
        if hasattr(os, "killpg"):
            self._signal(signal.SIGKILL)  # a compiler that still runs
        for reader in self.readers:
            reader.join(2)
        return self.process.poll()

    def _signal(self, number: int) -> None:
        try:
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)
        except OSError:
            pass

    def ending(self, code: int | None) -> str:
        """The exit code or signal of the process, and the last line that it wrote to stderr."""
        how = "can't be ended" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"ended by {signal.Signals(-code).name}"
        last = next((line for line in reversed(self.errors) if line), "")
        return f"{how}{f' ({last[:200]})' * bool(last)}"
