"""clearllama generate: answer one prompt. batch.py answers many."""

from __future__ import annotations

import argparse
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import answers, arguments, batch, loading, ranks, sessions, streams
from .prompt import add_prompt_options, read_prompt

if TYPE_CHECKING:
    from collections.abc import Generator

    from ..text import Completion, Llama, Piece
    from ..tokenizer import Tokenizer


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer or continue a prompt",
        description="Answer a prompt. If the model has a chat template, the prompt becomes one user message; --raw"
        " continues it as plain text.",
        usage="%(prog)s [options] [PROMPT]",
        allow_abbrev=False,
    )
    add_prompt_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--raw", action="store_true", help="continue the prompt without a chat template")
    parser.add_argument(
        "--parse-special",
        action="store_true",
        default=None,
        help="with --raw: encode control strings in the prompt, such as <|im_end|>, as control tokens (default: as"
        " plain text)",
    )
    arguments.add_chat_format(parser, "no format is used and the prompt is continued")
    parser.add_argument(
        "--suffix", metavar="TEXT", help="generate the text between PROMPT and this suffix (infilling, for Code Llama)"
    )
    parser.add_argument(
        "--logprobs", action="store_true", help="with --json or --prompts: add the log-probability of each new token"
    )
    arguments.add_output_options(
        parser, json="one JSON object: prompt, text, tokens, prompt_tokens, finish_reason, logprobs, stats"
    )
    arguments.add_model_options(parser)
    arguments.add_sampling_options(parser, max_new_tokens=256, fallback="greedy")
    batch.add_options(parser)
    arguments.add_session_options(parser)
    arguments.add_draft_options(parser)
    arguments.add_steer_options(parser)
    arguments.add_rope_options(parser)
    ranks.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.prompts is not None:
        return batch.run(args)
    batch.check_absent(args)
    prompt = ranks.first(args, lambda: read_prompt(args))
    if args.logprobs and not args.json:
        raise UsageError("--logprobs needs --json or --prompts")
    if args.suffix is not None and (args.system is not None or args.chat_format != "auto"):
        raise UsageError("--suffix continues plain text: leave --system and --chat-format out")
    if args.parse_special and not args.raw:
        raise UsageError("--parse-special needs --raw: in a chat, text never becomes a control token")
    if args.parse_special and args.suffix is not None:
        raise UsageError("--suffix reads the prompt as plain text: leave --parse-special out")
    options = arguments.sampling_options(args)
    sessions.check_session(args)
    llm = loading.load(args, lambda tokenizer: len(tokenizer.encode_prompt(prompt)) + args.max_new_tokens)
    options["draft"] = loading.load_draft(args, llm.model)
    session = options["session"] = sessions.load_session(args, llm)
    if session is not None and session.messages:
        streams.info(args, "the session's conversation is not part of this prompt; clearllama chat continues it")
        session.messages = []
    raw = loading.pick_form(args, llm)
    with answers.prompt_bar(args) as show, sessions.saving(args, lambda: session, llm.model):
        options |= {"logprobs": args.logprobs, "progress": partial(show, "prompt")}
        answer(args, prompt, stream(args, llm, prompt, raw, options))
    return 0


def stream(args: argparse.Namespace, llm: Llama, prompt: str, raw: bool, options: dict[str, Any]) -> Generator[Piece]:
    """The pieces of the answer. Reports how the prompt is encoded."""
    if args.suffix is not None:
        streams.info(args, "filling in the text between prompt and suffix")
        ids = ranks.first(args, lambda: llm.tokenizer.encode_infill(prompt, args.suffix))
        return llm.stream_ids(ids, **options)
    if not raw:
        form = f"the format {llm.chat_format}" if llm.chat_format else "the model's chat template"
        streams.info(args, f"the prompt is one user message in {form} (--raw continues it as plain text)")
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        ids = ranks.first(args, lambda: llm.encode_chat([*system, {"role": "user", "content": prompt}]))
        return llm.stream_ids(ids, continues=False, **options)
    special = bool(args.parse_special)
    form = "text with control tokens" if special else "plain text"
    streams.info(args, f"the prompt is continued as {form} ({loading.why_raw(args, llm)})")
    if not special and (found := control_strings(llm.tokenizer, prompt)):
        streams.info(args, f"the prompt contains {found} as plain text; --parse-special enables control tokens")
    ids = ranks.first(args, lambda: llm.tokenizer.encode_prompt(prompt, special))
    return llm.stream_ids(ids, **options)


def control_strings(tokenizer: Tokenizer, text: str) -> str:
    """The first three control strings in a text, separated by commas; empty if there is none."""
    found = dict.fromkeys(part for part, is_control in tokenizer.split_control(text) if is_control)
    return ", ".join(list(found)[:3])


def answer(args: argparse.Namespace, prompt: str, pieces: Generator[Piece]) -> None:
    """Write an answer while it is generated, or as one JSON object at the end."""
    completion: Completion | None = None
    with contextlib.closing(pieces):
        for piece in pieces:
            if not args.json:
                streams.write(piece.text)
            completion = piece.completion
    if completion is None:
        raise RuntimeError("the stream ended without a completion")
    if args.json:
        streams.write_json({"prompt": prompt, **answers.as_dict(completion)})
    elif completion.text:
        streams.write("\n")
    answers.show_stats(args, completion.stats, completion.finish_reason)
