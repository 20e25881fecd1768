"""Parse the bodies of requests: turn JSON as in OpenAI's API into prompts and their options.

Every field and value is checked. An unsupported field or value raises an error that names it. dialects.py translates
the fields of other servers before.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from .. import checks
from ..chat.messages import continues_answer, deeper
from ..chat.thoughts import Thoughts
from ..checks import shown
from ..errors import ContextLengthError, UsageError
from ..generation.answer import Job
from ..generation.structured import forced_call
from ..sampling import LARGEST_SEED, option_names
from ..system.documents import Required, by_id, check_unicode, checked, parse_json
from ..text import LONGEST_TOKEN, Llama
from ..tokenizer import Decoder
from .dialects import unknown
from .spelling import Spelling

DEFAULT_TOKENS = 16  # of /v1/completions, as in OpenAI's API
MOST_ANSWERS, MOST_LOGPROBS, MOST_TOOLS = 128, 20, 128
MOST_PROMPTS = 1024  # limit of the number of prompts times n
DEEPEST = 100  # levels of nesting in a body; the functions that traverse a body are recursive
COMBINES = {"anyOf", "oneOf", "$ref", "if", "dependentSchemas"}  # keywords that add other schemas to a JSON schema
LONGEST_LOOK, LONGEST_GRID, LONGEST_PAGE = 4096, 512, 256  # tokens; a page holds all attention weights of all tokens


def tool_name(name: Any, where: str) -> Any:
    """Check the name of a function; a kind (system/documents.py)."""
    if not re.fullmatch(pattern := "[a-zA-Z0-9_.-]{1,64}", checked(name, str, where)):
        raise UsageError(f"{where} must match {pattern}, got {shown(name)}")
    return name


def closed(schema: Any) -> Any:
    """A schema whose objects have only the keys in `properties`, unless the schema says otherwise, as in other servers.

    Without this, small models add keys without end. A schema that combines properties with other schemas is unchanged,
    since each schema would exclude the keys of the others. An object that requires an unlisted key is unchanged, too.
    """
    nodes = [*_nodes(schema := copy.deepcopy(schema))]
    if not any("allOf" in node or ("properties" in node and node.keys() & COMBINES) for node in nodes):
        for node in nodes:
            listed: Any = node.get("properties")
            required = node.get("required", [])
            lists = isinstance(listed, dict) and isinstance(required, list)
            if lists and all(isinstance(name, str) and name in listed for name in required):
                node.setdefault("additionalProperties", False)
    return schema


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """The objects in a schema, except those in values such as those of `enum`."""
    inner = value if isinstance(value, list) else []
    if isinstance(value, dict):
        yield value
        inner = [one for key, one in value.items() if key not in ("const", "enum", "default", "examples")]
    for one in inner:
        yield from _nodes(one)


def response_format(value: Any, where: str) -> dict[str, Any]:
    """Translate a format of the answer to an option, no option for plain text; a kind (system/documents.py)."""
    match form := {"type": "text", **checked(value, FORMAT, where)}:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"schema": {"type": "object", **closed(form.get("schema", {}))}}
        case {"type": "json_schema", "json_schema": {"schema": schema}} | {"type": "json_schema", "schema": schema}:
            return {"schema": closed(schema)}
    raise UsageError(
        f"{where} must be {{type: text}}, {{type: json_object}} or {{type: json_schema, ...}} with a schema, got"
        f" {shown(value)}"
    )


def structured_outputs(value: Any, where: str) -> dict[str, Any]:
    """Translate vLLM's structured_outputs to an option; a kind (system/documents.py)."""
    outputs = checked(value, OUTPUTS, where)
    asked = {name: found for name, found in outputs.items() if (name, found) != ("json_object", False)}
    match asked:
        case {"json_object": True, **rest} if not rest:
            return {"schema": {"type": "object"}}
        case {"json": schema, **rest} if not rest:
            schema = parse_body(schema.encode(), "json") if isinstance(schema, str) else schema
            return {"schema": closed(schema)}
        case {"choice": [*choices], **rest} if choices and not rest:
            return {"grammar": f"start: {' | '.join(map(json.dumps, choices))}"}
        case {"regex": _, **rest} | {"grammar": _, **rest} if not rest:
            return asked
    if not asked:
        return {}
    raise UsageError(f"{where} must have one of json, regex, choice, grammar, json_object, got {shown(outputs)}")


# The kinds of the fields (system/documents.py). A field of the kind `object` is checked where it is used.
TOKENS, TOP = (-1, 2**31), (0, MOST_LOGPROBS)
GENERATION = {"model": object, "max_tokens": TOKENS, "seed": (-LARGEST_SEED, LARGEST_SEED), "logit_bias": by_id}
GENERATION |= dict.fromkeys(option_names("number"), object)
STREAM_OPTIONS = {"include_usage": bool, "include_obfuscation": bool}
SHARED = {"n": (1, MOST_ANSWERS), "stream": bool, "stream_options": STREAM_OPTIONS, "prompt_cache_key": str}
SHARED |= GENERATION | dict.fromkeys(option_names("end"), object)
SHARED |= {"structured_outputs": structured_outputs}
OUTPUTS = {"json": object, "regex": str, "choice": [str], "grammar": str, "json_object": bool}
NAMED_SCHEMA = {"name": str, "description": str, "schema": dict, "strict": bool}
FORMAT = {"type": str, "json_schema": NAMED_SCHEMA, **NAMED_SCHEMA}
FUNCTION = {"name": Required(tool_name), "description": str, "parameters": dict, "strict": bool}
TOOL = {"type": Required("function"), "function": Required(FUNCTION)}
CHAT = {"messages": list, "chat_template_kwargs": dict, "response_format": response_format}
CHAT |= {"add_generation_prompt": bool, "continue_final_message": bool}
CHAT_FIELDS = CHAT | {"max_completion_tokens": TOKENS, "logprobs": bool, "top_logprobs": TOP, "tools": [TOOL]}
CHAT_FIELDS |= {"tool_choice": object, "parallel_tool_calls": bool, **SHARED}
PART = {"type": Required("text"), "text": Required(str)}
TEXT_FIELDS = {"prompt": object, "echo": bool, "suffix": str, "logprobs": TOP, "best_of": (1, 1), **SHARED}
TOKENIZE_FIELDS = {"model": object, "content": Required(str)}
TOKENIZE_FIELDS |= dict.fromkeys(("add_special", "parse_special", "with_pieces"), bool)
ANSWER_FIELDS = {"prompt": object, "top": TOP, **CHAT, **GENERATION}
# Fields that clients and other servers add to messages, parts, calls and tools
ADDED = ("annotations", "index", "parsed", "parsed_arguments", "cache_control", "provider_specific_fields")
ADDED_TO_MESSAGES = ("id", "status", "timestamp", "created_at", "metadata")
INNER = ("tool_calls", "function", "content")

Heads = tuple[tuple[int, int], ...]  # (layer, head); head n_heads is the MLP layer


@dataclass
class AnswerRequest:
    """A checked request.

    jobs     one for each answer: job i is answer i % n to prompt i // n
    top      number of alternatives for each token in the response
    echoed   the texts of the prompts, if the response repeats them
    tools    the names of the functions; each answer makes its own parser of calls from them
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
    unlimited: bool = False  # whether the request has no max_tokens
    owner: object = field(default_factory=object)  # prompt_cache_key; without one, an object of this request alone
    repeated: dict[str, Any] = field(default_factory=dict)  # fields that the response repeats


class UnknownModel(UsageError):
    """The request names a model that this server does not have."""


def parse_body(raw: bytes, where: str = "the body") -> dict[str, Any]:
    """Parse a JSON object. Raises UsageError."""
    body = parse_json(raw, where, UsageError)
    if deeper(body, DEEPEST):
        raise UsageError(f"{where} must not be nested deeper than {DEEPEST} levels")
    check_unicode(body)
    return body


def parse_chat(body: Mapping[str, Any], llm: Llama, model: str) -> AnswerRequest:
    """Check a body of /v1/chat/completions and encode its messages. Raises a LlamaError."""
    fields = fields_of({**body, "tools": _without_added(body.get("tools"))}, CHAT_FIELDS, model)
    if fields.get("top_logprobs") and not fields.get("logprobs"):
        raise UsageError("top_logprobs needs logprobs: true")
    return chat_request(fields, llm, "max_completion_tokens")


def chat_request(fields: dict[str, Any], llm: Llama, limit: str) -> AnswerRequest:
    """Make a request from checked fields (CHAT_FIELDS); `limit` is another name of max_tokens. Raises a LlamaError."""
    if limit in fields and fields.setdefault("max_tokens", fields[limit]) != fields[limit]:
        raise UsageError(f"max_tokens and {limit} differ: give one of them")
    options, call = _shared(fields, llm)
    call.logprobs, call.top = fields.get("logprobs", False), fields.get("top_logprobs", 0)
    call.several_calls, choice = fields.get("parallel_tool_calls", True), fields.get("tool_choice", "auto")
    checks.integer("the number of tools", len(fields.get("tools", [])), 0, MOST_TOOLS)
    tools = [] if choice == "none" else fields.get("tools", [])
    call.tools = [{"name": tool["function"]["name"]} for tool in tools]
    limits = [*map(closed, tools)]  # these constrain the answer; the template writes the tools as they are
    if forced := forced_call(choice, limits):
        if options.keys() & {*option_names("grammar")}:
            raise UsageError("a tool_choice that requires a call can't be combined with a constraint: give one of them")
        options["grammar"] = forced
    more, ids = _conversation(fields, tools, llm, forced is not None)
    return _prepared(call, options | more | {"calls": limits}, [ids], llm)


def parse_text(body: Mapping[str, Any], llm: Llama, model: str) -> AnswerRequest:
    """Check a body of /v1/completions and encode its prompts. Raises a LlamaError."""
    fields = fields_of(body, TEXT_FIELDS, model)
    options, call = _shared({"max_tokens": DEFAULT_TOKENS} | fields, llm)
    call.logprobs, call.top, echo = "logprobs" in fields, fields.get("logprobs", 0), fields.get("echo", False)
    if echo and "suffix" in fields:
        raise UsageError("echo can't be combined with suffix")
    ids = _prompts(fields.get("prompt"), fields.get("suffix"), call.n, llm)
    if echo:
        call.echoed = [llm.tokenizer.decode(one) for one in ids]
    return _prepared(call, options | {"prompt_logprobs": echo and call.logprobs}, ids, llm)


def _prepared(call: AnswerRequest, options: Mapping[str, Any], prompts: list[list[int]], llm: Llama) -> AnswerRequest:
    options = {**options, "logprobs": call.logprobs, "top_logprobs": call.top}
    call.jobs = [replace(job, owner=call.owner) for ids in prompts for job in llm.prepare(ids, options, call.n)]
    return call


# ------------------------------------------------------------------------------------------------------------- tokens
def tokenize(body: Mapping[str, Any], llm: Llama, model: str) -> dict[str, Any]:
    """The response of /tokenize: the ids of a text. Raises a LlamaError."""
    body = fields_of(body, TOKENIZE_FIELDS, model)
    _check_size(len(text := body["content"]), llm, "characters", LONGEST_TOKEN)
    encode = llm.tokenizer.encode_prompt if body.get("add_special") else llm.tokenizer.encode
    ids = encode(text, parse_special=body.get("parse_special", True))
    entries = map(Spelling(llm.tokenizer).entry, ids if body.get("with_pieces") else [])
    pieces = [{"id": entry["id"], "piece": entry.get("text", entry.get("bytes"))} for entry in entries]
    return {"tokens": pieces or ids}


def detokenize(body: Mapping[str, Any], llm: Llama, model: str) -> dict[str, Any]:
    """The response of /detokenize: the text of ids, with the names of control tokens. Raises a LlamaError."""
    ids = fields_of(body, {"model": object, "tokens": Required(list)}, model)["tokens"]
    return {"content": _with_names(_ids(llm, ids, "tokens"), llm) if ids else ""}


def apply_template(body: Mapping[str, Any], llm: Llama, model: str) -> dict[str, Any]:
    """The response of /apply-template: the prompt of a body of /v1/chat/completions. Raises a LlamaError."""
    return {"prompt": _with_names(parse_chat(body, llm, model).jobs[0].ids, llm)}


def _with_names(ids: Sequence[int], llm: Llama) -> str:
    decoder = Decoder(llm.tokenizer)
    return "".join([decoder.feed(id) or llm.tokenizer.name(id) or "" for id in ids]) + decoder.end()


# --------------------------------------------------------------------------------------------------------------- looks
def parse_answer(body: Mapping[str, Any], llm: Llama, model: str) -> dict[str, Any]:
    """The arguments of `Looks.answer`, from a body of /look/answer with messages, text, ids, or ids and text."""
    kind: Any = partial(_ids, llm)
    more = {"ids": kind, "answer": kind, "own": partial(_joined, llm), "off": partial(_heads, llm)}
    more["patch"] = {"other": Required(kind), "layer": Required((0, llm.model.config.n_layers - 1))}
    more["patch"]["position"] = Required(int)
    fields = fields_of(body, ANSWER_FIELDS | more, model)
    options, _ = _shared(fields, llm)
    match [name for name in ("messages", "prompt", "ids") if name in fields]:
        case ["messages"]:
            _, ids = _conversation(fields, [], llm)
        case ["prompt"]:
            ids = _prompts(fields["prompt"], None, 1, llm)[0]
        case ["ids"]:
            ids = fields["ids"]
        case ["prompt", "ids"]:
            ids = fields["ids"] + _joined(llm, fields["prompt"], "prompt")
        case _:
            raise UsageError("expected one of messages, prompt and ids; or ids with a prompt that continues them")
    found: dict[str, Any] = {name: fields[name] for name in ("answer", "own", "off", "top", "patch") if name in fields}
    begun = [*ids, *found.get("answer", [])]
    _check_look([*begun, *found.get("own", [])], min(LONGEST_LOOK, llm.model.max_seq_len) - 1)
    if patch := found.get("patch"):
        if (length := len(patch["other"])) > len(begun):
            raise UsageError(f"patch.other has {length} tokens; expected at most {len(begun)}, the length of the text")
        checks.integer("patch.position", patch["position"], 0, length - 1)
    thoughts = Thoughts() if "prompt" in fields else llm.thoughts(ids)
    (found["job"],) = llm.prepare(ids, options | {"continues": False, "thoughts": thoughts})
    return found


def parse_look(look: str, body: Mapping[str, Any], llm: Llama, model: str) -> dict[str, Any]:
    """The arguments of the method of `Looks` for a body of /look/NAME: the ids of a text, and what to show of it."""
    most = {"inside": LONGEST_LOOK, "page": LONGEST_PAGE, "activations": LONGEST_PAGE}.get(look, LONGEST_GRID)
    id: Any = (0, llm.tokenizer.n_vocab - 1)

    def ids(value: Any, where: str) -> list[int]:
        return _check_look(_ids(llm, value, where), most)

    known: dict[str, Any] = {"model": object, "ids": Required(ids)}
    pair = {"token": id, "against": id, "off": partial(_heads, llm)}
    known |= {
        "inside": {**pair, "key": int, "head": lambda value, where: _heads(llm, [value], where, mlp=False)[0]},
        "grid": {**pair, "token": Required(id), "against": Required(id), "mean": bool, "position": int},
        "sources": {**pair, "token": Required(id), "against": Required(id)},
        "patch": {**pair, "other": Required(ids)},
    }.get(look, {})
    found = fields_of(body, known, model)
    for name in found.keys() & {"key", "position"}:
        checks.integer(name, found[name], 0, len(found["ids"]) - 1)
    return {name: value for name, value in found.items() if name != "model"}


def _check_look(ids: list[int], most: int) -> list[int]:
    if len(ids) > most:
        raise ContextLengthError(f"the text has {len(ids):,} tokens; its inside can be shown for at most {most:,}")
    return ids


def _heads(llm: Llama, heads: Any, where: str, mlp: bool = True) -> Heads:
    """Check and sort pairs [layer, head]. With `mlp`, the number after the last head stands for the layer's MLP."""
    config, found = llm.model.config, set[tuple[int, int]]()
    for head in checked(heads, list, where):
        if not isinstance(head, list) or len(head) != 2:
            raise UsageError(f"{where} must hold pairs [layer, head], got {shown(heads)}")
        ends = config.n_layers - 1, config.n_heads - 1 + mlp
        found.add((checks.integer("a layer", head[0], 0, ends[0]), checks.integer("a head", head[1], 0, ends[1])))
    return tuple(sorted(found))


# ------------------------------------------------------------------------------------------------------------- fields
def fields_of(body: Mapping[str, Any], known: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Check that each field of a body is known and of its kind (`checked`). Raises UsageError otherwise."""
    for name in body:
        if name not in known:
            raise unknown(name, known)
    fields: dict[str, Any] = checked(body, known)
    check_model(fields.get("model", model), model)
    return fields


def check_model(name: object, model: str) -> None:
    """Raise UnknownModel unless a request names the model that this server has."""
    if name != model:
        raise UnknownModel(f"unknown model {shown(name)}; this server has {model!r}")


def _shared(fields: Mapping[str, Any], llm: Llama) -> tuple[dict[str, Any], AnswerRequest]:
    """The options of `Llama.prepare` that several endpoints accept, and an AnswerRequest with the shared fields."""
    options = {name: fields[name] for name in (*option_names("number", "end"), "logit_bias") if name in fields}
    if not llm.sampling:
        options.setdefault("temperature", 1.0)  # the default of OpenAI's API
    if "seed" in fields:
        options["seed"] = fields["seed"] % (LARGEST_SEED + 1)
    for id in fields.get("logit_bias", ()):
        checks.integer("an id of logit_bias", id, 0, llm.model.config.vocab_size - 1)
    if (stop := options.get("stop")) == "" or isinstance(stop, list):  # lm-eval sends "", which llama-server ignores
        options["stop"] = [text for text in stop if text != ""]
    limit = fields.get("max_tokens", -1)  # as in other servers, -1 stands for no limit
    options["max_new_tokens"] = llm.model.max_seq_len if limit == -1 else limit
    constraint, schema = fields.get("structured_outputs", {}), fields.get("response_format", {})
    if constraint and schema:
        raise UsageError("structured_outputs can't be combined with a schema of the answer: give one of them")
    more, stream = fields.get("stream_options", {}), fields.get("stream", False)
    if more and not stream:
        raise UsageError("stream_options needs stream: true")
    request = AnswerRequest(fields.get("n", 1), stream, more.get("include_usage", False))
    request.unlimited, request.owner = "max_tokens" not in fields, fields.get("prompt_cache_key", request.owner)
    return options | constraint | schema, request


# --------------------------------------------------------------------------------------------------- prompts and ids
def _check_size(count: int, llm: Llama, unit: str = "tokens", most: int = 1) -> None:
    """Raise ContextLengthError if a prompt has too many tokens, or too many characters to be worth encoding.

    most  the largest number of units in a token
    """
    if count >= most * (context := llm.model.max_seq_len):
        raise ContextLengthError(
            f"the prompt has {count:,} {unit}, but the context of {context} tokens must hold prompt and answer; shorten"
            " the prompt"
        )


def _ids(llm: Llama, ids: Any, where: str, kinds: str = "") -> list[int]:
    """Check a list of ids; with `llm` bound, a kind (system/documents.py)."""
    if not isinstance(ids, list) or not ids:
        raise UsageError(f"{where} must be {kinds}a list of token ids, got {shown(ids)}")
    _check_size(len(ids), llm)
    return [checks.integer(f"a token id of {where}", id, 0, llm.model.config.vocab_size - 1) for id in ids]


def _joined(llm: Llama, text: Any, where: str) -> list[int]:
    """The ids of a text that continues other ids; with `llm` bound, a kind (system/documents.py)."""
    _check_size(len(checked(text, str, where)), llm, "characters", LONGEST_TOKEN)
    return llm.tokenizer.encode_joined(text)


def _prompts(prompt: Any, suffix: str | None, n: int, llm: Llama) -> list[list[int]]:
    """The ids of each prompt; `prompt` is a text, a list of ids, or a list of such prompts."""
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    checks.integer("the number of prompts times n", len(prompt) * n if several else n, 1, MOST_PROMPTS)
    ids = []
    for one in prompt if several else [prompt]:
        if isinstance(one, str):
            _check_size(len(one) + len(suffix or ""), llm, "characters", LONGEST_TOKEN)
            found = llm.tokenizer.encode_prompt(one, suffix=suffix)
            _check_size(len(found), llm)
            ids.append(found)
        elif suffix is None:
            ids.append(_ids(llm, one, "prompt", "a text, a list of texts or "))
        else:
            raise UsageError("a prompt with suffix must be a text")
    return ids


def _conversation(
    body: Mapping[str, Any], tools: list[dict[str, Any]], llm: Llama, forced: bool = False
) -> tuple[dict[str, Any], list[int]]:
    """The options of the answer that depend on the messages, and the ids of the messages."""
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(body.get("messages", []))]
    ends = continues_answer(messages)  # whether they end with an assistant's message, which the answer continues
    if (ends, not ends) != (body.get("continue_final_message", ends), body.get("add_generation_prompt", not ends)):
        raise UsageError(
            "an answer continues the last message if and only if the assistant wrote that message: leave out"
            " continue_final_message and add_generation_prompt"
        )
    more = body.get("chat_template_kwargs", {})
    _check_size(len(json.dumps([messages, tools, more], ensure_ascii=False)), llm, "characters", LONGEST_TOKEN)
    ids = llm.encode_chat(messages, tools or None, more, forced=forced)
    _check_size(len(ids), llm)
    return {"continues": ends, "thoughts": llm.thoughts(ids, messages)}, ids


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message without nulls and unused keys, with its text parts joined. `encode_chat` checks it."""
    checked(message, dict, where)
    role = {"developer": "system", "function": "tool"}.get(str(message.get("role")), message.get("role"))
    unused = ADDED_TO_MESSAGES if role in ("tool", "ipython") else (*ADDED_TO_MESSAGES, "name")
    message = {key: item for key, item in _without_added(message).items() if item is not None and key not in unused}
    if role is not None:
        message["role"] = role
    if role == "assistant":
        message.setdefault("content", "")
    if isinstance(message.get("content"), list):
        parts = checked(message["content"], [PART], f"{where}.content")
        message["content"] = "".join(part["text"] for part in parts)
    return message


def _without_added(value: Any) -> Any:
    """A message, or the calls in it, without the fields that OpenAI's client adds to received messages."""
    if isinstance(value, list):
        return [_without_added(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_added(item) if key in INNER else item for key, item in value.items() if key not in ADDED}
