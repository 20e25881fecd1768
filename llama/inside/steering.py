"""Steering: add a vector to the residual stream after each layer (arXiv:2308.10248, arXiv:2310.01405).

    vector = control_vector(model, [(happy_ids, sad_ids)])
    with steer(model, vector, scale=0.1):
        llm.generate("How was your day?")

The file format is llama.cpp's GGUF control vector, which repeng also writes. The scale times the tensor direction.N
(C,) float32 is added to the output of layer N. Layers count from 0, and layer 0 has no direction.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.gguf import GGUFFile
from ..checkpoint.write import digest
from ..errors import CheckpointError, UsageError
from ..model import Transformer
from ..system.temporary import write_atomically
from ..text import Llama
from .hooks import Place, activations, patch, transformer

ARCHITECTURE = "controlvector"


@dataclass(frozen=True)
class ControlVector:
    """A vector for each layer. directions: layer -> (C,) float32, which is added to the layer's output."""

    directions: Mapping[int, Tensor]

    def digest(self) -> str:
        """sha256 of the directions."""
        return digest((str(layer), direction) for layer, direction in sorted(self.directions.items()))

    @classmethod
    def read(cls, path: str | Path) -> ControlVector:
        """Read a GGUF control vector. Raises CheckpointError if it is damaged or another kind of file."""
        file = GGUFFile(Path(path))
        found = file.metadata.get("general.architecture")
        if found != ARCHITECTURE:
            raise CheckpointError(
                f"{path} is not a control vector: general.architecture is {found!r:.40}, expected {ARCHITECTURE!r};"
                " models are for --model, adapters for --adapter"
            )
        directions = {}
        for name, tensor in file.tensors.items():
            match = re.fullmatch(r"direction\.([1-9][0-9]{0,5})", name)
            if match is None or len(tensor.shape) != 1 or tensor.stored != "F32":
                raise CheckpointError(
                    f"{path}: tensor {name:.80} of shape {tensor.shape} is not a direction; expected direction.N, N"
                    " from 1, with one axis and type F32: make the vector again"
                )
            directions[int(match[1])] = direction = tensor.floats().clone()
            if not bool(torch.isfinite(direction).all()):
                raise CheckpointError(f"{path}: {name} has numbers that are not finite; make the vector again")
        if not directions:
            raise CheckpointError(f"{path}: the control vector has no directions; make it again")
        return cls(directions)

    def write(self, path: str | Path) -> None:
        """Write a GGUF control vector, completely or not at all. Raises OSError."""
        import gguf

        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "vector.gguf"
            writer = gguf.GGUFWriter(made, ARCHITECTURE)
            writer.add_string(f"{ARCHITECTURE}.model_hint", "llama")
            writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(self.directions))
            for layer, direction in sorted(self.directions.items()):
                writer.add_tensor(f"direction.{layer}", direction.cpu().numpy())
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            content = made.read_bytes()
        write_atomically(Path(path), content)


@torch.no_grad()
def control_vector(model: Transformer | Llama, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> ControlVector:
    """For each layer except 0, the difference of the residual streams of two prompts, or the mean over several pairs.

    pairs  (ids of the prompt to move towards, ids of the prompt to move away from)

    The residual stream is read after the layer at the last token. The difference is not normalized.

    Raises UsageError if a prompt has no tokens.
    """
    model = transformer(model)

    def last(ids: Sequence[int]) -> Tensor:  # the residual streams, (layers, C)
        if not ids:
            raise UsageError("a prompt of the control vector has no tokens; pass some text")
        with activations(model, "resid_post.*") as seen:
            model.hidden(torch.tensor([ids], device=model.tok_embeddings.weight.device))
        return torch.stack([h[0, -1].double().cpu() for h in seen.values()])

    mean = torch.stack([last(towards) - last(away) for towards, away in pairs]).mean(0).float()
    return ControlVector({layer: mean[layer] for layer in range(1, len(mean))})


@contextlib.contextmanager
def steer(
    model: Transformer | Llama, vector: ControlVector, scale: float = 1.0, layers: Sequence[int] | None = None
) -> Iterator[list[int]]:
    """Add scale times each direction to the output of its layer, at every token.

    layers  the layers to steer (default: all that have a direction)

    Yields the numbers of the layers that are steered.

    Raises UsageError if the vector does not fit the model.
    """
    model = transformer(model)
    C, last = model.config.dim, model.config.n_layers - 1
    for layer, direction in vector.directions.items():
        if layer > last or direction.shape != (C,):
            raise UsageError(
                f"direction.{layer} of the control vector has {len(direction)} numbers; expected {C} for layers 1 to"
                f" {last} of this model: the vector was made for another model"
            )
    used = sorted(vector.directions) if layers is None else sorted({*layers} & {*vector.directions})
    if not used:
        raise UsageError(
            f"the control vector has no direction for these layers; it has layers {min(vector.directions)} to"
            f" {max(vector.directions)}"
        )
    moves = {layer: scale * vector.directions[layer] for layer in used}  # (C,) float32 each

    def add(h: Tensor, at: Place) -> Tensor:
        return h.float() + moves[at.layer].to(h.device)  # type: ignore[index]

    changes = {f"resid_post.{layer}": add for layer in used}
    with patch(model, changes, f"control vector {vector.digest()}, scale {float(scale)}, layers {used}"):
        yield used
