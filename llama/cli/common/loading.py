"""Load the model that the options name, and describe it on stderr. Imports torch only when called."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import shlex
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checks import dtype_name
from ...errors import UsageError
from . import arguments, terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...generation.speculative import Draft
    from ...inside.jacobian import JacobianLens
    from ...inside.steering import ControlVector
    from ...loader import LoadOptions, Plan
    from ...model import Transformer
    from ...text import Llama

SLOW = 2.0  # seconds of loading after which a message recommends to quantize once
DELAY = 1.0  # seconds of loading before the bar appears


def prepare(args: argparse.Namespace, **overrides: Any) -> tuple[Llama, Callable[..., None]]:
    """Returns a model with its tokenizer but without weights, and a function that reads the weights.

    Before that, checks that need no weights can run. For the memory check, the function takes the number of tokens of
    prompt and answer together. It reports on stderr what was loaded.
    `overrides` replace options of loader.LoadOptions.
    """
    from ... import loader

    vector = read_vector(args) if "steer" in args else None
    started = time.perf_counter()
    checkpoint = loader.open_model(args.model, args.adapter, args.tokenizer, args.quiet)
    options = arguments.load_options(args, **overrides)
    llm, plan = loader.prepare(checkpoint, options)
    if options.world is not None:
        options.world.check_same("tokenizer", llm.tokenizer.digest())
    steered = None if vector is None else _steer(args, llm.model, vector)
    prepared = time.perf_counter() - started

    def read_weights(tokens: int | None = None) -> None:
        started = time.perf_counter() - prepared
        _build(dataclasses.replace(plan, options=dataclasses.replace(options, tokens=tokens)), llm.model)
        _show_loaded(args.model, options, llm.model, llm.adapters, time.perf_counter() - started)
        if args.tokenizer is not None:
            terminal.info(f"tokenizer override: {args.tokenizer}, {llm.tokenizer.kind}")
        if llm.sampling:
            defaults = ", ".join(f"{key} {value}" for key, value in llm.sampling.items())
            terminal.info(f"sampling defaults of the checkpoint: {defaults}; options override them")
        if steered is not None:
            terminal.info(f"steering: {args.steer}, {steered}")

    return llm, read_weights


def read_vector(args: argparse.Namespace) -> ControlVector | None:
    """The control vector of --steer; None without --steer."""
    if args.steer is None:
        if (args.steer_scale, args.steer_layers) != (None, None):
            raise UsageError("--steer-scale and --steer-layers need --steer FILE")
        return None
    if args.compile:
        raise UsageError("--steer can't change the outputs of compiled layers: leave --compile out")
    from ...inside.steering import ControlVector

    return ControlVector.read(args.steer)


def _steer(args: argparse.Namespace, model: Transformer, vector: ControlVector) -> str:
    """Steer the model until the process ends. Returns the scale and the layers."""
    from ...inside import intervene, steering

    scale = 1.0 if args.steer_scale is None else args.steer_scale
    layers = None if args.steer_layers is None else intervene.parse_layers(args.steer_layers, model.config)
    until_exit = contextlib.ExitStack()
    used = until_exit.enter_context(steering.steer(model, vector, scale, layers))
    atexit.register(until_exit.close)
    span = f"layers {used[0]} to {used[-1]}" if len(used) > 1 else f"layer {used[0]}"
    return f"scale {scale:g}, {span}"


def load_model(
    args: argparse.Namespace, path: str, adapters: Sequence[str] = (), tokenizer: str | None = None, **overrides: Any
) -> Transformer:
    """Load a model and report on stderr what was loaded. `tokenizer` is only checked, not returned."""
    from ... import loader

    started = time.perf_counter()
    checkpoint = loader.open_model(path, adapters, tokenizer, args.quiet)
    plan = loader.make_plan(checkpoint, options := arguments.load_options(args, **overrides))
    model = _build(plan, loader.empty_model(plan))
    _show_loaded(path, options, model, checkpoint.adapters, time.perf_counter() - started)
    return model


def _build(plan: Plan, model: Transformer) -> Transformer:
    """Load the weights, with a progress bar if loading takes long."""
    from ...loader import build_plan

    with terminal.progress("B", unit_scale=True, leave=False, delay=DELAY) as show:
        return build_plan(plan, model, partial(show, "loading"))


def _show_loaded(path: str, options: LoadOptions, model: Transformer, adapters: Sequence[str], seconds: float) -> None:
    from ...engine.linears import describe_quantization
    from ...engine.placement import describe_devices
    from ...rope_scaling import reach, trained_length

    config, world = model.config, options.world
    dtype, stored = dtype_name(model.norm.weight.dtype), dtype_name(model.tok_embeddings.weight.dtype)
    stored = describe_quantization(model) or stored
    facts = [
        f"{path}: {config.n_params / 1e6:,.{0 if config.n_params >= 10**7 else 2}f}M parameters",
        f"{stored} weights, {dtype} compute" if stored != dtype else dtype,
        describe_devices(model).replace("cpu", "CPU"),
        *([f"{world.size} processes"] if world else []),
        f"loaded in {seconds:.1f} s",
        *(f"adapter {adapter}" for adapter in adapters),
    ]
    terminal.info(", ".join(facts))
    if options.quantize and seconds > SLOW and not adapters:
        folder = shlex.quote(f"{Path(path).name}-{options.quantize}")
        command = f"clearllama quantize {shlex.quote(path)} {folder} --scheme {options.quantize}"
        terminal.info(f"to quantize once and not at each load: {command}; then -m {folder}")
    if options.rope_scaling is not None or options.rope_theta is not None:
        scaling = config.rope_scaling or {"rope_type": "default"}
        values = ", ".join(f"{key} {value}" for key, value in scaling.items() if not isinstance(value, list))
        context = f"context {model.max_seq_len}, trained context {int(trained_length(config))}"
        terminal.info(f"RoPE override: {values}, theta {config.rope_theta:g}; {context}")
    if options.max_seq_len and options.max_seq_len > reach(config):
        trained = f"the context of {config.max_seq_len} that the model was trained for"
        terminal.info(f"warning: --max-seq-len {options.max_seq_len} exceeds {trained}; --rope-scaling extends it")


def set_chat_form(args: argparse.Namespace, llm: Llama) -> None:
    """Set the chat format and the template's variables from the command's options."""
    if args.chat_format != "auto":
        llm.chat_format = args.chat_format
    llm.template_options = dict(args.template_option)


def pick_form(args: argparse.Namespace, llm: Llama) -> bool:
    """Set the chat form. Returns whether prompts are plain text; if so, an option that needs a chat is an error."""
    from ...chat.formats import says_chat
    from ...hub.repository import hub_id

    set_chat_form(args, llm)
    raw: bool = args.raw
    if args.chat_format == "auto" and llm.chat_template is None:
        raw = raw or llm.chat_format is None or not says_chat(str(hub_id(args.model) or args.model))
    for name in ("system", "template_option") if raw else ():
        if getattr(args, name, None):  # `steer` has no --system
            why = why_raw(args, llm)
            raise UsageError(f"{arguments.option(name)} needs a chat, but the prompt is plain text ({why})")
    return raw


def why_raw(args: argparse.Namespace, llm: Llama) -> str:
    """The reason why prompts are continued as plain text."""
    if args.raw:
        return "--raw"
    return f"the model has no chat template; if it was trained to chat, add --chat-format {llm.chat_format or 'NAME'}"


def model_name(path_or_name: str) -> str:
    """A short name of a model: the last part of its path, ORG/NAME on the hub, or the name that was given."""
    from ...hub.repository import hub_id

    path = Path(path_or_name)
    path = path.resolve().parent if path.suffix == ".json" else path
    return path.resolve().name if path.exists() else str(hub_id(path_or_name) or path_or_name)


def read_lens(args: argparse.Namespace, model: Transformer) -> JacobianLens | None:
    """The Jacobian lens of --lens; without --lens, the default model's lens if the model is the unchanged default."""
    from ...hub.models import FILE, SIZE, resolve
    from ...hub.repository import pull_file
    from ...inside.jacobian import JacobianLens

    if args.lens is not None:
        local = Path(args.lens).exists() or args.lens.count("/") < 2 or args.lens[0] in "./~"
        return JacobianLens.read(args.lens if local else pull_file(args.lens), model)
    path = resolve(args.model, fetch=False)
    changed = args.adapter or args.rope_scaling or args.rope_theta
    same = not changed and path.is_file() and (path.name, path.stat().st_size) == (FILE, SIZE)
    return JacobianLens.unpack() if same else None


def load_draft(args: argparse.Namespace, llm: Llama) -> Draft | None:
    """Load the draft of --draft and check that it fits the model; None without --draft."""
    from ...generation.speculative import check_match, make_draft

    if args.draft in (None, "ngram"):
        return make_draft(args.draft, args.draft_tokens)
    unset: dict[str, Any] = dict.fromkeys(("world", "max_seq_len", "rope_scaling", "rope_theta"))
    smaller = load_model(args, args.draft, **unset)
    check_match(smaller, llm.model, llm.tokenizer.n_vocab)
    return make_draft(smaller, args.draft_tokens)
