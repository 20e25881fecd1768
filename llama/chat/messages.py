"""The messages of a conversation, and their validation.

The structure is that of OpenAI's API and Hugging Face's templates: a role, its text, an assistant's calls of functions,
and the results of the functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from ..checks import boolean
from ..errors import UsageError


class FunctionCall(TypedDict):
    """The function that an assistant calls, and its arguments. In the input they may be the JSON text of a mapping."""

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """One call: {"type": "function", "function": {...}}. The input may have a bare FunctionCall instead."""

    type: str
    function: FunctionCall
    id: NotRequired[str]


class Message(TypedDict):
    """One turn, as check_messages returns it.

    role          "system", "user", "assistant", "tool" or "ipython" (Llama 3's name for a tool's result)
    content       the text; in the input, a message with tool_calls may have None or no content
    tool_calls    assistant only: the functions it calls
    continues     assistant only: True if its turn continues after this message, because it waits for a tool
    tool_call_id  tool only: the id of the call that this message answers
    name          tool only: the tool's name
    """

    role: str
    content: str
    tool_calls: NotRequired[list[ToolCall]]
    continues: NotRequired[bool]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


# A role becomes part of the format's structure ("<|im_start|>" + role), so any other role is rejected.
ROLES = ("system", "user", "assistant", "tool", "ipython")

KEYS = {
    "system": ("role", "content"),
    "user": ("role", "content"),
    "assistant": ("role", "content", "tool_calls", "continues"),
    "tool": ("role", "content", "tool_call_id", "name"),
    "ipython": ("role", "content", "tool_call_id", "name"),
}

DEEPEST_JSON = 64  # levels; the functions that traverse it are recursive


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Validated messages in a uniform shape. Raises UsageError with the message and the key that is wrong."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise UsageError(f"messages must be a list of mappings, got {type(messages).__name__}")
    checked = [_check_message(message, f"message {i}") for i, message in enumerate(messages)]
    if not checked:
        raise UsageError("a chat needs at least one message")
    return checked


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The JSON schemas of functions as plain dictionaries. Raises UsageError."""
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UsageError(f"tools must be a list of mappings, one JSON schema for each function, got {tools!r:.80}")
    return [_plain_json(dict(tool), f"tool {i}") for i, tool in enumerate(tools)]


def _check_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} must be a mapping with the keys role and content, got {message!r:.80}")
    role = message.get("role")
    if role not in ROLES:
        raise UsageError(f"{where}: role must be one of {', '.join(ROLES)}; got {role!r:.80}")
    _check_keys(message, KEYS[role], f"{where}, role {role}")
    calls = _check_calls(message.get("tool_calls"), where)
    content = message.get("content")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise UsageError(f"{where}: content must be a string, got {type(content).__name__}")
    checked = Message(role=role, content=content)
    if calls:
        checked["tool_calls"] = calls
    if message.get("tool_call_id") is not None:
        checked["tool_call_id"] = _string(message["tool_call_id"], f"{where}: tool_call_id")
    if message.get("name") is not None:
        checked["name"] = _string(message["name"], f"{where}: name")
    if boolean(f"{where}: continues", message.get("continues", False)):
        checked["continues"] = True
    return checked


def _check_calls(calls: Any, where: str) -> list[ToolCall]:
    if calls is None:
        return []
    if not isinstance(calls, list | tuple):
        raise UsageError(f"{where}: tool_calls must be a list of calls, got {type(calls).__name__}")
    return [_check_call(call, f"{where}, tool call {i}") for i, call in enumerate(calls)]


def _check_call(call: Any, where: str) -> ToolCall:
    if not isinstance(call, Mapping):
        raise UsageError(f"{where} must be a mapping, got {call!r:.80}")
    bare = "function" not in call
    _check_keys(call, ("type", "id", "name", "arguments") if bare else ("type", "id", "function"), where)
    if call.get("type", "function") != "function":
        raise UsageError(f"{where}: type must be 'function', got {call['type']!r:.80}")
    function = {key: call[key] for key in ("name", "arguments") if key in call} if bare else call["function"]
    if not isinstance(function, Mapping):
        raise UsageError(f"{where}: function must be a mapping with the keys name and arguments, got {function!r:.80}")
    _check_keys(function, ("name", "arguments"), where)
    name = _string(function.get("name"), f"{where}: name")
    checked = ToolCall(
        type="function", function=FunctionCall(name=name, arguments=_arguments(function.get("arguments"), where))
    )
    if call.get("id") is not None:
        checked["id"] = _string(call["id"], f"{where}: id")
    return checked


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    """The arguments as a dictionary: templates and formats serialize them, and would quote JSON text twice."""
    value = arguments
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}: arguments must be a mapping or the JSON text of one, got {arguments!r:.80}")
    return _plain_json(dict(value), f"{where}: arguments")


def _plain_json(value: dict[str, Any], what: str) -> dict[str, Any]:
    """A copy of dict, list, str, numbers, True, False and None, so that a template meets no other objects."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{what} must be JSON-serializable: {error}") from None
    if deeper(copy, DEEPEST_JSON):
        raise UsageError(f"{what} must not be nested deeper than {DEEPEST_JSON} levels")
    return copy


def deeper(value: Any, levels: int) -> bool:
    """Whether lists and mappings are nested deeper than `levels`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (levels == 0 or any(deeper(item, levels - 1) for item in inner))


def _check_keys(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r:.80}; known: {', '.join(known)}")


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{what} must be a non-empty string, got {value!r:.80}")
    return value
