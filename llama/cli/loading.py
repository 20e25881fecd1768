"""The model that the options name, with a word on stderr about what was loaded. Imports torch only when called."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from . import arguments, streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..model import Transformer
    from ..text import Llama
    from ..tokenizer import Tokenizer


def load(args: argparse.Namespace, tokens: Callable[[Tokenizer], int] | None = None) -> Llama:
    """The model that the options name, with its tokenizer; says on stderr what was loaded and what is unusual.

    tokens tells, by the tokenizer, how long prompt and answer will be, so that there is memory for them.
    """
    from .. import loader
    from ..engine import parallel, runtime

    runtime.set_threads(args.threads)
    started = time.perf_counter()
    with parallel.all_succeed(getattr(args, "world", None)):
        llm = loader.load(args.model, tokens=tokens, quiet=args.quiet, **arguments.model_options(args))
    _say_loaded(args, llm.model, llm.warnings, time.perf_counter() - started)
    if llm.sampling:
        wishes = ", ".join(f"{key} {value}" for key, value in llm.sampling.items())
        streams.say(args, f"the checkpoint asks for {wishes}; options override it")
    return llm


def load_model(args: argparse.Namespace) -> Transformer:
    """The model that the options name as `load` has it; no tokenizer is needed."""
    from .. import loader
    from ..checkpoint import open_checkpoint
    from ..engine import parallel, runtime
    from ..hub.named import resolve

    runtime.set_threads(args.threads)
    started = time.perf_counter()
    with parallel.all_succeed(getattr(args, "world", None)):
        checkpoint = open_checkpoint(resolve(args.model, args.quiet))
        model = loader.build(checkpoint, fast=True, **arguments.model_options(args))
    _say_loaded(args, model, checkpoint.warnings, time.perf_counter() - started)
    return model


def _say_loaded(args: argparse.Namespace, model: Transformer, warnings: Sequence[str], seconds: float) -> None:
    from ..engine.linears import describe_quantization
    from ..engine.placement import describe_devices
    from ..rope_scaling import reach, trained_length

    weight, world = model.norm.weight, getattr(args, "world", None)
    dtype = str(weight.dtype).removeprefix("torch.")
    quantized = describe_quantization(model)
    stored = f"{quantized} weights, {dtype} compute" if quantized else dtype
    streams.say(
        args,
        f"{args.model}: {_millions(model.config.n_params)} parameters, {stored}, {describe_devices(model)}"
        f"{f', {world}' if world else ''}, loaded in {seconds:.1f} s",
    )
    for warning in warnings:
        streams.say(args, f"warning: {warning}")
    config = model.config
    trained = int(trained_length(config))
    if args.rope_scaling is not None or args.rope_theta is not None:
        scaling = config.rope_scaling or {"rope_type": "default"}
        told = ", ".join(f"{key} {value}" for key, value in scaling.items() if not isinstance(value, list))
        streams.say(
            args,
            f"rope: {told}, theta {config.rope_theta:g}, as asked for; context {model.max_seq_len},"
            f" {trained} of it without stretching",
        )
    if args.max_seq_len and args.max_seq_len > reach(config.max_seq_len, config.rope_scaling):
        streams.say(
            args,
            f"warning: --max-seq-len {args.max_seq_len} is beyond the {config.max_seq_len} the model was trained for",
        )


def _millions(n: int) -> str:
    return f"{n / 1e6:,.0f}M" if n >= 10**7 else f"{n / 1e6:.2f}M"


def model_name(path_or_name: str) -> str:
    """What to call a model: the last part of its path, or the name it was asked for by."""
    path = Path(path_or_name)
    return path.resolve().name if path.exists() else path_or_name
