"""Speed of clearllama beside llama.cpp and transformers: the same GGUF file, the same machine, the same minutes.

usage: python scripts/compare_speed.py [MODEL.gguf] [--peers-python PYTHON] [--rounds 3]

The engines take turns, round after round, each in a process of its own, so that a machine that slows down slows all
of them; what counts are the ratios. Peers live in an environment of their own, never in clearllama's:

    python -m venv peers && peers/bin/pip install torch transformers accelerate gguf llama-cpp-python
    python scripts/compare_speed.py --peers-python peers/bin/python
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

PROMPT, NEW, REPS = 512, 64, 3
ENGINES = ("clearllama", "transformers-bf16", "llama.cpp")


def peer(engine: str, path: Path, threads: int) -> dict[str, object]:
    """Time one peer; runs inside the peers' environment."""
    import random
    import time

    prompts = [[random.Random(rep).randrange(3, 30000) for _ in range(PROMPT)] for rep in range(REPS)]
    prefill, decode = [], []
    if engine == "llama.cpp":
        import llama_cpp

        model = llama_cpp.Llama(
            str(path), n_ctx=PROMPT + NEW + 8, n_threads=threads, n_threads_batch=threads, n_batch=512, n_ubatch=512,
            flash_attn=True, verbose=False,
        )  # fmt: skip
        for prompt in prompts:
            model.reset()
            started = time.perf_counter()
            model.eval(prompt)
            prefill.append(time.perf_counter() - started)
            token, started = 5, time.perf_counter()
            for _ in range(NEW):
                model.eval([token])
                token = model.sample(temp=0.0)
            decode.append(time.perf_counter() - started)
    else:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        hf = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16).eval()
        for prompt in prompts:
            with torch.inference_mode():
                started = time.perf_counter()
                out = hf(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
                prefill.append(time.perf_counter() - started)
                token, started = out.logits[:, -1:].argmax(-1), time.perf_counter()
                for _ in range(NEW):
                    out = hf(input_ids=token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
                    token = out.logits[:, -1:].argmax(-1)
                decode.append(time.perf_counter() - started)
    return {"engine": engine, "prefill_tps": PROMPT / min(prefill), "decode_tps": NEW / min(decode)}


def run(engine: str, path: Path, threads: int, peers_python: str) -> dict[str, float] | None:
    """One engine in a process of its own; None if it can't run here."""
    if engine == "clearllama":
        command = [sys.executable, "-m", "llama", "bench", "-m", str(path), "--json", "-q", "--threads", str(threads)]
        command += ["--prompt-tokens", str(PROMPT), "--new-tokens", str(NEW), "--reps", str(REPS)]
    else:
        command = [peers_python, __file__, str(path), "--peer", engine, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{engine}: {(done.stderr.splitlines() or ['failed'])[-1]}", file=sys.stderr)
        return None
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    """Take turns, then print the medians and their ratios to transformers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", choices=ENGINES[1:], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        print(json.dumps(peer(args.peer, args.model, args.threads)))
        return 0
    if args.model is None:
        from llama import hub

        args.model = hub.pull(hub.DEFAULT)
    results: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    for round_ in range(args.rounds):
        for engine in ENGINES:
            result = run(engine, args.model, args.threads, args.peers_python)
            if result is not None:
                results[engine].append(result)
                speeds = f"prefill {result['prefill_tps']:7.1f}  decode {result['decode_tps']:6.1f}"
                print(f"round {round_ + 1}  {engine:<18} {speeds}", file=sys.stderr)
    medians = {
        engine: [statistics.median(row[key] for row in rows) for key in ("prefill_tps", "decode_tps")]
        for engine, rows in results.items()
        if rows
    }
    base = medians.get("transformers-bf16")
    print(f"| engine | prefill {PROMPT}, tok/s | decode at {PROMPT}, tok/s | prefill ratio | decode ratio |")
    print("|---|---|---|---|---|")
    for engine, (prefill, decode) in medians.items():
        ratios = [f"{prefill / base[0]:.2f}", f"{decode / base[1]:.2f}"] if base else ["", ""]
        print(f"| {engine} | {prefill:,.0f} | {decode:.1f} | {ratios[0]} | {ratios[1]} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
