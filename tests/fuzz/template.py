"""Chat templates with fixed messages, and messages with a fixed template and the built-in formats."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llama.chat import CHAT_FORMATS, encode_chat
from llama.tokenizer import Tokenizer, open_tokenizer
from llama.tokenizer.gguf import from_metadata

from .. import tiny
from ..scripts import make_tiny
from . import law

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello <|im_end|> there"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": {"at": "<|im_start|>"}}]},
    {"role": "tool", "content": "[1, 2]", "name": "look"},
    {"role": "user", "content": "  And? "},
]
TEMPLATES = (
    tiny.CHATML,
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif loop.last %}{{ raise_exception('odd') }}{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}",
    "{%- set ns = namespace(x=0) %}{% macro f(a) %}{{ a ~ ns.x }}{% endmacro %}{% for m in messages[1:] %}"
    "{% set ns.x = ns.x + 1 %}{{ f(m.content[:3]) }}{{ m.tool_calls | default([]) | tojson(indent=2) }}{% endfor %}",
    "{{ strftime_now('%d %b %Y') }}{% for m in messages if m.content is string %}{% generation %}{{ m.content.split()"
    " | join('-') | replace('e', 'i') }}{% endgeneration %}{% break %}{% endfor %}{{ tools | tojson if tools }}",
    "{{ messages | map(attribute='role') | list | length }}{{ '%s' | format(messages[0].content) }}{{ 7 // 2 ** 3 }}",
)


class Harness(law.Harness):
    """The first byte names the rest: t a template, m messages as JSON."""

    words = tuple(
        word.encode()
        for word in ("{{", "}}", "{%", "%}", "{#", "-%}", "for", "in", "if", "set", "endfor", "macro", "call", "filter",
                     "include 'x'", "import 'x' as y", "extends 'x'", "loop", "cycler.__init__.__globals__",
                     "''.__class__.__mro__", "|attr('__class__')", "|xmlattr", "|pprint", "|tojson", "|map('upper')",
                     "self", "namespace", "lipsum", "range(9)", "joiner", "dict()", ".format", ".format_map", "|format",
                     "**9", "*9", "%9999d", "|center(99)", "|indent", "|urlize", "|batch(2)", "messages", "tools",
                     "strftime_now('%')", "raise_exception", "recursive", "loop(messages)", "caller()", "varargs",
                     '"role"', '"content"', '"tool_calls"', '"arguments"', '"user"', '"assistant"', '"tool"',
                     '"ipython"', '"system"', '"continues"', "<|im_start|>", "<|im_end|>")
    )  # fmt: skip
    allowed = ("subprocess.Popen",)  # a template that ends the process of the sandbox is followed by a new one

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.tokenizer = from_metadata(tiny.byte_vocabulary(), "tiny")
        kinds = {"llama3": make_tiny.tiktoken_model(300), "llama2": make_tiny.sentencepiece_model(340)}
        self.kinds = {name: open_tokenizer(self.put(name, data)) for name, data in kinds.items()}

    def seeds(self) -> Iterable[bytes]:
        for template in TEMPLATES:
            yield b"t" + template.encode()
        yield b"m" + json.dumps(MESSAGES).encode()
        yield b"m" + json.dumps([*MESSAGES[:2], {"role": "assistant", "content": "Ho"}, MESSAGES[1]]).encode()

    def calls(self, data: bytes) -> Iterator[law.Call]:
        if data[:1] != b"m":
            template = data[1:].decode(errors="replace")
            tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
            yield partial(encode_chat, self.tokenizer, template, MESSAGES, tools=tools, now=NOW)
            return
        try:
            messages = json.loads(data[1:])
        except (ValueError, RecursionError):
            return
        yield partial(only_the_template_controls, self.tokenizer, tiny.CHATML, messages, "jinja")
        for format in CHAT_FORMATS:
            kind = self.kinds["llama3" if format == "llama3" else "llama2"]
            yield partial(only_the_template_controls, kind, None, messages, format)


def only_the_template_controls(
    tokenizer: Tokenizer, template: str | None, messages: Sequence[Any], format: str
) -> None:
    """Raise Finding if the control ids depend on the text of the messages."""
    ids = encode_chat(tokenizer, template, messages, format=format, now=NOW)
    if any(not isinstance(message.get("content"), str) or message.get("tool_calls") for message in messages):
        return
    plain = [{**message, "content": "x"} for message in messages]
    control = set(tokenizer.control.values())
    plain_ids = encode_chat(tokenizer, template, plain, format=format, now=NOW)
    found, expected = ([id for id in encoded if id in control] for encoded in (ids, plain_ids))
    if found != expected:
        raise law.Finding(f"{format}: the control ids are {found[:20]}, with other texts {expected[:20]}")
