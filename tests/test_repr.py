"""What objects say about themselves, and the error for an id that is not in the vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

import llama
from llama.errors import UsageError
from llama.text import Llama, Session
from llama.tokenizer import Decoder

from . import tiny
from .test_control_ids import OTHERS, TURNS


def test_a_repr_is_one_short_line_with_the_facts(tiny_llm: Llama) -> None:
    config, tokenizer = tiny_llm.model.config, tiny_llm.tokenizer
    assert f"{config.n_params:,} parameters, context {config.max_seq_len:,}, torch.float32" in repr(tiny_llm)
    assert repr(tokenizer) == "ByteLevelTokenizer(byte-level BPE (smollm), 266 ids, 3 of them control ids)"
    assert repr(tokenizer) in repr(tiny_llm)
    assert repr(tiny_llm).endswith("chat: template)")
    assert repr(Llama(tiny_llm.model, tokenizer, chat_format="llama3")).endswith("chat: llama3)")
    assert repr(Llama(tiny_llm.model, tokenizer)).endswith("chat: none)")
    first, *_ = repr(tiny_llm.model).splitlines()[1:]
    assert first.strip() == tiny_llm.model.extra_repr()
    for tokenizer in (*TURNS.values(), *OTHERS.values()):
        assert "\n" not in repr(tokenizer)
        assert f"{tokenizer.n_vocab:,} ids" in repr(tokenizer)


def test_the_repr_of_an_answer_does_not_grow_with_it(tiny_llm: Llama) -> None:
    session = Session()
    short = tiny_llm.generate("hello", max_new_tokens=2, temperature=2.0, seed=1, session=session)
    long = tiny_llm.generate("hello", max_new_tokens=200, temperature=2.0, seed=1)
    assert repr(short) == f"Completion({short.text!r}, 2 tokens, finish_reason='length')"
    text = "word's \n" * 9
    cut = f'Completion({repr(text)[:76]}"..., {len(long.tokens)} tokens, finish_reason={long.finish_reason!r})'
    assert repr(dataclasses.replace(long, text=text)) == cut
    assert repr(session) == f"Session({len(session.tokens)} tokens, 0 messages)"
    assert len(session.tokens) > 1


# ---------------------------------------------------------------------------------------------------------------- ids
USES: dict[str, Callable[[Llama, int], object]] = {
    "decode": lambda llm, id: llm.tokenizer.decode([5, id]),
    "token_bytes": lambda llm, id: llm.tokenizer.token_bytes(id),
    "decoder": lambda llm, id: Decoder(llm.tokenizer).feed(id),
    "stream_ids": lambda llm, id: list(llm.stream_ids([5, id], max_new_tokens=1)),
    "model": lambda llm, id: llm.model(torch.tensor([[5, id], [6, 7]])),
    "cached": lambda llm, id: llm.model(torch.tensor([[id]]), cache=llm.model.new_cache()),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("id", [-1, 320, 2**40])
def test_an_unknown_id_is_an_error_that_names_it(tiny_llm: Llama, use: str, id: int) -> None:
    with pytest.raises(UsageError, match=rf"^token id {id} is not in the vocabulary; expected 0 to \d+$") as caught:
        USES[use](tiny_llm, id)
    assert isinstance(caught.value, llama.LlamaError)


@pytest.mark.slow  # imports torch._dynamo and the operators of the meta device
def test_the_check_of_ids_is_skipped_where_tokens_have_no_values() -> None:
    model, tokens = tiny.model(), torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(torch.compile(model, backend="eager")(tokens), model(tokens))
    with torch.device("meta"):
        assert llama.Transformer(tiny.CONFIG)(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 320)
