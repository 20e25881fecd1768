"""One model on several devices: consecutive layers on each, the hidden state moving on where a device's layers end.

For a model that is larger than the one GPU there is (its last layers run there, the others on the CPU), and for several
GPUs of one process. One device works at a time, so this buys memory and no speed; tensor parallelism buys both.

`Transformer.run` is replaced from outside, as in fused.py. Tokens come in and logits come out on the last device, the
one whose layers are followed by the output layer and by sampling; it is what `model.norm.weight.device` and
`cache.device` name. Keys and values of a layer lie where the layer lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from ..attention import ATTENTION
from ..cache import KVCache
from ..config import ModelConfig
from ..errors import UsageError
from ..model import Transformer, TransformerBlock
from .runtime import pick_device

NO_COMPILING = "compiled code runs on one device; leave --compile out, or --gpu-layers and all devices but one"
Devices = str | torch.device | Sequence[str | torch.device] | None  # "cuda", "cuda:0,cuda:1", [device, ...], None: best


@dataclass(frozen=True)
class Placement:
    """Where the embedding lies, each layer, and the norm with the output layer."""

    embedding: torch.device
    layers: tuple[torch.device, ...]
    output: torch.device

    def of(self, name: str) -> torch.device:
        """The device of a module or a tensor by its name in the model: 'layers.3.attention.wq.weight'."""
        first, *rest = name.split(".")
        if first == "layers":
            return self.layers[int(rest[0])]
        return self.embedding if first == "tok_embeddings" else self.output

    @property
    def single(self) -> bool:
        """Whether all of it is one device."""
        return len({self.embedding, *self.layers, self.output}) == 1


def pick_placement(config: ModelConfig, devices: Devices = None, gpu_layers: int | None = None) -> Placement:
    """Where the parts of a model go.

    devices     one device, or several with a comma between them: each gets consecutive layers, even by bytes
    gpu_layers  so many layers on the GPU and the others on the CPU; 0 is all on the CPU, n_layers or more all on the
                GPU. It is the last ones, for the output layer and sampling come behind them: the hidden state goes up
                once and never down. The embedding, of which a token reads one row, stays with the first layers.

    Raises UsageError where a device is not there, is named twice, or there is no GPU for gpu_layers.
    """
    named = devices.split(",") if isinstance(devices, str) else devices
    several = list(named) if isinstance(named, Sequence) else [named]
    picked = [pick_device(name.strip() if isinstance(name, str) else name) for name in several]
    if gpu_layers is None:
        return spread(config, picked)
    if isinstance(gpu_layers, bool) or not isinstance(gpu_layers, int) or gpu_layers < 0:
        raise UsageError(f"gpu_layers must be a whole number of at least 0, got {gpu_layers!r}")
    if len(picked) > 1:
        raise UsageError(f"gpu_layers goes with one device, and {len(picked)} were named; leave one of the two out")
    cpu, count = torch.device("cpu"), min(gpu_layers, config.n_layers)
    if count == 0:
        return spread(config, [cpu])
    if picked[0].type == "cpu":
        best = pick_device(None)
        why = "the device asked for is the CPU" if best.type != "cpu" else "there is none here"
        raise UsageError(
            f"gpu_layers {gpu_layers} wants a GPU, and {why} (available: {_available(best)}); use gpu_layers 0, or"
            " leave it out"
        )
    below = cpu if count < config.n_layers else picked[0]
    return Placement(below, (cpu,) * (config.n_layers - count) + (picked[0],) * count, picked[0])


def _available(best: torch.device) -> str:
    return "cpu" if best.type == "cpu" else f"{best}, cpu"


def spread(config: ModelConfig, devices: Sequence[torch.device]) -> Placement:
    """Layers over devices in order, as even by bytes as whole layers allow; the vocabulary's matrices count too."""
    numbered = [(device.type, device.index or 0) for device in devices]
    if twice := next((device for device in devices if numbered.count((device.type, device.index or 0)) > 1), None):
        raise UsageError(f"the device {str(twice)!r} is named twice; name each once")
    if len(devices) > config.n_layers:
        raise UsageError(f"{len(devices)} devices for {config.n_layers} layers; name at most one device for each layer")
    vocabulary = config.vocab_size * config.dim
    layer = (config.n_params - vocabulary * (1 if config.tie_embeddings else 2)) / config.n_layers
    held, count = [0.0] * len(devices), [0] * len(devices)
    held[0] += vocabulary  # the embedding; if tied, too, where the output layer lies elsewhere
    held[-1] += vocabulary
    for _ in range(config.n_layers):  # layers are alike: each goes where least is
        least = held.index(min(held))
        held[least] += layer
        count[least] += 1
    layers = tuple(device for device, n in zip(devices, count, strict=True) for _ in range(n))
    return Placement(devices[0], layers, devices[-1])


def place_(model: Transformer, placement: Placement) -> Transformer:
    """Move a model's parts to their devices and let it run there, in place; returns the model.

    Tied embeddings that part become two tensors. Raises UsageError for layers that are packed for the CPU.
    """
    tied = getattr(model.tok_embeddings, "weight", None) is getattr(model.output, "weight", None)
    if tied and placement.embedding != placement.output:
        model.tok_embeddings.weight = nn.Parameter(model.output.weight.detach().clone(), requires_grad=False)
    for name, module in model.named_children():
        if name != "layers":
            module.to(placement.of(name))
    blocks: list[TransformerBlock] = list(model.layers)  # type: ignore[arg-type]
    for block, device in zip(blocks, placement.layers, strict=True):
        block.to(device)
        if device.type != "cpu" and block.attention.attend is ATTENTION["kernel"]:  # that one is the CPU's
            block.attention.attend = ATTENTION["sdpa"]
    return run_placed(model, placement)


def run_placed(model: Transformer, placement: Placement) -> Transformer:
    """Let a model whose parts lie on their devices already run there, in place; returns the model."""
    if not placement.single:
        model.run = Placed(model, placement)  # type: ignore[method-assign]
        model.new_cache = partial(new_cache, model, placement)  # type: ignore[method-assign]
    return model


class Placed:
    """`Transformer.run` over several devices."""

    def __init__(self, model: Transformer, placement: Placement):
        self.model, self.placement = model, placement

    def __call__(
        self, tokens: Tensor, turns: tuple[Tensor, ...], mask: Tensor | None, positions: Tensor, cache: KVCache | None
    ) -> Tensor:
        """What `Transformer.run` gives, on the last device; the arguments come on any one device."""
        model, placement = self.model, self.placement
        h = model.tok_embeddings(tokens.to(placement.embedding))  # (B, T, C)
        blocks = enumerate(zip(model.layers, placement.layers, strict=True))
        for device, here in groupby(blocks, key=lambda item: item[1][1]):
            h, where = h.to(device), positions.to(device)
            rows = tuple(part.to(device) for part in turns)
            seen = None if mask is None else mask.to(device)
            for i, (block, _) in here:
                h = block(h, rows, seen, where, None if cache is None else cache.layers[i])
        return model.norm(h.to(placement.output))


def new_cache(
    model: Transformer,
    placement: Placement,
    max_len: int | None = None,
    batch: int = 1,
    fixed: bool | None = None,
) -> KVCache:
    """`Transformer.new_cache` with each layer's keys and values on the layer's device."""
    config = model.config
    return KVCache(
        config.n_layers,
        config.n_kv_heads,
        config.head_dim,
        model.max_seq_len if max_len is None else max_len,
        batch=batch,
        dtype=model.norm.weight.dtype,
        device=placement.layers,
        fixed=model.fixed_cache if fixed is None else fixed,
        kind=model.cache_kind,
        check_memory=model.check_memory,
    )


def told(model: Transformer) -> str:
    """Where a model lies, for people: 'cpu', or 'cpu (layers 0 to 15) and cuda:0 (16 to 31)'."""
    if not isinstance(model.run, Placed):
        return str(model.norm.weight.device)
    parts, first = [], 0
    for device, layers in groupby(model.run.placement.layers):
        last = first + len(list(layers)) - 1
        parts.append(f"{device} ({'layers ' if not first else ''}{first} to {last})")
        first = last + 1
    return " and ".join(parts)
