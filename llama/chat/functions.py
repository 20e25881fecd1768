"""Python functions as tools of a chat."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..checks import shown
from ..errors import UsageError

Tools = Sequence[Mapping[str, Any] | Callable[..., Any]]
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a Python function, from its name, type hints and docstring.

    The first paragraph of the docstring describes the function, its lines "name: text" the parameters. Raises
    UsageError for a type outside TYPES, Literal, Optional and their unions.
    """
    about, hints = inspect.getdoc(function) or "", get_type_hints(function)
    described = dict(re.findall(r"^\s+(\w+)(?: \([^)]*\))?: *(.+)$", about, re.MULTILINE))
    parameters = inspect.signature(function).parameters
    properties = {name: _type(hints.get(name, str), f"{function.__name__}: {name}") for name in parameters}
    for name in described.keys() & properties.keys():
        properties[name]["description"] = described[name]
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    named = {"name": function.__name__, "description": " ".join(about.split("\n\n")[0].split())}
    return {"type": "function", "function": {**named, "parameters": schema}}


def _type(hint: Any, where: str) -> dict[str, Any]:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        return {"type": TYPES[type(inner[0])], "enum": [*inner]}
    if kind in (Union, types.UnionType):
        several = [_type(one, where) for one in inner if one is not type(None)]
        return several[0] if len(several) == 1 else {"anyOf": several}
    if kind not in TYPES:
        known = ", ".join(known.__name__ for known in TYPES)
        raise UsageError(f"{where}: the type {shown(hint)} has no JSON schema; use {known}, or pass a schema")
    return {"type": TYPES[kind], **({"items": _type(inner[0], where)} if kind is list and inner else {})}
