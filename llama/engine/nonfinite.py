"""Where numbers that are not finite begin: a second pass over the same tokens, once the logits have failed.

The first pass asks one number of the logits and knows nothing else, so that it costs nothing. This one looks at what
goes into every layer and at what comes out, and ends at the first NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import causal_mask
from ..errors import LlamaError
from ..model import Transformer
from ..quant.tiles import unpack
from .fused import Fused
from .linears import BlockEmbedding, TileEmbedding, TileLinear

CHUNK = 256  # tokens in one pass
FLOAT32 = "try --dtype float32"
# What stands before a layer that is given a number that is not finite, while all before that was: of which part it is.
BEFORE = {
    "attention.wo": ("attention", "in the scores, the softmax or the sum of the values"),
    "ffn_norm": ("attention", "where its result is added to the hidden state"),
    "feed_forward.w_down": ("feed-forward", "in silu(w_gate x) * w_up x"),
}


class Begins(Exception):
    """The pass has come to where it begins. name of the layer; after: it is in what comes out, not in what goes in."""

    def __init__(self, name: str, module: nn.Module, after: bool):
        super().__init__(name)
        self.name, self.module, self.after = name, module, after


class Damage(NamedTuple):
    """A tensor of the weights that is not finite."""

    name: str
    nans: int
    infinities: int
    numbers: int
    first: list[int]


@torch.inference_mode()
def locate(model: Transformer, tokens: Sequence[int]) -> str:
    """Half a sentence that says where the numbers stop being finite on these tokens, why, and what to do.

    It never raises a LlamaError, for there is another to be told: what stands in its way is said instead.
    """
    if "hidden" in vars(model):  # parallel.py; the other ranks have no part in a second pass
        return f"the weights hold NaN or infinity, or the numbers overflow in {_dtype(model)}: {FLOAT32}"
    try:
        found = begins(model, tokens)
    except (LlamaError, RuntimeError, MemoryError) as error:
        told = " ".join(str(error).split())[:120] or type(error).__name__
        return f"where that begins could not be found ({told}); {FLOAT32}"
    if found is None:
        return (
            "a second pass over the same tokens stayed finite, so they overflow only just, or the memory or the device"
            f" is at fault: {FLOAT32}, then try another device"
        )
    place = _place(found, len(model.layers))
    for bad in damage(found.name, found.module) if found.after else ():
        counts = [f"{n:,} {kind}" for n, kind in ((bad.nans, "NaN"), (bad.infinities, "infinite")) if n]
        return (
            f"it begins {place}; {bad.name} holds {' and '.join(counts)} of {bad.numbers:,} numbers, the first at"
            f" {bad.first}: get the file again (clearllama verify --tensors looks at every weight)"
        )
    dtype = _dtype(model)
    why = f"it begins {place}; no weight there is NaN or infinite, so the numbers overflow in {dtype}"
    if dtype == "float32":
        return f"{why}: some weights are far too large, as in a file that was damaged or wrongly converted"
    return f"{why}: {FLOAT32}"


def begins(model: Transformer, tokens: Sequence[int]) -> Begins | None:
    """The first layer that is given, or gives, a number that is not finite; None where all of them are finite."""
    me = get_ident()  # other threads may be running the same model
    names = {module: name for name, module in model.named_modules() if not list(module.children())}

    def look(module: nn.Module, given: Any, result: Any) -> None:
        if get_ident() != me:
            return
        for x, after in ((given[0], False), (result, True)):
            if x.is_floating_point() and not bool(torch.isfinite(x).all()):
                raise Begins(names[module], module, after)

    hooks = [module.register_forward_hook(look) for module in names]
    try:
        _pass(model, tokens)
    except Begins as found:
        return found
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _pass(model: Transformer, tokens: Sequence[int]) -> None:
    """What prefill and one step do, layer by layer also where other code is faster: the last token goes in alone."""
    cache = model.new_cache(len(tokens), fixed=False)
    run = partial(Transformer.run, model) if isinstance(model.run, Fused) else model.run
    edges = [*range(0, len(tokens) - 1, CHUNK), len(tokens) - 1, len(tokens)]
    for start, end in pairwise(edges):
        part = torch.tensor([tokens[start:end]], device=cache.device)  # (1, T)
        positions = cache.place(end - start)  # (T,)
        turns = model.rope.rows(positions, len(tokens))
        mask = causal_mask(positions, torch.arange(cache.width, device=cache.device))  # (T, S)
        h = run(part, turns, mask, positions, cache)  # (1, T, C)
        cache.commit()
    model.output(h[:, -1])


def _place(found: Begins, n_layers: int) -> str:
    first, *rest = found.name.split(".")
    if first != "layers":
        if found.after:
            return {"tok_embeddings": "in the embedding", "norm": "in the norm behind the last layer"}.get(
                first, f"in {first}, behind the last layer"
            )
        number, leaf = n_layers, "attention_norm"  # norm, which is given what the last layer gives
    else:
        number, leaf = int(rest[0]), ".".join(rest[1:])
    if found.after:
        part = "attention" if leaf.startswith("attention") else "feed-forward"
        what = f"at the output of {leaf.rpartition('.')[2]}"
    elif leaf == "attention_norm":
        number, part, what = number - 1, "feed-forward", "where its result is added to the hidden state"
    else:
        part, what = BEFORE[leaf]
    return f"in layer {number} (of 0 to {n_layers - 1}), in its {part}, {what}"


def damage(name: str, module: nn.Module) -> Iterator[Damage]:
    """The tensors of a layer that are not finite, by their names in the model."""
    for label, tensor in _numbers(module):
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            nans = int(tensor.isnan().sum())
            first = [int(at[0]) for at in (~finite).nonzero(as_tuple=True)]
            yield Damage(f"{name}.{label}", nans, int((~finite).sum()) - nans, tensor.numel(), first)


def _numbers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Everything in floating point that a layer computes with; of few bits it is the scales."""
    if isinstance(module, TileLinear | TileEmbedding):
        rows, columns = (
            (module.out_features, module.in_features)
            if isinstance(module, TileLinear)
            else (module.num_embeddings, module.embedding_dim)
        )
        blocks = unpack(module.tiles, rows, columns, module.bits, module.group, module.offset)
        yield "weight, in the scales of its integers,", blocks.scale
        if blocks.offset is not None:
            yield "weight, in the offsets of its integers,", blocks.offset
    if isinstance(module, BlockEmbedding):
        yield from _numbers(module._output[0])
        return
    held = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False)), **vars(module)}
    for label, tensor in held.items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            plain = {"_packed": "weight", "scale": "weight, in the scales of its integers,"}
            plain |= {"_scale": plain["scale"], "_scales": plain["scale"]}
            plain |= {"offset": "weight, in the offsets of its integers,"}
            yield plain.get(label, label), tensor.to_dense() if tensor.is_mkldnn else tensor


def _dtype(model: Transformer) -> str:
    return str(model.norm.weight.dtype).removeprefix("torch.")
