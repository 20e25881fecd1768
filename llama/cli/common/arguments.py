"""The options that several commands share, as rows of tables, and the checks that need no model.

Does not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checks import number
from ...errors import UsageError
from ...hub import default_model
from ...sampling import OPTIONS, SamplingParams, option_names
from . import files
from .parser import MANY, RARE, Group, HelpAll, Row

if TYPE_CHECKING:
    from ...loader import LoadOptions

FIELD = {  # an option or command of clearllama -> its names in llama.cpp, vLLM, Ollama, llm and hf
    "--model": "-hf -hfr --hf-repo",
    "--gpu-layers": "-ngl --n-gpu-layers",
    "--max-seq-len": "-c --ctx-size --max-model-len --num-ctx",
    "--max-new-tokens": "--max-tokens --n-predict --predict --num-predict",
    "--threads": "-t",
    "--seed": "-s",
    "--repetition-penalty": "--repeat-penalty",
    "--temperature": "--temp -temp",
    "--adapter": "--lora",
    "--system": "-sys --system-prompt",
    "--tensor-parallel": "--tensor-parallel-size",
    "--parallel": "-np",
    "--name": "--served-model-name",
    "--alias": "-a",
    "--grammar": "--grammar-file",
    "--draft": "-md --model-draft",
    "--rope-theta": "--rope-freq-base",
    "--rope-factor": "--rope-scale",
    "--stop": "-r --reverse-prompt",
    "--thinking-budget": "--reasoning-budget",
    "--device": "-dev",
    "--version": "-v -V version",
    "chat": "run",
    "generate": "prompt complete",
    "inspect": "show info",
    "list": "ls models",
    "pull": "download",
}
SYNONYMS = {name: own for own, names in FIELD.items() for name in names.split()}
UNNEEDED = """-fa --flash-attn --mlock --no-mmap --jinja --color -b --batch -ub --ubatch-size --stream --no-stream -e
 --no-display-prompt -v --verbose --no-warmup --enforce-eager --gpu-memory-utilization --trust-remote-code"""
ANSWERS = {  # what to do instead -> options and commands of these programs that clearllama does not have
    "not needed here; leave this out": UNNEEDED,
    "use clearllama chat": "-cnv --conversation -i --interactive",
    "use clearllama generate": "-st --single-turn",
    "give the file as an argument": "-f --file",
    "use --raw": "-no-cnv --no-conversation",
    "use --kv-cache int8": "-ctk -ctv --cache-type-k --cache-type-v",
    "use --json-schema FILE": "--format -j --schema",
    "a penalty counts all tokens": "--repeat-last-n",
    "use --model ORG/NAME/FILE.gguf": "-hff --hf-file -mu --model-url",
    "use --device cuda:0,cuda:1": "-sm --split-mode -ts --tensor-split -mg --main-gpu",
    "use --template-option NAME=VALUE": "--think --chat-template-kwargs",
    "use options, such as --temperature 0.7": "-o --option",
    "images are not supported": "--image --mmproj -mm",
    "no model stays loaded between commands; clearllama serve keeps one, in the foreground": "ps stop",
    "use clearllama convert or quantize; a system message is --system of generate and chat": "create",
    "hf upload, of the Hugging Face hub, publishes a folder": "push upload",
    "copy the file or folder, and name it with -m": "cp",
    "use 'hf auth login'": "login auth",
    "use --chat-format or --template-option of chat; inspect says whether a model has a template": "templates",
    "there are no embeddings; in Python, llama.load_model(PATH).hidden(tokens) has the last hidden states": "embed"
    " embeddings embed-multi embedding --embedding --embeddings",
}
ANSWER = {name: answer for answer, names in ANSWERS.items() for name in names.split()}
ARGUMENT = {"nargs": "?", "default": argparse.SUPPRESS}  # settings of an argument that is also an option
LARGEST_FACTOR = 10_000  # upper limit of --rope-factor


def option(name: str) -> str:
    """The option for an attribute of the parsed arguments: 'top_p' -> '--top-p'."""
    return f"--{name.replace('_', '-')}"


def count(text: str) -> int:
    """Parse N of --max-new-tokens. As in llama.cpp, -1 and -2 mean: until the context is full."""
    return int(text) if int(text) not in (-1, -2) else int(OPTIONS["max_new_tokens"].metadata["range"][1])


def bias(text: str) -> tuple[int, float]:
    """Parse ID=B of --logit-bias."""
    id, _, value = text.partition("=")
    return int(id), float(value)


def variable(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE of --template-option. A value that is not JSON is text."""
    name, value = text.split("=", 1)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


# ------------------------------------------------------------------------------------------- rows for parser.add
ADAPTER = (
    "--adapter PATH[:SCALE]",
    str,
    "merge a LoRA adapter (a PEFT folder or a GGUF file) into the weights; may be repeated (default scale: 1)",
    MANY,
)
TOKENIZER = (
    "--tokenizer PATH",
    str,
    "another tokenizer: tokenizer.model, tokenizer.json or a folder with one (default: the checkpoint's)",
)
KV_CACHE = ("--kv-cache", ["model", "int8"], "dtype of keys and values: the model's, or int8 for half the memory")
PROMPT = [
    Group(exclusive=True),
    ("prompt PROMPT", str, "the prompt, followed by standard input (a pipe or a file)", ARGUMENT),
    ("-p --prompt PROMPT", str, "the prompt, as an option instead of an argument", RARE),
    Group(),
    ("-f --file FILE", str, "add a file's text; '-' is standard input; may be repeated (docs/guides/prompts.md)", MANY),
]
LENS = (
    "--lens FILE",
    str,
    "a Jacobian lens (of trace --fit-lens, or published): a path, or ORG/NAME/FILE on the Hugging Face hub",
)
CHAT = [
    Group("chat format", rare=True),
    (
        "--chat-format",
        ["auto", "jinja", "llama2", "llama3"],
        "how messages are encoded: by the checkpoint's template (jinja), or by a built-in format for a checkpoint"
        " without a template (default: auto, the template if there is one)",
    ),
    (
        "--template-option NAME=VALUE",
        variable,
        "set a variable of the template to JSON or text, such as enable_thinking=false; may be repeated",
        MANY,
    ),
]
STEERING = [
    Group(
        "steering",
        "add a control vector to the output of each layer; 'clearllama steer' makes one (docs/guides/inside.md)",
        rare=True,
    ),
    ("--steer FILE", str, "a control vector in GGUF, also from llama.cpp or repeng"),
    ("--steer-scale S", float, "multiply the vector by S (default: 1)"),
    ("--steer-layers FIRST:END", str, "steer only these layers; 8:16 is layers 8 to 15 (default: all)"),
]
EVERY = [  # of every command
    Group(),
    ("-q --quiet", bool, "write only errors to stderr"),
    ("--debug", bool, "show the traceback of an error", RARE),
    ("--help-all", bool, "show all options and exit", {"action": HelpAll}),
]


def checkpoint(about: str) -> list[Row | Group]:
    """Rows for the model of a command, which is given as an argument or as --model."""
    return [
        Group(exclusive=True),
        ("model PATH_OR_NAME", str, about, ARGUMENT),
        ("-m --model PATH_OR_NAME", str, "the model, as an option", {"default": default_model()}),
        Group(),
    ]


def model(dtype: str | None = None, optional: bool = False, argument: bool = False) -> list[Row | Group]:
    """The options of a command that runs a model, including those that override the model's RoPE settings.

    dtype     the default of --dtype; None for the fastest dtype of the device
    optional  the command also works without a model, so that --model has no default
    argument  the model may also be given without -m
    """
    default = "" if optional else " (default: %(default)s; CLEARLLAMA_MODEL sets it)"
    path = "folder, .gguf file or ORG/NAME[:QUANT] on the hub; folders are in Meta's or Hugging Face's format"
    dtypes = f"float32, bfloat16, float16 (default: {dtype or 'the fastest'})"
    kinds = (
        "linear, ntk, dynamic, yarn or llama3, each with --rope-factor; none, to remove the checkpoint's scaling; or"
        ' all parameters as JSON, such as {"rope_type": "yarn", "factor": 4, "beta_fast": 16}'
    )
    named = ("-m --model PATH_OR_NAME", str, path + default, {"default": None if optional else default_model()})
    return [
        *(checkpoint(path) if argument else []),
        Group("model"),
        *([] if argument else [named]),
        ("--device DEVICE", str, "cpu, mps, cuda, or cuda:0,cuda:1", {"default": "auto"}),
        ("--dtype DTYPE", str, dtypes, {"default": dtype or "auto"}),
        ("--quantize SCHEME", str, "int8 or int4; clearllama quantize --list shows more"),
        ("--max-seq-len N", int, "context length in tokens (default: the model's)"),
        Group("advanced model options", rare=True),
        ADAPTER,
        TOKENIZER,
        ("--compile", bool, "on CUDA, compile the decoding step"),
        KV_CACHE,
        ("--gpu-layers K", int, "put only the last K layers on the GPU"),
        ("--threads N", int, "CPU threads (default: one per usable core)"),
        ("--no-memory-check", bool, "load the model even if memory seems too small"),
        Group("RoPE", "overrides of the checkpoint's settings, for long contexts or for study", rare=True),
        ("--rope-scaling KIND", str, kinds),
        ("--rope-factor S", float, "extend the context S times"),
        ("--rope-theta T", float, "base of the rotary frequencies"),
        ("--rope", ["complex", "real", "half"], "implementation of the rotation; all give the same logits"),
    ]


def generation(max_new_tokens: int, fallback: str, argument: bool = False) -> list[Row | Group]:
    """All options of a command that generates, including sampling, sessions, drafts, steering, several processes.

    A sampling option that the user does not give is None: then the checkpoint's default applies, else the fallback.
    """
    about = {name: field.metadata["about"] for name, field in OPTIONS.items()}
    numbers = {}
    for name in option_names("number"):
        kind = type(OPTIONS[name].default)
        numbers[name] = (f"{option(name)} {'N' if kind is int else 'X'}", kind, about[name])
    order = "applied in this order: penalties, logit bias, grammar, temperature, then the filters as listed"
    grammars = "constrain the answer (docs/guides/structured.md; needs pip install 'clearllama[structured]')"
    sessions = "keep the KV cache in a file; a prompt with the same prefix reuses it (docs/guides/long-contexts.md)"
    drafts = "a draft proposes tokens that the model verifies in one pass; the output is unchanged"
    draft = (
        "ngram: repeat what followed the last tokens earlier in the text; MODEL: a smaller one with the same vocabulary"
    )
    processes = (
        "start N processes that share the model: torchrun --nproc-per-node N -m llama ..."
        " (docs/guides/several-devices.md)"
    )
    return [
        *model(argument=argument),
        Group("sampling", f"defaults: those of the checkpoint's generation_config.json, else {fallback}"),
        ("-n --max-new-tokens N", count, f"{about['max_new_tokens']}; -1: to the end", {"default": max_new_tokens}),
        ("--temperature X", *numbers.pop("temperature")[1:]),
        numbers.pop("top_p"),
        ("--seed N", int, about["seed"]),
        ("--stop TEXT", str, "end the answer before this text; may be repeated", MANY),
        Group("advanced sampling", order, rare=True),
        *numbers.values(),
        ("--logit-bias ID=B", bias, "add B to the logit of token ID; 42=-100 excludes token 42; may be repeated", MANY),
        ("--min-tokens N", int, about["min_tokens"]),
        ("--ignore-eos", bool, about["ignore_eos"]),
        ("--thinking-budget N", int, about["thinking_budget"]),
        Group("structured output", grammars, rare=True, exclusive=True),
        ("--json-schema FILE", str, "a file with a JSON schema", {"dest": "schema"}),
        ("--regex EXPRESSION", str, about["regex"]),
        ("--grammar FILE", str, "a file with a context-free grammar: Lark, as of llguidance, or GBNF, as of llama.cpp"),
        Group("session", sessions, rare=True),
        ("--load-session FILE", str, "load a saved session; the first run may name the FILE of --save-session"),
        ("--save-session FILE", str, "save it at the end or at Ctrl-C, replacing FILE"),
        Group("speculative decoding", drafts, rare=True),
        ("--draft ngram|MODEL", str, draft),
        ("--draft-tokens N", int, "maximum number of tokens per draft (default: 10)"),
        *STEERING,
        Group("several processes", processes, rare=True),
        ("--tensor-parallel N", int, "the number of processes (default: torchrun's)"),
        *CHAT,
    ]


# --------------------------------------------------------------------------------------- the values of parsed options
def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Check the given options of an answer; return them as keyword arguments of Llama.generate."""
    options = {name: value for name in OPTIONS if (value := getattr(args, name, None)) not in (None, [])}
    if "logit_bias" in options:
        options["logit_bias"] = dict(args.logit_bias)
    SamplingParams(**options)
    for name in ("schema", "grammar"):
        if name in options:
            options[name] = files.read_text(Path(options[name]))
    return options


def load_options(args: argparse.Namespace, **overrides: Any) -> LoadOptions:
    """The model options as an object of the loader. `overrides` replace some of them."""
    from ...loader import LoadOptions

    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(LoadOptions) if field.name in args}
    given |= {"rope_scaling": rope_scaling(args), "check_memory": not args.no_memory_check, "fast": True}
    return LoadOptions(**{**given, **overrides})


def rope_scaling(args: argparse.Namespace) -> dict[str, Any] | None:
    """The scaling requested by --rope-scaling and --rope-factor; None keeps the checkpoint's."""
    from ...system.documents import parse_json

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
    """Raise UsageError if the options compile the layers or put them on several devices."""
    if args.compile:
        raise UsageError(f"{command} can't read the outputs of compiled layers: leave --compile out")
    if args.gpu_layers is not None or "," in args.device:
        raise UsageError(f"{command} needs the model on one device: leave out --gpu-layers and name one --device")
