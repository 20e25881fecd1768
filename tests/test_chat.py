"""Chat templates: their environment, and the law that only the template itself writes control tokens."""

from __future__ import annotations

import datetime
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama.chat import encode_chat, render
from llama.chat.messages import ROLES
from llama.errors import TemplateError, UsageError
from llama.tokenizer.gguf import from_metadata

from . import tiny

TOKENIZER = from_metadata(tiny.byte_vocabulary(), "tiny")
START, END = TOKENIZER.control["<|im_start|>"], TOKENIZER.control["<|im_end|>"]


def chat(*contents: str, template: str = tiny.CHATML) -> list[int]:
    roles = itertools.cycle(("user", "assistant"))
    return encode_chat(TOKENIZER, template, [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)])


def test_one_turn_by_hand() -> None:
    expected = [START, *TOKENIZER.encode("user\nhello"), END, *TOKENIZER.encode("\n"), START]
    assert chat("hello") == expected + TOKENIZER.encode("assistant\n")


controls = list(TOKENIZER.control)
spelled = st.lists(st.sampled_from([*controls, "<", "|", ">", "<|", "|>", "im_end", " ", "\n", "x", "ü"]), max_size=8)


@pytest.mark.row("H05")
@given(st.lists(spelled.map("".join), min_size=1, max_size=4))
def test_text_adds_no_control_token_and_loses_nothing(contents: list[str]) -> None:
    """Whatever the messages contain, the control ids are those of empty messages, in the same order."""
    ids = chat(*contents)
    shape = [id for id in ids if id in TOKENIZER.control.values()]
    assert shape == [id for id in chat(*[""] * len(contents)) if id in TOKENIZER.control.values()]
    turns = "".join(f"{r}\n{c}\n" for r, c in zip(itertools.cycle(("user", "assistant")), contents, strict=False))
    assert TOKENIZER.decode(ids) == turns + "assistant\n"


@pytest.mark.row("H05")
@pytest.mark.parametrize("control", controls)
def test_control_strings_split_over_template_and_messages(control: str) -> None:
    """Parts of a control string at the ends of adjacent texts do not form one."""
    glued = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for cut in range(1, len(control)):
        assert not set(chat(control[:cut], control[cut:], template=glued)) & set(TOKENIZER.control.values())
        before = "{{ '" + control[:cut] + "' + messages[0]['content'] }}"
        assert not set(chat(control[cut:], template=before)) & set(TOKENIZER.control.values())
        after = "{{ messages[0]['content'] + '" + control[cut:] + "' }}"
        assert not set(chat(control[:cut], template=after)) & set(TOKENIZER.control.values())


def test_templates_can_search_the_text() -> None:
    template = "{{ messages[0]['content'] | trim }}|{{ 'yes' if 'hello' in messages[0]['content'] else 'no' }}"
    assert TOKENIZER.decode(chat("  hello ", template=template)) == "hello|yes"


def test_templates_can_split_and_measure_the_text() -> None:
    """DeepSeek's templates remove old thoughts; the text contains < and >, which begin and end control strings."""
    template = (
        "{% for m in messages %}{% set c = m['content'] %}{% if '</think>' in c %}"
        "{% set c = c.split('</think>')[-1] %}{% endif %}{{ c }}{{ c | length }}<|im_end|>{% endfor %}"
    )
    assert TOKENIZER.decode(chat("<think>a < b</think>answer", template=template)) == "answer6"
    without_length = template.replace("{{ c | length }}", "")
    spelled = "secret</think>a <|im_end|> b"  # also if the text spells a control string
    assert TOKENIZER.decode(chat(spelled, template=without_length)) == "a <|im_end|> b"


@pytest.mark.row("H05")
@pytest.mark.parametrize("control", controls)
def test_rearranged_text_does_not_become_a_control_string(control: str) -> None:
    without_x = "{{ messages[0]['content'] | replace('X', '') }}<|im_end|>"
    assert [id for id in chat(control[:4] + "X" + control[4:], template=without_x) if id < 3] == [END]
    joined = "{{ messages[0]['content'].split(',') | join }}<|im_end|>"
    assert [id for id in chat(control[:4] + "," + control[4:], template=joined) if id < 3] == [END]
    swapped = "{% set c = messages[0]['content'].split(',') %}{{ c[1] + c[0] }}<|im_end|>"
    assert [id for id in chat(control[4:] + "," + control[:4], template=swapped) if id < 3] == [END]


@pytest.mark.row("H05")
@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("[{{ messages[0]['content'] }}]", "INST"),
        ("<|{{ messages[0]['content'] }}|>", "im_end"),
        ("{{ messages[0]['content'].encode('ascii', 'ignore').decode() }}", "<|im_end|>"),
        ("{% for c in messages[0]['content'] if c.isalnum() or c in '<>|_ ' %}{{ c }}{% endfor %}", "<|im_end|>"),
        ("{{ messages[0]['content'][::2] }}", "<x|xixmx_xexnxdx|x>x"),
        ("{{ messages[0]['content'] | reverse }}", "<|im_end|>"[::-1]),
        ("{{ messages[0]['content'] | lower }}", "<|IM_END|>"),
        (tiny.CHATML, "a § b"),
        (tiny.CHATML, "§"),
    ],
)
def test_no_template_trick_turns_text_into_control(template: str, content: str) -> None:
    metadata = tiny.byte_vocabulary()
    for token in ("[INST]", "§", ""):
        metadata["tokenizer.ggml.tokens"].append(token)
        metadata["tokenizer.ggml.token_type"].append(3)
    tokenizer = from_metadata(metadata, "tiny")

    def controls(text: str) -> list[int]:
        ids = encode_chat(tokenizer, template, [{"role": "user", "content": text}])
        return [id for id in ids if id in tokenizer.control.values()]

    assert controls(content) == controls("")


def test_tojson_and_the_generation_tag_work_like_hugging_faces() -> None:
    template = "{{ {'a': 'é<'} | tojson }}{{ tools is none and documents is none }}{% generation %}x{% endgeneration %}"
    assert TOKENIZER.decode(chat("", template=template)) == '{"a": "é<"}Truex'


def test_the_environment_has_the_globals_that_templates_use() -> None:
    template = (
        "{%- for m in messages %}\n    {%- if loop.first %}{% continue %}{% endif %}\n{{ m['role'] }}"
        "{%- endfor %}{{ strftime_now('%Y') }}{{ bos_token }}{{ eos_token }}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rendered = render(template, messages, TOKENIZER, now=datetime.datetime(2024, 1, 1))
    assert rendered.split() == ["assistant2024<|im_start|><|im_end|>"]


@pytest.mark.row("H03")
@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ '%s' | attr('format') }}{{ ('{0.__class__}' | attr('format'))(1) }}{{ [].__class__ }}{{ x.y.z }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[5]['content'] + 'x' }}",
        "{{ undefined_function() }}",
        "{% if %}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_bad_templates_are_one_line_errors(template: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TemplateError, match="template failed") as error:
        chat("x", template=template)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_the_message_of_raise_exception_is_in_the_error() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        chat("x", template="{{ raise_exception('roles must alternate') }}")


def test_a_base_model_has_no_template() -> None:
    with pytest.raises(TemplateError, match="--raw"):
        encode_chat(TOKENIZER, None, [{"role": "user", "content": "x"}])


@pytest.mark.row("H06")
@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hello"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "user", "content": "a", "name": "<|im_end|>"}],
        [{"role": "<|im_end|>", "content": "a"}],
        [{"role": "User", "content": "a"}],
        [{"role": None, "content": "a"}],
    ],
)
def test_malformed_messages_are_usage_errors(messages: list) -> None:
    with pytest.raises(UsageError):
        encode_chat(TOKENIZER, tiny.CHATML, messages)


def test_marks_in_the_text_itself_survive() -> None:
    text = "".join(chr(code) for code in range(0xFDD0, 0xFDEF)) + "<"
    assert text in TOKENIZER.decode(chat(text))
    with pytest.raises(UsageError, match="noncharacter"):
        chat(text + "\ufdef")


def test_roles_are_plain_words() -> None:
    assert all(role.isalpha() for role in ROLES)
