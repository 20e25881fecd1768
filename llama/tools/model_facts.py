"""What the headers of a checkpoint say about the model: for `inspect`, `plan` and `verify`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ..checkpoint import Checkpoint
from ..errors import CheckpointError, LlamaError
from ..hub.families import names_of
from ..system.memory import cache_bytes
from ..weights import mismatches

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
        "family": " or ".join(names_of(config)) or "not an official LLaMA size",
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
    names = {id: text for text, id in tokenizer.control.items()}
    bos = tokenizer.bos_id
    return {
        "tokenizer": tokenizer.kind,
        "tokens": tokenizer.n_vocab,
        "bos": {} if bos is None else {str(bos): names.get(bos, "")},
        "adds_bos": tokenizer.add_bos,
        "stop_ids": {str(id): names.get(id, "") for id in sorted(tokenizer.stop_ids)},
        "chat_format": checkpoint.chat_format(tokenizer),  # a built-in one, for a model without a template
    }, []


class Bits(NamedTuple):
    """Bits per weight in memory: of the layers' matrices, the output layer and the embedding."""

    layers: float
    output: float
    embedding: float
    types: tuple[str, ...] = ()  # how a file stores them, if quantized: Q4_1, Q8_0, ...
    dequantized: tuple[str, ...] = ()  # the types that a GPU has no layer for


def stored_bits(checkpoint: Checkpoint, dtype_bits: int, on_cpu: bool) -> Bits | None:
    """The bits of a checkpoint with quantized weights that is loaded as it is stored; None if nothing is quantized.

    dtype_bits  of weights that are not quantized, or that are dequantized while loading
    on_cpu      a CPU computes with a file's blocks; a GPU dequantizes embeddings, codebooks and scales of two levels
    """
    tied, types, dequantized = checkpoint.config.tie_embeddings, set[str](), set[str]()
    total: dict[str, list[float]] = {}  # layers, output or tok_embeddings -> [entries, bits]
    for name, (rows, *columns) in checkpoint.shapes.items():
        if not columns:
            continue
        entries, bits = rows * columns[0], float(dtype_bits)
        if (blocks := checkpoint.blocks(name, slice(0, 1))) is not None:
            stored, form = checkpoint.stored(name), blocks.format
            types.add(stored)
            if on_cpu:
                bits = checkpoint.bits(name)
            elif form.bits not in (4, 8) or form.codebook or form.levels:
                dequantized.add(stored)
            elif tied or not name.startswith("tok_embeddings"):
                bits = form.bits + 16 * (1 + form.offset) / (form.group or columns[0])
        sums = total.setdefault(name.split(".")[0], [0, 0])
        sums[0], sums[1] = sums[0] + entries, sums[1] + entries * bits
    layers, embedding, output = (
        total[part][1] / total[part][0] if part in total else 0 for part in ("layers", "tok_embeddings", "output")
    )
    found = Bits(layers, output or embedding, embedding, tuple(sorted(types)), tuple(sorted(dequantized)))
    return found if types else None
