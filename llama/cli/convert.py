"""clearllama convert: write a checkpoint in another format and verify every weight."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import arguments, streams

if TYPE_CHECKING:
    from ..tools.convert import Proof


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "convert",
        description="Read a checkpoint of any format and write it as a folder in Hugging Face's format or as a GGUF"
        " file. One weight is in memory at a time. Every weight is read back and compared with the source before the"
        " target appears, so the target is either complete or absent.",
    )
    parser.add_argument("source", metavar="SRC", help="the checkpoint, as for --model of the other commands")
    parser.add_argument("target", metavar="DST", type=Path, help="the new folder (hf) or file (gguf)")
    parser.add_argument("--to", required=True, choices=["hf", "gguf"], help="format of the target")
    parser.add_argument(
        "--dtype", help="float32, bfloat16 or float16; needed for a quantized source (default: as stored)"
    )
    parser.add_argument("--quantize", metavar="KIND", help="with --to gguf: q8_0, q4_0 or q4_k (Q4_K_M) for llama.cpp")
    add_writing_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..engine.runtime import pick_device, pick_dtype
    from ..hub import resolve
    from ..tools.convert import convert

    dtype = None if args.dtype is None else pick_dtype(args.dtype, pick_device("cpu"))
    source = resolve(args.source, args.quiet)
    with writing(args) as options:
        proof = convert(source, args.target, args.to, dtype=dtype, quantize=args.quantize, **options)
    write_proof(args, proof)
    return 0


# ----------------------------------------------------------------------------------------- shared with quantize
def add_writing_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that writes a checkpoint."""
    parser.add_argument(
        "--shards", type=int, default=0, metavar="N", help="weight files of a folder (default: files of about 5 GB)"
    )
    arguments.add_adapter_option(parser)
    arguments.add_tokenizer_option(parser)
    arguments.add_chat_template(parser)
    parser.add_argument("--force", action="store_true", help="replace an existing target")
    arguments.add_output_options(parser, json="the result as one JSON object")


@contextlib.contextmanager
def writing(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Their values and a progress bar, as keyword arguments of tools.convert and tools.quantize."""
    template = arguments.chat_template(args)
    options = {"shards": args.shards, "adapters": args.adapter, "tokenizer": args.tokenizer, "force": args.force}
    with streams.progress(args.quiet, "weight") as show:
        yield {**options, "chat_template": template, "progress": show}


def write_proof(args: argparse.Namespace, proof: Proof, **more: object) -> None:
    """Write the result. more: further keys of the JSON object."""
    for warning in proof.warnings:
        streams.info(args, f"warning: {warning}")
    if args.json:
        streams.write_json({"path": str(proof.path), "tensors": proof.tensors, "sha256": proof.sha256, **more})
    else:
        streams.write(
            f"{proof.path}\n{proof.tensors} weights were read back and are equal; sha256 of all weights:"
            f" {proof.sha256}\n"
        )
