"""The self-test: a small random model, computed in each way that this machine runs models, against plain float32."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
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
from ..weights import expected_shapes
from .doctor import Finding, failure

REPORT = "don't trust text generated here; reinstall torch and clearllama, try CLEARLLAMA_KERNELS=off, report it"
CONFIG = ModelConfig(128, 2, 4, 2, 32, 256, vocab_size=320, max_seq_len=256)
# name -> (options of load_model, the largest error of a logit, relative to the largest logit)
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({"dtype": "float32"}, 1e-4),
    "bfloat16": ({"dtype": "bfloat16"}, 0.04),
    "int8": ({"dtype": "float32", "quantize": "int8"}, 0.06),
    "int4": ({"dtype": "float32", "quantize": "int4"}, 0.06),
}


def selftest() -> Iterator[Finding]:
    """The error of each way on the CPU and on the best device, one finding each."""
    tokens = torch.randint(CONFIG.vocab_size, (1, 48), generator=torch.Generator().manual_seed(1))  # (1, T)
    with torch.inference_mode(), tempfile.TemporaryDirectory(prefix="clearllama-doctor-") as folder:
        write_model(Path(folder))
        for device, (name, way) in itertools.product(dict.fromkeys((torch.device("cpu"), pick_device())), WAYS.items()):
            item = f"{name} on {device}"
            if name.startswith("int") and device.type == "cpu" and not kernels.ready():
                yield Finding("note", "self-test", item, "skipped: quantized weights on a CPU require the C++ kernels")
                continue
            try:
                yield check_way(item, folder, tokens, device, *way)
            except Exception as error:
                yield failure("self-test", item, error)


def check_way(
    item: str, folder: str, tokens: Tensor, device: torch.device, options: dict[str, Any], most: float
) -> Finding:
    """Compare the logits of a cached model, as commands run it, with one pass of nn.Linear in float32 on the CPU."""
    model = loader.load_model(folder, device, fast=True, **options)
    cache = model.new_cache(64)
    parts = tokens.to(device).split([20, 17, *[1] * 11], dim=1)
    logits = torch.cat([model(part, cache=cache) for part in parts], 1)  # (1, T, V)
    plain = loader.load_model(folder, "cpu", "float32")
    for name, layer in model.named_modules():
        if hasattr(layer, "bits"):  # a quantized layer; its weight is dequantized
            weight: Any = plain.get_submodule(name).weight
            weight.copy_(layer.weight)
    expected = plain(tokens).double()
    error = float((logits.cpu() - expected).abs().max() / expected.abs().max())
    if error <= most:  # false for NaN
        return Finding("ok", "self-test", item, f"agrees with plain arithmetic within {error:.0e}")
    message = f"differs by {error:.0e} from plain arithmetic, expected at most {most:g}"
    return Finding("fail", "self-test", item, message, REPORT)


def write_model(folder: Path) -> None:
    """Write a random model in Hugging Face's format."""
    shapes, draw = expected_shapes(CONFIG), torch.Generator().manual_seed(0)

    def read(name: str) -> Tensor:
        x = torch.randn(shapes[name], generator=draw)
        return x / x.shape[-1] ** 0.5 if x.dim() == 2 else 1 + x / 5

    huggingface_write.write(folder, Model(CONFIG, shapes, dict.fromkeys(shapes, torch.float32), read))
