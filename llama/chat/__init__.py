"""Convert a conversation to token ids, by the checkpoint's Jinja template or that of a built-in format (formats.py).

Only what the template writes becomes control tokens; the text of messages stays text (template.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import choice
from ..errors import TemplateError
from ..tokenizer import Tokenizer
from .formats import TEMPLATES, chat_format_of, check_format
from .functions import Tools
from .messages import Message, check_messages, check_tools
from .template import choose_template, encode_template, render
from .tool_calls import parse_tool_calls

__all__ = ["TEMPLATES", "check_messages", "encode_chat", "parse_tool_calls", "render"]

TOOLS_TEXT = (
    'You may call the functions below. To call one, answer only with {"name": its name, "parameters": {its arguments}}.'
)


def encode_chat(
    tokenizer: Tokenizer,
    template: str | Mapping[str, str] | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    format: str | None = None,
    tools: Tools | None = None,
    forced: bool = False,
    max_chars: int | None = None,
    **options: Any,
) -> list[int]:
    """Ids of a conversation. They end with the start of the assistant's turn, or (continues) with that turn's text.

    template   Jinja source, as in tokenizer_config.json or GGUF's tokenizer.chat_template, or several by name
    messages   mappings with the keys of `Message`
    format     "jinja" or None for the template, or a name of TEMPLATES
    tools      the functions the assistant may call, or their JSON schemas. If the template ignores tools, a
               system message describes them, unless a grammar forces a call (forced). If it ignores tool_calls, calls
               in messages become text
    max_chars  raise ContextLengthError if the text is longer, instead of encoding it
    options    now, variables and add_generation_prompt, as for `render`; continues, as for `encode_template`

    Raises UsageError on a malformed message, and TemplateError if the template is missing or fails, or if the
    vocabulary lacks a token of the format.
    """
    checked, tools = check_messages(messages), check_tools(tools)
    if format is not None and choice("chat format", format, ("jinja", *TEMPLATES)) != "jinja":
        check_format(format, tokenizer)
        template = TEMPLATES[format]
    source = choose_template(template, tools)
    if source is None:
        fits = chat_format_of(tokenizer) or "llama3"
        raise TemplateError(
            "this model has no chat template, so it is probably a base model: use llm.generate(text) (--raw);"
            f" if it was trained for chat, name its format: llm.chat_format = {fits!r} (--chat-format {fits})"
        )
    if not re.search(r"\btool_calls\b", source):
        checked = [_as_text(message) for message in checked]
    if tools and not forced and not re.search(r"\btools\b", source):
        checked = with_tools(checked, tools)
    return encode_template(tokenizer, source, checked, max_chars=max_chars, tools=tools, **options)


def with_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """The messages with a system message that describes tools, for a template that ignores them."""
    described = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    before = [messages[0]["content"], ""] if messages and messages[0]["role"] == "system" else []
    system: Message = {"role": "system", "content": "\n".join([*before, TOOLS_TEXT, *described])}
    return [system, *messages[bool(before) :]]


def _as_text(message: Message) -> Message:
    """A message with its calls as text."""
    calls = [
        {"name": one["function"]["name"], "parameters": one["function"]["arguments"]}
        for one in message.get("tool_calls", [])
    ]
    texts = [message["content"], *(json.dumps(call, ensure_ascii=False) for call in calls)]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, texts))}
