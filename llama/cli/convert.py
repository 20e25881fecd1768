"""clearllama convert: write a checkpoint in another format and verify every weight."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from . import arguments, streams

if TYPE_CHECKING:
    from ..tools.convert import Progress


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "convert",
        help="write a checkpoint in another format",
        description="Read a checkpoint of any format and write it as a folder in Hugging Face's format or as a GGUF"
        " file. One weight is in memory at a time. Every weight is read back and compared with the source before the"
        " target appears, so the target is either complete or absent.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="the checkpoint: a folder in Meta's or Hugging Face's format, a .gguf file, or ORG/NAME on the"
        " Hugging Face hub",
    )
    parser.add_argument("target", metavar="DST", type=Path, help="the new folder (hf) or file (gguf)")
    parser.add_argument("--to", required=True, type=known, choices=["hf", "gguf"], help="format of the target")
    parser.add_argument(
        "--shards",
        type=int,
        default=0,
        metavar="N",
        help="with --to hf: number of weight files (default: files of about 5 GB)",
    )
    parser.add_argument(
        "--dtype",
        default=None,
        help="dtype to write: float32, bfloat16 or float16; required if the source is quantized (default: as stored)",
    )
    parser.add_argument(
        "--quantize",
        metavar="KIND",
        help="with --to gguf: quantize the matrices to q8_0, q4_0 or q4_k (Q4_K_M) for llama.cpp",
    )
    arguments.add_adapter_option(parser)
    parser.add_argument("--modelfile", action="store_true", help=argparse.SUPPRESS)
    arguments.add_tokenizer_option(parser)
    arguments.add_chat_template(parser)
    parser.add_argument("--force", action="store_true", help="replace an existing target")
    arguments.add_output_options(parser, json="the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..engine.runtime import pick_device, pick_dtype
    from ..hub import resolve
    from ..tools.convert import convert

    if args.modelfile:
        raise UsageError(
            "--modelfile was removed; for Ollama, write a Modelfile with the line FROM ./FILE.gguf and the TEMPLATE of"
            " a chat model"
        )
    dtype = None if args.dtype is None else pick_dtype(args.dtype, pick_device("cpu"))
    with progress_bar(args.quiet) as progress:
        proof = convert(
            resolve(args.source, args.quiet),
            args.target,
            args.to,
            shards=args.shards,
            dtype=dtype,
            quantize=args.quantize,
            adapters=args.adapter,
            tokenizer=args.tokenizer,
            chat_template=arguments.chat_template(args),
            force=args.force,
            progress=progress,
        )
    for warning in proof.warnings:
        streams.info(args, f"warning: {warning}")
    if args.json:
        streams.write_json({"path": str(proof.path), "tensors": proof.tensors, "sha256": proof.sha256})
    else:
        streams.write(
            f"{proof.path}\n{proof.tensors} weights were read back and are equal; sha256 of all weights:"
            f" {proof.sha256}\n"
        )
    return 0


def known(to: str) -> str:
    """The format, unless it was removed."""
    if to == "meta":
        raise argparse.ArgumentTypeError("Meta's format can be read but not written; use --to hf or --to gguf")
    return to


@contextlib.contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress]:
    """Show a progress bar if stderr is a terminal. Yields the function that updates it."""
    if quiet or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from tqdm import tqdm

    with tqdm(unit="weight") as bar:

        def show(what: str, done: int, total: int) -> None:
            bar.set_description(what, refresh=False)
            bar.total, bar.n = total, done
            bar.refresh()

        yield show
