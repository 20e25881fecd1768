"""Encode a conversation by the checkpoint's own Jinja template, which a child process renders (jinja.py).

The text is exactly what the template gives. Only what the template itself writes may become a control token; text of
messages and tools stays text, even if it spells "<|im_end|>". So the conversation is rendered again, with stand-ins for
all characters of control strings in messages and tools: the control strings that remain are the template's own. Each
character has a stand-in of its own. This proves that both renderings are the same text, even if the template measures,
cuts or capitalizes it.

One exception: in messages of the assistant, the marks of calls and thoughts become their tokens, as the model wrote
them. A third rendering, which keeps these marks, shows their places. All other control strings come from the second
rendering, so no message can end a turn.

A template that searches the text of messages needs renderings with fewer stand-ins; if they leave a doubt, it is an
error. Only a template that searches and also puts control strings together from parts of words could deceive them.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ContextLengthError, TemplateError, UsageError
from ..system.child import Child, ChildError
from ..tokenizer import Tokenizer
from ..tokenizer.base import split_at
from .tool_calls import MARKS

SECONDS, SPACE = 2.0, 256 * 2**20  # CPU time (1,000 turns take about 0.05 s), and bytes
CHILD = Child(Path(__file__).with_name("jinja.py"), ("jinja2", "markupsafe"), SECONDS, SPACE)
CUT = "\x1f"  # the value of the variable `cut`
NOTHING = "(?!)"  # a regular expression that finds nothing
END = "\ue000 "  # stands after the text of a last message that the model continues

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
    continues: bool = False,
    **options: Any,
) -> list[int]:
    """Ids of validated messages and tools. None of their text becomes a control token, except the assistant's marks.

    The text is divided where the template writes the variable `cut`, and the parts are encoded separately.

    max_chars  raise ContextLengthError if the text is longer
    continues  end with the text of the last message, as continue_final_message of transformers
    options    as for `render`

    Raises TemplateError.
    """
    answer = messages[-1]["content"]
    if continues:
        messages = [*messages[:-1], {**messages[-1], "content": answer + END}]
        options["add_generation_prompt"] = False
    own = () if re.search(r"\{\{-? *cut\b", template) else MARKS  # Meta's code encodes marks as text
    marks = [mark for mark in own if mark in tokenizer.control]
    kept = [mark for mark in own if mark in marks or mark in template]  # templates also search for marks that are text
    find = "|".join(map(re.escape, kept)) or NOTHING
    stand_ins: dict[str, str] = {}

    def rendered(*hidden: tuple[str, str] | None) -> list[str]:
        texts = _rendered(template, messages, tokenizer, hidden, cut=CUT, stand_ins=stand_ins, **options)
        return [_begun(text, answer) for text in texts] if continues else texts

    (plain,) = rendered(None)
    if max_chars is not None and len(plain) > max_chars:
        raise ContextLengthError(
            f"the conversation has {len(plain):,} characters, but the context holds at most {max_chars:,}; shorten it"
        )
    stand_ins |= _stand_ins(tokenizer, plain + str([messages, options.get("tools"), options.get("variables")]))
    every = f"[{re.escape(''.join(stand_ins))}]"
    texts = rendered((every, NOTHING), *([(every, find)] if re.search(find, plain) else []))
    divide = functools.partial(_divided, plain, stand_ins)
    pieces = divide(_with_marks(tokenizer.split_control(texts[0]), texts[-1], marks), CUT)
    if pieces is None:
        pieces = _searched(tokenizer, plain, lambda *patterns: rendered(*((one, find) for one in patterns)), divide)
    return tokenizer.encode_pieces(pieces)


def _stand_ins(tokenizer: Tokenizer, text: str) -> dict[str, str]:
    """A stand-in for each character of control strings in a text. The text contains no stand-in, raw or as JSON.

    ASCII if possible, since JSON may escape others; all are printable, since repr() escapes others.
    """
    characters = {*"".join(tokenizer.special), CUT}
    unused = (one for one in map(chr, (*b"~`^@#$*+=!?;", *range(0x2800, 0x2A6D6))) if one.isprintable())
    free = (one for one in unused if one not in characters and one not in text and json.dumps(one)[1:-1] not in text)
    return {one: next(free, "\0") for one in sorted(characters) if one in text or not one.isprintable()}


def _begun(text: str, answer: str) -> str:
    """A text up to END, where an answer ends; without the answer's last white space if the template strips messages."""
    before, mark, after = text.rpartition(END[0])
    if not mark:
        raise TemplateError("the model's chat template does not write the last message, so no answer can continue it")
    stripped = 0 if after[:1] == END[1] or not answer.strip() else len(answer) - len(answer.rstrip())
    return before[: len(before) - stripped]


def _with_marks(pieces: Pieces, kept: str, marks: Sequence[str]) -> Pieces:
    """Divide the texts of pieces at the marks in `kept`, a text of the same length in which marks have no stand-ins."""
    divided, at = [], 0
    for piece, is_control in pieces:
        divided += [(piece, True)] if is_control else split_at(kept[at : at + len(piece)], marks)
        at += len(piece)
    return divided


def _searched(
    tokenizer: Tokenizer, plain: str, rendered: Callable[..., list[str]], divide: Callable[..., Pieces | None]
) -> Pieces:
    """The parts of a text whose template searches messages for control strings. Raises TemplateError."""
    found = sorted(set(_controls(tokenizer.split_control(plain))))
    if not found:
        return [(plain, False)]
    words = "|".join(word for control in found for word in re.findall(r"\w+", control))
    ends = re.escape("".join(control[0] + control[-1] for control in found))
    # Two patterns: the first and last characters and the words of control strings, so that a search for "/no_think"
    # still finds it; and complete control strings, since a template may search for "</think>".
    texts = rendered(rf"[{ends}]|\b(?:{words})\b", "|".join(map(re.escape, found)))
    by_parts, complete = map(tokenizer.split_control, texts)
    pieces = divide(by_parts)
    if pieces is None and _controls(by_parts) == _controls(complete):
        pieces = divide(complete)
    if pieces is None:
        raise TemplateError(
            "the model's chat template searches messages for control tokens, or puts them together, so they can't be"
            f" distinguished from text: {', '.join(found)}; remove them from the messages"
        )
    return pieces


def _controls(pieces: Pieces) -> list[str]:
    return [piece for piece, is_control in pieces if is_control]


def _divided(text: str, stand_ins: Mapping[str, str], pieces: Pieces, cut: str = "") -> Pieces | None:
    """Split a text where pieces with stand-ins end or are cut. None if the pieces belong to another text.

    The template may change the case of letters, and write a stand-in as an escape of JSON.
    """
    escaped = {json.dumps(one)[1:-1]: json.dumps(character)[1:-1] for character, one in stand_ins.items()}
    meant = str.maketrans({one: character for character, one in stand_ins.items()})
    find, divided, at = re.compile("|".join(map(re.escape, escaped))), [], 0
    for piece, is_control in pieces:
        for part in re.split(f"({cut})", piece) if cut else [piece]:
            shown = find.sub(lambda found: escaped[found[0]], part.translate(meant))
            own = text[at : at + len(shown)]
            at += len(shown)
            if own != shown and (is_control or own.casefold() != shown.casefold()):
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
    hidden: Sequence[tuple[str, str] | None],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
    variables: Mapping[str, Any] | None = None,
    cut: str = "",
    stand_ins: Mapping[str, str] | None = None,
) -> list[str]:
    """Texts with stand-ins for what regular expressions find (see jinja.answer)."""
    bos, eos = ("" if id is None else tokenizer.name(id) or "" for id in (tokenizer.bos_id, tokenizer.eos_id))
    values: Any = {"messages": messages, "tools": tools, "documents": None, "bos_token": bos, "eos_token": eos}
    values |= {"add_generation_prompt": add_generation_prompt, "cut": cut, "strftime_now": None}
    if wrong := [key for key in variables or () if not str(key).isidentifier() or key in values]:
        raise UsageError(
            f"chat_template_kwargs (--template-option): {wrong[0]!r:.80} is no name, or the template sets it itself"
        )
    time = (now or datetime.datetime.now()).isoformat()
    request = {"template": template, "values": values, "variables": dict(variables or {}), "now": time}
    try:
        reply = CHILD.ask({**request, "hidden": hidden, "stand_ins": stand_ins or {}})
    except ChildError as stopped:
        reply = {"error": str(stopped)}
    except (TypeError, ValueError, RecursionError) as wrong:  # messages and tools were checked
        raise UsageError(f"chat_template_kwargs (--template-option) must be JSON-serializable: {wrong}") from None
    if error := reply.get("error", "")[:1000]:
        raise TemplateError(f"the model's chat template failed: {error}; llm.generate (--raw) works without it")
    texts: list[str] = reply["texts"]
    return texts
