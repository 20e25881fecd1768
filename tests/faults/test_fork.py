"""The child of a fork computes what its parent computes, with as many threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llama.engine import kernels

from ..forked import Forked
from ..patience import PATIENCE
from ..test_threads import CHILD, check

FORK = """
import os, signal, sys, threading
import torch
import llama

torch.set_num_threads(2)
llm = llama.load(sys.argv[1], device="cpu", dtype="float32")
square = torch.ones(700, 700)


def work():
    threads = len(os.listdir("/proc/self/task"))
    square @ square  # large enough for several threads
    return llm.generate("hello", max_new_tokens=4).tokens, len(os.listdir("/proc/self/task")) > threads


first = work()[0]
stop = threading.Event()
busy = threading.Thread(target=lambda: [square @ square for _ in iter(stop.is_set, True)])
busy.start()
child = os.fork()
if child == 0:
    signal.alarm(PATIENCE)
    os._exit(work() != (first, True))
assert os.waitpid(child, 0)[1] == 0
stop.set()
busy.join()
assert work()[0] == first
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux")
def test_a_child_that_is_forked_while_others_compute_generates(forked: Forked, tiny_gguf: Path) -> None:
    code = f"import sys; sys.argv[1:] = {[str(tiny_gguf)]}\nPATIENCE = {PATIENCE}\n{FORK}"
    done = forked.run((), None, PATIENCE, code=code)
    assert (done.returncode, done.stderr) == (0, b"")


KERNELS = """
if way != "before the first loop":
    product()
stop = threading.Event()

def loops():
    kernels._library().clearllama_choose_threads(3, 0)
    while not stop.is_set():
        assert torch.equal(product(), expected)

others = [threading.Thread(target=loops) for _ in range(0 if way == "before the first loop" else 2)]
for other in others:
    other.start()

def compare():
    signal.alarm(PATIENCE)
    assert count() == 1
    assert all(torch.equal(product(), expected) for _ in range(10))
    assert count() == 3

for _ in range(5):
    child = os.fork()
    if child == 0:
        compare()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for other in others:
    other.join()
assert torch.equal(product(), expected)
"""


@pytest.mark.skipif(not kernels.ready() or not os.path.exists("/proc/self/task"), reason="needs the kernels, and Linux")
@pytest.mark.parametrize("way", ["before the first loop", "in the middle of loops"])
def test_the_kernels_of_a_forked_child_have_threads_of_their_own(forked: Forked, way: str) -> None:
    check(forked, f"{CHILD}\nway, PATIENCE = {way!r}, {PATIENCE}\n{KERNELS}")
