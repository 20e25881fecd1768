"""One model on several devices. Each has consecutive layers; the hidden state is copied from device to device.

This serves a model larger than the only GPU (the last layers run on the GPU, the others on the CPU), and
several GPUs in one process. Only one device works at a time, so this saves memory but not time; tensor parallelism
saves both.

The last device, `model.norm.weight.device`, has the norm, the output layer and the logits, and samples.
The keys and values of a layer are on its device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from .. import checks
from ..config import ModelConfig
from ..errors import UsageError
from ..model import Cache, Runner, Transformer
from ..rope import FreqsCis
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

    devices     one device, or several separated by commas: each gets consecutive layers of about equally many bytes
    gpu_layers  number of layers on the GPU. They are the last layers, so that the hidden state is copied to the GPU
                once and never back. The embedding stays with the first layers
    """
    named = devices.split(",") if isinstance(devices, str) else devices
    several = named if isinstance(named, Sequence) else [named]
    picked = [pick_device(name.strip() if isinstance(name, str) else name) for name in several or [""]]
    if gpu_layers is None:
        return spread(config, picked)
    count, cpu = min(checks.integer("gpu_layers", gpu_layers, 0), config.n_layers), torch.device("cpu")
    if len(picked) > 1:
        raise UsageError(f"gpu_layers needs one device, but {len(picked)} were named; leave gpu_layers out")
    if count == 0:
        return spread(config, [cpu])
    if picked[0] == cpu:
        raise UsageError(f"gpu_layers {gpu_layers} requires a GPU, but the device is the CPU; leave gpu_layers out")
    below = cpu if count < config.n_layers else picked[0]
    return Placement(below, (cpu,) * (config.n_layers - count) + (picked[0],) * count, picked[0])


def spread(config: ModelConfig, devices: Sequence[torch.device]) -> Placement:
    """Divide the layers among devices, in order, with similar numbers of bytes, embedding and output layer included."""
    if len({(device.type, device.index or 0) for device in devices}) < len(devices):
        raise UsageError(f"a device is named twice in {','.join(map(str, devices))}; name each once")
    if len(devices) > config.n_layers:
        raise UsageError(f"{len(devices)} devices for {config.n_layers} layers; name at most one device for each layer")
    vocabulary = config.vocab_size * config.dim
    layer = sum(map(math.prod, config.block_shapes.values()))
    load, count = [0] * len(devices), [0] * len(devices)
    load[0] += vocabulary  # the embedding, even a tied one: the output layer may be on another device
    load[-1] += vocabulary
    for _ in range(config.n_layers):  # all layers have the same size, and each is given to the least loaded device
        least = load.index(min(load))
        load[least] += layer
        count[least] += 1
    layers = tuple(device for device, n in zip(devices, count, strict=True) for _ in range(n))
    return Placement(devices[0], layers, devices[-1])


class PlacedRunner(Runner):
    """Runs consecutive layers on each of several devices."""

    def __init__(self, model: Transformer, placement: Placement):
        self.placement = placement
        # Tokens are created where they are sampled, on the last device.
        model.tok_embeddings.register_forward_pre_hook(lambda _, tokens: (tokens[0].to(placement.embedding),))

    def layers(
        self, model: Transformer, h: Tensor, freqs_cis: FreqsCis, mask: Tensor | None, positions: Tensor, cache: Cache
    ) -> Tensor:
        """The result is on the last device; all arguments are on one device, whichever it is."""
        blocks = enumerate(zip(model.layers, self.placement.layers, strict=True))
        for device, group in groupby(blocks, key=lambda item: item[1][1]):
            h, at = h.to(device), positions.to(device)
            rows = freqs_cis.to(device) if isinstance(freqs_cis, Tensor) else tuple(x.to(device) for x in freqs_cis)
            seen = None if mask is None else mask.to(device)
            for i, (block, _) in group:
                h = block(h, rows, seen, at, None if cache is None else cache.layers[i])
        return h.to(self.placement.output)


def describe_devices(model: Transformer) -> str:
    """The devices of a model's layers: 'cpu', or 'cpu (16 layers) and cuda:0 (16 layers)'."""
    devices = [block.attention_norm.weight.device for block in model.layers]
    groups = [(device, len(list(group))) for device, group in groupby(devices)]
    if len(groups) == 1:
        return str(model.norm.weight.device)
    return " and ".join(f"{device} ({count} layer{'s' * (count != 1)})" for device, count in groups)
