"""Waiting in tests: for conditions, with limits that only something that hangs exceeds, on a busy machine, too."""

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
