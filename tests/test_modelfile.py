"""Modelfiles for Ollama: the Go template renders what the chat template renders, or the template is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import llama
from llama.chat import render
from llama.errors import CheckpointError, UsageError
from llama.tools.convert import convert
from llama.tools.modelfile import CONVERSATIONS

from . import tiny
from .scripts import make_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' +"
    " message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content']"
    " %}{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}{% for message in loop_messages %}"
    "{% if loop.index0 == 0 and system %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] '"
    " + content.strip() + ' [/INST]' }}{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
DEFAULT = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are"
    " kind<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}{% if"
    " loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": tiny.CHATML, "default": DEFAULT, "llama3": LLAMA3, "llama2": LLAMA2, "zephyr": ZEPHYR}


def go(template: str, messages: list[dict[str, str]]) -> str:
    """Execute the part of Go's text/template that the Modelfiles use, with the values that Ollama passes."""
    tokens = re.split(r"\{\{ (.*?) \}\}", template)  # text and actions in turn
    at = 0

    def block() -> list[Any]:
        nonlocal at
        nodes: list[Any] = []
        while at < len(tokens):
            if at % 2 == 0:
                nodes.append(("text", tokens[at]))
                at += 1
                continue
            action = tokens[at]
            if action == "end" or action.startswith("else if "):
                return nodes
            at += 1
            if action.startswith("range "):
                nodes.append(("range", block()))
            elif action.startswith("if "):
                branches = [(action[3:], block())]
                while tokens[at] != "end":
                    condition = tokens[at].removeprefix("else if ")
                    at += 1
                    branches.append((condition, block()))
                nodes.append(("if", branches))
            else:
                nodes.append(("value", action))
                continue
            at += 1  # its end
        return nodes

    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")

    def true(condition: str, i: int, message: dict[str, str]) -> bool:
        if found := re.fullmatch(r'eq \.Role "(\w+)"', condition):
            return message["role"] == found[1]
        values = {
            "eq $i 0": i == 0,
            "not .System": not system,
            "not (and $.System (eq $i 1))": not (system and i == 1),
        }
        return values[condition]

    def run(nodes: list[Any], i: int, message: dict[str, str]) -> str:
        out = ""
        for kind, content in nodes:
            if kind == "text":
                out += content
            elif kind == "value":
                out += {".Content": message.get("content"), ".Prompt": messages[-1]["content"]}[content]
            elif kind == "range":
                out += "".join(run(content, i, message) for i, message in enumerate(messages))
            else:
                out += next((run(body, i, message) for condition, body in content if true(condition, i, message)), "")
        return out

    return run(block(), 0, {})


def write(folder: Path, template: str | None, **metadata: Any) -> Path:
    return tiny.write_gguf(folder / "source.gguf", metadata={"tokenizer.chat_template": template, **metadata})


def parsed(text: str) -> dict[str, list[str]]:
    """The commands of a Modelfile: their names and values without quotes."""
    found: dict[str, list[str]] = {}
    for line in re.findall(r'^([A-Z]+(?: [a-z_]+)?) (""".*?"""|".*?"|\S+)$', text, re.MULTILINE | re.DOTALL):
        found.setdefault(line[0], []).append(line[1].strip('"') if line[1][:3] != '"""' else line[1][3:-3])
    return found


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_go_template_renders_what_the_chat_template_renders(tmp_path: Path, name: str, add_bos: bool) -> None:
    """Up to the token that llama.cpp adds itself."""
    template = TEMPLATES[name]
    if add_bos and "bos_token" not in template:
        template = "{{ bos_token }}" + template
    source = write(tmp_path, template, **{"tokenizer.ggml.add_bos_token": add_bos})
    convert(source, tmp_path / "out.gguf", "gguf", modelfile=True)
    found = parsed((tmp_path / "out.gguf.Modelfile").read_text())
    tokenizer = llama.load_tokenizer(source)
    assert tokenizer.add_bos == add_bos
    for messages in CONVERSATIONS:
        theirs = render(template, messages, tokenizer)
        assert go(found["TEMPLATE"][0], messages) == (theirs.removeprefix("<|im_start|>") if add_bos else theirs)
    assert found["FROM"] == ["./out.gguf"]
    assert found["PARAMETER stop"] == ["<|endoftext|>", "<|im_end|>"]
    assert found["PARAMETER num_ctx"] == ["256"]


def test_a_base_model_gets_its_prompt_as_it_is(tmp_path: Path) -> None:
    source = write(tmp_path, None, **{"llama.context_length": 131072})
    convert(source, tmp_path / "out.gguf", "gguf", quantize="q8_0", modelfile=True)
    text = (tmp_path / "out.gguf.Modelfile").read_text()
    assert parsed(text)["TEMPLATE"] == ["{{ .Prompt }}"]
    assert parsed(text)["PARAMETER num_ctx"] == ["8192"]
    assert "# The model's context is 131072" in text


START = "{% for message in messages %}"
REFUSED = {
    "today": ("{{ strftime_now('%d %B') }}" + tiny.CHATML, "it writes the date"),
    "no system": (START + "{% if message['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{{ message['content'] }}"
                  "{% endfor %}", "no exact translation for Ollama: the model's chat template failed"),
    "last": (START + "{{ message['content'] }}{% if loop.last %}END{% endif %}|{% endfor %}", "depend on the messages after it"),
    "numbered": (START + "{{ loop.index }}{{ message['content'] }}|{% endfor %}", "more than put fixed texts"),
    "upper": (START + "{{ message['content'] | upper }}|{% endfor %}", "more than put fixed texts"),
    "twice": (START + "{{ message['content'] * 2 }}|{% endfor %}", "does not write the content of each message once"),
    "braces": ("{{ '{' + '{x' }}" + tiny.CHATML, "it writes braces"),
    "unprintable": ("\u200b" + tiny.CHATML, "a Modelfile can't hold the text"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_without_an_exact_translation_is_refused(tmp_path: Path, name: str) -> None:
    template, says = REFUSED[name]
    with pytest.raises(UsageError, match=says):
        convert(write(tmp_path, template), tmp_path / "out.gguf", "gguf", modelfile=True)
    assert not (tmp_path / "out.gguf").exists()


def test_a_begin_of_text_token_that_the_template_lacks_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path, ZEPHYR, **{"tokenizer.ggml.add_bos_token": True})
    with pytest.raises(UsageError, match=r"does not begin with the token that llama\.cpp puts before every text"):
        convert(source, tmp_path / "out.gguf", "gguf", modelfile=True)


def test_other_targets_and_existing_files_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path, tiny.CHATML)
    with pytest.raises(UsageError, match="describes a GGUF file for Ollama, and --to hf writes none; use --to gguf"):
        convert(source, tmp_path / "out", "hf", modelfile=True)
    (tmp_path / "out.gguf.Modelfile").write_text("mine")
    with pytest.raises(UsageError, match=r"Modelfile exists already; remove it, or replace it with force=True"):
        convert(source, tmp_path / "out.gguf", "gguf", modelfile=True)
    assert (tmp_path / "out.gguf.Modelfile").read_text() == "mine"
    convert(source, tmp_path / "out.gguf", "gguf", modelfile=True, force=True)
    assert (tmp_path / "out.gguf.Modelfile").read_text().startswith("FROM")
    state = make_tiny.make(tmp_path / "meta", "llama-3-8b")
    (state / "tokenizer.model").unlink()
    with pytest.raises((UsageError, CheckpointError), match="Ollama needs a tokenizer"):
        convert(state, tmp_path / "meta.gguf", "gguf", modelfile=True)
