"""Compare the batch throughput of clearllama, transformers and llama.cpp: same weights, same prompts, same machine.

usage: python scripts/compare_batch.py --peers-python PYTHON [--model GGUF_OR_NAME] [--sizes 8,16,32,64] [--rounds 2]

The job is 64 prompts of 16 to 512 random ids with 128 new tokens each, greedy, without end of text. Each engine runs
in its own process: it loads the model and warms up. The engines then take turns at the complete job; the others sleep.
In the first round clearllama and transformers try every batch size, in later rounds only their fastest. The last column
is the speed divided by that of transformers' fastest way at its fastest size.

    clearllama                the file as `clearllama generate --prompts` runs it, with and without --compile
    transformers              bfloat16, batches of consecutive prompts, left-padded to the longest
    transformers sorted       the same with the prompts sorted by length, which needs less padding
    transformers continuous   bfloat16, its continuous batching, made for GPUs; runs only if --engines names it
    llama.cpp                 one prompt at a time: llama-cpp-python can't generate for several at once

The peers' environment is the one of compare_peers.py.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from compare_peers import PAUSE, PEERS, Worker, cores, json_output, load_llama_cpp, this_machine, versions_of

WARM = 8  # warm-up prompts: enough rows to trigger the build of the compiled batch step before the measurement

Job = Callable[[list[list[int]], int, int], None]  # prompts, new tokens, batch size


def prompts_of(count: int, shortest: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Return random prompts of random lengths, the same for every engine."""
    rng = random.Random(0)
    lengths = [rng.randint(shortest, longest) for _ in range(count)]
    return [[rng.randrange(min(3, vocabulary - 1), vocabulary) for _ in range(length)] for length in lengths]


# ---------------------------------------------------------------------------------------- inside an engine's process
def load_ours(spec: dict[str, Any]) -> tuple[Job, int]:
    """Return clearllama's job and the vocabulary size."""
    from llama import loader
    from llama.checkpoint import open_checkpoint
    from llama.engine import runtime
    from llama.generation.batch import Batch, Request, TokenEvent
    from llama.sampling import SamplingParams

    runtime.set_threads(spec["threads"])
    model = loader.build(open_checkpoint(Path(spec["path"])), device="cpu", fast=True, compile=spec["compile"])

    def job(prompts: list[list[int]], new: int, size: int) -> None:
        requests = [Request(prompt, SamplingParams(max_new_tokens=new)) for prompt in prompts]
        tokens = sum(isinstance(event, TokenEvent) for event in Batch(model, requests, slots=size))
        check(tokens, len(prompts) * new)

    return job, model.config.vocab_size


def load_transformers(spec: dict[str, Any]) -> tuple[Job, int]:
    """Return transformers' job and the vocabulary size; spec["way"] is "", "sorted" or "continuous"."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(spec["threads"])
    path = Path(spec["path"])
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def batches(prompts: list[list[int]], new: int, size: int) -> None:
        prompts = sorted(prompts, key=len) if spec["way"] == "sorted" else prompts
        for first in range(0, len(prompts), size):
            batch = prompts[first : first + size]
            longest = max(map(len, batch))
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])  # (B, T)
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])  # (B, T)
            out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
            check(out.shape[1] - longest, new)

    def continuous(prompts: list[list[int]], new: int, size: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        settings = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        limits = ContinuousBatchingConfig(max_requests_per_batch=size)
        out = model.generate_batch(
            prompts, generation_config=settings, continuous_batching_config=limits, warmup=False, progress_bar=False
        )
        check(sum(len(answer.generated_tokens) for answer in out.values()), len(prompts) * new)

    return continuous if spec["way"] == "continuous" else batches, model.config.vocab_size


def load_one_by_one(spec: dict[str, Any]) -> tuple[Job, int]:
    """Return llama.cpp's job and the vocabulary size."""
    lengths = {"prompt_tokens": spec["longest"], "new_tokens": spec["new"]}
    model = load_llama_cpp({**spec, **lengths})

    def job(prompts: list[list[int]], new: int, size: int) -> None:
        for prompt in prompts:
            token = model.step(prompt, 0)
            for position in range(len(prompt), len(prompt) + new - 1):
                token = model.step([token], position)

    return job, model.vocabulary


def check(got: int, expected: int) -> None:
    """Exit with an error unless an engine generated the expected number of tokens."""
    if got != expected:
        raise SystemExit(f"expected {expected} new tokens, got {got}")


LOADERS: dict[str, Callable[[dict[str, Any]], tuple[Job, int]]] = {
    "clearllama": load_ours,
    "transformers": load_transformers,
    "llama.cpp": load_one_by_one,
}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (a key of LOADERS, what is added to its spec)
    "clearllama": ("clearllama", {"compile": False}),
    "clearllama --compile": ("clearllama", {"compile": True}),
    "transformers": ("transformers", {"way": ""}),
    "transformers sorted": ("transformers", {"way": "sorted"}),
    "transformers continuous": ("transformers", {"way": "continuous"}),
    "llama.cpp": ("llama.cpp", {}),
}


def worker(spec: dict[str, Any]) -> int:
    """Load, warm up, print {"ready": 1}; then run the job for every batch size on stdin, print {"seconds": ..}."""
    answers = json_output()
    job, vocabulary = LOADERS[spec["engine"]](spec)
    prompts = prompts_of(spec["prompts"], spec["shortest"], spec["longest"], vocabulary)
    job([prompt[:16] for prompt in prompts[:WARM]], 4, WARM)
    print(json.dumps({"ready": 1}), file=answers, flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        job(prompts, spec["new"], int(line))
        print(json.dumps({"seconds": time.perf_counter() - started}), file=answers, flush=True)
    return 0


# -------------------------------------------------------------------------------------------------------------- main
def integers(parser: argparse.ArgumentParser, option: str, text: str) -> list[int]:
    """Parse '8,16' as [8, 16], each at least 1."""
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        parser.error(f"{option} must be comma-separated integers of at least 1, got {text!r:.60}")
    return [int(part) for part in text.split(",")]


def turns(sizes: list[int], rounds: int, live: list[str], times: dict[tuple[str, int], list[float]]) -> Iterator[tuple]:
    """Yield (round, engine, batch size): all sizes in round 1, then each engine's fastest so far."""
    for number in range(1, rounds + 1):
        for engine in live[:: 1 if number % 2 else -1]:
            tried = [size for name, size in times if name == engine]
            best = sorted(tried, key=lambda size: statistics.median(times[engine, size]))[:1]
            for size in [1] if engine == "llama.cpp" else best if number > 1 else sizes:
                yield number, engine, size


def main() -> int:
    """Measure all engines, then print the table, the machine and the settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="GGUF_OR_NAME", help="default: clearllama's default model")
    parser.add_argument("--peers-python", default=sys.executable, metavar="PYTHON", help="default: this one")
    parser.add_argument("--sizes", default="8,16,32,64", help="batch sizes to try (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--lengths", default="16,512", help="shortest and longest prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    engines = [name for name in ENGINES if name != "transformers continuous"]
    parser.add_argument("--engines", default=",".join(engines), metavar="LIST", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=cores(), metavar="N", help="default: %(default)s")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker)
    from llama import hub

    lengths, sizes = integers(parser, "--lengths", args.lengths), integers(parser, "--sizes", args.sizes)
    if len(lengths) != 2 or lengths[0] > lengths[1]:
        parser.error(f"--lengths must be the shortest and the longest prompt, such as 16,512, got {args.lengths}")
    shortest, longest = lengths
    for option in ("rounds", "prompts", "new_tokens", "threads"):
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1, got {getattr(args, option)}")
    if unknown := set(args.engines.split(",")) - set(ENGINES):
        parser.error(f"unknown engine {min(unknown)!r}; known: {', '.join(ENGINES)}")
    spec = {"path": str(hub.resolve(args.model or hub.DEFAULT)), "options": {}, "threads": args.threads}
    spec |= {"prompts": args.prompts, "shortest": shortest, "longest": longest, "new": args.new_tokens}
    times: dict[tuple[str, int], list[float]] = {}
    live = args.engines.split(",")
    versions = {"torch": importlib.metadata.version("torch")}
    workers: dict[str, Worker] = {}
    try:
        for engine in dict.fromkeys(ENGINES[engine][0] for engine in live):
            if engine in PEERS:
                versions |= versions_of(engine, args.peers_python)
        for engine in live:
            name, options = ENGINES[engine]
            python = args.peers_python if name in PEERS else sys.executable
            workers[engine] = Worker(python, {**spec, "engine": name, **options}, __file__)
            workers[engine].answer()
        for number, engine, size in turns(sizes, args.rounds, live, times):
            time.sleep(PAUSE)
            seconds = workers[engine].turn(str(size), {"seconds"})["seconds"]
            times.setdefault((engine, size), []).append(seconds)
            print(f"round {number}  {engine:<22} {size:>3}  {seconds:6.1f} s", file=sys.stderr)
    except RuntimeError as error:
        print(f"compare_batch: error: {engine}: {error}", file=sys.stderr)
        return 1
    finally:
        for process in workers.values():
            process.stop()
    new = args.prompts * args.new_tokens
    best = {engine: min(statistics.median(times[key]) for key in times if key[0] == engine) for engine in live}
    theirs = min((best[engine] for engine in live if ENGINES[engine][0] == "transformers"), default=None)
    print("| engine | batch size | runs | seconds | new tok/s | / transformers |\n|---|---|---|---|---|---|")
    for (engine, size), found in times.items():
        median = statistics.median(found)
        ratio = f"{theirs / median:.2f}" if theirs else ""
        print(f"| {engine} | {size} | {len(found)} | {median:.1f} | {new / median:,.0f} | {ratio} |")
    host = this_machine()
    print(f"\n{datetime.date.today()}: {host['cores']} cores, {host['cpu']}, {args.threads} threads")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(
        f"{args.prompts} prompts of {shortest} to {longest} tokens, {args.new_tokens} new, {args.model or hub.DEFAULT}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
