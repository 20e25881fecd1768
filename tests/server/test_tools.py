"""Tools and structured output through the official client."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pydantic
import pytest
from openai.lib._pydantic import to_strict_json_schema

from llama.generation.answer import Completion, Piece, Stats
from llama.generation.structured import warn_once
from llama.sampling import Token
from llama.server.api import Choice
from llama.server.openai import Chat
from llama.server.requests import AnswerRequest, closed, parse_chat, response_format, structured_outputs
from llama.server.spelling import Spelling
from llama.text import Llama
from tests.server.serving import Running, running, with_tools

MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


class City(enum.StrEnum):
    PARIS = "Paris"
    ROME = "Rome"


class Weather(pydantic.BaseModel):
    city: City  # in $defs of the schema
    degrees: int = pydantic.Field(ge=0, le=40)


SCHEMA = {**Weather.model_json_schema(), "additionalProperties": False}
NOTHING = {"type": "object", "additionalProperties": False}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": NOTHING}},
]


@pytest.fixture(scope="module")
def server(tiny_llm: Llama) -> Iterator[Running]:
    with running(with_tools(tiny_llm)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


def test_an_answer_has_the_form_that_is_asked_for(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 150, "temperature": 1.5}
    for seed in range(3):
        found = client.chat.completions.parse(response_format=Weather, seed=seed, **options).choices[0]
        assert isinstance(found.message.parsed, Weather)
        assert found.finish_reason == "stop"
        stream = client.chat.completions.create(response_format=FORM, seed=seed, stream=True, **options)
        Weather.model_validate_json("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    found = client.chat.completions.create(response_format={"type": "json_object"}, **options).choices[0]
    assert found.finish_reason == "length" or isinstance(json.loads(found.message.content), dict)
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="schema"):
        client.chat.completions.create(response_format=wrong, **options)


class Trip(pydantic.BaseModel):
    stops: list[Weather]
    back: Weather | None
    notes: dict[str, int]
    kind: City = City.PARIS


def additional(schema: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Where in a schema `additionalProperties` stands, and its value."""
    for key, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if key == "additionalProperties":
            yield path, value
        elif isinstance(value, dict | list):
            yield from additional(value, f"{path}/{key}")


def test_objects_have_only_the_keys_that_a_schema_lists() -> None:
    """As OpenAI's client writes it for the strict mode of OpenAI's API; a schema that says otherwise is unchanged."""
    for model in (Weather, Trip):
        assert sorted(additional(closed(model.model_json_schema()))) == sorted(additional(to_strict_json_schema(model)))
    own = {"type": "object", "properties": {"a": {"const": {"properties": {}}}}}
    for schema in (
        {"allOf": [own, {"properties": {"b": {}}}]},
        {"properties": {"kind": {}}, "oneOf": [own]},
        {**own, "additionalProperties": True},
        {**own, "required": ["b"]},
        {**own, "required": [["a"]]},
        {"type": "object"},
        True,
    ):
        assert closed(schema) == schema
    assert closed(own) == {**own, "additionalProperties": False} != own
    for form in ({"json_schema": {"schema": own}}, {"schema": own}):
        assert response_format({"type": "json_schema", **form}, "x") == {"schema": closed(own)}
    assert structured_outputs({"json": json.dumps(own)}, "x") == structured_outputs({"json": own}, "x")
    assert structured_outputs({"json": own}, "x") == {"schema": closed(own)}


@pytest.mark.parametrize("choice", ["required", "weather", "now"])
def test_a_required_call_is_made(client: openai.OpenAI, choice: str) -> None:
    named: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    for seed in range(3):
        options: dict[str, Any] = {"tool_choice": named, "temperature": 1.5, "seed": seed, "max_tokens": 150}
        options |= {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
        found = client.chat.completions.create(**options).choices[0]
        assert found.finish_reason == "tool_calls"
        assert found.message.content is None
        (call,) = found.message.tool_calls
        assert choice in ("required", call.function.name)
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            Weather.model_validate(arguments)
        else:
            assert arguments == {}
        stream = client.chat.completions.create(**options, stream=True)
        (joined,) = in_parts([chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in stream])
        assert joined["function"] == {"name": call.function.name, "arguments": call.function.arguments}
    answer: Any = [*MESSAGES, found.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    client.chat.completions.create(model="tiny", messages=answer, tools=TOOLS, max_tokens=3)


def test_a_required_call_has_no_endless_white_space(tiny_llm: Llama) -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "temperature": 2, "max_tokens": 150, "n": 8, "seed": 3}
    jobs = parse_chat({"messages": MESSAGES, **options}, with_tools(tiny_llm), "tiny").jobs
    for _, piece in tiny_llm.answers(jobs):
        if isinstance(piece, Piece) and piece.completion is not None:
            assert piece.completion.text == json.dumps(json.loads(piece.completion.text))


def parts(
    llm: Llama, pieces: list[Any], stream: bool = False, several: bool = True, mark: str = "", finish: Any = "stop"
) -> list[Any]:
    """The choices of an answer that the model gives in these pieces. The token 7 has the text of `mark`."""
    request = AnswerRequest(1, stream, False, tools=TOOLS, several_calls=several)
    choice = Choice(request, 0, Spelling(llm.tokenizer))
    choice.marks |= {7: mark}
    end = Completion("", [], finish, None, Stats(1, 0, 0, 0, 0, 0))
    given = [Piece(piece) if isinstance(piece, str) else piece for piece in [*pieces, Piece("", end)]]
    found = []
    for piece in given:
        more = choice.add(piece)
        while more:
            found.append(Chat().choice(choice))
            choice.clear()
            more = stream and bool(choice.calls)
    return found


def in_parts(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a stream, joined. Their parts are as OpenAI sends them: one a chunk, the name alone and first."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if "tool_calls" not in delta:
            continue
        (part,) = delta["tool_calls"]
        if part["index"] == len(calls):
            assert part == {"index": len(calls), "id": part["id"], "type": "function", "function": part["function"]}
            assert part["function"] == {"name": part["function"]["name"], "arguments": ""}
            calls.append({"id": part["id"], "function": dict(part["function"])})
        else:
            assert part == {"index": len(calls) - 1, "function": {"arguments": part["function"]["arguments"]}}
            assert part["function"]["arguments"]
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return calls


CALLS = '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "now", "parameters": {}}'


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_half_a_call_is_never_shown(tiny_llm: Llama, size: int) -> None:
    pieces = [CALLS[i : i + size] for i in range(0, len(CALLS), size)]
    found = [part["delta"] for part in parts(tiny_llm, pieces, stream=True)]
    assert not any(delta.get("content") for delta in found)
    streamed = in_parts(found)
    assert len(streamed) == 2
    for several in (True, False):
        (choice,) = parts(tiny_llm, pieces, several=several)
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        assert functions == [call["function"] for call in streamed][: 1 + several]
        assert [(one["name"], json.loads(one["arguments"])) for one in functions] == [
            ("weather", {"city": "Rome"}),
            ("now", {}),
        ][: 1 + several]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


ONE = '{"name": "now", "parameters": {}}'
ENDED = {  # what a model writes before a stop id or a stop string -> whether it ends within a call, or has none
    **dict.fromkeys((ONE, f"{ONE};", f"{ONE}; {ONE}", f"{ONE} That is all.", f"<tool_call>{ONE}"), "tool_calls"),
    **dict.fromkeys((f'{ONE}; {{"na', f"{ONE}; {ONE[:-2]}", f"<tool_call>{ONE}</tool_call>\n<tool_call>"), "stop"),
    **dict.fromkeys(("Hello", ONE.replace("now", "then"), ONE[:-1], f"<think>I call {ONE}", ""), "stop"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ENDED)
def test_the_reason_is_calls_only_if_the_answer_ended_after_complete_calls(
    tiny_llm: Llama, text: str, stream: bool
) -> None:
    for finish, reason in (("stop", ENDED[text]), ("length", "length")):
        for several in (False, True):
            found = parts(tiny_llm, [*text], stream=stream, several=several, finish=finish)
            assert found[-1]["finish_reason"] == reason
            assert not any(part["finish_reason"] for part in found[:-1])


# As the templates of Mistral's models check and write calls
MISTRAL = """{% for message in messages %}{% for call in message.tool_calls or [] %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}
{{- '[{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}, "id": {{ call.id }}}]
{%- endfor %}{% if message.role == "tool" %}{% if message.tool_call_id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}
{{- '{"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
{%- else %}{{ message.content }}{% endif %}{% endfor %}
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"""


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_can_send_its_calls_back_to_a_template_that_checks_ids(tiny_llm: Llama, stream: bool) -> None:
    with running(Llama(tiny_llm.model, tiny_llm.tokenizer, MISTRAL)) as server:
        client, seen = server.client(), set()
        options: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "max_tokens": 150, "temperature": 1.5}
        messages = [*MESSAGES]
        for seed in range(3):
            asked: Any = {**options, "messages": messages, "tool_choice": "required", "seed": seed}
            if stream:
                with client.chat.completions.stream(**asked) as events:
                    found = events.get_final_completion().choices[0]
            else:
                found = client.chat.completions.create(**asked).choices[0]
            (call,) = found.message.tool_calls
            assert re.fullmatch("[a-zA-Z0-9]{9}", call.id)
            seen.add(call.id)
            result = {"role": "tool", "tool_call_id": call.id, "content": '"12:00"'}
            messages = [*MESSAGES, found.message.model_dump(exclude_none=True, exclude={"refusal"}), result]
        assert len(seen) == 3
        assert client.chat.completions.create(messages=messages, **{**options, "max_tokens": 3}).choices


def test_the_id_that_a_model_writes_is_kept(tiny_llm: Llama) -> None:
    call = '[{"name": "now", "arguments": {}, "id": "a1"}, {"name": "now", "arguments": {}}]'
    for text, ids in ((call, ["a1", None]), ("[TOOL_CALLS]now[CALL_ID]b2[ARGS]{}", ["b2"])):
        for stream in (False, True):
            found = parts(tiny_llm, [text], stream=stream)
            calls = in_parts([one["delta"] for one in found]) if stream else found[0]["message"]["tool_calls"]
            assert [call["id"] if id else len(call["id"]) for call, id in zip(calls, ids, strict=True)] == [
                id or 9 for id in ids
            ]


def test_a_control_token_that_marks_a_call_is_read_as_its_mark(tiny_llm: Llama) -> None:
    pieces = ["Let me see. ", Piece("", token=Token(7, None, False)), '{"name": "now", "parameters": {}}']
    message = parts(tiny_llm, pieces, mark="<|python_tag|>")[0]["message"]
    assert message["content"].strip() == "Let me see."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]


def test_a_request_without_a_limit_has_that_of_the_server(tiny_llm: Llama, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    with running(tiny_llm, tokens=5) as server:
        create = partial(server.client().chat.completions.create, model="tiny", messages=MESSAGES, temperature=0)
        ignored: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
        for _ in range(2):
            found = create(**ignored)
            assert (found.choices[0].finish_reason, found.usage.completion_tokens) == ("length", 5)
        assert [record.getMessage()[:12] for record in caplog.records if "max-tokens" in record.getMessage()] == [
            "--max-tokens"
        ]
        for more, most in (
            ({"max_tokens": 9}, 9),
            ({"max_completion_tokens": 3}, 3),
            ({"max_tokens": -1}, tiny_llm.model.max_seq_len),
        ):
            found = create(**ignored, **more)  # type: ignore[arg-type]
            assert found.usage.completion_tokens == min(most, tiny_llm.model.max_seq_len - found.usage.prompt_tokens)
    with running(tiny_llm, tokens=-1) as server:
        found = server.client().chat.completions.create(model="tiny", messages=MESSAGES, **ignored)
        assert found.usage.total_tokens == tiny_llm.model.max_seq_len


def test_an_incomplete_call_stays_a_call_with_a_part_of_its_arguments(tiny_llm: Llama) -> None:
    text = 'Well. {"name": "weather"} <tool_call>{"name": "weather", "arguments": {"city": "Ro'
    (whole,) = parts(tiny_llm, [*text], finish="length")
    assert whole["finish_reason"] == "length"
    assert whole["message"]["content"] == 'Well. {"name": "weather"}'
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Ro'}
    streamed = parts(tiny_llm, [*text], stream=True, finish="length")
    assert "".join(one["delta"].get("content", "") for one in streamed) == whole["message"]["content"]
    assert [one["function"] for one in in_parts([one["delta"] for one in streamed])] == [call["function"]]
    assert streamed[-1]["finish_reason"] == "length"


def test_a_request_with_tools_limits_the_arguments_of_a_call(tiny_llm: Llama) -> None:
    (job,) = parse_chat({"messages": MESSAGES, "tools": TOOLS}, with_tools(tiny_llm), "tiny").jobs
    for id in tiny_llm.tokenizer.encode('{"name": "weather", "arguments": {"'):
        job.constraint.advance(id)
    assert int(job.constraint.allowed().sum()) == 1  # the c of "city"
    open_tools = [{"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}]
    for tools in (TOOLS[:1], open_tools):
        (job,) = parse_chat({"messages": MESSAGES, "tools": tools}, with_tools(tiny_llm), "tiny").jobs
        for id in tiny_llm.tokenizer.encode('{"name": "weather", "arguments": {"city": "Rome", "degrees": 3'):
            job.constraint.advance(id)
        assert not job.constraint.allowed()[tiny_llm.tokenizer.encode(",")].any()  # no other keys
    for more in ({"tool_choice": "none"}, {"tools": []}):
        (job,) = parse_chat({"messages": MESSAGES, "tools": TOOLS, **more}, with_tools(tiny_llm), "tiny").jobs
        assert job.constraint is None
