"""Reader of LoRA adapters in GGUF, as llama.cpp's convert_lora_to_gguf.py writes them.

NAME.lora_a (r, in) and NAME.lora_b (out, r) change the weight NAME by alpha / r * B A. Those of the embedding, A (V, r)
and B (C, r), change it by alpha / r * A B^T. Source: llama.cpp, src/llama-adapter.cpp.
"""

from __future__ import annotations

import math
from pathlib import Path

from ..checks import is_number
from ..errors import CheckpointError
from .adapters import EMBEDDING, Adapter, LowRank, describe_ranks
from .base import Checkpoint, to_model_name
from .gguf import LAYERS, NAMES, Part

DOWN, UP = ".lora_a", ".lora_b"
# Key -> (the only value that is supported, what to do if it has another)
EXPECTED = {
    "general.type": ("adapter", "pass a model by --model"),
    "adapter.type": ("lora", "run it with llama.cpp"),
    "general.architecture": ("llama", "run it with llama.cpp and its base model"),
}


def read(path: Path, base: Checkpoint) -> Adapter:
    """The adapter in a GGUF file. Raises CheckpointError if it is a model, damaged, or of another kind."""
    part = Part(path)
    metadata, shapes = part.header.metadata, {name: info.shape for name, info in part.header.tensors.items()}
    for key, (expected, remedy) in EXPECTED.items():
        found = metadata.get(key)
        if not isinstance(found, str) or found != expected:
            raise CheckpointError(
                f"adapter {path} is not a LoRA adapter for LLaMA: {key} is {found!r:.40}, expected {expected!r};"
                f" {remedy}"
            )
    if "adapter.alora.invocation_tokens" in metadata:
        raise CheckpointError(
            f"adapter {path} is an activated LoRA, which applies only after certain tokens and can't be merged; run it"
            f" with llama.cpp"
        )
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if not is_number(alpha) or not math.isfinite(alpha):
        raise CheckpointError(
            f"adapter {path}: adapter.lora.alpha must be a finite number, got {alpha!r:.40}; convert it again"
        )
    low_rank = {}
    for weight in sorted({source.removesuffix(DOWN).removesuffix(UP) for source in shapes}):
        name = to_model_name(weight, NAMES, LAYERS)
        if name is None or weight in shapes:
            raise CheckpointError(
                f"adapter {path}: {weight:.80} is not a LoRA matrix of a LLaMA decoder; run it with llama.cpp and its"
                f" base model"
            )
        if any(len(shapes.get(weight + end, ())) != 2 for end in (DOWN, UP)):
            raise CheckpointError(f"adapter {path}: {weight} needs two matrices, {DOWN} and {UP}; convert it again")
        down, up = part.tensor(weight + DOWN), part.tensor(weight + UP)
        if name == EMBEDDING:
            down, up = up.T, down
        low_rank[name] = LowRank(down, up, alpha / len(down) if alpha else 1.0)  # llama.cpp's rule for a missing alpha
    trained_on = metadata.get("general.base_model.0.name")
    return Adapter(
        path, "interleaved", low_rank, {}, describe_ranks(low_rank, trained_on if isinstance(trained_on, str) else None)
    )
