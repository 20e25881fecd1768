"""Quantize a checkpoint to 4 or 8 bits and save it.

Any source format works; its linear layers are quantized. Every command accepts the new folder as --model and loads
it without quantizing again. One weight is in memory at a time. Every tensor is read back and compared before the target
appears, so the target is either complete or absent.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import UsageError
from . import convert
from .common import tables, terminal

OPTIONS = [
    ("source SRC", str, "the checkpoint (as for --model of the other commands)", {"nargs": "?"}),
    ("target DST", Path, "the new folder", {"nargs": "?"}),
    ("--scheme SCHEME", str, "a scheme of --list", {"default": "int4"}),
    ("--list", bool, "list all schemes with their bits per weight"),
    *convert.WRITING,
]


def run(args: argparse.Namespace) -> None:
    if args.list:
        from ..quant.schemes import SCHEMES

        facts = {name: {"bits_per_weight": s.bits_per_weight, "about": s.about} for name, s in SCHEMES.items()}
        rows = [(name, f"{s.bits_per_weight:.2f} bits per weight", s.about) for name, s in SCHEMES.items()]
        terminal.show(args, facts, tables.table(rows))
        return
    if args.source is None or args.target is None:
        raise UsageError("quantize needs a checkpoint (SRC) and a new folder (DST); --list shows the schemes")
    from ..hub import resolve
    from ..tools.convert import quantize

    source = resolve(args.source, args.quiet)
    with convert.writing(args) as options:
        proof = quantize(source, args.target, args.scheme, **options)
    before, after = proof.bytes
    terminal.info(f"quantized {before / 1e6:,.0f} MB to {after / 1e6:,.0f} MB of weights ({args.scheme})")
    convert.write_proof(args, proof, scheme=args.scheme)
