"""The chat formats of Meta's models, as functions from messages to ids.

They need no template: the text of messages is encoded as plain text, and the control ids between the texts are appended
one by one. References: meta-llama/llama llama/generation.py (Llama 2), meta-llama/llama-models llama3/chat_format.py
(Llama 3), meta-llama/codellama llama/generation.py (Code Llama 70B).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import TemplateError, UsageError
from ..tokenizer import Tokenizer
from .messages import ToolCall, check_messages

ChatFormat = Callable[[Tokenizer, Sequence[Mapping[str, Any]]], list[int]]

# Llama 2 has no control tokens for these; the model reads them as plain text.
LLAMA2_TAGS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")

# Llama 3's built-in tools and their only argument. All except the last are written NAME.call(query="...").
LLAMA3_TOOLS = {"brave_search": "query", "wolfram_alpha": "query", "photogen": "query", "code_interpreter": "code"}


def llama2(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Llama 2 Chat and Code Llama 7B to 34B Instruct: <s>[INST] user [/INST] answer </s>, repeated for each pair.

    Raises UsageError if a text contains one of the tags: the model could not distinguish it from the format's own.
    """
    bos, eos = _controls(tokenizer, "llama2", "<s>", "</s>")
    system, turns = _turns(messages, "llama2")
    for i, text in enumerate([*([] if system is None else [system]), *turns]):
        for tag in LLAMA2_TAGS:
            if tag in text:
                raise UsageError(
                    f"message {i} contains {tag}, which Llama 2 reads as the start or end of a turn; remove it or"
                    " spell it differently"
                )
    if system is not None:
        turns[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{turns[0]}"
    ids: list[int] = []
    for user, answer in zip(turns[:-1:2], turns[1::2], strict=True):
        ids += [bos, *tokenizer.encode(f"[INST] {user.strip()} [/INST] {answer.strip()} "), eos]
    return [*ids, bos, *tokenizer.encode(f"[INST] {turns[-1].strip()} [/INST]")]


def llama3(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Llama 3, 3.1, 3.2 and 3.3 Instruct: a header with the role, the text, <|eot_id|>.

    The role tool is written ipython; the format has no field for tool_call_id and name. Tool calls follow the
    assistant's text, as JSON or in the syntax of the built-in tools. Code for the code interpreter begins with
    <|python_tag|>. A message with `continues` ends with <|eom_id|>.
    """
    bos, start, end, eot = _controls(
        tokenizer, "llama3", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
    )

    def header(role: str) -> list[int]:
        return [start, *tokenizer.encode(role), end, *tokenizer.encode("\n\n")]

    ids = [bos]
    for i, message in enumerate(check_messages(messages)):
        calls = message.get("tool_calls", [])
        ids += header("ipython" if message["role"] == "tool" else message["role"])
        if any(call["function"]["name"] == "code_interpreter" for call in calls):
            if len(calls) > 1 or message["content"]:
                raise UsageError(
                    f"message {i}: a call of code_interpreter must be alone, because everything after <|python_tag|> is"
                    " code; put the text or the other calls into a separate message"
                )
            ids += _controls(tokenizer, "llama3", "<|python_tag|>")
        # Not stripped, as in Meta's newest code. Meta's older code and Hugging Face's templates strip the text, so they
        # produce other ids if a text begins or ends with white space.
        ids += tokenizer.encode(message["content"])
        for call in calls:
            ids += tokenizer.encode(_llama3_call(call, i))
        ids += _controls(tokenizer, "llama3", "<|eom_id|>") if message.get("continues") else [eot]
    return ids + header("assistant")


def codellama70b(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Code Llama 70B Instruct: " Source: user", a blank line, the text, <step>; a system message always comes first."""
    bos, step = _controls(tokenizer, "codellama-70b", "<s>", "<step>")
    system, turns = _turns(messages, "codellama-70b")

    def header(role: str) -> list[int]:
        # Past answers have a destination too, as Meta's chat_completion returns and expects them. Single-string
        # prompts in circulation omit it.
        return tokenizer.encode(f" Source: {role}" + ("\nDestination: user" if role == "assistant" else ""))

    ids = [bos]
    for role, text in [("system", system or ""), *zip(("user", "assistant") * len(turns), turns, strict=False)]:
        # Header and text are encoded separately: a SentencePiece vocabulary adds a space before each.
        ids += [*header(role), *(tokenizer.encode("\n\n " + text.strip()) if text else []), step]
    return [*ids, *header("assistant"), *tokenizer.encode("\n\n ")]


CHAT_FORMATS: dict[str, ChatFormat] = {"llama2": llama2, "llama3": llama3, "codellama-70b": codellama70b}


def chat_format_of(tokenizer: Tokenizer) -> str | None:
    """The built-in format that a vocabulary can express, or None. The model may have been trained on another one."""
    control = tokenizer.control
    if "<|start_header_id|>" in control:
        return "llama3"
    if "<step>" in control:
        return "codellama-70b"
    if "<s>" in control and "</s>" in control and "<|im_start|>" not in control:
        return "llama2"
    return None


def _controls(tokenizer: Tokenizer, format: str, *names: str) -> list[int]:
    missing = [name for name in names if name not in tokenizer.control]
    if missing:
        fits = chat_format_of(tokenizer)
        raise TemplateError(
            f"the chat format {format} needs tokens that this vocabulary does not have ({', '.join(missing)}), so the"
            " model was probably not trained on that format;"
            f" {'use llm.generate (--raw)' if fits is None else f'use {fits}, which fits the vocabulary'}"
        )
    return [tokenizer.control[name] for name in names]


def _turns(messages: Sequence[Mapping[str, Any]], format: str) -> tuple[str | None, list[str]]:
    """The system text, and the texts of user, assistant, user, ..., user."""
    checked = check_messages(messages)
    for i, message in enumerate(checked):
        if message["role"] in ("tool", "ipython") or "tool_calls" in message or "continues" in message:
            raise UsageError(f"message {i}: the chat format {format} does not support tools; remove this message")
    first = 1 if checked[0]["role"] == "system" else 0
    for i, message in enumerate(checked[first:]):
        expected = ("user", "assistant")[i % 2]
        if message["role"] != expected:
            raise UsageError(
                f"message {first + i}: the chat format {format} needs an optional system message, then user and"
                f" assistant alternating; expected {expected}, got {message['role']}"
            )
    if checked[-1]["role"] != "user":
        raise UsageError(
            f"the chat format {format} expects that the last message has the role user, got {checked[-1]['role']}"
        )
    return checked[0]["content"] if first else None, [message["content"] for message in checked[first:]]


def _llama3_call(call: ToolCall, index: int) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if name not in LLAMA3_TOOLS:
        return json.dumps({"type": "function", "name": name, "parameters": arguments})
    key = LLAMA3_TOOLS[name]
    if set(arguments) != {key} or not isinstance(arguments[key], str):
        raise UsageError(f"message {index}: {name} takes one string argument, {key}; got {arguments!r:.80}")
    value: str = arguments[key]
    return value if name == "code_interpreter" else f'{name}.call(query="{value}")'
