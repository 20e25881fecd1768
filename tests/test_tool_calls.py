"""Function calls in an assistant's text: formats, streams in any division, malformed and huge texts."""

from __future__ import annotations

import json
import keyword
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Literal, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from llama.chat import check_messages
from llama.chat.functions import schema_of
from llama.chat.messages import ToolCall
from llama.chat.tool_calls import ToolCallStream, call_marks, parse_tool_calls
from llama.errors import UsageError
from llama.tokenizer import Tokenizer
from llama.tokenizer.gguf import from_metadata

from . import tiny

TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "get_weather"}},
    {"name": "brave_search"},
    {"name": "a-b.c"},
]

Found = tuple[str, list[tuple[str, dict[str, Any]]]]


def names_of(calls: list[ToolCall]) -> list[tuple[str, dict[str, Any]]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def parsed(text: str, tools: Any = TOOLS) -> Found:
    content, calls = parse_tool_calls(text, tools)
    return content, names_of(calls)


def streamed(pieces: list[str], tools: Any = TOOLS) -> Found:
    stream = ToolCallStream(tools)
    events = [event for piece in pieces for event in stream.feed(piece)] + stream.end()
    return (
        "".join(event for event in events if isinstance(event, str)),
        names_of([event for event in events if not isinstance(event, str)]),
    )


F: tuple[str, dict[str, Any]] = ("f", {"a": 1})
FORMATS = [
    ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [F]),
    ('{"name": "f", "parameters": "{\\"a\\": 1}"}', "", [F]),
    ('\n {"name": "f", "parameters": {"a": 1}};{"name": "f", "arguments": {"a": 1}}; {"name": "f", "arguments": {}}\n', "",
     [F, F, ("f", {})]),
    ('{"name": "f", "parameters": {"a": 1}}\n{"name": "a-b.c", "parameters": {}}', "", [F, ("a-b.c", {})]),
    ('{"name": "f", "parameters": {"a": 1}}\n\nDone. ', "\n\nDone. ", [F]),
    ('{"name": "f", "parameters": {"a": 1}};{"name": "g", "parameters": {}}', ';{"name": "g", "parameters": {}}', [F]),
    ('I will look.\n<|python_tag|> {"name": "f", "parameters": {"a": 1}}', "I will look.", [F]),
    ('<|python_tag|>[f(a=1)]', "", [F]),
    ('[ f(a=1), get_weather(city="S]F", at=\'it\\\'s\', on=[True, None, -1.5, {"k": (1,)}]) ]', "",
     [F, ("get_weather", {"city": "S]F", "at": "it's", "on": [True, None, -1.5, {"k": [1]}]})]),
    ('[f()]', "", [("f", {})]),
    ('[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]', "", [F, ("f", {})]),
    ('Yes. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "Yes.", [F]),
    ('[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]get_weather{"a": {}}', "", [F, ("get_weather", {"a": {}})]),
    ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]aB3-_x[ARGS] {"a": 1}', "", [F, F]),
    ('Sure <tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_call> ok </tool_call>', "Sure ok </tool_call>", [F]),
    ('Hm.\n\n<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>\n<tool_call>{"name": "f", "arguments": {}}', "Hm.",
     [("f", {"a": "1\n2"}), ("f", {})]),  # the model stopped without the closing mark
    ('<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]</tool_call>', "", [F, ("f", {})]),
    ('<tool_call><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "<tool_call>", [F]),
    ('{"x": <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', '{"x":', [F]),
    ('{"name": "f", "parameters": {"s": "}{\\"<tool_call>", "n": [1.5e3, -2, true, null, [[]]]}}', "",
     [("f", {"s": '}{"<tool_call>', "n": [1500.0, -2, True, None, [[]]]})]),
    ('```json\n{"name": "f", "arguments": {"a": 1}}\n```', "", [F]),
    ('I will call it:\n\n```json\n{\n  "name": "f",\n  "arguments": {"a": 1}\n}\n```\n\nDone.', "I will call it:\n\nDone.", [F]),
    ('Two:\n```\n[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]\n``` ', "Two:", [F, ("f", {})]),
    ('Two:\n```json\n{"name": "f", "arguments": {"a": 1}}\n{"name": "f", "arguments": {}}\n```\n```json\n{"name": "f", "arguments": {}}\n```',
     "Two:", [F, ("f", {}), ("f", {})]),
    ('```json\n{"type": "function", "name": "a-b.c", "parameters": {}}\n```', "", [("a-b.c", {})]),
    ('See ```json\n{"name": "f", "arguments": {"a": 1}}\n``` and ```python\nf(a=1)\n```', "See and ```python\nf(a=1)\n```", [F]),
    ('<|tool_call|> [{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', "", [F]),
    ('Yes.\nfunctools[{"arguments": {"a": 1}, "name": "f"}]\nNo?', "Yes.\nNo?", [F]),
    ('Hm\n<tools>\n{"name": "f", "arguments": {"a": 1}}\n</tools>\n<tools>[{"name": "f", "arguments": {}}]</tools>', "Hm", [F, ("f", {})]),
    ('Ok <function=f>{"a": 1}</function>\n<function=a-b.c>{}</function>!', "Ok!", [F, ("a-b.c", {})]),
    ('Hm<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
     '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}```<｜tool▁call▁end｜><｜tool▁calls▁end｜>!', "Hm!",
     [F, ("get_weather", {})]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), FORMATS, ids=[text[:60] for text, _, _ in FORMATS])
def test_formats(text: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert parsed(text) == (content, calls)
    assert streamed(list(text)) == (content, calls)
    assert parsed(text, None) == parsed(text, []) == (text, [])


# What the tests of llama.cpp's and vLLM's parsers cover for these families, in texts of our own: the number of calls
TYPES = '{"s": "x", "i": 42, "n": 3.14, "b": true, "z": null, "l": ["a", {}], "o": {"p": "q"}, "e": [], "t": "a \\"b\\" {c} [d] C:\\\\f\\n"}'
ONE, ARGS_FIRST = f'{{"name": "f", "arguments": {TYPES}}}', f'{{"arguments": {TYPES}, "name": "f"}}'
EMPTY, NO_CALL = '{"name": "get_weather", "arguments": {}}', "A text without calls, and a {brace} or [bracket]."
DEEPSEEK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>".replace("{}", TYPES)
BEGUN, ENDED = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
FAMILIES: dict[str, list[tuple[str, int]]] = {
    "hermes, qwen, granite 4": [
        (NO_CALL, 0), (f"<tool_call>\n{ONE}\n</tool_call>", 1), (f"Hello?<tool_call>\n{ONE}</tool_call>", 1), (f"<tool_call>{ONE}", 1),
        (f"<tool_call>{ONE}</tool_call><tool_call>{EMPTY}</tool_call>", 2), (f"<tool_call>\n{ONE[:-1]}", 0),
        (f"Go: \n<tool_call> {ONE} </tool_call> and \n <tool_call> {EMPTY} </tool_call> See?", 2),
        (f"<tool_call>{json.dumps({'name': 'f', 'arguments': TYPES})}</tool_call>", 1),
    ],
    "llama 3": [
        (NO_CALL, 0), (ONE, 1), (ONE.replace("arguments", "parameters"), 1), (f"{ONE}; {EMPTY}; {ONE}", 3), (f"{ONE} ; {EMPTY} ; {ONE}", 3),
        (f"{ONE};{EMPTY}", 2), (f"{ONE};\n{EMPTY}", 2), (f"{ONE}\n{EMPTY}", 2), (f"{ONE} I used {{f}} for this.", 1),
        (f'{ONE} The arguments were {{"a": 1}}', 1), ('{"name": "f", "parameters": {not json}', 0), ('{"parameters": {}}', 0), ('{"name": "f"}', 0),
    ],
    "granite 3": [
        (NO_CALL, 0), (f"<|tool_call|> [{ONE}]", 1), (f"<|tool_call|> [\n  {ONE},\n  {EMPTY}\n]", 2), (f"<tool_call> [{ONE}]", 1),
        (f"I look.\n<|tool_call|> [{ONE}]\nI tell you.", 1), (f"<|tool_call|> [{ARGS_FIRST}, {EMPTY}]", 2), (f"<|tool_call|>[{EMPTY}, {ONE}]", 2),
        (f"<|tool_call|> [{ONE[:40]}", 0), ('Some text [{"name": "f"}]', 0),
    ],
    "phi-4-mini": [
        (NO_CALL, 0), (f"functools[{ONE}]", 1), (f" functools[{ONE}]", 1), (f"functools[\n  {ONE},\n  {EMPTY}\n]", 2),
        (f"I look.\nfunctools[{ONE}]\nMore?", 1), (f"functools[{ONE[:40]}", 0), ('functools{"name": "f"}', 0), ('functools[{"name": "f"}]', 0),
        ("functools[] text", 0), ("functools[ text ]", 0), (f"<|tool_call|>[{ONE}]<|/tool_call|>", 1),
    ],
    "deepseek": [
        (NO_CALL, 0), (f"{BEGUN}{DEEPSEEK}{ENDED}", 1), (f"{BEGUN}{DEEPSEEK}{DEEPSEEK}{ENDED}", 2), (f"{BEGUN}{DEEPSEEK}\n{DEEPSEEK}{ENDED}", 2),
        (f"I look.{BEGUN}{DEEPSEEK}{ENDED}", 1), (f"</think>{BEGUN}{DEEPSEEK.replace(chr(10) + '```<', '```<')}{ENDED}", 1),
        (f"{BEGUN}{DEEPSEEK.replace(TYPES, TYPES[:-1])}{ENDED}", 0), (f"{BEGUN}function<｜tool▁sep｜>f\n```json\n{{}}\n```{ENDED}", 0),
    ],
    "mistral": [
        (NO_CALL, 0), (f"[TOOL_CALLS][{ONE}]", 1), (f"[TOOL_CALLS]  [ {ONE} ]", 1), (f"[TOOL_CALLS] [{ARGS_FIRST}]", 1), (f"Hi[TOOL_CALLS] [{ONE}]", 1),
        ('[TOOL_CALLS] [{"arguments": {"name": "Jo"}, "name": "f"}]', 1), (f"[TOOL_CALLS] [{ONE}, {EMPTY}]", 2), (f"[TOOL_CALLS] [{ONE}]\nmore", 1),
        ("[TOOL_CALLS] no json", 0), (f"[TOOL_CALLS]f{TYPES}", 1), (f"hi{{hi[TOOL_CALLS]f{TYPES}[TOOL_CALLS]get_weather{{}}", 2), ("[TOOL_CALLS]f", 0),
        (f"[TOOL_CALLS]f[ARGS]{TYPES}", 1), (f"What?[TOOL_CALLS]f[ARGS]{TYPES}[TOOL_CALLS]f[ARGS]{TYPES}", 2),
        (f"[TOOL_CALLS]f[CALL_ID]000000001[ARGS]{TYPES}[TOOL_CALLS]f[CALL_ID]000000002[ARGS]{TYPES}", 2),
    ],
    "qwen2.5-coder": [
        (NO_CALL, 0), (f"<tools>{ONE}</tools>", 1), (f"<tools>\n{ONE}\n</tools>\n<tools>\n{EMPTY}\n</tools>", 2), (f"<tools>\n[{ONE},\n{EMPTY}]\n</tools>", 2),
        (f"I look.\n\n<tools>{ONE}</tools>\n\nI tell you.", 1), ("<tools>no json</tools>", 0), (f"<tools>{ONE[:40]}", 0), ("<tools></tools>", 0),
        (f"```json\n{ONE}\n```", 1),
    ],
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cases_of_other_parsers(family: str) -> None:
    for text, count in FAMILIES[family]:
        content, calls = parsed(text)
        assert len(calls) == count, text
        assert all(
            arguments == (json.loads(TYPES) if name == "f" and "Jo" not in text else arguments)
            for name, arguments in calls
        )
        assert content == text or count, text


TEXTS = [
    "", "Hello.\n", "  { a }", '{"a": 1}', '{"name": "Tom", "parameters": {}}', '{"name": "f"}', '{"name": "f", "parameters": [1]}',
    '{"name": "f", "id": 1, "parameters": {}}', '{"name": "f", "parameters": {}, "more": 1}',
    '{"name": "f", "parameters": {}, "arguments": {}}', '{"name": "f", "parameters": {', '{"name": "f", "parameters": {}]',
    '{"name": "f", "parameters": {"a": 1e999}}', '{"name": "f", "parameters": {"a": "\\ud800"}}', 'Call {"name": "f", "parameters": {}}',
    '[f(1)]', "[f(a=1, a=2)]", "[f(**x)]", "[f(a=g())]", "[f(a={[]: 1})]", "[f(a=1j)]", "[f(a=1)",
    "[f(a='x\ny')]", "[f(a=1)}", "[]", "[g(a=1)]", "[f(a=1), g()]", "[f(a=1)(b=2)]", "[f(a=f'{x}')]", "f(a=1)",
    '[{"name": "f", "arguments": {}}, 1]', '[{"name": "f", "arguments": {}}, {"name": "no", "arguments": {}}]',
    "<tool_call>f</tool_call>", '<tool_call>{"name": "f"</tool_call>', "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
    "<tool_call>[]</tool_call>", "</tool_call>", "[TOOL_CALLS]", '[TOOL_CALLS] no{"a": 1}',
    '[TOOL_CALLS]f[CALL_ID]a"b[ARGS]{"a": 1}', "<|python_tag|>print(1)", "a < b > c [d] {e} ;", "\x1f x \x85", '; {"name": "f"}',
    '{"a":' * 100, '{"name": "f", "parameters": {"a": ' + "9" * 5000 + "}}", "[f(a=" + "-" * 20_000 + "1)]", "[f(a=" + "1+" * 5000 + "1)]",
    '```json\n{"a": 1}\n```', '```json\n{"name": "Tom", "arguments": {}}\n```', '```\n[1, 2]\n```', '```json\n[]\n```\n```', "```",
    '```json\n{"name": "f", "version": {"a": 1}}\n```', '```json\n{"name": "no", "arguments": {}}\n```\n', '```js\n{"name": "f", "arguments": {}}\n```',
    'functools[{"name": "f"}]', "functools[] text", "<tools></tools>", "<tools>no</tools>", "<function=g>{}</function>", "<function=f>a{}</function>",
    '<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁calls▁end｜>', "<|tool_call|>[]", "</function></tools>",
    "[f(a=" + "[" * 150 + "]" * 150 + ")]", '{"name": "f", "parameters": {"a": ' + "[" * 70 + "]" * 70 + "}}", "[f(a='\0')]",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=[f"{text[:40]!r} {len(text)}" for text in TEXTS])
def test_everything_else_stays_text(text: str) -> None:
    assert parsed(text) == (text, [])
    assert streamed(list(text)) == (text, [])


# ---------------------------------------------------------------------------------------------------------- streams
MARKS = ["<|python_tag|>", "[TOOL_CALLS]", "<tool_call>", "</tool_call>", "```json", "```", "<function=f>", "functools"]
PIECES = [*(text for text, _, _ in FORMATS), *TEXTS[:60], *" \n;<[{}]é", "Hello", *MARKS]


@st.composite
def divisions(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = "".join(draw(st.lists(st.sampled_from(PIECES), max_size=5)))
    for _ in range(draw(st.integers(0, 3))):  # a damaged text
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(["", '"', "}", "x", " ", "<"])) + text[at + draw(st.integers(0, 2)) :]
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=100)
@given(divisions())
def test_the_division_into_pieces_does_not_matter(case: tuple[str, list[str]]) -> None:
    """And the text is complete and in order: the content is the text without some parts."""
    text, pieces = case
    content, calls = parsed(text)
    assert streamed(pieces) == streamed(list(text)) == (content, calls)
    assert in_parts(pieces) == in_parts([text])
    remaining = iter(text)
    assert all(character in remaining for character in content)
    assert len(re.sub(r"\s", "", content)) <= len(re.sub(r"\s", "", text)) - 3 * len(calls)


def in_parts(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and the names of the calls with the JSON text of their arguments, of a stream that shows parts."""
    stream, content, calls = ToolCallStream(TOOLS, parts=True), "", list[tuple[str, str]]()
    for event in [event for piece in pieces for event in stream.feed(piece)] + stream.end():
        if isinstance(event, str):
            content += event
        elif "function" in event:
            calls.append((event["function"]["name"], json.dumps(event["function"]["arguments"])))
        elif "name" in event:
            calls.append((event["name"], ""))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + event["arguments"])
    return content, calls


@pytest.mark.parametrize("text", [text for text, _, _ in FORMATS])
def test_parts_of_arguments_are_json_that_adds_up_to_the_call(text: str) -> None:
    content, calls = in_parts(list(text))
    assert (content, [(name, json.loads(arguments)) for name, arguments in calls]) == parsed(text)


def test_parts_are_shown_as_they_come_and_stay() -> None:
    stream = ToolCallStream(TOOLS, parts=True)
    assert stream.feed('Hm <tool_call>{"name": "f", "arguments": ') == ["Hm"]
    assert stream.feed("{") == [{"name": "f", "id": ""}, {"arguments": "{"}]
    assert stream.feed('"a": "\n') == [{"arguments": one} for one in ('"', "a", '"', ":", " ", '"', "\\n")]
    assert stream.end() == []
    assert in_parts(['<tool_call>{"name": "f", "arguments": {"a": [1']) == ("", [("f", '{"a": [1')])
    assert in_parts(['<tool_call>{"name": "no", "arguments": {"a": [1']) == (
        '<tool_call>{"name": "no", "arguments": {"a": [1',
        [],
    )
    assert in_parts(['{"name": "f", "version": {}, "parameters": {}}!']) == (
        '{"name": "f", "version": {}, "parameters": {}}!',
        [],
    )


def test_text_is_shown_as_soon_as_it_can_be_no_call() -> None:
    stream = ToolCallStream(TOOLS)
    assert stream.feed("Hello wor") == ["Hello wor"]
    assert stream.feed("ld, a <b> ") == ["ld, a <b>"]
    assert stream.feed("[link](x)") == [" [link](x)"]
    assert stream.feed("<tool_") == []
    assert stream.feed("box>") == ["<tool_box>"]


# ------------------------------------------------------------------------------------------- valid calls round trip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
NAMES = st.from_regex(r"[a-z]{1,6}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


def as_python(name: str, arguments: dict[str, Any]) -> str:
    return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


WRITERS: dict[str, Any] = {
    "llama": lambda name, args: json.dumps({"name": name, "parameters": args}),
    "unicode": lambda name, args: json.dumps({"name": name, "arguments": args}, ensure_ascii=False, indent=1),
    "hermes": lambda name, args: f"<tool_call>\n{json.dumps({'name': name, 'arguments': args})}\n</tool_call>",
    "mistral": lambda name, args: f"[TOOL_CALLS]{name}{json.dumps(args)}",
    "mistral v11": lambda name, args: f"[TOOL_CALLS]{name}[CALL_ID]a1[ARGS]{json.dumps(args)}",
    "block": lambda name, args: f"```json\n{json.dumps({'name': name, 'arguments': args}, indent=2)}\n```",
    "granite": lambda name, args: f"<|tool_call|>{json.dumps([{'arguments': args, 'name': name}])}",
    "llama 3.1": lambda name, args: f"<function={name}>{json.dumps(args, ensure_ascii=False)}</function>",
    "deepseek": lambda name, args: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(args)}\n```<｜tool▁call▁end｜>",
    "python": as_python,
}  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(arguments=ARGUMENTS)
@pytest.mark.parametrize("writer", WRITERS)
def test_every_value_comes_back(writer: str, arguments: dict[str, Any]) -> None:
    assert parsed(WRITERS[writer]("get_weather", arguments)) == ("", [("get_weather", arguments)])


def test_calls_are_messages() -> None:
    text = 'Hm <tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x"}</tool_call>'
    content, calls = parse_tool_calls(text, TOOLS)
    assert calls == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "id": "x"}]
    (message,) = check_messages([{"role": "assistant", "content": content, "tool_calls": calls}])
    assert message["tool_calls"] == calls
    with pytest.raises(UsageError, match="must have a function with a name"):
        ToolCallStream([{"function": "f"}])


# ------------------------------------------------------------------------------------------------------ huge texts
HUGE = [
    "[" * 8_000, "<tool_call>" * 800, "  <" * 2_400, '{"name": "f", "parameters": {"a": "' + "x" * 8_000,
    '{"name": "f", "parameters": {}}' * 240, "[f(a=" + "[" * 8_000, '<tool_call>{"a": "' * 400, "```json" * 1_200, '{"a",' + '"name":"f",' * 800, '```json{"name":"f",' + "{" * 8_000,
]  # fmt: skip


@pytest.mark.parametrize("text", HUGE, ids=[text[:12] for text in HUGE])
def test_huge_texts_take_linear_time(text: str) -> None:
    def seconds(text: str) -> float:
        start = time.process_time()
        streamed(list(text))
        return time.process_time() - start

    assert seconds(text) < 0.5 + 12 * seconds(text[: len(text) // 4])  # 16 times if quadratic


# ------------------------------------------------------------------------------------------------- control tokens
def with_tokens(*named: str) -> Tokenizer:
    """A vocabulary with these tokens last. <tool_call> is user-defined, so it has text."""
    vocabulary = tiny.byte_vocabulary()
    vocabulary["tokenizer.ggml.tokens"] += named
    vocabulary["tokenizer.ggml.token_type"] += [4 if name == "<tool_call>" else 3 for name in named]
    return from_metadata(vocabulary, "tiny")


def test_marks_are_the_control_tokens_without_text() -> None:
    names = ["<|python_tag|>", "[TOOL_CALLS]", "<tool_call>", "<|eom_id|>"]
    tokenizer = with_tokens(*names)
    ids = [tokenizer.control.get(name, tokenizer.n_vocab - 2) for name in names]
    assert call_marks(tokenizer) == {ids[0]: "<|python_tag|>", ids[1]: "[TOOL_CALLS]"}
    assert [tokenizer.decode([id]) for id in ids] == ["", "", "<tool_call>", ""]
    assert ids[3] in tokenizer.stop_ids


# ------------------------------------------------------------------------------------------- functions as tools
class Color(Enum):
    RED, BLUE, NONE = "red", 2, None


class Empty(Enum):
    pass


class Weather:
    """A forecast."""

    def method(self, city: str, days: int = 1) -> None:
        """Forecast the weather,
        roughly.

        A second paragraph.

        Args:
            city (str): the city: its name,
                or a part of it
            days:
                how many, unit: days

        Returns:
            city: nothing
        """

    @classmethod
    def of_class(cls, *, city: str | None) -> None:
        """Forecast.

        Args:
            city: its name
        """


@dataclass
class Point:
    """A point.
    Args:
    x: not indented
    y: nor is this,
    which goes on
    """

    x: int
    y: float = 0.0


def typed(hint: Any) -> Callable[..., None]:
    def function(x: Any) -> None:
        """Do something.

        Args:
            x: a value
        """

    function.__annotations__["x"] = hint
    return function


def variadic(city: str, *cities: str, **more: int) -> None:
    """Forecast.

    Args:
        city: its name
        *cities: more names
        **more: more numbers
    """


HINTS: list[Any] = [
    str, int, float, bool, list, dict, tuple, Any, None, list[int], list[list[str]], dict[str, list[float]],
    tuple[int, str], Union[int, None], Union[int, str], int | list | None, list[int] | str | None, list | dict,  # noqa: UP007
    Literal["a", "b"], Literal[None, 1], Literal[1, "a", True], Literal["a"] | None, list[Color], Color | None,
]  # fmt: skip


@pytest.mark.parametrize("function", [*map(typed, HINTS), Weather.method, Weather().method, Weather.of_class, Point])
def test_the_schema_of_a_function_is_that_of_transformers(function: Callable[..., Any]) -> None:
    expected = get_json_schema(function)["function"]
    expected.pop("return", None)
    expected["parameters"] = {"required": [], **expected["parameters"], "additionalProperties": False}
    assert schema_of(function)["function"] == expected


def test_a_schema_has_what_can_be_passed_by_name() -> None:
    city = {"type": "string", "description": "its name"}
    assert schema_of(variadic)["function"]["parameters"]["properties"] == {"city": city}
    wrong: list[Callable[..., Any]] = [partial(variadic), Weather(), typed("Unknown")]  # type: ignore[list-item]
    wrong += map(typed, (bytes, Point, Empty, [int], tuple[int, ...], Sequence[int], Literal[b"x"], list[set]))
    for function in wrong:
        with pytest.raises(UsageError, match=r"has no JSON schema.*pass"):
            schema_of(function)
