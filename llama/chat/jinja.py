"""The work of the child process that renders chat templates (system/child.py): `answer` renders one conversation.

Templates get the names that Hugging Face's library defines, in Jinja's immutable sandbox.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """{"texts": the rendered texts}, or {"error": the message of the template's exception}. The keys of a request:

    template  Jinja source
    values    the variables of the template; messages and tools come from a user
    variables further variables, from a user
    now       the time for strftime_now, in ISO format
    hidden    for each text to render None, or two regular expressions: stand-ins replace the characters that the first
              one finds in messages and tools, except what the second one finds in the assistant's messages
    stand_ins character -> its stand-in
    """
    values, stand_ins = request["values"], str.maketrans(request["stand_ins"])
    values["strftime_now"] = datetime.datetime.fromisoformat(request["now"]).strftime
    try:
        template = compiled(request["template"])
        texts = [hide(values, request["variables"], patterns, stand_ins) for patterns in request["hidden"]]
        return {"texts": [template.render(variables) for variables in texts]}
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything
        return {"error": " ".join(str(error).split()) or type(error).__name__}


def hide(
    values: dict[str, Any], more: dict[str, Any], patterns: list[str] | None, stand_ins: dict[int, str]
) -> dict[str, Any]:
    """All variables, with stand-ins for what the patterns find in the strings that come from a user."""
    if patterns is None:
        return {**more, **values}
    assistant, other = (re.compile(f"({k})|(?:(?!{k})(?:{patterns[0]}))+") for k in (patterns[1], "(?!)"))

    def hidden(value: Any, find: re.Pattern[str] = other) -> Any:
        if isinstance(value, str):
            return Hidden(value, find.sub(lambda found: found[1] or found[0].translate(stand_ins), value))
        if isinstance(value, dict):
            return {hidden(name, find): hidden(item, find) for name, item in value.items()}
        return [hidden(item, find) for item in value] if isinstance(value, list) else value

    messages = [
        {**hidden(message, assistant if message["role"] == "assistant" else other), "role": message["role"]}
        for message in values["messages"]
    ]
    return {**hidden(more), **values, "messages": messages, "tools": hidden(values["tools"])}


class Hidden(str):
    """A string with stand-ins that compares and hashes as the original, so that templates can look it up.

    The sandbox refuses names that begin with an underscore, so no template can read the original.
    """

    _original: str

    def __new__(cls, original: str, text: str) -> Hidden:
        self = super().__new__(cls, text)
        self._original = original
        return self

    def __eq__(self, other: object) -> bool:
        return self._original == (other._original if isinstance(other, Hidden) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._original)


# ------------------------------------------------------------------------------------------------------ the environment
class Generation(Extension):
    """The tag {% generation %}, which marks the assistant's text for training. It renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own way to declare it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> NoReturn:
    """Fail with a message. Templates call this function to reject a conversation."""
    raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=1)
def compiled(source: str) -> jinja2.Template:
    """A template, compiled once for all its renderings."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # without Jinja's HTML escapes
    return environment.from_string(source)


# Lets Jinja import all of its modules, since the child can't open files later
IMPORTS = "{{ '<b>\\n' | striptags | wordwrap | pprint }}{{ lipsum() }}{{ raise_exception('x') }}"
answer({"template": IMPORTS, "values": {}, "variables": {}, "now": "2026-01-01", "hidden": [None], "stand_ins": {}})
