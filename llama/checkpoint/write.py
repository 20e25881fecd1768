"""What the writers of all formats share: their input, and helpers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import ModelConfig
from ..errors import ConfigError
from ..tokenizer import Tokenizer
from .base import FLOATS

ROTATED = (".wq.weight", ".wk.weight", ".wq.bias", ".wk.bias")  # ends of the names whose rows RoPE rotates


@dataclass(frozen=True)
class Model:
    """The input of a writer. `read` returns one weight at a time, in the interleaved layout.

    shapes        the model's tensor names -> shapes; without output.weight if it is tied
    dtypes        the model's tensor names -> the dtype to write
    read          one weight by name, in that dtype
    tokenizer     None if the source has none, and then no_tokenizer has the reason
    """

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor]
    tokenizer: Tokenizer | None = None
    no_tokenizer: str = ""
    chat_template: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    name: str = "model"

    def nbytes(self, name: str) -> int:
        return math.prod(self.shapes[name]) * self.dtypes[name].itemsize

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrices."""
        return self.dtypes["tok_embeddings.weight"]


# (path, model, number of shards) -> warnings: what the format can't store
Writer = Callable[[Path, Model, int], Sequence[str]]


def raw_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor in row-major order, without a copy if it is contiguous."""
    raw: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def refuse(config: ModelConfig, format: str, **allowed: object) -> None:
    """Raise ConfigError if a field has another value than the only one that the format can express."""
    for name, value in allowed.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"in {format}, {name} is always {value!r}, but this model has {getattr(config, name)!r}; convert it"
                " to hf or gguf"
            )


def dtype_name(dtype: torch.dtype) -> str:
    """F32, BF16 or F16. Raises ConfigError for others."""
    if dtype not in FLOATS:
        raise ConfigError(f"weights are written as {', '.join(FLOATS.values())}, not {dtype}")
    return FLOATS[dtype]
