"""The facts about a model that `inspect` and `verify` read from the headers of its checkpoint."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..checkpoint import Checkpoint
from ..config import ModelConfig
from ..errors import CheckpointError, LlamaError
from ..system.memory import cache_bytes
from ..weights import expected_shapes, mismatches
from .families import names_of

BYTES = {"float32": 4, "bfloat16": 2}

# Part of a model -> a part of its tensors' names. A tensor belongs to the first part whose text its name contains
PARTS = {"embedding": "tok_emb", "norms": "norm", "attention": "attention.", "MLP": "feed_forward.", "output": ""}


def architecture_facts(config: ModelConfig) -> dict[str, Any]:
    """The facts of a configuration, in the order in which `inspect` prints them."""
    architecture = dataclasses.asdict(config)
    if config.rope_scaling:  # longrope has a list of factors
        shortened = {key: f"{len(x)} numbers" if isinstance(x, list) else x for key, x in config.rope_scaling.items()}
        architecture["rope_scaling"] = shortened
    parts = dict.fromkeys(PARTS, 0)
    for name, shape in expected_shapes(config).items():
        parts[next(part for part, key in PARTS.items() if key in name)] += math.prod(shape)
    names = names_of(config)
    return {
        **({"same_shape_as": " or ".join(names)} if names else {}),
        "parameters": config.n_params,
        "parameters_of": {part: count for part, count in parts.items() if count},
        **architecture,
        "weight_bytes": {dtype: size * config.n_params for dtype, size in BYTES.items()},
        "kv_cache_bytes": {
            f"{dtype}, {tokens} token{'s' * (tokens > 1)}": cache_bytes(config, tokens, size, dtype)
            for dtype, size in [*BYTES.items(), ("int8", 1)]
            for tokens in dict.fromkeys((1, config.max_seq_len))
        },
    }


def model_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts in the order in which `inspect` prints them. Weights are not read."""
    about = dict(checkpoint.about)
    stored = about.pop("weights", {})
    vocabulary, problems = _vocabulary(checkpoint)
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        **about,
        **architecture_facts(checkpoint.config),
        **vocabulary,
        "chat_template": checkpoint.chat_template is not None,
        "sampling": dict(checkpoint.sampling),
        "file_bytes": dict(checkpoint.parts),
        "stored_bytes": stored,
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
