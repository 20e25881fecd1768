"""From a path or a name to a model and its tokenizer: resolve options, check memory, fill weights, attach the runner.

(The module is called loader and not load, because `llama.load` is the function.)
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import checks
from .attention import Attend
from .cache import FIRST_SLOTS, KINDS
from .checkpoint import Checkpoint, open_checkpoint, read_tokenizer
from .checkpoint.adapters import Adapters, with_adapters
from .checkpoint.base import FLOATS
from .config import ModelConfig
from .engine import cpu_runner
from .engine.compiled import CompiledRunner
from .engine.cpu_attention import pick_attention
from .engine.cpu_runner import KernelRunner
from .engine.linears import SkipInit, check_quantized, make_embedding, make_linear
from .engine.parallel import World, share
from .engine.placement import Devices, PlacedRunner, Placement, pick_placement
from .engine.quantized_weight import QuantizedWeight
from .engine.runtime import no_cudnn_attention, pick_dtype
from .engine.sharding import ShardedCheckpoint
from .errors import CheckpointError, UsageError
from .hub import resolve
from .model import Runner, Transformer
from .quant.schemes import pick_scheme
from .rope import FORMS
from .rope_scaling import reach, with_rope
from .spelling import unknown_option
from .system import memory
from .system.cores import default_threads
from .tokenizer import Tokenizer
from .weights import (
    Storage,
    check_tensors,
    dequantization_warning,
    memory_footprint,
    read_float,
    read_weight,
    requantization_warning,
    sample_hash,
)

if TYPE_CHECKING:
    from .text import Llama

LOG = logging.getLogger(__name__)
SMALL, LARGE = 2**22, 2**26  # entries; weights between them are read by several threads


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded.

    device        "cpu", "cuda", "cuda:1", ...; None: the best one; "cuda:0,cuda:1" divides the layers evenly
    dtype         "float32", "bfloat16", "float16"; None: the fastest that the device computes in
    quantize      quantize the linear layers: "int8", "int4" or another scheme of `clearllama quantize --list`
    compile       compile the decoding step (engine/compiled.py); takes some seconds the first time
    rope          form of the rotation: "complex", "real", "half", "elementwise" or "matrix" (rope.py)
    max_seq_len   context in tokens; None: the checkpoint's
    rope_scaling  a scaling that replaces the checkpoint's, to extend its context: {"rope_type": "yarn", "factor": 4.0};
                  {"rope_type": "default"} removes the checkpoint's
    rope_theta    a base of the frequencies that replaces the checkpoint's
    kv_cache      "model" stores keys and values in the model's dtype, "int8" in 8 bits, for long contexts
    gpu_layers    number of layers on the GPU, the last ones; the others are on the CPU (engine/placement.py)
    world         the processes that share the model (engine.parallel.join); this process loads its part
    tokens        expected number of tokens, prompt and answer together, for the memory check
    check_memory  compare the required memory with the free memory, before a weight is read and before a cache grows
    fast          True: the fastest linear layers and attention of the device; a file's quantized weights stay quantized
                  unless dtype is given as float32 or float16. False: nn.Linear with dequantized weights. The default is
                  True in `load` and False in `load_model`
    """

    device: Devices = None
    dtype: str | torch.dtype | None = None
    quantize: str | None = None
    compile: bool = False
    rope: str = "complex"
    max_seq_len: int | None = None
    rope_scaling: Mapping[str, Any] | None = None
    rope_theta: float | None = None
    kv_cache: str = "model"
    gpu_layers: int | None = None
    world: World | None = None
    tokens: int | None = None
    check_memory: bool = True
    fast: bool = False

    def __post_init__(self) -> None:
        checks.choice("form of RoPE", self.rope, FORMS)
        checks.choice("kind of KV cache", self.kv_cache, KINDS)
        checks.boolean("compile", self.compile)
        if self.max_seq_len is not None:
            checks.integer("max_seq_len", self.max_seq_len)
        if self.quantize is not None:
            pick_scheme(self.quantize)
        if self.world is not None and (self.compile or self.gpu_layers is not None):
            name = "compile (--compile)" if self.compile else "gpu_layers (--gpu-layers)"
            raise UsageError(f"{name} works in one process only; leave it out, or run the model in one process")


def load_options(options: Mapping[str, Any], *others: str) -> LoadOptions:
    """The options as LoadOptions. others: further arguments of the caller. Raises UsageError for an unknown name."""
    fields = [field.name for field in dataclasses.fields(LoadOptions)]
    if unknown := [name for name in options if name not in fields]:
        raise UsageError(unknown_option(unknown[0], ["path_or_name", *fields, *others]))
    return LoadOptions(**options)


# 11 parameters: the public API, which has one for each choice of a user
def load(
    path_or_name: str | os.PathLike[str] | None = None,
    device: Devices = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    compile: bool = False,
    rope: str = "complex",
    max_seq_len: int | None = None,
    *,
    adapters: Adapters = (),
    tokenizer: str | os.PathLike[str] | None = None,
    tokens: int | Callable[[Tokenizer], int] | None = None,
    quiet: bool = False,
    **options: Any,
) -> Llama:
    """Load a model with its tokenizer, ready to generate.

    path_or_name  a folder in Meta's or Hugging Face's format, a folder that contains a single one, a .gguf file, the
                  name of a downloadable model (`clearllama pull`), or ORG/NAME[:QUANT] of the Hugging Face hub, which
                  is downloaded on first use; None: the environment variable CLEARLLAMA_MODEL, else the default model
    adapters      LoRA adapters to merge into the weights: a PEFT folder or a GGUF adapter as a path, "PATH:SCALE" or
                  (path, scale), or a list of them
    tokenizer     a file, or a folder with one, to use in place of the checkpoint's own tokenizer
    tokens        as in `LoadOptions`, or a function that gets the tokenizer and returns this number
    quiet         print nothing on stderr while a model is downloaded
    options       the other fields of `LoadOptions`, which describes all of them

    Warnings, for example about the folder that was chosen, are logged; `warnings` of the result contains them too.
    Raises CheckpointError if the file can't be run, UsageError for a bad argument, MemoryLimitError if memory is short.
    """
    from .text import Llama

    own = {"device": device, "dtype": dtype, "quantize": quantize, "compile": compile, "rope": rope}
    settings = load_options(
        {**own, "max_seq_len": max_seq_len, "fast": True, **options}, "adapters", "tokenizer", "quiet"
    )
    checkpoint = open_model(path_or_name, adapters, tokenizer, quiet)
    vocabulary = checkpoint.tokenizer()
    count = tokens(vocabulary) if callable(tokens) else tokens
    plan = resolve_options(checkpoint, dataclasses.replace(settings, tokens=count))
    model = build_plan(plan)
    chat_format = checkpoint.chat_format(vocabulary) if checkpoint.chat_template is None else None
    warnings = _warn(checkpoint, plan)
    return Llama(
        model,
        vocabulary,
        checkpoint.chat_template,
        chat_format=chat_format,
        sampling=checkpoint.sampling,
        adapters=checkpoint.adapters,
        warnings=warnings,
    )


def load_model(
    path_or_name: str | os.PathLike[str] | None = None,
    device: Devices = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    rope: str = "complex",
    max_seq_len: int | None = None,
    *,
    adapters: Adapters = (),
    **options: Any,
) -> Transformer:
    """Load the model alone; no tokenizer is needed. Linear layers are nn.Linear, unless quantize or fast=True is given.

    Arguments as in `load` and `LoadOptions`.
    """
    own = {"device": device, "dtype": dtype, "quantize": quantize, "rope": rope, "max_seq_len": max_seq_len}
    settings = load_options(own | options, "adapters")
    checkpoint = open_model(path_or_name, adapters)
    plan = resolve_options(checkpoint, settings)
    model = build_plan(plan)
    _warn(checkpoint, plan)
    return model


def _warn(checkpoint: Checkpoint, plan: Plan) -> list[str]:
    """Log what a user should know about a checkpoint that was loaded, and return it."""
    scheme = plan.options.quantize
    again = requantization_warning(checkpoint, pick_scheme(scheme)) if scheme else plan.dequantized
    warnings = [*checkpoint.warnings, *again]
    for warning in warnings:
        LOG.warning("clearllama: warning: %s", warning)
    return warnings


def open_model(
    path_or_name: str | os.PathLike[str] | None,
    adapters: Adapters = (),
    tokenizer: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> Checkpoint:
    """The checkpoint at a path or with a name, with adapters merged; its weights are not read. Arguments: `load`."""
    return with_adapters(open_checkpoint(resolve(path_or_name, quiet), tokenizer), adapters)


def load_tokenizer(path_or_name: str | os.PathLike[str] | None = None) -> Tokenizer:
    """Load the tokenizer of a checkpoint, or a single tokenizer.model or tokenizer.json. Weights are not read."""
    return read_tokenizer(resolve(path_or_name))


def build(
    checkpoint: Checkpoint, device: Devices = None, dtype: str | torch.dtype | None = None, **options: Any
) -> Transformer:
    """`build_model` with the fields of `LoadOptions` as keyword arguments."""
    return build_model(checkpoint, LoadOptions(device, dtype, **options))


def build_model(checkpoint: Checkpoint, options: LoadOptions) -> Transformer:
    """A model filled with a checkpoint's weights.

    A weight that needs no change stays in the mapped file; one that is quantized is read piece by piece. Raises
    CheckpointError if a tensor is missing, unexpected or of another shape.
    """
    return build_plan(resolve_options(checkpoint, options))


def build_plan(plan: Plan) -> Transformer:
    """`build_model` with options that are resolved."""
    if plan.options.check_memory:
        check_memory(plan)
    model = fill(plan)
    return attach_runner(model, plan)


# -------------------------------------------------------------------------------------------------- 1. the options
@dataclass(frozen=True)
class Plan:
    """The options of a run, resolved against a checkpoint and this machine.

    config      the complete model's
    sizes       the config of the part that this process loads; equal to `config` unless processes share the model
    checkpoint  the tensors of that part
    """

    options: LoadOptions
    config: ModelConfig
    sizes: ModelConfig
    checkpoint: Checkpoint
    placement: Placement
    storage: Storage
    rope: str
    max_seq_len: int
    dequantized: list[str]  # a warning, if a GPU dequantizes weights that could stay packed

    @property
    def shares_embedding(self) -> bool:
        """Whether embedding and output share one tensor: the weights are tied and on the same device."""
        return self.config.tie_embeddings and self.placement.embedding == self.placement.output


def resolve_options(checkpoint: Checkpoint, options: LoadOptions) -> Plan:
    """Check the tensors and the options, and choose devices, dtype and storage. Almost only headers are read."""
    config = with_rope(checkpoint.config, options.rope_scaling, options.rope_theta)
    check_merge(checkpoint, options)
    check_tensors(checkpoint)  # first, so that nothing below allocates memory by the sizes in a damaged file
    world, device, sizes = options.world, options.device, config
    if world is not None:
        device, sizes = world.device, world.rank.config(config)
    placement = pick_placement(sizes, device, options.gpu_layers)
    if options.compile and not placement.single:
        raise UsageError(
            "compiled code runs on one device; leave out compile (--compile), or leave out gpu_layers (--gpu-layers)"
            " and name one device (--device)"
        )
    dtype = pick_dtype(options.dtype, placement.output)
    if dtype == torch.float16 and placement.output.type == "cpu" and options.fast:
        LOG.warning("clearllama: warning: float16 is slow on a CPU, and dequantizes 4/8-bit weights; use bfloat16")
    scheme = None if options.quantize is None else pick_scheme(options.quantize)
    if options.quantize is not None:
        for device in {placement.output, *placement.layers}:
            check_quantized(options.quantize, device)
    # The compiler has no complex numbers; the real form is the same arithmetic.
    rope = "real" if options.compile and options.rope == "complex" else options.rope
    keep = options.fast and (options.dtype in (None, "auto") or dtype == torch.bfloat16)
    storage = Storage(dtype, scheme, keep, FORMS[rope].layout)
    if world is not None:
        world.fingerprint.append(f"weights with sample hash {sample_hash(checkpoint)}{checkpoint.adapters_hash}")
        sharded = ShardedCheckpoint(checkpoint, world.rank)
        if scheme is not None or (keep and placement.output.type in ("cpu", "cuda")):
            sharded.check_groups(None if scheme is None else scheme.format.group)
        checkpoint = sharded
    context = reach(sizes) if options.max_seq_len is None else options.max_seq_len
    if sizes.sliding_window is not None and context > sizes.sliding_window:
        raise UsageError(
            f"a context of {context} tokens exceeds the model's sliding window of {sizes.sliding_window}; windows are"
            f" not implemented, so use at most {sizes.sliding_window} (--max-seq-len), or run it in vLLM"
        )
    dequantized = dequantization_warning(checkpoint, placement.device_of, storage) if keep else []
    return Plan(options, config, sizes, checkpoint, placement, storage, rope, context, dequantized)


def check_merge(checkpoint: Checkpoint, options: LoadOptions) -> None:
    """Raise UsageError if adapters change quantized weights, and no option says what the merged weights become.

    Quantizing them again in the same way would lose most of an adapter: it changes weights by less than one step.
    """
    kinds = {checkpoint.stored(name) for name in checkpoint.shapes if checkpoint.changed(name)} - {*FLOATS.values()}
    if kinds and options.quantize is None and options.dtype in (None, "auto"):
        raise UsageError(
            f"{checkpoint.path} is quantized ({', '.join(sorted(kinds))}), and quantizing again would lose most of the"
            f" adapter; use the unquantized model, or dtype='bfloat16' (--dtype bfloat16) to dequantize"
            " the weights it changes"
        )


# --------------------------------------------------------------------------------------------------- 2. the memory
def check_memory(plan: Plan) -> None:
    """Raise MemoryLimitError if weights, cache and activations do not fit into the free memory of a device."""
    options, placement, dtype = plan.options, plan.placement, plan.storage.dtype
    ranks = 1 if options.world is None else options.world.on_this_host
    for device in dict.fromkeys((*placement.layers, placement.output)):
        names = [name for name in plan.checkpoint.shapes if placement.device_of(name) == device]
        weights = memory_footprint(plan.checkpoint, names, device, plan.storage)
        part = dataclasses.replace(plan.sizes, n_layers=placement.layers.count(device) or 1, no_rope_layers=())
        tokens = min(FIRST_SLOTS if options.tokens is None else options.tokens, plan.max_seq_len)
        cache = memory.cache_bytes(part, tokens, dtype.itemsize, options.kv_cache)
        activations = memory.activation_bytes(part, tokens, dtype.itemsize, options.kv_cache)
        path, sharing = str(plan.checkpoint.path), ranks if device.type == "cpu" else 1
        memory.check(path, weights, cache, activations, device, sharing)


# -------------------------------------------------------------------------------------------------- 3. the weights
def fill(plan: Plan) -> Transformer:
    """Build the model on the meta device and replace its layers one by one with filled ones."""
    with torch.device("meta"), SkipInit():
        model = Transformer(plan.sizes, plan.rope, max_seq_len=plan.max_seq_len).requires_grad_(False).eval()
    if plan.checkpoint.adapters:  # part of the model's identity, for saved sessions
        identity = torch.frombuffer(bytearray.fromhex(plan.checkpoint.adapters_hash), dtype=torch.uint8)
        model.register_buffer("adapters", identity, persistent=False)
    if plan.options.world is not None and plan.options.world.rank.stage:  # only the first stage has these two
        model.set_submodule("tok_embeddings", nn.Identity())
        model.set_submodule("output", nn.Identity())
    for i, device in enumerate(plan.placement.layers):
        attend = Attend(pick_attention(device, plain=not plan.options.fast))
        model.set_submodule(f"layers.{i}.attention.attend", attend)
    layers = {
        name: child for name, child in model.named_modules() if next(child.parameters(recurse=False), None) is not None
    }
    if plan.shares_embedding:  # filled together with the output
        layers.pop("tok_embeddings", None)
    # Dequantization uses numpy, which releases the GIL, so several threads use several cores. For a small weight,
    # passing the GIL takes longer than that saves. At most one large weight is in memory twice.
    entries = {name: math.prod(tuple(layer.weight.shape)) for name, layer in layers.items()}
    shared = [name for name in layers if SMALL <= entries[name] <= LARGE]
    for name in layers:
        if name not in shared:
            fill_layer(model, name, layers[name], plan)
    with ThreadPoolExecutor(max_workers=min(4, default_threads())) as pool:
        for _ in pool.map(lambda name: fill_layer(model, name, layers[name], plan), shared):
            pass
    return model


def fill_layer(model: Transformer, name: str, layer: nn.Module, plan: Plan) -> None:
    """Read the weights of one layer and put the layer that computes with them in its place."""
    device = plan.placement.device_of(name)
    source = "tok_embeddings" if plan.config.tie_embeddings and name == "output" else name

    def tensor(kind: str) -> Tensor:
        return read_float(plan.checkpoint, f"{source}.{kind}", device, plan.storage)

    if isinstance(layer, nn.Linear | nn.Embedding):
        weight = read_weight(plan.checkpoint, f"{source}.weight", device, plan.storage)
        bias = tensor("bias") if getattr(layer, "bias", None) is not None else None
        try:
            filled = make_linear(weight, device, bias, plain=not plan.options.fast)
        except CheckpointError as error:  # the weight can't be quantized
            if str(plan.checkpoint.path) in str(error):
                raise
            where = f"{plan.checkpoint.path}: {plan.checkpoint.file_name(f'{source}.weight')}"
            raise CheckpointError(f"{where}: {error}") from error
        if isinstance(weight, QuantizedWeight):
            plan.checkpoint.release(f"{source}.weight")
        if isinstance(layer, nn.Linear):
            model.set_submodule(name, filled)
        if isinstance(layer, nn.Embedding) or (name == "output" and plan.shares_embedding):
            model.set_submodule("tok_embeddings", make_embedding(filled, plan.storage.dtype))
    else:
        layer.weight = nn.Parameter(tensor("weight"), requires_grad=False)


# --------------------------------------------------------------------------------------------------- 4. the runner
def attach_runner(model: Transformer, plan: Plan) -> Transformer:
    """Set the runner that executes the model as the options ask; returns the model."""
    options, device = plan.options, plan.placement.output
    if "cuda" in {part.type for part in (*plan.placement.layers, device)}:
        no_cudnn_attention()
    settings: dict[str, Any] = {
        "cache_kind": options.kv_cache,
        "check_memory": memory.check_growth if options.check_memory else None,
    }
    if options.world is not None:
        model.runner = share(model, plan.config, options.world, **settings)
    elif not plan.placement.single:
        model.runner = PlacedRunner(plan.placement, **settings)
    elif options.compile:
        model.runner = CompiledRunner(model, **settings)
    elif options.fast and cpu_runner.supports(model):
        mapped = plan.checkpoint.tiles("layers.0.attention.wq.weight") is not None  # joining would copy
        model.runner = KernelRunner(model, **settings, join=not mapped)
    else:
        model.runner = Runner(**settings)
    return model
