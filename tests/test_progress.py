"""The progress of a prompt."""

from __future__ import annotations

import dataclasses

import pytest
import torch

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
