"""Chat templates: their text is that of transformers, only the template itself writes control tokens; messages."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from llama.chat import TEMPLATES, check_messages, encode_chat, render, tool_calls
from llama.errors import ContextLengthError, TemplateError, TokenizerError, UsageError
from llama.text import LONGEST_TOKEN, Llama
from llama.tokenizer import Named, Tokenizer, open_tokenizer
from llama.tokenizer.common import BYTE_OF
from llama.tokenizer.gguf import from_metadata
from llama.tokenizer.sentencepiece import SentencePieceModelTokenizer

from . import tiny
from .test_tokenizer import transformers_llama
from .test_tokenizer_files import LIBRARY, MODEL

NOW = datetime.datetime(2024, 7, 26)
THOUGHTS = (  # as Qwen 3 and SmolLM 3 search messages
    "{% for m in messages %}{% set c = m.content %}<|start_header_id|>{{ m.role }}\n{% if '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip() %}{% endif %}{{ c }}<|eot_id|>{% endfor %}"
    "{% if '/no_think' in messages[0].content %}<think></think>{% endif %}<|end_header_id|>"
)
EVERYTHING = (
    "<|eot_id|>{%- set messages = messages[1:] %}{# and tool_calls #}\n    {{- messages | tojson }}"
    "{{ tools | tojson(ensure_ascii=true, indent=2) }}{{ messages }}{{ bos_token }}"
)
GLUED = (  # puts all strings directly next to each other
    "{% for m in messages %}{{ m.name or '' }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %}{{ k }}{{ v }}{% endfor %}{% endfor %}{% endfor %}{{ eos_token }}"
)
MEASURED = (  # measures, cuts and changes the texts
    "{% for m in messages %}{{ m.content[:12] }}{{ m.content | length }}{{ m.content | upper }}{{ m.content | last }}"
    "{{ m.content | reverse }}<|eot_id|>{% endfor %}"
)
BRANCHES = (
    "{% for t in tools or [] if t.type == 'function' and 'name' in t.function %}<|start_header_id|>{{ t.function.name }}"
    "{% for p in t.function.parameters.properties.values() if p.type in ['string'] %}"
    "{{ {'string': '<|eot_id|>'}[p['type']] }}{% endfor %}{% if t.type != 'function' %}<|image|>{% endif %}{% endfor %}"
    "{% generation %}{{ messages[0].content }}{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}"
)
SOURCES = {
    "chatml": tiny.CHATML, "thoughts": THOUGHTS, "everything": EVERYTHING, "glued": GLUED,
    "measured": MEASURED, "branches": BRANCHES, "llama3": TEMPLATES["llama3"],
}  # fmt: skip


def byte_level(*controls: str) -> Tokenizer:
    """A byte-level vocabulary with these control strings; the first two are begin and end of text."""
    metadata = tiny.byte_vocabulary()
    plain = metadata["tokenizer.ggml.tokens"][3:]
    metadata["tokenizer.ggml.tokens"] = [*controls, *plain]
    metadata["tokenizer.ggml.token_type"] = [3] * len(controls) + [1] * len(plain)
    metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"] = 0, 1
    return from_metadata(metadata, "tiny")


NAMES = [
    "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<|im_end|>",
    "<think>", "</think>", "[INST]", "<s>", "<|python_tag|>", "<|eom_id|>",
]  # fmt: skip
TOKENIZER = byte_level(*NAMES, "§§", "")


def spell(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[str]]:
    """Ids as text with control tokens by name, and these names."""
    name = {id: text for text, id in tokenizer.control.items()}
    parts: list[str] = []
    text: list[int] = []
    for id in [*ids, None]:
        if id is None or id in name:
            parts += [tokenizer.decode(text), "" if id is None else name[id]]
            text = []
        else:
            text.append(id)
    return "".join(parts), [name[id] for id in ids if id in name]


def encoded(template: str, content: str) -> tuple[str, list[str]]:
    return spell(TOKENIZER, encode_chat(TOKENIZER, template, [{"role": "user", "content": content}], now=NOW))


# ---------------------------------------------------------------------------------------------------- text and control
FILLERS = ["", " ", "\n", "x", "ü 日本", "<", "|>", "~", "X", "/no_think", "'\"\\", "\ufdd0", "\U00020000", "\x1f"]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*NAMES, *FILLERS]),
        st.builds(lambda name, at: name[:at], st.sampled_from(NAMES), st.integers(1, 12)),
        st.builds(lambda name, at: name[at:], st.sampled_from(NAMES), st.integers(1, 12)),
    ),
    max_size=4,
).map("".join)


def dialog(texts: Sequence[str], calls: bool = True) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Texts in every field that a user controls: contents, a tool's name and id, a call's name, its keys and values."""
    a, b, c, d = texts
    function = {"name": c, "arguments": {d: a, "x": b, b: {c: [d]}}}
    messages = [
        {"role": "user", "content": a},
        {"role": "assistant", "tool_calls": [{"type": "function", "id": d, "function": function}], "content": b},
        {"role": "tool", "content": c, "tool_call_id": a, "name": d},
        {"role": "user", "content": d},
    ]
    messages = [message for message in messages if calls or "tool_calls" not in message]
    parameters = {"type": "object", "properties": {d: {"type": "string"}, "y": {"type": a}}}
    return messages, [{"type": "function", "function": {"name": a, "description": b, "parameters": parameters}}, {c: d}]


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=25)
@given(texts=st.tuples(TEXTS, TEXTS, TEXTS, TEXTS), with_tools=st.booleans())
def test_the_text_is_that_of_transformers_and_its_control_tokens_those_of_harmless_messages(
    name: str, texts: tuple[str, ...], with_tools: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template, tools = SOURCES[name], None
    calls = "tool_calls" in template  # otherwise transformers leaves them out
    messages, schemas = dialog(texts, calls)
    if with_tools and calls and "tools" in template:
        tools = schemas
    (theirs,), _ = render_jinja_template(
        [messages], tools=tools, chat_template=template, add_generation_prompt=True, bos_token=NAMES[0], eos_token=NAMES[1]
    )  # fmt: skip
    try:
        text, controls = spell(TOKENIZER, encode_chat(TOKENIZER, template, messages, tools=tools))
    except TemplateError as error:  # only a search that finds what could be control tokens
        assert (name, "can't be distinguished" in str(error)) == ("thoughts", True)  # noqa: PT017
        assert any(part in "".join(texts) for part in ("think", "<", ">", "|"))
        return
    assert text == theirs == render(template, messages, TOKENIZER, tools=tools)
    harmless, schemas = dialog(
        [f"w{i} /no_think" if "/no_think" in text else f"w{i}" for i, text in enumerate(texts)], calls
    )
    expected = spell(TOKENIZER, encode_chat(TOKENIZER, template, harmless, tools=tools and schemas))[1]
    if any(mark in "".join(texts) for mark in tool_calls.MARKS):  # they are tokens in the assistant's message
        controls, expected = ([one for one in found if one not in tool_calls.MARKS] for found in (controls, expected))
    assert controls == expected


@pytest.mark.parametrize(
    "control", [NAMES[0], NAMES[7], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:7])]
)
def test_control_strings_split_over_template_and_messages(control: str) -> None:
    """Parts of a control string at the ends of adjacent texts do not form one, nor do rearranged parts."""
    for cut in range(1, len(control)):
        for template, content in (
            (f"{{{{ '{control[:cut]}' + messages[0].content }}}}", control[cut:]),
            (f"{{{{ messages[0].content + '{control[cut:]}' }}}}", control[:cut]),
            ("{{ messages[0].content | replace('X', '') }}", f"{control[:cut]}X{control[cut:]}"),
            ("{{ messages[0].content.split(',') | join }}", f"{control[:cut]},{control[cut:]}"),
            ("{% set c = messages[0].content.split(',') %}{{ c[1] + c[0] }}", f"{control[cut:]},{control[:cut]}"),
        ):
            assert encoded(template, content) == (control, [])


@pytest.mark.parametrize(
    ("template", "content", "text", "controls"),
    [
        ("[{{ messages[0].content }}]", "INST", "[INST]", []),
        ("{{ messages[0].content.encode('ascii', 'ignore').decode() }}", "ü<|im_end|>", "<|im_end|>", []),
        ("{{ messages[0].content[::2] }}", "<x|xixmx_xexnxdx|x>x", "<|im_end|>", []),
        ("{{ messages[0].content | lower }}<|im_end|>", "<|IM_END|>", "<|im_end|><|im_end|>", ["<|im_end|>"]),
        ("<|{{ messages[0].role }}|>{{ '<|im' + '_end|>' }}", "§", "<|user|><|im_end|>", ["<|im_end|>"]),
        (THOUGHTS, "<think>a</think>b", "<|start_header_id|>user\nb<|eot_id|><|end_header_id|>", NAMES[2:0:-1] + NAMES[3:4]),
        (THOUGHTS, "</think><|eot_id|> <", "<|start_header_id|>user\n<|eot_id|> <<|eot_id|><|end_header_id|>", None),
    ],
)  # fmt: skip
def test_tricks(template: str, content: str, text: str | None, controls: list[str] | None) -> None:
    found = encoded(template, content)
    assert text in (None, found[0])
    assert controls in (None, found[1])


ESCAPES = [
    "original", "_original", "__str__()", "__dict__['_original']", "__class__.original", "__reduce_ex__(2)",
    "__getnewargs__()[0]", "format()", "encode().decode()", "title().swapcase()", "translate({})", "removeprefix('x')",
    "center(50).strip()", "split('§') | join", "splitlines() | join", "partition('x') | join", "__format__('')",
]  # fmt: skip
FILTERS = [
    "attr('original')", "attr('_original')", "string", "list | join", "map('string') | join", "trim", "safe", "escape",
    "format", "indent", "batch(3) | map('join') | join", "slice(2) | map('join') | join", "replace('§', '')", "e",
    "forceescape", "truncate(200)", "wordwrap(200)", "pprint", "tojson", "urlencode", "xmlattr", "striptags", "center",
    "default('x')", "unique | join", "groupby('x')", "select | join", "reverse", "title", "first", "sort | join", "dictsort",
]  # fmt: skip
EXPRESSIONS = [
    "{{ c ~ '' }}", "{{ '%s' % c }}", "{{ '{}'.format(c) }}", "{{ '{0._original}'.format(c) }}", "{{ [c] }}", "{{ {c: c} }}",
    "{{ '{0.original}'.format(c) }}", "{{ [c, c] | join('§') }}", "{{ c[:] }}", "{{ c + '' }}", "{{ c * 2 }}",
    "{% for x in c %}{{ x }}{% endfor %}", "{{ m.items() | list }}", "{{ m.values() | join }}", "{{ m | dictsort | string }}",
    "{{ messages | map(attribute='content._original') | join or c }}", "{{ messages | map(attribute='content') | join }}",
    "{{ messages | map(attribute='content.original') | join or c }}", "{{ '{0[content].original}'.format(m) }}",
    "{{ messages | sum(attribute='content', start='') }}", "{{ m | tojson(indent=1) }}", "{{ (c, 1) | tojson }}",
    "{% set ns = namespace(x=c) %}{{ ns.x }}", "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(c) }}", "{% filter upper %}{{ c }}{% endfilter %}",
    "{{ dict(a=c).a }}", "{{ cycler(c, c).next() }}", "{{ joiner(c)() }}{{ (joiner(c)) }}", "{{ c is eq c }}{{ c }}", "{{ {c: 1} | first }}",
    "{{ strftime_now(c) }}", "{{ raise_exception(c) }}", "{{ c.__eq__.__self__ }}", "{{ c.__class__('x') }}", "{{ self }}{{ c }}",
]  # fmt: skip


@pytest.mark.parametrize(
    "source",
    [
        *(f"{{{{ c.{one} or c }}}}" for one in ESCAPES),
        *(f"{{{{ (c | {one}) or c }}}}" for one in FILTERS),
        *EXPRESSIONS,
    ],
)
def test_no_expression_of_a_template_reaches_the_text_behind_the_stand_ins(source: str) -> None:
    for role in ("user", "assistant"):
        messages = [{"role": role, "content": "".join(NAMES[:6])}]
        try:
            ids = encode_chat(TOKENIZER, "{% set m = messages[0] %}{% set c = m.content %}" + source, messages)
        except TemplateError:
            continue
        assert not set(ids) & set(TOKENIZER.control.values())


def test_a_template_that_moves_texts_does_not_move_control_tokens() -> None:
    """The renderings may differ in order, but text in the place of a control string never becomes a control token."""
    first, second, end = "<<<<|eot_id|>__", "|||", "<|eot_id|>"
    joined = [*TOKENIZER.encode(first), 1, *TOKENIZER.encode(second), 1]
    messages = [{"role": "user", "content": text} for text in (second, first)]
    for texts in (
        "messages | map(attribute='content') | sort", "[messages[0].content[:], messages[1].content[:]] | sort",
        "{messages[0].content: 0, messages[1].content: 0} | dictsort | map(attribute=0)",
    ):  # fmt: skip
        assert encode_chat(TOKENIZER, f"{{% for c in {texts} %}}{{{{ c }}}}{end}{{% endfor %}}", messages) == joined
    searched = (
        "{% set c = messages[0].content %}{% if 'a' in c %}x<|eot_id|>{{ c }}{% else %}{{ c }}x<|eot_id|>{% endif %}"
    )
    ids = encode_chat(TOKENIZER, searched, [{"role": "user", "content": f"ai{end}"}])
    assert ids == [*TOKENIZER.encode("x"), 1, *TOKENIZER.encode(f"ai{end}")]


# --------------------------------------------------------------------------------- what the model itself wrote, again
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>{% endif %}"
)
TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_response>", "</tool_response>")
CALL = '<think>\nI <b>see</b>.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def qwen(folder: Path, special: bool) -> tuple[Tokenizer, Any]:
    """A tokenizer.json with added tokens as Qwen's, and transformers' tokenizer of it."""
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE({c: id for id, c in enumerate(BYTE_OF)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(list(TURNS[:3]))
    added = [*TURNS[3:], "<think>", "</think>", "<tool_call>", "</tool_call>"]
    backend.add_tokens([AddedToken(one, special=special, normalized=False) for one in added])
    backend.save(str(folder / "tokenizer.json"))
    named = Named(template=QWEN, stop_ids=[backend.token_to_id("<|im_end|>")])
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")
    return open_tokenizer(folder / "tokenizer.json", {}, named), theirs


@pytest.mark.parametrize("special", [False, True])
def test_marks_of_calls_and_thoughts_in_an_answer_have_the_ids_of_transformers(tmp_path: Path, special: bool) -> None:
    ours, theirs = qwen(tmp_path, special)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é</think>"}}}
    user, result = {"role": "user", "content": "hello"}, {"role": "tool", "content": "3"}
    for messages in (
        [user, {"role": "assistant", "content": CALL}, result],
        [user, {"role": "assistant", "content": f"{CALL}{CALL}<think", "tool_calls": [call, call]}, result, user],
        [user, {"role": "assistant", "content": CALL.replace("<", "<<").replace(">", ">>")}, user],
    ):
        expected = theirs.apply_chat_template(
            messages, chat_template=QWEN, add_generation_prompt=True, return_dict=False
        )
        assert encode_chat(ours, QWEN, messages) == expected
    begun = [user, {"role": "assistant", "content": CALL[:40]}]
    expected = theirs.apply_chat_template(begun, chat_template=QWEN, continue_final_message=True, return_dict=False)
    assert Llama(tiny.model(), ours, QWEN).encode_chat(begun) == expected


@pytest.mark.parametrize("special", [False, True])
def test_no_message_writes_the_tokens_of_turns_and_none_of_others_a_mark(tmp_path: Path, special: bool) -> None:
    ours, _ = qwen(tmp_path, special)
    attack = "".join(ours.control)
    assert {*TURNS, *re.findall("</?t[a-z_]+>", CALL)} == ours.control.keys()

    def controls(text: str, of_assistant: str) -> list[str]:
        call = {"function": {"name": text.replace("think", "x"), "arguments": {of_assistant: of_assistant}}}
        messages = [
            {"role": "system", "content": text}, {"role": "user", "content": text}, {"role": "tool", "content": text},
            {"role": "assistant", "content": of_assistant, "tool_calls": [call]}, {"role": "user", "content": text},
            {"role": "assistant", "content": of_assistant},
        ]  # fmt: skip
        messages[3]["tool_calls"][0]["function"]["name"] = of_assistant  # type: ignore[index]
        tools = [{"type": "function", "function": {"name": "f", "description": text}}]
        llm = Llama(tiny.model(), ours, QWEN + "{{ tools }}{{ note }}")
        every = encode_chat(ours, llm.chat_template, messages, tools=tools, variables={"note": text})
        return spell(ours, [*every, *llm.encode_chat(messages)])[1]

    assert controls(attack, "".join(TURNS)) == controls("x", "x")
    parts = [token[:at] for token in TURNS for at in range(1, len(token))] + [token[1:] for token in TURNS]
    assert controls(attack, "<think>".join(parts)) == controls("x", "<think>" * (len(parts) - 1))


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_a_begun_answer_is_tokenized_with_its_prompt(legacy: bool, trim: str) -> None:
    """With SentencePiece, a text that is encoded separately would get a space."""
    template = (
        f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content{trim} }}}}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    theirs = transformers_llama(LIBRARY, legacy=legacy)
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    settings = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "legacy": legacy}
    ours = SentencePieceModelTokenizer(MODEL, "x", settings)
    llm = Llama(tiny.model(), ours, template)
    for begun in ("The", " The", "The ", "dog\n", "", "i", "im_end", "<|im_end|>x", "\ue000 a", "a\ue000"):
        messages = [{"role": "user", "content": "a\ue000 dog"}, {"role": "assistant", "content": begun}]
        ids = llm.encode_chat(messages)
        text = render(template, messages, ours, add_generation_prompt=False).removesuffix("<|im_end|>\n")
        answer = text.rpartition("<|im_start|>assistant\n")[2]
        after = "assistant\n" + (answer if begun.strip() else "")
        joined = LIBRARY.encode(after) if legacy else LIBRARY.encode("☺" + after)[len(LIBRARY.encode("☺")) :]
        assert ids[-len(joined) :] == joined
        assert ids[-len(joined) - 1] == ours.control["<|im_start|>"]
        assert ours.decode(ids).replace(" ", "").endswith("assistant\n" + answer.replace(" ", ""))
        if not legacy and "<" not in begun and (begun or not trim):  # transformers also strips the line break before it
            expected = theirs.apply_chat_template(
                messages, chat_template=template, continue_final_message=True, return_dict=False
            )
            assert ids == expected


@pytest.mark.parametrize("value", [object(), {1, 2}, {(1,): 2}, b"a"])
def test_variables_of_a_template_must_be_json(value: Any) -> None:
    with pytest.raises(UsageError, match="must be JSON-serializable"):
        render("{{ x }}", [{"role": "user", "content": "a"}], TOKENIZER, variables={"x": value})


def test_a_template_that_drops_the_last_message_can_not_continue_it() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(TemplateError, match="does not write the last message"):
        Llama(tiny.model(), TOKENIZER, "{{ messages[0].content }}").encode_chat(messages)


def test_what_can_not_be_told_apart_is_refused() -> None:
    template = "{% for c in messages[0].content if c.isalnum() or c in '<>|_ ' %}{{ c }}{% endfor %}"
    with pytest.raises(TemplateError, match=r"can't be distinguished from text: <\|im_end\|>; remove"):
        encoded(template, "a<|im_end|>")
    assert encoded(template, "a")[1] == []


def test_the_environment_is_that_of_transformers() -> None:
    template = "{{ strftime_now('%Y') }}{{ {'é<': 1} | tojson }}{{ tools is none and documents is none }}"
    assert render(template, [], TOKENIZER, now=NOW) == '2024{"é<": 1}True'
    assert render("{{ add_generation_prompt }}", [], TOKENIZER, add_generation_prompt=False) == "False"


# ------------------------------------------------------------------------------------------------------ which template
def test_a_template_is_chosen_by_the_request() -> None:
    messages, tools = [{"role": "user", "content": "x"}], [{"name": "f"}]
    both = {"default": "d{{ tools }}", "tool_use": "t{{ tools[0].name }}"}

    def text(template: Any, tools: Any) -> str:
        return TOKENIZER.decode(encode_chat(TOKENIZER, template, messages, tools=tools))

    assert (text(both, tools), text(both, None), text(both, [])) == ("tf", "dNone", "d[]")
    assert text({"default": "{{ tools[0].name }}"}, tools) == "f"
    with pytest.raises(TemplateError, match="tool_use, rag"):
        text({"tool_use": "x", "rag": "y"}, None)
    with pytest.raises(TemplateError, match=r"--raw.*--chat-format llama3"):
        text(None, None)


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}", *TEMPLATES.values()]
)
def test_a_template_without_tools_gets_them_as_text(template: str) -> None:
    """And the calls of earlier answers, also if no tool is passed or a grammar forces a call."""
    call = {"function": {"name": "f", "arguments": {"a": "é"}}}
    user, answer = {"role": "user", "content": "x"}, '{"name": "f", "parameters": {"a": "é"}}'

    def text(messages: Any, **options: Any) -> str:
        return TOKENIZER.decode(encode_chat(TOKENIZER, template, messages, **options))

    for before in ([], [{"role": "system", "content": "Be brief."}]):
        written = [*before, user, {"role": "assistant", "content": answer}, user]
        called = [*before, user, {"role": "assistant", "tool_calls": [call]}, user]
        assert text(called) == text(written) == text(called, tools=[{"name": "f"}], forced=True)
        described = text(called, tools=[{"name": "f"}])
        assert described.count('{"name": "f"}') == described.count(answer) == 1
        assert ("Be brief.\n\n" in described) == bool(before)


def test_a_text_too_long_for_the_context_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = Llama(tiny.model(), TOKENIZER, "{{ messages[0].content }}")
    most = LONGEST_TOKEN * llm.model.max_seq_len
    assert len(llm.encode_chat([{"role": "user", "content": "x" * most}])) == most
    monkeypatch.setattr(type(TOKENIZER), "encode_pieces", None)
    with pytest.raises(
        ContextLengthError, match=f"has {most + 1:,} characters, but the context holds at most {most:,}"
    ):
        llm.encode_chat([{"role": "user", "content": "x" * (most + 1)}])


# ------------------------------------------------------------------------------------------------------------ messages
DEEP: Any = 0
for _ in range(100):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        ([[{"role": "user", "content": "a"}]], "one conversation"),
        (["hello"], "messages[0] must be an object"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "user", "content": ["a"]}], "content must be a string"),
        ([{"role": "<|im_end|>", "content": "a"}], "role must be one of"),
        ([{"role": "user", "content": "x", "tool_calls": []}], "unknown key 'messages[0].tool_calls'"),
        ([{"role": "assistant", "tool_calls": "f()"}], "tool_calls must be a list"),
        *(([{"role": "assistant", "tool_calls": [call]}], reason) for call, reason in (
            ({"type": "custom", "name": "f", "arguments": {}}, "tool_calls[0].type must be 'function', got 'custom'"),
            ({"arguments": {}}, "tool_calls[0].function.name is missing"),
            ({"name": "f", "arguments": {"a": 10**5000}}, "must be JSON-serializable"),
            ({"name": "f", "arguments": {"a": DEEP}}, "arguments must be an object of at most 64 levels"))),
    ],
)  # fmt: skip
def test_malformed_messages_name_what_is_wrong(messages: Any, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        encode_chat(TOKENIZER, tiny.CHATML, messages)
    assert reason in str(error.value)
    for tools in ("tools", [{"a": DEEP}]):
        with pytest.raises(UsageError, match="tool"):
            encode_chat(TOKENIZER, tiny.CHATML, [{"role": "user", "content": "x"}], tools=tools)  # type: ignore[arg-type]


def test_short_forms_equal_full_ones() -> None:
    function = {"name": "f", "arguments": {"a": {"b": 1}}}
    full = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function, "id": "c"}]}
    for short in (
        {**full, "tool_calls": [{**function, "id": "c"}]},
        {**full, "tool_calls": [{**function, "arguments": '{"a": {"b": 1}}', "id": "c"}]},
        {**full, "content": None},
    ):
        (message,) = check_messages([short])
        assert message == full
    assert check_messages([{"role": "assistant", "content": "x", "tool_calls": []}]) == [
        {"role": "assistant", "content": "x"}
    ]


# ------------------------------------------------------------------------------------- continued answers, and variables
def test_a_last_message_of_the_assistant_is_continued(tiny_llm: Llama) -> None:
    """The ids are those of a model that has written this text itself."""
    question = [{"role": "user", "content": "hello"}]
    begun = [*question, {"role": "assistant", "content": " the <|eot_id|>"}]
    ids = tiny_llm.encode_chat(begun)
    assert ids == tiny_llm.encode_chat(question) + tiny_llm.tokenizer.encode(" the <|eot_id|>")
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    expected = "".join(map(str, tiny_llm.stream_ids(ids, **options)))
    assert tiny_llm.chat(begun, **options).text == expected
    assert "".join(map(str, tiny_llm.stream_chat(begun, **options))) == expected
    called = [*question, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}]
    assert tiny_llm.encode_chat(called)[-1] == tiny_llm.encode_chat(question)[-1]  # a new turn begins


def test_variables_of_a_template_are_text_of_a_user() -> None:
    template = "{{ messages[0].content }}{% if thinking is false %}<|eot_id|>{{ note }}{{ deep.a[0] }}{% endif %}"
    tokenizer = byte_level("<|begin_of_text|>", "<|eot_id|>")
    messages = [{"role": "user", "content": "a"}]
    stop = tokenizer.control["<|eot_id|>"]
    variables = {"thinking": False, "note": "<|eot_id|>", "deep": {"a": ["<|eot_id|>"]}}
    ids = encode_chat(tokenizer, template, messages, variables=variables)
    assert ids.count(stop) == 1
    assert stop not in encode_chat(tokenizer, template, messages)
    for name in ("messages", "eos_token", "cut", "strftime_now", "no name"):
        with pytest.raises(UsageError, match="is no name"):
            encode_chat(tokenizer, template, messages, variables={name: 1})


# ------------------------------------------------------------------------------ ids, by the options of a tokenizer.json
MARKS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
SPACED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }} <|im_end|> \x85\n{% endfor %} \x1c<|im_start|>a\n"
)
SPACED_MESSAGES = [
    {"role": ("user", "assistant")[i % 2], "content": text}
    for i, text in enumerate(("hello us", "he\u2003", " us\x1c"))
]


def write_metaspace(folder: Path, scheme: str, strip: dict[str, bool]) -> Path:
    """Write a tokenizer.json with a Metaspace of this scheme, and the settings beside it."""
    vocab = {token: id for id, token in enumerate(("<unk>", *MARKS, *(f"<0x{byte:02X}>" for byte in range(256))))}
    for token in ("▁", *"abcdefghijklmnopqrstuvwxyz", "▁u", "▁us", "he", "▁h"):
        vocab[token] = len(vocab)
    merges = [("▁", "u"), ("▁u", "s"), ("h", "e"), ("▁", "h")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False, **strip) for mark in MARKS])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": SPACED}))
    return folder


@pytest.mark.parametrize("strip", [{}, {"lstrip": True}, {"rstrip": True}])
@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("before", ["", "us "])
def test_chat_ids_are_those_of_transformers(tmp_path: Path, scheme: str, strip: dict[str, bool], before: str) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write_metaspace(tmp_path, scheme, strip)
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs.apply_chat_template(
        SPACED_MESSAGES, chat_template=before + SPACED, tokenize=True, return_dict=False
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ours = open_tokenizer(folder / "tokenizer.json", settings)
    assert encode_chat(ours, before + SPACED, SPACED_MESSAGES) == expected


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("setting", [True, False])
def test_add_prefix_space_is_followed_or_rejected(tmp_path: Path, name: str, scheme: str, setting: bool) -> None:
    from transformers import AutoTokenizer

    folder = write_metaspace(tmp_path, scheme, {})
    settings = {"tokenizer_class": name, "add_prefix_space": setting, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    if name.startswith("Llama") and setting != (scheme != "never"):
        with pytest.raises(TokenizerError, match="add_prefix_space"):
            open_tokenizer(folder / "tokenizer.json", settings)
    else:
        ours = open_tokenizer(folder / "tokenizer.json", settings)
        assert ours.encode("hello us") == theirs("hello us", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"5": {"content": "he"}}}, {"added_tokens_decoder": {"999": {"content": "new"}}},
        {"additional_special_tokens": ["new"]}, {"extra_special_tokens": {"he_token": "he"}},
    ],
)  # fmt: skip
def test_tokens_that_only_the_settings_name_have_the_ids_of_transformers(tmp_path: Path, settings: Any) -> None:
    from transformers import AutoTokenizer

    folder = write_metaspace(tmp_path, "never", {})
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    ours = open_tokenizer(folder / "tokenizer.json", settings)
    assert ours.n_vocab == len(theirs)
    for text in ("hello new us", "newhe", "<s>new", "he"):
        assert ours.encode(text, parse_special=True) == theirs(text, add_special_tokens=False)["input_ids"]
        assert not set(ours.encode(text)) & set(ours.control.values())
