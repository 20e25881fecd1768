"""/v1/responses through the official client: each response is that of /v1/chat/completions in another shape."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any, Literal

import openai
import pydantic
import pytest
import requests
from openai.types.responses import Response, ResponseStreamEvent

from llama.errors import LlamaError, UsageError
from llama.generation.answer import Completion, Piece, Stats
from llama.sampling import SamplingParams
from llama.server.api import Choice
from llama.server.dialects import INSTEAD
from llama.server.requests import AnswerRequest, parse_chat
from llama.server.responses import Responses, parse_response
from llama.server.spelling import Spelling
from llama.text import Llama

from .. import tiny
from .serving import Running, running, with_tools


class Weather(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: int = pydantic.Field(ge=0, le=40)


SCHEMA = {**Weather.model_json_schema(), "additionalProperties": False}
TOOL: Any = {"type": "function", "name": "weather", "description": "The weather", "parameters": SCHEMA, "strict": True}
NESTED = {"type": "function", "function": {name: value for name, value in TOOL.items() if name != "type"}}
EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
OWN = ("id", "created_at", "item_id", "call_id")  # each response has its own
WRITES_ALL = (
    "{% for m in messages %}{{ m | tojson }}\n{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
)


@pytest.fixture(scope="module")
def server(tiny_llm: Llama) -> Iterator[Running]:
    """Return a server of a model with tools, which thinks first if the variable `think` is set."""
    llm = with_tools(tiny_llm)
    begin = "<think>\n{% if not think %}\n</think>\n\n{% endif %}"
    with running(Llama(llm.model, llm.tokenizer, f"{llm.chat_template}{begin}")) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


def without_own(value: Any) -> Any:
    """A response without ids and times."""
    if isinstance(value, list):
        return [without_own(one) for one in value]
    return {k: without_own(v) for k, v in value.items() if k not in OWN} if isinstance(value, dict) else value


def post(server: Running, body: dict[str, Any]) -> Any:
    return requests.post(f"{server.url}/v1/responses", json={"model": "tiny", **body}, timeout=60)


USER = {"role": "user", "content": "Hello"}
PARTS = [{"type": "input_text", "text": "Hel"}, {"type": "input_text", "text": "lo"}]
SAMPLED = {"temperature": 1.3, "top_p": 0.9, "seed": 5}
FORM = {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # a body, and the fields of a chat with the same meaning
    "text": ({"input": "Hello"}, {"messages": [USER]}),
    "parts": (
        {"input": [{"role": "user", "content": PARTS}], "instructions": "Be brief."},
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    ),
    "turns": (
        {"input": [USER, {"role": "assistant", "content": "Hi"}, {"type": "message", **USER}]},
        {"messages": [USER, {"role": "assistant", "content": "Hi"}, USER]},
    ),
    "schema": (
        {"input": "Hello", "text": {"format": FORM, "verbosity": "low"}, "max_output_tokens": 150},
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}},
            "max_tokens": 150,
        },
    ),
    "call": (
        {"input": "Hello", "tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}},
        {"messages": [USER], "tools": [NESTED], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
    "cut call": (
        {"input": "Hello", "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 60},
        {"messages": [USER], "tools": [NESTED], "tool_choice": "required", "max_tokens": 60},
    ),
    "thought": (
        {"input": "Hello", "chat_template_kwargs": {"think": True}, "thinking_budget": 6},
        {"messages": [USER], "chat_template_kwargs": {"think": True}, "thinking_budget": 6},
    ),
    "cut thought": (
        {"input": "Hello", "chat_template_kwargs": {"think": True}, "max_output_tokens": 9},
        {"messages": [USER], "chat_template_kwargs": {"think": True}, "max_tokens": 9},
    ),
}


def bodies(shape: str) -> tuple[dict[str, Any], dict[str, Any]]:
    mine, chat = SHAPES[shape]
    limit = 150 if "call" in shape else 30
    return {**SAMPLED, "max_output_tokens": limit, **mine}, {**SAMPLED, "max_tokens": limit, **chat}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_response_is_that_of_the_chat_endpoint(server: Running, shape: str) -> None:
    body, chat = bodies(shape)
    raw = post(server, body).json()
    found = Response.model_validate(raw, strict=True)
    url = f"{server.url}/v1/chat/completions"
    expected = requests.post(url, json={"model": "tiny", **chat}, timeout=60).json()
    (choice,), usage, message = expected["choices"], expected["usage"], expected["choices"][0]["message"]
    assert found.output_text == (message["content"] or "")
    calls = [(item.name, item.arguments) for item in found.output if item.type == "function_call"]
    functions = [call["function"] for call in message.get("tool_calls", [])]
    assert calls == [(function["name"], function["arguments"]) for function in functions]
    thoughts = [item.content[0].text for item in found.output if item.type == "reasoning" and item.content]
    assert thoughts == ([message["reasoning_content"]] if "reasoning_content" in message else [])
    assert [item.type for item in found.output] == {
        "call": ["function_call"], "cut call": ["function_call"],
        "thought": ["reasoning", "message"], "cut thought": ["reasoning"],
    }.get(shape, ["message"])  # fmt: skip
    cut = choice["finish_reason"] == "length"
    assert (found.status, found.incomplete_details and found.incomplete_details.reason) == (
        ("incomplete", "max_output_tokens") if cut else ("completed", None)
    )
    assert [item.status for item in found.output] == ["completed"] * (len(found.output) - 1) + [found.status]
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (
        usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
    )  # fmt: skip
    reasoning = found.usage.output_tokens_details.reasoning_tokens
    assert reasoning == usage["completion_tokens_details"]["reasoning_tokens"]
    assert (found.temperature, found.top_p, found.max_output_tokens) == (1.3, 0.9, body["max_output_tokens"])
    assert (raw["tools"], raw["instructions"]) == (body.get("tools", []), body.get("instructions"))
    assert raw["text"]["format"] == body.get("text", {}).get("format", {"type": "text"})


@pytest.mark.parametrize("shape", SHAPES)
def test_the_events_of_a_stream_add_up_to_the_response(server: Running, client: openai.OpenAI, shape: str) -> None:
    body, _ = bodies(shape)
    whole = post(server, body).json()
    parts = post(server, {**body, "stream": True}).text.split("\n\n")[:-1]
    events = []
    for i, part in enumerate(parts):
        name, data = part.split("\n")
        events.append(event := json.loads(data.removeprefix("data: ")))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", i)
        EVENTS.validate_python(event, strict=True)
    check_events(events, whole)
    options: Any = {name: value for name, value in body.items() if name in ("input", "instructions", "tools", "text")}
    extra = {name: value for name, value in body.items() if name not in options}
    with client.responses.stream(model="tiny", **options, extra_body=extra) as stream:
        seen = [event.type for event in stream]
        if whole["status"] == "completed":  # the client's own rule
            final = stream.get_final_response().model_dump(by_alias=True, exclude_unset=True)
            given = Response.model_validate(whole).model_dump(by_alias=True, exclude_unset=True)
            for item in final["output"]:  # what the client adds
                item.pop("parsed_arguments", None)
                for content in item.get("content", ()):
                    content.pop("parsed", None)
            assert without_own(final) == without_own(given)
    assert seen == [event["type"] for event in events]


def check_events(events: list[Any], whole: Any) -> None:
    """Check a stream: its items begin, grow and end in order, and are those of the whole response."""
    first, second, *middle, last = events
    assert [event["type"] for event in (first, second)] == ["response.created", "response.in_progress"]
    assert all(event["response"]["status"] == "in_progress" for event in (first, second))
    assert last["type"] == f"response.{whole['status']}"
    assert without_own(last["response"]) == without_own(whole)
    items: list[Any] = []
    done: dict[int, Any] = {}
    texts: Counter[int] = Counter()
    grown: dict[int, str] = {}
    for event in middle:
        kind, i = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert (i, event["item"]["status"]) == (len(items), "in_progress")
            items.append(event["item"])
            grown[i] = ""
            continue
        assert event.get("item_id", items[i]["id"]) == items[i]["id"]
        assert i not in done
        if kind == "output_item.done":
            done[i] = event["item"]
        elif kind.endswith(".delta"):
            assert texts[i] == 0
            grown[i] += event["delta"]
        elif kind.startswith("content_part"):
            assert event["part"]["text"] == ("" if kind.endswith("added") else grown[i])
        else:
            texts[i] += 1
            assert event.get("text", event.get("arguments")) == grown[i]
    assert [done[i] for i in range(len(items))] == last["response"]["output"]
    for i, item in enumerate(last["response"]["output"]):
        assert grown[i] == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


CALL = '{"name": "weather", "parameters": {"city": "Rome", "degrees": 3}}'
CUT = (CALL[:40], "and")  # ends of an answer that max_output_tokens cuts
ANSWERS = {  # what a model writes -> the types of the items
    f"Let me see. {CALL}": ["message"],
    f"Let me see. <tool_call>{CALL}</tool_call>": ["message", "function_call"],
    f"<tool_call>{CALL}</tool_call> That is all.": ["function_call", "message"],
    f"One. <tool_call>{CALL}</tool_call> Two. <tool_call>{CALL}</tool_call>": [
        "message", "function_call", "function_call"
    ],
    f"{CALL}; {CALL} End. <tool_call>{CALL[:40]}": ["function_call", "function_call", "message", "function_call"],
    f"{CALL}; {CALL[:40]}": ["function_call", "function_call"],
    f"One. <tool_call>{CALL}</tool_call> Two and": ["message", "function_call"],
    "": ["message"],
}  # fmt: skip


def response(llm: Llama, text: str, size: int, stream: bool, thought: str = "", fails: bool = False) -> list[Any]:
    """The events, or the response alone, for an answer that the model gives in pieces of some size."""
    request = AnswerRequest(1, stream, False, tools=[NESTED])
    request.repeated = {"tools": [], "tool_choice": "auto"}
    request.jobs = [SimpleNamespace(params=SamplingParams(), ids=[5])]  # type: ignore[list-item]
    choice = Choice(request, 0, Spelling(llm.tokenizer))
    finish: Any = "length" if text.endswith(CUT) else "stop"
    end = Piece("", Completion("", [], finish, None, Stats(1, 0, 0, 0, 0, 0)))
    pieces = [Piece("", reasoning=one) for one in thought]
    pieces += [Piece(text[i : i + size]) for i in range(0, len(text), size)]

    async def news() -> AsyncIterator[Choice]:
        for piece in pieces + [end] * (not fails):
            if choice.add(piece):
                yield choice
        if fails:
            raise LlamaError("out of memory")

    reply: Any = SimpleNamespace(
        request=request, choices={0: choice}, id="x", created=1, model="tiny", news=news, tokens=Counter()
    )
    found: list[Any] = []

    async def collect() -> None:
        if not stream:
            async for _ in news():
                pass
            found.append(Responses().whole(reply))
            return
        async for event in Responses().chunks(reply):
            found.append(json.loads(json.dumps(event)))

    if fails:
        with pytest.raises(LlamaError, match="out of memory"):
            asyncio.run(collect())
    else:
        asyncio.run(collect())
    return found


@pytest.mark.parametrize("thought", ["", "Hm."])
@pytest.mark.parametrize("text", ANSWERS)
def test_the_items_do_not_depend_on_how_an_answer_is_divided(tiny_llm: Llama, text: str, thought: str) -> None:
    (whole,) = response(tiny_llm, text, 1000, False, thought)
    Response.model_validate(whole, strict=True)
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == (["reasoning"] if thought else []) + ([] if thought and not text else ANSWERS[text])
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    ends_in_call = text.endswith(CALL[:40])
    assert [call["status"] == "incomplete" for call in calls] == [ends_in_call and call is calls[-1] for call in calls]
    texts = [item["status"] for item in whole["output"] if item["type"] == "message"]
    assert texts == ["incomplete" if text.endswith(CUT) else "completed"] * len(texts)
    for size in (1, 7, 1000):
        check_events(response(tiny_llm, text, size, True, thought), whole)


def test_a_stream_that_fails_says_so(tiny_llm: Llama) -> None:
    *_, last = response(tiny_llm, "Once", 2, True, fails=True)
    EVENTS.validate_python(last, strict=True)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert (last["response"]["error"]["message"], last["response"]["output"][0]["status"]) == (
        "out of memory", "in_progress"
    )  # fmt: skip
    with running(tiny_llm, seconds=0.05) as server:
        long: Any = {"max_output_tokens": -1, "extra_body": {"ignore_eos": True}}
        with pytest.raises(openai.APIError, match="took more time"):
            [*server.client().responses.create(model="tiny", input="Hello", stream=True, **long)]


def test_a_client_gets_an_object_of_its_own_class(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"max_output_tokens": 150, "temperature": 0.9, "extra_body": {"seed": 1}}
    found = client.responses.parse(model="tiny", input="Hello", text_format=Weather, **options)
    assert isinstance(found.output_parsed, Weather)
    form: Any = {"format": {"type": "json_object"}}
    text = client.responses.create(model="tiny", input="Hello", text=form, max_output_tokens=30).output_text
    assert text.lstrip().startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_the_output_of_a_response_is_part_of_the_next_input(client: openai.OpenAI, stream: bool) -> None:
    """With a thought, a call and its result; the items are objects of the client, or dictionaries with nulls."""
    history: list[Any] = [{"role": "user", "content": "Weather?"}]
    tools: dict[str, Any] = {"model": "tiny", "tools": [TOOL], "max_output_tokens": 150}
    more = {"seed": 3, "chat_template_kwargs": {"think": True}, "thinking_budget": 6}
    options: dict[str, Any] = {**tools, "tool_choice": "required", "temperature": 1.5, "extra_body": more}
    if stream:
        with client.responses.stream(input=history, **options) as events:
            first = events.get_final_response()
    else:
        first = client.responses.create(input=history, **options)
    (call,) = [item for item in first.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)
    history += first.output
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    short: dict[str, Any] = {**tools, "max_output_tokens": 5}
    assert client.responses.create(input=history, **short).output_text
    dumped = [item.model_dump() if isinstance(item, pydantic.BaseModel) else item for item in history]
    assert client.responses.create(input=[*dumped, *history[:1]], **short).output  # type: ignore[list-item]


def test_items_become_the_messages_of_a_chat(tiny_llm: Llama) -> None:
    config = dataclasses.replace(tiny_llm.model.config, max_seq_len=2048)
    llm = Llama(tiny.model(config), tiny_llm.tokenizer, WRITES_ALL)
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    text = {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}', "id": None}
    given: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": PARTS},
        thought,
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [text],
            "phase": None,
        },
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
        {**thought, "content": None, "encrypted_content": "x"},
        {**call, "call_id": "c3"},
        {"role": "user", "content": "And?"},
        thought,
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two."},
    ]
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in (1, 2, 3)]
    messages = [
        {"role": "system", "content": "Instructed."},
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "reasoning_content": "Hm.", "content": "Let me see.", "tool_calls": calls[:2]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "tool", "content": "rain", "tool_call_id": "c2"},
        {"role": "assistant", "tool_calls": calls[2:], "content": ""},
        {"role": "user", "content": "And?"},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two."},
    ]
    fields = {"input": given, "instructions": "Instructed.", "tools": [TOOL], "max_output_tokens": 5}
    (found,) = parse_response(fields, llm, "tiny").jobs
    (expected,) = parse_chat({"messages": messages, "tools": [NESTED], "max_tokens": 5}, llm, "tiny").jobs
    assert llm.tokenizer.decode(found.ids) == llm.tokenizer.decode(expected.ids)
    assert (found.ids, found.params.max_new_tokens) == (expected.ids, expected.params.max_new_tokens)
    assert llm.tokenizer.decode(found.ids).startswith('{"role": "system", "content": "Instructed."}\n')


STORED = ("previous_response_id", "conversation", "background")  # fields that need a store
CALLED = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({name: "x"}, f"unknown key '{name}'; {INSTEAD[name]}") for name in STORED),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type must be 'function', got 'web_search'"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, r"tools\[0\].type must be 'function'"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice must"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice must"),
        ({"truncation": "auto"}, "truncation must be 'disabled'"),
        ({"include": ["message.output_text.logprobs"]}, r"include\[0\] must be"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": "9"}, "max_output_tokens must be an integer"),
        ({"temperature": -1}, "temperature"),
        ({"n": 2}, "unknown key 'n'"),
        ({"messages": []}, "unknown key 'messages'"),
        ({"moderation": {"model": "x"}}, "unknown key 'moderation'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format must be"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format must be"),
        ({"tools": [{**TOOL, "name": "a b"}]}, r"tools\[0\].name must match"),
        ({"tools": [{"type": "function", "name": "f", "x": 1}]}, r"unknown key 'tools\[0\].x'"),
        ({"tool_choice": "required"}, "tool_choice must be"),
        ({"max_tokens": 5, "max_output_tokens": 6}, "max_tokens and max_output_tokens differ"),
        ({"input": []}, "input must be a text or a list with at least one message"),
        ({"input": [{**CALLED, "arguments": "{"}]}, r"input\[0\].arguments must be JSON"),
        ({"input": None}, "input is missing"),
        ({"input": 5}, "input must be"),
        ({"input": ["x"]}, r"input\[0\] must be an object"),
        ({"input": [{"role": "tool", "content": "x"}]}, r"input\[0\].role must be user"),
        ({"input": [{"role": "user"}]}, r"content is missing"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type must be one of message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\].content\[0\] must be"),
        ({"input": [{**USER, "name": "Ann"}]}, r"unknown key 'input\[0\].name'"),
        ({"model": "gpt-5"}, "unknown model 'gpt-5'"),
    ],
)
def test_what_is_refused_is_named(tiny_llm: Llama, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_response({"input": "Hello", **fields}, tiny_llm, "tiny")


def test_fields_without_effect_are_accepted_and_named(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="'previous_response_id'; this server stores nothing"):
        server.client().responses.create(model="tiny", input="Hello", previous_response_id="resp_1")
    same = {"truncation": "disabled", "include": ["reasoning.encrypted_content"], "background": False, "prompt": None}
    ignored = {"store": True, "metadata": {"a": "b"}, "user": "Ann", "service_tier": "auto", "max_tool_calls": 3,
               "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}}  # fmt: skip
    plain = post(server, body := {"input": "Hello", **SAMPLED, "max_output_tokens": 9})
    found = post(server, {**body, **same, **ignored})
    assert without_own(found.json()["output"]) == without_own(plain.json()["output"])
    named = found.headers["X-Clearllama-Ignored"].split(", ")
    assert {*named} == {*ignored} - {"text"} | {"verbosity", "background"}
    assert "X-Clearllama-Ignored" not in plain.headers


def test_a_schema_of_a_response_waits_for_its_turn() -> None:
    from llama.server.app import MAY_HAVE_SCHEMA

    for body in ({"text": {"format": FORM}}, {"tools": [TOOL]}, {"response_format": FORM}):
        assert MAY_HAVE_SCHEMA.search(json.dumps(body).encode())


@pytest.mark.slow
def test_an_agent_calls_a_function_and_answers(tiny_llm: Llama) -> None:
    """OpenAI's library for agents, with and without streaming."""
    agents = pytest.importorskip("agents", reason="pip install openai-agents")
    agents.set_tracing_disabled(True)
    called = []

    @agents.function_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather."""
        called.append(city)
        return "sunny"

    async def run(url: str, stream: bool) -> Any:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        model = agents.OpenAIResponsesModel("tiny", client)
        ends = {"min_tokens": 9, "logit_bias": {str(id): 100 for id in tiny_llm.tokenizer.stop_ids}}
        settings = agents.ModelSettings(tool_choice="required", temperature=0.9, extra_body=ends)
        agent = agents.Agent("Ann", instructions="Be brief.", model=model, tools=[weather], model_settings=settings)
        if not stream:
            return await agents.Runner.run(agent, "How is it?")
        result = agents.Runner.run_streamed(agent, "How is it?")
        async for _ in result.stream_events():
            pass
        return result

    with running(with_tools(tiny_llm)) as server:
        for stream in (False, True):
            called.clear()
            result = asyncio.run(run(server.url, stream))
            assert [kind.type for kind in result.new_items] == [
                "tool_call_item", "tool_call_output_item", "message_output_item"
            ]  # fmt: skip
            assert called in (["Paris"], ["Rome"])
            assert result.final_output
