"""clearllama inspect: what a checkpoint is, from its headers, without reading a weight."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from ..errors import LlamaError
from ..hub import DEFAULT
from . import common

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint


def add_parser(commands: common.Subparsers) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show what a checkpoint is",
        description="Architecture, RoPE, tokenizer, stop ids and memory of a checkpoint; no weight is read.",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", default=DEFAULT, metavar="PATH_OR_NAME", help=f"default: {DEFAULT}")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    common.add_debug(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..checkpoint import open_checkpoint
    from ..hub import resolve
    from ..loader import check_tensors

    checkpoint = open_checkpoint(resolve(args.model))
    check_tensors(checkpoint.config, checkpoint.shapes, str(checkpoint.path))
    facts = describe(checkpoint)
    if args.json:
        common.write_json(facts)
    else:
        for label, value in facts.items():
            common.write(f"{label.replace('_', ' '):<18} {_text(value)}\n")
    return 0


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts, in the order in which they are shown."""
    config = checkpoint.config
    architecture = dataclasses.asdict(config)
    if architecture["rope_scaling"] and "divisors" in architecture["rope_scaling"]:
        divisors = architecture["rope_scaling"]["divisors"]
        architecture["rope_scaling"] = {"rope_type": "divisors", "from": min(divisors), "to": max(divisors)}
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "family": "LLaMA decoder",
        **{key: value for key, value in checkpoint.about.items() if key != "weights"},
        "parameters": config.n_params,
        **architecture,
        **_vocabulary(checkpoint),
        "chat_template": checkpoint.chat_template is not None,
        "file_bytes": checkpoint.about.get("weights", {}),
        "weight_bytes": {"float32": 4 * config.n_params, "bfloat16": 2 * config.n_params},
        "kv_cache_bytes": {
            f"{dtype}, {tokens} tokens": config.kv_cache_bytes(tokens, size)
            for dtype, size in (("float32", 4), ("bfloat16", 2))
            for tokens in (1, config.max_seq_len)
        },
    }


def _vocabulary(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the tokenizer is; a file without a usable one still has an architecture to show."""
    try:
        tokenizer = checkpoint.tokenizer()
    except LlamaError as error:
        return {"tokenizer": f"unusable: {error}"}
    names = {id: text for text, id in tokenizer.control.items()}
    return {
        "tokenizer": tokenizer.kind,
        "tokens": tokenizer.n_vocab,
        "bos": _named(tokenizer.bos_id, names),
        "adds_bos": tokenizer.add_bos,
        "stop_ids": {str(id): names.get(id, "") for id in sorted(tokenizer.stop_ids)},
    }


def _named(id: int | None, names: dict[int, str]) -> dict[str, str]:
    return {} if id is None else {str(id): names.get(id, "")}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}".strip() for key, item in value.items()) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)
