"""The progress of a prompt, and of loading."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llama import cli, loader
from llama.cli.common import loading
from llama.text import Llama, Session
from llama.tokenizer.gguf import from_metadata

from . import tiny


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


def test_the_progress_of_loading_counts_the_bytes_of_the_model(tiny_gguf: Path) -> None:
    plan = loader.make_plan(loader.open_model(tiny_gguf), loader.LoadOptions(device="cpu", fast=True))
    shown: list[tuple[int, int]] = []
    model = loader.build_plan(plan, loader.empty_model(plan), lambda done, total: shown.append((done, total)))
    total = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert {size for _, size in shown} == {total}
    assert [done for done, _ in shown] == sorted({done for done, _ in shown})
    assert shown[-1] == (total, total)


@pytest.mark.parametrize(
    ("quiet", "terminal", "delay"), [(False, True, 0), (True, True, 0), (False, False, 0), (False, True, 60)]
)
def test_slow_loading_shows_a_bar_on_a_terminal(
    tiny_gguf: Path, quiet: bool, terminal: bool, delay: float, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(loading, "DELAY", delay)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert cli.main(["generate", "--raw", "a", "-n", "1", "-m", str(tiny_gguf), *["--quiet"] * quiet]) == 0
    err = capsys.readouterr().err
    assert ("\rloading:" in err) is (not quiet and terminal and delay == 0)
    assert "loading" not in err.split("\r")[-1]  # it is removed
