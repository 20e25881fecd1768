"""Parse the bodies of requests: from JSON as in OpenAI's API to prompts and their options.

Every field and value is checked. One that is not supported is an error that names it. Only UNUSED fields are ignored,
which clients send to every server and which describe the request, not the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .. import checks
from ..chat import check_messages, continues_answer, forced_call
from ..chat.messages import check_tools, deeper
from ..checks import shown
from ..errors import CheckpointError, ContextLengthError, UsageError
from ..generation.answer import Prompt
from ..sampling import OPTIONS
from ..system.documents import parse_json
from ..text import ENDS, LONGEST_TOKEN, Llama

DEFAULT_TOKENS = 16  # of /v1/completions, as in OpenAI's API
MOST_ANSWERS, MOST_LOGPROBS, MOST_TOOLS = 128, 20, 128
MOST_PROMPTS = 1024  # times n
DEEPEST = 100  # levels of a body; the functions that traverse it are recursive
TOOL_NAME = "[a-zA-Z0-9_.-]{1,64}"

SHARED = ("model", "max_tokens", "n", "seed", *ENDS, "stream", "stream_options", "logit_bias", "logprobs")
CHAT = ("messages", "max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice",
        "chat_template_kwargs")  # fmt: skip
CHAT_FIELDS = (*CHAT, "parallel_tool_calls", "prompt_cache_key", *SHARED, *OPTIONS)
TEXT_FIELDS = ("prompt", "echo", "suffix", "prompt_cache_key", *SHARED, *OPTIONS)
ANSWER_FIELDS = ("model", "messages", "prompt", "ids", "answer", "off", "top", "response_format", "seed", "max_tokens",
                 "logit_bias", "chat_template_kwargs", *OPTIONS)  # fmt: skip
LONGEST_LOOK, LONGEST_PAGE = 4096, 256  # tokens; a trace keeps all weights of all tokens
SHOWN_TOP = 10  # alternatives for each token
UNUSED = ("user", "safety_identifier", "store", "metadata", "service_tier", "verbosity", "reasoning_effort")

Heads = tuple[tuple[int, int], ...]  # (layer, head)


@dataclass
class Call:
    """A checked request.

    prompts  one for each answer: prompt i // n, answer i % n
    top      alternatives for each token in the response
    echoed   the texts of the prompts, if they are part of the response
    """

    n: int
    stream: bool
    usage: bool  # a chunk with the usage ends the stream
    prompts: list[Prompt] = field(default_factory=list)
    logprobs: bool = False
    top: int = 0
    echoed: list[str] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    several_calls: bool = True


class UnknownModel(UsageError):
    """The request is for another model."""


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises UsageError."""
    try:
        body = parse_json(raw, "the body")
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    if deeper(body, DEEPEST):
        raise UsageError(f"the body must not be nested deeper than {DEEPEST} levels")
    return body


def parse_chat(body: Mapping[str, Any], llm: Llama, model: str) -> Call:
    """Check a body of /v1/chat/completions and encode its messages. Raises a LlamaError."""
    body = _fields(body, CHAT_FIELDS, model)
    options, call = _shared(body, llm)
    limits = {_tokens(name, body[name], llm) for name in ("max_tokens", "max_completion_tokens") if name in body}
    if len(limits) > 1:
        raise UsageError("max_tokens and max_completion_tokens differ: give one of them")
    options["max_new_tokens"] = limits.pop() if limits else llm.model.max_seq_len
    call.logprobs = checks.boolean("logprobs", body.get("logprobs", False))
    call.top = checks.integer("top_logprobs", body.get("top_logprobs", 0), 0, MOST_LOGPROBS)
    if call.top and not call.logprobs:
        raise UsageError("top_logprobs needs logprobs: true")
    tools = _tools(body)
    schema = _response_format(body.get("response_format"))
    call.several_calls = checks.boolean("parallel_tool_calls", body.get("parallel_tool_calls", True))
    if tools and (choice := body.get("tool_choice", "auto")) != "none":
        call.tools, forced = tools, forced_call(choice, tools)
        if forced is not None and schema is not None:
            raise UsageError("response_format can't be combined with a tool_choice that requires a call")
        schema = schema or forced
    options |= {"logprobs": call.logprobs, "top_logprobs": call.top}
    if schema is not None:
        options["schema"] = schema
    options["continues"], ids = _conversation(body, call.tools, llm)
    call.prompts = _owned(body, llm.prepare(ids, options, call.n))
    return call


def _conversation(body: Mapping[str, Any], tools: list[dict[str, Any]] | None, llm: Llama) -> tuple[bool, list[int]]:
    """Whether the answer continues the last message, and the ids of the messages."""
    if not isinstance(messages := body.get("messages"), list):
        raise UsageError(f"messages must be a list of messages, got {shown(messages)}")
    messages = check_messages([_message(message) for message in messages])
    if not isinstance(more := body.get("chat_template_kwargs", {}), dict):
        raise UsageError(f"chat_template_kwargs must be an object, got {shown(more)}")
    _check_characters(len(json.dumps([messages, tools, more], ensure_ascii=False)), llm)
    return continues_answer(messages), _fitting(llm.encode_chat(messages, tools, more), llm)


def parse_text(body: Mapping[str, Any], llm: Llama, model: str) -> Call:
    """Check a body of /v1/completions and encode its prompts. Raises a LlamaError."""
    body = _fields(body, TEXT_FIELDS, model)
    options, call = _shared(body, llm)
    options["max_new_tokens"] = _tokens("max_tokens", body.get("max_tokens", DEFAULT_TOKENS), llm)
    call.logprobs = "logprobs" in body
    call.top = checks.integer("logprobs", body.get("logprobs", 0), 0, MOST_LOGPROBS)
    echo = checks.boolean("echo", body.get("echo", False))
    if echo and "suffix" in body:
        raise UsageError("echo can't be combined with suffix")
    ids = _prompts(body.get("prompt"), body.get("suffix"), call.n, llm)
    if echo:
        call.echoed = [llm.tokenizer.decode(one) for one in ids]
    options |= {"logprobs": call.logprobs, "top_logprobs": call.top, "prompt_logprobs": echo and call.logprobs}
    call.prompts = _owned(body, [prompt for one in ids for prompt in llm.prepare(one, options, call.n)])
    return call


# --------------------------------------------------------------------------------------------------------------- looks
def parse_answer(body: Mapping[str, Any], llm: Llama, model: str) -> dict[str, Any]:
    """The arguments of `Looks.answer` from a body of /look/answer: messages, a text, or ids. Raises a LlamaError."""
    body = _fields(body, ANSWER_FIELDS, model)
    options, _ = _shared(body, llm)
    options |= {"max_new_tokens": _tokens("max_tokens", body.get("max_tokens", -1), llm), "continues": False}
    if (schema := _response_format(body.get("response_format"))) is not None:
        options["schema"] = schema
    match [name for name in ("messages", "prompt", "ids") if name in body]:
        case ["messages"]:
            _, ids = _conversation(body, None, llm)
        case ["prompt"]:
            ids = _prompts(body["prompt"], None, 1, llm)[0]
        case ["ids"]:
            ids = _ids("ids", body, llm)
        case _:
            raise UsageError("expected one of messages, prompt and ids")
    answer = _ids("answer", body, llm) if "answer" in body else []
    _check_look([*ids, *answer], LONGEST_LOOK - 1)
    (prompt,) = llm.prepare(ids, options)
    top = checks.integer("top", body.get("top", SHOWN_TOP), 0, MOST_LOGPROBS)
    return {"prompt": prompt, "answer": answer, "off": _heads("off", body, llm), "top": top}


def parse_inspection(body: Mapping[str, Any], llm: Llama, model: str) -> dict[str, Any]:
    """The arguments of `Looks.inside` from a body of /look/inside. Raises UsageError."""
    body = _fields(body, ("model", "ids", "token", "against", "head", "key", "off"), model)
    ids, last = _check_look(_ids("ids", body, llm), LONGEST_LOOK), llm.tokenizer.n_vocab - 1
    ends = {"token": last, "against": last, "key": len(ids) - 1}
    chosen: dict[str, Any] = {
        name: checks.integer(name, body[name], 0, end) for name, end in ends.items() if name in body
    }
    if "head" in body:
        (chosen["head"],) = _heads("head", {"head": [body["head"]]}, llm)
    return {"ids": ids, "off": _heads("off", body, llm), "chosen": chosen}


def parse_page(body: Mapping[str, Any], llm: Llama, model: str) -> list[int]:
    """The ids of a body of /look/page. Raises UsageError."""
    return _check_look(_ids("ids", _fields(body, ("model", "ids"), model), llm), LONGEST_PAGE)


def _check_look(ids: list[int], most: int) -> list[int]:
    if len(ids) > most:
        raise ContextLengthError(f"the text has {len(ids):,} tokens; a look takes at most {most:,}")
    return ids


def _ids(name: str, body: Mapping[str, Any], llm: Llama) -> list[int]:
    ids = body.get(name)
    if not isinstance(ids, list) or not ids:
        raise UsageError(f"{name} must be a list of token ids, got {shown(ids)}")
    last = llm.model.config.vocab_size - 1
    return [checks.integer(f"a token id of {name}", id, 0, last) for id in _fitting(ids, llm)]


def _heads(name: str, body: Mapping[str, Any], llm: Llama) -> Heads:
    """Pairs [layer, head], in order."""
    heads, config = body.get(name, []), llm.model.config
    for head in heads if isinstance(heads, list) else [None]:
        if not isinstance(head, list) or len(head) != 2:
            raise UsageError(f"{name} must hold pairs [layer, head], got {shown(heads)}")
        checks.integer("a layer", head[0], 0, config.n_layers - 1)
        checks.integer("a head", head[1], 0, config.n_heads - 1)
    return tuple(sorted({(layer, head) for layer, head in heads}))


# ------------------------------------------------------------------------------------------------------- single fields
def _fields(body: Mapping[str, Any], known: Sequence[str], model: str) -> dict[str, Any]:
    """The fields that are not null. Raises UsageError for an unknown one."""
    if unknown := [name for name in body if name not in (*known, *UNUSED)]:
        raise UsageError(f"unknown field {unknown[0]!r:.80}; known: {', '.join(known)}")
    body = {name: value for name, value in body.items() if value is not None and name not in UNUSED}
    check_model(body.get("model", model), model)
    if not isinstance(body.get("prompt_cache_key", ""), str):
        raise UsageError("prompt_cache_key must be a string")
    return body


def check_model(name: object, model: str) -> None:
    """Raise UnknownModel unless a request names the model that this server has."""
    if name != model:
        raise UnknownModel(f"unknown model {shown(name)}; this server has {model!r}")


def _owned(body: Mapping[str, Any], prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a request with their owner: its prompt_cache_key or, without one, the request alone."""
    owner = body.get("prompt_cache_key", object())
    return [replace(prompt, owner=owner) for prompt in prompts]


def _shared(body: dict[str, Any], llm: Llama) -> tuple[dict[str, Any], Call]:
    """The options of `Llama.prepare` that both endpoints have, and a Call with the shared fields."""
    options = {name: body[name] for name in (*OPTIONS, *ENDS, "seed") if name in body}
    if not llm.sampling:
        options.setdefault("temperature", 1.0)  # the default of OpenAI's API
    bias = body.get("logit_bias", {})
    if not isinstance(bias, dict) or not all(re.fullmatch("0|[1-9][0-9]{0,8}", key) for key in bias):
        raise UsageError("logit_bias must be an object whose keys are token ids")
    last = llm.model.config.vocab_size - 1
    options["logit_bias"] = {checks.integer("an id of logit_bias", int(key), 0, last): bias[key] for key in bias}
    more, stream = body.get("stream_options", {}), checks.boolean("stream", body.get("stream", False))
    if not isinstance(more, dict) or more.keys() - {"include_usage"}:
        raise UsageError("stream_options must be an object with the key include_usage")
    n = checks.integer("n", body.get("n", 1), 1, MOST_ANSWERS)
    return options, Call(n, stream, checks.boolean("include_usage", more.get("include_usage", False)))


def _fitting(ids: list[Any], llm: Llama) -> list[Any]:
    """Return the ids. Raises ContextLengthError if there are too many."""
    if len(ids) >= (context := llm.model.max_seq_len):
        raise ContextLengthError(
            f"the prompt has {len(ids)} tokens, but the context of {context} must hold prompt and answer; shorten"
            " the prompt"
        )
    return ids


def _tokens(name: str, limit: object, llm: Llama) -> int:
    """The value of max_tokens. As in other servers, -1 stands for no limit."""
    limit = checks.integer(name, limit, -1, llm.model.max_seq_len)
    return llm.model.max_seq_len if limit == -1 else limit


def _check_characters(count: int, llm: Llama) -> None:
    """Reject text that can't fit into the context. Encoding it first would take seconds for megabytes."""
    context = llm.model.max_seq_len
    if count > LONGEST_TOKEN * context:
        raise ContextLengthError(
            f"the prompt has {count:,} characters, but the context has only {context} tokens; shorten the prompt"
        )


def _prompts(prompt: Any, suffix: Any, n: int, llm: Llama) -> list[list[int]]:
    """The ids of `prompt`: a text, ids, or a list of either."""
    several, ids = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list), []
    if not isinstance(suffix, str | None):
        raise UsageError(f"suffix must be a string, got {shown(suffix)}")
    checks.integer("the number of prompts times n", len(prompt) * n if several else n, 1, MOST_PROMPTS)
    for one in prompt if several else [prompt]:
        if isinstance(one, str):
            _check_characters(len(one) + len(suffix or ""), llm)
            found = llm.tokenizer.encode_prompt(one) if suffix is None else llm.tokenizer.encode_infill(one, suffix)
            ids.append(_fitting(found, llm))
        elif isinstance(one, list) and one and suffix is None:
            last = llm.model.config.vocab_size - 1
            ids.append([checks.integer("a token id of prompt", id, 0, last) for id in _fitting(one, llm)])
        else:
            raise UsageError(
                f"prompt must be a text, a list of texts, a list of token ids, or a list of such lists; got"
                f" {shown(one)}"
            )
    return ids


def _message(message: Any) -> Any:
    """A message without nulls and unused keys, with its text parts joined. `check_messages` rejects all other forms."""
    if not isinstance(message, dict):
        return message
    role = message.get("role")
    unused = ("annotations",) if role in ("tool", "ipython") else ("annotations", "name")
    message = {key: value for key, value in message.items() if value is not None and key not in unused}
    if role == "developer":
        message["role"] = "system"
    if role == "assistant":
        message.setdefault("content", "")
    parts = message.get("content")
    if isinstance(parts, list):
        for part in parts:
            if not (isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"):
                raise UsageError(f"a part of content must be {{type: text, text: ..}}, got {shown(part)}")
            if not isinstance(part["text"], str):
                raise UsageError(f"the text of a part of content must be a string, got {shown(part['text'])}")
        message["content"] = "".join(part["text"] for part in parts)
    return message


# ------------------------------------------------------------------------------------------------- tools and schemas
def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = check_tools(body.get("tools")) or []
    if not tools and body.get("tool_choice") not in (None, "none", "auto"):
        raise UsageError("tool_choice needs tools")
    checks.integer("the number of tools", len(tools), 0, MOST_TOOLS)
    for tool in tools:
        function = tool.get("function")
        if tool.keys() != {"type", "function"} or tool["type"] != "function" or not isinstance(function, dict):
            raise UsageError(f"a tool must be {{type: function, function: {{..}}}}, got {shown(tool)}")
        tool["function"] = function = {key: value for key, value in function.items() if value is not None}
        if unknown := function.keys() - {"name", "description", "parameters", "strict"}:
            raise UsageError(f"unknown key {sorted(unknown)[0]!r:.80} of a function")
        name = function.get("name")
        if not isinstance(name, str) or not re.fullmatch(TOOL_NAME, name):
            raise UsageError(f"the name of a function must match {TOOL_NAME}, got {shown(name)}")
        if not isinstance(function.get("parameters", {}), dict):
            raise UsageError(
                f"parameters of the function {name} must be a JSON schema, got {shown(function['parameters'])}"
            )
        for key, kind, what in (("description", str, "a string"), ("strict", bool, "true or false")):
            if not isinstance(function.get(key, kind()), kind):
                raise UsageError(f"{key} of the function {name} must be {what}, got {shown(function[key])}")
    return tools


def _response_format(form: Any) -> dict[str, Any] | None:
    """The schema of the answer; None for plain text."""
    if form is None or form == {"type": "text"}:
        return None
    if form == {"type": "json_object"}:
        return {"type": "object"}
    if isinstance(form, dict) and form.keys() == {"type", "json_schema"} and form["type"] == "json_schema":
        named = form["json_schema"] if isinstance(form["json_schema"], dict) else {}
        kinds = {"name": str, "description": str | None, "schema": dict, "strict": bool | None}
        known = not named.keys() - kinds.keys()
        if known and "schema" in named and all(isinstance(value, kinds[key]) for key, value in named.items()):
            return dict(named["schema"])
    raise UsageError(
        "response_format must be {type: text}, {type: json_object} or {type: json_schema, json_schema: {name, schema}},"
        f" got {shown(form)}"
    )
