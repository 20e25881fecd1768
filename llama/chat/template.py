"""Encode a conversation by the checkpoint's own Jinja template, which a child process renders (jinja.py).

The text is exactly what the template gives. Only what the template itself writes may become a control token; text of
messages and tools stays text, even if it spells "<|im_end|>". So the conversation is rendered again, with stand-ins for
all characters of control strings in messages and tools: the control strings that remain are the template's own. Both
renderings have the same length even if the template measures, cuts or capitalizes a text, so the places in one are the
places in the other.

A template that searches the text of messages needs renderings with fewer stand-ins; if they leave a doubt, it is an
error. Only a template that searches and also puts control strings together from parts of words could deceive them.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ContextLengthError, TemplateError
from ..system.child import Child, ChildError
from ..tokenizer import Tokenizer

SECONDS, SPACE = 2.0, 256 * 2**20  # CPU time (1,000 turns take about 0.05 s), and bytes
CHILD = Child(Path(__file__).with_name("jinja.py"), ("jinja2", "markupsafe"), SECONDS, SPACE)
CUT = "\x1f"  # the value of the variable `cut`

Pieces = list[tuple[str, bool]]  # parts of a text, and whether each is a control string


def choose_template(template: str | Mapping[str, str] | None, tools: Sequence[Any] | None = None) -> str | None:
    """The template tool_use if there are tools, otherwise default. Raises TemplateError if there is none."""
    if not isinstance(template, Mapping):
        return template
    name = "tool_use" if tools and "tool_use" in template else "default"
    if name not in template:
        raise TemplateError(f"none of the model's chat templates ({', '.join(template)}) is named {name}")
    return template[name]


def encode_template(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_chars: int | None = None,
    divided: bool = False,
    **options: Any,
) -> list[int]:
    """Ids of validated messages and tools. None of their text becomes a control token.

    max_chars  raise ContextLengthError if the text is longer
    divided    divide the text where the template writes the variable `cut`
    options    as for `render`

    Raises TemplateError.
    """
    cut = CUT if divided else ""
    rendered: Any = functools.partial(_rendered, template, messages, tokenizer, cut=cut, **options)
    split, characters, _ = _prepared(tuple(tokenizer.control))
    plain, hidden = rendered([None, f"[{characters}{CUT}]+"])
    if max_chars is not None and len(plain) > max_chars:
        raise ContextLengthError(
            f"the conversation has {len(plain):,} characters, but the context holds at most {max_chars:,}; shorten it"
        )
    pieces = _divided(plain, split(hidden), cut)
    if pieces is None:
        found = sorted(set(_controls(split(plain))))
        if not found:
            return tokenizer.encode_pieces([(plain, False)])
        words = "|".join(word for control in found for word in re.findall(r"\w+", control))
        ends = re.escape("".join(control[0] + control[-1] for control in found))
        # Two patterns. The end characters and words of control strings, so that a search for "/no_think" still finds
        # it; and complete control strings, since a template may search for "</think>"
        patterns = [rf"[{ends}]|\b(?:{words})\b", "|".join(map(re.escape, found))]
        by_parts, complete = map(split, rendered(patterns))
        pieces = _divided(plain, by_parts)
        if pieces is None and _controls(by_parts) == _controls(complete):
            pieces = _divided(plain, complete)
        if pieces is None:
            raise TemplateError(
                "the model's chat template searches messages for control tokens, or puts them together, so they can't"
                f" be distinguished from text: {', '.join(found)}; remove them from the messages"
            )
    return tokenizer.encode_pieces(pieces)


@functools.lru_cache
def _prepared(controls: tuple[str, ...]) -> tuple[Callable[[str], Pieces], str, str]:
    """Made once for the control strings of a vocabulary: `Tokenizer.split_control`, their characters, a stand-in."""
    longest_first = sorted(filter(None, controls), key=len, reverse=True)
    pattern, characters = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})"), {*"".join(controls)}
    # An ASCII character if possible, since JSON may escape others; all are printable, since repr() escapes others
    stand_in = next(c for c in map(chr, [*b"~`^", *range(0x20000, 0x2A6D6)]) if c not in characters)

    def split(text: str) -> Pieces:
        return [(part, i % 2 == 1) for i, part in enumerate(pattern.split(text)) if part]

    return split, re.escape("".join(characters)), stand_in


def _controls(pieces: Pieces) -> list[str]:
    return [piece for piece, is_control in pieces if is_control]


def _divided(text: str, pieces: Pieces, cut: str = "") -> Pieces | None:
    """A text split at the borders and cuts of other pieces; None if its control strings there differ."""
    divided, at = [], 0
    for piece, is_control in pieces:
        for part in re.split(f"({cut})", piece) if cut else [piece]:
            own = text[at : at + len(part)]
            at += len(part)
            if is_control and own != part:
                return None
            if part != cut:
                divided.append((own, is_control))
    return divided if at == len(text) else None


def render(template: str, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, **options: Any) -> str:
    """The text of messages rendered by a template.

    tools                  JSON schemas of functions, or None
    add_generation_prompt  end with the start of the assistant's turn, which is the default
    now                    the time for strftime_now, used by templates that print the date

    As in Hugging Face's library, templates have raise_exception, strftime_now, loop controls, {% generation %} and a
    tojson without HTML escapes; documents is none. A template that exceeds SECONDS or SPACE is stopped. Raises
    TemplateError.
    """
    return _rendered(template, messages, tokenizer, [None], **options)[0]


def _rendered(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    hidden: Sequence[str | None],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
    cut: str = "",
) -> list[str]:
    """Texts with stand-ins for what each regular expression finds (see jinja.answer)."""
    name = {id: text for text, id in tokenizer.control.items()}
    values = {
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": name.get(tokenizer.bos_id, ""),  # type: ignore[arg-type]
        "eos_token": name.get(tokenizer.eos_id, ""),  # type: ignore[arg-type]
        "cut": cut,
    }
    request = {
        "template": template,
        "values": values,
        "now": (now or datetime.datetime.now()).isoformat(),
        "hidden": hidden,
        "stand_in": _prepared(tuple(tokenizer.control))[2],
    }
    try:
        reply = CHILD.ask(request)
        error = reply.get("error", "")[:1000]
    except ChildError as stopped:
        error = str(stopped)
    if error:
        raise TemplateError(f"the model's chat template failed: {error}; llm.generate (--raw) works without it")
    texts: list[str] = reply["texts"]
    return texts
