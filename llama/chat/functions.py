"""Python functions as tools of a chat."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..checks import shown
from ..errors import UsageError

Tools = Sequence[Mapping[str, Any] | Callable[..., Any]]
TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null",
                         list: "array", tuple: "array", dict: "object"}  # fmt: skip
# The heading of a docstring's section; an argument in the section Args: its indentation, name and text
SECTION = re.compile(r"\s*^[ \t]*(Args|Returns|Raises):", re.MULTILINE)
NAME = r"[ \t]*\**(\w+)(?:[ \t]*\([^()\n]*\))?:"
ARGUMENT = re.compile(rf"^(?=([ \t]*)){NAME}\s*(.*?)\s*(?=\n(?!\1[ \t]){NAME}|\Z)", re.MULTILINE | re.DOTALL)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a Python function, from its name, type hints and docstring, as by transformers' get_json_schema.

    A missing hint stands for str. *args, **kwargs, self and cls are left out. Raises UsageError if there is no schema.
    """
    name, about = getattr(function, "__name__", type(function).__name__), inspect.getdoc(function) or ""
    try:
        hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    except (TypeError, ValueError, NameError) as error:
        raise UsageError(f"{name} has no JSON schema ({error}); pass a function with type hints, or a schema") from None
    left_out = {"self", "cls"} - hints.keys() | {key for key, one in parameters.items() if str(one)[0] == "*"}
    properties = {key: _type(hints.get(key, str), f"{name}: {key}") for key in parameters if key not in left_out}
    description, *sections = SECTION.split(about)
    arguments = dict(zip(sections[::2], sections[1::2], strict=True)).get("Args", "")
    for _, key, text, _ in ARGUMENT.findall(arguments):
        if key in properties:
            properties[key]["description"] = re.sub(r"\s*\n\s*", " ", text)
    required = [key for key in properties if parameters[key].default is inspect.Parameter.empty]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description.strip(), "parameters": schema}}


def _type(hint: Any, where: str) -> dict[str, Any]:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if isinstance(kind, type) and issubclass(kind, Enum):
        kind, inner = Literal, tuple(member.value for member in hint)
    if kind is Literal and inner and all(type(value) in TYPES for value in inner):
        return {"type": _types(dict.fromkeys(TYPES[type(value)] for value in inner)), "enum": [*inner]}
    if kind is Any:
        return {}
    if kind not in [Union, types.UnionType, *TYPES] or Ellipsis in inner:
        known = "str, int, float, bool, list, tuple, dict, Literal, Enum"
        raise UsageError(f"{where}: the type {shown(hint)} has no JSON schema; use {known}, or pass a schema")
    found = [_type(one, where) for one in inner if kind in TYPES or one is not type(None)]
    if kind in TYPES:
        keyword = {list: "items", tuple: "prefixItems", dict: "additionalProperties"}.get(kind, "")
        return {"type": TYPES[kind], **({keyword: found if kind is tuple else found[-1]} if found else {})}
    union: dict[str, Any] = found[0] if len(found) == 1 else {"anyOf": found}
    if all(one.keys() == {"type"} for one in found):
        union = {"type": _types(sorted({one["type"] for one in found}))}
    return {**union, "nullable": True} if type(None) in inner else union


def _types(names: Collection[str]) -> str | list[str]:
    return [*names] if len(names) > 1 else min(names)
