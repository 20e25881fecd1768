"""Fields of other servers: translated, left out and named, or refused."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any

import pytest

from llama.errors import UsageError
from llama.server.dialects import ANY, GUIDED, INSTEAD, OPENAI, WITHOUT_EFFECT, standard
from llama.server.requests import CHAT_FIELDS, parse_chat, parse_text
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


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_field_without_effect_is_left_out_and_named(name: str, tiny_llm: Llama) -> None:
    value = {"any": 1} if WITHOUT_EFFECT[name] is ANY else WITHOUT_EFFECT[name]
    assert name not in CHAT_FIELDS
    assert standard({name: value}) == ({}, [name])
    assert options(tiny_llm, **{name: value}) == options(tiny_llm)
    strict = standard({name: value}, strict=True)
    assert strict == (({}, [name]) if name in [*OPENAI.split(), "modalities", "background"] else ({name: value}, []))


@pytest.mark.parametrize("name", [name for name, value in WITHOUT_EFFECT.items() if value is not ANY])
def test_with_another_value_it_is_refused(name: str, tiny_llm: Llama) -> None:
    value = WITHOUT_EFFECT[name]
    other: Any = {bool: not value, int: 2, list: ["x"], str: 5}[type(value)]
    expected = "structured_outputs|JSON schema" if name in GUIDED else f"^unknown key '{name}'"
    with pytest.raises(UsageError, match=expected) as error:
        options(tiny_llm, **{name: other})
    assert (
        name in GUIDED or INSTEAD.get(name, f"only {value!r} changes nothing: leave it out") in str(error.value)[:200]
    )


@pytest.mark.parametrize("name", INSTEAD)
def test_a_field_that_selects_or_constrains_is_refused_with_the_remedy(name: str, tiny_llm: Llama) -> None:
    more = {"presence_penalty": 1}  # without a penalty, what it counts has no effect
    with pytest.raises(UsageError) as error:
        options(tiny_llm, **{name: ["x"]}, **more)
    assert str(error.value) == f"unknown key '{name}'; {INSTEAD[name]}"
    assert len(str(error.value)) <= 200


def test_an_unknown_field_is_named_with_the_one_meant(tiny_llm: Llama) -> None:
    for name, words in (("temprature", "did you mean 'temperature'?"), ("zz", "docs/guides/serving.md")):
        with pytest.raises(UsageError, match=f"^unknown key '{name}'; {re.escape(words)}"):
            options(tiny_llm, **{name: 1})
    body, _ = standard({**HELLO, "cache_prompt": True}, strict=True)
    with pytest.raises(UsageError, match=r"unknown key 'cache_prompt'; leave it out$"):
        parse_chat(body, tiny_llm, "tiny")


@pytest.mark.parametrize("penalty", ["repeat_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_what_a_penalty_counts_matters_only_with_a_penalty(tiny_llm: Llama, penalty: str) -> None:
    off = 1 if "re" in penalty[:2] and penalty != "presence_penalty" else 0
    limits = {"repeat_last_n": 64, "penalize_nl": False}
    for fields in ({}, {penalty: off}, {penalty: float(off)}):
        assert standard({**limits, **fields})[1] == [*limits]
        assert options(tiny_llm, **limits, **fields) == options(tiny_llm, **fields)
    for name in limits:
        with pytest.raises(UsageError, match=f"unknown key '{name}'"):
            options(tiny_llm, **{name: limits[name], penalty: 1.1})


DEFAULT = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]


@pytest.mark.parametrize("order", [DEFAULT, [name for name in DEFAULT if name != "penalties"], "edskypmxt", "kpmt"])
def test_the_default_order_of_the_filters_is_accepted(tiny_llm: Llama, order: Any) -> None:
    assert standard({"samplers": order}) == ({}, ["samplers"])
    for other in (order[::-1], order[:-1], order[:1], []):
        with pytest.raises(UsageError, match="unknown key 'samplers'; the order is fixed"):
            options(tiny_llm, samplers=other)


def test_the_options_of_ollama_are_fields(tiny_llm: Llama) -> None:
    nested = {"num_predict": 7, "repeat_penalty": 1.2, "top_k": 5, "num_ctx": 99, "seed": None, "mirostat": 0}
    body, ignored = standard({"options": nested, "keep_alive": "5m"})
    assert body == {"max_tokens": 7, "repetition_penalty": 1.2, "top_k": 5}
    assert ignored == ["keep_alive", "num_ctx", "mirostat"]
    with pytest.raises(UsageError, match="temperature and temperature differ"):
        options(tiny_llm, temperature=1, options={"temperature": 0})
    with pytest.raises(UsageError, match="unknown key 'mirostat'; only 0 changes nothing"):
        options(tiny_llm, options={"mirostat": 2})


def test_other_forms_of_a_value(tiny_llm: Llama) -> None:
    ids = {"5": -1.0, "7": -1000.0}
    assert options(tiny_llm, logit_bias=[[5, -1.0], [7, False]]) == options(tiny_llm, logit_bias=ids)
    assert options(tiny_llm, add_special_tokens=False) == options(tiny_llm)
    assert standard({"prompt": "a", "add_special_tokens": True}) == ({"prompt": "a"}, ["add_special_tokens"])
    assert standard({"prompt": "a", "add_special_tokens": False})[1] == []
    assert options(tiny_llm, logit_bias=[]) == options(tiny_llm) == options(tiny_llm, top_k=-1)
    for wrong in ([["hello", 1]], [[5]], [5], [[5, "x"]], [[-1, 1]]):
        with pytest.raises(UsageError, match="logit_bias"):
            options(tiny_llm, logit_bias=wrong)


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
        ({"format": "json"}, {"schema": {"type": "object"}}),
        ({"format": {"type": "integer"}, "grammar": ""}, {"schema": {"type": "integer"}}),
        (
            {"response_format": {"type": "json_schema", "schema": {"type": "integer"}}},  # as in llama.cpp
            {"schema": {"type": "integer"}},
        ),
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
        {"guided_json": '{"items": ' * 400 + "{}" + "}" * 400},
        {"guided_regex": "a", "structured_outputs": "b"},
        {"format": "xml"},
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
        assert post(server, body)[:2] == (200, "cache_prompt, mirostat, user")
        assert post(server, {**body, "stream": True})[:2] == (200, "cache_prompt, mirostat, user")
        assert post(server, {**HELLO, "max_tokens": 1})[:2] == (200, None)
        assert post(server, {**body, "mirostat": 2})[0] == 400
        for fields in ({"guided_choice": ["abc", "abd"]}, {"grammar": 'root ::= "ab" ("c" | "d")'}):
            _, _, text = post(server, {**HELLO, "max_tokens": 20, **fields})
            assert json.loads(text)["choices"][0]["message"]["content"] in ("abc", "abd")
        for name in GUIDED:  # the gate that limits how many grammars compile at once knows every name
            from llama.server.app import MAY_HAVE_SCHEMA

            assert MAY_HAVE_SCHEMA.search(json.dumps({name: 1}).encode())
