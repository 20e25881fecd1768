"""Where NaN or infinity begins: a second pass over the same tokens, after the logits were not finite.

The first pass checks one number of the logits, so that it costs nothing. This pass checks the input and the output of
every layer and ends at the first number that is not finite.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import dtype_name
from ..generate import prefill
from ..model import Runner, Transformer
from .linears import QuantizedEmbedding, TileLinear
from .placement import PlacedRunner

FLOAT32 = "try dtype='float32' (--dtype float32)"


class Begins(Exception):
    """Raised where NaN or infinity begins. args: the layer's name, the layer, True: in its output, False: its input."""


@torch.inference_mode()
def locate(model: Transformer, tokens: Sequence[int]) -> str:
    """Half a sentence: where the numbers stop being finite on these tokens, the cause, and the remedy.

    The text is part of another error's message, so a failure here becomes text as well, not an Exception.
    """
    dtype = dtype_name(model.norm.weight.dtype)
    if model.world is not None:  # in a second pass, the processes could stop at different layers
        return f"the weights hold NaN or infinity, or the numbers overflow in {dtype}: {FLOAT32}"
    try:
        found = begins(model, tokens)
    except Exception as error:  # a hook may raise any
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        return f"the layer where non-finite numbers begin could not be found ({reason}); {FLOAT32}"
    if found is None:
        return (
            "a second pass over the same tokens was finite, so either the numbers barely overflow, or the memory or"
            f" the device is faulty: {FLOAT32}, then try another device"
        )
    layer, module, in_output = found.args
    where = f"non-finite numbers begin at the {'output' if in_output else 'input'} of {layer}"
    for name, tensor in weights(module) if in_output else ():
        bad = (~torch.isfinite(tensor)).nonzero()  # (n, axes)
        if len(bad):
            return (
                f"{where}; NaN or infinity stands in {len(bad):,} of {tensor.numel():,} numbers of"
                f" {layer}.{name}, first at {bad[0].tolist()}: the file is damaged (clearllama verify compares"
                " checksums)"
            )
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return f"{where}, where all weights are finite: check the tensors that the model's hooks or patches return"
    if dtype == "float32":
        return f"{where}; some weights are far too large, as in a damaged or wrongly converted file"
    return f"{where}, where all weights are finite, so the numbers overflow in {dtype}: {FLOAT32}"


def begins(model: Transformer, tokens: Sequence[int]) -> Begins | None:
    """The first layer with an input or output that is not finite; None if all of them are finite."""
    me = get_ident()  # other threads may run the same model
    names = {module: name for name, module in model.named_modules() if not list(module.children())}

    def check(module: nn.Module, inputs: Any, output: Any) -> None:
        if get_ident() != me:
            return
        outputs = output if isinstance(output, tuple) else (output,)
        for tensors, in_output in ((inputs[:1], False), (outputs, True)):
            if any(x.is_floating_point() and not bool(torch.isfinite(x).all()) for x in tensors):
                raise Begins(names[module], module, in_output)

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
    model = copy.copy(model)  # the same modules
    if not isinstance(model.runner, PlacedRunner):
        model.runner = Runner()  # other runners call no hooks
    cache = model.new_cache(len(tokens))
    prefill(model, tokens[:-1], cache) if len(tokens) > 1 else None
    model(torch.tensor([tokens[-1:]], device=cache.device), cache=cache)


def weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A layer's floating-point tensors; of a quantized layer its scales and offsets."""
    if isinstance(module, QuantizedEmbedding):
        module = module.output
    if isinstance(module, TileLinear):
        groups = module.groups
        yield "scale", groups.scale
        if groups.offset is not None:
            yield "offset", groups.offset
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if tensor.is_floating_point():
            yield name, tensor
