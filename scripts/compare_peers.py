"""Compare the speed of clearllama, llama.cpp and transformers on the same weights and the same machine.

usage: python scripts/compare_peers.py --peers-python PYTHON [--model DIR_OR_NAME] [--rows int8,int4] [--rounds 8]

Each engine of a row runs in its own process: it loads the model, warms up, and stays alive until the row is done. The
engines take turns. Every round has one turn per engine, in an order that is reversed each round; an engine sleeps
while the others work. A turn decodes --new-tokens after a prompt. The first --prefill-rounds rounds also process the
prompt; later rounds reuse its cache. One more turn per round measures the memory bandwidth by summing a large array.

Ratios are computed within a round, between turns a few seconds apart, so that a slowdown of the machine affects all
engines alike. The table shows medians over the rounds. The share of bandwidth is the bytes read per token, times the
tokens per second, divided by the bandwidth of the same round. DIR_OR_NAME is one of

    a name or a GGUF file   row "file": clearllama and llama.cpp on that file, transformers on its weights in bfloat16
    a folder                hf/, bf16.gguf, q8_0.gguf, q4_0.gguf of one model. Rows "bf16", "int8", "int4": clearllama
                            on hf/, unchanged or with --quantize, and on the GGUF files; llama.cpp on the GGUF files;
                            transformers on hf/, in bfloat16

clearllama runs with and without --compile. All engines of a row must fit into memory together. Install the peers in
an environment of their own:

    python -m venv peers && peers/bin/pip install torch transformers accelerate gguf llama-cpp-python
    python scripts/compare_peers.py --peers-python peers/bin/python
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

PEERS = {"llama.cpp": "llama-cpp-python", "transformers": "transformers"}  # name -> name on PyPI
FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
KEYS = ("decode_tps", "prefill_tps")
PAUSE = 0.1  # seconds between turns: the threads of the previous engine may still spin, waiting for work

Step = Callable[[list[int], int], int]  # ids, number of cached tokens before them -> the most likely next id


@dataclass(frozen=True)
class Engine:
    """An engine of a row: clearllama with options for `loader.build`, or a peer (a key of PEERS), and its model."""

    name: str
    path: Path
    peer: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


MEMORY = Engine("memory", Path(), "memory")  # takes turns like an engine; measures the bandwidth


def rows_of(model: Path) -> dict[str, list[Engine]]:
    """Return row -> engines, clearllama's first. Raises FileNotFoundError that lists missing files."""
    if not model.is_dir():
        peers = [Engine("transformers, bfloat16", model, "transformers"), Engine("llama.cpp", model, "llama.cpp")]
        return {"file": [*_ours("clearllama", model), *peers]}
    files = {name: model / name for name in ("hf", "bf16.gguf", "q8_0.gguf", "q4_0.gguf")}
    missing = [name for name, path in files.items() if not path.exists()]
    if missing:
        raise FileNotFoundError(f"{model} has no {', '.join(missing)}; expected one model as {', '.join(files)}")
    hf = files["hf"]
    found = {
        "bf16": [
            *_ours("clearllama", hf, dtype="bfloat16"),
            Engine("transformers, bfloat16", hf, "transformers"),
            Engine("llama.cpp, BF16", files["bf16.gguf"], "llama.cpp"),
        ]
    }
    for row, kind in (("int8", "q8_0"), ("int4", "q4_0")):
        path = files[f"{kind}.gguf"]
        ours = [
            *_ours(f"clearllama --quantize {row}", hf, quantize=row),
            *_ours(f"clearllama, {kind.upper()}", path),
        ]
        found[row] = [*ours, Engine(f"llama.cpp, {kind.upper()}", path, "llama.cpp")]
    return found


def _ours(name: str, path: Path, **options: str) -> list[Engine]:
    """Return clearllama's engine without and with --compile."""
    compiled = {**options, "compile": True}
    return [Engine(name, path, None, dict(options)), Engine(f"{name} --compile", path, None, compiled)]


# ------------------------------------------------------------------------------------------------------ statistics
def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def ratios(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the speed ratio of each clearllama engine to each peer of its row: the median of the ratios per round.

    results  one {round, row, engine, peer, decode_tps} per turn, with prefill_tps if the turn processed the prompt;
             peer is a key of PEERS or None

    -> [{row, engine, peer, rounds, decode_ratio, prefill_ratio}]. Rounds that lack one of the two engines are skipped;
    a ratio is None if no round has both numbers.
    """
    found = []
    for row in dict.fromkeys(result["row"] for result in results):
        of_row = [result for result in results if result["row"] == row]
        ours = dict.fromkeys(result["engine"] for result in of_row if result["peer"] is None)
        peers = dict.fromkeys((result["engine"], result["peer"]) for result in of_row if result["peer"] is not None)
        runs = {(result["round"], result["engine"]): result for result in of_row}
        rounds = sorted({result["round"] for result in of_row})
        for engine in ours:
            for their_engine, peer in peers:
                both = [
                    (runs[number, engine], runs[number, their_engine])
                    for number in rounds
                    if (number, engine) in runs and (number, their_engine) in runs
                ]
                if both:
                    medians = {
                        key: median(us[key] / them[key] for us, them in both if key in us and key in them)
                        for key in KEYS
                    }
                    named = {key.replace("_tps", "_ratio"): value for key, value in medians.items()}
                    found.append({"row": row, "engine": engine, "peer": peer, "rounds": len(both), **named})
    return found


def table(results: Sequence[dict[str, Any]], prompt: int) -> str:
    """Return a Markdown table: median speeds of every engine; for clearllama also bandwidth share and ratios."""
    compared = {(ratio["row"], ratio["engine"], ratio["peer"]): ratio for ratio in ratios(results)}
    peers = [peer for peer in PEERS if any(key[2] == peer for key in compared)]
    heads = ["weights", "engine", f"decode at {prompt}, tok/s", f"prefill {prompt}, tok/s", "share of bandwidth"]
    heads += [f"{what} / {peer}" for peer in peers for what in ("decode", "prefill")]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row, engine in dict.fromkeys((result["row"], result["engine"]) for result in results):
        runs = [result for result in results if (result["row"], result["engine"]) == (row, engine)]
        decode, prefill, share = (median(result.get(key) for result in runs) for key in (*KEYS, "share"))
        cells = [row, engine, shown(decode, ",.1f"), shown(prefill, ",.0f"), shown(share, ".2f")]
        for peer in peers:
            ratio = compared.get((row, engine, peer), {})
            cells += [shown(ratio.get(key), ".2f") for key in ("decode_ratio", "prefill_ratio")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown(value: float | None, form: str) -> str:
    """Format a table cell; empty for None."""
    return "" if value is None else format(value, form)


def machine(cpuinfo: str, meminfo: str) -> dict[str, Any]:
    """Return the processor, its flags among FLAGS, and the memory in GiB, as far as Linux's two files list them."""
    facts: dict[str, Any] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            facts["cpu"] = value.strip()
        if key.strip() == "flags":
            facts["flags"] = [flag for flag in FLAGS if flag in value.split()]
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            facts["memory_gib"] = round(int(line.split()[1]) / 2**20, 1)
    return facts


def this_machine() -> dict[str, Any]:
    """Describe the machine that runs this."""
    texts = [path.read_text() if path.exists() else "" for path in (Path("/proc/cpuinfo"), Path("/proc/meminfo"))]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": platform.processor() or platform.machine(),
        **machine(*texts),
        "cores": cores,
        "os": platform.system(),
    }


def footer(facts: dict[str, Any]) -> str:
    """Return a few lines that describe machine, versions and settings."""
    host = facts["machine"]
    parts = [f"{facts['date']}: {host['cores']} cores, {host['cpu']} ({', '.join(host.get('flags', []))})"]
    parts[0] += f", {host['memory_gib']} GiB" if "memory_gib" in host else ""
    bandwidth = facts["bandwidth_gbs"]
    if bandwidth is not None:
        parts[0] += f", reads {bandwidth:.0f} GB/s (median over the rounds)"
    parts.append(", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    settings = "{rounds} rounds ({prefill_rounds} with prefill), {prompt_tokens} prompt tokens, {new_tokens} new"
    settings += ", {threads} threads, model {model}"
    return "\n".join([*parts, settings.format(**facts["settings"])]) + "\n"


# ---------------------------------------------------------------------------------------- inside an engine's process
def worker(spec: dict[str, Any]) -> int:
    """Load an engine, print {"bytes_per_token": ..}, then answer each line of stdin with a line of JSON.

    It may run in a peer's environment, which has no clearllama.

    spec  engine (a key of WORKERS), path, options, prompt_tokens, new_tokens, threads
    """
    answers = json_output()
    for answer in WORKERS[spec["engine"]](spec):
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def json_output() -> TextIO:
    """Return a stream to the original stdout and redirect stdout to stderr, so that libraries can't print into it."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def check(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Import a peer and yield the versions of its packages."""
    importlib.import_module("llama_cpp" if spec["peer"] == "llama.cpp" else spec["peer"])
    names = ("llama-cpp-python",) if spec["peer"] == "llama.cpp" else ("transformers", "torch")
    yield {name: importlib.metadata.version(name) for name in names}


def memory(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure the read bandwidth in GB/s by summing a large array, once per line of stdin."""
    import torch

    from llama.tools import benchmark

    torch.set_num_threads(spec["threads"])
    buffer = torch.ones(benchmark.buffer_bytes(torch.device("cpu")) // 4)
    benchmark.bandwidth(buffer, 1)
    yield {"bytes_per_token": None}
    for _ in sys.stdin:
        speeds = [benchmark.bandwidth(buffer, 1) for _ in range(4)]
        yield {"bandwidth_gbs": statistics.harmonic_mean(speeds) / 1e9}  # over the total time, as in a turn


def engine_turns(
    load: Callable[[dict[str, Any]], tuple[Step, int, int | None]], spec: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Load a model, warm up with a few tokens, then run a turn per line of stdin."""
    step, vocabulary, read = load(spec)
    prompt = random_prompt(vocabulary, spec["prompt_tokens"])
    list(turns(step, prompt[:32], min(2, spec["new_tokens"]), ["prefill"]))
    yield {"bytes_per_token": read}
    yield from turns(step, prompt, spec["new_tokens"], sys.stdin)


def turns(step: Step, prompt: list[int], new: int, lines: Iterable[str]) -> Iterator[dict[str, float]]:
    """Run a turn per line: decode greedily after the prompt, yield {decode_tps}; for "prefill" also prefill_tps.

    The first turn always processes the prompt, but includes its speed only for "prefill".
    """
    first = None
    for line in lines:
        timed = line.strip() == "prefill"
        started = time.perf_counter()
        if timed or first is None:
            first = step(prompt, 0)
        between = time.perf_counter()
        token = first
        for position in range(len(prompt), len(prompt) + new):
            token = step([token], position)
        ended = time.perf_counter()
        prefill = {"prefill_tps": len(prompt) / (between - started)} if timed else {}
        yield {"decode_tps": new / (ended - between), **prefill}


def load_clearllama(spec: dict[str, Any]) -> tuple[Step, int, int | None]:
    """Return a step, the vocabulary size, and the bytes read to decode a token after the prompt."""
    import torch

    from llama import loader
    from llama.checkpoint import open_checkpoint
    from llama.generate import prefill
    from llama.tools import benchmark

    torch.set_num_threads(spec["threads"])
    model = loader.build(open_checkpoint(spec["path"]), device="cpu", fast=True, **spec["options"])
    prompt = spec["prompt_tokens"]
    cache = model.new_cache(prompt + spec["new_tokens"])
    read = benchmark.linear_bytes(model) + benchmark.cache_bytes(model.new_cache(prompt), prompt)

    @torch.inference_mode()
    def step(tokens: list[int], past: int) -> int:
        cache.trim(past)
        return int(prefill(model, tokens, cache).argmax())

    return step, model.config.vocab_size, read


def load_llama_cpp(spec: dict[str, Any]) -> tuple[Step, int, int | None]:
    """Return a step and the vocabulary size; llama.cpp does not report the bytes it reads."""
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

    return step, vocabulary, None


def load_transformers(spec: dict[str, Any]) -> tuple[Step, int, int | None]:
    """Return a step in bfloat16 and the vocabulary size."""
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

    return step, model.config.vocab_size, None


def random_prompt(vocabulary: int, length: int) -> list[int]:
    """Return random ids, without the lowest ones, which are often control tokens."""
    rng = random.Random(0)
    return [rng.randrange(min(3, vocabulary - 1), vocabulary) for _ in range(length)]


WORKERS: dict[str, Callable[[dict[str, Any]], Iterator[dict[str, Any]]]] = {
    "check": check,
    "memory": memory,
    "clearllama": functools.partial(engine_turns, load_clearllama),
    "llama.cpp": functools.partial(engine_turns, load_llama_cpp),
    "transformers": functools.partial(engine_turns, load_transformers),
}


# ----------------------------------------------------------------------------------------------------- running a row
class Worker:
    """A script in its own process and environment that answers with lines of JSON."""

    def __init__(self, python: str, spec: dict[str, Any], script: str = __file__):
        words = [python, script, "--worker", json.dumps(spec)]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in stop
        try:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=self.errors, encoding="utf-8")
        except OSError as error:
            self.errors.close()
            raise RuntimeError(f"{python}: {error.strerror or error}") from None

    def answer(self) -> dict[str, Any]:
        """Read the next line. Raises RuntimeError with the last line of stderr, or the exit code."""
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.errors.seek(0)
            errors = [line.strip() for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
            raise RuntimeError(errors[-1] if errors else f"{self.process.args[0]} ended with code {code}")
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RuntimeError(f"expected a line of JSON, got {line.strip()[:80]!r}")
        return found

    def turn(self, kind: str, keys: set[str]) -> dict[str, float]:
        """Run a turn, "prefill" or "decode". Returns positive numbers under these keys, else raises RuntimeError."""
        try:
            self.process.stdin.write(f"{kind}\n")
            self.process.stdin.flush()
        except OSError:
            pass  # the process has ended; answer() raises its last error
        found = self.answer()
        if set(found) != keys or not all(isinstance(value, int | float) and value > 0 for value in found.values()):
            raise RuntimeError(f"expected {', '.join(sorted(keys))} above 0, got {str(found)[:80]}")
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()  # waits, and closes both pipes
        self.errors.close()


def run_row(row: str, engines: list[Engine], args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """Return the results and failures of a row. A failed engine is dropped; no process outlives this call."""
    results: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    workers: dict[str, Worker] = {}
    read: dict[str, float | None] = {}

    def fail(number: int, engine: Engine, error: RuntimeError) -> None:
        live.remove(engine)
        failures.append({"round": number, "row": row, "engine": engine.name, "peer": engine.peer, "error": str(error)})
        print(f"round {number}  {row:<5} {engine.name:<36} failed: {error}", file=sys.stderr)

    sizes = {name: getattr(args, name) for name in ("prompt_tokens", "new_tokens", "threads")}
    live = [MEMORY, *engines]
    try:
        for engine in list(live):
            kind = {"engine": engine.peer or "clearllama", "path": str(engine.path), "options": engine.options}
            python = args.peers_python if engine.peer in PEERS else sys.executable
            try:
                workers[engine.name] = Worker(python, {**kind, **sizes})
                read[engine.name] = workers[engine.name].answer().get("bytes_per_token")
            except RuntimeError as error:
                fail(0, engine, error)
        for number in range(1, args.rounds + 1):
            kind, keys = ("prefill", set(KEYS)) if number <= args.prefill_rounds else ("decode", {"decode_tps"})
            answers = {}
            for engine in live[:: 1 if number % 2 else -1]:  # so that no engine is always last
                time.sleep(PAUSE)
                try:
                    expected = {"bandwidth_gbs"} if engine is MEMORY else keys
                    answers[engine.name] = workers[engine.name].turn(kind, expected)
                except RuntimeError as error:
                    fail(number, engine, error)
            bandwidth = answers.pop(MEMORY.name, {})
            for engine in engines:
                if engine.name not in answers:
                    continue
                answer, size = {**answers[engine.name], **bandwidth}, read[engine.name]
                if size and bandwidth:
                    share = size * answer["decode_tps"] / (bandwidth["bandwidth_gbs"] * 1e9)
                    answer |= {"bytes_per_token": size, "share": share}
                results.append({"round": number, "row": row, "engine": engine.name, "peer": engine.peer, **answer})
                speeds = "  ".join(f"{key[:-4]} {answer[key]:8.1f}" for key in KEYS if key in answer)
                print(f"round {number}  {row:<5} {engine.name:<36} {speeds}", file=sys.stderr)
    finally:
        for process in workers.values():
            process.stop()
    return results, failures


def versions_of(peer: str, python: str) -> dict[str, str]:
    """Return the versions of a peer's packages in that environment. Raises RuntimeError if the peer can't run."""
    process = Worker(python, {"engine": "check", "peer": peer})
    try:
        found = process.answer()
    finally:
        process.stop()
    return {f"{name} (peers)" if name == "torch" else name: version for name, version in found.items()}


# -------------------------------------------------------------------------------------------------------------- main
def main() -> int:
    """Measure all rows, then print the table, the machine and the settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="DIR_OR_NAME", help="default: clearllama's default model")
    parser.add_argument("--peers-python", default=sys.executable, metavar="PYTHON", help="default: this one")
    parser.add_argument("--rows", metavar="LIST", help="comma-separated rows (default: all)")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--prefill-rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements and settings to FILE")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker)
    if min(args.rounds, args.prompt_tokens, args.new_tokens, args.threads) < 1:
        parser.error("--rounds, --prompt-tokens, --new-tokens and --threads must be at least 1")
    if args.prefill_rounds < 0:
        parser.error("--prefill-rounds must be at least 0")
    try:
        from llama import hub

        model = hub.resolve(args.model or hub.DEFAULT)
        rows = rows_of(model)
    except Exception as error:
        raise SystemExit(f"compare_peers: {error}") from None
    chosen = list(rows) if args.rows is None else args.rows.split(",")
    unknown = [row for row in chosen if row not in rows]
    if unknown:
        parser.error(f"unknown row {unknown[0]!r}; {model} has {', '.join(rows)}")
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("clearllama", "torch")}
    for peer in dict.fromkeys(engine.peer for row in chosen for engine in rows[row] if engine.peer):
        try:
            versions |= versions_of(peer, args.peers_python)
        except RuntimeError as error:
            raise SystemExit(
                f"compare_peers: {peer} can't run in {args.peers_python}: {error}; install {PEERS[peer]} there, or pass"
                " another environment to --peers-python"
            ) from None

    results, failures = [], []
    for row in chosen:
        found_here, failed_here = run_row(row, rows[row], args)
        results += found_here
        failures += failed_here
    bandwidths = {(result["row"], result["round"]): result.get("bandwidth_gbs") for result in results}
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": this_machine(),
        "versions": versions,
        "settings": {
            "model": args.model or hub.DEFAULT,
            "rounds": args.rounds,
            "prefill_rounds": min(args.prefill_rounds, args.rounds),
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
            "threads": args.threads,
        },
        "bandwidth_gbs": median(bandwidths.values()),
        "ratios": ratios(results),
        "results": results,
        "failures": failures,
    }
    if args.json:
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    print(table(results, args.prompt_tokens))
    print(footer(facts), end="")
    if failures:
        last = failures[-1]
        print(f"compare_peers: {len(failures)} failed, the last {last['engine']}: {last['error']}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
