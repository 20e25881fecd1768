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
from ..chat.messages import continues_answer, deeper
from ..checks import shown
from ..errors import CheckpointError, ContextLengthError, UsageError
from ..generation.answer import Job
from ..generation.structured import forced_call
from ..sampling import LARGEST_SEED, OPTIONS
from ..system.documents import KINDS, parse_json
from ..text import ENDS, LONGEST_TOKEN, Llama

DEFAULT_TOKENS = 16  # of /v1/completions, as in OpenAI's API
MOST_ANSWERS, MOST_LOGPROBS, MOST_TOOLS = 128, 20, 128
MOST_PROMPTS = 1024  # times n
DEEPEST = 100  # levels of a body; the functions that traverse it are recursive
TOOL_NAME = "[a-zA-Z0-9_.-]{1,64}"
LONGEST_LOOK, LONGEST_PAGE = 4096, 256  # tokens; a trace keeps all weights of all tokens
SHOWN_TOP = 10  # alternatives for each token

# Field -> the type of its values, or the range of its integers. `object`: checked where it is used.
Known = dict[str, Any]
TOKENS, TOP = (-1, 2**31), (0, MOST_LOGPROBS)
GENERATION: Known = {"model": object, "max_tokens": TOKENS, "seed": (-LARGEST_SEED, LARGEST_SEED), "logit_bias": dict}
GENERATION |= dict.fromkeys(OPTIONS, object)
SHARED: Known = {"n": (1, MOST_ANSWERS), "stream": bool, "stream_options": dict, "prompt_cache_key": str}
SHARED |= GENERATION | dict.fromkeys(ENDS, object)
CHAT: Known = {"messages": list, "chat_template_kwargs": dict, "response_format": dict}
CHAT_FIELDS: Known = CHAT | {"max_completion_tokens": TOKENS, "logprobs": bool, "top_logprobs": TOP, "tools": list}
CHAT_FIELDS |= {"tool_choice": object, "parallel_tool_calls": bool, **SHARED}
TEXT_FIELDS: Known = {"prompt": object, "echo": bool, "suffix": str, "logprobs": TOP, "best_of": (1, 1), **SHARED}
STREAM_OPTIONS: Known = {"include_usage": bool, "include_obfuscation": bool}
TOOL: Known = {"type": str, "function": dict}
FUNCTION: Known = {"name": str, "description": str, "parameters": dict, "strict": bool}
FORMAT: Known = {"type": str, "schema": dict, "json_schema": dict}
NAMED_SCHEMA: Known = {"name": str, "description": str, "schema": dict, "strict": bool}
ANSWER_FIELDS: Known = {"prompt": object, "ids": list, "answer": list, "off": list, "top": TOP, **CHAT, **GENERATION}
INSIDE_FIELDS: Known = {"model": object, "ids": list, "head": list, "off": list}
INSIDE_FIELDS |= dict.fromkeys(("token", "against", "key"), int)
ADDED, INNER = ("annotations", "index", "parsed", "parsed_arguments"), ("tool_calls", "function")
UNUSED = ("user", "safety_identifier", "store", "metadata", "service_tier", "verbosity", "reasoning_effort")

Heads = tuple[tuple[int, int], ...]  # (layer, head)


@dataclass
class AnswerRequest:
    """A checked request.

    jobs     one for each answer: prompt i // n, answer i % n
    top      alternatives for each token in the response
    echoed   the texts of the prompts, if they are part of the response
    tools    the names of the functions, since each answer has a parser of its own
    """

    n: int
    stream: bool
    usage: bool  # a chunk with the usage ends the stream
    jobs: list[Job] = field(default_factory=list)
    logprobs: bool = False
    top: int = 0
    echoed: list[str] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
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
    for name, value in body.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UsageError(f"{name} must be valid Unicode, but it has a lone surrogate") from None
    return body


def parse_chat(body: Mapping[str, Any], llm: Llama, model: str) -> AnswerRequest:
    """Check a body of /v1/chat/completions and encode its messages. Raises a LlamaError."""
    body = _fields(body, CHAT_FIELDS, model)
    options, call = _shared(body, llm)
    limits = {body[name] for name in ("max_tokens", "max_completion_tokens") if name in body}
    if len(limits) > 1:
        raise UsageError("max_tokens and max_completion_tokens differ: give one of them")
    options["max_new_tokens"] = _limit(limits.pop() if limits else -1, llm)
    call.logprobs, call.top = body.get("logprobs", False), body.get("top_logprobs", 0)
    if call.top and not call.logprobs:
        raise UsageError("top_logprobs needs logprobs: true")
    options |= {"logprobs": call.logprobs, "top_logprobs": call.top}
    call.several_calls, choice = body.get("parallel_tool_calls", True), body.get("tool_choice", "auto")
    tools = [] if choice == "none" else _tools(body.get("tools", []))
    call.tools = [{"name": tool["function"]["name"]} for tool in tools]
    options["schema"], options["grammar"] = _schema(body.get("response_format", {})), forced_call(choice, tools)
    if options["schema"] and options["grammar"]:
        raise UsageError("response_format can't be combined with a tool_choice that requires a call")
    options["continues"], ids = _conversation(body, tools, llm, options["grammar"] is not None)
    call.jobs = _owned(body, llm.prepare(ids, options, call.n))
    return call


def parse_text(body: Mapping[str, Any], llm: Llama, model: str) -> AnswerRequest:
    """Check a body of /v1/completions and encode its prompts. Raises a LlamaError."""
    body = _fields(body, TEXT_FIELDS, model)
    options, call = _shared(body, llm)
    options["max_new_tokens"] = _limit(body.get("max_tokens", DEFAULT_TOKENS), llm)
    call.logprobs, call.top, echo = "logprobs" in body, body.get("logprobs", 0), body.get("echo", False)
    if echo and "suffix" in body:
        raise UsageError("echo can't be combined with suffix")
    ids = _prompts(body.get("prompt"), body.get("suffix"), call.n, llm)
    if echo:
        call.echoed = [llm.tokenizer.decode(one) for one in ids]
    options |= {"logprobs": call.logprobs, "top_logprobs": call.top, "prompt_logprobs": echo and call.logprobs}
    call.jobs = _owned(body, [prompt for one in ids for prompt in llm.prepare(one, options, call.n)])
    return call


# --------------------------------------------------------------------------------------------------------------- looks
def parse_answer(body: Mapping[str, Any], llm: Llama, model: str) -> dict[str, Any]:
    """The arguments of `Looks.answer` from a body of /look/answer: messages, a text, or ids. Raises a LlamaError."""
    body = _fields(body, ANSWER_FIELDS, model)
    options, _ = _shared(body, llm)
    options |= {"max_new_tokens": _limit(body.get("max_tokens", -1), llm), "continues": False}
    options["schema"] = _schema(body.get("response_format", {}))
    match [name for name in ("messages", "prompt", "ids") if name in body]:
        case ["messages"]:
            _, ids = _conversation(body, [], llm)
        case ["prompt"]:
            ids = _prompts(body["prompt"], None, 1, llm)[0]
        case ["ids"]:
            ids = _ids("ids", body["ids"], llm)
        case _:
            raise UsageError("expected one of messages, prompt and ids")
    answer = _ids("answer", body["answer"], llm) if "answer" in body else []
    _check_look([*ids, *answer], LONGEST_LOOK - 1)
    (job,) = llm.prepare(ids, options)
    return {"job": job, "answer": answer, "off": _heads("off", body, llm), "top": body.get("top", SHOWN_TOP)}


def parse_inspection(body: Mapping[str, Any], llm: Llama, model: str) -> dict[str, Any]:
    """The arguments of `Looks.inside` from a body of /look/inside. Raises UsageError."""
    body = _fields(body, INSIDE_FIELDS, model)
    ids, last = _check_look(_ids("ids", body.get("ids"), llm), LONGEST_LOOK), llm.tokenizer.n_vocab - 1
    ends = {"token": last, "against": last, "key": len(ids) - 1}
    chosen: dict[str, Any] = {
        name: checks.integer(name, body[name], 0, end) for name, end in ends.items() if name in body
    }
    if "head" in body:
        (chosen["head"],) = _heads("head", {"head": [body["head"]]}, llm)
    return {"ids": ids, "off": _heads("off", body, llm), "chosen": chosen}


def parse_page(body: Mapping[str, Any], llm: Llama, model: str) -> list[int]:
    """The ids of a body of /look/page. Raises UsageError."""
    body = _fields(body, {"model": object, "ids": list}, model)
    return _check_look(_ids("ids", body.get("ids"), llm), LONGEST_PAGE)


def _check_look(ids: list[int], most: int) -> list[int]:
    if len(ids) > most:
        raise ContextLengthError(f"the text has {len(ids):,} tokens; a look takes at most {most:,}")
    return ids


def _heads(name: str, body: Mapping[str, Any], llm: Llama) -> Heads:
    """Pairs [layer, head], in order."""
    heads, config = body.get(name, []), llm.model.config
    for head in heads:
        if not isinstance(head, list) or len(head) != 2:
            raise UsageError(f"{name} must hold pairs [layer, head], got {shown(heads)}")
        checks.integer("a layer", head[0], 0, config.n_layers - 1)
        checks.integer("a head", head[1], 0, config.n_heads - 1)
    return tuple(sorted({(layer, head) for layer, head in heads}))


# ------------------------------------------------------------------------------------------------------------- fields
def _entries(value: Any, known: Known, where: str = "") -> dict[str, Any]:
    """An object's entries that are not null. Raises UsageError for an unknown one, or a value of another kind.

    where  the path of the object in the body, with a dot at its end
    """
    checks.instance(where[:-1], value, dict, "an object")
    if unknown := [key for key in value if key not in known]:
        raise UsageError(f"unknown field {where + unknown[0]!r:.80}; known: {', '.join(known)}")
    entries = {key: item for key, item in value.items() if item is not None}
    for key, item in entries.items():
        if isinstance(kind := known[key], tuple):
            checks.integer(where + key, item, *kind)
        elif not isinstance(item, kind):
            raise UsageError(f"{where}{key} must be {KINDS[kind]}, got {shown(item)}")
    return entries


def _fields(body: Mapping[str, Any], known: Known, model: str) -> dict[str, Any]:
    body = _entries({name: value for name, value in body.items() if name not in UNUSED}, known)
    check_model(body.get("model", model), model)
    return body


def check_model(name: object, model: str) -> None:
    """Raise UnknownModel unless a request names the model that this server has."""
    if name != model:
        raise UnknownModel(f"unknown model {shown(name)}; this server has {model!r}")


def _owned(body: Mapping[str, Any], prompts: Sequence[Job]) -> list[Job]:
    """The prompts of a request with their owner: its prompt_cache_key or, without one, the request alone."""
    owner = body.get("prompt_cache_key", object())
    return [replace(prompt, owner=owner) for prompt in prompts]


def _shared(body: Mapping[str, Any], llm: Llama) -> tuple[dict[str, Any], AnswerRequest]:
    """The options of `Llama.prepare` that both endpoints have, and an AnswerRequest with the shared fields."""
    options = {name: body[name] for name in (*OPTIONS, *ENDS) if name in body}
    if not llm.sampling:
        options.setdefault("temperature", 1.0)  # the default of OpenAI's API
    if "seed" in body:
        options["seed"] = body["seed"] % (LARGEST_SEED + 1)
    bias, last = body.get("logit_bias", {}), llm.model.config.vocab_size - 1
    if not all(re.fullmatch("0|[1-9][0-9]{0,8}", key) for key in bias):
        raise UsageError("the keys of logit_bias must be token ids")
    options["logit_bias"] = {checks.integer("an id of logit_bias", int(key), 0, last): bias[key] for key in bias}
    if (stop := options.get("stop")) == "" or isinstance(stop, list):  # lm-eval sends "", which llama-server ignores
        options["stop"] = [text for text in stop if text != ""]
    more = _entries(body.get("stream_options", {}), STREAM_OPTIONS, "stream_options.")
    if more and not body.get("stream"):
        raise UsageError("stream_options needs stream: true")
    return options, AnswerRequest(body.get("n", 1), body.get("stream", False), more.get("include_usage", False))


def _limit(tokens: int, llm: Llama) -> int:
    """The value of max_tokens. As in other servers, -1 stands for no limit."""
    return llm.model.max_seq_len if tokens == -1 else tokens


# --------------------------------------------------------------------------------------------------- prompts and ids
def _fitting(ids: list[int], llm: Llama) -> list[int]:
    """Return the ids. Raises ContextLengthError if there are too many."""
    if len(ids) >= (context := llm.model.max_seq_len):
        raise ContextLengthError(
            f"the prompt has {len(ids)} tokens, but the context of {context} must hold prompt and answer; shorten"
            " the prompt"
        )
    return ids


def _ids(name: str, ids: Any, llm: Llama, kinds: str = "") -> list[int]:
    if not isinstance(ids, list) or not ids:
        raise UsageError(f"{name} must be {kinds}a list of token ids, got {shown(ids)}")
    last = llm.model.config.vocab_size - 1
    return [checks.integer(f"a token id of {name}", id, 0, last) for id in _fitting(ids, llm)]


def _check_characters(count: int, llm: Llama) -> None:
    """Reject text that can't fit into the context. Encoding it first would take seconds for megabytes."""
    context = llm.model.max_seq_len
    if count > LONGEST_TOKEN * context:
        raise ContextLengthError(
            f"the prompt has {count:,} characters, but the context has only {context} tokens; shorten the prompt"
        )


def _prompts(prompt: Any, suffix: str | None, n: int, llm: Llama) -> list[list[int]]:
    """The ids of `prompt`: a text, ids, or a list of either."""
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    checks.integer("the number of prompts times n", len(prompt) * n if several else n, 1, MOST_PROMPTS)
    ids = []
    for one in prompt if several else [prompt]:
        if isinstance(one, str):
            _check_characters(len(one) + len(suffix or ""), llm)
            found = llm.tokenizer.encode_prompt(one) if suffix is None else llm.tokenizer.encode_infill(one, suffix)
            ids.append(_fitting(found, llm))
        elif suffix is None:
            ids.append(_ids("prompt", one, llm, "a text, a list of texts or "))
        else:
            raise UsageError("a prompt with suffix must be a text")
    return ids


def _conversation(
    body: Mapping[str, Any], tools: list[dict[str, Any]], llm: Llama, forced: bool = False
) -> tuple[bool, list[int]]:
    """Whether the answer continues the last message, and the ids of the messages."""
    messages, more = [_message(message) for message in body.get("messages", [])], body.get("chat_template_kwargs", {})
    _check_characters(len(json.dumps([messages, tools, more], ensure_ascii=False)), llm)
    return continues_answer(messages), _fitting(llm.encode_chat(messages, tools or None, more, forced=forced), llm)


def _message(message: Any) -> dict[str, Any]:
    """A message without nulls and unused keys, with its text parts joined. `encode_chat` checks it."""
    checks.instance("a message", message, dict, "an object")
    role = {"developer": "system", "function": "tool"}.get(str(message.get("role")), message.get("role"))
    unused = () if role in ("tool", "ipython") else ("name",)
    message = {key: item for key, item in _without_added(message).items() if item is not None and key not in unused}
    if role is not None:
        message["role"] = role
    if role == "assistant":
        message.setdefault("content", "")
    if isinstance(message.get("content"), list):
        parts = [_entries(part, {"type": str, "text": str}, "a part of content.") for part in message["content"]]
        if any(part.keys() != {"type", "text"} or part["type"] != "text" for part in parts):
            raise UsageError(f"each part of content must be {{type: text, text: ..}}, got {shown(message['content'])}")
        message["content"] = "".join(part["text"] for part in parts)
    return message


def _without_added(value: Any) -> Any:
    """A message, or the calls in it, without the fields that OpenAI's client adds to received messages."""
    if isinstance(value, list):
        return [_without_added(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_added(item) if key in INNER else item for key, item in value.items() if key not in ADDED}


# ------------------------------------------------------------------------------------------------- tools and schemas
def _tools(tools: list[Any]) -> list[dict[str, Any]]:
    checks.integer("the number of tools", len(tools), 0, MOST_TOOLS)
    checked = []
    for i, tool in enumerate(tools):
        function = _entries(_entries(tool, TOOL, f"tools[{i}].").get("function"), FUNCTION, f"tools[{i}].function.")
        if tool.get("type") != "function" or not re.fullmatch(TOOL_NAME, function.get("name", "")):
            raise UsageError(f"tools[{i}] must be {{type: function, function: {{name: {TOOL_NAME}, ..}}}}")
        checked.append({"type": "function", "function": function})
    return checked


def _schema(form: Any) -> dict[str, Any] | None:
    """The schema of the answer that a response_format asks for; None for plain text."""
    form = _entries(form, FORMAT, "response_format.")
    match form.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return {"type": "object", **form.get("schema", {})}
        case "json_schema":
            named = _entries(form.get("json_schema"), NAMED_SCHEMA, "response_format.json_schema.")
            if "schema" in named:
                return dict(named["schema"])
    raise UsageError(
        "response_format must be {type: text}, {type: json_object} or {type: json_schema, json_schema: {name, schema}},"
        f" got {shown(form)}"
    )
