"""Quantization to GGUF's types Q8_0 and Q4_0 by the gguf package, whose integers are llama.cpp's.

Other types need a search for the best scales, such as that of llama.cpp's own llama-quantize.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import gguf
import torch
from torch import Tensor

from ..errors import CheckpointError
from .schemes import check_scales

GROUP = 32  # weights that share a scale
PIECE = 2**18  # entries that are quantized at once; with their copies, they fit into the cache
SMALLEST = 1e-15  # largest absolute weight of a group that is not 0


class Mix(NamedTuple):
    """A kind of quantized GGUF: llama.cpp's number for it, the type of most weights, and that of the output."""

    file_type: int
    type: str
    output: str


MIXES = {"q8_0": Mix(7, "Q8_0", "Q8_0"), "q4_0": Mix(2, "Q4_0", "Q8_0")}


def types_of(shapes: Mapping[str, tuple[int, ...]], kind: str) -> dict[str, str]:
    """The type of each matrix. Raises CheckpointError if its rows can't be divided into groups."""
    matrices = {name: shape[1] for name, shape in shapes.items() if len(shape) == 2}
    for name, columns in matrices.items():
        if columns % GROUP:
            raise CheckpointError(f"{name} has rows of {columns} weights, no multiple of 32; leave out --quantize")
    output = "output.weight" if "output.weight" in shapes else "tok_embeddings.weight"
    return {name: MIXES[kind].output if name == output else MIXES[kind].type for name in matrices}


def quantize(weight: Tensor, type: str) -> Tensor:
    """A weight (R, N) in a GGUF type: (R, bytes of a row) uint8. Raises CheckpointError if a weight is not finite.

    Groups below SMALLEST become 0, as in llama.cpp: the reciprocals of their scales would overflow.
    """
    pieces = []
    for part in weight.split(max(1, PIECE // weight.shape[1])):
        groups = part.float().unflatten(1, (-1, GROUP))  # (R, groups, group)
        largest = groups.abs().amax(-1, keepdim=True)
        check_scales((largest / 8).half())  # Q4_0 has the largest scales
        plain = torch.where(largest < SMALLEST, 0, groups).flatten(1)
        pieces.append(torch.from_numpy(gguf.quantize(plain.numpy(), gguf.GGMLQuantizationType[type])))
    return torch.cat(pieces)
