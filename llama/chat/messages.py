"""The messages of a conversation, and their validation.

The structure is that of OpenAI's API and Hugging Face's templates: a role, its text, an assistant's calls of functions,
and the results of the functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import shown
from ..errors import UsageError
from ..system.documents import Required, checked
from .functions import Tools, schema_of

# {"type": "function", "function": {"name": ..., "arguments": {...}}}, and an id if the input has one. The input may
# have only the inner mapping, and arguments as JSON text.
ToolCall = dict[str, Any]


# One turn, as check_messages returns it. Keys keep the order of the input, since templates may write them.
#   role               one of ROLES; "ipython" is Llama 3's name for a tool's result
#   content            the text; in the input it may be None or missing if there are tool_calls
#   tool_calls         assistant only: the functions it calls
#   reasoning_content  assistant only: its thoughts, which some templates write
#   tool_call_id       tool only: the id of the call that this message answers
#   name               tool only: the tool's name
Message = dict[str, Any]

# A role becomes part of the format's structure ("<|im_start|>" + role), so any other role is rejected.
ROLES = ("system", "user", "assistant", "tool", "ipython")

DEEPEST_JSON = 64  # levels; the functions that traverse it are recursive


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Validated messages in a uniform shape. Raises UsageError, which names the wrong message and key."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages or isinstance(messages[0], list):
        raise UsageError(f"messages must be one conversation, a list with at least one message, got {shown(messages)}")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def continues_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the beginning of an answer, which the model continues."""
    last = messages[-1] if messages else {}
    return len(messages) > 1 and last.get("role") == "assistant" and not last.get("tool_calls")


def check_tools(tools: Tools | None) -> list[dict[str, Any]] | None:
    """The JSON schemas of functions as plain dictionaries. Raises UsageError."""
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) or callable(tool) for tool in tools):
        raise UsageError(f"tools must be a list of functions or of their JSON schemas, got {shown(tools)}")
    return [_object(schema_of(tool) if callable(tool) else tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _message(message: Any, where: str) -> Message:
    role = checked(message, dict, where).get("role")
    if role not in ROLES:
        raise UsageError(f"{where}.role must be one of {', '.join(ROLES)}; got {shown(role)}")
    found: Message = checked(message, {"role": str, "content": str, **OF_ROLE.get(role, {})}, where)
    if found.get("tool_calls"):
        found.setdefault("content", "")
    if "content" not in found:
        raise UsageError(f"{where}.content is missing")
    return {key: value for key, value in found.items() if value != []}


def _call(call: Any, where: str) -> ToolCall:
    if isinstance(call, Mapping) and "function" not in call:  # only the inner mapping, perhaps with an id
        outer = {key: value for key, value in call.items() if key not in FUNCTION}
        call = {"type": "function", "function": {key: call.get(key) for key in FUNCTION}, **outer}
    return {**checked(call, CALL, where), "type": "function"}


def _object(value: Any, where: str) -> dict[str, Any]:
    """Copy a mapping, or parse the JSON text of one. The result has only JSON's types, so templates meet no others."""
    try:
        mapping = json.loads(value or "{}") if isinstance(value, str) else value
        copy = json.loads(json.dumps(mapping, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{where} must be JSON-serializable: {error}") from None
    if not isinstance(copy, dict) or deeper(copy, DEEPEST_JSON):
        raise UsageError(f"{where} must be an object of at most {DEEPEST_JSON} levels, got {shown(value)}")
    return copy


def deeper(value: Any, levels: int) -> bool:
    """Whether lists and mappings are nested deeper than `levels`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (levels == 0 or any(deeper(item, levels - 1) for item in inner))


# The kinds of the entries (system/documents.py)
FUNCTION = {"name": Required(str), "arguments": Required(_object)}
CALL = {"type": "function", "id": str, "function": Required(FUNCTION)}
TOOL = {"tool_call_id": str, "name": str}
OF_ROLE: dict[str, Any] = {
    "assistant": {"tool_calls": [_call], "reasoning_content": str},
    "tool": TOOL,
    "ipython": TOOL,
}
