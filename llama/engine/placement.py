"""One model on several devices: consecutive layers on each; the hidden state is copied from device to device.

This serves a model that is larger than the only GPU (its last layers run there, the others on the CPU), and several
GPUs in one process. One device works at a time, so this saves memory but not time; tensor parallelism saves both.

Tokens come in and logits come out on the last device, which also has the norm, the output layer and sampling; it is
`model.norm.weight.device` and `cache.device`. The keys and values of a layer are on the layer's device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..attention import Attend, causal_mask, reference
from ..cache import KVCache, MemoryCheck
from ..config import ModelConfig
from ..errors import UsageError
from ..model import Runner, Transformer
from .cpu_attention import pick_attention
from .runtime import pick_device

Devices = str | torch.device | Sequence[str | torch.device] | None  # "cuda", "cuda:0,cuda:1", [device, ...], None: best


@dataclass(frozen=True)
class Placement:
    """The devices of the embedding, of each layer, and of the norm and the output layer."""

    embedding: torch.device
    layers: tuple[torch.device, ...]
    output: torch.device

    def device_of(self, name: str) -> torch.device:
        """The device of a module or a tensor, given its name in the model: 'layers.3.attention.wq.weight'."""
        first, *rest = name.split(".")
        if first == "layers":
            return self.layers[int(rest[0])]
        return self.embedding if first == "tok_embeddings" else self.output

    @property
    def single(self) -> bool:
        """Whether all parts are on one device."""
        return len({self.embedding, *self.layers, self.output}) == 1


def pick_placement(config: ModelConfig, devices: Devices = None, gpu_layers: int | None = None) -> Placement:
    """Choose the devices of a model's parts.

    devices     one device, or several separated by commas: each gets consecutive layers, about equally many bytes
    gpu_layers  number of layers on the GPU; the others are on the CPU. 0: all on the CPU; n_layers or more: all on the
                GPU. The last layers go to the GPU, since the output layer and sampling follow them: the hidden state
                is copied to the GPU once and never back. The embedding, of which a token reads one row, stays with the
                first layers.

    Raises UsageError if a device does not exist or is named twice, or if there is no GPU for gpu_layers.
    """
    named = devices.split(",") if isinstance(devices, str) else devices
    several = list(named) if isinstance(named, Sequence) else [named]
    picked = [pick_device(name.strip() if isinstance(name, str) else name) for name in several]
    if gpu_layers is None:
        return spread(config, picked)
    count = min(checks.integer("gpu_layers", gpu_layers, 0), config.n_layers)
    if len(picked) > 1:
        raise UsageError(
            f"gpu_layers works with one device, but {len(picked)} were named; name one, or leave gpu_layers out"
        )
    cpu = torch.device("cpu")
    if count == 0:
        return spread(config, [cpu])
    if picked[0].type == "cpu":
        best = pick_device(None)
        cause = "the chosen device is the CPU" if best.type != "cpu" else "this machine has none"
        raise UsageError(
            f"gpu_layers {gpu_layers} requires a GPU, but {cause} (available: {_available(best)}); leave it out"
        )
    below = cpu if count < config.n_layers else picked[0]
    return Placement(below, (cpu,) * (config.n_layers - count) + (picked[0],) * count, picked[0])


def _available(best: torch.device) -> str:
    return "cpu" if best.type == "cpu" else f"{best}, cpu"


def spread(config: ModelConfig, devices: Sequence[torch.device]) -> Placement:
    """Divide the layers among devices, in order and by bytes; the embedding and the output layer count too."""
    numbered = [(device.type, device.index or 0) for device in devices]
    if twice := next((device for device in devices if numbered.count((device.type, device.index or 0)) > 1), None):
        raise UsageError(f"the device {str(twice)!r} is named twice; name each once")
    if len(devices) > config.n_layers:
        raise UsageError(f"{len(devices)} devices for {config.n_layers} layers; name at most one device for each layer")
    vocabulary = config.vocab_size * config.dim
    layer = (config.n_params - vocabulary * (1 if config.tie_embeddings else 2)) / config.n_layers
    load, count = [0.0] * len(devices), [0] * len(devices)
    load[0] += vocabulary  # the embedding; a tied one too, if the output layer is on another device
    load[-1] += vocabulary
    for _ in range(config.n_layers):  # all layers have the same size: each goes to the least loaded device
        least = load.index(min(load))
        load[least] += layer
        count[least] += 1
    layers = tuple(device for device, n in zip(devices, count, strict=True) for _ in range(n))
    return Placement(devices[0], layers, devices[-1])


def place(model: Transformer, placement: Placement) -> Runner:
    """Move the parts of a model to their devices, in place; return the runner to set.

    Tied embeddings on two devices become two tensors. Raises UsageError for layers that are packed for the CPU.
    """
    tied = getattr(model.tok_embeddings, "weight", None) is getattr(model.output, "weight", None)
    if tied and placement.embedding != placement.output:
        model.tok_embeddings.weight = nn.Parameter(model.output.weight.detach().clone(), requires_grad=False)
    for name, module in model.named_children():
        if name != "layers":
            module.to(placement.device_of(name))
    blocks: list[Any] = list(model.layers)
    for i, (block, device) in enumerate(zip(blocks, placement.layers, strict=True)):
        block.to(device)
        if device.type != "cpu" and block.attention.attend.function is not reference:
            model.set_submodule(f"layers.{i}.attention.attend", Attend(pick_attention(device)))
    if placement.single:
        return model.runner
    return PlacedRunner(placement, model.runner.cache_kind, model.runner.check_memory)


class PlacedRunner(Runner):
    """Runs consecutive layers on each of several devices."""

    def __init__(self, placement: Placement, cache_kind: str = "model", check_memory: MemoryCheck | None = None):
        super().__init__(cache_kind, check_memory)
        self.placement = placement

    def run(
        self,
        model: Transformer,
        tokens: Tensor,
        positions: Tensor,
        keys: Tensor | None,
        seq_len: int,
        cache: KVCache | None,
    ) -> Tensor:
        """The result is on the last device; the arguments may be on any one device."""
        placement = self.placement
        h = model.tok_embeddings(tokens.to(placement.embedding))  # (B, T, C)
        freqs_cis = model.rope.freqs_cis(positions, seq_len)  # (T, D/2) or (B, T, D/2)
        mask = None if keys is None else causal_mask(positions, keys)  # (T, S) or (B, 1, T, S)
        blocks = enumerate(zip(model.layers, placement.layers, strict=True))
        for device, group in groupby(blocks, key=lambda item: item[1][1]):
            h, at = h.to(device), positions.to(device)
            rows = freqs_cis.to(device) if isinstance(freqs_cis, Tensor) else tuple(x.to(device) for x in freqs_cis)
            seen = None if mask is None else mask.to(device)
            for i, (block, _) in group:
                h = block(h, rows, seen, at, None if cache is None else cache.layers[i])
        return model.norm(h.to(placement.output))


def describe_devices(model: Transformer) -> str:
    """The devices of a model: 'cpu', or 'cpu (layers 0 to 15) and cuda:0 (16 to 31)'."""
    blocks: list[Any] = list(model.layers)
    devices: list[torch.device] = [block.attention_norm.weight.device for block in blocks]
    groups = [(device, len(list(layers))) for device, layers in groupby(devices)]
    if len(groups) == 1:
        return str(model.norm.weight.device)
    parts, first = [], 0
    for device, count in groups:
        parts.append(f"{device} ({'layers ' if not first else ''}{first} to {first + count - 1})")
        first += count
    return " and ".join(parts)
