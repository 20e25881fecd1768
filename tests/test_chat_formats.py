"""Built-in chat formats compared with Meta's code, tools in templates, and the law that no text becomes control."""

from __future__ import annotations

import base64
import datetime
import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from llama.chat import chat_format_of, encode_chat, render
from llama.errors import LlamaError, TemplateError, UsageError
from llama.text import Llama
from llama.tokenizer import Tokenizer
from llama.tokenizer.common import LLAMA3_WORDS
from llama.tokenizer.gguf import from_metadata

from . import tiny

# The 256 control tokens after the 128000 plain ones, with Llama 3.1's names.
LLAMA3_NAMES = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(2, 246)),
]

# A shorter equivalent of the template of Llama 3.1 Instruct.
LLAMA31 = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Today Date: ' + strftime_now('%d %b %Y') + '\n\n' + system_message + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- set first_user_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions, answer with a JSON call.\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) + '\n\n' }}{%- endfor %}
    {{- first_user_message + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('only single tool-calls') }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- '}' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""

# An equivalent of the template of Llama 2 Chat.
LLAMA2 = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{%- for message in messages %}
    {%- set content = system_message + message['content'] if loop.index0 == 0 else message['content'] %}
    {%- if message['role'] == 'user' %}{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- else %}{{- ' ' + content.strip() + ' ' + eos_token }}{%- endif %}
{%- endfor %}"""

NOW = datetime.datetime(2024, 7, 26)


def encoder(name: str) -> Callable[[Tokenizer, Sequence[Mapping[str, Any]]], list[int]]:
    return lambda tokenizer, messages: encode_chat(tokenizer, None, messages, format=name)


llama2, llama3, codellama70b = map(encoder, ("llama2", "llama3", "codellama-70b"))


def byte_level(*controls: str) -> Tokenizer:
    """A byte-level vocabulary with these control strings; the first two are begin and end of text."""
    metadata = tiny.byte_vocabulary()
    plain = metadata["tokenizer.ggml.tokens"][3:]
    metadata["tokenizer.ggml.tokens"] = [*controls, *plain]
    metadata["tokenizer.ggml.token_type"] = [3] * len(controls) + [1] * len(plain)
    metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"] = 0, 1
    return from_metadata(metadata, "tiny")


def pieces() -> Tokenizer:
    """A SentencePiece vocabulary of letters and bytes, in the order of Llama 2's: unknown, <s>, </s>, bytes, pieces."""
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyzINSTY[]/<>|_"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "\u2581h", "in"]
    return from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * 259 + [-1.0 - i for i in range(len(tokens) - 259)],
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        },
        "tiny",
    )


LLAMA3_BYTES = byte_level(*LLAMA3_NAMES)
LLAMA2_PIECES = pieces()
LLAMA2_BYTES = byte_level("<s>", "</s>")
STEP_BYTES = byte_level("<s>", "</s>", "<step>")


def spell(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Ids as text with control tokens by name; only for texts that spell no control token."""
    name = {id: text for text, id in tokenizer.control.items()}
    parts, text = [], []
    for id in [*ids, None]:
        if id is None or id in name:
            parts += [tokenizer.decode(text), name.get(id, "")]
            text = []
        else:
            text.append(id)
    return "".join(parts)


def controls(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    return [id for id in ids if id in tokenizer.control.values()]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}], **more}


# ------------------------------------------------------------------------------------------------- formats by hand
def test_llama3_by_hand() -> None:
    dialog = [{"role": "system", "content": "Be brief."}, user(" hi\n"), assistant("hello"), user("bye")]
    assert spell(LLAMA3_BYTES, llama3(LLAMA3_BYTES, dialog)) == (
        "<|begin_of_text|>"
        "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n hi\n<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nhello<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nbye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize(
    ("message", "written"),
    [
        (
            call("add", {"a": 1, "b": "ü"}),
            '{"type": "function", "name": "add", "parameters": {"a": 1, "b": "\\u00fc"}}',
        ),
        (call("add", '{"a": [1, null]}'), '{"type": "function", "name": "add", "parameters": {"a": [1, null]}}'),
        (call("brave_search", {"query": "a b"}), 'brave_search.call(query="a b")'),
        (call("wolfram_alpha", '{"query": "2^10"}'), 'wolfram_alpha.call(query="2^10")'),
        (call("code_interpreter", {"code": "print(1)\n"}), "<|python_tag|>print(1)\n"),
        (call("f", {}, content="So: "), 'So: {"type": "function", "name": "f", "parameters": {}}'),
        (assistant("wait"), "wait"),
    ],
)
@pytest.mark.parametrize("continues", [False, True])
def test_llama3_writes_tool_calls_and_the_end_of_a_message(message: dict, written: str, continues: bool) -> None:
    spelled = spell(LLAMA3_BYTES, llama3(LLAMA3_BYTES, [user("x"), {**message, "continues": continues}]))
    end = "<|eom_id|>" if continues else "<|eot_id|>"
    assert f"<|start_header_id|>assistant<|end_header_id|>\n\n{written}{end}<|start_header_id|>" in spelled


@pytest.mark.parametrize("role", ["tool", "ipython"])
def test_llama3_writes_a_tools_answer_as_ipython(role: str) -> None:
    dialog = [user("x"), {"role": role, "content": "[1]", "tool_call_id": "c1", "name": "f"}]
    expected = "<|start_header_id|>ipython<|end_header_id|>\n\n[1]<|eot_id|>"
    assert expected in spell(LLAMA3_BYTES, llama3(LLAMA3_BYTES, dialog))


def test_a_bare_call_equals_a_full_one() -> None:
    bare = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
    full = {**call("f", '{"a": 1}'), "content": ""}
    assert llama3(LLAMA3_BYTES, [user("x"), bare]) == llama3(LLAMA3_BYTES, [user("x"), full])


def test_llama2_by_hand() -> None:
    dialog = [{"role": "system", "content": "Be brief."}, user("hi "), assistant(" hello"), user("\nbye")]
    assert spell(LLAMA2_BYTES, llama2(LLAMA2_BYTES, dialog)) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nhi [/INST] hello </s><s>[INST] bye [/INST]"
    )


@pytest.mark.parametrize("tokenizer", [LLAMA2_PIECES, LLAMA2_BYTES], ids=["pieces", "bytes"])
def test_llama2_equals_the_published_template(tokenizer: Tokenizer) -> None:
    dialogs: list[list[dict[str, str]]] = [
        [user("hi")],
        [{"role": "system", "content": " be brief\n"}, user("  hi\n"), assistant(" a\n"), user("</s> <s>")],
        [user("ü"), assistant(""), user(""), assistant("in the end"), user("x")],
    ]
    for dialog in dialogs:
        assert llama2(tokenizer, dialog) == encode_chat(tokenizer, LLAMA2, dialog)


@pytest.mark.parametrize("tag", ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"])
@pytest.mark.parametrize("where", range(4))
def test_llama2_rejects_texts_that_contain_a_tag(tag: str, where: int) -> None:
    dialog = [{"role": "system", "content": "s"}, user("u"), assistant("a"), user("u")]
    dialog[where]["content"] += f" x{tag}"
    with pytest.raises(UsageError) as error:
        llama2(LLAMA2_PIECES, dialog)
    assert f"message {where} contains {tag}" in str(error.value)


def test_codellama70b_by_hand() -> None:
    """The turns of dialog_prompt_tokens in meta-llama/codellama, which adds a missing system message."""
    assert spell(STEP_BYTES, codellama70b(STEP_BYTES, [user(" hi ")])) == (
        "<s> Source: system<step> Source: user\n\n hi<step> Source: assistant\nDestination: user\n\n "
    )
    dialog = [{"role": "system", "content": "Be brief."}, user("hi"), assistant("hello\n"), user("bye")]
    assert spell(STEP_BYTES, codellama70b(STEP_BYTES, dialog)) == (
        "<s> Source: system\n\n Be brief.<step> Source: user\n\n hi<step>"
        " Source: assistant\nDestination: user\n\n hello<step> Source: user\n\n bye<step>"
        " Source: assistant\nDestination: user\n\n "
    )


# ------------------------------------------------------------------------------------------------------ Meta's own code
ORACLE = """
import importlib.util, json, pathlib, sys, types

files = json.loads(sys.argv[1])
image = types.ModuleType("PIL.Image")
image.Image = object
sys.modules["PIL"] = types.ModuleType("PIL")
sys.modules["PIL"].Image = image
for package in ("llama_models", "llama_models.llama3"):
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = []
for name in ("tokenizer_utils", "datatypes", "llama3.tokenizer", "llama3.tool_utils", "llama3.chat_format"):
    spec = importlib.util.spec_from_file_location("llama_models." + name, files[name])
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
chat = module.ChatFormat(sys.modules["llama_models.llama3.tokenizer"].Tokenizer(pathlib.Path(files["model"])))
dialogs = [[module.RawMessage(**message) for message in dialog] for dialog in json.load(sys.stdin)]
print(json.dumps([chat.encode_dialog_prompt(dialog).tokens for dialog in dialogs]))
"""

WHEEL = "llama-models==0.3.0"
MEMBERS = {
    "tokenizer_utils": "llama_models/tokenizer_utils.py",
    "datatypes": "llama_models/datatypes.py",
    "llama3.tokenizer": "llama_models/llama3/tokenizer.py",
    "llama3.tool_utils": "llama_models/llama3/tool_utils.py",
    "llama3.chat_format": "llama_models/llama3/chat_format.py",
    "model": "llama_models/llama3/tokenizer.model",
}


@pytest.fixture(scope="module")
def meta_files() -> dict[str, Path]:
    """Single files of Meta's package; the complete package would need its dependencies."""
    wheels = pytest.importorskip("tests.wheels", reason="tests/wheels.py fetches Meta's package")
    return {name: wheels.wheel_member(WHEEL, member) for name, member in MEMBERS.items()}


class RealLlama3(Tokenizer):
    """Llama 3's own vocabulary, run by tiktoken."""

    kind, add_bos, stop_ids = "tiktoken", True, frozenset({128001, 128008, 128009})
    n_vocab, bos_id, eos_id = 128256, 128000, 128001

    def __init__(self, path: Path):
        import tiktoken

        ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, path.read_bytes().splitlines())}
        self.control = {name: 128000 + i for i, name in enumerate(LLAMA3_NAMES)}
        self._model = tiktoken.Encoding(
            "llama3", pat_str=LLAMA3_WORDS, mergeable_ranks=ranks, special_tokens=dict(self.control)
        )

    def _encode(self, text: str) -> list[int]:
        return self._model.encode(text, allowed_special=set(), disallowed_special=())

    def token_bytes(self, id: int) -> bytes:
        return b"" if id >= 128000 else self._model.decode_single_token_bytes(id)


@pytest.fixture(scope="module")
def real(meta_files: dict[str, Path]) -> RealLlama3:
    pytest.importorskip("tiktoken")
    return RealLlama3(meta_files["model"])


def as_meta(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the fields of Meta's RawMessage."""
    calls = [c.get("function", c) for c in message.get("tool_calls", [])]
    return {
        "role": "tool" if message["role"] == "ipython" else message["role"],
        "content": message.get("content") or "",
        "stop_reason": "end_of_message" if message.get("continues") else "end_of_turn",
        "tool_calls": [{"call_id": "1", "tool_name": c["name"], "arguments": c["arguments"]} for c in calls],
    }


def random_dialogs(count: int) -> list[list[dict[str, Any]]]:
    choose = random.Random(0)
    texts = [
        "",
        " ",
        "\n\n",
        " a b ",
        "\n\nc\n",
        "zwölf 123456",
        "日本語 😀",
        "def f():\n\treturn 1",
        *LLAMA3_NAMES[:12],
    ]

    def text() -> str:
        return "".join(choose.choice(texts) for _ in range(choose.randint(0, 4)))

    def calls() -> list[dict[str, Any]]:
        name = choose.choice(["add", "<|eot_id|>", "größe", "brave_search", "wolfram_alpha", "photogen"])
        arguments = {"query": text()} if name[-1] in "han" else {text(): choose.choice([1, 2.5, True, None, text()])}
        return [{"name": name, "arguments": arguments}] * choose.randint(1, 2)

    def message() -> dict[str, Any]:
        kind = choose.choice(["system", "user", "assistant", "tool", "ipython", "call", "code"])
        if kind == "code":
            calling = [{"name": "code_interpreter", "arguments": {"code": text()}}]
            return {"role": "assistant", "tool_calls": calling, "continues": choose.random() < 0.7}
        if kind == "call":
            calling = calls()
            return {"role": "assistant", "content": text(), "tool_calls": calling, "continues": choose.random() < 0.5}
        return {"role": kind, "content": text()}

    return [[message() for _ in range(choose.randint(1, 6))] for _ in range(count)]


def test_llama3_ids_are_those_of_metas_own_code(real: RealLlama3, meta_files: dict[str, Path]) -> None:
    pytest.importorskip("pydantic", reason="Meta's messages are pydantic models")
    dialogs = random_dialogs(300)
    answer = subprocess.run(
        [sys.executable, "-c", ORACLE, json.dumps({name: str(path) for name, path in meta_files.items()})],
        input=json.dumps([[as_meta(message) for message in dialog] for dialog in dialogs]),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    for dialog, expected in zip(dialogs, json.loads(answer.stdout), strict=True):
        assert llama3(real, dialog) == expected, dialog


def test_llama3_ids_as_meta_published_them(real: RealLlama3) -> None:
    """The ids of tests/api/test_tokenizer.py in llama-models."""
    sentence = [2028, 374, 264, 1296, 11914, 13]
    header = {
        role: [128006, *ids, 128007, 271]
        for role, ids in {"user": [882], "system": [9125], "assistant": [78191], "ipython": [23799, 4690]}.items()
    }
    text = "This is a test sentence."
    dialog = [{"role": "system", "content": text}, user(text), {"role": "tool", "content": text}]
    expected = [128000]
    for role in ("system", "user", "ipython"):
        expected += [*header[role], *sentence, 128009]
    assert llama3(real, dialog) == [*expected, *header["assistant"]]


def test_llama3_by_template_and_built_in_are_equal_on_stripped_text(real: RealLlama3) -> None:
    """The template of Llama 3 Instruct, which has no tools."""
    template = (
        "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>"
        "\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{{ '<|start_header_id|>assistant"
        "<|end_header_id|>\n\n' }}"
    )
    dialog = [{"role": "system", "content": "Be brief."}, user("a <|eot_id|>"), assistant("1\n\n2"), user("ü")]
    assert llama3(real, dialog) == encode_chat(real, template, dialog)
    padded = [user("\n a ")]
    assert llama3(real, padded) != encode_chat(real, template, padded)


# ---------------------------------------------------------------------------------------------------- text never becomes control
def hostile_dialog(texts: Sequence[str], tools: bool) -> list[dict[str, Any]]:
    """Each text as a user's, an assistant's and a tool's, in every field of a call, and split over two messages."""
    dialog: list[dict[str, Any]] = [{"role": "system", "content": " ".join(texts)}]
    for text in texts:
        half = len(text) // 2
        dialog += [user(text), assistant(f"x {text} {text}{text}"), user(text[:half]), assistant(text[half:])]
        if tools:
            dialog += [call(text, {text: [text, {text: text}], "a": text[:half], "b": text[half:]})]
            dialog += [{"role": "tool", "content": text, "tool_call_id": text, "name": text}]
            dialog += [{"role": "ipython", "content": text}]
    return [*dialog, user(" ".join(texts))]


def schemas(texts: Sequence[str]) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {text: {"type": text} for text in texts}, "required": [*texts]}
    function = {"name": texts[0], "description": " ".join(texts), "parameters": parameters}
    return [{"type": "function", "function": function}, {text: text for text in texts}]


@pytest.mark.row("H05")
def test_no_text_becomes_control_in_built_in_formats() -> None:
    """All control strings of a family in every field: the control ids equal those with harmless words."""
    words = [f"word{i}" for i in range(len(LLAMA3_NAMES))]
    hostile, harmless = (llama3(LLAMA3_BYTES, hostile_dialog(texts, tools=True)) for texts in (LLAMA3_NAMES, words))
    assert controls(LLAMA3_BYTES, hostile) == controls(LLAMA3_BYTES, harmless)
    for tokenizer, encode in ((LLAMA2_PIECES, llama2), (LLAMA2_BYTES, llama2), (STEP_BYTES, codellama70b)):
        names = [*tokenizer.control, "<s>", "<step>", "\u2581<s>", *LLAMA3_NAMES[:12]]
        hostile = encode(tokenizer, hostile_dialog(names, tools=False))
        assert controls(tokenizer, hostile) == controls(
            tokenizer, encode(tokenizer, hostile_dialog(words[: len(names)], False))
        )


TOOL_TEMPLATES = {
    "llama 3.1": LLAMA31,
    "keys and values": (
        "{% for t in tools %}{% for k, v in t | items %}<|start_header_id|>{{ k }}{{ v }}{{ v | tojson }}<|eot_id|>"
        "{% endfor %}{% endfor %}{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}{{ c.function }}<|eom_id|>"
        "{% endfor %}{% else %}{{ m.name }}{{ m.tool_call_id }}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
    ),
    "joined": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}{{ a.a ~ a.b }}"
        "{{ a.values() | list | last | join }}{{ a.b | string | reverse }}<|eot_id|>{% endfor %}"
        "{{ m.content }}{% endfor %}{{ tools | tojson(ensure_ascii=true, indent=2) }}{{ tools | string }}<|eom_id|>"
    ),
}


@pytest.mark.row("H05")
@pytest.mark.parametrize(("name", "count"), [("llama 3.1", 256), ("keys and values", 64), ("joined", 64)])
def test_no_text_becomes_control_by_a_template(name: str, count: int) -> None:
    template = TOOL_TEMPLATES[name]

    def controls_of(texts: Sequence[str]) -> list[int]:
        ids = encode_chat(LLAMA3_BYTES, template, hostile_dialog(texts, True), tools=schemas(texts), now=NOW)
        return controls(LLAMA3_BYTES, ids)

    harmless = controls_of([f"word{i}" for i in range(64)])
    assert harmless
    for start in range(0, count, 64):
        assert controls_of(LLAMA3_NAMES[start : start + 64]) == harmless


@pytest.mark.parametrize("template", TOOL_TEMPLATES.values(), ids=list(TOOL_TEMPLATES))
def test_control_strings_in_tools_are_written_like_other_words(template: str) -> None:
    """A control string in place of a harmless word changes nothing else in the rendered text."""

    def text(word: str) -> str:
        tool = {"role": "tool", "content": word, "tool_call_id": word, "name": word}
        dialog = [user(word), call(word, {"b": 1, "a": word, word: [word, {word: word}]}), tool]
        return LLAMA3_BYTES.decode(encode_chat(LLAMA3_BYTES, template, dialog, tools=schemas([word]), now=NOW))

    plain = text("wordword")
    assert "wordword" in plain
    for name in LLAMA3_NAMES[:12]:
        assert text(name) == plain.replace("wordword", name)


# --------------------------------------------------------------------------------------------------- tools in templates
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    user("How is the weather in Köln?"),
    call("weather", {"town": "Köln", "days": 2}, content=""),
    {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"},
    assistant("Wet."),
    user("thanks"),
]


def test_tools_are_rendered_as_by_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = LLAMA31.replace("strftime_now('%d %b %Y')", "'today'")
    ours = render(template, CONVERSATION, LLAMA3_BYTES, tools=[WEATHER])
    theirs, _ = utils.render_jinja_template(
        [CONVERSATION],
        tools=[WEATHER],
        chat_template=template,
        add_generation_prompt=True,
        bos_token="<|begin_of_text|>",
    )
    assert ours == theirs[0]
    assert spell(LLAMA3_BYTES, encode_chat(LLAMA3_BYTES, template, CONVERSATION, tools=[WEATHER])) == ours


def test_templates_can_compare_and_look_up_strings_of_tools() -> None:
    """Templates branch on the names and types in tools; each control token here depends on such a branch."""
    template = (
        "{% for t in tools %}{% if t.type == 'function' and 'name' in t.function %}<|start_header_id|>{% endif %}"
        "{% for name, p in t.function.parameters.properties.items() %}{% if p.type in ['string', 'number'] %}"
        "{{ {'string': '<|eot_id|>'}[p['type']] }}{% endif %}{% if p.type != 'string' %}<|image|>{% endif %}"
        "{% endfor %}{% endfor %}{{ messages[0].content }}"
    )
    ids = encode_chat(LLAMA3_BYTES, template, [user("<|eot_id|>")], tools=[WEATHER])
    assert spell(LLAMA3_BYTES, ids) == "<|start_header_id|><|eot_id|><|eot_id|>"
    assert len(controls(LLAMA3_BYTES, ids)) == 2


def test_templates_see_all_fields_of_tool_messages() -> None:
    template = "{{ messages[1].tool_calls[0].id }} {{ messages[2].tool_call_id }} {{ messages[2].name }}"
    calling = {"role": "assistant", "tool_calls": [{"id": "c1", "name": "f", "arguments": {}}]}
    dialog = [user("x"), calling, {"role": "tool", "content": "y", "tool_call_id": "c2", "name": "f"}]
    assert LLAMA3_BYTES.decode(encode_chat(LLAMA3_BYTES, template, dialog)) == "c1 c2 f"


@pytest.mark.parametrize("option", [True, False])
def test_tojson_with_ensure_ascii_does_not_escape_marks(option: bool) -> None:
    template = "{{ tools | tojson(ensure_ascii=" + str(option).lower() + ") }}"
    tools = [{"ü 😀 <|eot_id|>": "日本 <|eot_id|>"}]
    text = LLAMA3_BYTES.decode(encode_chat(LLAMA3_BYTES, template, [user("x")], tools=tools))
    assert text == json.dumps(tools, ensure_ascii=option)


def test_marks_and_stand_ins_in_keys_survive() -> None:
    template = "{% for key in messages[1].tool_calls[0].function.arguments %}{{ key | lower }}{% endfor %}"
    for key in ("\ufdd0 <|eot_id|>", "\U000f0000\U000f0001 <|eot_id|>"):
        ids = encode_chat(LLAMA3_BYTES, template, [user("x"), call("f", {key: 1})])
        assert LLAMA3_BYTES.decode(ids) == key
        assert not controls(LLAMA3_BYTES, ids)


def test_arguments_given_as_json_text_become_mappings() -> None:
    dialog = [user("x"), call("f", '{"a": "<|eot_id|>"}')]
    spelled = LLAMA3_BYTES.decode(encode_chat(LLAMA3_BYTES, LLAMA31, dialog, now=NOW))
    assert '"parameters": {"a": "<|eot_id|>"}}' in spelled


# ---------------------------------------------------------------------------------------------------- choosing a format
@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (LLAMA3_BYTES, "llama3"),
        (STEP_BYTES, "codellama-70b"),
        (LLAMA2_PIECES, "llama2"),
        (byte_level("<s>", "</s>", "<|im_start|>"), None),
        (from_metadata(tiny.byte_vocabulary(), "tiny"), None),
    ],
)
def test_chat_format_of_a_vocabulary(tokenizer: Tokenizer, name: str | None) -> None:
    assert chat_format_of(tokenizer) == name


def test_an_error_names_the_control_tokens_that_a_format_lacks() -> None:
    with pytest.raises(TemplateError, match=r"codellama-70b needs .*<s>, .*<step>.*; use llama3, which fits"):
        codellama70b(LLAMA3_BYTES, [user("x")])
    first = byte_level(*LLAMA3_NAMES[:8], "<|reserved_special_token_4|>", "<|eot_id|>")
    assert llama3(first, [user("x")])
    for message, missing in ((call("code_interpreter", {"code": ""}), "python_tag"), (assistant("x"), "eom_id")):
        with pytest.raises(TemplateError, match=missing):
            llama3(first, [user("x"), {**message, "continues": missing == "eom_id"}])


def test_the_format_is_chosen_by_name() -> None:
    dialog = [user("hi")]
    by_template = encode_chat(LLAMA3_BYTES, LLAMA31, dialog, now=NOW)
    assert encode_chat(LLAMA3_BYTES, LLAMA31, dialog, format="jinja", now=NOW) == by_template
    assert encode_chat(LLAMA3_BYTES, LLAMA31, dialog, format="llama3") == llama3(LLAMA3_BYTES, dialog) != by_template
    with pytest.raises(UsageError, match="unknown chat format 'llama4'; known: jinja, llama2, llama3, codellama-70b"):
        encode_chat(LLAMA3_BYTES, LLAMA31, dialog, format="llama4")
    with pytest.raises(UsageError, match="only chat templates do"):
        encode_chat(LLAMA3_BYTES, LLAMA31, dialog, format="llama3", tools=[WEATHER])
    with pytest.raises(UsageError, match="always ends"):
        encode_chat(LLAMA3_BYTES, LLAMA31, dialog, format="llama3", add_generation_prompt=False)
    for format in (None, "jinja"):
        with pytest.raises(TemplateError, match=r"--raw.*--chat-format llama2"):
            encode_chat(LLAMA2_PIECES, None, dialog, format=format)


def test_a_model_uses_its_chat_format_and_tools() -> None:
    tokenizer = byte_level(*LLAMA3_NAMES[:12])
    dialog = [user("hi")]
    llm = Llama(tiny.model(), tokenizer, LLAMA31, chat_format="llama3")
    assert llm.chat(dialog, max_new_tokens=1).stats.prompt_tokens == len(llama3(tokenizer, dialog))
    with pytest.raises(UsageError, match="only chat templates do"):
        llm.chat(dialog, tools=[WEATHER])
    llm = Llama(tiny.model(), tokenizer, "{{ tools[0].function.name }}{{ messages[0].content }}")
    answer = llm.chat(dialog, tools=[WEATHER], max_new_tokens=1)
    assert answer.stats.prompt_tokens == len(tokenizer.encode("weatherhi"))


# --------------------------------------------------------------------------------------------------------- bad messages
DEEP: Any = 0
for _ in range(100):
    DEEP = [DEEP]

Bad = tuple[list[Any], str]
BAD: list[Bad] = [
    ([{**user("x"), "tool_calls": []}], "message 0, role user: unknown key 'tool_calls'"),
    ([{**assistant("x"), "tool_call_id": "1"}], "unknown key 'tool_call_id'"),
    ([{**assistant("x"), "<|eot_id|>": "1"}], "unknown key"),
    ([{**assistant("x"), "continues": 1}], "continues must be true or false"),
    ([{"role": "assistant"}], "content must be a string, got NoneType"),
    ([{"role": "assistant", "tool_calls": []}], "content must be a string"),
    ([{"role": "tool", "content": "x", "name": 3}], "name must be a non-empty string"),
    ([{"role": "tool", "content": "x", "tool_call_id": ["a"]}], "tool_call_id must be a non-empty string"),
    ([{"role": "assistant", "tool_calls": "f()"}], "tool_calls must be a list"),
    ([{"role": "assistant", "tool_calls": ["f()"]}], "message 0, tool call 0 must be a mapping"),
    ([{"role": "assistant", "tool_calls": [{"type": "custom", "name": "f", "arguments": {}}]}], "type must be"),
    ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], "function must be a mapping"),
    ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}, "index": 0}]}], "unknown key 'index'"),
    ([{"role": "assistant", "tool_calls": [{"arguments": {}}]}], "name must be a non-empty string"),
    ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "arguments must be a mapping"),
    ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}, "id": 7}]}], "id must be a non-empty string"),
    ([call("f", "{")], "arguments must be a mapping or the JSON text"),
    ([call("f", "[1]")], "arguments must be a mapping or the JSON text"),
    ([call("f", "[" * 100_000)], "arguments must be a mapping or the JSON text"),
    ([call("f", {"a": float("nan")})], "must be JSON-serializable"),
    ([call("f", '{"a": NaN}')], "must be JSON-serializable"),
    ([call("f", {"a": object()})], "must be JSON-serializable"),
    ([call("f", {("a",): 1})], "must be JSON-serializable"),
    ([call("f", {"a": 10**5000})], "must be JSON-serializable"),
    ([call("f", {"a": DEEP})], "nested deeper"),
    ([{"role": "developer", "content": "x"}], "role must be one of"),
    ([{"role": ["user"], "content": "x"}], "role must be one of"),
    ("hi", "messages must be a list"),  # type: ignore[list-item]
    (None, "messages must be a list"),  # type: ignore[list-item]
    ([], "at least one message"),
]


@pytest.mark.row("H06")
@pytest.mark.parametrize("path", ["llama3", "jinja"])
@pytest.mark.parametrize(("messages", "reason"), BAD)
def test_malformed_messages_name_what_is_wrong(messages: Any, reason: str, path: str) -> None:
    with pytest.raises(UsageError) as error:
        encode_chat(LLAMA3_BYTES, LLAMA31, messages, format=path)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tools", [{"type": "function"}, "tools", ["f"], [{"a": object()}], [{"a": DEEP}], [None]])
def test_malformed_tools_are_usage_errors(tools: Any) -> None:
    with pytest.raises(UsageError, match="tool"):
        encode_chat(LLAMA3_BYTES, LLAMA31, [user("x")], tools=tools)


def test_only_llama3_writes_a_message_that_continues() -> None:
    dialog = [user("x"), {**assistant("y"), "continues": True}, user("z")]
    encoders: list[Callable[[], list[int]]] = [
        lambda: encode_chat(LLAMA3_BYTES, LLAMA31, dialog),
        lambda: llama2(LLAMA2_PIECES, dialog),
        lambda: codellama70b(STEP_BYTES, dialog),
    ]
    for encode in encoders:
        with pytest.raises(UsageError, match="message 1"):
            encode()


@pytest.mark.row("H06")
@pytest.mark.parametrize(
    ("dialog", "reason"),
    [
        ([{"role": "system", "content": "s"}], "the last message has the role user"),
        ([user("a"), assistant("b")], "the last message has the role user"),
        ([assistant("a"), user("b")], "message 0: .*expected user, got assistant"),
        ([user("a"), user("b")], "message 1: .*expected assistant, got user"),
        ([user("a"), {"role": "system", "content": "s"}, user("b")], "message 1: .*expected assistant, got system"),
        ([user("a"), {"role": "tool", "content": "s"}], "message 1: .*does not support tools"),
        ([user("a"), call("f", {}), user("b")], "message 1: .*does not support tools"),
    ],
)
def test_formats_without_tools_need_alternating_turns(dialog: list, reason: str) -> None:
    for tokenizer, encode in ((LLAMA2_PIECES, llama2), (STEP_BYTES, codellama70b)):
        with pytest.raises(UsageError, match=reason):
            encode(tokenizer, dialog)


@pytest.mark.parametrize(
    "message",
    [
        call("brave_search", {"q": "x"}),
        call("wolfram_alpha", {"query": "x", "more": 1}),
        call("photogen", {"query": 1}),
        call("code_interpreter", {}),
        call("code_interpreter", {"code": "1"}, content="Let me see."),
        {
            "role": "assistant",
            "tool_calls": [{"name": n, "arguments": {"code": "1"}} for n in ("f", "code_interpreter")],
        },
    ],
)
def test_invalid_arguments_of_llama3s_built_in_tools_are_errors(message: dict) -> None:
    with pytest.raises(LlamaError, match="message 1"):
        llama3(LLAMA3_BYTES, [user("x"), message])
