"""Tests wait for conditions, with limits that only a hanging program exceeds, even on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 240  # seconds; pytest's own limit for a test is 300


def until(true: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
