"""The options that several commands share, as rows of tables, and the checks that need no model.

Does not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from ..checks import number
from ..errors import UsageError
from ..hub import default_model
from ..sampling import OPTIONS, SamplingParams, option_names
from . import streams

LARGEST_FACTOR = 10_000  # upper limit of --rope-factor
MANY = {"action": "append"}  # an option that may be repeated
RARE = (  # titles of the groups of options that only --help-all shows
    *("chat format", "other options", "advanced sampling", "structured output", "session"),
    *("speculative decoding", "steering", "advanced model options", "RoPE", "several processes"),
)

# Options of several commands, as rows for `add`
ADAPTER = (
    "--adapter",
    "PATH[:SCALE]",
    "merge a LoRA adapter (a PEFT folder or a GGUF file) into the weights; may be repeated (default scale: 1)",
    {**MANY, "default": []},
)
TOKENIZER = (
    "--tokenizer",
    "PATH",
    "a tokenizer.model, a tokenizer.json or a folder with one (default: the checkpoint's)",
)
KV_CACHE = (
    "--kv-cache",
    ["model", "int8"],
    "store keys and values in the model's dtype, or in int8, half the memory of 16 bits (default: model)",
)


def bias(text: str) -> tuple[int, float]:
    """Parse ID=B of --logit-bias."""
    id, _, value = text.partition("=")
    return int(id), float(value)


def variable(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE of --template-option. A value that is no JSON is text."""
    name, value = text.split("=", 1)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


TYPES = {"N": int, "K": int, "S": float, "T": float, "X": float, "ID=B": bias, "NAME=VALUE": variable}


def add(parser: argparse._ActionsContainer, *rows: tuple[Any, ...]) -> None:
    """Add options. A row is (names, value, help) and, if needed, more settings for argparse.

    value  None for a switch; a list of choices, of which the first is the default; or the name of
           the value in the help, which also gives its type (TYPES)
    """
    for names, value, about, *more in rows:
        settings: dict[str, Any] = {"metavar": value, "type": TYPES.get(str(value))}
        if value is None:
            settings = {"action": "store_true"}
        elif isinstance(value, list):
            settings = {"choices": value, "default": value[0]}
        parser.add_argument(*names.split(), help=about, **{**settings, **dict(*more)})


def option(name: str) -> str:
    """The option of an attribute of the parsed arguments: 'top_p' -> '--top-p'."""
    return f"--{name.replace('_', '-')}"


def add_model_options(parser: argparse.ArgumentParser, optional: bool = False, dtype: str | None = None) -> None:
    """Add the options of a model, and the overrides of its RoPE settings.

    optional  the command also works without a model, so that --model has no default
    dtype     the default of --dtype; None for the fastest dtype of the device
    """
    default = " (default: %(default)s; CLEARLLAMA_MODEL sets it)"
    model = (
        "folder, .gguf file or ORG/NAME[:QUANT] on the hub; folders are in Meta's or Hugging Face's format"
        f"{'' if optional else default}"
    )
    devices = "cpu, mps, cuda, or cuda:0,cuda:1 (default: auto)"
    dtypes = f"float32, bfloat16, float16 (default: {dtype or 'the fastest'})"
    schemes = "int8 or int4; clearllama quantize --list shows more"
    add(
        parser.add_argument_group("model"),
        ("--model -m", "PATH_OR_NAME", model, {"default": None if optional else default_model()}),
        ("--device", "DEVICE", devices, {"default": "auto"}),
        ("--dtype", "DTYPE", dtypes, {"default": dtype or "auto"}),
        ("--quantize", "SCHEME", schemes),
        ("--max-seq-len", "N", "context length in tokens (default: the model's)"),
    )
    add(
        parser.add_argument_group("advanced model options"),
        ADAPTER,
        TOKENIZER,
        ("--compile", None, "compile the decoding step: about 20 s the first time"),
        KV_CACHE,
        ("--gpu-layers", "K", "put only the last K layers on the GPU"),
        ("--threads", "N", "CPU threads (default: one per usable core)"),
        ("--no-memory-check", None, "load the model even if memory seems too small"),
    )
    kinds = (
        "linear, ntk, dynamic, yarn or llama3, each with --rope-factor; none, to remove the checkpoint's scaling; or"
        ' all parameters as JSON, such as {"rope_type": "yarn", "factor": 4, "beta_fast": 16}'
    )
    forms = "implementation of the rotation; all give the same logits (default: %(default)s)"
    add(
        parser.add_argument_group("RoPE", "overrides of the checkpoint's settings, for long contexts or for study"),
        ("--rope-scaling", "KIND", kinds),
        ("--rope-factor", "S", "extend the context S times"),
        ("--rope-theta", "T", "base of the rotary frequencies"),
        ("--rope", ["complex", "real", "half"], forms),
    )


def add_model(parser: argparse.ArgumentParser, about: str) -> None:
    """Add the model of a command that does not run it, as an argument or as --model."""
    add(
        parser.add_mutually_exclusive_group(),
        ("model", "PATH_OR_NAME", about, {"nargs": "?", "default": argparse.SUPPRESS}),
        ("--model -m", "PATH_OR_NAME", "the same (default: %(default)s)", {"default": default_model()}),
    )


def add_prompt_options(parser: argparse.ArgumentParser, what: str = "prompt") -> argparse._ActionsContainer:
    """Add PROMPT, --prompt and --file, and return the group of rare options. `what`: the help's word for the prompt."""
    file = "add the text of a file; '-' is standard input; may be repeated (docs/guides/prompts.md)"
    text = f"the {what}; '-' or none: standard input"
    add(
        parser,
        ("text", "PROMPT", text, {"nargs": "?"}),
        ("--file -f", "FILE", file, MANY),
    )
    others = parser.add_argument_group("other options")
    add(others, ("--prompt -p", "PROMPT", f"the {what}, as an option instead of an argument"))
    return others


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how messages are encoded."""
    formats = (
        "how messages are encoded: by the checkpoint's template (jinja), or by a built-in format for a checkpoint"
        " without a template (default: auto, the template if there is one)"
    )
    variable = "set a variable of the template to JSON or text, such as enable_thinking=false; may be repeated"
    add(
        parser.add_argument_group("chat format"),
        ("--chat-format", ["auto", "jinja", "llama2", "llama3"], formats),
        ("--template-option", "NAME=VALUE", variable, {**MANY, "default": []}),
    )


def add_generation_options(parser: argparse.ArgumentParser, max_new_tokens: int, fallback: str) -> None:
    """Add all options of a model that generates: also of sampling, sessions, drafts, steering and several processes.

    A sampling option that is not set is None: the checkpoint's default or the fallback applies.
    """
    group = parser.add_argument_group
    defaults = f"defaults: those of the checkpoint's generation_config.json, else {fallback}"
    order = "applied in this order: penalties, logit bias, grammar, temperature, then the filters as listed"
    grammars = "constrain the answer (docs/guides/structured.md; needs pip install 'clearllama[structured]')"
    sessions = "keep the KV cache in a file; a prompt with the same prefix reuses it (docs/guides/long-contexts.md)"
    drafts = "a draft proposes tokens that the model verifies in one pass; the output is unchanged"
    draft = (
        "ngram: repeat what followed the last tokens earlier in the text; MODEL: a smaller one with the same vocabulary"
    )
    processes = (
        "processes that torchrun --nproc-per-node N -m llama ... starts divide the model"
        " (docs/guides/several-devices.md)"
    )
    about = {name: field.metadata["about"] for name, field in OPTIONS.items()}
    numbers = {
        name: (
            option(name) + " --temp" * (name == "temperature"),
            "N" if isinstance(OPTIONS[name].default, int) else "X",
            about[name],
        )
        for name in option_names("number")
    }
    add_model_options(parser)
    add(
        group("sampling", defaults),
        ("--max-new-tokens -n", "N", f"{about['max_new_tokens']} (default: %(default)s)", {"default": max_new_tokens}),
        *(numbers.pop(name) for name in ("temperature", "top_p")),
        ("--seed", "N", about["seed"]),
        ("--stop", "TEXT", "end the answer before this text; may be repeated", MANY),
    )
    add(
        group("advanced sampling", order),
        *numbers.values(),
        ("--logit-bias", "ID=B", "add B to the logit of token ID; 42=-100 excludes token 42; may be repeated", MANY),
        ("--min-tokens", "N", about["min_tokens"]),
        ("--ignore-eos", None, about["ignore_eos"]),
    )
    add(
        group("structured output", grammars).add_mutually_exclusive_group(),
        ("--json-schema", "FILE", "a file with a JSON schema", {"dest": "schema"}),
        ("--regex", "EXPRESSION", about["regex"]),
        ("--grammar", "FILE", "a file with a context-free grammar in llguidance's Lark syntax"),
    )
    add(
        group("session", sessions),
        ("--load-session", "FILE", "load a saved session; the first run may name the FILE of --save-session"),
        ("--save-session", "FILE", "save it at the end or at Ctrl-C, replacing FILE"),
    )
    add(
        group("speculative decoding", drafts),
        ("--draft", "ngram|MODEL", draft),
        ("--draft-tokens", "N", "maximum number of tokens per draft (default: 10)"),
    )
    add_steer_options(parser)
    parallel = group("several processes", processes)
    add(parallel, ("--tensor-parallel", "N", "the number of processes (default: torchrun's)"))
    parser.set_defaults(world=None)


def add_steer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that steer the model by a control vector."""
    about = "add a control vector to the output of each layer; 'clearllama steer' makes one (docs/guides/inside.md)"
    add(
        parser.add_argument_group("steering", about),
        ("--steer", "FILE", "a control vector in GGUF, also from llama.cpp or repeng"),
        ("--steer-scale", "S", "multiply the vector by S (default: 1)"),
        ("--steer-layers", "FIRST:END", "steer only these layers; 8:16 is layers 8 to 15 (default: all)"),
    )


def add_output_options(parser: argparse.ArgumentParser, json: str | None = None) -> None:
    """Add --quiet, --debug and, for a command that writes JSON, --json; `json` says what it writes."""
    if json is not None:
        add(parser, ("--json", None, f"write {json}"))
    add(
        parser,
        ("--quiet -q", None, "write only errors to stderr"),
        ("--debug", None, "show the traceback of an error"),
    )


# --------------------------------------------------------------------------------------- the values of parsed options
def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The given options of an answer, checked, as keyword arguments of Llama.generate."""
    options = {name: value for name in OPTIONS if (value := getattr(args, name, None)) is not None}
    if "logit_bias" in options:
        options["logit_bias"] = dict(args.logit_bias)
    SamplingParams(**options)
    for name in ("schema", "grammar"):
        if name in options:
            options[name] = streams.read_text(Path(options[name]))
    return options


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """The model options as keyword arguments of loader.load and loader.build."""
    from ..loader import LoadOptions

    names = [field.name for field in dataclasses.fields(LoadOptions) if hasattr(args, field.name)]
    options = {name: getattr(args, name) for name in names}
    return {**options, "rope_scaling": rope_scaling(args), "check_memory": not args.no_memory_check}


def rope_scaling(args: argparse.Namespace) -> dict[str, Any] | None:
    """The scaling requested by --rope-scaling and --rope-factor; None keeps the checkpoint's."""
    from ..system.documents import parse_json

    kind: str | None = args.rope_scaling
    factor: float | None = args.rope_factor
    if factor is not None:
        number("--rope-factor", factor, 1, LARGEST_FACTOR)
        if kind in (None, "none"):
            raise UsageError("--rope-factor needs a method: add --rope-scaling, for example --rope-scaling yarn")
    if kind is None or kind == "none":
        return None if kind is None else {"rope_type": "default"}
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind.lstrip().startswith("{"):
        scaling = parse_json(kind.encode(errors="surrogateescape"), "--rope-scaling", UsageError)
    return scaling if factor is None else {**scaling, "factor": factor}


def check_plain(args: argparse.Namespace, command: str) -> None:
    """Raise UsageError if the layers would be compiled, or spread over several devices."""
    if args.compile:
        raise UsageError(f"{command} can't read the outputs of compiled layers: leave --compile out")
    if args.gpu_layers is not None or "," in args.device:
        raise UsageError(f"{command} needs the model on one device: leave out --gpu-layers and name one --device")
