"""Compare the speed of clearllama, llama.cpp and transformers on the same weights and the same machine.

usage: python scripts/compare_peers.py --peers-python PYTHON [--model DIR_OR_NAME] [--rows int8,int4]

Each engine of a row runs in its own process: it loads the model, warms up, and stays alive until the row is done. The
engines take turns. Every round has one turn per engine, in an order that is reversed each round; an engine sleeps
while the others work. A turn decodes --new-tokens after a prompt. The first --prefill-rounds rounds also process the
prompt; later rounds reuse its cache.

Ratios are computed within a round, between turns a few seconds apart, so that a slowdown of the machine affects all
engines alike. The table shows medians over the rounds. An engine that fails ends the comparison.

DIR_OR_NAME is one of

    a name or a GGUF file   Row "file": clearllama and llama.cpp on that file, transformers on its weights in bfloat16
    a folder                It has one model as hf/, bf16.gguf, q8_0.gguf, q4_0.gguf, or some of these. Rows "bf16",
                            "int8", "int4": clearllama on hf/, unchanged or with --quantize, and on the GGUF file;
                            llama.cpp on the GGUF file, transformers on hf/

All engines of a row must fit into memory together. `clearllama convert` writes hf/ and the GGUF files. The peers live
in an environment of their own:

    python -m venv peers && peers/bin/pip install torch transformers accelerate gguf llama-cpp-python
    python scripts/compare_peers.py --peers-python peers/bin/python --model DIR
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PEERS = ("llama.cpp", "transformers")
KEYS = ("decode_tps", "prefill_tps")
PAUSE = 0.1  # seconds between turns, until the previous engine's threads stop spinning


class Loaded(NamedTuple):
    """A model in an engine's process."""

    step: Callable[[list[int], int], int]  # (ids, number of cached tokens before them) -> the most likely next id
    vocabulary: int


@dataclass(frozen=True)
class Engine:
    """An engine of a row: clearllama with options for `loader.build`, or one of PEERS, and its model."""

    name: str
    path: Path
    peer: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


def rows_of(model: Path) -> dict[str, list[Engine]]:
    """Map each row to the engines whose files exist."""
    if not model.is_dir():
        peers = [Engine("transformers, bfloat16", model, "transformers"), Engine("llama.cpp", model, "llama.cpp")]
        return {"file": [Engine("clearllama", model), *peers]}
    found = {}
    for row, kind in (("bf16", "bf16"), ("int8", "q8_0"), ("int4", "q4_0")):
        options = {} if row == "bf16" else {"quantize": row}
        engines = [
            Engine(f"clearllama, {row}", model / "hf", None, options),
            Engine(f"clearllama, {kind}", model / f"{kind}.gguf"),
            Engine(f"llama.cpp, {kind}", model / f"{kind}.gguf", "llama.cpp"),
            Engine("transformers, bfloat16", model / "hf", "transformers"),
        ]
        found[row] = [engine for engine in engines if engine.path.exists()]
    return found


def table(results: Sequence[dict[str, Any]], prompt: int) -> str:
    """Return a Markdown table: median speeds of every engine, and for clearllama the median ratios to each peer.

    results  one {round, row, engine, peer, decode_tps} per turn, with prefill_tps if the turn processed the prompt
    """
    peers = [peer for peer in PEERS if any(result["peer"] == peer for result in results)]
    heads = ["weights", "engine", f"decode at {prompt}, tok/s", f"prefill {prompt}, tok/s"]
    heads += [f"{key.removesuffix('_tps')} / {peer}" for peer in peers for key in KEYS]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row, engine in dict.fromkeys((result["row"], result["engine"]) for result in results):
        runs = {run["round"]: run for run in results if (run["row"], run["engine"]) == (row, engine)}
        cells = [row, engine]
        for key, form in zip(KEYS, (",.1f", ",.0f"), strict=True):
            cells.append(shown([run[key] for run in runs.values() if key in run], form))
        ours = all(run["peer"] is None for run in runs.values())
        for peer in peers:
            theirs = [run for run in results if ours and (run["row"], run["peer"]) == (row, peer)]
            for key in KEYS:
                both = [(runs[run["round"]], run) for run in theirs if run["round"] in runs]
                cells.append(shown([us[key] / them[key] for us, them in both if key in us and key in them], ".2f"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown(values: list[float], form: str) -> str:
    """Return the median of the values as a cell, empty if there are none."""
    return format(statistics.median(values), form) if values else ""


def worker(spec: dict[str, Any]) -> None:
    """Load a model, warm up, print {}. Then run a turn for each line of stdin, and print the turn's speeds as JSON.

    It may run in a peer's environment, which has no clearllama.

    spec  engine (a key of LOADERS), path, options, prompt_tokens, new_tokens, threads
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stderr
    model = LOADERS[spec["engine"]](spec)
    prompt = random_prompt(model.vocabulary, spec["prompt_tokens"])
    list(turns(model, prompt[:32], min(2, spec["new_tokens"]), ["prefill"]))
    print("{}", file=answers, flush=True)
    for answer in turns(model, prompt, spec["new_tokens"], sys.stdin):
        print(json.dumps(answer), file=answers, flush=True)


def turns(model: Loaded, prompt: list[int], new: int, lines: Iterable[str]) -> Iterator[dict[str, float]]:
    """Run a turn for each line: decode greedily and yield {decode_tps}. The line "prefill" adds prefill_tps.

    The first turn always processes the prompt.
    """
    first = None
    for line in lines:
        timed = line.strip() == "prefill"
        started = time.perf_counter()
        if timed or first is None:
            first = model.step(prompt, 0)
        between = time.perf_counter()
        token = first
        for position in range(len(prompt), len(prompt) + new):
            token = model.step([token], position)
        prefill = {"prefill_tps": len(prompt) / (between - started)} if timed else {}
        yield {"decode_tps": new / (time.perf_counter() - between), **prefill}


def load_clearllama(spec: dict[str, Any]) -> Loaded:
    """Load a model as `clearllama generate` does."""
    import torch

    from llama import loader
    from llama.checkpoint import open_checkpoint
    from llama.engine import kernels, runtime
    from llama.generate import prefill

    runtime.set_threads(spec["threads"])
    model = loader.build(open_checkpoint(spec["path"]), device="cpu", fast=True, **spec["options"])
    cache = model.new_cache(spec["prompt_tokens"] + spec["new_tokens"])

    @torch.inference_mode()
    def step(tokens: list[int], past: int) -> int:
        cache.trim(past)
        logits = prefill(model, tokens, cache)
        with kernels.own_threads():  # as in generation: PyTorch's threads must not alternate with those of the kernels
            return int(logits.argmax())

    return Loaded(step, model.config.vocab_size)


def load_llama_cpp(spec: dict[str, Any]) -> Loaded:
    """Load a GGUF file with flash attention."""
    import llama_cpp
    import numpy as np

    model = llama_cpp.Llama(
        spec["path"],
        n_ctx=spec["prompt_tokens"] + spec["new_tokens"] + 8,
        n_threads=spec["threads"],
        n_threads_batch=spec["threads"],
        n_batch=512,
        n_ubatch=512,
        flash_attn=True,
        verbose=False,
    )
    vocabulary = model.n_vocab()

    def step(tokens: list[int], past: int) -> int:
        model.n_tokens = past  # eval removes later positions from the cache
        model.eval(tokens)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), shape=(vocabulary,))
        return int(logits.argmax())

    return Loaded(step, vocabulary)


def load_transformers(spec: dict[str, Any]) -> Loaded:
    """Load a folder or a GGUF file in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(spec["threads"])
    path = Path(spec["path"])
    options = {"gguf_file": path.name} if path.is_file() else {}
    source = path.parent if path.is_file() else path
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **options).eval()
    cache = DynamicCache()

    @torch.inference_mode()
    def step(tokens: list[int], past: int) -> int:
        nonlocal cache
        excess = cache.get_seq_length() - past
        if past == 0:
            cache = DynamicCache()
        elif excess:
            cache.crop(-excess)
        out = model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    return Loaded(step, model.config.vocab_size)


def random_prompt(vocabulary: int, length: int) -> list[int]:
    """Return random ids. The lowest ids are left out, since they are often control tokens."""
    rng = random.Random(0)
    return [rng.randrange(min(3, vocabulary - 1), vocabulary) for _ in range(length)]


LOADERS: dict[str, Callable[[dict[str, Any]], Loaded]] = {
    "clearllama": load_clearllama,
    "llama.cpp": load_llama_cpp,
    "transformers": load_transformers,
}


@contextlib.contextmanager
def process(python: str, spec: dict[str, Any]) -> Iterator[Callable[[str], dict[str, float]]]:
    """Start an engine. Yield a function that runs a turn, "prefill" or "decode", and returns the turn's speeds."""
    words = [python, __file__, "--worker", json.dumps(spec)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as child:

        def answer(line: str = "") -> dict[str, float]:
            if line:
                print(line, file=child.stdin, flush=True)
            if not (found := child.stdout.readline()):
                raise SystemExit(f"compare_peers: {spec['engine']} in {python} ended with code {child.wait()}")
            return dict(json.loads(found))

        try:
            answer()
            yield answer
        finally:
            child.kill()


def run_row(name: str, engines: list[Engine], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one result per turn. No process outlives this call."""
    sizes = {key: getattr(args, key) for key in ("prompt_tokens", "new_tokens", "threads")}
    with contextlib.ExitStack() as stack:
        turn = {}
        for engine in engines:
            kind = {"engine": engine.peer or "clearllama", "path": str(engine.path), "options": engine.options}
            python = args.peers_python if engine.peer else sys.executable
            turn[engine.name] = stack.enter_context(process(python, {**kind, **sizes}))
        for number in range(1, args.rounds + 1):
            for engine in engines[:: 1 if number % 2 else -1]:  # so that no engine is always last
                time.sleep(PAUSE)
                speeds = turn[engine.name]("prefill" if number <= args.prefill_rounds else "decode")
                result = {"round": number, "row": name, "engine": engine.name, "peer": engine.peer, **speeds}
                print(json.dumps(result), file=sys.stderr)
                yield result


def main() -> None:
    """Measure all rows, then print the table, the machine and the settings."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="DIR_OR_NAME", help="default: clearllama's default model")
    parser.add_argument("--peers-python", default=sys.executable, metavar="PYTHON", help="default: this one")
    parser.add_argument("--peers", default=",".join(PEERS), metavar="LIST", help="default: %(default)s")
    parser.add_argument("--rows", metavar="LIST", help="comma-separated rows (default: all)")
    for name, default in {"rounds": 8, "prefill-rounds": 3, "prompt-tokens": 512, "new-tokens": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=cores, metavar="N", help="default: %(default)s")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker)
    from llama import hub

    rows = rows_of(hub.resolve(args.model or hub.DEFAULT))
    peers = {None, *args.peers.split(",")}
    results: list[dict[str, Any]] = []
    for row in args.rows.split(",") if args.rows else rows:
        results += run_row(row, [engine for engine in rows[row] if engine.peer in peers], args)
    print(table(results, args.prompt_tokens))
    print(f"{datetime.date.today()}, {platform.processor() or platform.machine()}: {vars(args)}")


if __name__ == "__main__":
    main()
