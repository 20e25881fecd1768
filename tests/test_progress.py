"""Progress bars: each ends at what was reported to it last."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
import tqdm

from llama.cli import streams
from llama.text import Llama, Session
from llama.tokenizer.gguf import from_metadata

from . import tiny


class Bar:
    """A bar that keeps the counts it was drawn with."""

    made: list[Bar]

    def __init__(self, *, total: int = 0, initial: int = 0, **_: Any):
        self.total, self.n = total, initial
        self.made.append(self)

    def update(self, n: int) -> None:
        self.n += n

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(tqdm, "tqdm", Bar)
    Bar.made = []
    return Bar.made


def test_each_part_has_a_bar_with_the_counts_reported_which_is_closed_when_it_is_complete(
    bars: list[Bar], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Bar] = []
    monkeypatch.setattr(Bar, "close", lambda bar: closed.append(bar))
    with streams.progress(False, "weight") as show:
        for done in (2, 3, 7):
            show("writing", done, 9)
            assert [(bar.n, bar.total) for bar in bars] == [(done, 9)]
        show("writing", 9, 9)
        assert closed == bars
        show("checking", 1, 2)
        assert (len(bars), len(closed)) == (2, 1)
    assert closed == bars
    for quiet in (True, False):
        with streams.progress(quiet, "weight") as show:
            show("writing", 1, 2)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert len(bars) == 2


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
