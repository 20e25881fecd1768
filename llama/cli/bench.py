"""Prefill random prompts, decode greedily and report the speed.

The report has every run, the best and the median. Speed depends on the load of the machine: to compare two engines or
settings, run one right after the other.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..checks import integer
from .common import arguments, loading, tables, terminal

COUNTS = ("batch", "prompt_tokens", "new_tokens", "reps")


def add_options(parser: argparse.ArgumentParser) -> None:
    arguments.add_model_options(parser)
    arguments.add(
        parser.add_argument_group("what is measured"),
        ("--batch", "N", "sequences at once (default: %(default)s)", {"default": 1}),
        ("--prompt-tokens", "N", "tokens per prompt (default: %(default)s)", {"default": 512}),
        ("--new-tokens -n", "N", "decoding steps (default: %(default)s)", {"default": 64}),
        ("--reps", "N", "repetitions (default: %(default)s)", {"default": 3}),
    )
    arguments.add_output_options(parser, json="one JSON object")


def run(args: argparse.Namespace) -> int:
    for name in COUNTS:
        integer(arguments.option(name), getattr(args, name))
    from ..engine.runtime import describe_threads
    from ..tools import benchmark

    terminal.info(args, describe_threads())
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
    terminal.show(args, result, tables.table((key, str(value)) for key, value in result.items()))
    return 0
