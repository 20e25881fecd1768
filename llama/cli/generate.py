"""clearllama generate: answer one prompt. batch.py answers many."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

from ..errors import UsageError
from . import answers, arguments, batch, drafts, loading, ranks, sessions, streams
from .prompt import add_prompt_options, read_prompt

if TYPE_CHECKING:
    from collections.abc import Generator

    from ..text import Piece
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
    drafts.check_draft(args)
    sessions.check_session(args)
    llm = loading.load(args, lambda tokenizer: len(tokenizer.encode_prompt(prompt)) + args.max_new_tokens)
    options["draft"] = drafts.load_draft(args, llm.model)
    shown = options["progress"] = answers.PromptBar(args)
    session = options["session"] = sessions.load_session(args, llm)
    if session is not None and session.messages:
        streams.info(
            args,
            "this prompt is not part of the session's conversation; to continue the conversation, use clearllama chat",
        )
        session.messages = []
    if args.chat_format != "auto":
        llm.chat_format = args.chat_format
    raw = args.raw or (args.chat_format == "auto" and llm.chat_template is None)
    if raw and args.system is not None:
        reason = "--raw turns the chat off" if args.raw else "this model has no chat template"
        remedy = "leave --raw out" if args.raw else "leave it out, or name a format with --chat-format"
        raise UsageError(f"--system needs a chat, but {reason}; {remedy}")
    if args.suffix is not None:
        streams.info(args, "filling in the text between prompt and suffix")
        ids = ranks.first(args, lambda: llm.tokenizer.encode_infill(prompt, args.suffix))
        pieces = llm.stream_ids(ids, logprobs=args.logprobs, **options)
    elif raw:
        reason = "--raw" if args.raw else "the model has no chat template"
        if not args.raw and llm.chat_format is not None:
            reason += f"; if it was trained to chat, add --chat-format {llm.chat_format}"
        special = bool(args.parse_special)
        form = "text with control tokens" if special else "plain text"
        streams.info(args, f"the prompt is continued as {form} ({reason})")
        if not special and (found := control_strings(llm.tokenizer, prompt)):
            streams.info(args, f"the prompt contains {found} as plain text; --parse-special enables control tokens")
        ids = ranks.first(args, lambda: llm.tokenizer.encode_prompt(prompt, special))
        pieces = llm.stream_ids(ids, logprobs=args.logprobs, **options)
    else:
        form = f"the format {llm.chat_format}" if llm.chat_format else "the model's chat template"
        streams.info(args, f"the prompt is one user message in {form} (--raw continues it as plain text)")
        messages = [{"role": "system", "content": args.system}] if args.system is not None else []
        messages.append({"role": "user", "content": prompt})
        ids = ranks.first(args, lambda: llm.encode_chat(messages))
        pieces = llm.stream_ids(ids, continues=False, logprobs=args.logprobs, **options)

    with sessions.saving(args, lambda: session, llm.model), shown:
        answer(args, prompt, pieces)
    return 0


def control_strings(tokenizer: Tokenizer, text: str) -> str:
    """The first three control strings in a text, separated by commas; empty if there is none."""
    found = dict.fromkeys(part for part, is_control in tokenizer.split_control(text) if is_control)
    return ", ".join(list(found)[:3])


def answer(args: argparse.Namespace, prompt: str, pieces: Generator[Piece]) -> None:
    """Write an answer while it is generated, or as one JSON object at the end."""
    completion = None
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
