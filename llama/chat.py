"""A conversation to token ids, by the checkpoint's own Jinja template, in a sandbox.

The rule that matters: only the template's own text may become control tokens. What a user wrote stays text, even if
it spells "<|im_end|>". So before rendering, a mark (a code point that no text holds) is put into the messages where
they spell a control string or a part of one at their edge; a marked string is no longer one. After the rendered text
is cut at its control strings, the marks are taken out again.

Templates look into the text ("if '</think>' in content"), so marks are sparse. Since a template may also rearrange
text, a second rendering with marks at every possible place tells which control tokens are the template's own; should
the two disagree, that one counts.
"""

from __future__ import annotations

import datetime
import json
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
    now = now or datetime.datetime.now()
    pieces = []
    for mark_text in (_mark_sparsely, _mark_everywhere):
        marked = [{**m, "content": mark_text(m["content"], mark, tokenizer.control)} for m in checked]
        rendered = render(template, marked, tokenizer, add_generation_prompt=add_generation_prompt, now=now)
        pieces.append(_cut(rendered, tokenizer.control))
    sparse, full = ([piece for piece in cut if piece in tokenizer.control] for cut in pieces)
    ids: list[int] = []
    for piece in pieces[0] if sparse == full else pieces[1]:
        if piece in tokenizer.control:
            ids.append(tokenizer.control[piece])
        else:
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
    """The text a template makes of messages, in a sandbox.

    As with Hugging Face there are raise_exception, strftime_now, loop controls, {% generation %}, and tojson without
    HTML escapes; tools and documents are none.
    """
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(format: str) -> str:
        return (now or datetime.datetime.now()).strftime(format)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own would escape < and > for HTML

    name = {id: text for text, id in tokenizer.control.items()}
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
    )
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.filters["tojson"] = to_json
    try:
        pieces: list[str] = []
        length = 0
        for piece in environment.from_string(template).generate(
            messages=messages,
            tools=None,
            documents=None,
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


def _generation_tag() -> type:
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; here it is only its content."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (Jinja's own way to declare it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _check(message: Any, index: int) -> Message:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise UsageError(f"message {index} must be a mapping with the keys role and content, got {message!r:.80}")
    if message["role"] not in ROLES:
        raise UsageError(f"message {index}: role must be one of {', '.join(ROLES)}; got {message['role']!r:.80}")
    if not isinstance(message["content"], str):
        raise UsageError(f"message {index}: content must be a string, got {type(message['content']).__name__}")
    return Message(role=message["role"], content=message["content"])


def _cut(rendered: str, controls: Mapping[str, int]) -> list[str]:
    """A text cut at its control strings, which are pieces of their own; the longest wins where several begin."""
    longest_first = sorted(controls, key=len, reverse=True)
    pattern = "(" + "|".join(map(re.escape, longest_first)) + ")"
    return [piece for piece in (re.split(pattern, rendered) if controls else [rendered]) if piece]


def _mark_sparsely(text: str, mark: str, controls: Mapping[str, int]) -> str:
    """Mark the control strings a text spells, and its edges if they could be part of one."""
    for control in sorted(controls, key=len, reverse=True):
        text = text.replace(control, control[0] + mark + control[1:])
    body = text.strip()  # a template may trim
    end, start = len(text.rstrip()), len(text) - len(text.lstrip())
    if any(body.endswith(control[:n]) for control in controls for n in range(1, len(control))):
        text = text[:end] + mark + text[end:]
    if any(body.startswith(control[n:]) for control in controls for n in range(1, len(control))):
        text = text[:start] + mark + text[start:]
    return text


def _mark_everywhere(text: str, mark: str, controls: Mapping[str, int]) -> str:
    """Mark behind each character that begins a control string and before each that ends one.

    A false control string takes its first or its last character from the text (or has the text right inside, which
    no template spells), so a mark stands within it, however the template rearranges the text.
    """
    starts, ends = {control[0] for control in controls}, {control[-1] for control in controls}
    return "".join((mark if c in ends else "") + c + (mark if c in starts else "") for c in text)
