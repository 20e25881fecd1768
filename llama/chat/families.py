"""Jinja templates equivalent to the chat formats in formats.py, for checkpoint formats that can store a template.

The text of a template has the ids that the format's function returns, except for two inputs: a Llama 3 message that
begins with a line break, which merges with the two before it, and non-ASCII arguments of tool calls, which the function
escapes.
The published templates on the hub strip every message; these do not, like Meta's newest code.

llama.cpp without its Jinja engine recognizes llama2 and llama3 by parts of the source, such as "bos_token + '[INST]".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..errors import TemplateError
from ..tokenizer import Tokenizer
from .template import render

# Rejects orders of roles that the format can't express
TURNS = """\
{%- if tools %}{{ raise_exception('this chat format has no tools: describe them in a system message') }}{% endif -%}
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else none -%}
{%- set turns = messages if system is none else messages[1:] -%}
{%- for message in turns -%}
{%- if message['role'] != ['user', 'assistant'][loop.index0 % 2] or message['tool_calls'] -%}
{{- raise_exception('the roles must be system at most once, then user and assistant in turn, without tool calls') -}}
{%- endif -%}
{%- endfor -%}
"""

LLAMA2 = (
    TURNS
    + """\
{%- for message in turns -%}
{%- set content = message['content'] -%}
{%- if '[INST]' in content or '[/INST]' in content or '<<SYS>>' in content or '<</SYS>>' in content -%}
{{- raise_exception('a message contains [INST] or <<SYS>>, which the model reads as the start or end of a turn') -}}
{%- endif -%}
{%- if loop.first and system is not none -%}
{%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + content -%}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' -}}
{%- else -%}
{{- ' ' + content.strip() + ' ' + eos_token -}}
{%- endif -%}
{%- endfor -%}
"""
)

LLAMA3 = """\
{%- if tools %}{{ raise_exception('this template has no tools: describe them in a system message') }}{% endif -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'ipython' if message['role'] == 'tool' else message['role'] -%}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}
{%- set calls = message['tool_calls'] or [] -%}
{%- for call in calls if call['function']['name'] == 'code_interpreter' -%}
{%- if calls | length > 1 or message['content'] -%}
{{- raise_exception('a call of code_interpreter must be alone: everything after <|python_tag|> is code') -}}
{%- endif -%}
{{- '<|python_tag|>' -}}
{%- endfor -%}
{{- message['content'] or '' -}}
{%- for call in calls -%}
{%- set name, arguments = call['function']['name'], call['function']['arguments'] -%}
{%- if name == 'code_interpreter' -%}
{{- arguments['code'] -}}
{%- elif name in ['brave_search', 'wolfram_alpha', 'photogen'] -%}
{{- name + '.call(query="' + arguments['query'] + '")' -}}
{%- else -%}
{{- '{"type": "function", "name": "' + name + '", "parameters": ' + arguments | tojson + '}' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

# The function encodes header and text separately, so SentencePiece puts a space before each; hence " \\n\\n ".
CODELLAMA_70B = (
    TURNS
    + """\
{{- bos_token + ' Source: system' -}}
{%- if system -%}
{{- ' \\n\\n ' + system.strip() -}}
{%- endif -%}
{{- '<step>' -}}
{%- for message in turns -%}
{{- ' Source: ' + message['role'] -}}
{%- if message['role'] == 'assistant' -%}
{{- '\\nDestination: user' -}}
{%- endif -%}
{%- if message['content'] -%}
{{- ' \\n\\n ' + message['content'].strip() -}}
{%- endif -%}
{{- '<step>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- ' Source: assistant\\nDestination: user \\n\\n ' -}}
{%- endif -%}
"""
)

TEMPLATES: Mapping[str, str] = MappingProxyType(
    {name: source.rstrip() for name, source in (
        ("llama2", LLAMA2), ("llama3", LLAMA3), ("codellama-70b", CODELLAMA_70B))}
)  # fmt: skip

PROBE = "a message"


def check_template(template: str, tokenizer: Tokenizer, where: str) -> None:
    """Raise TemplateError unless a template can render a user message, including its text."""
    try:
        text = render(template, [{"role": "user", "content": PROBE}], tokenizer)
    except TemplateError as error:
        raise TemplateError(f"{where}: {error}") from error
    if PROBE not in text:
        raise TemplateError(f"{where} is not a chat template: the text that it renders does not contain the message")
