"""Thousands of calls in one process: nothing grows, and the last is answered like the first of a fresh process."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from llama.cache import KVCache

from . import soak

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _frozen() -> Iterator[None]:
    """What earlier tests left is not looked through at each collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# Bytes a call by which memory may grow. A cache of the tiny model in 8 bits takes 40 KB and an answer with its pieces
# some 2 KB, so a leak of either, or of a text, is far above it. What is below is the allocator's: freed pages that it
# keeps, which come and go by a few hundred KB.
GROWTH = 250.0
# In a short run those few hundred KB are all there is; only a leaked cache can be told from them.
SHORT_GROWTH = 20_000.0


def slope(points: list[tuple[int, int]]) -> float:
    """Bytes a call: the line of least squares through (calls, bytes)."""
    n = len(points)
    x, y = (sum(values) / n for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def alive() -> tuple[int, int]:
    """Tensors and caches that somebody holds."""
    gc.collect()
    objects = gc.get_objects()
    return sum(type(o) is torch.Tensor for o in objects), sum(type(o) is KVCache for o in objects)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run(path: Path, calls: int, every: int, fresh: int, bound: float, seed: int) -> None:
    """`calls` calls; one in so many is compared with a fresh model's, the first `fresh` also with a process'."""
    models = soak.load(path)
    counts: dict[str, int] = {}
    points: list[tuple[int, int]] = []
    compared: list[int] = []
    held = resources = (0, 0)
    results = {}
    for number in range(calls):
        call = soak.describe(seed, number)
        result = soak.perform(models, call)
        counts[call["how"]] = counts.get(call["how"], 0) + 1
        if number % every == every - 1 or number < fresh:
            assert result == soak.perform(soak.load(path), call), f"call {number}: {call}"
            compared.append(number)
        if number < fresh:
            results[number] = result
        if number == calls // 5:
            held, resources = alive(), (descriptors(), threading.active_count())
        if number >= calls // 2 and number % max(1, calls // 200) == 0:
            gc.collect()
            points.append((number, soak.resident()))
    assert alive() == held
    assert (descriptors(), threading.active_count()) == resources
    assert len(counts) == 9, "every way to call is among them"
    grown = slope(points)
    print(f"{calls} calls {counts}: {grown:+.1f} bytes a call over the second half, {len(compared)} compared")
    assert grown < bound
    if not fresh:
        return
    command = [sys.executable, "-m", "tests.faults.soak", str(path), str(seed), *map(str, results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == list(results.values())


@pytest.mark.row("G18")
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="counts memory as Linux tells it")
def test_a_hundred_and_fifty_calls_leave_nothing_behind(
    tiny_gguf: Path, record_property: Callable[[str, object], None]
) -> None:
    run(tiny_gguf, 150, every=30, fresh=0, bound=SHORT_GROWTH, seed=1)
    record_property("inputs", 150)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="counts memory as Linux tells it")
def test_ten_thousand_calls_leave_nothing_behind(
    tiny_gguf: Path, record_property: Callable[[str, object], None]
) -> None:
    run(tiny_gguf, 10_000, every=500, fresh=5, bound=GROWTH, seed=2)
    record_property("inputs", 10_000)
