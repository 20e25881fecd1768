"""clearllama bench: measure prefill speed, decoding speed and memory, in units that other engines report."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import integer
from ..errors import UsageError
from . import arguments, loading, quality, streams

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# Options that only affect speed, with their defaults. --quality refuses them.
SPEED = {
    "compile": "off",
    "batch": "1",
    "prompt_tokens": "512",
    "new_tokens": 64,
    "reps": 3,
    "profile": None,
}
COLUMNS = (
    "dtype     quantize       compile  batch  context  prefill tok/s  decode tok/s  MB/token  GB/s  share  peak MiB\n"
)


@dataclass(frozen=True)
class Setting:
    """One combination of the options to measure."""

    dtype: str
    quantize: str | None
    compile: bool
    batch: int
    prompt_tokens: int

    def __str__(self) -> str:
        compiled = "compiled" if self.compile else "eager"
        return f"{self.dtype}-{self.quantize or 'none'}-{compiled}-batch{self.batch}-context{self.prompt_tokens}"


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed and memory, or the quality loss of quantization",
        description="Prefill random prompts and decode greedily. Report the speed of every run, the best and the"
        " median, the bytes read per token, and how much of this machine's memory bandwidth the run used. Speed depends"
        " on the load of the machine: to compare two engines, run one right after the other.",
        usage="%(prog)s [options]",
        allow_abbrev=False,
        conflict_handler="resolve",  # some model options are redefined below to accept lists
    )
    arguments.add_model_options(parser)
    group = parser.add_argument_group(
        "settings",
        "each option accepts a list, such as --quantize none,int8,int4; every combination runs in its own process",
    )
    group.add_argument(
        "--dtype", default="auto", metavar="LIST", help="auto, float32, bfloat16, float16 (default: auto)"
    )
    group.add_argument("--quantize", metavar="LIST", help="none, int8, int4 or another scheme (default: none)")
    group.add_argument(
        "--compile",
        nargs="?",
        const="on",
        metavar="off|on|both",
        help="measure the uncompiled decoding step, the compiled one, or both (default: off)",
    )
    group.add_argument("--batch", metavar="LIST", help="number of sequences (default: 1)")
    group.add_argument("--prompt-tokens", metavar="LIST", help="tokens per prompt (default: 512)")
    group.add_argument("--new-tokens", "-n", type=int, metavar="N", help="decoding steps (default: 64)")
    group.add_argument("--reps", type=int, metavar="N", help="repetitions (default: 3)")
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="write a torch.profiler trace and show the ten slowest operators"
    )
    quality.add_options(parser)
    arguments.add_rope_options(parser)
    arguments.add_output_options(parser, json="one JSON object; for several settings, an array of them")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.quality is not None:
        given = [name for name in SPEED if getattr(args, name) is not None]
        if given:
            raise UsageError(f"{arguments.option(given[0])} only affects speed; leave it out with --quality")
        return quality.run(args)
    if args.window is not None:
        raise UsageError("--window needs --quality")
    args = argparse.Namespace(
        **{**vars(args), **{key: value for key, value in SPEED.items() if getattr(args, key) is None}}
    )
    for name in ("new_tokens", "reps"):
        integer(arguments.option(name), getattr(args, name))
    from ..engine.runtime import describe_threads

    chosen = settings(args)
    streams.info(args, describe_threads())
    if len(chosen) > 1:
        return _run_each(args, chosen)
    result = measure(args, chosen[0])
    if args.json:
        streams.write_json(result)
        return 0
    costs = result.pop("profile", None)
    for key, value in result.items():
        streams.write(f"{key:<18} {value}\n")
    if costs:
        _write_costs(costs, args.profile)
    return 0


def settings(args: argparse.Namespace) -> list[Setting]:
    """Every combination of the lists in the options. Raises UsageError for an unknown or invalid entry."""
    import torch

    from ..engine.runtime import pick_dtype
    from ..quant.schemes import pick_scheme

    dtypes = _entries("dtype", args.dtype)
    for dtype in dtypes:
        pick_dtype(dtype, torch.device("cpu"))
    schemes = [None if name == "none" else name for name in _entries("quantize", args.quantize or "none")]
    for scheme in schemes:
        if scheme is not None:
            pick_scheme(scheme)
    modes = ["off", "on"] if args.compile == "both" else _entries("compile", args.compile)
    for mode in modes:
        if mode not in ("off", "on"):
            raise UsageError(f"--compile must be off, on or both, got {mode!r}")
    batches, contexts = (_counts(name, getattr(args, name)) for name in ("batch", "prompt_tokens"))
    compiled = [mode == "on" for mode in modes]
    return [Setting(*values) for values in itertools.product(dtypes, schemes, compiled, batches, contexts)]


def _entries(name: str, text: str) -> list[str]:
    """Split a list at its commas."""
    entries = [entry.strip() for entry in text.split(",")]
    if "" in entries or len(set(entries)) < len(entries):
        raise UsageError(f"{arguments.option(name)} must be a comma-separated list without repetitions, got {text!r}")
    return entries


def _counts(name: str, text: str) -> list[int]:
    """Split a list of positive integers."""
    entries = _entries(name, text)
    for entry in entries:
        if not (entry.isascii() and entry.isdigit() and int(entry[:18]) >= 1 and len(entry) <= 18):
            raise UsageError(f"{arguments.option(name)} must be an integer of at least 1, got {entry!r}")
    return [int(entry) for entry in entries]


def measure(args: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Load the model with a setting and measure it. Returns the object that --json writes."""
    from ..engine import runtime
    from ..tools import benchmark

    runtime.set_threads(args.threads)  # this may be a new process
    chosen = {"dtype": setting.dtype, "quantize": setting.quantize, "compile": setting.compile}
    started = time.perf_counter()
    model = loading.load_model(argparse.Namespace(**{**vars(args), **chosen}))
    load_s = time.perf_counter() - started
    if setting.prompt_tokens + args.new_tokens > model.max_seq_len:
        raise UsageError(
            f"--prompt-tokens {setting.prompt_tokens} and --new-tokens {args.new_tokens} exceed the context of"
            f" {model.max_seq_len}; lower them or raise --max-seq-len"
        )
    sizes = setting.prompt_tokens, args.new_tokens, setting.batch
    facts = benchmark.measure(model, *sizes, args.reps).as_dict()
    result: dict[str, Any] = {
        "engine": "clearllama",
        "model": Path(args.model).name,
        "dtype": loading.dtype_name(model),
        "load_s": round(load_s, 3),
        **{key: facts.pop(key) for key in ("prefill_tps", "decode_tps", "decode_tps_all", "peak_rss_mb")},
        "quantize": setting.quantize,
        "compile": setting.compile,
        "batch": setting.batch,
        "context": setting.prompt_tokens,
        **facts,
    }
    if args.profile is not None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler reports on stderr that it starts and stops
        costs = benchmark.profile(model, args.profile, *sizes)
        result["profile"] = {phase: [dataclasses.asdict(cost) for cost in rows] for phase, rows in costs.items()}
    return result


# --------------------------------------------------------------------------------------------------- many settings
def _run_each(args: argparse.Namespace, chosen: list[Setting]) -> int:
    """Measure each setting in its own process and write its result at once. Returns 1 if any failed."""
    failed, costs = 0, []
    if not args.json:
        streams.write(COLUMNS)
    for number, setting in enumerate(chosen, 1):
        streams.info(args, f"{number} of {len(chosen)}: {setting}")
        own = {"profile": args.profile and args.profile / str(setting)}
        result = _in_a_process(argparse.Namespace(**{**vars(args), **own}), setting)
        if "error" in result:
            failed += 1
            streams.error(f"{setting}: {result['error']}")
            facts = dataclasses.asdict(setting)
            facts["context"] = facts.pop("prompt_tokens")
            result = {"engine": "clearllama", "model": Path(args.model).name, **facts, **result}
        if args.json:
            streams.write_raw(("[" if number == 1 else ",\n") + streams.json_text(result))
        else:
            streams.write(_row(result))
            if "profile" in result:
                costs.append((own["profile"], result["profile"]))
    if args.json:
        streams.write_raw("]\n")
    for folder, found in costs:
        _write_costs(found, folder)
    if failed:
        streams.error(f"{failed} of {len(chosen)} settings could not be measured")
    return 1 if failed else 0


def _in_a_process(args: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Run `measure` in a new process, for its own peak memory and its own crash. Returns {"error": ..} if it fails."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_measure_and_send, args=(args, setting, sender), daemon=True)
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the child: the parent handles interrupts
    child.start()
    signal.signal(signal.SIGINT, previous)
    sender.close()
    try:
        result: dict[str, Any] = receiver.recv()
        return result
    except EOFError:
        child.join()
        code = child.exitcode or 0
        ending = f"was killed by signal {-code}; out of memory?" if code < 0 else f"ended with code {code}"
        return {"error": f"its process {ending}"}
    finally:
        child.kill()  # it has sent its result, or this process is interrupted
        child.join()


def _measure_and_send(args: argparse.Namespace, setting: Setting, sender: Connection) -> None:
    try:
        sender.send(measure(args, setting))
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        sender.send({"error": streams.describe(error)})


# ----------------------------------------------------------------------------------------------------------- tables
def _row(result: dict[str, Any]) -> str:
    """A line of the table under COLUMNS."""
    line = f"{result['dtype']:<8}  {result['quantize'] or 'none':<13}  {'on' if result['compile'] else 'off':<7}"
    line += f"  {result['batch']:>5}  {result['context']:>7}"
    if "error" in result:
        return f"{line}  failed\n"
    peak = "" if result["peak_rss_mb"] is None else f"{result['peak_rss_mb']:,}"
    line += (
        f"  {result['prefill_tps']:>13,.1f}  {result['decode_tps']:>12,.2f}  {result['bytes_per_token'] / 1e6:>8,.1f}"
    )
    return f"{line}  {result['bandwidth_gbs']:>4,.0f}  {result['share']:>5.2f}  {peak:>8}\n"


def _write_costs(costs: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """Write the slowest operators of each phase."""
    for phase, rows in costs.items():
        streams.write(f"\n{phase}, slowest operators (full trace: {folder / phase}.json)\n")
        streams.write("   self ms   share    calls  operator\n")
        for row in rows:
            streams.write(f"{row['self_ms']:>10,.2f}  {row['share']:>6.1%}  {row['calls']:>7,}  {row['operator']}\n")
