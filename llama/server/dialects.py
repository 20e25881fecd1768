"""Fields of other servers and their clients, translated to those of this server.

SYNONYMS have the meaning of a field of this server. GUIDED constrain an answer. OPENAI and IGNORED have no effect on an
answer, and NEUTRAL have none with the value that stands here; these fields are removed, and the response names them.
Any other field is refused where the body is checked, since it may select or constrain an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checks import shown
from ..errors import UsageError

SYNONYMS = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"}
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
GUIDED |= {"json_schema": "json", "grammar": "grammar"}
# They describe the request, or where and when it runs. With --strict, only OPENAI are ignored
OPENAI = (
    "user safety_identifier store metadata service_tier verbosity reasoning_effort prompt_cache_retention prediction"
    " reasoning max_tool_calls prompt_cache_options"
)
IGNORED = (
    "cache_prompt id_slot slot_id n_keep keep_alive timings_per_token return_progress return_tokens request_id priority"
    " spaces_between_special_tokens length_penalty guided_decoding_backend mirostat_tau mirostat_eta xtc_threshold"
    " dynatemp_exponent dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers"
)
ZERO = "mirostat xtc_probability dry_multiplier dynatemp_range n_probs min_keep prompt_logprobs"
FALSE = "use_beam_search include_stop_str_in_output post_sampling_probs return_tokens_as_token_ids early_stopping"
EMPTY = "bad_words lora logits_processors"
# name -> its value without effect
NEUTRAL: dict[str, Any] = {"typical_p": 1, "tfs_z": 1, "top_n_sigma": -1, "skip_special_tokens": True}
NEUTRAL |= {"modalities": ["text"], "return_token_ids": False}
for names, value in ((ZERO, 0), (FALSE, False), (EMPTY, [])):
    NEUTRAL |= dict.fromkeys(names.split(), value)


def standard(body: Mapping[str, Any], strict: bool = False) -> tuple[dict[str, Any], list[str]]:
    """A body with this server's fields only, and the names of those that were left out.

    strict  accept only fields of OpenAI's API and of this server

    Raises UsageError if two fields with one meaning differ. Fields that are neither here nor there stay in the body.
    """
    body = {name: value for name, value in body.items() if value is not None}
    names = OPENAI.split() if strict else f"{OPENAI} {IGNORED}".split()
    if isinstance(text := body.get("text"), dict):  # of /v1/responses
        body |= {"text": {name: value for name, value in text.items() if name != "verbosity"}}
        body |= {"verbosity": text["verbosity"]} if "verbosity" in text else {}
    ignored = [name for name in names if name in body]
    if not strict:
        ignored += [name for name, value in NEUTRAL.items() if name in body and _same(body[name], value)]
        if "repeat_last_n" in body and _same(body.get("repeat_penalty", 1), 1):  # the tokens that a penalty counts
            ignored.append("repeat_last_n")
        for name in SYNONYMS.keys() & body.keys():
            _move(body, name, body, SYNONYMS[name])
        if guided := GUIDED.keys() & body.keys():
            constraints = body.setdefault("structured_outputs", {})
            for name in guided:
                _move(body, name, constraints, GUIDED[name])
    return {name: value for name, value in body.items() if name not in ignored}, ignored


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, which has one kind of number."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _move(body: dict[str, Any], name: str, target: dict[str, Any], new: str) -> None:
    value = body.pop(name)
    if target.setdefault(new, value) != value:
        raise UsageError(f"{name} and {new} differ, got {shown(value)} and {shown(target[new])}: give one of them")
