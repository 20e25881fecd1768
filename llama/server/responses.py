"""The shape of OpenAI's Responses API, /v1/responses. A body is translated to the fields of /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import count
from typing import Any

from ..chat.messages import FUNCTION as CALLED
from ..checks import shown
from ..errors import UsageError
from ..system.documents import Required, checked
from ..text import Llama
from .api import Api, Choice, Reply, refusal
from .engine import COUNTED
from .requests import CHAT_FIELDS, FUNCTION, SHARED, TOKENS, AnswerRequest, chat_request, fields_of, response_format

# The kinds of the fields and of the entries of items (system/documents.py)
FIELDS: dict[str, Any] = {name: kind for name, kind in CHAT_FIELDS.items() if name in SHARED and name != "n"}
FIELDS |= {name: CHAT_FIELDS[name] for name in ("chat_template_kwargs", "parallel_tool_calls", "tool_choice")}
FIELDS |= {"input": Required(str | list), "instructions": str, "max_output_tokens": TOKENS, "top_logprobs": (0, 0)}
FIELDS |= {"tools": [{"type": Required("function"), **FUNCTION}], "text": {"format": response_format}}
FIELDS |= {"truncation": "disabled", "include": ["reasoning.encrypted_content"]}
ITEMS: dict[str, dict[str, Any]] = {
    "message": {"role": Required(str), "content": Required(str | list), "phase": str},
    "reasoning": {"summary": list, "content": list, "encrypted_content": str},
    "function_call": {"parsed_arguments": object, "call_id": Required(str), **CALLED},
    "function_call_output": {"call_id": Required(str), "output": Required(str | list)},
}
# type of an item in a response -> prefix of its id, name of its events and its part, fields of the item, of the part
FORMS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "reasoning": ("rs", "reasoning_text", {"summary": []}, {}),
    "message": ("msg", "output_text", {"role": "assistant"}, {"annotations": [], "logprobs": []}),
    "function_call": ("fc", "function_call_arguments", {}, {}),
}


def parse_response(body: Mapping[str, Any], llm: Llama, model: str) -> AnswerRequest:
    """Check a body of /v1/responses and encode its input. Raises a LlamaError with the names of this API."""
    fields = fields_of(body, FIELDS, model)
    given, tools, choice = fields["input"], fields.get("tools", []), fields.get("tool_choice", "auto")
    names = [{"type": "function", "name": tool["name"]} for tool in tools]
    if choice not in ("none", "auto", *(["required"] if tools else []), *names):
        raise UsageError(
            'tool_choice must be "none", "auto", "required" or {type: function, name} with the name of one of the'
            f" tools, got {shown(choice)}"
        )
    chat = fields | {"tool_choice": choice if isinstance(choice, str) else _nested(choice)}
    chat["messages"] = _messages([{"role": "user", "content": given}] if isinstance(given, str) else given)
    if "instructions" in fields:
        chat["messages"].insert(0, {"role": "system", "content": fields["instructions"]})
    chat |= {"tools": [_nested(tool) for tool in tools], "response_format": fields.get("text", {}).get("format", {})}
    request = chat_request(chat, llm, "max_output_tokens")
    request.repeated = {name: fields.get(name) for name in ("instructions", "prompt_cache_key")}
    request.repeated |= {"max_output_tokens": chat.get("max_tokens")}
    text = {"format": {"type": "text"}} | (body.get("text") or {})
    request.repeated |= {"tools": body.get("tools") or [], "tool_choice": choice, "text": text}
    return request


def _nested(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function as the chat endpoint has it: all fields except the type are one level deeper."""
    return {"type": "function", "function": {name: value for name, value in function.items() if name != "type"}}


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """The messages of a chat. A thought, a text and calls that follow each other are one message of the assistant."""
    messages, thought = list[dict[str, Any]](), ""
    for i, item in enumerate(items):
        where, kind = f"input[{i}]", checked(item, dict, f"input[{i}]").get("type") or "message"
        if kind not in ITEMS:
            raise UsageError(f"{where}.type must be one of {', '.join(ITEMS)}; got {shown(kind)}")
        known = {"type": str, "id": str, "status": str, **ITEMS[kind]}
        item = checked({name: value for name, value in item.items() if value is not None}, known, where)
        text = "".join(_text(item[name], f"{where}.{name}") for name in ("content", "output") if name in item)
        role = {"message": item.get("role"), "function_call_output": "tool"}.get(kind, "assistant")
        if kind == "message" and role not in ("user", "assistant", "system", "developer"):
            raise UsageError(f"{where}.role must be user, assistant, system or developer; got {shown(role)}")
        last = messages[-1] if messages else {}
        if kind == "reasoning":
            thought = text
            continue
        if role != "assistant" or last.get("role") != role or thought or (kind == "message" and "content" in last):
            thoughts = {"reasoning_content": thought} if thought and role == "assistant" else {}
            messages.append(last := {"role": role, **thoughts})
        if kind == "function_call":
            function = {name: item[name] for name in ("name", "arguments")}
            last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
        else:
            last |= {"content": text} | ({"tool_call_id": item["call_id"]} if role == "tool" else {})
        thought = ""
    if not messages:
        raise UsageError(f"input must be a text or a list with at least one message, got {shown(items)}")
    return messages


def _text(content: str | list[Any], where: str) -> str:
    """The text of `content`, with its parts joined if it is a list."""
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        kind, text = (checked(part, dict, f"{where}[{i}]").get(name) for name in ("type", "text"))
        if kind not in ("input_text", "output_text", "reasoning_text") or not isinstance(text, str):
            raise UsageError(f"{where}[{i}] must be {{type: input_text, text}}, got {shown(part)}")
    return "".join(part["text"] for part in content)


class Output:
    """The items of a response, which grow with the answer, and the events that report this growth to a client."""

    def __init__(self, id: str):
        self.id, self.items, self.numbers = id, list[dict[str, Any]](), count()
        # type -> for the item of this type that still grows: the fields that name its place, and the dict with its text
        self.open: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(self.numbers), **fields}

    def add(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """Add what is new in the answer. All text of the answer is in one item, even if calls are between its parts."""
        if choice.reasoning:
            yield from self._write("reasoning", choice.reasoning)
        for call in choice.calls:
            if choice.text and (choice.before or 0) <= call["number"]:
                yield from self._write("message", choice.text)
                choice.text = ""
            if "name" in call:
                yield from self._begin("function_call", call_id=call["id"], name=call["name"], arguments="")
            if call["arguments"]:
                yield from self._write("function_call", call["arguments"])
        if choice.text:
            yield from self._write("message", choice.text)

    def end(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """End all items, after the answer has ended."""
        if not self.items:
            yield from self._write("message", "")
        for kind in [*self.open]:
            cut = choice.cut if kind == "function_call" else choice.finish_reason == "length"
            yield from self._end(kind, "incomplete" if cut else "completed")

    def _begin(self, kind: str, **head: Any) -> Iterator[dict[str, Any]]:
        for ended in {"reasoning", kind} & self.open.keys():
            yield from self._end(ended, "completed")
        number, (prefix, name, fixed, more) = len(self.items), FORMS[kind]
        item = {"id": f"{prefix}_{self.id}{number}", "type": kind, "status": "in_progress", **fixed, **head}
        self.items.append(item)
        self.open[kind] = place, part = {"item_id": item["id"], "output_index": number}, item
        yield self.event("output_item.added", output_index=number, item=item)
        if "content" in item:
            item["content"].append(part := {"type": name, "text": "", **more})
            self.open[kind] = place, part = place | {"content_index": 0}, part
            yield self.event("content_part.added", **place, part=part)

    def _write(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if kind not in self.open:
            yield from self._begin(kind, content=[])
        place, part = self.open[kind]
        part["text" if "text" in part else "arguments"] += text
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield self.event(f"{FORMS[kind][1]}.delta", **place, delta=text, **logprobs)

    def _end(self, kind: str, status: str) -> Iterator[dict[str, Any]]:
        place, part = self.open.pop(kind)
        texts = {name: part[name] for name in ("text", "logprobs", "arguments") if name in part}
        yield self.event(f"{FORMS[kind][1]}.done", **place, **texts)
        if "text" in part:
            yield self.event("content_part.done", **place, part=part)
        item = self.items[number := place["output_index"]]
        item["status"] = status
        yield self.event("output_item.done", output_index=number, item=item)


class Responses(Api):
    """/v1/responses."""

    parse = staticmethod(parse_response)

    def event(self, text: str) -> bytes:
        return f"event: {json.loads(text).get('type', 'error')}\n".encode() + super().event(text)

    def body(self, reply: Reply, output: Output, status: str, error: str | None = None) -> dict[str, Any]:
        params, call = reply.request.jobs[0].params, reply.request
        body = {"id": f"resp_{reply.id}", "object": "response", "created_at": reply.created, "model": reply.model}
        body |= {"status": status, "output": output.items, "incomplete_details": None, "usage": None}
        body |= {"error": {"code": "server_error", "message": error} if error else None, "metadata": {}, "store": False}
        body |= {"temperature": params.temperature, "top_p": params.top_p, "parallel_tool_calls": call.several_calls}
        return {**body, "truncation": "disabled", "previous_response_id": None, **call.repeated}

    def ended(self, reply: Reply, output: Output, choice: Choice) -> dict[str, Any]:
        prompt, cached, new, reasoning = (reply.tokens[name] for name in COUNTED)
        usage: dict[str, Any] = {"input_tokens": prompt, "output_tokens": new, "total_tokens": prompt + new}
        usage |= {"input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prompt - cached}}
        usage |= {"output_tokens_details": {"reasoning_tokens": reasoning}}
        cut = {"reason": "max_output_tokens"} if choice.finish_reason == "length" else None
        body = self.body(reply, output, "incomplete" if cut else "completed")
        return body | {"incomplete_details": cut, "usage": usage}

    def chunk(self, reply: Reply, choices: list[Choice]) -> dict[str, Any]:
        output = Output(reply.id)
        _ = *output.add(choices[0]), *output.end(choices[0])
        return self.ended(reply, output, choices[0])

    async def chunks(self, reply: Reply) -> AsyncIterator[dict[str, Any]]:
        (choice,), output = reply.choices.values(), Output(reply.id)
        for kind in ("created", "in_progress"):
            yield output.event(kind, response=self.body(reply, output, "in_progress"))
        try:
            async for _ in reply.news():
                for event in output.add(choice):
                    yield event
                choice.calls.clear()
                choice.clear()
        except Exception as failed:
            error = json.loads(bytes(refusal(failed, self).body))["error"]["message"]
            yield output.event("failed", response=self.body(reply, output, "failed", error))
            raise  # the error is the last event, as in the other shapes
        for event in output.end(choice):
            yield event
        response = self.ended(reply, output, choice)
        yield output.event(response["status"], response=response)
