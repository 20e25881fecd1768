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

from ..errors import ContextLengthError, TemplateError, UsageError
from ..system.child import Child, ChildError
from ..tokenizer import Tokenizer

SECONDS, SPACE = 2.0, 256 * 2**20  # CPU time (1,000 turns take about 0.05 s), and bytes
CHILD = Child(Path(__file__).with_name("jinja.py"), ("jinja2", "markupsafe"), SECONDS, SPACE)
CUT = "\x1f"  # the value of the variable `cut`

Pieces = list[tuple[str, bool]]  # parts of a text, and whether each is a control string; see `Tokenizer.split_control`


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
    **options: Any,
) -> list[int]:
    """Ids of validated messages and tools. None of their text becomes a control token.

    The text is divided where the template writes the variable `cut`, and the parts are encoded separately.

    max_chars  raise ContextLengthError if the text is longer
    options    as for `render`

    Raises TemplateError.
    """
    rendered: Any = functools.partial(_rendered, template, messages, tokenizer, cut=CUT, **options)
    plain, hidden = rendered([None, f"[{re.escape(''.join({*''.join(tokenizer.control)}))}{CUT}]+"])
    if max_chars is not None and len(plain) > max_chars:
        raise ContextLengthError(
            f"the conversation has {len(plain):,} characters, but the context holds at most {max_chars:,}; shorten it"
        )
    pieces = _divided(plain, tokenizer.split_control(hidden), CUT)
    return tokenizer.encode_pieces(_searched(tokenizer, plain, rendered) if pieces is None else pieces)


def _searched(tokenizer: Tokenizer, plain: str, rendered: Callable[[list[str]], list[str]]) -> Pieces:
    """The parts of a text whose template searches messages for control strings. Raises TemplateError."""
    found = sorted(set(_controls(tokenizer.split_control(plain))))
    if not found:
        return [(plain, False)]
    words = "|".join(word for control in found for word in re.findall(r"\w+", control))
    ends = re.escape("".join(control[0] + control[-1] for control in found))
    # Two patterns: the first and last characters and the words of control strings, so that a search for "/no_think"
    # still finds it; and complete control strings, since a template may search for "</think>".
    texts = rendered([rf"[{ends}]|\b(?:{words})\b", "|".join(map(re.escape, found))])
    by_parts, complete = map(tokenizer.split_control, texts)
    pieces = _divided(plain, by_parts)
    if pieces is None and _controls(by_parts) == _controls(complete):
        pieces = _divided(plain, complete)
    if pieces is None:
        raise TemplateError(
            "the model's chat template searches messages for control tokens, or puts them together, so they can't be"
            f" distinguished from text: {', '.join(found)}; remove them from the messages"
        )
    return pieces


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
    variables              further variables of the template: {"enable_thinking": False}

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
    variables: Mapping[str, Any] | None = None,
    cut: str = "",
) -> list[str]:
    """Texts with stand-ins for what each regular expression finds (see jinja.answer)."""
    name = {id: text for text, id in tokenizer.control.items()}
    bos, eos = ("" if id is None else name.get(id, "") for id in (tokenizer.bos_id, tokenizer.eos_id))
    values: Any = {"messages": messages, "tools": tools, "documents": None, "bos_token": bos, "eos_token": eos}
    values |= {"add_generation_prompt": add_generation_prompt, "cut": cut, "strftime_now": None}
    if wrong := [key for key in variables or () if not str(key).isidentifier() or key in values]:
        raise UsageError(
            f"chat_template_kwargs (--template-option): {wrong[0]!r:.80} is no name, or the template sets it itself"
        )
    # An ASCII character if possible, since JSON may escape others; all are printable, since repr() escapes others
    characters = {*"".join(tokenizer.control)}
    stand_in = next(c for c in map(chr, [*b"~`^", *range(0x20000, 0x2A6D6)]) if c not in characters)
    time = (now or datetime.datetime.now()).isoformat()
    request = {"template": template, "values": values, "variables": dict(variables or {}), "now": time}
    try:
        reply = CHILD.ask({**request, "hidden": hidden, "stand_in": stand_in})
    except ChildError as stopped:
        reply = {"error": str(stopped)}
    if error := reply.get("error", "")[:1000]:
        raise TemplateError(f"the model's chat template failed: {error}; llm.generate (--raw) works without it")
    texts: list[str] = reply["texts"]
    return texts
