"""Measure the speed and memory of a model.

Prefill random prompts, decode greedily and report every run, the best and the median. Speed depends on the load of the
machine: to compare two engines or settings, run one right after the other.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..checks import dtype_name, integer
from .common import arguments, loading, tables, terminal
from .common.parser import Group

COUNTS = ("batch", "prompt_tokens", "new_tokens", "reps")


OPTIONS = [
    ("--json", bool, "write one JSON object"),
    *arguments.model(argument=True),
    Group("measurement"),
    ("--batch N", int, "sequences at once", {"default": 1}),
    ("-p --prompt-tokens N", int, "tokens per prompt", {"default": 512}),
    ("-n --new-tokens N", int, "decoding steps", {"default": 64}),
    ("-r --reps N", int, "repetitions", {"default": 3}),
]


def run(args: argparse.Namespace) -> None:
    for name in COUNTS:
        integer(arguments.option(name), getattr(args, name))
    import torch

    from ..tools import benchmark

    terminal.info(f"{(count := torch.get_num_threads())} thread{'s' * (count != 1)}")
    started = time.perf_counter()
    model = loading.load_model(args, args.model, args.adapter, args.tokenizer)
    result = {
        "engine": "clearllama",
        "model": Path(args.model).name,
        "dtype": dtype_name(model.norm.weight.dtype),
        "load_s": round(time.perf_counter() - started, 3),
        **benchmark.measure(model, args.prompt_tokens, args.new_tokens, args.batch, args.reps),
        "quantize": args.quantize,
        "compile": args.compile,
        "batch": args.batch,
        "context": args.prompt_tokens,
    }
    terminal.show(args, result, tables.table((key, str(value)) for key, value in result.items()))
