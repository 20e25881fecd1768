"""What the headers of a checkpoint say about the model: for `inspect` and `verify`."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..checkpoint import Checkpoint
from ..errors import CheckpointError, LlamaError
from ..system.memory import cache_bytes
from ..weights import mismatches
from .families import names_of

BYTES = {"float32": 4, "bfloat16": 2}


def model_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts in the order in which `inspect` prints them. Weights are not read."""
    config, about = checkpoint.config, dict(checkpoint.about)
    stored = about.pop("weights", {})
    architecture = dataclasses.asdict(config)
    if config.rope_scaling:  # longrope has a list of factors
        shortened = {key: f"{len(x)} numbers" if isinstance(x, list) else x for key, x in config.rope_scaling.items()}
        architecture["rope_scaling"] = shortened
    vocabulary, problems = _vocabulary(checkpoint)
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "family": " or ".join(names_of(config)) or "unknown (no model in configs/ has this shape)",
        **about,
        "parameters": config.n_params,
        **architecture,
        **vocabulary,
        "chat_template": checkpoint.chat_template is not None,
        "sampling": dict(checkpoint.sampling),
        "file_bytes": dict(checkpoint.parts),
        "stored_bytes": stored,
        "weight_bytes": {dtype: size * config.n_params for dtype, size in BYTES.items()},
        "kv_cache_bytes": {
            f"{dtype}, {tokens} tokens": cache_bytes(config, tokens, size, dtype)
            for dtype, size in [*BYTES.items(), ("int8", 1)]
            for tokens in dict.fromkeys((1, config.max_seq_len))
        },
        "decided_here": list(checkpoint.notes),
        "warnings": list(checkpoint.warnings),
        "mismatches": [*mismatches(checkpoint), *problems],
    }


def _vocabulary(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """Facts about the tokenizer, and its mismatches. A missing or broken tokenizer is a fact, not an error."""
    try:
        tokenizer = checkpoint.tokenizer()
    except CheckpointError as error:  # a tokenizer that does not match the embedding
        return {"tokenizer": "of another model", "chat_format": None}, [str(error)]
    except LlamaError as error:
        return {"tokenizer": f"unusable: {error}", "chat_format": None}, []
    bos = tokenizer.bos_id
    return {
        "tokenizer": tokenizer.kind,
        "tokens": tokenizer.n_vocab,
        "bos": {} if bos is None else {str(bos): tokenizer.name(bos) or ""},
        "adds_bos": tokenizer.add_bos,
        "stop_ids": {str(id): tokenizer.name(id) or "" for id in sorted(tokenizer.stop_ids)},
        "chat_format": checkpoint.chat_format(tokenizer),  # a built-in one, for a model without a template
    }, []
