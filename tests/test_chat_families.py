"""The chat templates that conversions write: transformers renders and encodes them to the ids of our built-in formats."""

from __future__ import annotations

import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import llama
from llama.chat import TEMPLATES, encode_chat
from llama.checkpoint import open_checkpoint
from llama.errors import TemplateError, UsageError
from llama.tokenizer import Tokenizer, open_tokenizer
from llama.tokenizer.tiktoken import TiktokenTokenizer
from llama.tokenizer.write import tokenizer_config, tokenizer_json
from llama.tools.convert import convert
from llama.tools.quantize import quantize

from .conftest import Run
from .scripts import make_tiny
from .test_tokenizer_write import LLAMA3_FILE, MISTRAL_FILE, trained
from .wheels import wheel_member

Dialog = list[dict[str, Any]]
TEXTS = [
    "",
    " ",
    "a b ",
    " \nc\n",
    "zwölf 123456",
    "日本語 😀",
    "def f():\n\treturn 1",
    "नमस्ते",
    "It's",
    "é\u0301 \u3000x",
]


# vocabulary -> the families that it can express. Mistral's first was made like Llama 2's; the small one has <step>.
VOCABULARIES = {
    "llama 3": ("llama3",),
    "tiny": ("llama3",),
    "small": ("llama2", "codellama-70b"),
    "mistral": ("llama2",),
}


@pytest.fixture(
    scope="module",
    params=["tiny", "small", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama 3", "mistral"))],
)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer, Any]:
    """A vocabulary in Meta's file format, and what transformers makes of the files that a conversion writes."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("vocabulary")
    ours = {
        "llama 3": lambda: open_tokenizer(wheel_member(*LLAMA3_FILE)),
        "tiny": lambda: TiktokenTokenizer(make_tiny.tiktoken_model(512), "tiny"),
        "small": lambda: trained(folder, control_symbols=["<step>"]),
        "mistral": lambda: open_tokenizer(wheel_member(*MISTRAL_FILE)),
    }[request.param]()
    (folder / "tokenizer.json").write_text(tokenizer_json(ours), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(ours)), encoding="utf-8")
    return request.param, ours, AutoTokenizer.from_pretrained(folder)


def random_dialog(family: str, choose: random.Random) -> Dialog:
    def text() -> str:
        return "".join(choose.choice(TEXTS) for _ in range(choose.randint(0, 4)))

    if family == "llama3":
        text_of = lambda: text().lstrip("\n")  # noqa: E731  (see chat/families.py)
        return [
            {"role": choose.choice(["system", "user", "assistant", "tool", "ipython"]), "content": text_of()}
            for _ in range(choose.randint(1, 6))
        ]
    turns = [{"role": ("user", "assistant")[i % 2], "content": text()} for i in range(choose.choice([1, 3, 5]))]
    return [{"role": "system", "content": text()}] * choose.randint(0, 1) + turns


def test_transformers_gives_the_ids_of_the_built_in_format(both: tuple[str, Tokenizer, Any]) -> None:
    name, ours, theirs = both
    for family in VOCABULARIES[name]:
        template, choose = TEMPLATES[family], random.Random(1)
        for _ in range(60):
            dialog = random_dialog(family, choose)
            expected = encode_chat(ours, None, dialog, format=family)
            ids = theirs.apply_chat_template(
                dialog, chat_template=template, add_generation_prompt=True, return_dict=False
            )
            assert ids == expected, (dialog, theirs.decode(ids), theirs.decode(expected))
            assert encode_chat(ours, template, dialog) == expected


def test_calls_of_tools_in_the_template_of_llama3(both: tuple[str, Tokenizer, Any]) -> None:
    name, ours, theirs = both
    calls = [
        {"name": "brave_search", "arguments": {"query": "a b"}},
        {"name": "add", "arguments": {"x": [1, 2.5, None, True], "y": {"z": 'a "b"'}}},
    ]
    if "llama3" not in VOCABULARIES[name]:
        return
    for content, called in (("text", calls), ("", [{"name": "code_interpreter", "arguments": {"code": "1 + 1"}}])):
        call = {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"type": "function", "function": c} for c in called],
        }
        dialog = [{"role": "user", "content": "go"}, call, {"role": "tool", "content": "2"}]
        ids = theirs.apply_chat_template(
            dialog, chat_template=TEMPLATES["llama3"], add_generation_prompt=True, return_dict=False
        )
        assert ids == encode_chat(ours, None, dialog, format="llama3")


@pytest.mark.parametrize(
    ("family", "dialog", "message"),
    [
        ("llama2", [{"role": "user", "content": "[INST]"}], "a message contains"),
        ("llama2", [{"role": "assistant", "content": "a"}], "the roles must be"),
        ("codellama-70b", [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "the roles must be"),
    ],
)
def test_what_a_family_cant_express_is_an_error(
    both: tuple[str, Tokenizer, Any], family: str, dialog: Dialog, message: str
) -> None:
    with pytest.raises(TemplateError, match=message):
        encode_chat(both[1], TEMPLATES[family], dialog)
    tool = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(TemplateError, match="no tools"):
        encode_chat(both[1], TEMPLATES[family], [{"role": "user", "content": "a"}], tools=tool)


# ------------------------------------------------------------------------------------------------------- conversions
DIALOG = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two words"}]


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny.make(tmp_path_factory.mktemp("meta") / "Llama-3.2-1B-Instruct", "llama-3.2-1b")


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_a_converted_folder_of_meta_has_the_template_of_its_family(meta: Path, tmp_path: Path, to: str) -> None:
    from transformers import AutoTokenizer

    proof = convert(meta, tmp_path / "new", to)
    [warning] = proof.warnings
    assert warning.startswith("wrote the chat template of llama3, because the name Llama-3.2-1B-Instruct contains")
    assert open_checkpoint(proof.path).chat_template == TEMPLATES["llama3"]
    before, after = (llama.load(path, device="cpu", dtype="float32") for path in (meta, proof.path))
    expected = encode_chat(before.tokenizer, None, DIALOG, format=before.chat_format)
    assert encode_chat(after.tokenizer, after.chat_template, DIALOG, format=after.chat_format) == expected
    assert after.chat(DIALOG, max_new_tokens=3).tokens == before.chat(DIALOG, max_new_tokens=3).tokens
    if to == "hf":
        theirs = AutoTokenizer.from_pretrained(proof.path)
        assert theirs.apply_chat_template(DIALOG, add_generation_prompt=True, return_dict=False) == expected
    else:
        from gguf import GGUFReader

        field = GGUFReader(proof.path).fields["tokenizer.chat_template"]
        assert field.contents() == TEMPLATES["llama3"]


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Llama-3.2-1B-Instruct", "Llama-3.2-1B-Instruct/original"])
def test_convert_and_quantize_choose_the_same_template(meta: Path, tmp_path: Path, name: str) -> None:
    source = shutil.copytree(meta, tmp_path / name)
    expected = TEMPLATES["llama3"] if "Instruct" in name else None
    for write in (quantize, partial(convert, to="hf")):
        proof = write(source, tmp_path / "auto", force=True)
        [warning] = proof.warnings
        assert warning.startswith("wrote the chat template of llama3, " if expected else "wrote no chat template, ")
        assert open_checkpoint(proof.path).chat_template == expected
        for choice, chosen in (("none", None), ("llama3", TEMPLATES["llama3"])):
            proof = write(source, tmp_path / "chosen", chat_template=choice, force=True)
            assert (proof.warnings, open_checkpoint(proof.path).chat_template) == ([], chosen)
    assert convert(tmp_path / "chosen", tmp_path / "meta", "meta", chat_template="none").warnings == []


def test_the_template_can_be_chosen(clearllama: Run, meta: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}")
    for choice, expected in (("none", None), ("llama3", TEMPLATES["llama3"]), (str(own), own.read_text())):
        target = tmp_path / "chosen"
        result = clearllama("convert", str(meta), str(target), "--to", "hf", "--force", "--chat-template", choice)
        assert result.returncode == 0, result.stderr
        assert b"chat template" not in result.stderr
        assert open_checkpoint(target).chat_template == expected
    proof = convert(target, tmp_path / "again", "hf")  # the source's own template stays
    assert (proof.warnings, open_checkpoint(proof.path).chat_template) == ([], own.read_text())


def test_templates_that_do_not_fit_are_errors(clearllama: Run, meta: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}")
    (tmp_path / "other.json").write_text('{"a": 1}')
    for choice, code, message in (
        ("llama2", 1, b"the chat format llama2 needs tokens that this vocabulary does not have (<s>, </s>)"),
        (
            "llama4",
            2,
            b"--chat-template must be auto, none, llama2, llama3, codellama-70b or an existing file, got 'llama4'",
        ),
        (str(tmp_path / "broken.jinja"), 1, b"the chat template: "),
        (str(tmp_path / "other.json"), 1, b"does not contain the message"),
    ):
        result = clearllama("convert", str(meta), str(tmp_path / "x"), "--to", "gguf", "--chat-template", choice)
        assert (result.returncode, result.stderr.count(b"\n")) == (code, 1), result.stderr
        assert message in result.stderr
        assert not (tmp_path / "x").exists()
    with pytest.raises(UsageError, match=r"^chat_template must be auto or none, because Meta's format can't store"):
        convert(meta, tmp_path / "x", "meta", chat_template="llama3")
