"""One decoding step of a block, compiled once and used for every layer.

torch.export traces the block for one token with its weights as arguments, Inductor turns the trace into a library, and
every layer calls that with its own weights. So compiling takes as long for 80 layers as for one, nothing is ever
compiled again for another context length, and the library, kept in the cache folder, loads in milliseconds.

Batches (batch.py) have a library of their own, for any number of rows; it is made when the first batch comes. Prompts
run as before: there the time goes into matrix products, which compiling does not make faster.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import platform
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ..attention import causal_mask
from ..cache import KINDS, LayerCache
from ..errors import UsageError
from ..model import RMSNorm, Transformer, TransformerBlock
from ..quant.tiles import TILE
from ..system.folders import cache_folder, keep, kept
from ..system.temporary import own_temporary
from . import kernels
from .fused import fuse
from .linears import BlockLinear, TileLinear
from .placement import NO_COMPILING, Placed
from .runtime import FEW_ROWS, FewRowsLinear

LOG = logging.getLogger(__name__)
Step = Callable[[list[Tensor]], Tensor]  # from the arguments of Trace, one after the other
# Layers that read the same x: their packed weights are put one behind the other and multiplied at once.
JOINED = (("attention", ("wq", "wk", "wv")), ("feed_forward", ("w_gate", "w_up")))
FEWEST_ROWS = FEW_ROWS + 1  # of a batch; up to there FewRowsLinear multiplies otherwise, which would be another trace


def compile_(model: Transformer) -> Transformer:
    """Compile the decoding step of a model's blocks, in place; returns the model.

    The first time for a shape this takes some twenty seconds; later the library is in the cache folder. Raises
    UsageError where the layers can't be traced, or there is no compiler.
    """
    if model.rope.form == "complex":
        raise UsageError("compiled code runs the real form of RoPE; load the model with rope='real'")
    if isinstance(model.run, Placed):
        raise UsageError(NO_COMPILING)
    if model.norm.weight.device.type == "cuda":
        return fuse(model)
    blocks: list[TransformerBlock] = list(model.layers)  # type: ignore[arg-type]
    traceable = (nn.Linear, FewRowsLinear, TileLinear, BlockLinear, RMSNorm)
    for name, module in blocks[0].named_modules():
        if not list(module.children()) and not isinstance(module, traceable):
            raise UsageError(
                f"--compile wants the C++ kernels, which can't be had here ({name} is a {type(module).__name__});"
                " install a C++ compiler, or leave --compile out"
            )
    shells = [shell(block) for block in blocks]
    step = load_step(model, shells[0])
    rows_step = functools.cache(lambda: load_step(model, shells[0], rows=True))
    for block, traced in zip(blocks, shells, strict=True):
        weights = [tensor for _, tensor in tensors(traced)]
        block.forward = functools.partial(forward, block, step, rows_step, weights)  # type: ignore[method-assign]
    model.fixed_cache = True
    return model


def forward(
    block: TransformerBlock,
    step: Step,
    rows_step: Callable[[], Step],
    weights: list[Tensor],
    h: Tensor,
    turns: tuple[Tensor, ...],
    mask: Tensor | None,
    positions: Tensor,
    cache: LayerCache | None,
) -> Tensor:
    """What a compiled block does: the steps for one token behind a fixed cache, its own code for all else."""
    if cache is not None and cache.end is None and mask is not None and h.shape[1] == 1:
        if h.shape[0] == 1 and mask.dim() == 2:
            return step([h, *turns, mask, positions, *cache.buffers, *weights])
        if h.shape[0] >= FEWEST_ROWS and mask.dim() == 4:  # a position for each row
            return rows_step()([h, *turns, mask, positions, *cache.buffers, *weights])
    return type(block).forward(block, h, turns, mask, positions, cache)


# ------------------------------------------------------------------------------------------------------ the trace
class Shared(nn.Module):
    """A layer that several others are parts of; asked by each of them with the same x, it answers from memory."""

    def __init__(self, linear: TileLinear):
        super().__init__()
        self.linear = linear
        self._seen: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._seen is None or self._seen[0] is not x:
            self._seen = x, self.linear(x)
        return self._seen[1]


class Part(nn.Module):
    """Some of the outputs of a shared layer. For a trace only, which runs each call once."""

    def __init__(self, shared: Shared, first: int, last: int):
        super().__init__()
        self.shared, self.first, self.last = shared, first, last

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shared(x)[..., self.first : self.last]
        return y


def shell(block: TransformerBlock) -> nn.Module:
    """The block as it is traced: the same layers, those of JOINED as parts of one, whose weight then holds theirs."""
    traced = _twin(block)
    for where, names in JOINED:
        inner = block.get_submodule(where)
        layers = [layer for name in names if isinstance(layer := inner.get_submodule(name), TileLinear)]
        kinds = {(layer.bits, layer.group, layer.offset) for layer in layers}
        whole = all(layer.bias is None and layer.out_features % TILE == 0 for layer in layers)
        if len(layers) < len(names) or len(kinds) > 1 or not whole:
            continue
        tiles = torch.cat([layer.tiles for layer in layers])
        rows = sum(layer.out_features for layer in layers)
        shared = Shared(TileLinear(tiles, (rows, layers[0].in_features), *kinds.pop(), None))
        twin, first = _twin(inner), 0
        for name, layer in zip(names, layers, strict=True):
            last = first + layer.out_features
            layer.tiles = tiles[first // TILE : last // TILE]  # a view, so that nothing is held twice
            twin._modules[name] = Part(shared, first, last)
            first = last
        traced._modules[where] = twin
    return traced


def _twin(module: nn.Module) -> nn.Module:
    """A module that shares everything with another, but can be given other children."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Every weight of a module, by name, in order."""
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if buffer is not None]
    return [*module.named_parameters(), *buffers]


class Trace(nn.Module):
    """A block as a function of its weights."""

    def __init__(self, block: nn.Module, cache: type[LayerCache]):
        super().__init__()
        self._cache = cache
        self._block = (block,)  # in a tuple: its weights are arguments and not this module's
        self._names = [name for name, _ in tensors(block)]

    def forward(
        self,
        h: Tensor,
        turns: tuple[Tensor, ...],
        mask: Tensor,
        positions: Tensor,
        buffers: list[Tensor],
        weights: list[Tensor],
    ) -> Tensor:
        inputs = (h, turns, mask, positions, self._cache(*buffers))
        named = dict(zip(self._names, weights, strict=True))
        # A shared layer is met three times but swapped once; tie_weights would put a traced weight back in its place.
        y: Tensor = torch.func.functional_call(self._block[0], named, inputs, tie_weights=False)
        return y


# ----------------------------------------------------------------------------------------------------- the library
def load_step(model: Transformer, block: nn.Module, rows: bool = False) -> Step:
    """The compiled step for a model's blocks, from the cache folder or made now and put there.

    rows  for a batch whose rows have positions of their own, and not for one text
    """
    folder, name = cache_folder() / "compiled", fingerprint(model, block) + "-rows" * rows
    target = kept(folder, name, ".pt2")
    if target is None:
        command = kernels.compiler()
        if model.norm.weight.device.type == "cpu" and (command is None or shutil.which(command.split()[0]) is None):
            why = "there is none (c++, g++, clang++)" if command is None else f"{command} (CXX) does not run"
            raise UsageError(f"--compile wants a C++ compiler, and {why}; install one, or leave --compile out")
        what = "the decoding step of batches" if rows else "the decoding step"
        LOG.info("clearllama: compiling %s; it is kept for the next time", what)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with own_temporary(folder, ".build") as work:
                made = work / "step.pt2"
                build(model, block, made, rows)
                target = keep(made, folder, name)
        except OSError as error:
            raise UsageError(
                f"the compiled step can't be kept in {folder}: {error.strerror or error}; set CLEARLLAMA_CACHE to a"
                " folder that can be written, or leave --compile out"
            ) from error
    # torch._inductor.aoti_load_package is this and a layer that reads the arguments' structure anew at each call.
    package = torch._C._aoti.AOTIModelPackageLoader(str(target), "model", False, 1, -1)

    def step(arguments: list[Tensor]) -> Tensor:
        (y,) = package.boxed_run(arguments)
        return y

    return step


def build(model: Transformer, block: nn.Module, path: Path, rows: bool = False) -> None:
    """Trace a block for one token, or one in each row of a batch, and compile the trace into a package."""
    config, like = model.config, model.norm.weight
    slots, batch = 128, 2 * FEWEST_ROWS if rows else 1  # any numbers: they are no part of the trace
    positions = torch.zeros((batch, 1) if rows else 1, dtype=torch.long, device=like.device)  # (B, T) or (T,)
    h = torch.zeros(batch, 1, config.dim, dtype=like.dtype, device=like.device)  # (B, T, C)
    turns = model.rope.rows(positions, 1)
    mask = causal_mask(positions, torch.arange(slots, device=like.device))  # (B, 1, T, S) or (T, S)
    kind = KINDS[model.cache_kind]
    buffers = kind.empty(
        (batch, config.n_kv_heads, slots, config.head_dim), like.dtype, like.device
    ).buffers  # (B, KV, S, ..)
    weights = [tensor for _, tensor in tensors(block)]
    S = torch.export.Dim("S", min=2, max=2**30)
    B = torch.export.Dim("B", min=FEWEST_ROWS, max=2**20)
    by_row = {0: B} if rows else None
    shapes = (
        by_row,
        (by_row,) * len(turns),
        {0: B, 3: S} if rows else {1: S},
        by_row,
        [{0: B, 2: S} if rows else {2: S}] * len(buffers),
        [None] * len(weights),
    )
    level = logging.getLogger("torch").level
    try:
        logging.getLogger("torch").setLevel(logging.ERROR)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = (h, turns, mask, positions, buffers, weights)
            trace = torch.export.export(Trace(block, kind), arguments, dynamic_shapes=shapes, strict=False)
            torch._inductor.aoti_compile_and_package(trace, package_path=str(path))
    except Exception as error:  # Inductor wraps whatever the compiler said in types of its own
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"the model can't be compiled here: {first[0]}; leave --compile out") from error
    finally:
        logging.getLogger("torch").setLevel(level)


def fingerprint(model: Transformer, block: nn.Module) -> str:
    """What the library depends on, as a name: the sources, the shapes, the machine and torch."""
    package = Path(__file__).parents[1]
    sources = [*package.glob("*.py"), *package.glob("engine/*.py"), *package.glob("quant/*.py")]  # all that is traced
    told = [
        kernels.sources(),
        *(hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(sources)),
        *(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors(block)),
        str(model.config),
        model.rope.form,
        model.cache_kind,
        str(model.norm.weight.device.type),
        str(kernels.pick_form() if kernels.ready() else None),
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads",
        torch.__version__,
    ]
    return hashlib.sha256("\0".join(told).encode()).hexdigest()[:24]
