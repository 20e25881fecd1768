"""Signals that end the program, and a handler for them during a block."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

ENDING = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # Windows has no SIGHUP


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Let `handler` handle SIGINT, SIGTERM and SIGHUP inside the block. Ignored signals stay ignored (nohup)."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    for number, old in previous.items():
        if old is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
