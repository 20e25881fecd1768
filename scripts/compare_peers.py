"""Speed of clearllama beside llama.cpp and transformers: the same weights, the same machine, the same minutes.

usage: python scripts/compare_peers.py --peers-python PYTHON [--model DIR_OR_NAME] [--rows int8,int4] [--rounds 3]

A round runs every engine once, each in a process of its own. A ratio is taken within a round, so that a machine which
slows down slows both sides; what is shown is the median over the rounds. DIR_OR_NAME is one of

    a name or a GGUF file   row "file": clearllama and llama.cpp on that file, transformers on its weights in bfloat16
    a folder                hf/, bf16.gguf, q8_0.gguf, q4_0.gguf of one model. Rows "bf16", "int8", "int4": clearllama
                            on hf/ as it is or with --quantize, and on the GGUF files; llama.cpp on the GGUF files;
                            transformers on hf/, in bfloat16

clearllama runs with and without --compile. The peers live in an environment of their own, never in clearllama's:

    python -m venv peers && peers/bin/pip install torch transformers accelerate gguf llama-cpp-python
    python scripts/compare_peers.py --peers-python peers/bin/python
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEERS = {"llama.cpp": "llama-cpp-python", "transformers": "transformers"}  # name -> what pip calls it
FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
KEYS = ("decode_tps", "prefill_tps")


@dataclass(frozen=True)
class Engine:
    """What runs in a row: clearllama with some options of `bench`, or a peer (a key of PEERS), on a file or folder."""

    name: str
    path: Path
    peer: str | None = None
    options: tuple[str, ...] = ()


def rows_of(model: Path) -> dict[str, list[Engine]]:
    """Row -> its engines, clearllama's first. Raises FileNotFoundError naming what a folder lacks."""
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
            *_ours("clearllama", hf, "--dtype", "bfloat16"),
            Engine("transformers, bfloat16", hf, "transformers"),
            Engine("llama.cpp, BF16", files["bf16.gguf"], "llama.cpp"),
        ]
    }
    for row, kind in (("int8", "q8_0"), ("int4", "q4_0")):
        path = files[f"{kind}.gguf"]
        ours = [
            *_ours(f"clearllama --quantize {row}", hf, "--quantize", row),
            *_ours(f"clearllama, {kind.upper()}", path),
        ]
        found[row] = [*ours, Engine(f"llama.cpp, {kind.upper()}", path, "llama.cpp")]
    return found


def _ours(name: str, path: Path, *options: str) -> list[Engine]:
    """Without and with --compile."""
    return [Engine(name, path, None, options), Engine(f"{name} --compile", path, None, (*options, "--compile"))]


# -------------------------------------------------------------------------------------------------- what is computed
def ratios(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each of clearllama's engines beside each peer in its row: medians over the rounds of ratios taken within a round.

    results  one {round, row, engine, peer, decode_tps, prefill_tps} for each run; peer is a key of PEERS or None

    -> [{row, engine, peer, rounds, decode_ratio, prefill_ratio}]. A round in which either is missing is left out.
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
                    medians = {key: statistics.median(us[key] / them[key] for us, them in both) for key in KEYS}
                    named = {key.replace("_tps", "_ratio"): value for key, value in medians.items()}
                    found.append({"row": row, "engine": engine, "peer": peer, "rounds": len(both), **named})
    return found


def table(results: Sequence[dict[str, Any]], prompt: int) -> str:
    """Markdown: median speeds of every engine, and for clearllama's the median ratios to each peer of the row."""
    beside = {(ratio["row"], ratio["engine"], ratio["peer"]): ratio for ratio in ratios(results)}
    peers = [peer for peer in PEERS if any(key[2] == peer for key in beside)]
    heads = ["weights", "engine", f"decode at {prompt}, tok/s", f"prefill {prompt}, tok/s"]
    heads += [f"{what} / {peer}" for peer in peers for what in ("decode", "prefill")]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row, engine in dict.fromkeys((result["row"], result["engine"]) for result in results):
        runs = [result for result in results if (result["row"], result["engine"]) == (row, engine)]
        decode, prefill = (statistics.median(result[key] for result in runs) for key in KEYS)
        cells = [row, engine, f"{decode:,.1f}", f"{prefill:,.0f}"]
        for peer in peers:
            ratio = beside.get((row, engine, peer))
            cells += [f"{ratio['decode_ratio']:.2f}", f"{ratio['prefill_ratio']:.2f}"] if ratio else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def machine(cpuinfo: str, meminfo: str) -> dict[str, Any]:
    """Processor, what of FLAGS it has, GiB of memory: from Linux's two files, as far as they say."""
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


def here() -> dict[str, Any]:
    """This machine."""
    texts = [path.read_text() if path.exists() else "" for path in (Path("/proc/cpuinfo"), Path("/proc/meminfo"))]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": platform.processor() or platform.machine(),
        **machine(*texts),
        "cores": cores,
        "os": platform.system(),
    }


def footer(facts: dict[str, Any]) -> str:
    """What the numbers were measured with, in a few lines."""
    where, what = facts["machine"], facts["settings"]
    parts = [f"{facts['date']}: {where['cores']} cores, {where['cpu']} ({', '.join(where.get('flags', []))})"]
    parts[0] += f", {where['memory_gib']} GiB" if "memory_gib" in where else ""
    bandwidth = facts["bandwidth_gbs"]
    if bandwidth is not None:
        parts[0] += f", reads {bandwidth:.0f} GB/s (median of what clearllama's runs measured)"
    parts.append(", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    told = "{rounds} rounds, {prompt_tokens} prompt tokens, {new_tokens} new, {threads} threads, model {model}"
    return "\n".join([*parts, told.format(**what)]) + "\n"


# ------------------------------------------------------------------------------------------------------- the engines
def peer_main(args: argparse.Namespace) -> int:
    """Time one peer and print JSON; runs inside the peers' environment, which has no clearllama."""
    if args.check:
        importlib.import_module("llama_cpp" if args.peer == "llama.cpp" else args.peer)
        names = ("llama-cpp-python",) if args.peer == "llama.cpp" else ("transformers", "torch")
        print(json.dumps({name: importlib.metadata.version(name) for name in names}))
        return 0
    timed = time_llama_cpp if args.peer == "llama.cpp" else time_transformers
    started = time.perf_counter()
    prefill, decode = timed(Path(args.model), args.prompt_tokens, args.new_tokens, args.threads)
    print(
        json.dumps(
            {
                "prefill_tps": round(args.prompt_tokens / prefill, 1),
                "decode_tps": round(args.new_tokens / decode, 2),
                "total_s": round(time.perf_counter() - started, 1),
            }
        )
    )
    return 0


def time_llama_cpp(path: Path, prompt: int, new: int, threads: int) -> tuple[float, float]:
    """Seconds of prefill and decoding, after a few tokens of warm-up."""
    import llama_cpp
    import numpy as np

    model = llama_cpp.Llama(
        str(path),
        n_ctx=prompt + new + 8,
        n_threads=threads,
        n_threads_batch=threads,
        n_batch=512,
        n_ubatch=512,
        flash_attn=True,
        verbose=False,
    )
    vocabulary = model.n_vocab()

    def step(tokens: list[int]) -> int:
        model.eval(tokens)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), shape=(vocabulary,))
        return int(logits.argmax())

    def run(length: int, steps: int) -> tuple[float, float]:
        model.reset()
        started = time.perf_counter()
        token = step(random_prompt(vocabulary, length))
        between = time.perf_counter()
        for _ in range(steps):
            token = step([token])
        return between - started, time.perf_counter() - between

    run(min(32, prompt), min(2, new))
    return run(prompt, new)


def time_transformers(path: Path, prompt: int, new: int, threads: int) -> tuple[float, float]:
    """Seconds of prefill and decoding in bfloat16, after a few tokens of warm-up."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    where = {"gguf_file": path.name} if path.is_file() else {}
    source = path.parent if path.is_file() else path
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **where).eval()

    @torch.inference_mode()
    def run(length: int, steps: int) -> tuple[float, float]:
        tokens, cache = torch.tensor([random_prompt(model.config.vocab_size, length)]), None
        started = between = time.perf_counter()
        for step in range(steps + 1):
            out = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            if step == 0:
                between = time.perf_counter()
        return between - started, time.perf_counter() - between

    run(min(32, prompt), min(2, new))
    return run(prompt, new)


def random_prompt(vocabulary: int, length: int) -> list[int]:
    """Ids that no template or control token is among, as far as low ids are those."""
    rng = random.Random(0)
    return [rng.randrange(min(3, vocabulary - 1), vocabulary) for _ in range(length)]


def command(engine: Engine, args: argparse.Namespace) -> list[str]:
    """What runs an engine once, in a process of its own."""
    sizes = ["--prompt-tokens", str(args.prompt_tokens), "--new-tokens", str(args.new_tokens)]
    sizes += ["--threads", str(args.threads)]
    if engine.peer is None:
        bench = [sys.executable, "-m", "llama", "bench", "--json", "--quiet", "--reps", "1"]
        return [*bench, "--model", str(engine.path), *engine.options, *sizes]
    return [args.peers_python, __file__, "--peer", engine.peer, "--model", str(engine.path), *sizes]


def ask(words: list[str]) -> dict[str, Any]:
    """The JSON that a command prints last. Raises RuntimeError with the last line it wrote on stderr."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"{words[0]}: {error.strerror or error}") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        why = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(why[-1] if why else f"{words[0]} ended with code {done.returncode}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


# -------------------------------------------------------------------------------------------------------------- main
def main() -> int:
    """Take turns, then print the table and what it was measured with."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="DIR_OR_NAME", help="default: clearllama's default model")
    parser.add_argument("--peers-python", default=sys.executable, metavar="PYTHON", help="default: this one")
    parser.add_argument("--rows", metavar="LIST", help="which rows, with commas between them (default: all)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run and everything else here")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return peer_main(args)
    if min(args.rounds, args.prompt_tokens, args.new_tokens, args.threads) < 1:
        parser.error("--rounds, --prompt-tokens, --new-tokens and --threads must be at least 1")
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
    engines = [(row, engine) for row in chosen for engine in rows[row]]
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("clearllama", "torch")}
    for peer in dict.fromkeys(engine.peer for _, engine in engines if engine.peer):
        try:
            found = ask([args.peers_python, __file__, "--peer", peer, "--check"])
        except RuntimeError as error:
            raise SystemExit(
                f"compare_peers: {peer} can't run in {args.peers_python}: {error}; install {PEERS[peer]} there, or name"
                " another environment with --peers-python"
            ) from None
        versions |= {f"{name} (peers)" if name == "torch" else name: version for name, version in found.items()}

    results, failures = [], []
    for number in range(1, args.rounds + 1):
        for row, engine in engines if number % 2 else reversed(engines):  # so that neither side is always later
            told = {"round": number, "row": row, "engine": engine.name, "peer": engine.peer}
            try:
                answer = ask(command(engine, args))
            except RuntimeError as error:
                failures.append({**told, "error": str(error)})
                print(f"round {number}  {row:<5} {engine.name:<36} failed: {error}", file=sys.stderr)
                continue
            results.append({**answer, **told})
            speeds = f"decode {answer['decode_tps']:7.1f}  prefill {answer['prefill_tps']:8.1f}"
            print(f"round {number}  {row:<5} {engine.name:<36} {speeds}", file=sys.stderr)
    bandwidths = [result["bandwidth_gbs"] for result in results if "bandwidth_gbs" in result]
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": here(),
        "versions": versions,
        "settings": {
            "model": args.model or hub.DEFAULT,
            "rounds": args.rounds,
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
            "threads": args.threads,
        },
        "bandwidth_gbs": statistics.median(bandwidths) if bandwidths else None,
        "ratios": ratios(results),
        "results": results,
        "failures": failures,
    }
    if args.json:
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    # In the order of the rows, whatever the order of the runs.
    order = {(row, engine.name): place for place, (row, engine) in enumerate(engines)}
    print(table(sorted(results, key=lambda result: order[result["row"], result["engine"]]), args.prompt_tokens))
    print(footer(facts), end="")
    if failures:
        last = failures[-1]
        print(
            f"compare_peers: {len(failures)} runs failed, the last {last['engine']}: {last['error']}", file=sys.stderr
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
