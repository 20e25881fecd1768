"""A conversation to token ids by the checkpoint's own Jinja template, in a sandbox.

The rule that matters: only the template's own text may become control tokens. What a user wrote stays text, even if
it spells "<|im_end|>"; that goes for all strings of the messages and the tools, the keys of mappings too. So before
rendering, a mark (a code point that no text holds) is put into them where they spell a control string or a part of
one at their edge; a marked string is no longer one. After the rendered text is cut at its control strings, the marks
are taken out again.

Templates look into the text ("if '</think>' in content"), so marks are sparse. Since a template may also rearrange
text, a second rendering, in which every character that occurs in any control string is swapped for a stand-in, tells
which control tokens are the template's own. Should the two disagree, the second one counts: safe, at the price of
what the template wanted to see in the text.
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

# Code points that Unicode reserves as "not a character": no text that is interchanged holds them.
NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

STAND_INS = range(0xF0000, 0xFFFFE)  # a private plane


def encode_template(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
) -> list[int]:
    """Ids of checked messages, and of checked tools where there are any. Raises TemplateError."""
    for i, message in enumerate(messages):
        if "continues" in message:
            raise UsageError(
                f"message {i}: only the chat format llama3 writes continues, a template decides for itself"
            )
    controls = {text: id for text, id in tokenizer.control.items() if text}
    written = {character for text in _texts([*messages, *(tools or ())]) for character in text}
    mark = next((c for c in NONCHARACTERS if c not in written), None)
    if mark is None:
        raise UsageError(
            "the messages use every noncharacter U+FDD0 to U+FDEF, so none is left to mark their text with"
        )
    now = now or datetime.datetime.now()

    def cut(change: Change) -> list[str]:
        text = render(
            template,
            [{key: v if key == "role" else _changed(v, change) for key, v in m.items()} for m in messages],
            tokenizer,
            tools=_changed(tools, change),
            add_generation_prompt=add_generation_prompt,
            now=now,
        )
        return _cut(text, controls)

    stand_in = _stand_ins(controls, written)
    sparse = cut(_marking(mark, controls))
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
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
) -> str:
    """The text a template makes of messages, in a sandbox.

    As with Hugging Face there are raise_exception, strftime_now, loop controls, {% generation %}, and tojson without
    HTML escapes; documents are none. A template that runs for more than bounded.SECONDS or takes more than
    bounded.SPACE is stopped. Raises TemplateError.
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
            f" --raw goes without it"
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
    except Exception as error:  # whatever its code came to
        text = " ".join(str(error).split()) or type(error).__name__
        raise TemplateError(f"the model's chat template failed: {text}; --raw goes without it") from error


class _Text(str):
    """A string of a user as the template meets it: it writes the changed text, but is compared and looked up as given.

    So a template finds tool.function.name and sees that a type is "string", whatever stands in the place of their
    characters. Comparing puts none of them into the text.
    """

    _given: str
    _change: Change

    def __new__(cls, text: str, change: Change = str) -> _Text:
        self = super().__new__(cls, change(text))
        self._given, self._change = text, change
        return self

    def __eq__(self, other: object) -> bool:
        return self._given == (other._given if isinstance(other, _Text) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._given)

    def __repr__(self) -> str:
        return self._change(repr(self._given))  # what {{ arguments }} writes of a mapping


def _changed(value: Any, change: Change) -> Any:
    """A value with all its strings changed, the keys of mappings too."""
    if isinstance(value, str):
        return _Text(value, change)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_changed(item, change) for item in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    """All strings of a value, the keys of mappings too."""
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
    """Jinja's own would escape < and > for HTML."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        # Marks and stand-ins stay as they are: an escaped one could not be taken out again.
        kept = f"\x00-\x7f{NONCHARACTERS[0]}-{NONCHARACTERS[-1]}{chr(STAND_INS[0])}-{chr(STAND_INS[-1])}"
        text = re.sub(f"[^{kept}]", lambda character: json.dumps(character[0])[1:-1], text)
    return text


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


def _cut(rendered: str, controls: Mapping[str, int]) -> list[str]:
    """A text cut at its control strings, which are pieces of their own; the longest wins where several begin."""
    longest_first = sorted(controls, key=len, reverse=True)
    pattern = "(" + "|".join(map(re.escape, longest_first)) + ")"
    return [piece for piece in (re.split(pattern, rendered) if controls else [rendered]) if piece]


def _marking(mark: str, controls: Mapping[str, int]) -> Change:
    """Marks the control strings a text spells, and its edges if they could be part of one."""
    longest_first = sorted(controls, key=len, reverse=True)
    starts = tuple({control[:n] for control in controls for n in range(1, len(control))})
    ends = tuple({control[n:] for control in controls for n in range(1, len(control))})

    def change(text: str) -> str:
        for control in longest_first:
            text = text.replace(control, control[0] + mark + control[1:])
        body = text.strip()  # a template may trim
        end, start = len(text.rstrip()), len(text) - len(text.lstrip())
        if body.endswith(starts):
            text = text[:end] + mark + text[end:]
        if body.startswith(ends):
            text = text[:start] + mark + text[start:]
        return text

    return change


def _stand_ins(controls: Mapping[str, int], written: set[str]) -> dict[int, str]:
    """For each character that occurs in a control string, one of a private plane that no message uses."""
    free = (character for character in map(chr, STAND_INS) if character not in written)
    return {ord(character): next(free) for character in sorted(set("".join(controls)))}
