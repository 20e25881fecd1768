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

LARGEST_FACTOR = 10_000  # upper limit of --rope-factor
MANY = {"action": "append"}  # an option that may be repeated
UNSET = {"default": None}  # for a switch: None instead of False if it is not given

Subparsers = Any  # argparse's own class is private


def bias(text: str) -> tuple[int, float]:
    """Parse ID=B of --logit-bias."""
    id, _, value = text.partition("=")
    try:
        return int(id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ID=B, such as 42=-100, got {text!r:.80}") from None


TYPES = {"N": int, "K": int, "P": float, "R": float, "S": float, "T": float, "ID=B": bias}


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
    """Add the options of a model. A command that loads one adds the options of its RoPE as well, after its own groups.

    optional  the command also works without a model, so that --model has no default
    dtype     the default of --dtype; None for the fastest dtype of the device
    """
    group = parser.add_argument_group("model")
    default = " (default: %(default)s; the environment variable CLEARLLAMA_MODEL sets it)"
    model = (
        "a folder in Meta's or Hugging Face's format, a .gguf file, or ORG/NAME[:QUANT] on the Hugging Face hub, which"
        f" is downloaded on first use{'' if optional else default}"
    )
    add(group, ("--model -m", "PATH_OR_NAME", model, {"default": None if optional else default_model()}))
    add_adapter_option(group)
    add_tokenizer_option(group)
    devices = "cpu, cuda, cuda:1, mps; cuda:0,cuda:1 puts layers on both (default: auto)"
    dtypes = f"float32, bfloat16 or float16 (default: {dtype or 'auto, the fastest on the device'})"
    schemes = "quantize while loading: int8 or int4 ('clearllama quantize --list' shows all schemes)"
    add(
        group,
        ("--device", "DEVICE", devices, {"default": "auto"}),
        ("--dtype", "DTYPE", dtypes, {"default": dtype or "auto"}),
        ("--quantize", "SCHEME", schemes),
        ("--compile", None, "compile the decoding step: about 20 s the first time"),
        ("--max-seq-len", "N", "context length in tokens (default: the model's)"),
    )
    add_kv_cache_option(group, "the model's dtype")
    add(
        group,
        ("--gpu-layers", "K", "put only the last K layers on the GPU"),
        ("--threads", "N", "CPU threads (default: one per usable core)"),
        ("--no-memory-check", None, "load the model even if memory seems too small"),
    )


def add_kv_cache_option(parser: argparse._ActionsContainer, model: str) -> None:
    """Add --kv-cache. model: what the choice `model` means."""
    about = f"store keys and values in {model}, or in int8, half the memory of 16 bits (default: model)"
    add(parser, ("--kv-cache", ["model", "int8"], about))


def add_rope_options(parser: argparse.ArgumentParser) -> None:
    """Add the overrides of the RoPE settings, and --rope."""
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


def add_adapter_option(parser: argparse._ActionsContainer) -> None:
    """Add --adapter."""
    about = "merge a LoRA adapter (a PEFT folder or a GGUF file) into the weights; may be repeated (default scale: 1)"
    add(parser, ("--adapter", "PATH[:SCALE]", about, {**MANY, "default": []}))


def add_tokenizer_option(parser: argparse._ActionsContainer) -> None:
    """Add --tokenizer."""
    about = "a tokenizer.model, a tokenizer.json or a folder with one (default: the checkpoint's)"
    add(parser, ("--tokenizer", "PATH", about))


def add_prompt_options(parser: argparse.ArgumentParser, what: str = "prompt") -> None:
    """Add PROMPT, --prompt and --file. `what` is the word for it in the help."""
    file = (
        f"read the {what} from FILE; '-' is standard input; may be repeated. PROMPT and files are joined in this order,"
        " separated by blank lines (docs/guides/prompts.md)"
    )
    text = f"the {what}; without PROMPT, or if it is '-', standard input is read"
    add(
        parser,
        ("text", "PROMPT", text, {"nargs": "?"}),
        ("--prompt -p", "PROMPT", "the prompt, as an option instead of an argument"),
        ("--file -f", "FILE", file, MANY),
    )


def add_generation_options(parser: argparse.ArgumentParser, max_new_tokens: int, fallback: str) -> None:
    """Add all options of a model that generates: also of sampling, sessions, drafts, steering and several processes.

    A sampling option that is not set is None: the checkpoint's default or the fallback applies.
    """
    group = parser.add_argument_group
    order = (
        "applied in this order: penalties, logit bias, grammar, temperature, top-k, top-p, min-p. The defaults come"
        f" from the checkpoint's generation_config.json; without that file: {fallback}"
    )
    grammars = (
        "constrain the answer to a JSON schema, a regular expression or a grammar (docs/guides/structured.md; needs pip"
        " install 'clearllama[structured]')"
    )
    sessions = (
        "save the KV cache in a file; a later prompt with the same prefix reuses it (docs/guides/long-contexts.md). If"
        " both options name the same file, the first run creates it"
    )
    drafts = (
        "a draft proposes several tokens, and the model verifies them in one pass; this is faster if many are accepted."
        " The output is unchanged: identical when greedy, the same distribution when sampling"
    )
    draft = (
        "ngram: propose the tokens that followed the last few tokens earlier in the text, which helps if answers repeat"
        " the prompt. MODEL: a smaller model with the same vocabulary, as in --model"
    )
    processes = (
        "N processes, started by torchrun --nproc-per-node N -m llama ..., divide the model. Each uses one GPU or, on"
        " the CPU, a share of the cores. See docs/guides/several-devices.md"
    )
    most = "maximum number of new tokens (default: %(default)s)"
    add_model_options(parser)
    add(
        group("sampling", order),
        ("--max-new-tokens -n", "N", most, {"default": max_new_tokens}),
        ("--temperature --temp", "T", "sampling temperature; 0 is greedy"),
        ("--top-k", "K", "keep the K most likely tokens; 0 is off"),
        ("--top-p", "P", "keep the smallest set of tokens whose probability reaches P; 1 is off"),
        ("--min-p", "P", "keep tokens with at least P times the probability of the most likely one; 0 is off"),
        ("--repetition-penalty", "R", "above 1, make tokens that are already in the text less likely; 1 is off"),
        ("--presence-penalty", "P", "subtract P from the logit of each token that occurs in the answer; 0 is off"),
        (
            "--frequency-penalty",
            "P",
            "subtract P from the logit of a token each time it occurs in the answer; 0 is off",
        ),
        ("--logit-bias", "ID=B", "add B to the logit of token ID; 42=-100 excludes token 42; may be repeated", MANY),
        ("--seed", "N", "the same seed gives the same tokens (default: random)"),
        ("--stop", "TEXT", "end the answer before this text; may be repeated", MANY),
        ("--min-tokens", "N", "do not end the answer before it has N tokens", {"default": 0}),
        ("--ignore-eos", None, "do not end the answer before --max-new-tokens"),
    )
    add(
        group("structured output", grammars).add_mutually_exclusive_group(),
        ("--json-schema", "FILE", "a file with a JSON schema"),
        ("--regex", "EXPRESSION", "a regular expression that the whole answer matches"),
        ("--grammar", "FILE", "a file with a context-free grammar in llguidance's Lark syntax"),
    )
    add(
        group("session", sessions),
        ("--load-session", "FILE", "load a saved session"),
        ("--save-session", "FILE", "save it at the end or at Ctrl-C, replacing FILE"),
    )
    add(
        group("speculative decoding", drafts),
        ("--draft", "ngram|MODEL", draft),
        ("--draft-tokens", "N", "maximum number of tokens per draft (default: 10)"),
    )
    add_steer_options(parser)
    add_rope_options(parser)
    add(
        group("several processes", processes),
        ("--tensor-parallel", "N", "the number of processes (default: torchrun's)"),
        ("--pipeline-parallel", "N", argparse.SUPPRESS),
    )
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


def add_chat_format(parser: argparse.ArgumentParser, otherwise: str = "the format that fits the vocabulary") -> None:
    """Add --chat-format. otherwise: what is used for a model without a template."""
    about = (
        "how messages are encoded: by the checkpoint's template (jinja), or a built-in format for checkpoints without"
        f" one, such as Meta's (default: auto, the template; without a template, {otherwise})"
    )
    variable = (
        "set a variable of the chat template, such as enable_thinking=false; VALUE is JSON or text; may be repeated"
    )
    add(
        parser,
        ("--chat-format", ["auto", "jinja", "llama2", "llama3", "codellama-70b"], about),
        ("--template-option", "NAME=VALUE", variable, MANY),
    )


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    """Add --chat-template."""
    about = (
        "the chat template to write: llama2, llama3, codellama-70b, none, or a Jinja file (default: auto, the source's"
        " template; Meta's format has none)"
    )
    add(parser, ("--chat-template", "NAME|FILE", about, {"default": "auto"}))


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
def chat_template(args: argparse.Namespace) -> str:
    """The name of a template, or the content of the file."""
    from ..chat import TEMPLATES
    from .streams import read_text

    name: str = args.chat_template
    return name if name in ("auto", "none", *TEMPLATES) else read_text(Path(name))


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The given sampling and grammar options, checked, as keyword arguments of Llama.generate."""
    from ..sampling import SamplingParams
    from .streams import read_text

    names = [field.name for field in dataclasses.fields(SamplingParams) if hasattr(args, field.name)]
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.logit_bias is not None:
        options["logit_bias"] = dict(args.logit_bias)
    SamplingParams(**options)
    stop = args.stop or []
    if "" in stop:
        raise UsageError("--stop must not be empty")
    files = {"schema": args.json_schema, "grammar": args.grammar}
    grammars = {name: read_text(Path(file)) for name, file in files.items() if file is not None}
    ends = {"stop": stop, "min_tokens": args.min_tokens, "ignore_eos": args.ignore_eos}
    return {**options, **ends, **grammars, **({} if args.regex is None else {"regex": args.regex})}


def template_options(args: argparse.Namespace) -> dict[str, Any]:
    """The variables of --template-option. A value that is no JSON is text."""
    options: dict[str, Any] = {}
    for given in args.template_option or ():
        name, equals, value = given.partition("=")
        if not equals:
            raise UsageError(f"--template-option: expected NAME=VALUE, got {given!r:.80}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
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
    if args.rope_theta is not None:
        number("--rope-theta", args.rope_theta, 0, 1e300, above=True)
    if factor is not None:
        number("--rope-factor", factor, 1, LARGEST_FACTOR)
        if kind in (None, "none"):
            raise UsageError("--rope-factor needs a method: add --rope-scaling, for example --rope-scaling yarn")
    if kind in (None, "none"):
        return None if kind is None else {"rope_type": "default"}
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind.lstrip().startswith("{"):
        scaling = parse_json(kind.encode(errors="surrogateescape"), "--rope-scaling", UsageError)
    if factor is not None and scaling.setdefault("factor", factor) != factor:
        raise UsageError(f"the RoPE factor is {factor:g} and, in the JSON, {scaling['factor']!r:.40}; give it once")
    return scaling


def check_one_device(args: argparse.Namespace, command: str) -> None:
    """Raise UsageError if the layers would be spread over several devices."""
    if args.gpu_layers is not None or "," in args.device:
        raise UsageError(f"{command} needs the model on one device: leave out --gpu-layers and name one --device")
