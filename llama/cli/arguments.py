"""Options that several subcommands have, and what is wrong with them before a model is loaded. Imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import UsageError
from ..hub.named import DEFAULT

LARGEST_FACTOR = 10_000  # nobody stretches a context further

Subparsers = Any  # argparse's own class for this is private


def add_model_options(parser: argparse.ArgumentParser, default: str | None = DEFAULT, dtype: str | None = None) -> None:
    """Which model, where and how; default None is a model of the command's own, dtype None the device's fastest."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        "-m",
        default=default,
        metavar="PATH_OR_NAME",
        help="a folder of Meta's or Hugging Face's, a .gguf file, a known name, or ORG/NAME that was pulled"
        + (f" (default: {default})" if default else ""),
    )
    group.add_argument(
        "--device",
        default="auto",
        help="auto, cpu, cuda, cuda:1, mps; cuda:0,cuda:1 spreads the layers (default: auto)",
    )
    group.add_argument(
        "--gpu-layers", type=int, metavar="K", help="only the last K layers on the GPU, the others on the CPU"
    )
    group.add_argument(
        "--dtype",
        default=dtype or "auto",
        help=f"auto, float32, bfloat16, float16 (default: {dtype or 'the fastest the device computes in'})",
    )
    group.add_argument(
        "--rope",
        default="complex",
        choices=["complex", "real", "half", "elementwise", "matrix"],
        help="form of the rotation; all give the same",
    )
    group.add_argument("--max-seq-len", type=int, metavar="N", help="context in tokens (default: the model's)")
    group.add_argument(
        "--rope-scaling",
        metavar="KIND",
        help="stretch the context: linear, ntk, dynamic, yarn, llama3 with --rope-factor; 'none' takes the checkpoint's"
        ' scaling off; or all of it as JSON: {"rope_type": "yarn", "factor": 4, "beta_fast": 16}',
    )
    group.add_argument("--rope-factor", type=float, metavar="S", help="how much longer the context is to become")
    group.add_argument("--rope-theta", type=float, metavar="T", help="another base of the rotary frequencies")
    group.add_argument(
        "--quantize",
        metavar="SCHEME",
        help="round the linear layers while loading: int8, int4, ... ('clearllama quantize --list' names them all)",
    )
    group.add_argument("--compile", action="store_true", help="compile the decoding step: 20 s once, then kept on disk")
    group.add_argument(
        "--kv-cache",
        default="model",
        choices=["model", "int8"],
        help="what keys and values are kept in: the model's dtype, or 8 bits for long contexts (default: %(default)s)",
    )
    group.add_argument(
        "--no-memory-check", action="store_true", help="try it, even if it needs more memory than is free"
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one for each core)")


def add_sampling_options(parser: argparse.ArgumentParser, max_new_tokens: int, fallback: str) -> None:
    """How tokens are chosen. What is not given is None: the checkpoint's own wish, or else the fallback, holds."""
    group = parser.add_argument_group(
        "sampling",
        "applied in this order: repetition penalty, temperature, top-k, top-p, min-p; then one draw. Where nothing is"
        f" said the checkpoint's generation_config.json holds, and without one: {fallback}",
    )
    group.add_argument(
        "--max-new-tokens", "-n", type=int, default=max_new_tokens, metavar="N", help="default: %(default)s"
    )
    group.add_argument("--temperature", "--temp", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest; 0 is off")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest that reach P; 1 is off")
    group.add_argument("--min-p", type=float, metavar="P", help="keep those at least P times the likeliest; 0 is off")
    group.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="above 1 makes tokens seen less likely; 1 is off"
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="the same seed gives the same tokens (default: a fresh one)"
    )
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """Speculative decoding."""
    group = parser.add_argument_group(
        "speculative decoding",
        "a draft guesses tokens, and the model checks several in one pass: faster where the guesses are right. What is"
        " said stays the model's own, the same tokens if greedy, else drawn from the same distribution",
    )
    group.add_argument(
        "--draft",
        metavar="ngram|MODEL",
        help="ngram: what followed the last few tokens where they stood in the text before, for answers that copy from"
        " the prompt; or a smaller model with the same vocabulary, named as --model names one",
    )
    group.add_argument("--draft-tokens", type=int, metavar="N", help="most tokens to guess at once (default: 10)")


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """The KV cache from one run to the next."""
    group = parser.add_argument_group(
        "session",
        "the KV cache in a file: what a later prompt begins alike with is not computed again (docs/long-contexts.md)",
    )
    group.add_argument("--load-session", metavar="FILE", help="go on with a session that was saved")
    group.add_argument(
        "--save-session",
        metavar="FILE",
        help="save the session at the end, or at Ctrl-C; an older session there is replaced",
    )


def add_chat_format(parser: argparse.ArgumentParser) -> None:
    """How messages become tokens."""
    parser.add_argument(
        "--chat-format",
        default="auto",
        choices=["auto", "jinja", "llama2", "llama3", "codellama-70b"],
        help="how messages become tokens: the checkpoint's template (jinja), or a built-in format for checkpoints that"
        " carry none, as Meta's (default: auto)",
    )


def add_debug(parser: argparse.ArgumentParser) -> None:
    """How much is said on stderr."""
    parser.add_argument("--quiet", "-q", action="store_true", help="nothing on stderr but errors")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of Llama.generate; ranges are checked before a model is loaded."""
    from ..sampling import SamplingParams

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    SamplingParams(**options)
    if "" in args.stop:
        raise UsageError("--stop must not be empty")
    return {**options, "stop": args.stop}


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a model as `loader.load` and `loader.build` name them."""
    names = ("device", "dtype", "rope", "max_seq_len", "rope_theta", "quantize", "compile", "kv_cache", "gpu_layers")
    return {
        **{name: getattr(args, name) for name in names},
        "rope_scaling": rope_scaling(args),
        "world": getattr(args, "world", None),
        "check_memory": not args.no_memory_check,
    }


def rope_scaling(args: argparse.Namespace) -> dict[str, Any] | None:
    """The scaling that --rope-scaling and --rope-factor ask for; None leaves the checkpoint's in place."""
    factor: float | None = args.rope_factor
    if args.rope_theta is not None and not 0 < args.rope_theta < 1e300:
        raise UsageError(f"--rope-theta must be above 0 and below 1e300, got {args.rope_theta:g}")
    if factor is not None and not 1 <= factor <= LARGEST_FACTOR:  # false for NaN too
        raise UsageError(f"--rope-factor must lie between 1 and {LARGEST_FACTOR:,}, got {factor:g}")
    if args.rope_scaling is None:
        if factor is not None:
            raise UsageError("--rope-factor says how far, not how: add --rope-scaling, yarn for example")
        return None
    if args.rope_scaling == "none":
        if factor is not None:
            raise UsageError("--rope-scaling none takes any scaling off, so --rope-factor has no effect; leave it out")
        return {"rope_type": "default"}
    scaling: dict[str, Any] = {"rope_type": args.rope_scaling}
    if args.rope_scaling.lstrip().startswith("{"):
        from ..checkpoint.documents import parse_json
        from ..errors import CheckpointError

        try:
            scaling = parse_json(args.rope_scaling.encode(errors="surrogateescape"), "--rope-scaling")
        except CheckpointError as error:
            raise UsageError(str(error).replace("it is damaged or not JSON", "it is not JSON")) from None
    if factor is not None:
        if scaling.get("factor", factor) != factor:
            raise UsageError(f"the factor was given twice, as {scaling['factor']!r:.40} and {factor:g}; give it once")
        scaling["factor"] = factor
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "ntk", "dynamic", "yarn", "llama3") and scaling.get("factor") is None:
        raise UsageError(f"--rope-scaling {kind} needs --rope-factor S, how much longer the context is to become")
    if kind == "llama3":  # Meta's own constants, in apply_scaling
        scaling = scaling | {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | scaling
    return scaling


def check_one_device(args: argparse.Namespace, command: str) -> None:
    """Raise UsageError where a model would be split that the command has to see whole."""
    if args.gpu_layers is not None or "," in args.device:
        raise UsageError(f"{command} wants the model on one device; leave out --gpu-layers and all devices but one")
