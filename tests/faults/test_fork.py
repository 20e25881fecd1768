"""The child of a fork computes what its parent computes, with as many threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..forked import Forked

FORK = """
import multiprocessing, os, signal, sys, threading
import torch
import llama

torch.set_num_threads(2)
llm = llama.load(sys.argv[1], device="cpu", dtype="float32")
square = torch.ones(700, 700)


def work():
    threads = len(os.listdir("/proc/self/task"))
    square @ square  # large enough for several threads
    return llm.generate("hello", max_new_tokens=4).tokens, len(os.listdir("/proc/self/task")) > threads


def compare():
    assert work() == (first, True)


first = work()[0]
if sys.argv[2] == "while others compute":
    stop = threading.Event()
    busy = threading.Thread(target=lambda: [square @ square for _ in iter(stop.is_set, True)])
    busy.start()
if sys.argv[2] == "multiprocessing":
    children = [multiprocessing.get_context("fork").Process(target=compare) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(40)
    assert [child.exitcode for child in children] == [0, 0]
else:
    child = os.fork()
    if child == 0:
        signal.alarm(40)
        os._exit(work() != (first, True))
    assert os.waitpid(child, 0)[1] == 0
if sys.argv[2] == "while others compute":
    stop.set()
    busy.join()
assert work()[0] == first
"""


@pytest.mark.row("I14")
@pytest.mark.timeout(100)
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux")
@pytest.mark.parametrize("way", ["os.fork", "multiprocessing", "while others compute"])
def test_a_forked_child_generates(forked: Forked, tiny_gguf: Path, way: str) -> None:
    code = f"import sys; sys.argv[1:] = {[str(tiny_gguf), way]}\n{FORK}"
    done = forked.run((), None, 90, code=code)
    assert (done.returncode, done.stderr) == (0, b"")
