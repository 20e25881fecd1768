"""Fields of other servers and their clients, translated to those of this server.

SYNONYMS have the meaning of a field of this server, GUIDED constrain an answer, and Ollama's `options` holds further
fields. WITHOUT_EFFECT has the fields that change no answer if they have the value given here: they are removed, and the
response names them. requests.py refuses any other field, since it may select or constrain an answer; INSTEAD says what
to send in its place.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from ..checks import shown
from ..errors import UsageError

SYNONYMS = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens", "num_predict": "max_tokens"}
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
GUIDED |= {"json_schema": "json", "grammar": "grammar", "format": "json"}
ANY = object()  # every value is without effect
# OPENAI and IGNORED describe the request, or where and when it runs. With --strict, only OPENAI are ignored
OPENAI = (
    "user safety_identifier store metadata service_tier verbosity reasoning_effort prompt_cache_retention prediction"
    " reasoning max_tool_calls prompt_cache_options"
)
IGNORED = (
    "cache_prompt id_slot slot_id n_keep keep_alive timings_per_token return_progress return_tokens request_id priority"
    " spaces_between_special_tokens length_penalty guided_decoding_backend mirostat_tau mirostat_eta xtc_threshold"
    " dynatemp_exponent dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers backend_sampling"
    " num_ctx num_keep num_batch num_gpu main_gpu num_thread use_mmap use_mlock low_vram numa"
)
ZERO = "mirostat xtc_probability dry_multiplier dynatemp_range n_probs min_keep prompt_logprobs n_indent"
ZERO += " t_max_predict_ms t_max_prompt_ms"
FALSE = "use_beam_search include_stop_str_in_output post_sampling_probs return_tokens_as_token_ids early_stopping"
FALSE += " return_token_ids echo background"
EMPTY = "bad_words lora logits_processors response_fields"
WITHOUT_EFFECT: dict[str, Any] = {"typical_p": 1, "typ_p": 1, "tfs_z": 1, "top_n_sigma": -1, "best_of": 1}
WITHOUT_EFFECT |= {"skip_special_tokens": True, "include_reasoning": True, "parse_tool_calls": True, "grammar": ""}
WITHOUT_EFFECT |= {"modalities": ["text"], "reasoning_format": "auto", "format": ""}
for names, value in ((OPENAI, ANY), (IGNORED, ANY), (ZERO, 0), (FALSE, False), (EMPTY, [])):
    WITHOUT_EFFECT |= dict.fromkeys(names.split(), value)
# field -> the value that switches the penalty off. If all penalties are off, OF_PENALTIES have no effect
PENALTIES = {"repeat_penalty": 1, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
OF_PENALTIES = ("repeat_last_n", "penalize_nl")
# llama.cpp's letter of a filter -> our name, in its default order. Its other filters are always off (WITHOUT_EFFECT)
FILTERS = {"k": "top_k", "p": "top_p", "m": "min_p", "t": "temperature"}
EXCLUDED = -1000.0  # llama.cpp's `false` as the bias of a token
INSTEAD = {
    "think": "send chat_template_kwargs, for example {enable_thinking: false}, or thinking_budget",
    "samplers": "the order is fixed (penalties, temperature, top_k, top_p, min_p); leave it out",
    "web_search_options": "this server does not search; leave it out",
    "functions": "send tools",
    "function_call": "send tool_choice",
    "best_of": "send n",
    "n_probs": "send logprobs and top_logprobs",
    "allowed_token_ids": "send structured_outputs",
    "bad_words": "send logit_bias",
    "add_special_tokens": "the chat template or the tokenizer adds them; leave it out",
    "stop_regex": "send stop",
    "system": "send a message with the role system",
    "chat_template": "the server chooses it at its start: --chat-format",
    **dict.fromkeys(("lora", "lora_adapters"), "the server chooses adapters at its start: --adapter"),
    "background": "this server stores nothing: send stream",
    **dict.fromkeys(("previous_response_id", "conversation"), "this server stores nothing: send all of it as input"),
    **dict.fromkeys(OF_PENALTIES, "penalties count all tokens; leave it out"),
    **dict.fromkeys(("options", "extra_body"), "send its entries as fields of the body"),
}


def standard(body: Mapping[str, Any], strict: bool = False) -> tuple[dict[str, Any], list[str]]:
    """The body with fields of other servers translated, and the names of the fields that were left out.

    strict  accept only fields of OpenAI's API and of this server

    Unknown fields stay in the body. Raises UsageError if two fields with the same meaning differ.
    """
    body = _without_nulls(body)
    if isinstance(text := body.get("text"), dict):  # of /v1/responses
        body |= {"text": {name: value for name, value in text.items() if name != "verbosity"}}
        body |= {"verbosity": text["verbosity"]} if "verbosity" in text else {}
    if not strict and isinstance(options := body.get("options"), dict):  # of Ollama
        del body["options"]
        for name in (options := _without_nulls(options)):
            _move({**options}, name, body, name)
    ignored = [name for name, value in body.items() if _without_effect(name, value, strict)]
    penalized = any(not _same(body.get(name, value), value) for name, value in PENALTIES.items())
    ignored += [name for name in OF_PENALTIES if name in body and not (penalized or strict)]
    if not strict and body.get("add_special_tokens") is ("prompt" in body):  # what happens anyway
        ignored.append("add_special_tokens")
    body = {name: value for name, value in body.items() if name not in ignored}
    return (body if strict else _translated(body)), ignored


def _without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _without_effect(name: str, value: Any, strict: bool) -> bool:
    if strict:
        return name in OPENAI.split() or (name, value) in (("modalities", ["text"]), ("background", False))
    if name == "samplers" and isinstance(value, list | str):
        filters = [FILTERS.get(one, one) for one in value if isinstance(one, str)]
        return [one for one in filters if one in FILTERS.values()] == [*FILTERS.values()]
    return name in WITHOUT_EFFECT and (WITHOUT_EFFECT[name] is ANY or _same(value, WITHOUT_EFFECT[name]))


def _translated(body: dict[str, Any]) -> dict[str, Any]:
    for name in SYNONYMS.keys() & body.keys():
        _move(body, name, body, SYNONYMS[name])
    if body.get("format") == "json":  # of Ollama
        body["format"] = {"type": "object"}
    guided = GUIDED.keys() & body.keys()
    if guided and isinstance(constraints := body.setdefault("structured_outputs", {}), dict):
        for name in guided:
            _move(body, name, constraints, GUIDED[name])
    if _same(body.get("top_k"), -1):  # vLLM's for "off"
        body["top_k"] = 0
    bias = body.get("logit_bias")
    if isinstance(bias, list) and all(isinstance(one, list) and len(one) == 2 for one in bias):  # of llama.cpp
        body["logit_bias"] = {str(id): EXCLUDED if value is False else value for id, value in bias}
    return body


def unknown(name: str, known: Iterable[str]) -> UsageError:
    """The error for a field that is not known, with what to send in its place."""
    similar = difflib.get_close_matches(name[:80], known, 1)  # a name of 8 MiB would take a second
    remedy = f"did you mean {similar[0]!r}?" if similar else "docs/guides/serving.md lists the fields"
    if (value := WITHOUT_EFFECT.get(name)) is not None:
        remedy = "leave it out" if value is ANY else f"only {value!r} changes nothing: leave it out"
    return UsageError(f"unknown key {name!r:.80}; {INSTEAD.get(name, remedy)}")


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, which has one kind of number."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _move(body: dict[str, Any], name: str, target: dict[str, Any], new: str) -> None:
    value = body.pop(name)
    if target.setdefault(new, value) != value:
        raise UsageError(f"{name} and {new} differ, got {shown(value)} and {shown(target[new])}: give one of them")
