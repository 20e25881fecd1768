"""What the writers of all formats share: their input, and helpers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import ModelConfig
from ..tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    """The input of a writer. `read` returns one weight at a time, in the interleaved layout.

    shapes     the model's tensor names -> shapes; without output.weight if it is tied
    dtypes     the model's tensor names -> the dtype to write
    read       one weight by name, in that dtype
    tokenizer  None if the source has none
    """

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor]
    tokenizer: Tokenizer | None = None
    chat_template: str | Mapping[str, str] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    name: str = "model"

    @property
    def dtype(self) -> torch.dtype:  # of the matrices
        return self.dtypes["tok_embeddings.weight"]


def raw_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor in row-major order, without a copy if it is contiguous."""
    raw: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The sha256 of named tensors: of their names, shapes, dtypes and bytes, in this order."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        found.update(raw_bytes(tensor.detach().cpu()).data)
    return found.hexdigest()
