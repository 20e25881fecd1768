"""Thousands of calls in one process: no resource leaks, and every result equals that of a fresh process."""

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
    """Exclude the objects of earlier tests from garbage collection, for speed."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# Limit of memory growth in bytes per call. An 8-bit cache of the tiny model takes 40 KB and an answer with its pieces
# about 2 KB, so a leak of either is far above the limit. Freed pages that the allocator keeps vary by a few hundred KB.
GROWTH = 250.0
# In a short run those few hundred KB dominate: only a leaked cache exceeds them.
SHORT_GROWTH = 20_000.0


def slope(points: list[tuple[int, int]]) -> float:
    """Return bytes per call: the slope of the least-squares line through (calls, bytes)."""
    n = len(points)
    x, y = (sum(values) / n for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def alive() -> tuple[int, int]:
    """Return the number of live tensors and caches."""
    gc.collect()
    objects = gc.get_objects()
    return sum(type(o) is torch.Tensor for o in objects), sum(type(o) is KVCache for o in objects)


def descriptors() -> int:
    """Return the number of open file descriptors."""
    return len(os.listdir("/proc/self/fd"))


def run(path: Path, calls: int, every: int, fresh: int, bound: float, seed: int) -> None:
    """Make `calls` calls. Compare every `every`-th with a fresh model, the first `fresh` also with a fresh process."""
    models = soak.load(path)
    counts: dict[str, int] = {}
    points: list[tuple[int, int]] = []
    compared: list[int] = []
    objects = resources = (0, 0)
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
            objects, resources = alive(), (descriptors(), threading.active_count())
        if number >= calls // 2 and number % max(1, calls // 200) == 0:
            gc.collect()
            points.append((number, soak.resident()))
    assert alive() == objects
    assert (descriptors(), threading.active_count()) == resources
    assert len(counts) == 9, "expected every kind of call to occur"
    grown = slope(points)
    print(f"{calls} calls {counts}: {grown:+.1f} bytes per call over the second half, {len(compared)} compared")
    assert grown < bound
    if not fresh:
        return
    command = [sys.executable, "-m", "tests.faults.soak", str(path), str(seed), *map(str, results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == list(results.values())


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read from /proc (Linux)")
@pytest.mark.slow
def test_150_calls_leak_nothing(tiny_gguf: Path, record_property: Callable[[str, object], None]) -> None:
    run(tiny_gguf, 150, every=30, fresh=0, bound=SHORT_GROWTH, seed=1)
    record_property("inputs", 150)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read from /proc (Linux)")
def test_10000_calls_leak_nothing(tiny_gguf: Path, record_property: Callable[[str, object], None]) -> None:
    run(tiny_gguf, 10_000, every=500, fresh=5, bound=GROWTH, seed=2)
    record_property("inputs", 10_000)
