"""clearllama quantize: quantize a checkpoint to 4 or 8 bits and save it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..errors import UsageError
from . import arguments, convert, streams


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "quantize",
        help="quantize a checkpoint to 4 or 8 bits and save it",
        description="Read a checkpoint of any format, quantize its linear layers and write a folder that every command"
        " accepts as --model and loads without quantizing again. One weight is in memory at a time. Every tensor is"
        " read back and compared before the target appears, so the target is either complete or absent.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        nargs="?",
        help="the checkpoint: a folder in Meta's or Hugging Face's format, a .gguf file, or ORG/NAME on the"
        " Hugging Face hub",
    )
    parser.add_argument("target", metavar="DST", nargs="?", type=Path, help="the new folder")
    parser.add_argument(
        "--scheme",
        default="int4",
        metavar="SCHEME",
        help="int4 or int8, or another scheme of --list (default: %(default)s)",
    )
    arguments.add_adapter_option(parser)
    parser.add_argument("--list", action="store_true", help="list all schemes with their bits per weight")
    parser.add_argument(
        "--shards", type=int, default=0, metavar="N", help="number of weight files (default: files of about 5 GB)"
    )
    arguments.add_tokenizer_option(parser)
    arguments.add_chat_template(parser)
    parser.add_argument("--force", action="store_true", help="replace an existing target")
    arguments.add_output_options(parser, json="the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.list:
        return show_schemes(args.json)
    if args.source is None or args.target is None:
        raise UsageError("quantize needs SRC and DST, a checkpoint and a new folder; --list shows the schemes")
    from ..checkpoint import open_checkpoint
    from ..hub import resolve
    from ..tools.quantize import quantize

    source, started = resolve(args.source, args.quiet), time.perf_counter()
    before = sum(open_checkpoint(source).parts.values())
    with convert.progress_bar(args.quiet) as progress:
        options = {"adapters": args.adapter, "tokenizer": args.tokenizer, "shards": args.shards, "force": args.force}
        options["chat_template"] = arguments.chat_template(args)
        proof = quantize(source, args.target, args.scheme, **options, progress=progress)
    after = sum(open_checkpoint(proof.path).parts.values())
    for warning in proof.warnings:
        streams.info(args, f"warning: {warning}")
    seconds = time.perf_counter() - started
    streams.info(
        args, f"quantized {before / 1e6:,.0f} MB to {after / 1e6:,.0f} MB of weights ({args.scheme}) in {seconds:.1f} s"
    )
    if args.json:
        streams.write_json(
            {"path": str(proof.path), "scheme": args.scheme, "tensors": proof.tensors, "sha256": proof.sha256}
            | {"bytes_before": before, "bytes_after": after}
        )
    else:
        streams.write(
            f"{proof.path}\n{proof.tensors} tensors were read back and are equal; sha256 of all tensors:"
            f" {proof.sha256}\n"
        )
    return 0


def show_schemes(as_json: bool) -> int:
    """List the schemes with their bits per weight, scales and offsets included."""
    from ..quant.schemes import SCHEMES

    if as_json:
        streams.write_json(
            {name: {"bits_per_weight": s.bits_per_weight, "about": s.about} for name, s in SCHEMES.items()}
        )
        return 0
    for name, scheme in SCHEMES.items():
        streams.write(f"{name:<14} {scheme.bits_per_weight:>5.2f} bits per weight   {scheme.about}\n")
    return 0
