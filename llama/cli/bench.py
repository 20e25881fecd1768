"""clearllama bench: measure prefill speed, decoding speed and memory, in units that other engines report."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..checks import integer
from ..errors import UsageError
from . import arguments, loading, quality, streams

# Options that only affect speed, with their defaults. --quality refuses them.
SPEED = {"compile": False, "batch": 1, "prompt_tokens": 512, "new_tokens": 64, "reps": 3}


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "bench",
        description="Prefill random prompts and decode greedily. Report the speed of every run, the best and the"
        " median, the bytes read per token, and how much of this machine's memory bandwidth the run used. Speed depends"
        " on the load of the machine: to compare two engines or settings, run one right after the other.",
        usage="%(prog)s [options]",
    )
    arguments.add_model_options(parser)
    group = parser.add_argument_group("what is measured")
    group.add_argument("--batch", type=number, metavar="N", help="sequences at once (default: %(default)s)")
    group.add_argument("--prompt-tokens", type=number, metavar="N", help="tokens per prompt (default: %(default)s)")
    group.add_argument("--new-tokens", "-n", type=number, metavar="N", help="decoding steps (default: %(default)s)")
    group.add_argument("--reps", type=number, metavar="N", help="repetitions (default: %(default)s)")
    group.add_argument("--profile", help=argparse.SUPPRESS)
    quality.add_options(parser)
    arguments.add_rope_options(parser)
    arguments.add_output_options(parser, json="one JSON object")
    parser.set_defaults(run=run, **SPEED)


def number(text: str) -> int:
    """An integer of at least 1. Lists of settings were removed."""
    if "," in text:
        raise argparse.ArgumentTypeError(f"expected one number, got {text!r:.80}; run bench once for each setting")
    return integer("the number", int(text))


def run(args: argparse.Namespace) -> int:
    if args.profile is not None:
        raise UsageError("--profile was removed; run llama.generate under torch.profiler to profile a model")
    if args.quality is not None:
        for name, default in SPEED.items():
            if getattr(args, name) != default:
                raise UsageError(f"{arguments.option(name)} only affects speed; leave it out with --quality")
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
        return 0
    for key, value in result.items():
        streams.write(f"{key:<18} {value}\n")
    return 0
