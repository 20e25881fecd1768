"""A conversation to token ids, by the checkpoint's own Jinja template, in a sandbox.

The rule that matters: only the template's own text may become control tokens. What a user wrote stays text, even if
it spells "<|im_end|>". So before rendering, a mark (a code point that no text holds) is put into the messages where
they spell a control string or a part of one at their edge; a marked string is no longer one. After the rendered text
is cut at its control strings, the marks are taken out again.

Templates look into the text ("if '</think>' in content"), so marks are sparse. Since a template may also rearrange
text, a second rendering, in which every character of a message that occurs in any control string is swapped for a
stand-in, tells which control tokens are the template's own. Should the two disagree, the second one counts: safe, at
the price of what the template wanted to see in the text.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
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
    controls = {text: id for text, id in tokenizer.control.items() if text}
    written = set("".join(m["content"] for m in checked))
    mark = next((c for c in NONCHARACTERS if c not in written), None)
    if mark is None:
        raise UsageError(
            "the messages use every noncharacter U+FDD0 to U+FDEF, so none is left to mark their text with"
        )
    now = now or datetime.datetime.now()

    def cut(change: Callable[[str], str]) -> list[str]:
        changed = [{**m, "content": change(m["content"])} for m in checked]
        text = render(template, changed, tokenizer, add_generation_prompt=add_generation_prompt, now=now)
        return _cut(text, controls)

    stand_in = _stand_ins(controls, written)
    sparse = cut(lambda text: _mark(text, mark, controls))
    full = cut(lambda text: text.translate(stand_in))
    agree = [piece for piece in sparse if piece in controls] == [piece for piece in full if piece in controls]
    back = {ord(mark): None} if agree else {ord(other): chr(character) for character, other in stand_in.items()}
    ids: list[int] = []
    for piece in sparse if agree else full:
        ids += [controls[piece]] if piece in controls else tokenizer.encode(piece.translate(back))
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

    def to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
                sort_keys: bool = False) -> str:  # fmt: skip
        # Jinja's own would escape < and > for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

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


def _mark(text: str, mark: str, controls: Mapping[str, int]) -> str:
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


def _stand_ins(controls: Mapping[str, int], written: set[str]) -> dict[int, str]:
    """For each character that occurs in a control string, one of a private plane that no message uses."""
    free = (character for character in map(chr, range(0xF0000, 0xFFFFE)) if character not in written)
    return {ord(character): next(free) for character in sorted(set("".join(controls)))}
