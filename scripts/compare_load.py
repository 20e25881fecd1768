"""Compare time and memory of loading a model: clearllama from three formats, transformers, and Meta's own code.

usage: python scripts/compare_load.py FOLDER [--peers-python PYTHON] [--meta-code DIR] [--rounds 3]

FOLDER holds the same weights as `meta/`, `hf/` and `bf16.gguf`; `clearllama convert` converts between them. Each load
runs in a process of its own; the engines alternate, and the page cache is warm. The results are the time until the
model can compute logits, the peak memory at that point, and the peak memory after a first pass over 8 tokens.
Meta's code needs the unpacked wheel meta-llama3 and the source of fairscale in DIR (llama/, fairscale/).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def memory(key: str) -> int:
    """Return VmHWM or VmRSS of this process in MiB (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) // 1024


def ours(folder: Path, format: str) -> tuple[float, Any, int]:
    """Load with clearllama, with plain or packed weights. Returns seconds, the model, its number of parameters."""
    import torch

    from llama import loader
    from llama.checkpoint import open_checkpoint

    path = folder / ("bf16.gguf" if format.startswith("gguf") else format.split("-")[0])
    torch.set_grad_enabled(False)
    started = time.perf_counter()
    model = loader.build(open_checkpoint(path), "cpu", "bfloat16", fast=format.endswith("-packed"))
    return time.perf_counter() - started, model, model.config.n_params


def transformers(folder: Path) -> tuple[float, Any, int]:
    """Load with transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_grad_enabled(False)
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.bfloat16).eval()
    return time.perf_counter() - started, model, sum(p.numel() for p in model.parameters())


def meta(folder: Path, code: Path) -> tuple[float, Any, int]:
    """Load with Meta's code for Llama 3, on the CPU."""
    import importlib.util

    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(code / "fairscale"))
    import fairscale.nn.model_parallel.initialize as fs

    torch.set_grad_enabled(False)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    fs.initialize_model_parallel(1)
    spec = importlib.util.spec_from_file_location("meta_model", code / "llama" / "model.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"compare_load: expected Meta's code in {code}, found no llama/model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["meta_model"] = module
    spec.loader.exec_module(module)
    params = json.loads((folder / "meta" / "params.json").read_text())
    params.pop("use_scaled_rope", None)
    started = time.perf_counter()
    weights = torch.load(folder / "meta" / "consolidated.00.pth", map_location="cpu", weights_only=True)
    torch.set_default_dtype(torch.bfloat16)
    model = module.Transformer(module.ModelArgs(max_seq_len=64, max_batch_size=1, **params))
    model.load_state_dict(weights, strict=False)
    seconds = time.perf_counter() - started
    del weights
    return seconds, lambda tokens: model(tokens, 0), sum(p.numel() for p in model.parameters())


def one(engine: str, folder: Path, code: Path | None) -> dict[str, Any]:
    """Load once and return the measurements."""
    import torch

    kind, _, format = engine.partition(" ")
    if kind == "clearllama":
        seconds, model, parameters = ours(folder, format)
    elif kind == "transformers":
        seconds, model, parameters = transformers(folder)
    else:
        seconds, model, parameters = meta(folder, code or Path())
    loaded = memory("VmHWM")
    started = time.perf_counter()
    model(torch.arange(8)[None])
    return {
        "engine": engine,
        "load_s": seconds,
        "first_pass_s": time.perf_counter() - started,
        "loaded_mib": loaded,
        "passed_mib": memory("VmHWM"),
        "weights_mib": 2 * parameters / 2**20,
    }


def main() -> int:
    """Measure all engines in each round and print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--meta-code", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(one(args.engine, args.folder, args.meta_code)))
        return 0
    engines = [f"clearllama {format}{kind}" for format in ("meta", "hf", "gguf") for kind in ("", "-packed")]
    engines += ["transformers", *(["meta"] if args.meta_code else [])]
    rows: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    for round_ in range(args.rounds):
        for engine in engines:
            python = sys.executable if engine.startswith("clearllama") else args.peers_python
            command = [python, __file__, str(args.folder), "--engine", engine]
            command += ["--meta-code", str(args.meta_code)] if args.meta_code else []
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{engine}: {(done.stderr.splitlines() or ['failed'])[-1]}", file=sys.stderr)
                continue
            rows[engine].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {round_ + 1}  {engine:<26} {rows[engine][-1]['load_s']:.2f} s", file=sys.stderr)
    print(
        "| engine | load, s | first pass of 8 tokens, s | peak when loaded / weights | peak after the pass / weights |"
    )
    print("|---|---|---|---|---|")
    for engine, results in rows.items():
        if results:
            median = {key: statistics.median(row[key] for row in results) for key in results[0] if key != "engine"}
            ratios = [median[key] / median["weights_mib"] for key in ("loaded_mib", "passed_mib")]
            cells = f"{median['load_s']:.2f} | {median['first_pass_s']:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f}"
            print(f"| {engine} | {cells} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
