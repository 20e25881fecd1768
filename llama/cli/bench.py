"""clearllama bench: speed of prefill and decoding, and memory, as numbers to put beside another engine's."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import signal
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import UsageError
from . import arguments, loading, quality, streams

# What says something about speed only, and what it is when nobody says: --quality refuses these.
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
    """One way to run a model."""

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
        help="measure speed and memory, or what few bits cost in quality",
        description="Prefill random prompts and decode greedily behind them; the best, the median and every run are"
        " reported, with the bytes that a token has to read and their share of the bandwidth of this memory. Compare"
        " with another engine in the same minutes: absolute numbers depend on what else the machine does.",
        allow_abbrev=False,
        conflict_handler="resolve",  # some of the model's options are lists here
    )
    arguments.add_model_options(parser)
    group = parser.add_argument_group(
        "settings",
        "a list, as in --quantize none,int8,int4, runs every combination, each in a process of its own",
    )
    group.add_argument(
        "--dtype", default="auto", metavar="LIST", help="auto, float32, bfloat16, float16 (default: auto)"
    )
    group.add_argument("--quantize", metavar="LIST", help="none or a scheme: int8, int4, ... (default: none)")
    group.add_argument("--compile", nargs="?", const="on", metavar="off|on|both", help="default: off; alone: on")
    group.add_argument("--batch", metavar="LIST", help="prompts at a time (default: 1)")
    group.add_argument("--prompt-tokens", metavar="LIST", help="tokens of a prompt (default: 512)")
    group.add_argument("--new-tokens", "-n", type=int, metavar="N", help="decoding steps (default: 64)")
    group.add_argument("--reps", type=int, metavar="N", help="repetitions (default: 3)")
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="write a trace of torch.profiler; show the ten costliest operators"
    )
    quality.add_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object for each setting")
    arguments.add_debug(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.quality is not None:
        given = [name for name in SPEED if getattr(args, name) is not None]
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} is about speed; leave it out with --quality")
        return quality.run(args)
    if args.window is not None:
        raise UsageError("--window goes with --quality")
    args = argparse.Namespace(
        **{**vars(args), **{key: value for key, value in SPEED.items() if getattr(args, key) is None}}
    )
    for name in ("new_tokens", "reps"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    chosen = settings(args)
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
    """Every combination of the lists that were given. Raises UsageError when an entry is none that can be run."""
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
    """The entries of a list with commas."""
    entries = [entry.strip() for entry in text.split(",")]
    if "" in entries or len(set(entries)) < len(entries):
        raise UsageError(f"--{name.replace('_', '-')}: expected entries with commas between them, each once: {text!r}")
    return entries


def _counts(name: str, text: str) -> list[int]:
    """The entries of a list of numbers from 1 on."""
    entries = _entries(name, text)
    for entry in entries:
        if not (entry.isascii() and entry.isdigit() and int(entry[:18]) >= 1 and len(entry) <= 18):
            raise UsageError(f"--{name.replace('_', '-')} must be a whole number of at least 1, got {entry!r}")
    return [int(entry) for entry in entries]


def measure(args: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Load the model as the setting says and time it; what --json writes."""
    from ..tools import benchmark

    wanted = {
        key: value for key, value in dataclasses.asdict(setting).items() if key in ("dtype", "quantize", "compile")
    }
    started = time.perf_counter()
    model = loading.load_model(argparse.Namespace(**{**vars(args), **wanted}))
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
        "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
        "load_s": round(load_s, 3),
        **{key: facts.pop(key) for key in ("prefill_tps", "decode_tps", "decode_tps_all", "peak_rss_mb")},
        "quantize": setting.quantize,
        "compile": setting.compile,
        "batch": setting.batch,
        "context": setting.prompt_tokens,
        **facts,
    }
    if args.profile is not None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler says on stderr that it starts and stops
        costs = benchmark.profile(model, args.profile, *sizes)
        result["profile"] = {phase: [dataclasses.asdict(cost) for cost in rows] for phase, rows in costs.items()}
    return result


# --------------------------------------------------------------------------------------------------- many settings
def _run_each(args: argparse.Namespace, chosen: list[Setting]) -> int:
    """One line for each setting as soon as it is measured; 1 if any failed."""
    failed, costs = 0, []
    if not args.json:
        streams.write(COLUMNS)
    for number, setting in enumerate(chosen, 1):
        streams.say(args, f"{number} of {len(chosen)}: {setting}")
        own = {"profile": args.profile and args.profile / str(setting)}
        result = _in_a_process(argparse.Namespace(**{**vars(args), **own}), setting)
        if "error" in result:
            failed += 1
            streams.tell(f"clearllama: error: {setting}: {result['error']}")
            facts = dataclasses.asdict(setting)
            facts["context"] = facts.pop("prompt_tokens")
            result = {"engine": "clearllama", "model": Path(args.model).name, **facts, **result}
        if args.json:
            streams.write_json(result)
        else:
            streams.write(_row(result))
            if "profile" in result:
                costs.append((own["profile"], result["profile"]))
    for folder, found in costs:
        _write_costs(found, folder)
    if failed:
        streams.tell(f"clearllama: error: {failed} of {len(chosen)} settings could not be measured")
    return 1 if failed else 0


def _in_a_process(args: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """`measure` in a fresh process, so that its memory is its own and its end not ours; or {"error": ..}."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_measure_and_send, args=(args, setting, sender), daemon=True)
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: an interrupt is this process's business
    child.start()
    signal.signal(signal.SIGINT, previous)
    sender.close()
    try:
        result: dict[str, Any] = receiver.recv()
        return result
    except EOFError:
        child.join()
        code = child.exitcode or 0
        how = f"was ended by signal {-code}; out of memory?" if code < 0 else f"ended with code {code}"
        return {"error": f"its process {how}"}
    finally:
        child.kill()  # it has said all it had to say, or we are interrupted
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
    """A line under COLUMNS."""
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
    """The costliest operators of each phase."""
    for phase, rows in costs.items():
        streams.write(f"\n{phase}, costliest operators (all of it: {folder / phase}.json)\n")
        streams.write("   self ms   share    calls  operator\n")
        for row in rows:
            streams.write(f"{row['self_ms']:>10,.2f}  {row['share']:>6.1%}  {row['calls']:>7,}  {row['operator']}\n")
