"""Read a checkpoint of any format and write it as a folder in Hugging Face's format or as a GGUF file.

One weight is in memory at a time. Every weight is read back and compared with the source before the target appears, so
the target is either complete or absent.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import arguments, files, terminal

if TYPE_CHECKING:
    from ..tools.convert import Proof


def add_options(parser: argparse.ArgumentParser) -> None:
    dtypes = "float32, bfloat16 or float16; needed for a quantized source (default: as stored)"
    arguments.add(
        parser,
        ("source", "SRC", "the checkpoint, as for --model of the other commands"),
        ("target", "DST", "the new folder (hf) or file (gguf)", {"type": Path}),
        ("--to", ["hf", "gguf"], "format of the target", {"required": True}),
        ("--dtype", "DTYPE", dtypes),
        ("--quantize", "KIND", "with --to gguf: q8_0, q4_0 or q4_k (Q4_K_M) for llama.cpp"),
    )
    add_writing_options(parser)


def run(args: argparse.Namespace) -> int:
    from ..engine.runtime import pick_device, pick_dtype
    from ..hub import resolve
    from ..tools.convert import convert

    dtype = None if args.dtype is None else pick_dtype(args.dtype, pick_device("cpu"))
    source = resolve(args.source, args.quiet)
    with writing(args) as options:
        proof = convert(source, args.target, args.to, dtype=dtype, quantize=args.quantize, **options)
    return write_proof(args, proof)


# ----------------------------------------------------------------------------------------- shared with quantize
def add_writing_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that writes a checkpoint."""
    template = (
        "the chat template to write: llama2, llama3, none, or a Jinja file (default: auto, the source's"
        " template; for Meta's format, the built-in one if the folder's name contains instruct or chat)"
    )
    arguments.add(
        parser,
        ("--shards", "N", "weight files of a folder (default: files of about 5 GB)", {"default": 0}),
        arguments.ADAPTER,
        arguments.TOKENIZER,
        ("--chat-template", "NAME|FILE", template, {"default": "auto"}),
    )
    arguments.add_output_options(parser, json="the result as one JSON object")


@contextlib.contextmanager
def writing(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Their values and a progress bar, as keyword arguments of tools.convert."""
    from ..chat import TEMPLATES

    template = args.chat_template
    if template not in ("auto", "none", *TEMPLATES):
        template = files.read_text(Path(template))
    options = {"shards": args.shards, "adapters": args.adapter, "tokenizer": args.tokenizer}
    with terminal.progress(args.quiet, "weight") as show:
        yield {**options, "chat_template": template, "progress": show}


def write_proof(args: argparse.Namespace, proof: Proof, **more: object) -> int:
    """Write the result. more: further keys of the JSON object."""
    for warning in proof.warnings:
        terminal.info(args, f"warning: {warning}")
    before, after = proof.bytes
    facts = {"path": str(proof.path), "tensors": proof.tensors, "sha256": proof.sha256, **more}
    facts |= {"bytes_before": before, "bytes_after": after}
    text = f"{proof.tensors} weights were read back and are equal; sha256 of all weights: {proof.sha256}"
    terminal.show(args, facts, f"{proof.path}\n{text}\n")
    return 0
