"""The child process that renders chat templates: `python sandbox.py`, started and killed by template.py.

A template is a program from an unknown author. Jinja's immutable sandbox keeps it from Python's objects; the operating
system limits what this process can use. Therefore no list of expensive filters, methods or operators is needed:

    time    a timer of CPU time, whose signal ends the process even inside C code
    memory  a limit on the address space, which Python reports as MemoryError (Linux only)
    files   a limit on open files and their size, so a template that escapes from Jinja's sandbox can't access any

Requests and answers are JSON, each preceded by its length. This file imports nothing of the package, so that the
process starts in less than 0.1 s.

Only the template's own text may become control tokens. All strings of the messages and tools, including the keys of
mappings, stay text even if they spell "<|im_end|>". The conversation is rendered twice:

1. Marked: a mark (a code point that no message contains) is inserted into each string that spells a control string, or
   that begins or ends with a part of one. The rendered text is split at its control strings, then the marks are
   removed. There are as few marks as possible, because templates inspect the text ("if '</think>' in content").
2. Substituted: every character that occurs in any control string is replaced by a stand-in. A template that rearranges
   text can defeat marks but not stand-ins, so this rendering shows which control tokens are the template's own.

If the control tokens of the two renderings differ, the second rendering is used. It is safe, but the template could not
inspect the original text. If the control tokens are equal and the texts differ, the unchanged strings are rendered: if
the result equals the second rendering, the template measured or cut a marked text, and the second rendering is used.
In all other cases the first rendering is used.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import re
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import jinja2

Change = Callable[[str], str]
Piece = tuple[str, bool]  # a part of the rendered text, and whether it is a control string

HEADER = struct.Struct(">QdQ")  # before a request: its length, seconds of CPU time, bytes of memory
LENGTH = struct.Struct(">Q")  # before an answer

# Noncharacters of Unicode: reserved for internal use, so exchanged text does not contain them.
NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

STAND_INS = range(0xF0000, 0xFFFFE)  # a private use plane


# --------------------------------------------------------------------------------------------------------- the process
def main() -> None:
    """Answer requests from standard input until it ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    if hasattr(signal, "SIGPROF"):  # the parent may have ignored or blocked the timer's signal
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    answer({"template": IMPORTS, "now": "2026-01-01"})
    base = forbid_files()
    while header := requests.read(HEADER.size):
        length, seconds, memory = HEADER.unpack(header)
        limit(seconds, base + memory if base else 0)
        try:
            reply = encoded(answer(json.loads(requests.read(length))))
        except MemoryError:
            reply = encoded({"memory": True})
        limit(0, 0)
        answers.write(LENGTH.pack(len(reply)) + reply)
        answers.flush()


# A template that makes Jinja import its modules, which it can't do after files are forbidden.
IMPORTS = "{{ '<b>' | striptags | wordwrap | pprint }}{{ lipsum() }}{{ raise_exception('x') }}"


def encoded(value: Any) -> bytes:
    """A value as JSON in UTF-8. The text of a template may contain a lone surrogate."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def forbid_files() -> int:
    """Forbid this process to open or write files. Returns the size of its address space in bytes, 0 if unknown.

    Does nothing on Windows, which has no such limits.
    """
    try:
        import resource
    except ImportError:  # Windows
        return 0
    base = 0
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        base = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    return base


def limit(seconds: float, memory: int) -> None:
    """Set the timer of CPU time, and the limit on the address space in bytes; 0 for none."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
    if memory:
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (memory if most < 0 else min(memory, most), most))


# --------------------------------------------------------------------------------------------------------- the request
def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Render a template. Returns a dict with one of these keys:

    pieces  [(text, whether it is a control string), ..]
    error   the message of the template's exception
    usage   a message about values that can't be rendered safely

    The keys of the request:

    template  Jinja source
    now       the time for strftime_now, in ISO format
    values    the variables of the template: messages, tools and others
    controls  the control strings; None: the result is one piece, and the values may contain control strings
    """
    try:
        template = compiled(request["template"])
        template.globals["strftime_now"] = datetime.datetime.fromisoformat(request["now"]).strftime
        values, controls = request.get("values") or {}, request.get("controls")
        if controls is None:
            return {"pieces": [(template.render(values), False)]}
        return {"pieces": list(pieces(template, values, arranged(tuple(controls))))}
    except MemoryError:
        raise
    except Unmarkable as error:
        return {"usage": str(error)}
    except OSError:
        return {"error": "it tried to open a file, perhaps that of a rare text encoding; templates may not open files"}
    except Exception as error:  # a template can raise anything
        return {"error": " ".join(str(error).split()) or type(error).__name__}


@functools.lru_cache(maxsize=1)
def compiled(source: str) -> jinja2.Template:
    """A template in a sandboxed environment with the names that Hugging Face's library defines."""
    import jinja2
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
            if attribute.startswith("_"):  # Jinja would write an empty string; no ordinary template uses such a name
                raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe")
            return super().unsafe_undefined(obj, attribute)

    class Generation(Extension):
        """The tag {% generation %}, which marks the assistant's text for training. It renders its content unchanged."""

        tags = {"generation"}  # noqa: RUF012  (Jinja's own way to declare it)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = to_json
    return environment.from_string(source)


def pieces(template: jinja2.Template, values: dict[str, Any], controls: Controls) -> Iterator[Piece]:
    """The text of a conversation, split at the control strings that the template itself writes."""
    used = {character for text in strings([values["messages"], values["tools"]]) for character in text}
    mark = next((c for c in NONCHARACTERS if c not in used), None)
    if mark is None:
        raise Unmarkable(
            "the messages contain every noncharacter from U+FDD0 to U+FDEF, but one of them must be free, to mark the"
            " text of the messages; remove at least one of them"
        )
    stand_in = stand_ins(controls, used)

    def rendered(change: Change) -> list[str]:
        messages = [
            {key: value if key == "role" else changed(value, change) for key, value in message.items()}
            for message in values["messages"]
        ]
        tools = changed(values["tools"], change)
        return controls.split(template.render({**values, "messages": messages, "tools": tools}))

    marked = rendered(lambda text: controls.mark(text, mark))
    substituted = rendered(lambda text: text.translate(stand_in))
    own = controls.texts
    agree = [piece for piece in marked if piece in own] == [piece for piece in substituted if piece in own]
    original = {ord(other): chr(character) for character, other in stand_in.items()}
    if agree and "".join(marked).replace(mark, "") != "".join(substituted).translate(original):
        # The template may have measured or cut a marked text. Stand-ins keep the length of a text, so such a template
        # writes the same text with stand-ins as with the unchanged values.
        agree = controls.split(template.render(values)) != [piece.translate(original) for piece in substituted]
    back = {ord(mark): None} if agree else original
    for piece in marked if agree else substituted:
        yield (piece, True) if piece in own else (piece.translate(back), False)


class Unmarkable(Exception):
    """No code point is free to mark the text of the messages."""


class Text(str):
    """A user's string in a template: written in its changed form, but compared and hashed in its original form.

    A template can therefore look up tool.function.name and compare a type with "string", although characters are
    replaced. A comparison writes nothing, so it can't produce a control string.
    """

    _original: str
    _change: Change

    def __new__(cls, text: str, change: Change = str) -> Text:
        self = super().__new__(cls, change(text))
        self._original, self._change = text, change
        return self

    def __eq__(self, other: object) -> bool:
        return self._original == (other._original if isinstance(other, Text) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._original)

    def __repr__(self) -> str:
        return self._change(repr(self._original))  # {{ arguments }} writes the repr of strings in a mapping


def changed(value: Any, change: Change) -> Any:
    """A value with all its strings changed, including the keys of mappings."""
    if isinstance(value, str):
        return Text(value, change)
    if isinstance(value, dict):
        return {Text(name, change): changed(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [changed(item, change) for item in value]
    return value


def strings(value: Any) -> Iterator[str]:
    """All strings of a value, including the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """A value as JSON, without the HTML escapes of Jinja's own filter."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        # Marks and stand-ins are not escaped: an escaped one could not be removed later.
        unescaped = f"\x00-\x7f{NONCHARACTERS[0]}-{NONCHARACTERS[-1]}{chr(STAND_INS[0])}-{chr(STAND_INS[-1])}"
        text = re.sub(f"[^{unescaped}]", lambda character: json.dumps(character[0])[1:-1], text)
    return text


class Controls:
    """The control strings, indexed so that they are found in a text in linear time. There may be thousands."""

    def __init__(self, texts: Sequence[str]):
        self.texts = frozenset(texts)
        lengths: dict[str, set[int]] = {}  # by the first two characters
        for text in texts:
            lengths.setdefault(text[:2], set()).add(len(text))
        self.lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        first = "".join(sorted({re.escape(text[0]) for text in texts}))
        self.first = re.compile(f"[{first}]" if texts else "(?!)")
        self.starts = frozenset(text[:n] for text in texts for n in range(1, len(text)))  # proper prefixes
        self.ends = frozenset(text[n:] for text in texts for n in range(1, len(text)))  # proper suffixes
        self.parts = sorted({len(part) for part in self.starts})

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Start and end of the longest control string at each position of a text. They may overlap."""
        for candidate in self.first.finditer(text):
            at = candidate.start()
            for length in (*self.lengths.get(text[at : at + 2], ()), *self.lengths.get(text[at], ())):
                if text[at : at + length] in self.texts:
                    yield at, at + length
                    break

    def split(self, text: str) -> list[str]:
        """A text split at its control strings, which become pieces of their own; the first and longest match wins."""
        cuts = [0]
        for start, end in self.find(text):
            if start >= cuts[-1]:
                cuts += [start, end]
        return [text[start:end] for start, end in itertools.pairwise([*cuts, len(text)]) if start < end]

    def mark(self, text: str, mark: str) -> str:
        """A text with a mark in each control string, and at its ends if they could be part of one."""
        cuts = [0, *(start + 1 for start, _ in self.find(text)), len(text)]
        text = mark.join(text[start:end] for start, end in itertools.pairwise(cuts))
        body = text.strip()  # a template may strip the text
        end, start = len(text.rstrip()), len(text) - len(text.lstrip())
        if any(body[-n:] in self.starts for n in self.parts):
            text = text[:end] + mark + text[end:]
        if any(body[:n] in self.ends for n in self.parts):
            text = text[:start] + mark + text[start:]
        return text


@functools.lru_cache(maxsize=1)
def arranged(texts: tuple[str, ...]) -> Controls:
    """The index of control strings. It is cached, since most requests have the same control strings as the last."""
    return Controls(texts)


def stand_ins(controls: Controls, used: set[str]) -> dict[int, str]:
    """Character of a control string -> a private use character that no message uses."""
    free = (character for character in map(chr, STAND_INS) if character not in used)
    return {ord(character): next(free) for character in sorted(set("".join(controls.texts)))}


if __name__ == "__main__":
    sys.path.extend(sys.argv[1:])
    main()
