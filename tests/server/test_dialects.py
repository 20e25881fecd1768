"""Fields of other servers: translated, left out and named, or refused."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from llama.errors import UsageError
from llama.server.dialects import GUIDED, IGNORED, NEUTRAL, OPENAI, standard
from llama.server.requests import CHAT_FIELDS, TEXT_FIELDS, parse_chat, parse_text
from llama.text import Llama

from .serving import running

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"


def options(llm: Llama, **fields: Any) -> Any:
    """Ids and options of a chat request."""
    body, _ = standard({**HELLO, "max_tokens": 9, "seed": 1, **fields})
    (job,) = parse_chat(body, llm, "tiny").jobs
    return job.ids, job.params


def post(server: Any, body: dict[str, Any], path: str = CHAT) -> tuple[int, str | None, Any]:
    """Status, the header that names the fields without effect, and the body of a response."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    return response.status, response.getheader("X-Clearllama-Ignored"), text


@pytest.mark.parametrize("name", [*f"{OPENAI} {IGNORED}".split(), *NEUTRAL])
def test_a_field_without_effect_is_left_out_and_named(name: str, tiny_llm: Llama) -> None:
    value = NEUTRAL.get(name, {"any": 1})
    assert name not in CHAT_FIELDS | TEXT_FIELDS
    assert standard({name: value}) == ({}, [name])
    assert options(tiny_llm, **{name: value}) == options(tiny_llm)
    strict = standard({name: value}, strict=True)
    assert strict == (({}, [name]) if name in OPENAI.split() else ({name: value}, []))


@pytest.mark.parametrize("name", NEUTRAL)
def test_with_another_value_it_is_refused(name: str, tiny_llm: Llama) -> None:
    other = {bool: not NEUTRAL[name], int: 2, list: ["x"]}[type(NEUTRAL[name])]
    with pytest.raises(UsageError, match=f"unknown key '{name}'"):
        options(tiny_llm, **{name: other})


@pytest.mark.parametrize("name", ["lora_adapters", "samplers", "allowed_token_ids", "think", "stop_regex", "options"])
def test_a_field_that_selects_or_constrains_is_refused(name: str, tiny_llm: Llama) -> None:
    with pytest.raises(UsageError, match=f"unknown key '{name}'"):
        options(tiny_llm, **{name: [1]})


def test_what_a_penalty_counts_matters_only_with_a_penalty(tiny_llm: Llama) -> None:
    for fields in ({}, {"repeat_penalty": 1}, {"repeat_penalty": 1.0}):
        assert standard({"repeat_last_n": 64, **fields})[1] == ["repeat_last_n"]
        assert options(tiny_llm, repeat_last_n=64, **fields) == options(tiny_llm, **fields)
    with pytest.raises(UsageError, match="unknown key 'repeat_last_n'"):
        options(tiny_llm, repeat_last_n=64, repeat_penalty=1.1)


def test_synonyms_act(tiny_llm: Llama) -> None:
    assert options(tiny_llm, repeat_penalty=1.3) == options(tiny_llm, repetition_penalty=1.3) != options(tiny_llm)
    body, _ = standard({"prompt": "a", "n_predict": 3})
    assert parse_text(body, tiny_llm, "tiny").jobs[0].params.max_new_tokens == 3
    with pytest.raises(UsageError, match="repeat_penalty and repetition_penalty differ"):
        options(tiny_llm, repeat_penalty=1.3, repetition_penalty=1.2)
    with pytest.raises(UsageError, match="unknown key 'repeat_penalty'"):
        parse_chat(standard({**HELLO, "repeat_penalty": 1.3}, strict=True)[0], tiny_llm, "tiny")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_json": {"type": "integer"}}, {"schema": {"type": "integer"}}),
        ({"guided_json": '{"type": "integer"}'}, {"schema": {"type": "integer"}}),
        ({"json_schema": {"type": "integer"}}, {"schema": {"type": "integer"}}),
        ({"guided_regex": "[0-9]+"}, {"regex": "[0-9]+"}),
        ({"guided_choice": ["yes", 'no "'], "guided_json": None}, {"grammar": r'start: "yes" | "no \""'}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"json_object": True}}, {"schema": {"type": "object"}}),
        ({"structured_outputs": {"json_object": False, "regex": "a"}}, {"regex": "a"}),
        ({"response_format": {"type": "json_object"}}, {"schema": {"type": "object"}}),
    ],
)
def test_constraints_act(fields: dict[str, Any], expected: dict[str, Any], tiny_llm: Llama) -> None:
    params = options(tiny_llm, **fields)[1]
    found = {name: getattr(params, name) for name in ("schema", "regex", "grammar")}
    assert {name: source for name, source in found.items() if source is not None} == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {}, "guided_regex": "a"},
        {"guided_json": {}, "response_format": {"type": "json_object"}},
        {"guided_choice": []},
        {"guided_regex": "a", "structured_outputs": {"regex": "b"}},
        {"structured_outputs": {"structural_tag": "x"}},
        {"grammar": "root ::= x"},
        {"grammar": "root ::= " + "(" * 5000},
    ],
)
def test_constraints_that_contradict_or_are_unknown_are_refused(fields: dict[str, Any], tiny_llm: Llama) -> None:
    with pytest.raises(UsageError):
        options(tiny_llm, **fields)


def test_who_continues_the_last_message(tiny_llm: Llama) -> None:
    """vLLM's two options are accepted where they say what happens anyway."""
    begun = [*HELLO["messages"], {"role": "assistant", "content": "Once"}]
    assert options(tiny_llm, add_generation_prompt=True, continue_final_message=False) == options(tiny_llm)
    same = options(tiny_llm, messages=begun, add_generation_prompt=False, continue_final_message=True)
    assert same == options(tiny_llm, messages=begun)
    for wrong in ({"add_generation_prompt": False}, {"continue_final_message": True}):
        with pytest.raises(UsageError, match="continues the last message"):
            options(tiny_llm, **wrong)
        with pytest.raises(UsageError, match="continues the last message"):
            options(tiny_llm, messages=begun, **{name: not value for name, value in wrong.items()})


def test_the_response_names_the_ignored_fields_and_a_choice_is_kept(tiny_llm: Llama) -> None:
    with running(tiny_llm) as server:
        body = {**HELLO, "max_tokens": 8, "cache_prompt": True, "mirostat": 0, "user": "Ann"}
        assert post(server, body)[:2] == (200, "user, cache_prompt, mirostat")
        assert post(server, {**body, "stream": True})[:2] == (200, "user, cache_prompt, mirostat")
        assert post(server, {**HELLO, "max_tokens": 1})[:2] == (200, None)
        assert post(server, {**body, "mirostat": 2})[0] == 400
        for fields in ({"guided_choice": ["abc", "abd"]}, {"grammar": 'root ::= "ab" ("c" | "d")'}):
            _, _, text = post(server, {**HELLO, "max_tokens": 20, **fields})
            assert json.loads(text)["choices"][0]["message"]["content"] in ("abc", "abd")
        for name in GUIDED:  # the gate that limits how many grammars compile at once knows every name
            from llama.server.app import MAY_HAVE_SCHEMA

            assert MAY_HAVE_SCHEMA.search(json.dumps({name: 1}).encode())
