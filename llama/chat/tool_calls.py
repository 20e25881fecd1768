"""The function calls in an assistant's text.

A call is text in the format that the model was trained on. FORMATS has them:

    Llama 3.1, 3.2   {"name": "f", "parameters": {...}}   also "arguments", and several, separated by ";" or white space
    Llama 3.2, 4     [f(a=1, b="x"), g()]
    Llama 3.1        brave_search.call(query="...")       the built-in tools
    Mistral          [{"name": "f", "arguments": {...}}]  also after [TOOL_CALLS]; also [TOOL_CALLS]f{...}
    Llama 3.1        <function=f>{...}</function>
    Hermes, Qwen     <tool_call>{"name": "f", "arguments": {...}}</tool_call>     SmolLM2 and 3 also with a list

The first four have no mark. They are recognized only at the start of an answer and after another call; after
<|python_tag|>, anywhere. Only declared functions are recognized. Everything else stays text.

Control tokens have no text (see `Decoder`), so <|python_tag|>, [TOOL_CALLS] and <|eom_id|> are not in an answer's text.
At the start of an answer, calls are recognized without them. For calls after other text, insert them (`call_marks`).

Sources: meta-llama/llama-models prompt_format.md of Llama 3.1, 3.2 and 4; mistral-common, its instruct tokenizers;
NousResearch/Hermes-Function-Calling; HuggingFaceTB/SmolLM2 and SmolLM3 chat templates; vLLM's documentation on tools.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import UsageError
from ..tokenizer import Tokenizer
from .formats import LLAMA3_TOOLS
from .messages import ToolCall, check_messages, check_tools

LONGEST = 2**18  # characters of one group of calls; longer ones are text

PYTHON_TAG, TOOL_CALLS, ARGUMENTS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"
FUNCTION, END_FUNCTION, OPEN, CLOSE = "<function=", "</function>", "<tool_call>", "</tool_call>"
MARKS = (PYTHON_TAG, TOOL_CALLS, ARGUMENTS, OPEN, CLOSE)

Event = str | ToolCall  # a part of the text, or a call
Reader = Generator[None, str, None]  # gets one character at a time; returns at the last one of a group of calls


class NotACall(Exception):
    """The text is not a call."""


# ----------------------------------------------------------------------------------- where a group of calls ends
# These functions get characters until a group of calls is complete. They check enough to reject most other text early;
# the functions that parse a complete group check the rest.
def _literal(text: str) -> Reader:
    for expected in text:
        if (yield) != expected:
            raise NotACall


def _skip_space() -> Generator[None, str, str]:
    """The first character that is not white space."""
    while (character := (yield)).isspace():
        pass
    return character


def _name(first: str, end: str, names: Collection[str]) -> Generator[None, str, str]:
    """A declared name that begins with `first`. Returns the character after it, which is one of `end`."""
    name, character = "", first
    while character not in end:
        name += character
        if not any(known.startswith(name) for known in names):  # at once, since a mark may follow
            raise NotACall
        character = yield
    if name not in names:
        raise NotACall
    return character


def _string(quote: str) -> Reader:
    """The rest of a string."""
    while (character := (yield)) != quote:
        if character == "\\":
            yield


CLOSING = {"{": "}", "[": "]", "(": ")"}


def _json(opened: str) -> Reader:
    """The rest of a JSON value that begins with the brackets `opened`."""
    stack, last = [CLOSING[bracket] for bracket in opened], opened[-1]  # last: the last mark, or "v" after a value
    while stack:
        character = yield
        if character in " \t\r\n":
            continue
        if character in "}]" and character == stack.pop():
            last = "v"
        elif character in ",:":
            last = character
        elif character == '"' and last in "{[,:":
            yield from _string(character)
            last = "v"
        elif character in "{[" and last in "[,:":
            stack.append(CLOSING[character])
            last = character
        elif (character.isalnum() or character in "+-.") and last in "[,:v":  # a part of a number, or of true
            last = "v"
        else:
            raise NotACall


def _python(opened: str) -> Reader:
    """The rest of a Python expression that begins with the brackets `opened`."""
    stack = [CLOSING[bracket] for bracket in opened]
    while stack:
        character = yield
        if character in CLOSING:
            stack.append(CLOSING[character])
        elif character in "\"'":
            yield from _string(character)
        elif character in ")]}" and character != stack.pop():
            raise NotACall


def _bare(names: Collection[str]) -> Reader:
    """Calls without a mark; one in JSON may follow a semicolon."""
    first = yield from _skip_space()
    if first == "[":
        second = yield from _skip_space()
        if second == "{":
            yield from _json("[{")
        else:
            yield from _name(second, "(", names)
            yield from _python("[(")
        return
    if first == ";":
        first = yield from _skip_space()
    elif first != "{":
        yield from _name(first, "(", [f"{name}.call" for name in LLAMA3_TOOLS if name in names])
        yield from _python("(")
        return
    if first != "{":
        raise NotACall
    yield from _json("{")


def _mistral(names: Collection[str]) -> Reader:
    """A list of objects, or a name and its arguments."""
    first = yield from _skip_space()
    if first == "[":
        yield from _json("[")
        return
    if (yield from _name(first, "{[", names)) == "[":
        yield from _literal(ARGUMENTS[1:] + "{")
    yield from _json("{")


def _function(names: Collection[str]) -> Reader:
    """A name and its arguments."""
    yield from _name((yield), ">", names)
    yield from _bracket("{")
    yield from _closing(END_FUNCTION)


def _hermes(names: Collection[str]) -> Reader:
    """An object or a list of objects."""
    yield from _bracket("{[")
    yield from _closing(CLOSE)


def _bracket(allowed: str) -> Reader:
    """A JSON value that begins with one of the allowed brackets."""
    first = yield from _skip_space()
    if first not in allowed:
        raise NotACall
    yield from _json(first)


def _closing(mark: str) -> Reader:
    if (yield from _skip_space()) != mark[0]:
        raise NotACall
    yield from _literal(mark[1:])


# -------------------------------------------------------------------------------------------- what the calls are
# These functions parse a complete group of calls. They raise one of ERRORS if it is not one.
ERRORS = (ValueError, SyntaxError, RecursionError, MemoryError)  # Python's parser runs out of its own stack


def _calls(text: str) -> list[ToolCall]:
    """Calls without a mark."""
    text = text.removeprefix(";").lstrip()
    return _json_calls(text) if re.match(r"\{|\[\s*\{", text) else _python_calls(text)


def _json_calls(text: str) -> list[ToolCall]:
    """A JSON object {"name": ..., "arguments": {...}}, or a list of these."""
    value = _value(text)
    return [_object(one) for one in (value if isinstance(value, list) else [value])]


def _named(text: str) -> list[ToolCall]:
    """f{...}, f>{...} or f[ARGS]{...}"""
    name, _, rest = text.partition("{")
    return [_call(name.strip().removesuffix(ARGUMENTS).removesuffix(">"), _value("{" + rest))]


def _value(text: str) -> Any:
    """A JSON value. Its strings may contain line breaks, as models write them."""
    return json.loads(text, strict=False)


def _object(value: Any) -> ToolCall:
    """The call that an object describes."""
    if not isinstance(value, dict) or ("arguments" in value) == ("parameters" in value):
        raise ValueError
    return _checked({"arguments" if key == "parameters" else key: item for key, item in value.items()})


def _call(name: str, arguments: Any) -> ToolCall:
    return _checked({"name": name, "arguments": arguments})


def _checked(call: dict[str, Any]) -> ToolCall:
    """A call that is valid in a message. UsageError is a ValueError."""
    (message,) = check_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
    (checked,) = message["tool_calls"]
    json.dumps(checked, ensure_ascii=False).encode()  # without lone surrogates
    return checked


def _python_calls(text: str) -> list[ToolCall]:
    """A call in Python's syntax, or a list of calls. The arguments are literals, given by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about an unknown escape in a string
        tree = ast.parse(text, mode="eval").body
    found = []
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        arguments = {str(keyword.arg): _literal_value(keyword.value) for keyword in call.keywords}
        if len(arguments) != len(call.keywords) or "None" in arguments:  # a name twice, or **
            raise ValueError
        found.append(_call(ast.unparse(call.func).removesuffix(".call"), arguments))
    return found


CONSTANTS = {"true": True, "false": False, "null": None}  # some models write them as in JSON


def _literal_value(node: ast.expr) -> Any:
    """The value of a literal that JSON can express."""
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        items = [(key, _literal_value(value)) for key, value in zip(node.keys, node.values, strict=True)]
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key, _ in items):
            raise ValueError
        return {ast.literal_eval(key): value for key, value in items if key is not None}
    return ast.literal_eval(node)


def _mistral_calls(text: str) -> list[ToolCall]:
    """A list of objects, or a name and its arguments."""
    return _json_calls(text) if text.startswith("[") else _named(text)


class Format(NamedTuple):
    """A format of calls.

    mark  the beginning of a group of calls. A format without a mark is recognized only if nothing but calls precedes it
    find  given the declared names, returns a reader of the characters after the mark, up to the end of the group
    read  parses the text after the mark; the closing mark may be missing at the end of an answer
    """

    mark: str
    find: Callable[[Collection[str]], Reader]
    read: Callable[[str], list[ToolCall]]

    def reader(self, names: Collection[str]) -> Reader:
        """Gets the characters of a group of calls."""
        yield from _literal(self.mark)
        yield from self.find(names)


FORMATS: dict[str, Format] = {
    "bare": Format("", _bare, _calls),
    "python_tag": Format(PYTHON_TAG, _bare, _calls),
    "mistral": Format(TOOL_CALLS, _mistral, _mistral_calls),
    "function": Format(FUNCTION, _function, lambda text: _named(text.removesuffix(END_FUNCTION))),
    "hermes": Format(OPEN, _hermes, lambda text: _json_calls(text.removesuffix(CLOSE))),
}
SPACE = re.compile(r"\s*")
BEFORE_MARK = re.compile(f"[^{re.escape(''.join(format.mark[:1] for format in FORMATS.values()))}]*")


# -------------------------------------------------------------------------------------------------------- the text
class ToolCallStream:
    """Splits an assistant's answer into text and calls, one piece at a time.

    `feed` and `end` return events: a string is text, anything else is a call. Text that may be the beginning of a call
    is held back. The events do not depend on how the answer is divided into pieces. Each character is processed once.

    The strings, joined, are the answer without the calls and without the white space around them. A call that is
    incomplete at the end, or invalid, is text.

    tools  the functions that may be called, as in `encode_chat`
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None):
        self.names = frozenset(_tool_name(tool) for tool in check_tools(tools) or ())
        self._alive: list[tuple[Format, Reader]] = []  # formats that the pending text may have
        self._pending: list[str] = []  # pieces of a possible call
        self._length = 0  # number of characters in _pending
        self._space: list[str] = []  # white space held back, since a call may follow
        self._only_calls = True  # there is no text yet
        self._after_call = False  # there is no text after the last call
        self._events: list[Event] = []

    @property
    def pending(self) -> str:
        """The text that may be the beginning of a call."""
        return "".join(self._pending)

    def feed(self, text: str) -> list[Event]:
        """Add text; return the text and the calls that are certain."""
        at = 0
        while at < len(text):
            at = self._continue(text, at) if self._alive else self._search(text, at)
        return self._collected()

    def end(self) -> list[Event]:
        """The events at the end of the answer: the pending text is a call if only its closing mark is missing."""
        self._finish(next((calls for format, _ in self._alive if (calls := self._read(format))), None))
        if not self._after_call and any(self._space):
            self._events.append("".join(self._space))
        self._space = []
        return self._collected()

    def _search(self, text: str, at: int) -> int:
        """Pass on text up to the first possible beginning of a call, and process that. Returns the index after it."""
        found = (SPACE if self._only_calls else BEFORE_MARK).match(text, at)
        start = found.end() if found else at
        self._text(text[at:start])
        if start == len(text):
            return start
        formats = [f for f in FORMATS.values() if (f.mark.startswith(text[start]) if f.mark else self._only_calls)]
        self._alive = [(format, format.reader(self.names)) for format in formats]
        for _, reader in self._alive:
            next(reader)
        after = self._continue(text, start)
        if after == start:  # no call begins here
            self._text(text[start])
        return max(after, start + 1)

    def _continue(self, text: str, start: int) -> int:
        """Add characters to the pending text until it is a call, or can't become one. Returns the next index."""
        for at in range(start, len(text)):
            alive = []
            for format, reader in self._alive if self._length + at - start < LONGEST else ():
                try:
                    reader.send(text[at])
                    alive.append((format, reader))
                except NotACall:
                    continue
                except StopIteration:
                    self._keep(text[start : at + 1])
                    self._finish(self._read(format))
                    return at + 1
            if not alive:
                self._keep(text[start:at])
                self._finish(None)
                return at
            self._alive = alive
        self._keep(text[start:])
        return len(text)

    def _keep(self, text: str) -> None:
        self._pending.append(text)
        self._length += len(text)

    def _read(self, format: Format) -> list[ToolCall] | None:
        """The calls in the pending text, in one format; None if it has none, or calls an undeclared function."""
        try:
            calls = format.read(self.pending.removeprefix(format.mark).strip())
        except ERRORS:
            return None
        return calls if calls and all(call["function"]["name"] in self.names for call in calls) else None

    def _finish(self, calls: list[ToolCall] | None) -> None:
        """Turn the pending text into calls, or into text."""
        text, self._pending, self._length, self._alive = self.pending, [], 0, []
        if calls is None:
            self._text(text)
        else:
            self._events += calls
            self._space, self._after_call = [], True

    def _text(self, text: str) -> None:
        """Pass on text, except white space at its end."""
        if body := text.rstrip():
            self._events.append("".join([*self._space, body]))
            self._space, self._only_calls, self._after_call = [], False, False
        self._space.append(text[len(body) :])

    def _collected(self) -> list[Event]:
        """The events so far; neighbouring texts are joined."""
        events, self._events = self._events, []
        return [
            event
            for is_text, group in itertools.groupby(events, lambda event: isinstance(event, str))
            for event in (["".join(group)] if is_text else group)  # type: ignore[arg-type]
        ]


def parse_tool_calls(text: str, tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, list[ToolCall]]:
    """Split an assistant's answer into text and calls of declared functions. See `ToolCallStream`."""
    stream = ToolCallStream(tools)
    events = stream.feed(text) + stream.end()
    return (
        "".join(event for event in events if isinstance(event, str)),
        [event for event in events if not isinstance(event, str)],
    )


def call_marks(tokenizer: Tokenizer) -> dict[int, str]:
    """{id: string} of the control tokens that mark calls and have no text.

    To recognize calls after other text, insert the string for the id into the text for `ToolCallStream`.
    """
    found = {tokenizer.control[mark]: mark for mark in MARKS if mark in tokenizer.control}
    return {id: mark for id, mark in found.items() if not tokenizer.token_bytes(id)}


def _tool_name(tool: Mapping[str, Any]) -> str:
    """The name of a function, given {"type": "function", "function": {"name": ...}} or its inner part."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise UsageError(f"each tool must have a function with a name, got {tool!r:.80}")
    return name
