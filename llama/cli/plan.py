"""clearllama plan: does a model fit on some GPUs, and how fast can it be at best?"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, UsageError
from . import arguments, loading, streams, tables

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..config import ModelConfig
    from ..tools.model_facts import Bits

UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
AS_STORED = "as stored"


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "plan",
        description="Compute the memory needed on each GPU, what fits, and an upper bound on the speed of decoding: the"
        " bandwidth divided by the bytes that a step reads. The sources are the model's shapes and the data sheets of"
        " the GPUs; no weights are needed. Exit code 1 if the GPUs have too little memory.",
        usage="%(prog)s -m PATH_OR_NAME --gpus NxGPU [options]",
    )
    parser.add_argument(
        "--model",
        "-m",
        required=True,
        metavar="PATH_OR_NAME",
        help="an official model, such as llama-3-8b (see configs/), a config.json, a params.json or a checkpoint",
    )
    gpus = "number and kind: 16xH100, 2xRTX4090; 4xcustom and 1xcpu need --gpu-memory"
    parser.add_argument("--gpus", required=True, metavar="NxGPU", help=gpus)
    parser.add_argument("--gpu-memory", metavar="SIZE", help="memory of a GPU, such as 80GB or 24GiB")
    parser.add_argument("--gpu-bandwidth", metavar="RATE", help="memory bandwidth of a GPU, such as 3350GB/s")
    context = "tokens per sequence (default: the model's context, at most 8192)"
    parser.add_argument("--context", type=int, metavar="N", help=context)
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="number of sequences (default: 1)")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        help="dtype of weights, keys and values (default: bfloat16, on cpu that of 'generate'; quantized weights stay"
        " as they are stored)",
    )
    schemes = "quantize the linear layers: a scheme of 'clearllama quantize --list'"
    parser.add_argument("--quantize", metavar="SCHEME", help=schemes)
    arguments.add_kv_cache_option(parser, "--dtype")
    arguments.add_output_options(parser, json="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from ..engine.runtime import pick_dtype
    from ..tools import plan
    from ..tools.model_facts import stored_bits

    memory = quantity(args.gpu_memory, "--gpu-memory", "b", "80GB or 24GiB")
    bandwidth = quantity(args.gpu_bandwidth, "--gpu-bandwidth", "b/s", "3350GB/s")
    count, gpu = plan.parse_gpus(args.gpus, memory, bandwidth)
    name, config, checkpoint = architecture(args.model)
    if checkpoint is None and not args.model.endswith(("/", ".json", name)):
        streams.info(args, f"no file or folder {args.model!r} here; the shapes are those of {name}")
    on_cpu, dtype = gpu.name == "cpu", args.dtype or "bfloat16"
    if on_cpu and not args.dtype:
        dtype = str(pick_dtype(None, torch.device("cpu"))).removeprefix("torch.")
    size = plan.DTYPE_BYTES[dtype]
    stored = None if checkpoint is None else stored_bits(checkpoint, 8 * size, on_cpu)
    weights: dict[str | None, Bits] = {AS_STORED: stored} if stored else {}
    for scheme in dict.fromkeys((None, "int8", "int4", args.quantize)):
        weights[scheme] = plan.scheme_bits(scheme, size, config.tie_embeddings)
    kind = AS_STORED if stored and not (args.quantize or args.dtype) else args.quantize
    context = min(config.max_seq_len, 8192) if args.context is None else args.context
    request = plan.Run(config, weights[kind], args.batch, context, count, size, args.kv_cache)
    facts: dict[str, Any] = {"model": name, "dtype": dtype, "quantize": kind}
    facts |= {"stored": None, "stored_bits": None, "dequantized": [], **plan.plan(request, gpu, weights)}
    if stored:
        bits = 8 * facts["alternatives"][0]["weights"] / config.n_params
        facts |= {"stored": list(stored.types), "stored_bits": bits, "dequantized": list(stored.dequantized)}
    if args.json:
        streams.write_json(facts)
    else:
        streams.write(text(facts))
    return 0 if facts["fits"] else 1


def architecture(path_or_name: str) -> tuple[str, ModelConfig, Checkpoint | None]:
    """Name, configuration and, unless the argument is only a configuration, checkpoint of a model."""
    from ..checkpoint import open_checkpoint
    from ..hub import resolve
    from ..hub.families import official

    path, known = Path(path_or_name), official()
    if path_or_name in known and not path.exists():
        return path_or_name, known[path_or_name], None
    if path.suffix == ".json":
        name = path.stem if path.stem not in ("config", "params") else path.resolve().parent.name
        return name, _read_configuration(path), None
    try:
        checkpoint = open_checkpoint(resolve(path_or_name, fetch=False))
    except CheckpointError as error:
        same = [name for name in known if _plain(name) == _plain(path.name)]
        if path.exists() or len(path.parts) > 2 or not same:
            raise CheckpointError(f"{error}; models without files: {', '.join(known)}") from None
        return same[0], known[same[0]], None
    return loading.model_name(path_or_name), checkpoint.config, checkpoint


def _plain(name: str) -> str:
    """'Meta-Llama-3-8B-Instruct' -> 'llama38b': what the names of one architecture have in common."""
    return re.sub(r"^meta-|-(instruct|chat|hf)\b|[-_ ]", "", name.lower())


def _read_configuration(path: Path) -> ModelConfig:
    """The architecture in a config.json, a params.json or a file of configs/."""
    from ..checkpoint.huggingface import read_config
    from ..checkpoint.meta import read_params
    from ..config import ModelConfig
    from ..system.documents import read_json

    values = read_json(path)
    if values.keys() & {"model_type", "hidden_size", "architectures"}:
        return read_config(values, str(path))[0]
    if "hidden_dim" not in values:
        return read_params(path)
    return ModelConfig(**values)


def quantity(text: str | None, option: str, unit: str, example: str) -> float | None:
    """Parse a number with a unit: '80GB' -> 8e10, '3350GB/s' -> 3.35e12. None stays None."""
    if text is None:
        return None
    match = re.fullmatch(rf"\s*(\d{{1,20}}(?:\.\d{{1,20}})?)\s*([kmgt]i?)?{unit}\s*", text, re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise UsageError(f"{option} must be a number above 0 with a unit, such as {example}, got {text!r:.60}")
    return float(match[1]) * UNITS[(match[2] or "").lower()]


# ------------------------------------------------------------------------------------------------------------ the text
def text(facts: dict[str, Any]) -> str:
    """The facts as two tables."""
    from ..tools.plan import REACHED

    gpu, dtype, decode = facts["gpu"], facts["dtype"], facts["decode"]
    batch, tokens, longest = facts["batch"], facts["context"], facts["largest_context"]
    size = {name: f"{count / 1e9:.2f}" for name, count in facts["memory"].items()}
    keys = dtype if facts["kv_cache"] == "model" else facts["kv_cache"]
    weights = facts["quantize"] or dtype
    if facts["stored"]:
        weights += f" (file: {', '.join(facts['stored'])}, {facts['stored_bits']:.1f} bits per weight)"
    if facts["quantize"] == AS_STORED and facts["dequantized"]:
        weights += f"; a GPU dequantizes {', '.join(facts['dequantized'])}"
    fits = f"no, at most {batch:,} x {longest:,} tokens" if longest else "no"
    if facts["fits"]:
        fits = f"yes, up to {facts['largest_batch']:,} x {tokens:,} or {batch:,} x {longest:,} tokens"
    rows = [
        ("model", f"{facts['model']}: {facts['parameters']:,} parameters, {facts['layers']} layers"),
        ("run", f"{batch:,} x {tokens:,} tokens; the model was trained for {facts['max_seq_len']:,}"),
        ("weights", weights),
        ("keys, values", f"{keys}, {facts['kv_heads']} heads for {facts['heads']} of queries"),
        ("GPUs", f"{facts['gpus']} x {gpu['name']}, {size['of']} GB ({gpu['source']})"),
        ("memory", f"{size.pop('total')} of {size.pop('of')} GB on each GPU"),
        ("", ", ".join(f"{name.replace('_', ' ')} {part}" for name, part in size.items())),
        ("fits", fits),
    ]
    if decode:
        read, cache, rate = facts["weights_read"], facts["memory"]["kv_cache"], gpu["bandwidth"]
        rows += [
            ("speed", f"at most {decode['tps_each']:,.1f} tok/s each, {decode['tps_batch']:,.1f} in total"),
            ("", f"a step reads {read / 1e9:.2f} + {cache / 1e9:.2f} GB on each GPU at {rate / 1e9:,.0f} GB/s;"),
            ("", f"programs reach {REACHED[0]:.0%} to {REACHED[1]:.0%} of this (gpt-fast, A100, bfloat16, batch 1)"),
        ]
    elif facts["fits"]:
        rows.append(("speed", "not estimated: add --gpu-bandwidth"))
    compared = [("weights", "all, GB", "per GPU, GB", "fits", "longest context", "fewest GPUs")]
    for other in facts["alternatives"]:
        sizes = (f"{other[key] / 1e9:.1f}" for key in ("weights", "per_gpu"))
        fewest = str(other["smallest"]["gpus"]) if other["smallest"] else "none"
        fits = "yes" if other["fits"] else "no"
        context = f"{other['largest_context']:,}" if other["largest_context"] else "none"
        compared.append((other["quantize"] or dtype, *sizes, fits, context, fewest))
    return f"{tables.table(rows)}\n{tables.table(compared, right=range(1, 6))}"
