"""clearllama inspect: what a checkpoint is, from its headers, without reading its weights."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from ..config import LARGEST_SIZE
from ..errors import LlamaError, UsageError
from ..hub.named import DEFAULT
from . import arguments, streams

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..config import ModelConfig

BYTES = {"float32": 4, "bfloat16": 2}
BOUNDS = {
    "context": (LARGEST_SIZE, "the longest context that a model is taken with"),
    "batch": (4096, "as many as 'generate --prompts' has under way at once"),
}
NEXT = "\n" + " " * 19  # a new line below the value


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show what a checkpoint is",
        description="Family, architecture, RoPE, files, tokenizer, stop ids and memory of a checkpoint, and every"
        " mismatch between its configuration and its tensors; weights are not read. Exit code 1 if anything differs.",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", default=DEFAULT, metavar="PATH_OR_NAME", help=f"default: {DEFAULT}")
    parser.add_argument("--context", type=int, metavar="N", help="tokens to compute memory for (default: the model's)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="rows to compute memory for (default: 1)")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    arguments.add_debug(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name, (most, why) in BOUNDS.items():
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"--{name} must lie between 1 and {most:,}, {why}, got {value!s:.40}")
    from ..checkpoint import open_checkpoint
    from ..hub.named import resolve

    checkpoint = open_checkpoint(resolve(args.model, args.quiet))
    facts = describe(checkpoint, args.context or checkpoint.config.max_seq_len, args.batch)
    if args.json:
        streams.write_json(facts)
    else:
        for label, value in facts.items():
            streams.write(f"{label.replace('_', ' '):<18} {_text(value)}\n")
    return 1 if facts["mismatches"] else 0


def describe(checkpoint: Checkpoint, context: int, batch: int) -> dict[str, Any]:
    """The facts, in the order in which they are shown."""
    from ..hub.families import named
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
        "family": " or ".join(named(config)) or "a LLaMA decoder of nobody's official sizes",
        **about,
        "parameters": config.n_params,
        **architecture,
        "rope_bands": rope_bands(config),
        **vocabulary,
        "chat_template": checkpoint.chat_template is not None,
        "chat_format": _chat_format(checkpoint),
        "sampling": dict(checkpoint.sampling),
        "files": dict(checkpoint.parts),
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
    """How many pairs of a head the scaling leaves alone, slows down in part, and slows down most."""
    from ..rope_scaling import inverse_frequencies

    plain, _ = inverse_frequencies(config.head_dim, config.rope_theta)
    scaled, _ = inverse_frequencies(
        config.head_dim, config.rope_theta, config.rope_scaling, max_seq_len=config.max_seq_len
    )
    slower = plain.double() / scaled.double()  # (D/2,)
    most = float(slower.max())
    kept = int((slower < 1 + 1e-4).sum())
    full = int((slower > most * (1 - 1e-4)).sum()) if most > 1 + 1e-4 else 0
    return {"unchanged": kept, "in_between": len(slower) - kept - full, "slowed_most": full}


def _chat_format(checkpoint: Checkpoint) -> str | None:
    """The built-in format that stands in for a template the checkpoint can't carry."""
    try:
        return checkpoint.chat_format(checkpoint.tokenizer())
    except LlamaError:
        return None


def _vocabulary(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """What the tokenizer is, and what is wrong with it; without a usable one there is still much to show."""
    from ..errors import CheckpointError

    try:
        tokenizer = checkpoint.tokenizer()
    except CheckpointError as error:  # it is there and belongs to another model
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


def _text(value: Any) -> str:
    """A value for people: groups of three digits, one line for each entry where there are many.

    A line break in a name of the file's makes no line, or it could look like a fact.
    """
    if isinstance(value, dict):
        items = [f"{streams.one_line(key)} {_text(item)}".strip() for key, item in value.items()]
        return (NEXT if len(", ".join(items)) > 100 else ", ").join(items) or "none"
    if isinstance(value, list):
        return NEXT.join(streams.one_line(str(item)) for item in value) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:,}" if isinstance(value, int) else streams.one_line(str(value))
