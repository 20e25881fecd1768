"""clearllama bench: measure prefill speed, decoding speed and memory, in units that other engines report."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..checks import integer
from ..errors import UsageError
from . import arguments, loading, quality, streams, tables

# Counts, with their defaults and help. They only affect speed, so --quality refuses them.
COUNTS = {
    "batch": (1, "sequences at once"),
    "prompt_tokens": (512, "tokens per prompt"),
    "new_tokens": (64, "decoding steps"),
    "reps": (3, "repetitions"),
}


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "bench",
        description="Prefill random prompts and decode greedily. Report the speed of every run, the best and the"
        " median. Speed depends on the load of the machine: to compare two engines or settings, run one right after the"
        " other.",
        usage="%(prog)s [options]",
    )
    arguments.add_model_options(parser)
    group = parser.add_argument_group("what is measured")
    for name, (default, about) in COUNTS.items():
        options = [arguments.option(name)] + ["-n"] * (name == "new_tokens")
        group.add_argument(*options, type=int, default=default, metavar="N", help=f"{about} (default: %(default)s)")
    quality.add_options(parser)
    arguments.add_rope_options(parser)
    arguments.add_output_options(parser, json="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name, (default, _) in COUNTS.items():
        count = integer(arguments.option(name), getattr(args, name))
        if args.quality is not None and (count != default or args.compile):
            option = "--compile" if args.compile else arguments.option(name)
            raise UsageError(f"{option} only affects speed; leave it out with --quality")
    if args.quality is not None:
        return quality.run(args)
    if args.window is not None:
        raise UsageError("--window needs --quality")
    from ..engine.runtime import describe_threads
    from ..tools import benchmark

    streams.info(args, describe_threads())
    started = time.perf_counter()
    model = loading.load_model(args)
    result = {
        "engine": "clearllama",
        "model": Path(args.model).name,
        "dtype": loading.dtype_name(model),
        "load_s": round(time.perf_counter() - started, 3),
        **benchmark.measure(model, args.prompt_tokens, args.new_tokens, args.batch, args.reps),
        "quantize": args.quantize,
        "compile": args.compile,
        "batch": args.batch,
        "context": args.prompt_tokens,
    }
    if args.json:
        streams.write_json(result)
    else:
        streams.write(tables.table((key, str(value)) for key, value in result.items()))
    return 0
