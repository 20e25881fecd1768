"""Progress bars: each ends at what was reported to it last."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tqdm

from llama.cli import batch, convert, study, verify
from llama.hub import transfer


class Bar:
    """A bar that keeps the counts it was drawn with."""

    made: list[Bar]

    def __init__(self, *, total: int = 0, initial: int = 0, **_: Any):
        self.total, self.n, self.desc, self.drawn = total, initial, "", list[int]()
        self.clear = lambda: None
        self.made.append(self)

    def refresh(self, *_: Any) -> None:
        self.drawn.append(self.n)

    def update(self, n: int) -> None:
        self.n += n
        self.refresh()

    def reset(self, total: int) -> None:
        self.n, self.total = 0, total

    def set_description(self, desc: str, refresh: bool) -> None:
        self.desc = f"{desc}: "

    set_postfix_str = refresh
    __enter__ = lambda self: self  # noqa: E731
    close = __exit__ = lambda *_: None


@pytest.fixture(autouse=True)
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(tqdm, "tqdm", Bar)
    Bar.made = []
    return Bar.made


Show = Callable[[str, int, int], None]


@contextlib.contextmanager
def of_verify() -> Iterator[Show]:
    with verify._bar(False) as (show, _):
        yield show


@contextlib.contextmanager
def of_download() -> Iterator[Show]:
    with transfer.progress_bar("model", 9, False) as show:
        yield lambda what, done, total: show(done)


@pytest.mark.parametrize(
    "bar", [of_verify, of_download, lambda: convert.progress_bar(False), lambda: contextlib.nullcontext(study._progress())]
)  # fmt: skip
def test_a_bar_shows_the_counts_that_are_reported(bar: Any, bars: list[Bar]) -> None:
    with bar() as show:
        for done in (0, 2, 3, 7, 9):
            show("writing", done, 9)
            assert bars[0].n == done
        assert bars[0].drawn[-5:] == [0, 2, 3, 7, 9]
        assert bars[0].total == 9
    assert len(bars) == 1


def test_the_bar_of_a_batch_is_drawn_twice_a_second_and_at_the_end(
    bars: list[Bar], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with batch.progress(argparse.Namespace(quiet=False), 10, 4) as show:
        assert (bars[0].total, bars[0].n) == (10, 4)
        for seconds, done in ((0.1, 5), (0.4, 5), (0.6, 6), (0.9, 7), (1.2, 8), (1.3, 9), (1.4, 10)):
            now = 100.0 + seconds
            show(done, 50)
    assert bars[0].drawn == [6, 8, 10]
