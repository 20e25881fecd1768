"""clearllama inspect: describe a checkpoint from its headers, without reading its weights."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import TYPE_CHECKING, Any

from ..checks import integer
from ..config import LARGEST_SIZE
from ..errors import LlamaError
from ..hub import default_model
from . import arguments, streams

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..config import ModelConfig

BYTES = {"float32": 4, "bfloat16": 2}
BOUNDS = {"context": LARGEST_SIZE, "batch": 4096}  # what a configuration and `generate --batch-size` accept
IN_TOKENS = ("max_seq_len", "sliding_window")
LABELS = {"file_bytes": "files", "stored_bytes": "stored", "weight_bytes": "weights", "kv_cache_bytes": "kv_cache",
          "decided_here": "assumptions", "rope_bands": "rope pairs"}  # fmt: skip
NEXT = "\n" + " " * 19  # starts another line of the same value


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "inspect",
        help="describe a checkpoint without reading its weights",
        description="Show the family, architecture, RoPE settings, files, tokenizer, stop ids and memory of a"
        " checkpoint, and every mismatch between its configuration and its tensors. Weights are not read. Exit code 1"
        " on a mismatch.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", nargs="?", default=default_model(), metavar="PATH_OR_NAME", help="a checkpoint (default: %(default)s)"
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="context length for the memory estimate, in tokens (default: the model's)",
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="number of sequences for the memory estimate (default: 1)"
    )
    arguments.add_tokenizer_option(parser)
    arguments.add_output_options(parser, json="one JSON object, with sizes in bytes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name, most in BOUNDS.items():
        if getattr(args, name) is not None:
            integer(f"--{name}", getattr(args, name), 1, most)
    from ..checkpoint import open_checkpoint
    from ..hub import resolve

    checkpoint = open_checkpoint(resolve(args.model, args.quiet), args.tokenizer)
    facts = describe(checkpoint, args.context or checkpoint.config.max_seq_len, args.batch)
    if args.json:
        streams.write_json(facts)
    else:
        for label, value in facts.items():
            streams.write(f"{LABELS.get(label, label).replace('_', ' '):<18} {_text(value, label)}\n")
    return 1 if facts["mismatches"] else 0


def describe(checkpoint: Checkpoint, context: int, batch: int) -> dict[str, Any]:
    """The facts in the order of the output."""
    from ..hub.families import names_of
    from ..system.memory import cache_bytes
    from ..weights import mismatches

    config = checkpoint.config
    architecture = dataclasses.asdict(config)
    if architecture["rope_scaling"]:
        architecture["rope_scaling"] = {key: _shortened(value) for key, value in architecture["rope_scaling"].items()}
    about = dict(checkpoint.about)
    stored = about.pop("weights", {})
    vocabulary, problems = _vocabulary(checkpoint)
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "family": " or ".join(names_of(config)) or "not an official LLaMA size",
        **about,
        "parameters": config.n_params,
        **architecture,
        "rope_bands": rope_bands(config),
        **vocabulary,
        "chat_template": checkpoint.chat_template is not None,
        "chat_format": _chat_format(checkpoint),
        "sampling": dict(checkpoint.sampling),
        "file_bytes": dict(checkpoint.parts),
        "stored_bytes": stored,
        "weight_bytes": {dtype: size * config.n_params for dtype, size in BYTES.items()},
        "kv_cache_bytes": {
            f"{dtype}, {tokens} tokens x {batch}": cache_bytes(config, tokens, size, dtype, batch)
            for dtype, size in [*BYTES.items(), ("int8", 1)]
            for tokens in dict.fromkeys((1, context))
        },
        "decided_here": list(checkpoint.notes),
        "warnings": list(checkpoint.warnings),
        "mismatches": [*mismatches(checkpoint), *problems],
    }


def rope_bands(config: ModelConfig) -> dict[str, int]:
    """Number of pairs of a head whose frequency the scaling leaves unchanged, reduces in part, and reduces most."""
    from ..rope_scaling import inverse_frequencies

    plain, _ = inverse_frequencies(config.head_dim, config.rope_theta)
    scaled, _ = inverse_frequencies(
        config.head_dim, config.rope_theta, config.rope_scaling, max_seq_len=config.max_seq_len
    )
    slower = plain.double() / scaled.double()  # (D/2,)
    most = float(slower.max())
    unchanged = int((slower < 1 + 1e-4).sum())
    full = int((slower > most * (1 - 1e-4)).sum()) if most > 1 + 1e-4 else 0
    return {"unchanged": unchanged, "in_between": len(slower) - unchanged - full, "slowed_most": full}


def _chat_format(checkpoint: Checkpoint) -> str | None:
    """The built-in chat format of a checkpoint that has no template; None if there is none."""
    try:
        return checkpoint.chat_format(checkpoint.tokenizer())
    except LlamaError:
        return None


def _vocabulary(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """Facts about the tokenizer, and its mismatches. A missing or broken tokenizer is a fact, not an error."""
    from ..errors import CheckpointError

    try:
        tokenizer = checkpoint.tokenizer()
    except CheckpointError as error:  # a tokenizer that does not match the embedding
        return {"tokenizer": "of another model"}, [str(error)]
    except LlamaError as error:
        return {"tokenizer": f"unusable: {error}"}, []
    names = {id: text for text, id in tokenizer.control.items()}
    return {
        "tokenizer": tokenizer.kind,
        "tokens": tokenizer.n_vocab,
        "bos": _named(tokenizer.bos_id, names),
        "adds_bos": tokenizer.add_bos,
        "stop_ids": {str(id): names.get(id, "") for id in sorted(tokenizer.stop_ids)},
    }, []


def _named(id: int | None, names: dict[int, str]) -> dict[str, str]:
    return {} if id is None else {str(id): names.get(id, "")}


def _shortened(value: Any) -> Any:
    return f"{len(value)} numbers from {min(value):g} to {max(value):g}" if isinstance(value, list) else value


def _text(value: Any, label: str = "") -> str:
    """Format a value: with thousands separators, the unit for its label, and a line per entry of a long list.

    Line breaks in names from a file are replaced, because a new line could look like another fact.
    """
    if isinstance(value, dict):
        items = [f"{_key(key, label)} {_text(item, label)}".strip() for key, item in value.items()]
        return (NEXT if len(", ".join(items)) > 100 else ", ").join(items) or "none"
    if isinstance(value, list | tuple):
        return NEXT.join(streams.one_line(str(item)) for item in value) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return bytes_text(value) if label.endswith("_bytes") else f"{value:,}{' tokens' * (label in IN_TOKENS)}"
    whole = isinstance(value, float) and value.is_integer() and value < 1e15
    return f"{int(value):,}" if whole else streams.one_line(str(value))


def _key(key: str, label: str) -> str:
    """Format a key of a mapping: a colon after a key with spaces, and thousands separators for tokens of a cache."""
    if label == "kv_cache_bytes":
        key = re.sub(r"\d{4,}", lambda number: f"{int(number[0]):,}", key)
    return streams.one_line(key) + ":" * (" " in key)


def bytes_text(count: int) -> str:
    """A number of bytes with a unit: 1500000 -> '1.5 MB'. A MB has 1,000,000 bytes, as in the sizes of downloads."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"
