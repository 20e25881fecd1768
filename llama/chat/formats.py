"""The chat formats of Meta's models as Jinja templates: for checkpoints without a template, and for conversions.

Meta's code encodes the header of a message separately, so `encode_template` divides the text where a template writes
`cut`. Other programs do not: their ids differ from Meta's for a Llama 3 message that begins with a line break. The
published templates on the hub strip every message; these templates and Meta's newest code do not.

References: meta-llama/llama llama/generation.py (Llama 2), meta-llama/llama-models llama3/chat_format.py (Llama 3).
llama.cpp without its Jinja engine recognizes the formats by parts of the source, such as "bos_token + '[INST]".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import TemplateError
from ..tokenizer import Tokenizer
from .template import render

# Llama 2 Chat and Code Llama 7B to 34B Instruct. [INST] and <<SYS>> are no control tokens: the model reads their text.
LLAMA2 = """\
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else none -%}
{%- set turns = messages if system is none else messages[1:] -%}
{%- for message in turns -%}
{%- if message['role'] != ['user', 'assistant'][loop.index0 % 2] -%}
{{- raise_exception('the roles must be system at most once, then user and assistant in turn') -}}
{%- endif -%}
{%- set content = message['content'] -%}
{%- for text in [content, system or ''] -%}
{%- if '[INST]' in text or '[/INST]' in text or '<<SYS>>' in text or '<</SYS>>' in text -%}
{{- raise_exception('a message contains [INST] or <<SYS>>, which the model reads as the start or end of a turn') -}}
{%- endif -%}
{%- endfor -%}
{%- if loop.first and system is not none -%}
{%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + content -%}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' -}}
{%- else -%}
{{- ' ' + content.strip() + ' ' + eos_token -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and turns | length % 2 == 0 -%}
{{- raise_exception('the last message must have the role user') -}}
{%- endif -%}
"""

# Llama 3, 3.1, 3.2 and 3.3 Instruct. The role tool is written ipython; the format has no tool_call_id and name.
LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'ipython' if message['role'] == 'tool' else message['role'] -%}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}{{- cut -}}
{{- message['content'] + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""


TEMPLATES: Mapping[str, str] = {
    "llama3": LLAMA3.rstrip(),
    "llama2": LLAMA2.rstrip(),
}
# The control tokens of every conversation
TOKENS = {
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "llama2": ["<s>", "</s>"],
}
OTHERS = {"<|im_start|>", "<step>"}  # tokens of ChatML and Code Llama 70B, which are not built in


def chat_format_of(tokenizer: Tokenizer) -> str | None:
    """The first format that a vocabulary can express, or None. The model may have been trained on another one."""
    fitting = (name for name, tokens in TOKENS.items() if tokenizer.control.keys() >= {*tokens})
    return None if tokenizer.control.keys() & OTHERS else next(fitting, None)


def says_chat(path: str | os.PathLike[str]) -> bool:
    """Whether a folder's name says that its model was trained to chat, which Meta's files do not state."""
    folder = Path(path).absolute()
    name = str(folder) if folder.name == "original" else folder.name  # a subfolder of a repository on the hub
    return re.search("(?i)instruct|chat", name) is not None


def check_format(name: str, tokenizer: Tokenizer) -> None:
    """Raise TemplateError unless a vocabulary has the control tokens of a format."""
    if missing := [token for token in TOKENS[name] if token not in tokenizer.control]:
        fits = chat_format_of(tokenizer) or "llm.generate (--raw)"
        found = f"the chat format {name} needs tokens that this vocabulary does not have ({', '.join(missing)})"
        raise TemplateError(f"{found}; use {fits}, which fits the vocabulary")


def check_template(template: str, tokenizer: Tokenizer) -> None:
    """Raise TemplateError unless a template can render a user message, including its text."""
    if "a message" not in render(template, [{"role": "user", "content": "a message"}], tokenizer):
        raise TemplateError("the chat template is not one: the text that it renders does not contain the message")
