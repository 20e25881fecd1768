"""Compute without the rounding of a fast model: the output layer in float32, or a copy of the model in float32.

Products with packed weights round their inputs to 8 bits, and a model in bfloat16 rounds every result.

Letters: C model dim, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import Attend
from ..engine.cpu_attention import pick_attention
from ..engine.linears import FewRowsLinear, Int4Linear, SkipInit, TileLinear
from ..model import Transformer
from ..system.memory import free_memory

LARGEST = 10**9  # a model with this many parameters or more is not copied
ROWS = 2**14  # rows of a weight that are converted to float32 at once
# Bounds for how far a probability can be from that of the model in float32. Measured on 136 tokens of SmolLM2-135M and
# Qwen2.5-Coder-0.5B with a float32 output layer, the largest difference was .134 with packed weights, .046 in bfloat16
PACKED, HALF = 0.15, 0.06


def float32_logits(model: Transformer, h: Tensor) -> Tensor:
    """The logits of normalized states, computed in float32 for an output layer in any dtype: (.., C) -> (.., V)."""
    output, h = model.output, h.float()
    widens = isinstance(output, FewRowsLinear) and output.widens
    if isinstance(output, nn.Linear | FewRowsLinear) and output.weight.dtype != torch.float32 and not widens:
        return torch.cat([F.linear(h, rows.float()) for rows in output.weight.split(ROWS)], dim=-1)
    return output(h)


def rounding(model: Transformer) -> float:
    """About how far a probability can be from that of the model in float32; 0 if the model computes in float32."""
    if model.cache_kind == "int8" or any(isinstance(layer, TileLinear | Int4Linear) for layer in model.modules()):
        return PACKED
    return 0 if model.norm.weight.dtype == torch.float32 else HALF


def can_copy(model: Transformer) -> bool:
    """Whether `float32_copy` is possible: the model is small, it is on one device, and the free memory holds a copy."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if model.world is not None or len(devices) > 1 or model.config.n_params >= LARGEST:
        return False
    room = free_memory(devices.pop())
    return room is None or room.bytes > 6 * model.config.n_params  # 4 bytes for each, and memory to dequantize


def float32_copy(model: Transformer) -> Transformer:
    """A copy of the model with all weights in float32 or dequantized to it. Tensors already in float32 are shared."""
    with torch.device("meta"), SkipInit():
        copy = Transformer(model.config, model.rope.form, max_seq_len=model.max_seq_len).requires_grad_(False).eval()
    state = {}
    for name in copy.state_dict():
        owner, _, leaf = name.rpartition(".")
        state[name] = getattr(model.get_submodule(owner), leaf).float()
    if model.config.tie_embeddings:
        state["output.weight"] = state["tok_embeddings.weight"]
    copy.load_state_dict(state, assign=True)
    if model.config.tie_embeddings:
        copy.output.weight = copy.tok_embeddings.weight
    for block in copy.layers:
        block.attention.attend = Attend(pick_attention(copy.norm.weight.device))
    copy.rope, copy.check_memory = model.rope, model.check_memory
    return copy
