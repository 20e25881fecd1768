"""Progress bars: each ends at what was reported to it last."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
import torch
import tqdm

from llama.cli import answers, batch, streams, study, verify
from llama.text import Llama, Session
from llama.tokenizer.gguf import from_metadata

from . import tiny
from .conftest import Run


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


@pytest.mark.parametrize(
    "bar", [of_verify, lambda: streams.progress(False, "weight"), lambda: contextlib.nullcontext(study._progress())]
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


# --------------------------------------------------------------------------------------------------- a long prompt
@pytest.mark.parametrize("length", [1, 256, 257, 600])
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_the_progress_of_a_prompt_counts_the_tokens_that_the_model_has_seen(length: int, draft: str | None) -> None:
    """A hook counts the tokens independently."""
    model, seen, shown = tiny.model(dataclasses.replace(tiny.CONFIG, max_seq_len=1000)), [], []
    llm = Llama(model, from_metadata(tiny.byte_vocabulary(), "x"))
    model.tok_embeddings.register_forward_hook(lambda layer, args, out: seen.append(args[0].numel()))
    prompt = torch.arange(length).remainder(300).tolist()
    session = Session()

    def progress(done: int, total: int) -> None:
        assert done == sum(seen)
        shown.append((done, total))

    first = list(llm.stream_ids(prompt, max_new_tokens=1, session=session, draft=draft, progress=progress))
    assert shown == [(min(end, length), length) for end in range(256, length + 256, 256)]
    shown.clear(), seen.clear()
    again = list(llm.stream_ids([*prompt, 7, 8], max_new_tokens=1, session=session, progress=progress))
    assert shown == [(2, 2)]  # the rest is in the session's cache
    assert first[-1].completion is not None
    assert again[-1].completion is not None


def test_the_bar_of_a_prompt_appears_for_long_prompts_only_and_is_removed(
    bars: list[Bar], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Bar] = []
    monkeypatch.setattr(Bar, "close", lambda bar: closed.append(bar))
    with answers.PromptBar(argparse.Namespace(quiet=False)) as show:
        show(9, 9)
        assert not bars
        for done in (256, 512, 600):
            show(done, 600)
        assert (bars[0].n, bars[0].total, closed) == (600, 600, bars)
        show(256, 300)  # the next prompt has its own bar
        assert len(bars) == 2
    assert closed == bars
    with answers.PromptBar(argparse.Namespace(quiet=True)) as show:
        show(256, 600)
    assert len(bars) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal")
def test_a_terminal_shows_the_bar_and_then_only_the_answer(clearllama: Run, tiny_gguf: Path) -> None:
    code = "from llama.cli import answers, main; answers.PromptBar.DELAY = 0; raise SystemExit(main())"
    words = ["generate", "--raw", "a" * 900, "-m", str(tiny_gguf), "-n", "4", "--max-seq-len", "1000", "--temp", "0"]
    child = pexpect.spawn(sys.executable, ["-c", code, *words, "--device", "cpu"], encoding="utf-8", timeout=60)
    written = child.read()
    child.close()
    assert child.exitstatus == 0, written
    assert "/900 [" in written
    lines = screen(written)
    (start,) = (at for at, line in enumerate(lines) if "continued as plain text" in line)
    assert "900 prompt tokens" in lines[-1]
    assert "prompt:" not in "".join(lines[start + 1 : -1])
    assert b"/900 [" not in clearllama(*words).stderr


def screen(written: str) -> list[str]:
    """The lines of a terminal after a program has written to it: a carriage return goes to the start of the line."""
    lines = []
    for line in written.replace("\r\n", "\n").removesuffix("\n").split("\n"):
        cells = ""
        for part in line.split("\r"):
            cells = part + cells[len(part) :]
        lines.append(cells.rstrip())
    return lines
