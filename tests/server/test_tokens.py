"""/tokenize, /detokenize and /apply-template, against the tokenizer and jinja2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jinja2
import pytest
import requests

from llama.errors import ContextLengthError
from llama.server.requests import parse_chat, tokenize
from llama.text import LONGEST_TOKEN, Llama

from .serving import Running, running

TEXTS = ("Hello world", "", " é 字\U0001f999\n\ta", "<|im_start|>user\nHi<|im_end|>", "a" * 300)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<|im_end|> é?"}]


@pytest.fixture(scope="module")
def server(tiny_llm: Llama) -> Iterator[Running]:
    with running(tiny_llm, key="secret", body=2**14) as found:
        yield found


def ask(server: Running, path: str, key: str = "secret", **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}", **body.pop("headers", {})}
    answer = requests.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)
    return answer.json() if answer.ok else answer.status_code


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_tokenizer(server: Running, tiny_llm: Llama, text: str, special: bool) -> None:
    options: dict[str, Any] = {} if special else {"parse_special": False}  # True is the default, as in llama.cpp
    ids = tiny_llm.tokenizer.encode(text, parse_special=special)
    assert ask(server, "/tokenize", content=text, **options) == {"tokens": ids}
    whole = tiny_llm.tokenizer.encode_prompt(text, parse_special=special)
    assert ask(server, "/tokenize", content=text, add_special=True, **options) == {"tokens": whole}
    found = ask(server, "/tokenize", content=text, with_pieces=True, **options)["tokens"]
    assert [one["id"] for one in found] == ids
    pieces = [one["piece"] for one in found]
    assert b"".join(one.encode() if isinstance(one, str) else bytes(one) for one in pieces).decode() == text
    assert any(isinstance(one, list) for one in pieces) == ("字" in text)
    if len(ids) < tiny_llm.model.max_seq_len:
        assert ask(server, "/detokenize", tokens=ids) == {"content": text}


def test_a_template_is_applied_as_for_a_chat(server: Running, tiny_llm: Llama) -> None:
    prompt = ask(server, "/apply-template", messages=MESSAGES, temperature=0.5)["prompt"]
    template = jinja2.Environment(autoescape=False).from_string(str(tiny_llm.chat_template))
    assert prompt == template.render(messages=MESSAGES, add_generation_prompt=True)
    (job,) = parse_chat({"messages": MESSAGES}, tiny_llm, "tiny").jobs
    plain = prompt.replace("<|im_end|> é", "")  # the user's text is never a control token
    found = ask(server, "/tokenize", content=plain)["tokens"]
    controls = set(tiny_llm.tokenizer.control.values())
    assert [id for id in found if id in controls] == [id for id in job.ids if id in controls]


def test_these_endpoints_have_the_limits_of_the_others(server: Running, tiny_llm: Llama) -> None:
    bodies: dict[str, Any] = {
        "/tokenize": {"content": "a"},
        "/detokenize": {"tokens": [5]},
        "/apply-template": {"messages": MESSAGES},
    }
    for path, body in bodies.items():
        assert isinstance(ask(server, path, **body), dict)
        assert ask(server, path, key="wrong", **body) == 401
        assert ask(server, path, headers={"Host": "a.example"}, **body) == 400
        assert ask(server, path, **body, user="a" * 2**14) == 413
        assert ask(server, path, **body, model="other") == 404
        assert ask(server, path, **body, unknown=1) == 400
        assert requests.get(f"{server.url}{path}", timeout=60).status_code == 405
    for wrong in ({"content": ["a"]}, {"content": None}, {"content": "a", "add_special": 1}):
        assert ask(server, "/tokenize", **wrong) == 400
    for ids in ([-1], [10**6], ["a"], [True], [5] * tiny_llm.model.max_seq_len, "a"):
        assert ask(server, "/detokenize", tokens=ids) == 400
    assert ask(server, "/detokenize", tokens=[]) == {"content": ""}
    with pytest.raises(ContextLengthError):
        tokenize({"content": "a" * LONGEST_TOKEN * tiny_llm.model.max_seq_len}, tiny_llm, "tiny")
