"""A conversation to token ids, by the checkpoint's own Jinja template, in a sandbox.

The rule that matters: only the template's own text may become control tokens. What a user wrote stays text, even if
it spells "<|im_end|>". So the rendered string is not handed to a tokenizer that looks for control strings in it;
before rendering, a mark is put into every message where a control string could begin or end, and a marked string is
no longer one. The marks are taken out again after the cut.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypedDict

from .errors import TemplateError, UsageError
from .tokenizer import Tokenizer


class Message(TypedDict):
    """One turn: role "system", "user", "assistant", "tool" or "ipython", and its text."""

    role: str
    content: str


# A role is part of the template's own structure ("<|im_start|>" + role), so it is one of these or refused.
ROLES = ("system", "user", "assistant", "tool", "ipython")

# Code points that Unicode reserves as "not a character": no text that is interchanged holds them.
NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

LARGEST_RENDERING = 50_000_000  # characters


def encode_chat(
    tokenizer: Tokenizer,
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
) -> list[int]:
    """Ids of a conversation, ending where the assistant is to speak.

    template  Jinja source, as in tokenizer_config.json or GGUF's tokenizer.chat_template
    now       what the template's strftime_now sees, for templates that print the date

    Raises UsageError on a malformed message and TemplateError on a missing or failing template.
    """
    if template is None:
        raise TemplateError("this model has no chat template, so it is a base model: use --raw or llm.generate(text)")
    checked = [_check(message, i) for i, message in enumerate(messages)]
    if not checked:
        raise UsageError("a chat needs at least one message")
    mark = next((c for c in NONCHARACTERS if not any(c in m["content"] for m in checked)), None)
    if mark is None:
        raise UsageError(
            "the messages use every noncharacter U+FDD0 to U+FDEF, so none is left to mark their text with"
        )
    starts = {control[0] for control in tokenizer.control}
    ends = {control[-1] for control in tokenizer.control}
    marked = [{**m, "content": _mark(m["content"], mark, starts, ends)} for m in checked]
    rendered = render(template, marked, tokenizer, add_generation_prompt=add_generation_prompt, now=now)
    return encode_rendered(tokenizer, rendered, mark)


def encode_rendered(tokenizer: Tokenizer, rendered: str, mark: str) -> list[int]:
    """Cut a rendered template at its control strings; everything between is plain text, without its marks."""
    if not tokenizer.control:
        return tokenizer.encode(rendered.replace(mark, ""))
    longest_first = sorted(tokenizer.control, key=len, reverse=True)
    ids: list[int] = []
    for piece in re.split("(" + "|".join(map(re.escape, longest_first)) + ")", rendered):
        if piece in tokenizer.control:
            ids.append(tokenizer.control[piece])
        elif piece:
            ids += tokenizer.encode(piece.replace(mark, ""))
    return ids


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
) -> str:
    """The text a template makes of messages. The environment offers what Hugging Face's does, sandboxed."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(format: str) -> str:
        return (now or datetime.datetime.now()).strftime(format)

    name = {id: text for text, id in tokenizer.control.items()}
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    try:
        pieces: list[str] = []
        length = 0
        for piece in environment.from_string(template).generate(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=name.get(tokenizer.bos_id, "") if tokenizer.bos_id is not None else "",
            eos_token=name.get(tokenizer.eos_id, "") if tokenizer.eos_id is not None else "",
        ):
            length += len(piece)
            if length > LARGEST_RENDERING:
                raise TemplateError(f"the chat template wrote over {LARGEST_RENDERING} characters and was stopped")
            pieces.append(piece)
    except TemplateError:
        raise
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise TemplateError(f"the model's chat template failed: {text}; --raw goes without it") from error
    return "".join(pieces)


def _check(message: Any, index: int) -> Message:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise UsageError(f"message {index} must be a mapping with the keys role and content, got {message!r:.80}")
    if message["role"] not in ROLES:
        raise UsageError(f"message {index}: role must be one of {', '.join(ROLES)}; got {message['role']!r:.80}")
    if not isinstance(message["content"], str):
        raise UsageError(f"message {index}: content must be a string, got {type(message['content']).__name__}")
    return Message(role=message["role"], content=message["content"])


def _mark(text: str, mark: str, starts: set[str], ends: set[str]) -> str:
    """Put the mark behind each character that begins a control string and before each that ends one.

    A false control string would take its first or its last character from the text (or have the text right inside,
    which no template spells), so the mark would stand within it, and it is none.
    """
    return "".join((mark if c in ends else "") + c + (mark if c in starts else "") for c in text)
