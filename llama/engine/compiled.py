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
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attend, causal_mask
from ..cache import KINDS, KVCache, LayerCache, MemoryCheck
from ..errors import UsageError
from ..model import Attention, FeedForward, RMSNorm, Transformer, TransformerBlock
from ..rope import RotaryEmb
from ..system.folders import cache_folder, is_private, load_code
from . import kernels
from .cpu_runner import GATE_UP, QKV, FusedBlock, KernelRunner, has_gradients, unrotated
from .linears import FEW_ROWS, FewRowsLinear, TileLinear
from .watch import ModelWatch

LOG = logging.getLogger(__name__)
Angles = tuple[Tensor, ...]  # cos and sin, the real form of freqs_cis
# (block, h (B, 1, C), freqs_cis, mask, positions, cache of the layer) -> h after the block, (B, 1, C)
Step = Callable[[FusedBlock, Tensor, Angles, Tensor, Tensor, LayerCache], Tensor]
FEWEST_ROWS = FEW_ROWS + 1  # rows of a batch; with fewer rows FewRowsLinear multiplies otherwise: another trace
TRACEABLE = (nn.Linear, FewRowsLinear, TileLinear, RMSNorm, Attend, RotaryEmb)


class CompiledRunner(KernelRunner):
    """Decodes with one compiled step for every layer; prompts and everything else run as in KernelRunner.

    The first time for a shape, compiling takes about twenty seconds; on a CPU, later runs read the library from the
    cache folder. Raises UsageError if the layers can't be traced, or there is no compiler.
    """

    fixed_cache = True

    def __init__(self, model: Transformer, cache_kind: str = "model", check_memory: MemoryCheck | None = None):
        super().__init__(model, cache_kind, check_memory)
        self.watch = ModelWatch(model, "the compiled step")
        for name, module in model.layers[0].named_modules():
            if list(module.children()) and not isinstance(module, TransformerBlock | Attention | FeedForward):
                raise UsageError(f"{name} is wrapped in a {type(module).__name__}, which compiled code would not call")
        if model.rope.form == "complex":
            raise UsageError("compiled code runs the real form of RoPE; load the model with rope='real'")
        if model.norm.weight.device.type == "cuda":
            self.step = inductor_step(self.blocks)
            self.rows_step: Callable[[], Step] = lambda: self.step
        else:
            self.step = library_step(model, self.blocks, cache_kind)
            self.rows_step = functools.cache(lambda: library_step(model, self.blocks, cache_kind, rows=True))

    def run(
        self,
        model: Transformer,
        tokens: Tensor,
        positions: Tensor,
        keys: Tensor | None,
        seq_len: int,
        cache: KVCache | None,
    ) -> Tensor:
        step = None
        one_token = keys is not None and tokens.shape[1] == 1
        if one_token and cache is not None and cache.layers[0].visible is None:
            if len(tokens) == 1 and positions.dim() == 1:
                step = self.step
            elif len(tokens) >= FEWEST_ROWS and positions.dim() == 2:  # a position for each row
                step = self.rows_step()
        if cache is None or keys is None or step is None or not self.unchanged(model) or has_gradients(model):
            return super().run(model, tokens, positions, keys, seq_len, cache)
        with self.threads(len(tokens)):
            h = model.tok_embeddings(tokens).contiguous()  # (B, 1, C)
            freqs_cis: Any = model.rope.freqs_cis(positions, seq_len)  # cos and sin, (1, D/2) or (B, 1, D/2)
            still = unrotated(freqs_cis) if model.config.no_rope_layers else freqs_cis
            mask = causal_mask(positions, keys)  # (1, S) or (B, 1, 1, S)
            for block, layer in zip(self.blocks, cache.layers, strict=True):
                h = step(block, h, freqs_cis if block.rotates else still, mask, positions, layer)  # (B, 1, C)
            return model.norm(h)


# ------------------------------------------------------------------------------------------------------------- CUDA
def inductor_step(blocks: Sequence[FusedBlock]) -> Step:
    """The step on a CUDA device: Inductor compiles it when it is first called, and CUDA graphs launch its kernels.

    It is compiled once for all layers, and again if the cache gets another size. A graph is recorded for each layer and
    each cache, since it contains the addresses of weights, keys and values.
    """
    compiled = torch.compile(TransformerBlock.forward, mode="reduce-overhead")

    def step(
        fused: FusedBlock, h: Tensor, freqs_cis: Angles, mask: Tensor, positions: Tensor, layer: LayerCache
    ) -> Tensor:
        if fused is blocks[0]:
            torch.compiler.cudagraph_mark_step_begin()  # graphs may overwrite what they returned for the last token
        for buffer in layer.buffers:
            torch._dynamo.mark_static_address(buffer)  # otherwise, each graph would copy the cache
        return compiled(fused.block, h, freqs_cis, mask, positions, layer)

    return step


# ------------------------------------------------------------------------------------------- the trace, for a CPU
def _formats(block: nn.Module) -> str:
    linears = [module for module in block.modules() if hasattr(module, "in_features")]
    return str([(linear.extra_repr(), *(x.dtype for x in linear.state_dict().values())) for linear in linears])


class JoinedLayer(nn.Module):
    """One of several layers that are computed together. Only for tracing: the first of them computes all outputs."""

    def __init__(self, linear: TileLinear, shared: dict[str, Tensor], outputs: slice):
        super().__init__()
        self.linear, self.shared, self.outputs = linear, shared, outputs

    def forward(self, x: Tensor) -> Tensor:
        if self.shared.get("x") is not x:
            self.shared.update(x=x, y=self.linear(x))
        return self.shared["y"][..., self.outputs]


def traceable(fused: FusedBlock) -> nn.Module:
    """A copy of the block for the trace: it shares all tensors, and multiplies by joined layers once."""
    traced = _copy(fused.block)
    for where, names, linear in (("attention", QKV, fused.qkv), ("feed_forward", GATE_UP, fused.gate_up)):
        if linear is None:
            continue
        traced._modules[where] = part = _copy(fused.block.get_submodule(where))
        first, shared = 0, dict[str, Tensor]()
        for name in names:
            last = first + int(part.get_submodule(name).out_features)  # type: ignore[arg-type]
            part._modules[name] = JoinedLayer(linear, shared, slice(first, last))
            first = last
    return traced


def _copy(module: nn.Module) -> nn.Module:
    """A module with the same tensors and children, which can be given other children."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


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
        inputs = (h, freqs_cis, mask, positions, self._cache(buffers))
        named = dict(zip(self._names, weights, strict=True))
        # A shared layer occurs three times but is replaced once; tie_weights would restore a traced weight.
        y: Tensor = torch.func.functional_call(self._block[0], named, inputs, tie_weights=False)
        return y


# ----------------------------------------------------------------------------------------------------- the library
def library_step(model: Transformer, blocks: Sequence[FusedBlock], cache_kind: str, rows: bool = False) -> Step:
    """The step on a CPU: a compiled library, read from the cache folder or compiled and stored there.

    rows  for a batch whose rows have their own positions, instead of one text
    """
    if cache_kind == "int8" and any(block.block.attention.wk.bias is not None for block in blocks):
        raise UsageError("compile can't run kv_cache='int8' if keys have biases; omit --compile or --kv-cache int8")
    for name, module in blocks[0].block.named_modules():
        if not list(module.children()) and not isinstance(module, TRACEABLE):
            raise UsageError(
                f"compile (--compile) can't run {name}, a {type(module).__name__}; leave compile (--compile) out"
            )
    if len({_formats(fused.block) for fused in blocks}) > 1:
        raise UsageError(
            "compile (--compile) needs weights of the same formats in all layers, but those of this model differ; leave"
            " compile (--compile) out"
        )
    traced = {fused.block: traceable(fused) for fused in blocks}
    weights = {block: [tensor for _, tensor in tensors(copied)] for block, copied in traced.items()}
    block = traced[next((fused for fused in blocks if fused.rotates), blocks[0]).block]
    package = load_package(model, block, cache_kind, rows)

    def step(
        fused: FusedBlock, h: Tensor, freqs_cis: Angles, mask: Tensor, positions: Tensor, layer: LayerCache
    ) -> Tensor:
        y: Tensor
        (y,) = package.boxed_run([h, *freqs_cis, mask, positions, *layer.buffers, *weights[fused.block]])
        return y

    return step


def load_package(model: Transformer, block: nn.Module, cache_kind: str, rows: bool = False) -> Any:
    """The package with the compiled step for a block. Raises UsageError if it can't be built, stored or loaded."""
    name = fingerprint(model, block, cache_kind) + "-rows" * rows
    library = cache_folder() / "compiled" / f"{name}.pt2"

    def make(path: Path) -> None:
        if shutil.which((kernels.compiler() or "").partition(" ")[0]) is None:
            command = kernels.compiler() or "c++, g++ or clang++"
            raise UsageError(
                f"compile (--compile) requires a C++ compiler, but {command} was not found; install one, set CXX to its"
                " command, or leave compile out"
            )
        LOG.info("clearllama: compiling the decoding step%s; later runs reuse it", " of batches" if rows else "")
        build(model, block, path, cache_kind, rows)

    def load(path: str) -> Any:
        # torch._inductor.aoti_load_package adds a layer that analyses the structure of the arguments at each call.
        return torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)

    os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")  # compares dtype, sizes and strides of every argument
    try:
        return load_code(library, make, load)
    except OSError as error:
        raise UsageError(
            f"the compiled step can't be stored in {library.parent}: {error.strerror or error}; set CLEARLLAMA_CACHE"
            " to a writable folder, or leave compile (--compile) out"
        ) from error
    except RuntimeError as error:
        raise UsageError(
            f"the compiled step can't be loaded here: {first_line(error)}; leave compile (--compile) out"
        ) from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
        raise UsageError(
            f"the model can't be compiled here: {first_line(error)}; leave compile (--compile) out"
        ) from error
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
        str(kernels.pick_form() if kernels.ready() else None),
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads",
        torch.__version__,
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
