"""The function calls in an assistant's text.

A call is text in the format that the model was trained on:

    Llama 3.1, 3.2   {"name": "f", "parameters": {...}}   also "arguments", and several, separated by ";" or white space
    Llama 3.2, 4     [f(a=1, b="x"), g()]
    Mistral          [{"name": "f", "arguments": {...}}]  also after [TOOL_CALLS]; also [TOOL_CALLS]f{...}; since 2025
                     [TOOL_CALLS]f[ARGS]{...} or [TOOL_CALLS]f[CALL_ID]id[ARGS]{...}
    Hermes, Qwen     <tool_call>{"name": "f", "arguments": {...}}</tool_call>     SmolLM2 and 3 also with a list

Calls without a mark are recognized only at the start of an answer and after another call; after <|python_tag|> or
another mark, anywhere. Only declared functions are recognized. Everything else stays text.

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

BEFORE, AFTER = ("<|python_tag|>", "[TOOL_CALLS]", "<tool_call>"), "</tool_call>"
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"
CALL_MARKS = (*BEFORE, AFTER, CALL_ID, ARGS)
MARKS = (*CALL_MARKS, *(mark for pair in PAIRS for mark in pair))  # of calls and thoughts, in a model's own text
BEGIN = re.compile(rf"({'|'.join(map(re.escape, BEFORE))}|;)?\s*")
CLOSING = {"{": "}", "[": "]", "(": ")"}

# MemoryError: the stack of Python's parser is full. TypeError: a list as a key of a dictionary.
ERRORS = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)

Event = str | ToolCall  # a part of the text, or a call


def _value(begun: str) -> Generator[None, str, bool]:
    """Receive the characters of a value after its beginning, up to its last bracket. Return False if it is no call.

    Most other text is rejected early; `_calls` checks the rest.
    """
    if begun.endswith(CALL_ID):
        while (character := (yield)) != "{":
            if not (character.isalnum() or character.isspace() or character in "[]_-"):
                return False
        begun = character
    brackets, character = [CLOSING[one] for one in begun.replace(ARGS, "") if one in CLOSING], begun[-1]
    while brackets:
        if character in "\"'":
            quote = character
            while (character := (yield)) != quote:
                if character == "\\":
                    yield
        character = yield
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
        name, _, id = name.strip().removesuffix(ARGS).partition(CALL_ID)
        calls = [_call({"name": name.strip(), "arguments": decoder.decode("{" + rest), "id": id or None})]
    if not calls or any(call["function"]["name"] not in names for call in calls):
        raise ValueError
    return calls


def _call(call: Any) -> ToolCall:
    """A call, given its name, and its arguments or parameters."""
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
    """

    def __init__(self, tools: Tools | None):
        self.names = frozenset(_tool_name(tool) for tool in check_tools(tools) or ())
        self._anywhere, self._first = _beginnings(self.names)
        self._pending: list[str] = []  # characters of a possible call
        self._begun = ""  # the same without white space, until its value has begun
        self._value: Generator[None, str, bool] | None = None
        self._space = ""  # white space held back, since a call may follow
        self._only_calls = True  # there is no text yet
        self._after_call = False  # there is no text after the last call
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """Add text; return the text and the calls that are certain."""
        for character in text:
            if not self._add(character):
                rejected = self._take()
                self._text(rejected)
                if not rejected or not self._add(character):  # it may begin another call
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
        """Add a character to the pending text. False if that is not the beginning of a call."""
        if self._value is None:
            begun = self._begun + character.strip()
            begins = self._first if self._only_calls else self._anywhere
            at = bisect_left(begins, begun)  # of the first that may begin so
            if not begun or at == len(begins) or not begins[at].startswith(begun):
                return False
            self._begun = begun
            self._pending.append(character)
            if begun == AFTER:
                self._finish()
            elif begun == begins[at]:
                self._value = _value(BEGIN.sub("", begun, count=1))
                next(self._value)
            return True
        try:
            self._value.send(character)
        except StopIteration as end:
            if not end.value:
                return False
            self._pending.append(character)
            self._finish()
        else:
            self._pending.append(character)
        return True

    def _take(self) -> str:
        """Remove and return the pending text."""
        text, self._pending, self._begun, self._value = "".join(self._pending), [], "", None
        return text

    def _finish(self) -> None:
        """Turn the pending text into its calls, or into text. The mark after a call is dropped."""
        text = self._take()
        with contextlib.suppress(*ERRORS):
            if not (self._after_call and text == AFTER):
                self._events += _calls(text, self.names)
            self._space, self._after_call = "", True
            return
        self._text(text)

    def _text(self, text: str) -> None:
        """Pass on text, except white space at its end."""
        if body := text.rstrip():
            self._show(self._space + body)
            self._space, self._only_calls, self._after_call = "", False, False
        self._space += text[len(body) :]

    def _show(self, text: str) -> None:
        if self._events and isinstance(self._events[-1], str):
            self._events[-1] += text
        elif text:
            self._events.append(text)


@functools.lru_cache(16)
def _beginnings(names: frozenset[str]) -> tuple[list[str], list[str]]:
    """How a call may begin, without white space, in order: after text, and if only calls precede it."""
    values = ['{"', '[{"', *(f"[{name}(" for name in names)]
    named = [f"{name}{end}" for name in names for end in ("{", f"{ARGS}{{", CALL_ID)]
    anywhere = {AFTER, *(mark + value for mark in BEFORE for value in (*values, *named))}
    return sorted(anywhere), sorted({*anywhere, *values, ';{"'})


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

    To recognize calls after other text, insert the string for the id into the text for `ToolCallStream`.
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
