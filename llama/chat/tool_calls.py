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
import contextlib
import functools
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

MARKS = ("<|python_tag|>", "[TOOL_CALLS]", ARGUMENTS := "[ARGS]", "<tool_call>", "</tool_call>")

Event = str | ToolCall  # a part of the text, or a call
Reader = Generator[None, str, None]  # gets one character at a time; returns at the last one of a group of calls


class NotACall(Exception):
    """The text is not a call."""


class Format(NamedTuple):
    """A format of calls: a mark, the beginning of a value in brackets, the rest of the value, and an end.

    mark    without a mark, calls are recognized only if nothing but calls precedes them
    begins  given the declared names, what may follow the mark and white space
    end     may be missing at the end of an answer
    """

    mark: str
    begins: Callable[[Collection[str]], list[str]]
    end: str = ""


def _bare(names: Collection[str]) -> list[str]:
    built_in = [f"{name}.call(" for name in LLAMA3_TOOLS if name in names]
    return ['{"', ';{"', '[{"', *(f"[{name}(" for name in names), *built_in]


FORMATS = (
    Format("", _bare),
    Format("<|python_tag|>", _bare),
    Format("[TOOL_CALLS]", lambda names: ['[{"', *(f"{name}{end}" for name in names for end in ("{", "[ARGS]{"))]),
    Format("<function=", lambda names: [f"{name}>{{" for name in names], "</function>"),
    Format("<tool_call>", lambda names: ['{"', '[{"'], "</tool_call>"),
)


# ----------------------------------------------------------------------------------- where a group of calls ends
CLOSING = {"{": "}", "[": "]", "(": ")"}


def _group(format: Format, names: Collection[str]) -> Reader:
    """Gets characters until a group of calls is complete. Rejects most other text early; `_calls` checks the rest."""
    for expected in format.mark:
        if (yield) != expected:
            raise NotACall
    begins, begun = format.begins(names), ""
    while begun not in begins:
        if not (character := (yield)).isspace():
            begun += character
            if not any(begin.startswith(begun) for begin in begins):
                raise NotACall
    stack, character = [CLOSING[bracket] for bracket in begun.replace(ARGUMENTS, "") if bracket in CLOSING], begun[-1]
    while stack:
        if character in "\"'":
            quote = character
            while (character := (yield)) != quote:
                if character == "\\":
                    yield
        character = yield
        if character in CLOSING:
            stack.append(CLOSING[character])
        elif character in ")]}":
            if character != stack.pop():
                raise NotACall
        elif not (character.isalnum() or character.isspace() or character in "\"'+-.:,=_"):
            raise NotACall
    for i, expected in enumerate(format.end):
        while (character := (yield)).isspace() and i == 0:
            pass
        if character != expected:
            raise NotACall


# -------------------------------------------------------------------------------------------- what the calls are
ERRORS = (ValueError, SyntaxError, RecursionError, MemoryError)  # Python's parser runs out of its own stack


def _calls(text: str, names: Collection[str]) -> list[ToolCall]:
    """The calls in a text without mark and end. Raises one of ERRORS if there is none, or an undeclared function."""
    loads = functools.partial(json.loads, strict=False)  # strings may contain line breaks, as models write them
    text = text.strip().removeprefix(";").lstrip()
    if re.match(r"\{|\[\s*\{", text):  # a JSON object {"name": ..., "arguments": {...}}, or a list of these
        value = loads(text)
        calls = [_call(one) for one in (value if isinstance(value, list) else [value])]
    elif re.match(r"\[|[^{]*\(", text):
        calls = _python_calls(text)
    else:  # f{...}, f>{...} or f[ARGS]{...}
        name, _, rest = text.partition("{")
        name = name.strip().removesuffix(ARGUMENTS).removesuffix(">")
        calls = [_call({"name": name, "arguments": loads("{" + rest)})]
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


class _Constants(ast.NodeTransformer):
    """Replaces constants that some models write as in JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def _python_calls(text: str) -> list[ToolCall]:
    """A call in Python's syntax, or a list of calls. The arguments are literals, given by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about an unknown escape in a string
        tree = _Constants().visit(ast.parse(text, mode="eval")).body
    found = []
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if len(arguments) != len(call.keywords):  # a name twice
            raise ValueError
        found.append(_call({"name": ast.unparse(call.func).removesuffix(".call"), "arguments": arguments}))
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

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None):
        self.names = frozenset(_tool_name(tool) for tool in check_tools(tools) or ())
        self._alive: list[tuple[Format, Reader]] = []  # formats that the pending text may have
        self._pending: list[str] = []  # characters of a possible call
        self._space = ""  # white space held back, since a call may follow
        self._only_calls = True  # there is no text yet
        self._after_call = False  # there is no text after the last call
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """Add text; return the text and the calls that are certain."""
        for character in text:
            if not self._add(character):
                self._add(character)
        return self._collected()

    def end(self) -> list[Event]:
        """The events at the end of the answer: the pending text is a call if only its end is missing."""
        self._finish([format for format, _ in self._alive])
        if not self._after_call and self._space:
            self._events.append(self._space)
        self._space = ""
        return self._collected()

    def _add(self, character: str) -> bool:
        """Add a character. False if it ends a possible call without being a part of it; it may begin another one."""
        if not self._pending:
            formats = [f for f in FORMATS if (f.mark.startswith(character) if f.mark else self._only_calls)]
            self._alive = [(format, _group(format, self.names)) for format in formats]
            for _, reader in self._alive:
                next(reader)
        alive = []
        for format, reader in self._alive if len(self._pending) < LONGEST else ():
            try:
                reader.send(character)
                alive.append((format, reader))
            except NotACall:
                continue
            except StopIteration:
                self._pending.append(character)
                self._finish([format])
                return True
        self._alive, used = alive, bool(alive) or not self._pending
        if used:
            self._pending.append(character)
        if not alive:
            self._finish([])
        return used

    def _finish(self, formats: Sequence[Format]) -> None:
        """Turn the pending text into the calls that it has in one of the formats, or into text."""
        text, self._pending, self._alive = "".join(self._pending), [], []
        for format in formats:
            with contextlib.suppress(*ERRORS):
                self._events += _calls(text.removeprefix(format.mark).strip().removesuffix(format.end), self.names)
                self._space, self._after_call = "", True
                return
        self._text(text)

    def _text(self, text: str) -> None:
        """Pass on text, except white space at its end."""
        if body := text.rstrip():
            self._events.append(self._space + body)
            self._space, self._only_calls, self._after_call = "", False, False
        self._space += text[len(body) :]

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
