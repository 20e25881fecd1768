"""Where NaN or infinity begins: a second pass over the same tokens, after the logits were not finite.

The first pass checks one number of the logits, so that it costs nothing. This pass checks the input and the output of
every layer and ends at the first number that is not finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..model import Transformer
from .linears import BlockEmbedding, TileEmbedding, TileLinear

CHUNK = 256  # tokens per pass
FLOAT32 = "try dtype='float32' (--dtype float32)"
# Layers whose input is not finite although every layer before returned finite numbers -> (part, operation in between).
BEFORE = {
    "attention.attend": ("attention", "in the rotation of queries and keys"),
    "ffn_norm": ("attention", "where its result is added to the hidden state"),
    "feed_forward.w_down": ("feed-forward", "in silu(w_gate x) * w_up x"),
}
OPERATIONS = {
    "attend": "in the scores, the softmax or the sum of the values",
    "apply_rotary_emb": "in the rotation of queries and keys",
}
LABELS = {"scale": "weight, in its quantization scales,", "offset": "weight, in its quantization offsets,"}


class Begins(Exception):
    """Raised in the pass where NaN or infinity begins. after: in the output of the layer, not in its input."""

    def __init__(self, name: str, module: nn.Module, after: bool):
        super().__init__(name)
        self.name, self.module, self.after = name, module, after


class Damage(NamedTuple):
    """A weight tensor that is not finite."""

    name: str
    nans: int
    infinities: int
    entries: int
    first: list[int]


@torch.inference_mode()
def locate(model: Transformer, tokens: Sequence[int]) -> str:
    """Half a sentence: where the numbers stop being finite on these tokens, the cause, and the remedy.

    It raises no Exception, since it is part of another error's message: a failure becomes text as well.
    """
    if model.runner.distributed:  # the other ranks take no part in a second pass
        return f"the weights hold NaN or infinity, or the numbers overflow in {_dtype(model)}: {FLOAT32}"
    try:
        found = begins(model, tokens)
    except Exception as error:  # of a hook, too
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        return f"the layer where non-finite numbers begin could not be found ({reason}); {FLOAT32}"
    if found is None:
        return (
            "a second pass over the same tokens was finite, so either the numbers barely overflow, or the memory or"
            f" the device is faulty: {FLOAT32}, then try another device"
        )
    where = _where(found, len(model.layers))
    for bad in damage(found.name, found.module) if found.after else ():
        counts = [f"{n:,} {kind}" for n, kind in ((bad.nans, "NaN"), (bad.infinities, "infinite")) if n]
        return (
            f"non-finite numbers begin {where}; {bad.name} holds {' and '.join(counts)} of {bad.entries:,} numbers,"
            f" the first at {bad.first}: download the file again (clearllama verify --tensors checks every weight)"
        )
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return (
            f"non-finite numbers begin {where}; no weight there is NaN or infinite, and the model has hooks or a patch:"
            " check that the tensors they return are finite"
        )
    dtype = _dtype(model)
    cause = f"non-finite numbers begin {where}; no weight there is NaN or infinite, so the numbers overflow in {dtype}"
    if dtype == "float32":
        return f"{cause}: some weights are far too large, as in a damaged or wrongly converted file"
    return f"{cause}: {FLOAT32}"


def begins(model: Transformer, tokens: Sequence[int]) -> Begins | None:
    """The first layer with an input or output that is not finite; None if all of them are finite."""
    me = get_ident()  # other threads may run the same model
    names = {module: name for name, module in model.named_modules() if not list(module.children())}

    def check(module: nn.Module, inputs: Any, output: Any) -> None:
        if get_ident() != me:
            return
        outputs = output if isinstance(output, tuple) else (output,)
        for tensors, after in ((inputs[:1], False), (outputs, True)):
            if any(x.is_floating_point() and not bool(torch.isfinite(x).all()) for x in tensors):
                raise Begins(names[module], module, after)

    hooks = [module.register_forward_hook(check) for module in names]
    try:
        _pass(model, tokens)
    except Begins as found:
        return found
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _pass(model: Transformer, tokens: Sequence[int]) -> None:
    """Prefill and one decoding step, module by module: the last token is fed alone."""
    runner = model.runner.module_by_module()
    cache = runner.new_cache(model, len(tokens), batch=1, fixed=False)
    edges = [*range(0, len(tokens) - 1, CHUNK), len(tokens) - 1, len(tokens)]
    for start, end in pairwise(edges):
        part = torch.tensor([tokens[start:end]], device=cache.device)  # (1, T)
        positions = cache.place(end - start)  # (T,)
        key_positions = torch.arange(cache.width, device=cache.device)  # (S,)
        h = runner.run(model, part, positions, key_positions, len(tokens), cache)  # (1, T, C)
        cache.commit()
    model.output(h[:, -1])


def _where(found: Begins, n_layers: int) -> str:
    first, *rest = found.name.split(".")
    if first != "layers":
        if found.after:
            return {"tok_embeddings": "in the embedding", "norm": "in the norm after the last layer"}.get(
                first, f"in {first}, after the last layer"
            )
        number, leaf = n_layers, "attention_norm"  # the norm after the last layer reads that layer's output
    else:
        number, leaf = int(rest[0]), ".".join(rest[1:])
    part, name = "attention" if leaf.startswith("attention") else "feed-forward", leaf.rpartition(".")[2]
    if found.after:
        operation = OPERATIONS.get(name, f"at the output of {name}")
    elif leaf == "attention_norm":
        number, part, operation = number - 1, "feed-forward", "where its result is added to the hidden state"
    else:
        part, operation = BEFORE.get(leaf, (part, f"at the input of {name}"))  # only a hook changes other inputs
    return f"in layer {number} (of 0 to {n_layers - 1}), in its {part}, {operation}"


def damage(name: str, module: nn.Module) -> Iterator[Damage]:
    """The tensors of a layer that are not finite, with their names in the model."""
    for label, tensor in _tensors(module):
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            nans = int(tensor.isnan().sum())
            first = [int(at[0]) for at in (~finite).nonzero(as_tuple=True)]
            yield Damage(f"{name}.{label}", nans, int((~finite).sum()) - nans, tensor.numel(), first)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A layer's floating-point tensors; the scales and offsets if it is quantized."""
    if isinstance(module, BlockEmbedding):
        yield from _tensors(module.output)
        return
    if isinstance(module, TileLinear | TileEmbedding):
        yield LABELS["scale"], module.blocks.scale
        if module.blocks.offset is not None:
            yield LABELS["offset"], module.blocks.offset
    named = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    for label, tensor in named.items():
        if tensor is not None and tensor.is_floating_point():
            yield LABELS.get(label, label), tensor


def _dtype(model: Transformer) -> str:
    return str(model.norm.weight.dtype).removeprefix("torch.")
