"""The Jacobian lens: the mean effect of a layer's output on the last layer's, read as words (Gurnee et al., 2026).

    J_l = mean over texts of 1/|V| sum over t, t' in V of d h_final(t') / d h_l(t)
    logits = output(norm(J_l h_l))

h_l is the output of block l. h_final is the output of the last block, before the last norm. V is the set of all
positions except the first 16 and the last. Terms with t > t' are 0, since later tokens do not change earlier ones. With
J_l = I, the lens is the logit lens.

torch.save writes the file: {"J": {l: (C, C) float16}, "n_prompts", "source_layers", "d_model", "metadata"}. The lenses
in neuronpedia/jacobian-lens on the Hugging Face hub have this format.

Letters: B batch, T tokens, C model dim, N layers with a matrix, V vocabulary.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoint.torchfile import read_nested
from ..engine.linears import describe_quantization, make_embedding
from ..errors import CheckpointError, UsageError
from ..model import Transformer
from ..system.temporary import write_atomically
from ..text import Llama
from .hooks import activations, patch, transformer
from .steering import ControlVector
from .trace import show

SKIPPED = 16  # number of first positions to skip; many heads use them as an attention sink
LENGTH = 128  # tokens of each text in a fit
BATCH = 8  # rows of a matrix in one backward pass
SHIPPED = Path(__file__).with_name("lens-smollm2.safetensors")  # the lens of the default model


@dataclass(frozen=True)
class JacobianLens:
    """A lens of one model.

    matrices   layer -> (C, C) float32, a mean over texts
    n_prompts  the number of these texts
    metadata   facts about the fit
    """

    matrices: Mapping[int, Tensor]
    n_prompts: int
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def logits(self, model: Transformer | Llama, hidden: Mapping[int, Tensor]) -> Tensor:
        """The logits that the lens reads from the output (.., C) of each of N layers: (N, .., V) float32."""
        model = transformer(model)
        norm = model.norm.weight
        moved = [hidden[layer].to(norm.device).float() @ J.T.to(norm.device) for layer, J in self.matrices.items()]
        return model.output(model.norm(torch.stack(moved).to(norm.dtype))).float()  # (N, .., C), then (N, .., V)

    def direction(self, model: Transformer | Llama, token: int) -> ControlVector:
        """The direction of a token in each layer, for `steer`.

        The product of the direction with h is the token's logit in the lens, times the root mean square of J h.
        """
        model = transformer(model)
        row = make_embedding(model.output, torch.float32)(torch.tensor([token], device=model.norm.weight.device))
        row = (row[0].float() * model.norm.weight.float()).cpu()  # (C,)
        return ControlVector({layer: row @ matrix for layer, matrix in self.matrices.items()})  # (C,) @ (C, C)

    def write(self, path: str | Path) -> None:
        """Write the file, completely or not at all. Raises OSError."""
        first, made = next(iter(self.matrices.values())), io.BytesIO()
        found: dict[str, Any] = {"J": {layer: matrix.half() for layer, matrix in self.matrices.items()}}
        found |= {"n_prompts": self.n_prompts, "source_layers": [*self.matrices], "d_model": len(first)}
        torch.save({**found, "metadata": dict(self.metadata)}, made)
        write_atomically(Path(path), made.getvalue())

    @classmethod
    def read(cls, path: str | Path, model: Transformer | Llama) -> JacobianLens:
        """Read a file. Raises CheckpointError if it is damaged, or if the lens does not fit the model."""
        config, found = transformer(model).config, read_nested(Path(path))
        C, matrices, count = config.dim, found.get("J"), found.get("n_prompts")
        if type(matrices) is not dict or not matrices or type(count) is not int or not 0 < count < 2**31:
            raise CheckpointError(f'{path} is not a Jacobian lens: expected {{"J": matrices by layer, "n_prompts": N}}')
        for layer, matrix in matrices.items():
            if type(layer) is not int or not 0 <= layer < config.n_layers or found.get("d_model", C) != C:
                raise CheckpointError(
                    f"{path} is the lens of another model: expected d_model {C} and layers 0 to {config.n_layers - 1}"
                )
            if not isinstance(matrix, Tensor) or matrix.shape != (C, C) or not bool(matrix.isfinite().all()):
                raise CheckpointError(f"{path}: J of layer {layer} is not a finite matrix of {C} x {C} numbers")
        metadata = found.get("metadata")
        kept = metadata if type(metadata) is dict else {}
        return cls({layer: matrices[layer].detach().float() for layer in sorted(matrices)}, count, kept)

    def pack(self, path: str | Path) -> None:
        """Write the file of a lens that is part of the package: int8 with a float16 scale for each row."""
        tensors = dict[str, Tensor]()
        for layer, matrix in self.matrices.items():
            scale = (matrix.abs().amax(1, keepdim=True) / 127).half()  # (C, 1)
            tensors |= {f"{layer}.J": (matrix / scale.float()).round().clamp(-127, 127).char(), f"{layer}.scale": scale}
        metadata = {**self.metadata, "n_prompts": self.n_prompts}
        save_file(tensors, path, {name: str(value) for name, value in metadata.items()})

    @classmethod
    def unpack(cls, path: str | Path = SHIPPED) -> JacobianLens:
        """Read what `pack` wrote."""
        with safe_open(path, "pt") as file:
            parts, metadata = {name: file.get_tensor(name) for name in file.offset_keys()}, file.metadata()
        layers = sorted(int(name.partition(".")[0]) for name in parts if name.endswith(".J"))
        matrices = {layer: parts[f"{layer}.J"] * parts[f"{layer}.scale"].float() for layer in layers}  # (C, C) each
        return cls(matrices, int(metadata.pop("n_prompts")), metadata)


def fit_jacobian_lens(
    model: Transformer | Llama,
    prompts: Iterable[Sequence[int]],
    layers: Sequence[int] | None = None,
    start: JacobianLens | None = None,
    tick: Callable[[int, int], None] = lambda done, of: None,
) -> Iterator[JacobianLens]:
    """Fit a lens. After each text, yields the lens, which is the mean over the texts so far.

    layers  the layers to fit (default: all but the last, whose matrix is the identity)
    start   a lens to continue, whose layers are fitted
    tick    called with the number of rows of a text's matrices that are done, and the number of all rows

    Raises UsageError for a model that is not float32, and for a text of fewer than 18 tokens.
    """
    model = transformer(model)
    dense = model.norm.weight.dtype == torch.float32 and not describe_quantization(model)
    layers = [*(range(model.config.n_layers - 1) if layers is None else layers)] if start is None else [*start.matrices]
    if not dense or not layers:
        raise UsageError("to fit a lens, the model needs weights in float32 and at least two layers")
    count = 0 if start is None else start.n_prompts
    total = 0 if start is None else count * torch.stack([*start.matrices.values()])  # (N, C, C)
    for ids in prompts:
        total = total + _jacobians(model, ids, layers, tick)
        count += 1
        matrices = dict(zip(layers, total / count, strict=True))
        yield JacobianLens(matrices, count, {} if start is None else start.metadata)


def _jacobians(model: Transformer, ids: Sequence[int], layers: list[int], tick: Callable[[int, int], None]) -> Tensor:
    """The matrices of one text, (N, C, C) float32: row c is the gradient of entry c, summed over t' and t.

    The text is repeated B times, so that one backward pass computes B rows of all matrices.
    """
    if len(ids) < SKIPPED + 2:
        raise UsageError(f"a text of {len(ids)} tokens is too short to fit a lens; use {LENGTH}")
    C, device = model.config.dim, model.tok_embeddings.weight.device
    names, last = [f"resid_post.{layer}" for layer in layers], f"resid_post.{model.config.n_layers - 1}"
    tokens = torch.tensor([[*ids]] * BATCH, device=device)  # (B, T)
    with (
        torch.enable_grad(),
        patch(model, {f"resid_post.{min(layers)}": lambda h, at: h.requires_grad_()}),  # no graph of earlier layers
        activations(model, [*names, last]) as seen,
    ):
        model.hidden(tokens)
    used = torch.arange(SKIPPED, len(ids) - 1, device=seen[last].device)  # the positions V
    found = torch.empty(len(layers), C, C)
    for first in range(0, C, BATCH):
        rows = torch.arange(min(BATCH, C - first), device=used.device)[:, None]
        cotangents = torch.zeros_like(seen[last])  # (B, T, C)
        cotangents[rows, used, first + rows] = 1
        gradients = torch.autograd.grad(seen[last], [seen[name] for name in names], cotangents, retain_graph=True)
        summed = [gradient[: len(rows), SKIPPED:-1].sum(1).cpu() for gradient in gradients]  # (B, T, C) -> (B, C)
        found[:, first : first + len(rows)] = torch.stack(summed) / len(used)
        tick(first + len(rows), C)
    return found


def summary(lens: JacobianLens, llm: Llama, ids: Sequence[int]) -> str:
    """What the lens reads from each layer at the last of `ids`, as text for a terminal."""
    names = {layer: f"resid_post.{layer}" for layer in lens.matrices}
    with torch.inference_mode(), activations(llm, names.values()) as seen:
        llm.model.hidden(torch.tensor([ids], device=llm.model.norm.weight.device))
        p, best = lens.logits(llm, {layer: seen[name][0, -1] for layer, name in names.items()}).softmax(-1).topk(5)
    lines = ["Jacobian lens: what each layer's output at the last token makes the model say later", "layer  words"]
    for layer, values, row in zip(names, p.tolist(), best.tolist(), strict=True):
        shares = [f"{x:.2f}" if x >= 0.005 else "<.01" for x in values]
        words = (f"{show(llm.tokenizer.shown(id))} {x}" for id, x in zip(row, shares, strict=True))
        lines.append(f"{layer:>5}  {', '.join(words)}")
    return "\n".join(lines) + "\n"
