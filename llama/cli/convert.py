"""Write a checkpoint in another format.

Any source format works; the target is a folder in Hugging Face's format or a GGUF file. One weight is in memory at
a time. Every weight is read back and compared with the source before the target appears, so the target is either
complete or absent.
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


def gguf_kind(text: str) -> str:
    """Parse KIND of --quantize; Q4_K_M is llama.cpp's name for q4_k."""
    return text.lower().removesuffix("_m")


WRITING = [  # the options that convert and quantize share
    ("--shards N", int, "number of weight files in a folder (default: files of about 5 GB)", {"default": 0}),
    arguments.ADAPTER,
    arguments.TOKENIZER,
    (
        "--chat-template NAME|FILE",
        str,
        "the chat template to write: llama2, llama3, none, or a Jinja file (default: auto, the source's template; for a"
        " source in Meta's format whose folder's name contains instruct or chat, the built-in template)",
        {"default": "auto"},
    ),
    ("--json", bool, "write the result as one JSON object"),
]
OPTIONS = [
    ("source SRC", str, "the checkpoint (as for --model of the other commands)"),
    ("target DST", Path, "the new folder (hf) or file (gguf)"),
    ("--to", ["hf", "gguf"], "format of the target (default: gguf for a name in .gguf, else hf)", {"default": None}),
    ("--dtype DTYPE", str, "float32, bfloat16 or float16; needed for a quantized source (default: as stored)"),
    ("--quantize KIND", gguf_kind, "with --to gguf: q8_0, q4_0 or q4_k (Q4_K_M) for llama.cpp"),
    *WRITING,
]


def run(args: argparse.Namespace) -> None:
    from ..engine.runtime import pick_device, pick_dtype
    from ..hub import resolve
    from ..tools.convert import convert

    dtype = None if args.dtype is None else pick_dtype(args.dtype, pick_device("cpu"))
    source = resolve(args.source, args.quiet)
    to = args.to or ("gguf" if args.target.suffix == ".gguf" else "hf")
    with writing(args) as options:
        proof = convert(source, args.target, to, dtype=dtype, quantize=args.quantize, **options)
    write_proof(args, proof)


# ----------------------------------------------------------------------------------------- shared with quantize
@contextlib.contextmanager
def writing(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the values of WRITING and the function of a progress bar, as keyword arguments of tools.convert."""
    from ..chat import TEMPLATES

    template = args.chat_template
    if template not in ("auto", "none", *TEMPLATES):
        template = files.read_text(Path(template))
    options = {"shards": args.shards, "adapters": args.adapter, "tokenizer": args.tokenizer}
    with terminal.progress("weight") as show:
        yield {**options, "chat_template": template, "progress": show}


def write_proof(args: argparse.Namespace, proof: Proof, **more: object) -> None:
    """Write the result. `more` holds further keys of the JSON object."""
    for warning in proof.warnings:
        terminal.info(f"warning: {warning}")
    before, after = proof.bytes
    facts = {"path": str(proof.path), "tensors": proof.tensors, "sha256": proof.sha256, **more}
    facts |= {"bytes_before": before, "bytes_after": after}
    text = f"{proof.tensors} weights were read back and are equal; sha256 of all weights: {proof.sha256}"
    terminal.show(args, facts, f"{proof.path}\n{text}\n")
