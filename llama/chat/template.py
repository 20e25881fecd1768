"""A conversation to token ids by the checkpoint's own Jinja template, in a sandbox.

Only the template's own text may become control tokens. All strings of the messages and tools, including the keys of
mappings, stay text even if they spell "<|im_end|>". The conversation is rendered twice:

1. Marked: a mark (a code point that no message contains) is inserted into each string that spells a control string, or
   that begins or ends with a part of one. The rendered text is split at its control strings, then the marks are
   removed. Marks are sparse because templates inspect the text ("if '</think>' in content").
2. Substituted: every character that occurs in any control string is replaced by a stand-in. A template that rearranges
   text can defeat marks but not stand-ins, so this rendering shows which control tokens are the template's own.

If the control tokens of the two renderings differ, the second one is used. It is safe, but the template could not
inspect the original text.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import TemplateError, UsageError
from ..tokenizer import Tokenizer
from .messages import Message

Change = Callable[[str], str]

# Noncharacters of Unicode: reserved for internal use, so exchanged text does not contain them.
NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

STAND_INS = range(0xF0000, 0xFFFFE)  # a private use plane


def encode_template(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
) -> list[int]:
    """Ids of validated messages and tools. Raises TemplateError."""
    for i, message in enumerate(messages):
        if "continues" in message:
            raise UsageError(
                f"message {i}: continues needs the chat format llama3; a template decides itself how a message ends"
            )
    controls = {text: id for text, id in tokenizer.control.items() if text}
    used = {character for text in _texts([*messages, *(tools or ())]) for character in text}
    mark = next((c for c in NONCHARACTERS if c not in used), None)
    if mark is None:
        raise UsageError("the messages use all noncharacters U+FDD0 to U+FDEF, but one must be free to mark their text")
    now = now or datetime.datetime.now()

    def rendered(change: Change) -> list[str]:
        text = render(
            template,
            [{key: v if key == "role" else _changed(v, change) for key, v in m.items()} for m in messages],
            tokenizer,
            tools=_changed(tools, change),
            add_generation_prompt=add_generation_prompt,
            now=now,
        )
        return _split(text, controls)

    stand_in = _stand_ins(controls, used)
    marked = rendered(_marking(mark, controls))
    substituted = rendered(lambda text: text.translate(stand_in))
    agree = [piece for piece in marked if piece in controls] == [piece for piece in substituted if piece in controls]
    back = {ord(mark): None} if agree else {ord(other): chr(character) for character, other in stand_in.items()}
    ids: list[int] = []
    for piece in marked if agree else substituted:
        ids += [controls[piece]] if piece in controls else tokenizer.encode(piece.translate(back))
    return ids


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
) -> str:
    """The text of messages rendered by a template in a sandbox.

    As in Hugging Face's library, templates have raise_exception, strftime_now, loop controls, {% generation %} and a
    tojson without HTML escapes; documents is none. A template that exceeds bounded.SECONDS or bounded.SPACE is stopped.
    Raises TemplateError.
    """
    import jinja2
    from jinja2.ext import loopcontrols

    from .bounded import LARGEST_TEMPLATE, Bounded

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(format: str) -> str:
        return (now or datetime.datetime.now()).strftime(format)

    name = {id: text for text, id in tokenizer.control.items()}
    if len(template) > LARGEST_TEMPLATE:
        raise TemplateError(
            f"the model's chat template has {len(template):,} characters, expected at most {LARGEST_TEMPLATE:,};"
            f" --raw works without it"
        )
    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()])
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.add_filter("tojson", _to_json)
    try:
        return environment.from_string(template).render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            bos_token=name.get(tokenizer.bos_id, "") if tokenizer.bos_id is not None else "",
            eos_token=name.get(tokenizer.eos_id, "") if tokenizer.eos_id is not None else "",
        )
    except Exception as error:  # a template can raise anything
        message = " ".join(str(error).split()) or type(error).__name__
        raise TemplateError(f"the model's chat template failed: {message}; --raw works without it") from error


class _Text(str):
    """A user's string in a template: written in its changed form, but compared and hashed in its original form.

    So a template finds tool.function.name and recognizes the type "string" although their characters are replaced.
    Comparing writes nothing, so it is safe.
    """

    _original: str
    _change: Change

    def __new__(cls, text: str, change: Change = str) -> _Text:
        self = super().__new__(cls, change(text))
        self._original, self._change = text, change
        return self

    def __eq__(self, other: object) -> bool:
        return self._original == (other._original if isinstance(other, _Text) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._original)

    def __repr__(self) -> str:
        return self._change(repr(self._original))  # {{ arguments }} writes the repr of strings in a mapping


def _changed(value: Any, change: Change) -> Any:
    """A value with all its strings changed, including the keys of mappings."""
    if isinstance(value, str):
        return _Text(value, change)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_changed(item, change) for item in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    """All strings of a value, including the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        # Marks and stand-ins are not escaped: an escaped one could not be removed later.
        unescaped = f"\x00-\x7f{NONCHARACTERS[0]}-{NONCHARACTERS[-1]}{chr(STAND_INS[0])}-{chr(STAND_INS[-1])}"
        text = re.sub(f"[^{unescaped}]", lambda character: json.dumps(character[0])[1:-1], text)
    return text


def _generation_tag() -> type:
    """Jinja extension for {% generation %}, which marks the assistant's text for training. It renders the content."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (Jinja's own way to declare it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _split(rendered: str, controls: Mapping[str, int]) -> list[str]:
    """A text split at its control strings, which become pieces of their own; the longest match wins."""
    longest_first = sorted(controls, key=len, reverse=True)
    pattern = "(" + "|".join(map(re.escape, longest_first)) + ")"
    return [piece for piece in (re.split(pattern, rendered) if controls else [rendered]) if piece]


def _marking(mark: str, controls: Mapping[str, int]) -> Change:
    """A function that marks the control strings in a text, and its ends if they could be part of one."""
    longest_first = sorted(controls, key=len, reverse=True)
    starts = tuple({control[:n] for control in controls for n in range(1, len(control))})
    ends = tuple({control[n:] for control in controls for n in range(1, len(control))})

    def change(text: str) -> str:
        for control in longest_first:
            text = text.replace(control, control[0] + mark + control[1:])
        body = text.strip()  # a template may strip the text
        end, start = len(text.rstrip()), len(text) - len(text.lstrip())
        if body.endswith(starts):
            text = text[:end] + mark + text[end:]
        if body.startswith(ends):
            text = text[:start] + mark + text[start:]
        return text

    return change


def _stand_ins(controls: Mapping[str, int], used: set[str]) -> dict[int, str]:
    """Character of a control string -> a private use character that no message uses."""
    free = (character for character in map(chr, STAND_INS) if character not in used)
    return {ord(character): next(free) for character in sorted(set("".join(controls)))}
