"""Compute whether a model fits on a machine, and its top speed.

Without --gpus, the plan is for the free memory and the measured bandwidth of this machine. The result is the memory
needed on each GPU, the largest batch and context that fit, and an upper bound on the speed of decoding: the bandwidth
divided by the bytes that a step reads. Then the same follows for other quantizations, the fastest first. The plan is
computed from the model's shapes and the GPUs' data sheets, without weights. Exit code 1 if the memory is too small.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ..checks import dtype_name
from .common import arguments, loading, tables, terminal

AS_STORED = "as stored"


def gigabytes(text: str) -> float:
    """Parse gigabytes: '80' and '80GB' are 8e10, '3350GB/s' is 3.35e12."""
    return 1e9 * float(text.removesuffix("/s").removesuffix("GB"))


OPTIONS = [
    *arguments.checkpoint("checkpoint, config.json or a name in configs/ (llama-3-8b)"),
    ("--gpus NxGPU", str, "16xH100, 2xRTX4090; 4xcustom and 1xcpu need --gpu-memory (default: this machine)"),
    ("--gpu-memory GB", gigabytes, "memory of a GPU, such as 80GB"),
    ("--gpu-bandwidth GB/s", gigabytes, "memory bandwidth of a GPU, such as 3350GB/s"),
    ("--context N", int, "tokens per sequence (default: the model's context, at most 8192)"),
    ("--batch N", int, "number of sequences", {"default": 1}),
    (
        "--dtype DTYPE",
        str,
        "bfloat16, float16 or float32 (default: bfloat16; on cpu, as in 'generate'; for a quantized file, as stored)",
        {"choices": ["bfloat16", "float16", "float32"]},
    ),
    ("--quantize SCHEME", str, "quantize the linear layers: a scheme of 'clearllama quantize --list'"),
    arguments.KV_CACHE,
    ("--json", bool, "write one JSON object"),
]


def run(args: argparse.Namespace) -> int:
    import torch

    from ..engine.linears import kept_dtype
    from ..engine.runtime import pick_dtype
    from ..quant.groups import GroupFormat
    from ..tools import plan
    from ..tools.families import architecture
    from ..weights import plan_weights

    count, gpu = plan.parse_gpus(args.gpus, args.gpu_memory, args.gpu_bandwidth)
    config, checkpoint = architecture(args.model, fetch=False)
    on_cpu, dtype = gpu.name == "cpu", args.dtype or "bfloat16"
    if on_cpu and not args.dtype:
        dtype = dtype_name(pick_dtype(None, torch.device("cpu")))
    device = torch.device("cpu" if on_cpu else "cuda")
    size = weight_size = plan.DTYPE_BYTES[dtype]
    if checkpoint is None or checkpoint.weight("layers.0.attention.wq.weight").stored in ("BF16", "F16"):
        weight_size = kept_dtype(torch.bfloat16, getattr(torch, dtype), device).itemsize
    sizes: dict[str | None, Mapping[str, float]] = {}
    if checkpoint is not None:
        stored = plan_weights(checkpoint, lambda _: device, getattr(torch, dtype), keep=True)
        if any(isinstance(weight.format, GroupFormat) for weight in stored.values()):
            sizes[AS_STORED] = {name: weight.memory_footprint for name, weight in stored.items()}
    for scheme in dict.fromkeys((None, "int8", "int4", args.quantize)):
        sizes[scheme] = plan.weight_bytes(config, scheme, weight_size)
    kind = args.quantize if args.quantize or args.dtype or AS_STORED not in sizes else AS_STORED
    context = min(config.max_seq_len, 8192) if args.context is None else args.context
    request = plan.Run(config, sizes[kind], args.batch, context, count, size, args.kv_cache)
    held = "bfloat16" if weight_size < size else dtype
    facts: dict[str, Any] = {
        "model": loading.model_name(args.model),
        "dtype": dtype,
        "stored": held,
        "quantize": kind,
        **plan.plan(request, gpu, sizes),
    }
    terminal.show(args, facts, text(facts))
    return 0 if facts["fits"] else 1


def text(facts: dict[str, Any]) -> str:
    """The facts as a table."""
    gpu, dtype, decode = facts["gpu"], facts["dtype"], facts["decode"]
    size = {name.replace("_", " "): f"{count / 1e9:.2f}" for name, count in facts["memory"].items()}
    total, of = size.pop("total"), size.pop("of")
    compute = "" if facts["stored"] == dtype else f", {dtype} compute"
    keys = dtype if facts["kv_cache"] == "model" else facts["kv_cache"]
    shape = "{batch:,} x {context:,}".format(**facts)
    each, bound = ("", "about") if gpu["name"] == "cpu" else (" on each GPU", "at most")
    fits = "no" + (f"; fewest GPUs: {facts['smallest']['gpus']}" if facts["smallest"] and each else "")
    if facts["fits"]:
        fits = "yes, up to {largest_batch:,} x {context:,} or {batch:,} x {largest_context:,} tokens".format(**facts)
    speed = "not estimated: add --gpu-bandwidth" if facts["fits"] else "none"
    if decode:
        speed = f"{bound} {decode['tps_each']:,.1f} tok/s each, {decode['tps_batch']:,.1f} in total"
    rows = [
        ("model", f"{facts['model']}: {facts['parameters']:,} parameters, context {facts['max_seq_len']:,}"),
        ("run", f"{shape} tokens on {facts['gpus']} x {gpu['name']}, {of} GB ({gpu['source']})"),
        ("weights", f"{facts['quantize'] or facts['stored']}{compute}; keys and values {keys}"),
        ("memory", f"{total} GB{each}: {', '.join(f'{name} {part}' for name, part in size.items())}"),
        ("fits", fits),
        ("speed", speed),
    ]
    for other in facts["alternatives"]:
        most = other["largest_context"]
        longest = f"fits up to {most:,} tokens" if most else "does not fit"
        speed = f", {bound} {other['tps_each']:,.1f} tok/s each" if other["tps_each"] else ""
        rows.append((other["quantize"] or facts["stored"], f"{other['per_gpu'] / 1e9:.2f} GB{each}, {longest}{speed}"))
    return tables.table(rows)
