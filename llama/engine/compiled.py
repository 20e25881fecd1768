"""One decoding step of a block, compiled once and used for every layer.

torch.export traces the block for one token with its weights as arguments, Inductor compiles the trace to a library, and
every layer calls the library with its own weights. So compiling 80 layers takes as long as compiling one, another
context length needs no new compilation, and the library, stored in the cache folder, loads in milliseconds.

Batches (generation/batch.py) have their own library, for any number of rows; it is compiled for the first batch.
Prompts run as in cpu_runner.py: their time goes into matrix products, which compiling does not make faster.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import logging
import platform
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attend, causal_mask
from ..cache import KINDS, KVCache, LayerCache, MemoryCheck
from ..errors import UsageError
from ..model import RMSNorm, Transformer, TransformerBlock
from ..rope import RotaryEmb
from ..system.folders import cache_folder, is_private, load_code
from . import kernels
from .cpu_runner import GATE_UP, QKV, FusedBlock, KernelRunner, has_gradients
from .hooks import HookWatch
from .linears import FEW_ROWS, BlockLinear, FewRowsLinear, TileLinear
from .no_rope import unrotated

LOG = logging.getLogger(__name__)
Step = Callable[[list[Tensor]], Tensor]  # takes the arguments of Trace as one flat list
FEWEST_ROWS = FEW_ROWS + 1  # rows of a batch; with fewer rows FewRowsLinear multiplies otherwise: another trace
TRACEABLE = (nn.Linear, FewRowsLinear, TileLinear, BlockLinear, RMSNorm, Attend, RotaryEmb)


class CompiledRunner(KernelRunner):
    """Decodes with one compiled step for every layer; prompts and everything else run on the kernels.

    The first time for a shape, compiling takes about twenty seconds; later the library is read from the cache folder.
    Raises UsageError if the layers can't be traced, or there is no compiler.
    """

    fixed_cache = True

    def __init__(self, model: Transformer, cache_kind: str = "model", check_memory: MemoryCheck | None = None):
        super().__init__(model, cache_kind, check_memory)
        self.hooked = HookWatch("the compiled step", rounds=True)
        if model.rope.form == "complex":
            raise UsageError("compiled code runs the real form of RoPE; load the model with rope='real'")
        blocks: list[TransformerBlock] = list(model.layers)  # type: ignore[arg-type]
        for name, module in blocks[0].named_modules():
            if not list(module.children()) and not isinstance(module, TRACEABLE):
                raise UsageError(
                    f"compile (--compile) requires the C++ kernels, which are not available here ({name} is a"
                    f" {type(module).__name__}); install a C++ compiler, or leave compile (--compile) out"
                )
        shells = {fused.block: shell(fused) for fused in self.blocks}
        self.weights: dict[nn.Module, list[Tensor]] = {
            block: [tensor for _, tensor in tensors(traced)] for block, traced in shells.items()
        }
        self.tensors = [  # every weight, since the compiled step is called with these
            (kept, *item)
            for layer in (*model.layers.modules(), model.norm)
            for kept in (layer._parameters, layer._buffers)
            for item in kept.items()
        ]
        first = shells[next((block for block in blocks if block.attention.apply_rotary_emb.rotates), blocks[0])]
        self.step = load_step(model, first, cache_kind)
        self.rows_step = functools.cache(functools.partial(load_step, model, first, cache_kind, rows=True))

    def run(
        self,
        model: Transformer,
        tokens: Tensor,
        positions: Tensor,
        keys: Tensor | None,
        seq_len: int,
        cache: KVCache | None,
    ) -> Tensor:
        step, whole = None, self.unchanged(model) and not self.hooked(model) and not has_gradients(model)
        one_token = keys is not None and tokens.shape[1] == 1
        if whole and one_token and cache is not None and cache.layers[0].visible is None:
            if len(tokens) == 1 and positions.dim() == 1:
                step = self.step
            elif len(tokens) >= FEWEST_ROWS and positions.dim() == 2:  # a position for each row
                step = self.rows_step()
        if cache is None or keys is None or step is None:
            return super().run(model, tokens, positions, keys, seq_len, cache)
        with kernels.own_threads():
            h = model.tok_embeddings(tokens)  # (B, 1, C)
            freqs_cis = model.rope.freqs_cis(positions, seq_len)  # cos and sin, (1, D/2) or (B, 1, D/2)
            still = unrotated(freqs_cis) if model.config.no_rope_layers else freqs_cis
            mask = causal_mask(positions, keys)  # (1, S) or (B, 1, 1, S)
            for fused, layer in zip(self.blocks, cache.layers, strict=True):
                angles = freqs_cis if fused.rotates else still
                h = step([h, *angles, mask, positions, *layer.buffers, *self.weights[fused.block]])  # (B, 1, C)
            return model.norm(h)


# ------------------------------------------------------------------------------------------------------ the trace
class Shared(nn.Module):
    """A layer that combines several others. Called by each of them with the same x, it computes once."""

    def __init__(self, linear: TileLinear):
        super().__init__()
        self.linear = linear
        self._seen: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._seen is None or self._seen[0] is not x:
            self._seen = x, self.linear(x)
        return self._seen[1]


class Part(nn.Module):
    """Some of the outputs of a shared layer. Only for tracing, which runs each call once."""

    def __init__(self, shared: Shared, first: int, last: int):
        super().__init__()
        self.shared, self.first, self.last = shared, first, last

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shared(x)[..., self.first : self.last]
        return y


def shell(fused: FusedBlock) -> nn.Module:
    """The block to trace: the same layers, but those that are joined become parts of one layer."""
    traced = _twin(fused.block)
    for where, names, joined in (("attention", QKV, fused.qkv), ("feed_forward", GATE_UP, fused.gate_up)):
        if joined is None:
            continue
        inner = fused.block.get_submodule(where)
        shared, twin, first = Shared(joined), _twin(inner), 0
        for name in names:
            layer: Any = inner.get_submodule(name)
            last = first + layer.out_features
            twin._modules[name] = Part(shared, first, last)
            first = last
        traced._modules[where] = twin
    return traced


def _twin(module: nn.Module) -> nn.Module:
    """A copy of a module that shares its tensors but can have other children."""
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
        self._block = (block,)  # in a tuple, so that its weights are arguments and not this module's
        self._names = [name for name, _ in tensors(block)]

    def forward(
        self,
        h: Tensor,
        freqs_cis: tuple[Tensor, ...],
        mask: Tensor,
        positions: Tensor,
        buffers: list[Tensor],
        weights: list[Tensor],
    ) -> Tensor:
        inputs = (h, freqs_cis, mask, positions, self._cache(*buffers))
        named = dict(zip(self._names, weights, strict=True))
        # A shared layer occurs three times but is replaced once; tie_weights would restore a traced weight.
        y: Tensor = torch.func.functional_call(self._block[0], named, inputs, tie_weights=False)
        return y


# ----------------------------------------------------------------------------------------------------- the library
def load_step(model: Transformer, block: nn.Module, cache_kind: str, rows: bool = False) -> Step:
    """The compiled step for a model's blocks, read from the cache folder or compiled and stored there.

    rows  for a batch whose rows have their own positions, instead of one text
    """
    name = fingerprint(model, block, cache_kind) + "-rows" * rows
    library = cache_folder() / "compiled" / f"{name}.pt2"

    def make(path: Path) -> None:
        command = kernels.compiler()
        if model.norm.weight.device.type == "cpu" and (command is None or shutil.which(command.split()[0]) is None):
            cause = "none was found (c++, g++, clang++)" if command is None else f"{command} (CXX) does not run"
            raise UsageError(
                f"compile (--compile) requires a C++ compiler, but {cause}; install one, or leave compile out"
            )
        name_of_step = "the decoding step of batches" if rows else "the decoding step"
        LOG.info("clearllama: compiling %s; later runs reuse it", name_of_step)
        build(model, block, path, cache_kind, rows)

    def load(path: str) -> Any:
        # torch._inductor.aoti_load_package adds a layer that analyses the structure of the arguments at each call.
        return torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)

    try:
        package = load_code(library, make, load)
    except OSError as error:
        raise UsageError(
            f"the compiled step can't be stored in {library.parent}: {error.strerror or error}; set CLEARLLAMA_CACHE"
            " to a writable folder, or leave compile (--compile) out"
        ) from error
    except RuntimeError as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"the compiled step can't be loaded here: {first[0]}; leave compile (--compile) out"
        ) from error

    def step(arguments: list[Tensor]) -> Tensor:
        (y,) = package.boxed_run(arguments)
        return y

    return step


def build(model: Transformer, block: nn.Module, path: Path, cache_kind: str, rows: bool = False) -> None:
    """Trace a block for one token, or for one in each row of a batch, and compile the trace into a package."""
    config, like = model.config, model.norm.weight
    slots, batch = 128, 2 * FEWEST_ROWS if rows else 1  # arbitrary: the trace does not depend on them
    positions = torch.zeros((batch, 1) if rows else 1, dtype=torch.long, device=like.device)  # (B, T) or (T,)
    h = torch.zeros(batch, 1, config.dim, dtype=like.dtype, device=like.device)  # (B, T, C)
    freqs_cis = model.rope.freqs_cis(positions, 1)
    mask = causal_mask(positions, torch.arange(slots, device=like.device))  # (B, 1, T, S) or (T, S)
    kind = KINDS[cache_kind]
    buffers = kind.empty(
        (batch, config.n_kv_heads, slots, config.head_dim), like.dtype, like.device
    ).buffers  # (B, KV, S, ..)
    weights = [tensor for _, tensor in tensors(block)]
    S = torch.export.Dim("S", min=2, max=2**30)
    B = torch.export.Dim("B", min=FEWEST_ROWS, max=2**20)
    by_row = {0: B} if rows else None
    shapes = (
        by_row,
        (by_row,) * len(freqs_cis),
        {0: B, 3: S} if rows else {1: S},
        by_row,
        [{0: B, 2: S} if rows else {2: S}] * len(buffers),
        [None] * len(weights),
    )
    level = logging.getLogger("torch").level
    try:
        logging.getLogger("torch").setLevel(logging.ERROR)
        with _inductor_cache(path.parent), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = (h, freqs_cis, mask, positions, buffers, weights)
            trace = torch.export.export(Trace(block, kind), arguments, dynamic_shapes=shapes, strict=False)
            torch._inductor.aoti_compile_and_package(trace, package_path=str(path))
    except Exception as error:  # Inductor wraps the compiler's errors in types of its own
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"the model can't be compiled here: {first[0]}; leave compile (--compile) out") from error
    finally:
        logging.getLogger("torch").setLevel(level)


def _inductor_cache(work: Path) -> contextlib.AbstractContextManager[None]:
    """A context in which Inductor compiles in its own folder, or in a temporary one if other users could write there.

    Inductor's own folder is in /tmp and has a known name, so another user may have made it first.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # importing Inductor takes a second
    from torch._inductor.utils import fresh_cache

    return contextlib.nullcontext() if is_private(Path(cache_dir())) else fresh_cache(dir=str(work))


def fingerprint(model: Transformer, block: nn.Module, cache_kind: str) -> str:
    """A name for everything that the library depends on: the sources, the shapes, the machine and torch."""
    package = Path(__file__).parents[1]
    # All sources that a trace may read; more than needed costs a compilation, fewer would keep a stale library.
    sources = [*package.glob("*.py"), *package.glob("engine/*.py"), *package.glob("quant/*.py")]
    parts = [
        kernels.sources(),
        *(hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(sources)),
        *(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors(block)),
        str(model.config),
        model.rope.form,
        cache_kind,
        str(model.norm.weight.device.type),
        str(kernels.pick_form() if kernels.ready() else None),
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads",
        torch.__version__,
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
