"""The function calls in an assistant's text.

A call is text in the format that the model was trained on (FORMS has a row for each mark that may precede it):

    Llama 3.1, 3.2   {"name": "f", "parameters": {...}}   also "arguments", and several, separated by ";" or white space
    Llama 3.2, 4     [f(a=1, b="x"), g()]
    Mistral          [{"name": "f", "arguments": {...}}]  also after [TOOL_CALLS]; also [TOOL_CALLS]f{...}; since 2025
                     [TOOL_CALLS]f[ARGS]{...} or [TOOL_CALLS]f[CALL_ID]id[ARGS]{...}
    Hermes, Qwen, Granite, SmolLM   <tool_call>{"name": "f", "arguments": {...}}</tool_call>   also with a list

Calls without a mark are recognized only at the start of an answer and after another call. Calls with a mark, such as
<|python_tag|>, are recognized anywhere. In a code block, a call must begin with the function's name, so that other code
is not delayed. Only declared functions are recognized. Everything else stays text.

Control tokens have no text (see `Decoder`), so <|python_tag|>, [TOOL_CALLS] and <|eom_id|> are not in an answer's text.
At the start of an answer, calls are recognized without them. For calls after other text, insert them (`call_marks`).

Sources: meta-llama/llama-models prompt_format.md of Llama 3.1, 3.2 and 4; mistral-common, its instruct tokenizers;
NousResearch/Hermes-Function-Calling; HuggingFaceTB/SmolLM2 and SmolLM3 chat templates; vLLM's documentation on tools.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import warnings
from bisect import bisect_left
from collections.abc import Collection, Generator, Mapping
from typing import Any

from ..errors import UsageError
from ..tokenizer import Tokenizer
from .functions import Tools
from .messages import ToolCall, check_messages, check_tools
from .thoughts import PAIRS

CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"
# In each row: the mark before a call, perhaps with the name, and the marks that are dropped after the call, in order
FORMS = """
<|python_tag|>
[TOOL_CALLS]
<tool_call> </tool_call>
<|tool_call|> <|/tool_call|>
functools
<tools> </tools>
```json ```
``` ```
<function=NAME> </function>
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME```json ```<｜tool▁call▁end｜> <｜tool▁calls▁end｜>
<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME```json ```<｜tool▁call▁end｜> <｜tool▁calls▁end｜>
"""  # <|tool_call|>: Granite, Phi-4-mini; functools: Phi-4-mini; <tools> and blocks: Qwen2.5-Coder; the last: DeepSeek
AFTER = {mark: after for mark, *after in map(str.split, FORMS.strip().splitlines())}
NAME_ENDS = (CALL_ID, ARGS, ">", "```json")  # an object with the arguments comes next
CALL_MARKS = re.findall(r"<[^<>=]+>|\[[A-Z_]+\]", FORMS + CALL_ID + ARGS)
MARKS = (*CALL_MARKS, *(mark for pair in PAIRS for mark in pair))  # of calls and thoughts, in a model's own text
BEGIN = re.compile(rf"({'|'.join(re.escape(mark.partition('NAME')[0]) for mark in AFTER)}|;)?\s*")
# The name in an object at the end of a text: the arguments come next, or begin
HEAD = re.compile(r'"name"\s*:\s*"([^"\\]+)"\s*,(?:\s*"(?:arguments|parameters)"\s*:\s*\{)?$')
LONGEST_HEAD = 256  # characters
CLOSING = {"{": "}", "[": "]", "(": ")"}

# MemoryError: the stack of Python's parser is full. TypeError: a list as a key of a dictionary.
ERRORS = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


Event = str | ToolCall  # a part of the text, or a call; or a part of a call: its name and id, or text of its arguments


def _value(begun: str) -> Generator[int, str, bool]:
    """Check a value whose first characters are `begun`: receive the others, up to its last bracket, one at a time.

    Yields the number of open brackets, negative in a string. Returns False if the value is no call: most other text is
    rejected early, and `_calls` checks the rest.
    """
    if begun.endswith(NAME_ENDS):
        while (character := (yield 0)) != "{":
            if not (character.isalnum() or character.isspace() or character in "[]_-"):
                return False
        begun = character
    brackets, character = [CLOSING[one] for one in begun if one in CLOSING], begun[-1]
    while brackets:
        if character in "\"'":
            quote = character
            while (character := (yield -len(brackets))) != quote:
                if character == "\\":
                    yield -len(brackets)
        character = yield len(brackets)
        if character in CLOSING:
            brackets.append(CLOSING[character])
        elif character in ")]}":
            if character != brackets.pop():
                return False
        elif not (character.isalnum() or character.isspace() or character in "\"'+-.:,=_"):
            return False
    return True


# -------------------------------------------------------------------------------------------- what the calls are
def _calls(text: str, names: Collection[str]) -> list[ToolCall]:
    """The calls in a text. Raises one of ERRORS if there is none, or an undeclared function."""
    text = BEGIN.sub("", text, count=1)
    decoder = json.JSONDecoder(strict=False)  # strings may contain line breaks, as models write them
    if re.match(r"\{|\[\s*\{", text):  # a JSON object {"name": ..., "arguments": {...}}, or a list of these
        value = decoder.decode(text)
        calls = [_call(one) for one in (value if isinstance(value, list) else [value])]
    elif text.startswith("["):
        calls = _python_calls(text)
    else:  # f{...}
        name, _, rest = text.partition("{")
        name, _, id = re.sub(r"\s*(\[ARGS\]|>|```json)?\s*$", "", name).partition(CALL_ID)
        calls = [_call({"name": name.strip(), "arguments": decoder.decode("{" + rest), "id": id or None})]
    if not calls or any(call["function"]["name"] not in names for call in calls):
        raise ValueError
    return calls


def _call(call: Any) -> ToolCall:
    """The checked call in a dict of its name and its arguments or parameters. Raises ValueError."""
    if not isinstance(call, dict) or ("arguments" in call) == ("parameters" in call):
        raise ValueError
    call = {"arguments" if key == "parameters" else key: item for key, item in call.items()}
    (message,) = check_messages([{"role": "assistant", "tool_calls": [call]}])  # UsageError is a ValueError
    (checked,) = message["tool_calls"]
    json.dumps(checked, ensure_ascii=False).encode()  # without lone surrogates
    return checked


def _python_calls(text: str) -> list[ToolCall]:
    """A list of calls in Python's syntax. The arguments are literals, given by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about an unknown escape in a string
        calls: Any = ast.parse(text, mode="eval").body
    found = []
    for call in calls.elts:
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if len(arguments) != len(call.keywords):  # a name twice
            raise ValueError
        found.append(_call({"name": ast.unparse(call.func), "arguments": arguments}))
    return found


# -------------------------------------------------------------------------------------------------------- the text
class ToolCallStream:
    """Splits an assistant's answer into text and calls, one piece at a time.

    `feed` and `end` return events: a string is text, anything else is a call. Text that may be the beginning of a call
    is held back. The events do not depend on how the answer is divided into pieces. Each character is processed once.

    The strings, joined, are the answer without the calls and without the white space around them. A call that is
    incomplete at the end, or invalid, is text.

    tools  the functions that may be called, as in `encode_chat`
    parts  show a call as {"name", "id"} when its arguments begin, then parts of their JSON text as {"arguments"}. Such
           a call does not become text if it is incomplete or invalid. Calls in a list or in Python's syntax are shown
           as a whole, at their end
    """

    def __init__(self, tools: Tools | None, parts: bool = False):
        self.names = frozenset(_tool_name(tool) for tool in check_tools(tools) or ())
        self._anywhere, self._first, self._forms = _beginnings(self.names)
        self.pending: list[str] = []  # characters of a possible call
        self.called: tuple[str, str, int] | None = None  # name; "," or ":"; index in `pending` of the text after both
        self.parts, self.shown = parts, False  # whether parts of the pending text have been shown
        self._begun = ""  # the pending text without white space, until its value has begun
        self._value: Generator[int, str, bool] | None = None
        self._depth = self._base = 0  # open brackets, negative in a string; those outside the arguments
        self._in_arguments = False  # whether the text is in arguments that are shown
        self._closing: list[str] = []  # marks that may follow the last call
        self._space = ""  # white space held back, since a call may follow
        self._only_calls = True  # there is no text yet
        self._after_call = False  # there is no text after the last call
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """Add text; return the text and the calls that are certain."""
        for character in text:
            if not self._add(character):
                begun = bool(self.pending)
                self._text(self._take())
                if not begun or not self._add(character):  # it may begin another call
                    self._text(character)
        events, self._events = self._events, []
        return events

    def end(self) -> list[Event]:
        """The events at the end of the answer."""
        self._text(self._take())
        if not self._after_call:
            self._show(self._space)
        self._space = ""
        return self.feed("")

    def _add(self, character: str) -> bool:
        """Add a character to the pending text. Returns False if the text then can't begin a call."""
        ended = False
        if self._value is None:
            begun = self._begun + character.strip()
            begins = self._first if self._only_calls or self._after_call else self._anywhere
            at = bisect_left(begins, begun)  # the first that may begin with this
            call_begins = at < len(begins) and begins[at].startswith(begun)
            if not begun or not (call_begins or any(mark.startswith(begun) for mark in self._closing)):
                return False
            self._begun = begun
            self.pending.append(character)
            if begun in self._closing:
                self._closing, self._space = self._closing[self._closing.index(begun) + 1 :], ""
                self._take()
            elif call_begins and begun == begins[at]:
                self._value = _value(BEGIN.sub("", begun, count=1))
                self._depth = next(self._value)
                self._base = 0 if self._forms[begun][0] else abs(self._depth)
                self._find_name()
        else:
            try:
                self._depth = self._value.send(character)
            except StopIteration as end:
                if not end.value:
                    return False
                self._depth, ended = 0, True
            self.pending.append(character)
            if character in ",{]" and self._depth == self._base + (character == "{"):
                self._find_name()
        if self._in_arguments:
            raw = self._depth < 0 and character < " "  # JSON must escape it
            self._events.append({"arguments": json.dumps(character)[1:-1] if raw else character})
            self._in_arguments = abs(self._depth) > self._base
        if ended:
            self._finish()
        return True

    def _find_name(self) -> None:
        """Set `called` if the pending text ends with the name of a function; show the call if its arguments begin."""
        text, name, id = "".join(self.pending[-LONGEST_HEAD:]), self._forms[self._begun][0], ""
        if not name:
            found = HEAD.search(text)
            name = found[1] if found and found[1] in self.names else ""
        elif CALL_ID in text:
            id, args, _ = text.partition(CALL_ID)[2].partition(ARGS)
            name = name if args else ""
        arguments_begin = text.endswith("{")
        if name and (self.called is None or text.endswith(",")):
            self.called = name, "," if self._base else ":", len(self.pending) - arguments_begin
        if name and arguments_begin and self._base < 2 and self.parts and not self.shown:
            self.shown = self._in_arguments = True
            self._events.append({"name": name, "id": id.strip()})

    def _take(self) -> str:
        """Remove the pending text. Returns it, or an empty text if it was shown as a call."""
        text = "".join(self.pending)
        if self.shown:
            text, self._space, self._after_call = "", "", True
        self.pending, self._begun, self._value, self.called = [], "", None, None
        self.shown = self._in_arguments = False
        return text

    def _finish(self) -> None:
        """Turn the pending text into its calls, or into text."""
        shown, closing = self.shown, self._forms[self._begun][1]
        text = self._take()
        with contextlib.suppress(*ERRORS):
            self._events += [] if shown else _calls(text, self.names)
            self._space, self._after_call, self._closing = "", True, closing or self._closing
            return
        self._text(text)

    def _text(self, text: str) -> None:
        """Pass on text, except white space at its end."""
        if body := text.rstrip():
            self._show(self._space + body)
            self._space, self._only_calls, self._after_call, self._closing = "", False, False, []
        self._space += text[len(body) :]

    def _show(self, text: str) -> None:
        if self._events and isinstance(self._events[-1], str):
            self._events[-1] += text
        elif text:
            self._events.append(text)


@functools.lru_cache(16)
def _beginnings(names: frozenset[str]) -> tuple[list[str], list[str], dict[str, tuple[str, list[str]]]]:
    """The beginnings of calls after text, and those at the start or after a call, sorted and without white space.

    The third value maps each beginning to the function's name ("": it is read later) and the marks that may follow.
    """
    values = dict.fromkeys(('{"', '[{"', *(f"[{name}(" for name in names)), "")
    forms: dict[str, tuple[str, list[str]]] = dict.fromkeys((*values, ';{"'), ("", []))
    named = {name + end: name for name in names for end in ("{", ARGS, CALL_ID)}
    kinds = ['{"name":"', '{"type":"function","name":"', '[{"name":"', '[{"type":"function","name":"']
    for mark, after in AFTER.items():
        before, name_follows, end = mark.partition("NAME")
        in_block = {f'{kind}{name}",': "" for kind in kinds for name in names} if "```" in mark else values | named
        following = {name + end: name for name in names} if name_follows else in_block
        forms |= {before + value: (name, after) for value, name in following.items()}
    return sorted(forms.keys() - {*values, ';{"'}), sorted(forms), forms


def parse_tool_calls(text: str, tools: Tools | None) -> tuple[str, list[ToolCall]]:
    """Split an assistant's answer into text and calls of declared functions. See `ToolCallStream`."""
    stream = ToolCallStream(tools)
    events = stream.feed(text) + stream.end()
    return (
        "".join(event for event in events if isinstance(event, str)),
        [event for event in events if not isinstance(event, str)],
    )


def call_marks(tokenizer: Tokenizer) -> dict[int, str]:
    """{id: string} of the control tokens that mark calls and have no text.

    To recognize calls after other text, insert the string of such an id into the text for `ToolCallStream`.
    """
    found = {tokenizer.control[mark]: mark for mark in CALL_MARKS if mark in tokenizer.control}
    return {id: mark for id, mark in found.items() if not tokenizer.token_bytes(id)}


def _tool_name(tool: Mapping[str, Any]) -> str:
    """The name of a function, given {"type": "function", "function": {"name": ...}} or its inner part."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise UsageError(f"each tool must have a function with a name, got {tool!r:.80}")
    return name
