"""Meta's own code as a reference, in a separate process: reads jobs as JSON on stdin, writes logits to files.

Each job: {"folder": ..., "code": "llama3" | "llama-models", "factor": 8, "tokens": file, "out": file}. The code comes
from the wheels meta-llama3 and llama-models and the source of fairscale. They are unpacked and imported by path, not
installed. RANK and WORLD_SIZE select the shard, as with torchrun.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch


def load_module(name: str, path: Path, package: str, change: tuple[str, str] | None = None) -> Any:
    """A module from a file, with relative imports from `package`."""
    source = path.read_text()
    if change is not None:
        if change[0] not in source:
            raise SystemExit(f"{path} has no {change[0]!r}")
        source = source.replace(*change)
    module = types.ModuleType(name)
    module.__file__, module.__package__ = str(path), package
    sys.modules[name] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def transformer(job: dict[str, Any], wheels: dict[str, str]) -> Any:
    """Meta's Transformer, filled with this rank's shard, in float32."""
    rank = int(os.environ["RANK"])
    folder = Path(job["folder"])
    params = json.loads((folder / "params.json").read_text())
    shard = torch.load(folder / f"consolidated.{rank:02d}.pth", weights_only=True)
    params["vocab_size"] = job["vocab_size"]
    # The default theta of these ModelArgs is 500,000; it was 10,000 in the code of LLaMA 1 and 2.
    params = {"rope_theta": 10000.0, "max_batch_size": 1, "max_seq_len": 512} | params
    if job["code"] == "llama3":
        root = Path(wheels["meta-llama3"]) / "llama"
        params.pop("use_scaled_rope", None)
        module = load_module("oracle_llama3", root / "model.py", "oracle")
    else:
        root = Path(wheels["llama-models"]) / "llama_models" / "llama3"
        package = f"oracle_lm_{job['factor']:g}"
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(root)]  # type: ignore[attr-defined]
        importlib.import_module(f"{package}.args")
        change = ("scale_factor = 8", f"scale_factor = {job['factor']:g}")
        module = load_module(f"{package}.model", root / "model.py", package, change)
    with torch.device("cpu"):
        model = module.Transformer(module.ModelArgs(**params))
    result = model.load_state_dict({name: tensor.float() for name, tensor in shard.items()}, strict=False)
    if result.missing_keys or any("rope.freqs" not in name for name in result.unexpected_keys):
        raise SystemExit(f"{folder}: {result}")
    return model.eval()


def main() -> None:
    import torch.distributed as dist

    request = json.load(sys.stdin)
    sys.path.insert(0, request["wheels"]["fairscale"])
    import fairscale.nn.model_parallel.initialize as fs

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    dist.init_process_group("gloo")
    with open(os.devnull, "w") as nothing:
        stdout, sys.stdout = sys.stdout, nothing
        fs.initialize_model_parallel(int(os.environ["WORLD_SIZE"]))
        sys.stdout = stdout
    for job in request["jobs"]:
        tokens = torch.load(job["tokens"], weights_only=True)
        logits = transformer(job, request["wheels"])(tokens, 0)
        if int(os.environ["RANK"]) == 0:
            torch.save(logits, job["out"])


if __name__ == "__main__":
    main()
