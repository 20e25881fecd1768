"""What the subcommands share: options, loading with a word on stderr, writing to stdout. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import stat
import sys
import time
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, LlamaError, UsageError
from ..hub import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..model import Transformer
    from ..session import Session
    from ..speculative import Draft
    from ..text import Completion, Llama, Stats
    from ..tokenizer import Tokenizer

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


def check_draft(args: argparse.Namespace) -> None:
    """What is wrong with --draft and --draft-tokens, as far as it shows before the model is loaded."""
    from ..hub import resolve
    from ..speculative import DRAFTS

    if args.draft_tokens is not None and args.draft is None:
        raise UsageError("--draft-tokens goes with --draft")
    if args.draft_tokens is not None and args.draft_tokens < 1:
        raise UsageError(f"--draft-tokens must be at least 1, got {args.draft_tokens}")
    if args.draft is not None and args.draft not in DRAFTS:
        try:
            resolve(args.draft)
        except CheckpointError as error:
            raise CheckpointError(f"--draft is {', '.join(DRAFTS)} or a model, and {error}") from None


def load_draft(args: argparse.Namespace, model: Transformer) -> Draft | None:
    """The draft that the options name, fit for the model; None without --draft."""
    from ..speculative import DRAFTS, check_match, make_draft

    if args.draft is None or args.draft in DRAFTS:
        return make_draft(args.draft, args.draft_tokens)
    own = {
        "world": None,
        "model": args.draft,
        "max_seq_len": None,
        "rope_scaling": None,
        "rope_factor": None,
        "rope_theta": None,
    }
    smaller = load_model(argparse.Namespace(**{**vars(args), **own}))
    check_match(smaller, model)
    return make_draft(smaller, args.draft_tokens)


def check_session(args: argparse.Namespace) -> None:
    """What is wrong with --load-session and --save-session, as far as it shows before the model is loaded."""
    if args.load_session is None and args.save_session is None:
        return
    from ..session import check_target, open_session

    if args.load_session is not None:
        open_session(Path(args.load_session))
    if args.save_session is not None:
        check_target(Path(args.save_session))


def load_session(args: argparse.Namespace, model: Transformer) -> Session | None:
    """The session that --load-session names, or a new one to be saved; None without either option."""
    if args.load_session is None and args.save_session is None:
        return None
    from ..session import Session, check_model

    check_model(model)
    if args.load_session is None:
        return Session()
    session = Session.load(args.load_session, model)
    turns = f" and {len(session.messages)} messages" if session.messages else ""
    say(args, f"{args.load_session}: a session of {len(session.tokens):,} tokens{turns}")
    return session


@contextlib.contextmanager
def saving(args: argparse.Namespace, session: Session | None, model: Transformer) -> Iterator[None]:
    """Save the session behind the block, where --save-session asks for it; also where a signal ends the block."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, BrokenPipeError):
        if args.save_session is not None:
            tell("")  # the answer broke off in the middle of a line
        _save_session(args, session, model)
        raise
    _save_session(args, session, model)


def _save_session(args: argparse.Namespace, session: Session | None, model: Transformer) -> None:
    if session is None or args.save_session is None:
        return
    if not session.tokens:
        say(args, f"{args.save_session} was not saved: nothing has been computed yet")
        return
    size = session.save(args.save_session, model)
    say(args, f"{args.save_session}: saved {len(session.tokens):,} tokens, {size / 1e6:,.1f} MB")


def say(args: argparse.Namespace, line: str) -> None:
    """A line on stderr, unless --quiet."""
    if not args.quiet:
        tell(f"clearllama: {line}")


def tell(text: str) -> None:
    """A text on stderr. A stderr that can't be written to must not cost the answer on stdout."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def describe(error: BaseException) -> str:
    """An error as one printable line."""
    if isinstance(error, LlamaError):
        return one_line(str(error))
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error):
        return f"out of memory ({one_line(str(error))[:200]}); use a smaller model, dtype or --max-seq-len"
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    return f"unexpected {type(error).__name__}: {one_line(str(error))[:300]}; --debug shows where"


def one_line(text: str) -> str:
    """A text without line breaks and control characters."""
    return "".join(c if c.isprintable() else " " if c in "\r\n\t" else repr(c)[1:-1] for c in text)


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


def load(args: argparse.Namespace, tokens: Callable[[Tokenizer], int] | None = None) -> Llama:
    """The model that the options name, with its tokenizer; says on stderr what was loaded and what is unusual.

    tokens tells, by the tokenizer, how long prompt and answer will be, so that there is memory for them.
    """
    from .. import loader, parallel, runtime

    runtime.set_threads(args.threads)
    started = time.perf_counter()
    with parallel.together(getattr(args, "world", None)):
        llm = loader.load(args.model, tokens=tokens, **_model_options(args))
    _say_loaded(args, llm.model, llm.warnings, time.perf_counter() - started)
    if llm.sampling:
        wishes = ", ".join(f"{key} {value}" for key, value in llm.sampling.items())
        say(args, f"the checkpoint asks for {wishes}; options override it")
    return llm


def load_model(args: argparse.Namespace) -> Transformer:
    """The model that the options name as `load` has it; no tokenizer is needed."""
    from .. import loader, parallel, runtime
    from ..checkpoint import open_checkpoint
    from ..hub import resolve

    runtime.set_threads(args.threads)
    started = time.perf_counter()
    with parallel.together(getattr(args, "world", None)):
        checkpoint = open_checkpoint(resolve(args.model))
        model = loader.build(checkpoint, pack=True, **_model_options(args))
    _say_loaded(args, model, checkpoint.warnings, time.perf_counter() - started)
    return model


def _model_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a model as `loader.load` and `loader.build` name them."""
    names = ("device", "dtype", "rope", "max_seq_len", "rope_theta", "quantize", "compile", "kv_cache", "gpu_layers")
    return {
        **{name: getattr(args, name) for name in names},
        "rope_scaling": rope_scaling(args),
        "world": getattr(args, "world", None),
        "check_memory": not args.no_memory_check,
    }


def _say_loaded(args: argparse.Namespace, model: Transformer, warnings: Sequence[str], seconds: float) -> None:
    from .. import placement, quant
    from ..rope_scaling import reach, trained_length

    weight, world = model.norm.weight, getattr(args, "world", None)
    dtype = str(weight.dtype).removeprefix("torch.")
    say(
        args,
        f"{args.model}: {_millions(model.config.n_params)} parameters,"
        f" {dtype}{quant.told(model)} on {placement.told(model)}{f' in {world}' if world else ''},"
        f" loaded in {seconds:.1f} s",
    )
    for warning in warnings:
        say(args, f"warning: {warning}")
    config = model.config
    trained = int(trained_length(config))
    if args.rope_scaling is not None or args.rope_theta is not None:
        scaling = config.rope_scaling or {"rope_type": "default"}
        told = ", ".join(f"{key} {value}" for key, value in scaling.items() if not isinstance(value, list))
        say(
            args,
            f"rope: {told}, theta {config.rope_theta:g}, as asked for; context {model.max_seq_len},"
            f" {trained} of it without stretching",
        )
    if args.max_seq_len and args.max_seq_len > reach(config.max_seq_len, config.rope_scaling):
        say(
            args,
            f"warning: --max-seq-len {args.max_seq_len} is beyond the {config.max_seq_len} the model was trained for",
        )


def _millions(n: int) -> str:
    return f"{n / 1e6:,.0f}M" if n >= 10**7 else f"{n / 1e6:.2f}M"


def say_stats(args: argparse.Namespace, stats: Stats, finish_reason: str) -> None:
    """Tokens, speed and seed of an answer, on stderr."""

    def speed(tps: float | None) -> str:
        return f" ({tps:,.0f} tok/s)" if tps else ""

    prompt = f"{stats.prompt_tokens} prompt tokens{speed(stats.prefill_tps)}"
    if args.load_session is not None and stats.cached_tokens:
        prompt += f", {stats.cached_tokens} of them from the session"
    new = f"{stats.new_tokens} new{speed(stats.decode_tps)}"
    if args.draft is not None:
        new += f", {stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens accepted"
    say(args, f"{prompt}, {new}, finish: {finish_reason}, seed {stats.seed}")


def answer_facts(completion: Completion) -> dict[str, Any]:
    """What the JSON of an answer holds, whatever asked for it."""
    logprobs = completion.logprobs
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "prompt_tokens": completion.stats.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "logprobs": logprobs and [x if math.isfinite(x) else None for x in logprobs],  # JSON has no infinity
        "stats": completion.stats.as_dict(),
    }


def model_name(path_or_name: str) -> str:
    """What to call a model: the last part of its path, or the name it was asked for by."""
    path = Path(path_or_name)
    return path.resolve().name if path.exists() else path_or_name


def write_file(path: Path, text: str) -> None:
    """A text into a file. Raises UsageError, naming the file, where that can't be done."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def write(text: str) -> None:
    """Text to stdout at once. On a terminal, control characters of the model's are shown and not obeyed."""
    if sys.stdout.isatty():
        text = "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """One JSON value on one line; escaped to ASCII where stdout is not UTF-8."""
    ascii_only = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    text = json.dumps(value, ensure_ascii=ascii_only, allow_nan=False)
    if sys.stdout.isatty():  # JSON escapes the control characters below U+0020 by itself, but not these
        text = "".join(c if unicodedata.category(c) != "Cc" else f"\\u{ord(c):04x}" for c in text)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def read_text(path: Path) -> str:
    """All of a text file or a pipe, which must be UTF-8."""
    try:
        if stat.S_ISCHR(path.stat().st_mode):
            raise UsageError(f"{path} is a device, which may have no end; expected a text file")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; expected a text file") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert it") from None


def read_stdin() -> str:
    """All of stdin, as UTF-8, without the newline that `echo` adds."""
    if sys.stdin is None:
        raise UsageError("no prompt was given and standard input is closed")
    data = sys.stdin.buffer.read()
    if not data:
        raise UsageError("no prompt: standard input is empty; give the text as an argument")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert it first"
        ) from None
