"""A conversation to token ids, by the checkpoint's Jinja template (template.py) or a built-in format (formats.py).

In both cases only the format's own structure becomes control tokens; the text of messages stays text.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import choice
from ..errors import TemplateError, UsageError
from ..tokenizer import Tokenizer
from .families import TEMPLATES, check_template
from .formats import CHAT_FORMATS, ChatFormat, chat_format_of, codellama70b, llama2, llama3
from .messages import ROLES, Message, ToolCall, check_messages, check_tools
from .template import encode_template, render
from .tool_calls import ToolCallStream, call_marks, parse_tool_calls

__all__ = [
    "CHAT_FORMATS",
    "ROLES",
    "TEMPLATES",
    "ChatFormat",
    "Message",
    "ToolCall",
    "ToolCallStream",
    "call_marks",
    "chat_format_of",
    "check_messages",
    "check_template",
    "codellama70b",
    "encode_chat",
    "llama2",
    "llama3",
    "parse_tool_calls",
    "render",
]


def encode_chat(
    tokenizer: Tokenizer,
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    format: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
) -> list[int]:
    """Ids of a conversation, ending with the start of the assistant's turn.

    template  Jinja source, as in tokenizer_config.json or GGUF's tokenizer.chat_template
    messages  mappings with the keys of `Message`
    format    "jinja" or None for the template, or a name of CHAT_FORMATS
    tools     JSON schemas of the functions the assistant may call; needs a template
    now       the time for the template's strftime_now, used by templates that print the date

    Raises UsageError on a malformed message, and TemplateError if the template is missing or fails, or if the
    vocabulary lacks a token of the format.
    """
    if format is not None and choice("chat format", format, ("jinja", *CHAT_FORMATS)) != "jinja":
        if tools is not None:
            raise UsageError(
                f"the chat format {format} does not support tools, only chat templates do; describe the tools in a"
                " system message"
            )
        if not add_generation_prompt:
            raise UsageError(
                f"the chat format {format} always ends with the start of the assistant's turn;"
                " leave out add_generation_prompt=False; only chat templates support it"
            )
        return CHAT_FORMATS[format](tokenizer, messages)
    if template is None:
        fits = chat_format_of(tokenizer) or "llama3"
        raise TemplateError(
            "this model has no chat template, so it is probably a base model: use llm.generate(text) (--raw);"
            f" if it was trained for chat, name its format: llm.chat_format = {fits!r} (--chat-format {fits})"
        )
    return encode_template(
        tokenizer,
        template,
        check_messages(messages),
        tools=check_tools(tools),
        add_generation_prompt=add_generation_prompt,
        now=now,
    )
