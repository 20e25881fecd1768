"""What is appended to a prompt is exactly what continues it, for every kind of vocabulary and on every way."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama import loader
from llama.text import Completion, Llama, Session
from llama.tokenizer import Decoder, Tokenizer
from llama.tokenizer.gguf import from_metadata
from llama.tokenizer.huggingface import HuggingFaceTokenizer
from llama.tokenizer.sentencepiece import SentencePieceModelTokenizer

from . import tiny
from .test_tokenizer import piece_metadata, pieces_json
from .test_tokenizer_files import LIBRARY, MODEL

pytestmark = pytest.mark.usefixtures("one_thread")


KINDS: dict[str, Tokenizer] = {
    "GGUF": from_metadata(piece_metadata(LIBRARY), "pieces"),
    "no space added": from_metadata(piece_metadata(LIBRARY, **{"tokenizer.ggml.add_space_prefix": False}), "pieces"),
    "GGUF, bytes": from_metadata(tiny.byte_vocabulary(), "bytes"),
    "Strip": HuggingFaceTokenizer(pieces_json(LIBRARY, legacy=True), "strip"),
    "Metaspace": HuggingFaceTokenizer(pieces_json(LIBRARY, legacy=False), "metaspace"),
    "tokenizer.model": SentencePieceModelTokenizer(MODEL, "model"),
}


def streamed(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    decoder = Decoder(tokenizer, before)
    return "".join([decoder.feed(id) for id in ids]) + decoder.end()


@pytest.mark.parametrize("kind", KINDS)
@given(ids=st.lists(st.integers(0, 339), max_size=12), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_a_prompt_and_its_continuation_decode_to_the_joined_text(kind: str, ids: list[int], seed: int) -> None:
    """The oracle is `decode` of all ids. A prompt that ends inside a character has no text of its own there."""
    tokenizer = KINDS[kind]
    ids = [id % tokenizer.n_vocab for id in ids]
    ids += tokenizer.encode(random.Random(seed).choice(("the dog", " 12 Bull", "", "é漢😀  ")))
    whole = tokenizer.decode(ids)
    for split in range(len(ids) + 1):
        prompt = tokenizer.decode(ids[:split])
        text = streamed(tokenizer, ids[:split], ids[split:])
        joined = prompt + text
        assert joined == whole or (prompt.endswith("�") and whole.startswith(prompt.rstrip("�"))), (split, joined)
        assert whole.endswith(text)


# ------------------------------------------------------------------------------------------------- through a model
@pytest.fixture(scope="module")
def pieces_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model with a SentencePiece vocabulary. Most of its answers begin with a space."""
    config, metadata = dataclasses.replace(tiny.CONFIG, vocab_size=340), piece_metadata(LIBRARY)
    state, tokens = tiny.weights(config), metadata["tokenizer.ggml.tokens"]
    state["output.weight"][[i for i, token in enumerate(tokens) if token[0] == "▁"]] *= 9
    path = tmp_path_factory.mktemp("pieces") / "pieces.gguf"
    return tiny.write_gguf(path, config, state, metadata={**dict.fromkeys(tiny.byte_vocabulary()), **metadata})


@pytest.fixture(scope="module")
def llm(pieces_gguf: Path) -> Llama:
    return loader.load(pieces_gguf, dtype="float32", device="cpu")


WAYS = ("stream", "batch", "draft", "session")


def answer(llm: Llama, way: str, prompt: str, **options: Any) -> Completion:
    if way == "batch":
        done: Completion = llm.generate([prompt, "the"], **options)[0]
        return done
    more: dict[str, Any] = {"draft": {"draft": "ngram"}, "session": {"session": Session()}}.get(way, {})
    pieces = list(llm.stream(prompt, **options, **more))
    assert pieces[-1].completion is not None
    assert "".join(piece.text for piece in pieces) == pieces[-1].completion.text
    return pieces[-1].completion


@pytest.mark.parametrize("way", WAYS)
def test_prompt_and_text_join_on_every_way(llm: Llama, way: str) -> None:
    spaces = 0
    for seed, prompt in enumerate(("12", "the dog", "", "12", "the")):
        done = answer(llm, way, prompt, max_new_tokens=4, temperature=3.0, seed=seed)
        ids = llm.tokenizer.encode_prompt(prompt)
        assert prompt + done.text == llm.tokenizer.decode([*ids, *done.tokens])
        spaces += bool(prompt) and done.text.startswith(" ")
    assert spaces


def test_an_answer_in_a_chat_is_a_text_of_its_own(llm: Llama) -> None:
    """As transformers decodes it: without the space that the vocabulary adds before every text."""
    messages = [{"role": "user", "content": "12"}]
    chat = Llama(llm.model, llm.tokenizer, "{{ messages[0].content }}")
    texts = set()
    for seed in range(20):
        options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 3.0, "seed": seed}
        done, (*_, last) = chat.chat(messages, **options), llm.stream_ids(llm.tokenizer.encode("12"), **options)
        assert last.completion is not None
        assert done.tokens == last.completion.tokens
        assert done.text == last.completion.text.removeprefix(" ") == llm.tokenizer.decode(done.tokens)
        texts.add(last.completion.text[:1])
    assert " " in texts
