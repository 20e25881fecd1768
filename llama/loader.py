"""From a path or a name to a model and its tokenizer: resolve options, check memory, fill weights, attach the runner.

(The module is called loader and not load, because `llama.load` is the function.)
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import checks
from .attention import Attend
from .cache import FIRST_SLOTS, KINDS
from .checkpoint import Checkpoint, open_checkpoint, read_tokenizer
from .checkpoint.adapters import Adapters, with_adapters
from .checkpoint.base import EMBEDDING
from .checkpoint.weight import DTYPES
from .config import ModelConfig
from .engine import cpu_runner
from .engine.compiled import FixedCaches, GraphRunner
from .engine.cpu_attention import pick_attention
from .engine.cpu_runner import KernelRunner
from .engine.linears import SkipInit, check_quantized, make_embedding, make_linear
from .engine.packing import to_floats
from .engine.parallel import World
from .engine.placement import Devices, PlacedRunner, Placement, pick_placement
from .engine.runtime import pick_dtype
from .errors import CheckpointError, ConfigError, DamagedError, UsageError
from .generate import Progress, prompt_chunk
from .hub import resolve
from .model import Transformer
from .quant.groups import GroupFormat
from .quant.schemes import pick_scheme
from .rope import FORMS
from .rope_scaling import PARAMETERS, STRETCHING, inverse_frequencies, kind_of, reach, rotated_entries, trained_length
from .system import memory
from .system.cores import default_threads
from .tokenizer import Tokenizer
from .weights import WeightPlan, check_tensors, plan_weights, storage_warnings

if TYPE_CHECKING:
    from .text import Llama

PathOrName = str | os.PathLike[str] | None
LOG = logging.getLogger(__name__)
SMALL, LARGE = 2**22, 2**27  # bytes in the model: several threads read the weights between these sizes


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded.

    device        "cpu", "cuda", "cuda:1", ...; None: the best one; "cuda:0,cuda:1" divides the layers evenly
    dtype         "float32", "bfloat16", "float16"; None: the one in which the device computes fastest
    quantize      quantize the linear layers: "int8", "int4" or another scheme of `clearllama quantize --list`
    compile       on CUDA, compile the decoding step (engine/compiled.py); takes some seconds the first time
    rope          form of the rotation: "complex", "real" or "half" (rope.py)
    max_seq_len   context in tokens; None: the checkpoint's
    rope_scaling  a scaling that replaces the checkpoint's, to extend its context: {"rope_type": "yarn", "factor": 4.0};
                  {"rope_type": "default"} removes the checkpoint's
    rope_theta    a base of the rotary frequencies, in place of the checkpoint's
    kv_cache      "model" stores keys and values in the model's dtype, "int8" in 8 bits, for long contexts
    gpu_layers    run this many layers, the last ones, on the GPU and the others on the CPU (engine/placement.py)
    world         the processes that share the model (engine.parallel.join); this process loads its part
    tokens        expected number of tokens, prompt and answer together, for the memory check
    check_memory  compare the required memory with the free memory, before a weight is read and before a cache grows
    fast          True: use the device's fastest linear layers and attention; a file's quantized weights stay quantized
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
        for name in ("compile", "check_memory", "fast"):
            checks.boolean(name, getattr(self, name))
        for name in ("max_seq_len", "tokens"):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name))
        if self.quantize is not None:
            pick_scheme(self.quantize)


# The public API has a parameter for each choice of a user, 10 in all.
def load(
    path_or_name: PathOrName = None,
    device: Devices = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    compile: bool = False,
    rope: str = "complex",
    max_seq_len: int | None = None,
    *,
    adapters: Adapters = (),
    tokenizer: str | os.PathLike[str] | None = None,
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
    quiet         print nothing on stderr while a model is downloaded
    options       the other fields of `LoadOptions`, which describes all of them

    Warnings, for example about the folder that was chosen, are logged; `warnings` of the result contains them too.
    Raises CheckpointError if the file can't be run, UsageError for a bad argument, MemoryLimitError if memory is short.
    """
    checks.known_options(options, LoadOptions, "llama.loader.LoadOptions")
    settings = LoadOptions(device, dtype, quantize, compile, rope, max_seq_len, **{"fast": True, **options})
    llm, plan = prepare(open_model(path_or_name, adapters, tokenizer, quiet), settings)
    build_plan(plan, llm.model)
    return llm


def prepare(checkpoint: Checkpoint, options: LoadOptions) -> tuple[Llama, Plan]:
    """A Llama without weights, for checks that need no weights, and the plan by which `build_plan` reads them."""
    from .text import Llama

    vocabulary, plan = checkpoint.tokenizer(), make_plan(checkpoint, options)
    llm = Llama(
        empty_model(plan),
        vocabulary,
        checkpoint.chat_template,
        chat_format=checkpoint.chat_format(vocabulary) if checkpoint.chat_template is None else None,
        sampling=checkpoint.sampling,
        adapters=checkpoint.adapters,
        warnings=plan.warnings,
    )
    return llm, plan


def load_model(
    path_or_name: PathOrName = None,
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
    checks.known_options(options, LoadOptions, "llama.loader.LoadOptions")
    settings = LoadOptions(device, dtype, quantize, rope=rope, max_seq_len=max_seq_len, **options)
    plan = make_plan(open_model(path_or_name, adapters), settings)
    return build_plan(plan, empty_model(plan))


def open_model(
    path_or_name: PathOrName,
    adapters: Adapters = (),
    tokenizer: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> Checkpoint:
    """The checkpoint at a path or with a name, with adapters merged. Weights are not read. Arguments as in `load`."""
    checks.instance("adapters", adapters, str | os.PathLike | Sequence, "a path, (path, scale) or a list of them")
    checks.instance("tokenizer", tokenizer, str | os.PathLike | None, "a path")
    return with_adapters(open_checkpoint(resolve(path_or_name, quiet), tokenizer), adapters)


def load_tokenizer(path_or_name: PathOrName = None) -> Tokenizer:
    """Load the tokenizer of a checkpoint, or a single tokenizer.model or tokenizer.json. Weights are not read."""
    return read_tokenizer(resolve(path_or_name))


def build(
    checkpoint: Checkpoint, device: Devices = None, dtype: str | torch.dtype | None = None, **options: Any
) -> Transformer:
    """A model filled with a checkpoint's weights; options as in `LoadOptions`.

    A weight that needs no change stays in the mapped file; one that has to be quantized is read in pieces. Raises
    CheckpointError if a tensor is missing, unexpected or of another shape.
    """
    plan = make_plan(checkpoint, LoadOptions(device, dtype, **options))
    return build_plan(plan, empty_model(plan))


def build_plan(plan: Plan, model: Transformer, progress: Progress | None = None) -> Transformer:
    """Execute a plan: check the memory, fill the empty model, attach its runner, log the warnings.

    progress  called at the start and after each layer: progress(bytes of the weights so far, bytes of all weights)
    """
    if plan.options.check_memory:
        check_memory(plan)
    fill(model, plan, progress)
    attach_runner(model, plan)
    for warning in plan.warnings:
        LOG.warning("clearllama: warning: %s", warning)
    return model


# ----------------------------------------------------------------------------------------------------- 1. the plan
@dataclass(frozen=True)
class Plan:
    """The options of a run, resolved against a checkpoint and this machine, and how each weight is stored.

    If several processes share the model, config and checkpoint describe this process's part of it.
    """

    options: LoadOptions
    config: ModelConfig
    checkpoint: Checkpoint
    placement: Placement
    weights: Mapping[str, WeightPlan]
    dtype: torch.dtype  # of float weights and activations
    rope: str
    max_seq_len: int
    warnings: list[str]  # what a user should know


def make_plan(checkpoint: Checkpoint, options: LoadOptions) -> Plan:
    """Check tensors and options, and choose devices, dtype and formats. Reads headers only."""
    check_merge(checkpoint, options)
    check_tensors(checkpoint)  # first, so that nothing below allocates memory by the sizes in a damaged file
    if options.world is not None:
        checkpoint = options.world.slice(checkpoint)
    config = with_rope(checkpoint.config, options.rope_scaling, options.rope_theta)
    placement = pick_placement(config, options.device, options.gpu_layers)
    if options.compile and not placement.single:
        raise UsageError("compile (--compile) runs on one device; leave out gpu_layers and name one device (--device)")
    dtype = pick_dtype(options.dtype, placement.output)
    scheme = None
    if options.quantize is not None:
        scheme = pick_scheme(options.quantize)
        for device in {placement.output, *placement.layers}:
            check_quantized(options.quantize, device)
    context = reach(config) if options.max_seq_len is None else options.max_seq_len
    if config.sliding_window is not None and context > config.sliding_window:
        raise UsageError(
            f"a context of {context} tokens needs the model's sliding window or scaling of queries, which are not"
            f" implemented; use at most {config.sliding_window} tokens (--max-seq-len), or run the model in vLLM"
        )
    keep = options.fast and (options.dtype in (None, "auto") or dtype == torch.bfloat16)
    compiled = options.compile and placement.output.type == "cuda"
    # The compiler does not support complex numbers. The real form computes the same.
    rope = "real" if compiled and options.rope == "complex" else options.rope
    weights = plan_weights(checkpoint, placement.device_of, dtype, scheme, options.fast, keep, FORMS[rope].layout)
    warnings = list(checkpoint.warnings)
    if dtype == torch.float16 and placement.output.type == "cpu" and options.fast:
        warnings.append("float16 is slow on a CPU; use dtype='bfloat16' (--dtype bfloat16)")
    if scheme is not None or options.fast:
        warnings += storage_warnings(weights, dtype)
    if options.compile and not compiled:
        warnings.append("only a CUDA device has a step to compile; compile (--compile) changes nothing here")
    return Plan(options, config, checkpoint, placement, weights, dtype, rope, context, warnings)


def with_rope(config: ModelConfig, scaling: Mapping[str, Any] | None = None, theta: float | None = None) -> ModelConfig:
    """The configuration with another scaling or base (None: no change). rope_type "default" removes the scaling.

    A new scaling applies to the unscaled frequencies, so the context becomes the length those were trained for (the
    replaced scaling's original_max_position_embeddings, if it has one). scaling may contain a rope_theta, as files of
    transformers 5 do. Raises UsageError for bad values, and for parameters that the kind of scaling does not accept.
    """
    changes: dict[str, Any] = {}
    try:
        if scaling is not None:
            if not isinstance(scaling, Mapping) or not {"rope_type", "type"} & scaling.keys():
                raise ConfigError(f"rope scaling {checks.shown(scaling)} has no rope_type, such as 'yarn'")
            given = {key: value for key, value in scaling.items() if value is not None}
            if rotated_entries(config.head_dim, config.rope_scaling) < config.head_dim:
                raise ConfigError("a model that rotates only a part of each head runs only with its own rope scaling")
            kind, spelling = kind_of(given), "type" if "rope_type" not in given else "rope_type"
            theta = given.pop("rope_theta", None) if theta is None else theta
            if unknown := given.keys() - {spelling, *PARAMETERS[kind]}:  # unlike in a file, a typo is an error
                accepted = ", ".join((spelling, *PARAMETERS[kind]))
                raise ConfigError(f"rope scaling {kind} does not accept {min(unknown)!r:.80}; it accepts {accepted}")
            if kind in STRETCHING and "factor" not in given:
                raise ConfigError(f"rope scaling {kind} needs a factor (--rope-factor): it multiplies the context")
            if kind == "llama3":  # the constants of Meta's apply_scaling
                given = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | given
            changes["rope_scaling"] = None if kind == "default" else given
            changes["max_seq_len"] = min(int(trained_length(config)), config.max_seq_len)
        if theta is not None:
            changes["rope_theta"] = theta
        changed = dataclasses.replace(config, **changes)
        length = changed.max_seq_len
        for end in (None, length):  # longrope has a list for short texts and one for long texts
            inverse_frequencies(
                changed.head_dim, changed.rope_theta, changed.rope_scaling, seq_len=end, max_seq_len=length
            )
    except ConfigError as error:
        raise UsageError(str(error)) from None
    return changed


def check_merge(checkpoint: Checkpoint, options: LoadOptions) -> None:
    """Raise UsageError if adapters change quantized weights, and no option gives the format of the merged weights.

    Quantizing them again in the same way would lose most of an adapter, which changes a weight by less than a step.
    """
    kinds = {weight.stored for weight in map(checkpoint.weight, checkpoint.shapes) if weight.changed} - DTYPES.keys()
    if kinds and options.quantize is None and options.dtype in (None, "auto"):
        raise UsageError(
            f"{checkpoint.path} is quantized ({', '.join(sorted(kinds))}), and quantizing again would lose most of the"
            f" adapter; use the unquantized model, or dtype='bfloat16' (--dtype bfloat16)"
        )


def check_memory(plan: Plan) -> None:
    """Raise MemoryLimitError if weights, cache and activations do not fit into the free memory of a device."""
    options, placement, size = plan.options, plan.placement, plan.dtype.itemsize
    tokens = min(FIRST_SLOTS if options.tokens is None else options.tokens, plan.max_seq_len)
    chunk = prompt_chunk(placement.layers[-1])  # of KVCache.device: all layers get the same chunks
    for device in dict.fromkeys((*placement.layers, placement.output)):
        weights = sum(weight.memory_footprint for weight in plan.weights.values() if weight.device == device)
        part = dataclasses.replace(plan.config, n_layers=placement.layers.count(device) or 1, no_rope_layers=())
        cache = memory.cache_bytes(part, tokens, size, options.kv_cache)
        activations = memory.activation_bytes(part, tokens, size, options.kv_cache, chunk)
        ranks = 1 if options.world is None or device.type != "cpu" else options.world.on_this_host
        memory.check(str(plan.checkpoint.path), weights, cache, activations, device, ranks)


# -------------------------------------------------------------------------------------------------- 2. the weights
def empty_model(plan: Plan) -> Transformer:
    """The model on the meta device, without weights."""
    with torch.device("meta"), SkipInit():
        return Transformer(plan.config, plan.rope, max_seq_len=plan.max_seq_len).requires_grad_(False).eval()


def fill(model: Transformer, plan: Plan, progress: Progress | None = None) -> None:
    """Replace the layers of an empty model one by one with filled ones."""
    if plan.checkpoint.adapters:  # part of the model's identity, for saved sessions
        identity = torch.frombuffer(bytearray.fromhex(plan.checkpoint.adapters_hash), dtype=torch.uint8)
        model.register_buffer("adapters", identity, persistent=False)
    for i, device in enumerate(plan.placement.layers):
        attend = Attend(pick_attention(device, plan.options.fast))
        model.set_submodule(f"layers.{i}.attention.attend", attend)
    # numpy converts what the kernels can't, and releases the GIL, so several threads use several cores. For a small
    # weight, passing the GIL between threads takes longer than several threads save. Large weights are read one after
    # another, since each is in memory twice meanwhile.
    sizes = {
        name.removesuffix(".weight"): planned.memory_footprint
        for name, planned in plan.weights.items()
        if name.endswith(".weight")  # a layer's bias is filled with its weight
    }
    shared = [name for name, size in sizes.items() if SMALL <= size <= LARGE]
    done, total = 0, sum(sizes.values())
    if progress is not None:
        progress(done, total)
    with ThreadPoolExecutor(max_workers=min(4, default_threads())) as pool:
        for names, run in (([name for name in sizes if name not in shared], map), (shared, pool.map)):
            for name, _ in zip(names, run(lambda name: fill_layer(model, name, plan), names), strict=True):
                done += sizes[name]
                if progress is not None:
                    progress(done, total)


def fill_layer(model: Transformer, name: str, plan: Plan) -> None:
    """Read the weights of one layer and put the layer that computes with them in its place."""
    weight, device, format = plan.weights[f"{name}.weight"]
    try:
        if len(weight.shape) == 1:
            norm: Any = model.get_submodule(name)
            norm.weight = nn.Parameter(to_floats(weight, device, plan.dtype), requires_grad=False)
            return
        bias = plan.weights.get(f"{name}.bias")
        values = None if bias is None else to_floats(bias.weight, device, plan.dtype)
        layer = make_linear(weight, device, format, values, plan.options.fast)
    except DamagedError:
        raise
    except CheckpointError as error:  # the weight can't be stored in the format
        name = f"{weight.name}: " if isinstance(format, GroupFormat) else ""
        raise CheckpointError(f"{plan.checkpoint.path}: {name}{error}") from error
    if name != "tok_embeddings":
        model.set_submodule(name, layer)
    if name == "tok_embeddings" or (name == "output" and EMBEDDING not in plan.weights):  # tied
        model.set_submodule("tok_embeddings", make_embedding(layer, plan.dtype))


# --------------------------------------------------------------------------------------------------- 3. the runner
def attach_runner(model: Transformer, plan: Plan) -> None:
    """Set the runner that executes the model as the options ask."""
    options = plan.options
    if "cuda" in {part.type for part in (*plan.placement.layers, plan.placement.output)}:
        # On recent GPUs PyTorch prefers cuDNN's attention, which prepares a plan for each new shape: this takes tens of
        # milliseconds for each new prompt length. Flash and memory-efficient attention remain enabled.
        torch.backends.cuda.enable_cudnn_sdp(False)
    model.cache_kind, model.world = options.kv_cache, options.world
    if options.world is not None:
        options.world.wrap(model)
    elif options.check_memory:  # not if processes share the model: each could decide differently
        model.check_memory = memory.check_growth
    if not plan.placement.single:
        model.runner = PlacedRunner(model, plan.placement)
    elif options.compile and plan.placement.output.type == "cuda":
        model.runner, model.make_cache = GraphRunner(model), FixedCaches()
    elif options.fast and cpu_runner.supports(model):
        model.runner = KernelRunner(model)
