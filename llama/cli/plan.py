"""clearllama plan: the GPUs a model needs and its speed limits on them, from its shapes and GPU data sheets."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import spelling
from ..errors import CheckpointError, ConfigError, UsageError
from . import arguments, loading, streams

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..config import ModelConfig
    from ..tools.plan import GPU, Plan, Run, Split, Stored

UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
OTHERS = (None, "int8", "int4")  # weights compared in the table
AS_STORED = "as stored"
GPU_OPTIONS = {
    "memory": ("SIZE", "memory of a GPU, such as 80GB or 24GiB"),
    "bandwidth": ("RATE", "memory bandwidth, such as 3350GB/s"),
    "flops": ("RATE", "dense 16-bit throughput, such as 989TFLOP/s"),
    "link": ("RATE", "bandwidth to another GPU of the host, in each direction, such as 450GB/s"),
    "network": ("RATE", "bandwidth to another host, per GPU and in each direction, such as 50GB/s"),
}


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "plan",
        help="compute which GPUs a model needs, and how fast the model can be on them",
        description="Compute the memory needed on each GPU, what fits, the traffic between the GPUs, and upper bounds"
        " on the speed of decoding and prefill. The sources are the model's shapes and the data sheets of the GPUs; no"
        " weights are needed."
        " Exit code 1 if the GPUs have too little memory.",
        usage="%(prog)s -m PATH_OR_NAME --gpus NxGPU [options]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        "-m",
        required=True,
        metavar="PATH_OR_NAME",
        help="an official model, such as llama-3-8b (see configs/), a config.json, a params.json or a checkpoint",
    )
    parser.add_argument(
        "--gpus", required=True, metavar="NxGPU", help="number and kind of GPUs: 16xH100, 2xRTX4090, 4xcustom or 1xcpu"
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens per sequence (default: the model's context, at most 8192)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="number of sequences (default: 1)")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        help="dtype of weights, keys and values (default: bfloat16; for cpu, the one that 'generate' uses on this"
        " computer; quantized weights keep their stored format)",
    )
    parser.add_argument(
        "--quantize",
        metavar="SCHEME",
        help="quantize the linear layers: int8, int4 or another scheme of 'clearllama quantize --list'",
    )
    parser.add_argument(
        "--kv-cache",
        default="model",
        choices=["model", "int8"],
        help="how keys and values are stored: model is --dtype, int8 takes about half the memory (default: model)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="number of GPUs that share each layer (default: automatic)",
    )
    parser.add_argument(
        "--pipeline-parallel",
        type=int,
        metavar="P",
        help="number of stages of consecutive layers (default: automatic)",
    )
    group = parser.add_argument_group(
        "GPU",
        "overrides of the data sheet. The kinds custom and cpu have no data sheet: they require --gpu-memory, and the"
        " speeds also require --gpu-bandwidth and --gpu-flops",
    )
    for name, (metavar, text) in GPU_OPTIONS.items():
        group.add_argument(f"--gpu-{name}", metavar=metavar, help=text)
    group.add_argument("--gpus-per-host", type=int, metavar="N", help="GPUs per host (default: 8)")
    arguments.add_output_options(parser, json="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..quant.schemes import pick_scheme
    from ..tools import plan

    overrides: dict[str, float | int | None] = {
        name: quantity(value, f"--gpu-{name}")
        for name in GPU_OPTIONS
        if (value := getattr(args, f"gpu_{name}")) is not None
    }
    count, gpu = plan.parse_gpus(args.gpus, **overrides, per_host=args.gpus_per_host)
    scheme = None if args.quantize is None else pick_scheme(args.quantize)
    name, config, checkpoint = architecture(args.model)
    if checkpoint is None and not args.model.endswith(("/", ".json", name)):
        streams.info(args, f"no file or folder {args.model!r} here; the shapes are those of {name}")
    context = min(config.max_seq_len, 8192) if args.context is None else args.context
    dtype = args.dtype or _default_dtype(gpu)
    stored = None if checkpoint is None else plan.stored_in(checkpoint, plan.DTYPE_BYTES[dtype], gpu.name == "cpu")
    weights = stored if scheme is None and args.dtype is None else scheme
    request = plan.Run(config, args.batch, context, dtype, weights, args.kv_cache)
    result = plan.plan(request, count, gpu, args.tensor_parallel, args.pipeline_parallel)
    facts = describe(result, name, args.quantize, stored)
    if args.json:
        streams.write_json(facts)
    else:
        streams.write("\n".join(lines(facts)) + "\n")
    return 0 if result.fits else 1


def _default_dtype(gpu: GPU) -> str:
    """The dtype in which generate would run: for a CPU, this computer's."""
    if gpu.name != "cpu":
        return "bfloat16"
    import torch

    from ..engine.runtime import pick_dtype

    return str(pick_dtype("auto", torch.device("cpu"))).removeprefix("torch.")


def architecture(path_or_name: str) -> tuple[str, ModelConfig, Checkpoint | None]:
    """Name, configuration and, unless the argument is only a configuration, checkpoint of a model."""
    from ..checkpoint import open_checkpoint
    from ..checkpoint.huggingface import read_config
    from ..checkpoint.meta import read_params
    from ..config import ModelConfig
    from ..hub import resolve
    from ..hub.families import official
    from ..system.documents import read_json

    path = Path(path_or_name)
    if path_or_name in official() and not path.exists():
        return path_or_name, official()[path_or_name], None
    if path.suffix != ".json":
        try:
            found = resolve(path_or_name, fetch=False)
        except CheckpointError as error:
            full = re.sub(r"^meta-|-hf$", "", path.name, flags=re.IGNORECASE)
            plain = re.sub(r"-(instruct|chat)\b", "", full, flags=re.IGNORECASE)
            same = spelling.nearest(full, official(), 1, 1.0) or spelling.nearest(plain, official(), 1, 1.0)
            if same and len(path.parts) <= 2:  # a name of the hub, not a path
                return same[0], official()[same[0]], None
            near = spelling.nearest(path.name, official(), cutoff=0.8)
            near = near or spelling.nearest(plain, official(), cutoff=0.7)
            why = f"{str(error).partition(';')[0]}; {spelling.did_you_mean(near)}Known" if near else f"{error}; known"
            raise CheckpointError(f"{why} without files: {', '.join(official())}") from None
        checkpoint = open_checkpoint(found)
        return loading.model_name(path_or_name), checkpoint.config, checkpoint
    name = path.stem if path.stem not in ("config", "params") else path.resolve().parent.name
    if path.is_dir() or not path.exists():
        raise UsageError(f"{path}: no such file; known models: {', '.join(official())}")
    values = read_json(path)
    if "model_type" in values or "hidden_size" in values or "architectures" in values:
        return name, read_config(read_json(path), str(path))[0], None
    if "hidden_dim" not in values:
        return name, read_params(path), None
    try:
        return name, ModelConfig(**values), None
    except TypeError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix('ModelConfig.__init__() ')}; see configs/") from None


def quantity(text: str, option: str) -> float:
    """Parse a number with a unit: '3350GB/s' -> 3.35e12. The option decides between bytes, bytes/s and FLOP/s."""
    unit, example = {"--gpu-memory": ("b", "80GB or 24GiB"), "--gpu-flops": ("flop/?s", "989TFLOP/s")}.get(
        option, ("b/s", "3350GB/s")
    )
    match = re.fullmatch(
        rf"\s*(\d{{1,20}}(?:\.\d{{1,20}})?(?:e\d{{1,2}})?)\s*([kmgtp]i?)?{unit}\s*", text, re.IGNORECASE
    )
    if not match or (match[2] or "").lower() not in UNITS:
        raise UsageError(f"{option} must be a number with a unit, such as {example}, got {text!r:.60}")
    return float(match[1]) * UNITS[(match[2] or "").lower()]


# --------------------------------------------------------------------------------------------------------- the facts
def describe(result: Plan, name: str, quantize: str | None, stored: Stored | None = None) -> dict[str, Any]:
    """The facts in bytes, seconds and tokens per second. stored: the quantized weights of the checkpoint, if any."""
    from ..tools import plan

    run, gpu, split, full = result.run, result.gpu, result.split, result.fullest
    config = run.config
    copies = max(1, split.tensor // config.n_kv_heads)
    costs = [plan.traffic(run, split, stage) for stage in result.stages]
    as_stored = isinstance(run.scheme, plan.Stored)
    others = (*([AS_STORED] if stored else []), *OTHERS, quantize)
    facts: dict[str, Any] = {
        "model": name,
        "parameters": config.n_params,
        "layers": config.n_layers,
        "heads": config.n_heads,
        "kv_heads": config.n_kv_heads,
        "max_seq_len": config.max_seq_len,
        "dtype": run.dtype,
        "quantize": AS_STORED if as_stored else quantize,
        "stored": None if stored is None else list(stored.types),
        "stored_bits": None if stored is None else plan.weight_bytes(config, run.size, stored) * 8 / config.n_params,
        "dequantized": list(stored.dequantized) if stored else [],
        "kv_cache": run.kv_cache,
        "batch": run.batch,
        "context": run.context,
        "gpus": split.gpus,
        "gpu": {key: getattr(gpu, key) or None for key in gpu.__dataclass_fields__},
        "hosts": -(-split.gpus // gpu.per_host),
        "split": _split(split),
        "kv_head_copies": copies,
        "memory": {
            "weights": round(full.weights),
            "kv_cache": full.cache,
            "activations": full.activations,
            "reserve": round(plan.RESERVE * gpu.memory),
            "total": round(full.needs + plan.RESERVE * gpu.memory),
            "of": round(gpu.memory),
        },
        "stages": [
            {
                "layers": stage.layers,
                "weights": round(stage.weights),
                "kv_cache": stage.cache,
                "activations": stage.activations,
                "weights_read": round(cost.weights),
                "kv_cache_read": cost.cache * run.batch,
                "flops_per_token": round(cost.flops),
                "sent_per_token": round(cost.shared + cost.handed),
            }
            for stage, cost in zip(result.stages, costs, strict=True)
        ],
        "fits": result.fits,
        "smallest": _split(result.smallest),
        "largest_batch": result.largest_batch,
        "largest_context": result.largest_context,
        "alternatives": [_alternative(result, scheme, stored) for scheme in dict.fromkeys(others)],
        "traffic": {
            "all_reduces_per_step": 0 if split.tensor == 1 else 2 * config.n_layers + 1,
            "all_reduce_bytes_per_layer": 0 if split.tensor == 1 else 2 * config.dim * run.size,
            "sent_bytes_per_layer": round(2 * plan.reduce_bytes(run, split.tensor)),
        },
        "decode": None,
        "prefill": None,
    }
    if result.decoding is not None and result.prefill is not None:
        slowest = max(result.decoding.times, key=lambda times: times.bound)
        facts["decode"] = {
            "step_s": result.decoding.seconds,
            "memory_s": slowest.memory,
            "compute_s": slowest.compute,
            "links_s": slowest.links,
            "groups": result.decoding.groups,
            "rows": result.decoding.rows,
            "bound_by": result.decoding.by,
            "tps_each": result.decoding.each_tps,
            "tps_batch": result.decoding.batch_tps,
        }
        prompt = run.context / result.prefill.tps
        facts["prefill"] = {"tps": result.prefill.tps, "bound_by": result.prefill.by, "prompt_s": prompt}
    return facts


def _split(split: Split | None) -> dict[str, Any] | None:
    if split is None:
        return None
    layers = list(split.layers)
    return {"gpus": split.gpus, "tensor": split.tensor, "pipeline": split.pipeline, "layers": layers}


def _alternative(result: Plan, quantize: str | None, stored: Stored | None) -> dict[str, Any]:
    """The facts of the same run with other weights."""
    from dataclasses import replace

    from ..quant.schemes import SCHEMES
    from ..tools import plan

    scheme = None if quantize in (None, AS_STORED) else SCHEMES[quantize]
    other: Run = replace(result.run, scheme=stored if quantize == AS_STORED else scheme)
    stages = plan.stages(other, result.split)
    return {
        "quantize": quantize,
        "weights": round(plan.weight_bytes(other.config, other.size, other.scheme)),
        "per_gpu": round(max(stage.needs for stage in stages) + plan.RESERVE * result.gpu.memory),
        "fits": plan.fits(other, result.split, result.gpu),
        "largest_context": plan.largest_context(other, result.split, result.gpu),
        "smallest": _split(plan.smallest(other, result.gpu)),
    }


# ------------------------------------------------------------------------------------------------------------ the text
def lines(facts: dict[str, Any]) -> list[str]:
    """The facts as text, at most 100 columns wide."""
    gpu, split, memory = facts["gpu"], facts["split"], facts["memory"]
    kind = facts["quantize"] or facts["dtype"]
    stages = "" if split["pipeline"] == 1 else f", layers {_ranges(split['layers'])}"
    copies = facts["kv_head_copies"]
    text = [
        f"model       {facts['model']}: {facts['parameters']:,} parameters, {facts['layers']} layers,"
        f" {facts['heads']} heads, {facts['kv_heads']} key/value heads",
        f"run         {_count(facts['batch'], 'sequence')} of {facts['context']:,} tokens, weights {kind},"
        f" keys and values {'int8' if facts['kv_cache'] == 'int8' else facts['dtype']}",
        f"GPUs        {facts['gpus']} x {gpu['name']} in {_count(facts['hosts'], 'host')}:"
        f" {_rate(gpu['memory'])}B"
        + (f", {_rate(gpu['bandwidth'])}B/s" if gpu["bandwidth"] else "")
        + (f", {_rate(gpu['flops'])}FLOP/s in 16 bits" if gpu["flops"] else ""),
        f"links       {_rate(gpu['link'])}B/s each way in a host of {gpu['per_host']},"
        f" {_rate(gpu['network'])}B/s between hosts",
        f"source      {gpu['source']}",
        f"split       tensor {split['tensor']} x pipeline {split['pipeline']}{stages}"
        + (f"; each key/value head on {copies} GPUs" if copies > 1 else ""),
    ]
    if facts["stored"]:
        types = ", ".join(facts["stored"])
        text.append(
            f"stored      {types}: {facts['stored_bits']:.1f} bits per weight, including those in {facts['dtype']}"
        )
        if facts["quantize"] == AS_STORED and facts["dequantized"]:
            text.append(f"note        a GPU dequantizes {', '.join(facts['dequantized'])} to {facts['dtype']}")
    if facts["context"] > facts["max_seq_len"]:
        text.append(f"note        the model was trained for {facts['max_seq_len']:,} tokens")
    if gpu["name"] == "cpu" and facts["dtype"] == "float32":
        text.append("note        --dtype bfloat16 halves what is not quantized, but computes slowly here")
    text += ["", "memory of the fullest GPU, GB"]
    labels = {"weights": "weights", "kv_cache": "keys, values", "activations": "activations", "reserve": "reserve"}
    text += [f"  {label:<14}{memory[key] / 1e9:>9.2f}" for key, label in labels.items()]
    text += [f"  {'total':<14}{memory['total'] / 1e9:>9.2f}  of {memory['of'] / 1e9:.2f}"]
    text += ["", f"fits        {_verdict(facts)}", ""]
    text += [f"{'dtype':<14}{'weights, GB':>11}{'per GPU, GB':>13}{'fits':>7}{'longest context':>18}   fewest GPUs"]
    for other in facts["alternatives"]:
        few = other["smallest"]
        fewest = f"{few['gpus']} ({few['tensor']} x {few['pipeline']})" if few else "none"
        longest = f"{other['largest_context']:,}" if other["largest_context"] else "none"
        text.append(
            f"{other['quantize'] or facts['dtype']:<14}{other['weights'] / 1e9:>11.1f}{other['per_gpu'] / 1e9:>13.1f}"
            f"{'yes' if other['fits'] else 'no':>7}{longest:>18}   {fewest}"
        )
    missing = " and ".join(f"--gpu-{name}" for name in ("bandwidth", "flops") if not gpu[name])
    if missing and facts["fits"]:
        text += ["", f"speed       not estimated: add {missing}"]
    return text if facts["decode"] is None else [*text, "", *_speed(facts)]


def _verdict(facts: dict[str, Any]) -> str:
    few = facts["smallest"]
    fewest = (
        f"fewest GPUs: {few['gpus']}, tensor {few['tensor']} x pipeline {few['pipeline']}"
        if few
        else "no number of these GPUs is enough"
    )
    context, longest, rows = facts["context"], facts["largest_context"], facts["batch"]
    if not facts["fits"]:
        if longest:
            fewest = f"{_count(rows, 'sequence')} of {longest:,} would fit\n            {fewest}"
        return f"no, not with {context:,} tokens; {fewest}"
    sequences = "sequence" if facts["largest_batch"] == 1 else "sequences"
    more = f", or {rows:,} of {longest:,}" if longest > context else ""
    return f"yes, up to {facts['largest_batch']:,} {sequences} of {context:,} tokens{more}\n            {fewest}"


def _speed(facts: dict[str, Any]) -> list[str]:
    """The lines about traffic and speed limits."""
    from ..tools.plan import REACHED

    decode, prefill, traffic = facts["decode"], facts["prefill"], facts["traffic"]
    slow = max(facts["stages"], key=lambda stage: stage["weights_read"] + stage["kv_cache_read"])
    groups = decode["groups"]
    text = ["each step, one token per sequence"]
    if groups > 1:
        rows = f"{'' if decode['rows'] == int(decode['rows']) else 'about '}{decode['rows']:.3g}"
        text.append(f"  groups              {groups} of {rows} sequences each; a stage processes one group at a time")
    text += [
        f"  read per GPU        {f'{groups} x ' if groups > 1 else ''}{slow['weights_read'] / 1e9:.2f} GB of weights,"
        f" {slow['kv_cache_read'] / 1e9:.2f} GB of keys and values",
        f"  compute per GPU     {slow['flops_per_token'] * facts['batch'] / 1e9:,.1f} GFLOP",
    ]
    if traffic["all_reduces_per_step"]:
        text.append(
            f"  all-reduces         {traffic['all_reduces_per_step']} (2 per layer, 1 for the embedding),"
            f" {traffic['all_reduce_bytes_per_layer'] / 1e3:,.1f} kB per layer and token"
        )
    sent = max(stage["sent_per_token"] for stage in facts["stages"])
    if sent:
        per_step = f"{sent * facts['batch'] / 1e6:.2f} MB per step"
        text.append(f"  sent per GPU        {sent / 1e6:.2f} MB per token, {per_step}")
    text += [
        "",
        "upper bounds from the data sheets, with perfect overlap and no overhead",
        f"  slowest GPU         {'per group: ' if groups > 1 else ''}memory {decode['memory_s'] * 1e3:.3f} ms,"
        f" compute {decode['compute_s'] * 1e3:.3f} ms, links {decode['links_s'] * 1e3:.3f} ms",
        f"  decoding            {decode['step_s'] * 1e3:.2f} ms per step, bound by {decode['bound_by']}:"
        f" {decode['tps_each']:,.1f} tok/s each, {decode['tps_batch']:,.1f} in total",
        f"  prefill             {prefill['tps']:,.0f} tok/s, bound by {prefill['bound_by']}:"
        f" {prefill['prompt_s']:.2f} s for {facts['context']:,} tokens",
        f"  measured elsewhere  {100 * min(REACHED.values()):.0f} to {100 * max(REACHED.values()):.0f} % of the memory"
        " bound, by gpt-fast on A100s in bfloat16 at batch 1",
    ]
    return text


def _ranges(layers: list[int]) -> str:
    """Layers per stage: '63 + 63', or for many stages '14 x 8 and 2 x 7'."""
    if len(layers) <= 8:
        return " + ".join(map(str, layers))
    return " and ".join(f"{layers.count(n)} x {n}" for n in dict.fromkeys(layers))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def _rate(value: float) -> str:
    """3.35e12 -> '3.35 T': for GB, GB/s, TFLOP/s."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value:.4g} "
