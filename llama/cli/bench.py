"""clearllama bench: speed of prefill and decoding, and memory, as numbers to put beside another engine's."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from ..errors import UsageError
from . import common


def add_parser(commands: common.Subparsers) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed and memory",
        description="Prefill random prompts and decode greedily behind them; the best and every run are reported."
        " Compare with another engine in the same minutes: absolute numbers depend on what else the machine does.",
        allow_abbrev=False,
    )
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="default: %(default)s")
    parser.add_argument("--new-tokens", "-n", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--reps", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    common.add_model_options(parser)
    common.add_debug(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name in ("prompt_tokens", "new_tokens", "reps"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    from ..generate import prefill

    started = time.perf_counter()
    model = common.load_model(args)
    load_s = time.perf_counter() - started
    if args.prompt_tokens + args.new_tokens > model.max_seq_len:
        raise UsageError(
            f"--prompt-tokens {args.prompt_tokens} and --new-tokens {args.new_tokens} exceed the context of"
            f" {model.max_seq_len}; lower them or raise --max-seq-len"
        )
    prefill_s, decode_s = [], []
    for rep in range(args.reps):
        rng = random.Random(rep)
        prompt = [rng.randrange(model.config.vocab_size) for _ in range(args.prompt_tokens)]
        cache = model.new_cache(args.prompt_tokens + args.new_tokens)
        started = time.perf_counter()
        next_id = int(prefill(model, prompt, cache).argmax())  # int() waits for a GPU to be done
        prefill_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        for _ in range(args.new_tokens):
            next_id = int(prefill(model, [next_id], cache).argmax())
        decode_s.append(time.perf_counter() - started)
    result = {
        "engine": "clearllama",
        "model": Path(args.model).name,
        "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
        "load_s": round(load_s, 3),
        "prefill_tps": round(args.prompt_tokens / min(prefill_s), 1),
        "decode_tps": round(args.new_tokens / min(decode_s), 2),
        "decode_tps_all": [round(args.new_tokens / seconds, 2) for seconds in decode_s],
        "peak_rss_mb": _peak_rss_mb(),
    }
    if args.json:
        common.write_json(result)
    else:
        for key, value in result.items():
            common.write(f"{key:<16} {value}\n")
    return 0


def _peak_rss_mb() -> int | None:
    """Largest resident memory of this process in MiB; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (2**20 if sys.platform == "darwin" else 2**10)
