"""Control strings in raw text: control tokens on request, and only then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from llama.chat import encode_chat, render
from llama.chat.sandbox import Controls
from llama.errors import UsageError
from llama.text import Llama
from llama.tokenizer import Tokenizer
from llama.tokenizer.common import LLAMA3_WORDS
from llama.tokenizer.tiktoken import TiktokenTokenizer, control_strings, parse

from .conftest import Run
from .scripts import make_tiny
from .test_control_ids import MODEL, OTHERS, TEMPLATE, TURNS, turns_json

KINDS: dict[str, Tokenizer] = {**TURNS, **OTHERS}
PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def texts_of(tokenizer: Tokenizer) -> Any:
    """Return a strategy of texts made of control strings, parts of them, and words."""
    names = [name for name in tokenizer.control if name]
    parts = [*names[:6], *(name[:-1] for name in names[:3]), "hello", "the ", " ", "\n", "é", "<", "|>"]
    return st.lists(st.sampled_from(parts), max_size=8).map("".join)


# ------------------------------------------------------------------------------------------------- against libraries
@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@settings(max_examples=25)
def test_texts_are_split_as_rendered_templates_are(name: str, data: st.DataObject) -> None:
    """sandbox.Controls splits what a template renders, with an index instead of a regular expression."""
    tokenizer = KINDS[name]
    text = data.draw(texts_of(tokenizer))
    controls = Controls([control for control in tokenizer.control if control])
    pieces = tokenizer.split_control(text)
    assert [piece for piece, _ in pieces] == controls.split(text)
    assert all(is_control == (piece in tokenizer.control) for piece, is_control in pieces)


@given(text=texts_of(TURNS["tokenizer.json"]))
@example("<end_of_turn><end_of_turn>\n")
@settings(max_examples=50)
def test_ids_of_a_tokenizer_json_are_those_of_its_library(text: str) -> None:
    """The library matches added tokens in every text, unless they are removed."""
    backend = Backend.from_str(turns_json().decode())
    assert TURNS["tokenizer.json"].encode(text, parse_special=True) == backend.encode(text).ids


LLAMA3 = make_tiny.tiktoken_model(512)
TIKTOKEN = TiktokenTokenizer(LLAMA3, "x")
REFERENCE = tiktoken.Encoding(
    name="reference",
    pat_str=LLAMA3_WORDS,
    mergeable_ranks={token: rank for rank, token in enumerate(parse(LLAMA3, "x"))},
    special_tokens={name: 512 + i for i, name in enumerate(control_strings())},
)


@given(text=texts_of(TIKTOKEN))
@settings(max_examples=50)
def test_ids_of_tiktoken_are_those_of_its_library(text: str) -> None:
    expected = REFERENCE.encode(text, allowed_special="all")
    assert TIKTOKEN.encode(text, parse_special=True) == TIKTOKEN(text, parse_special=True) == expected


def test_ids_of_sentencepiece_are_those_of_its_library_between_control_ids() -> None:
    tokenizer, library = TURNS["tokenizer.model"], sentencepiece.SentencePieceProcessor(model_proto=MODEL)
    start = tokenizer.control["<start_of_turn>"]
    expected = [start, *library.encode("the dog"), tokenizer.eos_id, *library.encode(" bites")]
    assert tokenizer.encode("<start_of_turn>the dog</s> bites", parse_special=True) == expected


@pytest.mark.parametrize("name", [name for name in TURNS if "<start_of_turn>" in TURNS[name].control])
def test_a_rendered_conversation_has_the_ids_of_the_conversation(name: str) -> None:
    messages = [{"role": "user", "content": "hello the"}, {"role": "assistant", "content": " a\n"}]
    text = render(TEMPLATE, messages, TURNS[name])
    assert TURNS[name].encode(text, parse_special=True) == encode_chat(TURNS[name], TEMPLATE, messages)


# ---------------------------------------------------------------------------------------------------------- the rules
@pytest.mark.parametrize("name", KINDS)
def test_without_the_request_text_stays_text(name: str) -> None:
    tokenizer = KINDS[name]
    control = next(text for text in tokenizer.control if text)
    assert tokenizer.encode(control, parse_special=True) == [tokenizer.control[control]]
    assert tokenizer.control[control] not in tokenizer.encode(control)
    assert tokenizer.encode("hello", parse_special=True) == tokenizer.encode("hello")
    assert tokenizer.encode("", parse_special=True) == tokenizer.encode("") == []


def test_a_prompt_begins_with_at_most_one_bos() -> None:
    bos = TIKTOKEN.bos_id
    ids = TIKTOKEN.encode_prompt("<|begin_of_text|>the", parse_special=True)
    assert ids == TIKTOKEN.encode_prompt("the", parse_special=True) == TIKTOKEN.encode_prompt("the")
    assert ids.count(bos) == 1  # type: ignore[arg-type]
    assert TIKTOKEN.encode_prompt("", parse_special=True) == [bos]
    assert TIKTOKEN.encode("<|begin_of_text|>", bos=True, parse_special=True) == [bos, bos]  # as requested


def test_a_million_candidates_are_split_in_bounded_time() -> None:
    assert TIKTOKEN.split_control("<" * 10**6 + "<|eot_id|>")[1:] == [("<|eot_id|>", True)]


# ------------------------------------------------------------------------------------------------ Python and command
def test_generate_continues_what_a_chat_continues(tiny_llm: Llama) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 2.0, "seed": 1}
    expected = tiny_llm.chat([{"role": "user", "content": "hello"}], **options).tokens
    assert tiny_llm.generate(PROMPT, parse_special=True, **options).tokens == expected
    assert [c.tokens for c in tiny_llm.generate([PROMPT], parse_special=True, **options)] == [expected]
    one_by_one = tiny_llm.generate([PROMPT], parse_special=True, session=None, draft="ngram", max_new_tokens=6)
    assert one_by_one[0].tokens == tiny_llm.chat([{"role": "user", "content": "hello"}], max_new_tokens=6).tokens
    assert tiny_llm.generate(PROMPT, **options).stats.prompt_tokens > len(
        tiny_llm.tokenizer(PROMPT, parse_special=True)
    )
    with pytest.raises(UsageError, match="'parse_special' does not apply to this call"):
        tiny_llm.chat([{"role": "user", "content": "hello"}], parse_special=True)


def test_the_command_reads_control_tokens_on_request(clearllama: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    command = ("generate", "-m", str(tiny_gguf), "--json", "-n", "6", "--temp", "2", "--seed", "1", "--dtype", "fp32")
    chat = json.loads(clearllama(*command, "hello").stdout)
    special = clearllama(*command, "--raw", "--parse-special", PROMPT)
    plain = clearllama(*command, "--raw", PROMPT)
    assert json.loads(special.stdout)["tokens"] == chat["tokens"]
    assert b"as plain text" not in special.stderr
    assert json.loads(plain.stdout)["prompt_tokens"] > chat["prompt_tokens"]
    hint = b"the prompt contains <|im_start|>, <|im_end|> as plain text; --parse-special enables control tokens"
    assert [line for line in plain.stderr.splitlines() if hint in line]
    assert hint[-20:] not in clearllama(*command, "--raw", "<|im_start").stderr
    for words, message in (
        ((), b"--parse-special needs --raw"),
        (("--raw", "--suffix", "x"), b"--suffix reads the prompt as plain text: leave --parse-special out"),
        (("--raw", "--prompts", "x"), b"--prompts reads the prompts from x: leave --parse-special out"),
    ):
        done = clearllama(*command[:3], "--parse-special", *words, *([] if "--prompts" in words else ["hi"]))
        assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
        assert message in done.stderr
