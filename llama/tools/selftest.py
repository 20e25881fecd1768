"""The self-test: run a small random model in each of WAYS, and compare the results with plain float32."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import loader
from ..checkpoint import huggingface_write
from ..checkpoint.write import Model
from ..config import ModelConfig
from ..engine import kernels
from ..engine.runtime import pick_device
from ..errors import LlamaError
from ..generate import generate
from ..generation.batch import Batch, Request, TokenEvent
from ..generation.speculative import NGramDraft, speculate
from ..model import Transformer
from ..sampling import SamplingParams
from ..weights import expected_shapes
from .benchmark import measure, read_bandwidth
from .doctor import Finding, check

Run = Callable[[Transformer, SamplingParams], list[list[int]]]  # returns the ids that follow each of PROMPTS
REPORT = "don't trust text generated here; reinstall torch and clearllama, try CLEARLLAMA_KERNELS=off, report it"
CONFIG = ModelConfig(128, 2, 4, 2, 32, 256, vocab_size=320, max_seq_len=256)
# name -> (options of load_model, the largest error of a logit, relative to the largest logit)
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({"dtype": "float32"}, 1e-4),
    "bfloat16": ({"dtype": "bfloat16"}, 0.04),
    "int8": ({"dtype": "float32", "quantize": "int8"}, 0.06),
    "int4": ({"dtype": "float32", "quantize": "int4"}, 0.06),
}
PROMPTS = [[5, 3, 2, 9, 1, 4, 4, 8], [2, 9, 1, 4, 4, 8], [5, 3, 2, 9, 1, 4, 4, 8, 7, 7]]
LARGE = ModelConfig(2048, 16, 32, 8, 64, 8192, vocab_size=128256, max_seq_len=1024, tie_embeddings=True)
# check -> the remedy: what to use or leave out if the check failed
WITHOUT = {"float32": "use --device cpu", "bfloat16": "use --dtype float16 or float32, or --device cpu"}
WITHOUT |= dict.fromkeys(("int8", "int4"), "use the model without --quantize, or --device cpu")
WITHOUT |= {"batch": "use --batch-size 1, and --parallel 1 in serve", "draft": "use no --draft"}
WITHOUT |= {"compile": "use no --compile", "speed": "use a smaller model, or --device cpu"}


def selftest() -> Iterator[Finding]:
    """Yield a finding for each of WAYS on the CPU and on the best device, then those of `accelerator`."""
    tokens = torch.randint(CONFIG.vocab_size, (1, 48), generator=torch.Generator().manual_seed(1))  # (1, T)
    with torch.inference_mode(), tempfile.TemporaryDirectory(prefix="clearllama-doctor-") as folder:
        write_model(Path(folder))
        for device, (name, way) in itertools.product(dict.fromkeys((torch.device("cpu"), pick_device())), WAYS.items()):
            item = f"{name} on {device}"
            if name.startswith("int") and device.type == "cpu" and not kernels.ready():
                yield Finding("note", "self-test", item, "skipped: quantized weights on a CPU require the C++ kernels")
                continue
            remedy = REPORT if device.type == "cpu" else WITHOUT[name]
            yield check("self-test", item, partial(check_way, folder, tokens, device, *way), remedy)
        if (device := pick_device()).type != "cpu":
            yield from accelerator(folder, device)


def accelerator(folder: str, device: torch.device) -> Iterator[Finding]:
    """Yield findings about batches, drafts, the compiled step and the speed, which are checked on accelerators only."""
    for name, look in CHECKS.items():
        if name != "compile" or device.type == "cuda":
            yield check("self-test", f"{name} on {device}", partial(look, folder, device), WITHOUT[name])


def same_tokens(run: Run, folder: str, device: torch.device) -> str:
    """Check that `run` gives the same tokens as running each of PROMPTS alone, in float32."""
    model, params = loader.load_model(folder, device, "float32", fast=True), SamplingParams(max_new_tokens=24)
    if run(model, params) != [[token.id for token in generate(model, prompt, params)] for prompt in PROMPTS]:
        raise LlamaError("the tokens differ from those of single runs")
    return "gives the tokens of single runs"


def in_batch(model: Transformer, params: SamplingParams) -> list[list[int]]:
    """Run three prompts in a batch with two slots."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    for event in Batch(model, [Request(prompt, params) for prompt in PROMPTS], slots=2):
        if isinstance(event, TokenEvent):
            found[event.number].append(event.token.id)
    return found


def with_draft(model: Transformer, params: SamplingParams) -> list[list[int]]:
    """Run one prompt after the other, with a draft."""
    return [[token.id for token in speculate(model, prompt, params, NGramDraft())] for prompt in PROMPTS]


def check_compile(folder: str, device: torch.device) -> str:
    """Check that the compiled step gives the logits of the plain step, in bfloat16."""
    compiled, plain = (loader.load_model(folder, device, "bfloat16", compile=on, fast=True) for on in (True, False))
    caches = [model.new_cache(64, fixed=True) for model in (compiled, plain)]
    for part in ([*range(8)], [8], [9], [10]):
        ids = torch.tensor([part], device=device)  # (1, T)
        found, expected = (net(ids, cache=cache) for net, cache in zip((compiled, plain), caches, strict=True))
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error <= 0.04:
            raise LlamaError(f"the logits differ by {error:.0e} from those of the plain step; expected at most 0.04")
    return "gives the logits of the plain step"


def check_speed(folder: str, device: torch.device) -> str:
    """Measure the bandwidth of reading a tensor, and the speed of a model with the shape of Llama 3.2 1B."""
    bandwidth = read_bandwidth(device)
    with torch.device(device):
        model = Transformer(LARGE, rope="real", attention="sdpa").to(torch.bfloat16)
    tokens = measure(model, 512, 64, reps=2)
    return f"reads {bandwidth / 1e9:,.0f} GB/s; 1B in bfloat16, random weights: {tokens['decode_tps']} tokens/s"


CHECKS: dict[str, Callable[[str, torch.device], str]] = {
    "batch": partial(same_tokens, in_batch),
    "draft": partial(same_tokens, with_draft),
    "compile": check_compile,
    "speed": check_speed,
}


def check_way(folder: str, tokens: Tensor, device: torch.device, options: dict[str, Any], most: float) -> str:
    """Compare the logits of two models on the same tokens.

    The first runs as in a command: in parts, with a cache and fast layers. The second runs in one pass with nn.Linear
    in float32 on the CPU.
    """
    model = loader.load_model(folder, device, fast=True, **options)
    cache = model.new_cache(64)
    parts = tokens.to(device).split([20, 17, *[1] * 11], dim=1)
    logits = torch.cat([model(part, cache=cache) for part in parts], 1)  # (1, T, V)
    plain = loader.load_model(folder, "cpu", "float32")
    for name, layer in model.named_modules():
        if hasattr(layer, "bits"):  # a quantized layer: `weight` is its dequantized weight
            weight: Any = plain.get_submodule(name).weight
            weight.copy_(layer.weight)
    expected = plain(tokens).double()
    error = float((logits.cpu() - expected).abs().max() / expected.abs().max())
    if not error <= most:  # also true for NaN
        raise LlamaError(f"differs by {error:.0e} from plain arithmetic, expected at most {most:g}")
    return f"agrees with plain arithmetic within {error:.0e}"


def write_model(folder: Path) -> None:
    """Write a random model in Hugging Face's format."""
    shapes, draw = expected_shapes(CONFIG), torch.Generator().manual_seed(0)

    def read(name: str) -> Tensor:
        x = torch.randn(shapes[name], generator=draw)
        return x / x.shape[-1] ** 0.5 if x.dim() == 2 else 1 + x / 5

    huggingface_write.write(folder, Model(CONFIG, shapes, dict.fromkeys(shapes, torch.float32), read))
