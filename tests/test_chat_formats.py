"""Built-in chat formats: the ids are those of Meta's code, and transformers gives them by the templates of conversions."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import llama
from llama.chat import TEMPLATES, encode_chat
from llama.chat.formats import chat_format_of
from llama.chat.messages import ROLES
from llama.checkpoint import open_checkpoint
from llama.errors import TemplateError, UsageError
from llama.text import Llama
from llama.tokenizer import Tokenizer, open_tokenizer
from llama.tokenizer.tiktoken import TiktokenTokenizer
from llama.tools.convert import convert

from . import tiny
from .scripts import make_tiny
from .test_chat import byte_level, spell
from .test_tokenizer import CONTROL
from .test_tokenizer_write import auto, trained
from .wheels import wheel_member

Dialog = list[dict[str, Any]]

LLAMA3_NAMES = CONTROL[:12]
LLAMA3, LLAMA2 = byte_level(*LLAMA3_NAMES), byte_level("<s>", "</s>")
VOCABULARY = {"llama3": LLAMA3, "llama2": LLAMA2}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def ids_of(format: str, messages: Dialog, tokenizer: Tokenizer | None = None) -> list[int]:
    return encode_chat(tokenizer or VOCABULARY[format], None, messages, format=format)


DIALOG: Dialog = [{"role": "system", "content": "Be brief."}, user(" hi\n"), assistant("hello"), user("bye")]


def test_llama2_by_hand() -> None:
    llama2 = "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n hi [/INST] hello </s><s>[INST] bye [/INST]"
    assert spell(LLAMA2, ids_of("llama2", DIALOG))[0] == llama2


@pytest.mark.parametrize("format", TEMPLATES)
def test_no_text_becomes_control_in_built_in_formats(format: str) -> None:
    tokenizer = VOCABULARY[format]
    names = [*tokenizer.control]
    hostile = [user("\x1f".join(names)), assistant(f"{''.join(names)}<"), user(f"|{names[-1]}")]
    harmless = [user("x"), assistant("x"), user("x")]
    found = [spell(tokenizer, ids_of(format, dialog)) for dialog in (hostile, harmless)]
    assert found[0][1] == found[1][1]
    assert "\x1f".join(names) in found[0][0]


S, TOOL = {"role": "system", "content": "s"}, {"role": "tool", "content": "s"}


@pytest.mark.parametrize(
    ("format", "dialog", "reason"),
    [
        *(("llama2", [user(t)], "a message contains") for t in ("[INST]", "x [/INST]", "<<SYS>>", "<</SYS>> y")),
        ("llama2", [{"role": "system", "content": "<<SYS>>"}, user("x")], "a message contains"),
        ("llama2", [user("a"), assistant("b")], "the last message must have the role user"),
        *(("llama2", dialog, "the roles must be") for dialog in (
            [assistant("a"), user("b")], [user("a"), S, user("b")], [user("a"), TOOL, user("b")])),
    ],
)  # fmt: skip
def test_what_a_format_can_not_express_is_an_error(format: str, dialog: Dialog, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        ids_of(format, dialog)
    with pytest.raises(UsageError, match="unknown chat format 'llama4'; known: jinja, "):
        ids_of("llama4", dialog, LLAMA3)
    with pytest.raises(TemplateError, match=r"llama2 needs .*<s>, </s>.*; use llama3, which fits"):
        ids_of("llama2", dialog, LLAMA3)


def test_the_format_of_a_vocabulary() -> None:
    for name, tokenizer in VOCABULARY.items():
        assert chat_format_of(tokenizer) == name
    for tokens in (("<s>", "x"), ("<s>", "</s>", "<step>"), ("<|begin_of_text|>", "<|eot_id|>")):
        assert chat_format_of(byte_level(*tokens)) is None
    llm = Llama(tiny.model(), LLAMA3, tiny.CHATML, chat_format="llama3")
    assert (
        llm.encode_chat(DIALOG) == ids_of("llama3", DIALOG) != encode_chat(LLAMA3, tiny.CHATML, DIALOG, format="jinja")
    )


# ------------------------------------------------------------------------------------------------------ Meta's own code
TEXTS = ["", " ", "a b ", " \nc\n", "zwölf 123456", "日本語 😀", "def f():\n\treturn 1", "It's", "é\u0301 \u3000x"]

WHEEL = "llama-models==0.3.0"


MODULES = ("tokenizer_utils", "datatypes", "llama3/tokenizer", "llama3/tool_utils", "llama3/chat_format")


def random_dialog(family: str, choose: random.Random, texts: Sequence[str] = TEXTS) -> Dialog:
    """A dialog that a family of formats can express."""

    def message(role: str) -> dict[str, Any]:
        return {"role": role, "content": "".join(choose.choices(texts, k=choose.randint(0, 4)))}

    if family == "llama3":
        return [message(choose.choice(ROLES)) for _ in range(choose.randint(1, 6))]
    turns = [message(("user", "assistant")[i % 2]) for i in range(choose.choice([1, 3, 5]))]
    return [message("system")] * choose.randint(0, 1) + turns


def test_llama3_ids_are_those_of_metas_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pydantic", reason="Meta's messages are pydantic models")
    files = [wheel_member(WHEEL, f"llama_models/{name}.py") for name in MODULES]
    monkeypatch.syspath_prepend(str(files[0].parents[1]))
    monkeypatch.setitem(sys.modules, "PIL", SimpleNamespace(Image=SimpleNamespace(Image=object)))
    code = importlib.import_module("llama_models.llama3.chat_format")
    path = wheel_member(WHEEL, "llama_models/llama3/tokenizer.model")
    meta, real, choose = code.ChatFormat(code.Tokenizer(path)), open_tokenizer(path), random.Random(0)
    for _ in range(300):
        dialog = random_dialog("llama3", choose, [*TEXTS, "\n\n", "\n\nc\n", *LLAMA3_NAMES])
        roles = ["tool" if message["role"] == "ipython" else message["role"] for message in dialog]
        raw = [
            code.RawMessage(role=role, content=message["content"], stop_reason="end_of_turn", tool_calls=[])
            for role, message in zip(roles, dialog, strict=True)
        ]
        assert ids_of("llama3", dialog, real) == meta.encode_dialog_prompt(raw).tokens, dialog


@pytest.mark.parametrize("family", TEMPLATES)
def test_transformers_gives_the_ids_of_the_built_in_format(family: str, tmp_path: Path) -> None:
    """With the files that a conversion of a vocabulary in Meta's format writes."""
    if family == "llama3":
        ours: Tokenizer = TiktokenTokenizer(make_tiny.tiktoken_model(512), "tiny")
    else:
        ours = trained(tmp_path)
    theirs, template, choose = auto(ours, tmp_path), TEMPLATES[family], random.Random(1)
    for _ in range(60):
        dialog = random_dialog(family, choose)
        if family == "llama3":  # see formats.py
            dialog = [{**message, "content": message["content"].lstrip("\n")} for message in dialog]
        expected = ids_of(family, dialog, ours)
        ids = theirs.apply_chat_template(dialog, chat_template=template, add_generation_prompt=True, return_dict=False)
        assert ids == expected, (dialog, theirs.decode(ids), theirs.decode(expected))
        assert encode_chat(ours, template, dialog) == expected


# ------------------------------------------------------------------------------------------------------- conversions
@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny.make(tmp_path_factory.mktemp("meta") / "Llama-3.2-1B-Instruct", "llama-3.2-1b")


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_a_converted_folder_of_meta_has_the_chosen_template(meta: Path, tmp_path: Path, to: str) -> None:
    from transformers import AutoTokenizer

    proof = convert(meta, tmp_path / "new", to)  # by the name of the folder
    assert proof.warnings == []
    assert open_checkpoint(proof.path).chat_template == TEMPLATES["llama3"]
    before, after = (llama.load(path, device="cpu", dtype="float32") for path in (meta, proof.path))
    expected = encode_chat(before.tokenizer, None, DIALOG, format=before.chat_format)
    assert encode_chat(after.tokenizer, after.chat_template, DIALOG, format=after.chat_format) == expected
    assert after.chat(DIALOG, max_new_tokens=3).tokens == before.chat(DIALOG, max_new_tokens=3).tokens
    if to == "hf":
        theirs = AutoTokenizer.from_pretrained(proof.path)
        assert theirs.apply_chat_template(DIALOG, add_generation_prompt=True, return_dict=False) == expected
    for choice, says in (("llama2", "needs tokens that this vocabulary does not have"), ("{}", "contain the message")):
        with pytest.raises(TemplateError, match=says):
            convert(meta, tmp_path / "x", to, chat_template=choice)
