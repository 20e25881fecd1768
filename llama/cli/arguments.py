"""Options shared by several subcommands, and the checks that need no model. Does not import torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..checks import number
from ..errors import UsageError
from ..hub import default_model

LARGEST_FACTOR = 10_000  # upper limit of --rope-factor

Subparsers = Any  # argparse's own class is private


def option(name: str) -> str:
    """The option of an attribute of the parsed arguments: 'top_p' -> '--top-p'."""
    return f"--{name.replace('_', '-')}"


def add_model_options(parser: argparse.ArgumentParser, optional: bool = False, dtype: str | None = None) -> None:
    """Add the options of a model. A command that loads one adds the options of its RoPE as well, after its own groups.

    optional  the command also works without a model, so that --model has no default
    dtype     the default of --dtype; None for the fastest dtype of the device
    """
    group = parser.add_argument_group("model")
    default = None if optional else default_model()
    group.add_argument(
        "--model",
        "-m",
        default=default,
        metavar="PATH_OR_NAME",
        help="a folder in Meta's or Hugging Face's format, a .gguf file, or ORG/NAME[:QUANT] on the Hugging Face hub,"
        " which is downloaded on first use"
        + (" (default: %(default)s; the environment variable CLEARLLAMA_MODEL sets it)" if default else ""),
    )
    add_adapter_option(group)
    add_tokenizer_option(group)
    device = "cpu, cuda, cuda:1, mps; cuda:0,cuda:1 puts layers on both (default: auto)"
    group.add_argument("--device", default="auto", help=device)
    fastest = dtype or "auto, the fastest on the device"
    group.add_argument("--dtype", default=dtype or "auto", help=f"float32, bfloat16 or float16 (default: {fastest})")
    schemes = "quantize while loading: int8 or int4 ('clearllama quantize --list' shows all schemes)"
    group.add_argument("--quantize", metavar="SCHEME", help=schemes)
    group.add_argument("--compile", action="store_true", help="compile the decoding step: about 20 s the first time")
    group.add_argument("--max-seq-len", type=int, metavar="N", help="context length in tokens (default: the model's)")
    add_kv_cache_option(group, "the model's dtype")
    group.add_argument("--gpu-layers", type=int, metavar="K", help="put only the last K layers on the GPU")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one per usable core)")
    group.add_argument("--no-memory-check", action="store_true", help="load the model even if memory seems too small")


def add_kv_cache_option(parser: argparse._ActionsContainer, model: str) -> None:
    """Add --kv-cache. model: what the choice `model` means."""
    about = f"store keys and values in {model}, or in int8, half the memory (default: model)"
    parser.add_argument("--kv-cache", default="model", choices=["model", "int8"], help=about)


def add_rope_options(parser: argparse.ArgumentParser) -> None:
    """Add the overrides of the RoPE settings, and --rope."""
    group = parser.add_argument_group("RoPE", "overrides of the checkpoint's settings, for long contexts or for study")
    group.add_argument(
        "--rope-scaling",
        metavar="KIND",
        help="linear, ntk, dynamic, yarn or llama3, each with --rope-factor; none, to remove the checkpoint's scaling;"
        ' or all parameters as JSON, such as {"rope_type": "yarn", "factor": 4, "beta_fast": 16}',
    )
    group.add_argument("--rope-factor", type=float, metavar="S", help="extend the context S times")
    group.add_argument("--rope-theta", type=float, metavar="T", help="base of the rotary frequencies")
    forms = ["complex", "real", "half"]
    about = "implementation of the rotation; all give the same logits (default: %(default)s)"
    group.add_argument("--rope", default="complex", choices=forms, help=about)


def add_adapter_option(parser: argparse._ActionsContainer) -> None:
    """Add --adapter."""
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="PATH[:SCALE]",
        help="merge a LoRA adapter (a PEFT folder or a GGUF file) into the weights; may be repeated (default scale: 1)",
    )


def add_tokenizer_option(parser: argparse._ActionsContainer) -> None:
    """Add --tokenizer."""
    about = "a tokenizer.model, a tokenizer.json or a folder with one (default: the checkpoint's)"
    parser.add_argument("--tokenizer", metavar="PATH", help=about)


def add_sampling_options(parser: argparse.ArgumentParser, max_new_tokens: int, fallback: str) -> None:
    """Add the sampling options. An option that is not set is None: the checkpoint's default or the fallback applies."""
    group = parser.add_argument_group(
        "sampling",
        "applied in this order: penalties, logit bias, grammar, temperature, top-k, top-p, min-p. The defaults come"
        f" from the checkpoint's generation_config.json; without that file: {fallback}",
    )
    most = "maximum number of new tokens (default: %(default)s)"
    group.add_argument("--max-new-tokens", "-n", type=int, default=max_new_tokens, metavar="N", help=most)
    group.add_argument("--temperature", "--temp", type=float, metavar="T", help="sampling temperature; 0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K most likely tokens; 0 is off")
    for name, metavar, about in (
        ("top-p", "P", "keep the smallest set of tokens whose probability reaches P; 1 is off"),
        ("min-p", "P", "keep tokens with at least P times the probability of the most likely one; 0 is off"),
        ("repetition-penalty", "R", "above 1, make tokens that are already in the text less likely; 1 is off"),
        ("presence-penalty", "P", "subtract P from the logit of each token that occurs in the answer; 0 is off"),
        ("frequency-penalty", "P", "subtract P from the logit of a token each time it occurs in the answer; 0 is off"),
    ):
        group.add_argument(f"--{name}", type=float, metavar=metavar, help=about)
    excluding = "add B to the logit of token ID; 42=-100 excludes token 42; may be repeated"
    group.add_argument("--logit-bias", action="append", default=[], type=bias, metavar="ID=B", help=excluding)
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same tokens (default: random)")
    before = "end the answer before this text; may be repeated"
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help=before)
    add_grammar_options(parser)


def add_grammar_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that constrain the answer to a grammar."""
    group = parser.add_argument_group(
        "structured output",
        "constrain the answer to a JSON schema, a regular expression or a grammar (docs/guides/structured.md; needs"
        " pip install 'clearllama[structured]')",
    )
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", metavar="FILE", help="a file with a JSON schema")
    one.add_argument("--regex", metavar="EXPRESSION", help="a regular expression that the whole answer matches")
    one.add_argument("--grammar", metavar="FILE", help="a file with a context-free grammar in llguidance's Lark syntax")


def grammar_options(args: argparse.Namespace) -> dict[str, str]:
    """The grammar options as keyword arguments of Llama.generate."""
    from .streams import read_text

    if args.json_schema is not None:
        return {"schema": read_text(Path(args.json_schema))}
    if args.grammar is not None:
        return {"grammar": read_text(Path(args.grammar))}
    return {} if args.regex is None else {"regex": args.regex}


def bias(text: str) -> tuple[int, float]:
    """Parse ID=B of --logit-bias."""
    id, _, value = text.partition("=")
    try:
        return int(id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ID=B, such as 42=-100, got {text!r:.80}") from None


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of speculative decoding."""
    group = parser.add_argument_group(
        "speculative decoding",
        "a draft proposes several tokens, and the model verifies them in one pass; this is faster if many are accepted."
        " The output is unchanged: identical when greedy, the same distribution when sampling",
    )
    group.add_argument(
        "--draft",
        metavar="ngram|MODEL",
        help="ngram: propose the tokens that followed the last few tokens earlier in the text, which helps if answers"
        " repeat the prompt. MODEL: a smaller model with the same vocabulary, as in --model",
    )
    group.add_argument("--draft-tokens", type=int, metavar="N", help="maximum number of tokens per draft (default: 10)")


def add_steer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that steer the model by a control vector."""
    group = parser.add_argument_group(
        "steering",
        "add a control vector to the output of each layer; 'clearllama steer' makes one (docs/guides/inside.md)",
    )
    group.add_argument("--steer", metavar="FILE", help="a control vector in GGUF, also from llama.cpp or repeng")
    group.add_argument("--steer-scale", type=float, metavar="S", help="multiply the vector by S (default: 1)")
    layers = "steer only these layers; 8:16 is layers 8 to 15 (default: all)"
    group.add_argument("--steer-layers", metavar="FIRST:END", help=layers)


def check_steer(args: argparse.Namespace) -> None:
    """Raise UsageError if an option needs --steer, or if --steer is given with --compile."""
    for name in ("steer_scale", "steer_layers"):
        if args.steer is None and getattr(args, name) is not None:
            raise UsageError(f"{option(name)} needs --steer FILE")
    if args.steer_scale is not None:
        number("--steer-scale", args.steer_scale, -1e6, 1e6)
    if args.steer is not None and args.compile:
        raise UsageError("--steer can't change the outputs of compiled layers: leave --compile out")


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that save the KV cache and load it again."""
    group = parser.add_argument_group(
        "session",
        "save the KV cache in a file; a later prompt with the same prefix reuses it (docs/guides/long-contexts.md). If"
        " both options name the same file, the first run creates it",
    )
    group.add_argument("--load-session", metavar="FILE", help="load a saved session")
    group.add_argument("--save-session", metavar="FILE", help="save it at the end or at Ctrl-C, replacing FILE")


def add_chat_format(parser: argparse.ArgumentParser, otherwise: str = "the format that fits the vocabulary") -> None:
    """Add --chat-format. otherwise: what is used for a model without a template."""
    parser.add_argument(
        "--chat-format",
        default="auto",
        choices=["auto", "jinja", "llama2", "llama3", "codellama-70b"],
        help="how messages are encoded: by the checkpoint's template (jinja), or a built-in format for checkpoints"
        f" without one, such as Meta's (default: auto, the template; without a template, {otherwise})",
    )


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    """Add --chat-template."""
    parser.add_argument(
        "--chat-template",
        default="auto",
        metavar="NAME|FILE",
        help="the chat template to write: llama2, llama3, codellama-70b, none, or a Jinja file (default: auto, the"
        " source's template; for Meta's format, which has none, the one that fits the vocabulary if the name of the"
        " source folder contains instruct or chat)",
    )


def chat_template(args: argparse.Namespace) -> str:
    """The name of a template, or the content of the file."""
    from ..chat import TEMPLATES
    from .streams import read_text

    name: str = args.chat_template
    return name if name in ("auto", "none", *TEMPLATES) else read_text(Path(name))


def add_output_options(parser: argparse.ArgumentParser, json: str | None = None) -> None:
    """Add --quiet, --debug and, for a command that writes JSON, --json; `json` says what it writes."""
    if json is not None:
        parser.add_argument("--json", action="store_true", help=f"write {json}")
    parser.add_argument("--quiet", "-q", action="store_true", help="write only errors to stderr")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options as keyword arguments of Llama.generate, with their ranges checked."""
    from ..sampling import SamplingParams

    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", *penalties, "seed")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.logit_bias:
        options["logit_bias"] = dict(args.logit_bias)
    SamplingParams(**options)
    if "" in args.stop:
        raise UsageError("--stop must not be empty")
    return {**options, "stop": args.stop, **grammar_options(args)}


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """The model options as keyword arguments of loader.load and loader.build."""
    names = ("device", "dtype", "rope", "max_seq_len", "rope_theta", "quantize", "compile", "kv_cache", "gpu_layers")
    return {
        **{name: getattr(args, name) for name in names},
        "rope_scaling": rope_scaling(args),
        "world": getattr(args, "world", None),
        "check_memory": not args.no_memory_check,
    }


def parse_json(data: bytes, source: str) -> dict[str, Any]:
    """Parse a JSON object that a user wrote. Raises UsageError; `source` names the object in the message."""
    from ..errors import CheckpointError
    from ..system.documents import parse_json as parse

    try:
        return parse(data, source)
    except CheckpointError as error:
        raise UsageError(str(error)) from None


def rope_scaling(args: argparse.Namespace) -> dict[str, Any] | None:
    """The scaling requested by --rope-scaling and --rope-factor; None keeps the checkpoint's."""
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
        scaling = parse_json(kind.encode(errors="surrogateescape"), "--rope-scaling")
    if factor is not None and scaling.setdefault("factor", factor) != factor:
        raise UsageError(f"the RoPE factor is {factor:g} and, in the JSON, {scaling['factor']!r:.40}; give it once")
    return scaling


def check_one_device(args: argparse.Namespace, command: str) -> None:
    """Raise UsageError if the layers would be spread over several devices."""
    if args.gpu_layers is not None or "," in args.device:
        raise UsageError(f"{command} needs the model on one device: leave out --gpu-layers and name one --device")
