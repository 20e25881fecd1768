"""Answer or continue a prompt.

If the model has a chat template, the prompt becomes one user message; --raw continues it as plain text.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from ..errors import UsageError
from .common import arguments, files, loading, output, ranks, terminal
from .common.parser import RARE, Group

if TYPE_CHECKING:
    from ..text import Llama


OPTIONS = [
    *arguments.PROMPT,
    ("--system TEXT", str, "a system message"),
    ("--raw", bool, "continue the prompt without a chat template"),
    ("--json", bool, "write one JSON object: prompt, text, tokens, prompt_tokens, finish_reason, logprobs, stats"),
    ("--logprobs", bool, "with --json or --prompts: add the log-probability of each new token", RARE),
    ("--parse-special", bool, "with --raw: read strings such as <|im_end|> in the prompt as control tokens", RARE),
    ("--suffix TEXT", str, "generate the text between PROMPT and this suffix (models with infilling)", RARE),
    *arguments.generation(max_new_tokens=256, fallback="greedy"),
    Group("many prompts"),
    ("--prompts FILE", str, 'JSON lines: "prompt" or "messages", and options of each (docs/guides/batches.md)'),
    ("--output FILE", str, "the file for the answers, as JSON lines (default: standard output)"),
    ("--batch-size N", int, "number of prompts to run at once (default: 16)", RARE),
]


def run(args: argparse.Namespace) -> int:
    if args.prompts is not None:
        from .common import batch

        return batch.run(args)
    for name in ("output", "batch_size"):
        if getattr(args, name) is not None:
            raise UsageError(f"{arguments.option(name)} needs --prompts FILE")
    prompt = ranks.first(args, lambda: files.read_prompt(args))
    if args.logprobs and not args.json:
        raise UsageError("--logprobs needs --json or --prompts")
    if args.suffix is not None and (args.system is not None or args.chat_format != "auto" or args.parse_special):
        raise UsageError("--suffix continues plain text: leave --system, --chat-format and --parse-special out")
    if args.parse_special and not args.raw:
        raise UsageError("--parse-special needs --raw: in a chat, text never becomes a control token")
    options = arguments.sampling_options(args)
    output.check_options(args)
    llm, read_weights = loading.prepare(args)
    raw = loading.pick_form(args, llm)
    ids, form = ranks.first(args, lambda: encode(args, llm, prompt, raw))
    continues = raw or args.suffix is not None
    options |= {} if continues else {"thoughts": llm.thoughts(ids)}
    output.check_model(args, llm, ids, options)
    options |= {"draft": loading.load_draft(args, llm)}
    read_weights(len(ids) + args.max_new_tokens)
    options["session"] = session = output.load_session(args, llm)
    if session is not None and session.messages:
        terminal.info("the session's conversation is not part of this prompt; clearllama chat continues it")
        session.messages = []
    terminal.info(form)
    with output.saving(args, lambda: session, llm.model):
        output.write(args, prompt, partial(llm.stream_ids, ids, continues=continues, **options))
    return 0


def encode(args: argparse.Namespace, llm: Llama, prompt: str, raw: bool) -> tuple[list[int], str]:
    """The ids of a prompt, and a line that says how the prompt is encoded."""
    tokenizer = llm.tokenizer
    if args.suffix is not None:
        return tokenizer.encode_prompt(prompt, suffix=args.suffix), "filling in the text between prompt and suffix"
    if raw:
        kind = "text with control tokens" if args.parse_special else "plain text"
        form = f"the prompt is continued as {kind} ({loading.why_raw(args, llm)})"
        found = dict.fromkeys(part for part, is_control in tokenizer.split_control(prompt) if is_control)
        if found and not args.parse_special:
            strings = ", ".join(list(found)[:3])
            form += f"; the prompt contains {strings} as plain text; --parse-special enables control tokens"
        return tokenizer.encode_prompt(prompt, args.parse_special), form
    if not prompt.strip():
        raise UsageError("the prompt is empty: pass the text of a message, or --raw to begin a text")
    form = f"the format {llm.chat_format}" if llm.chat_format else "the model's chat template"
    form = f"the prompt is one user message in {form} (--raw continues it as plain text)"
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return llm.encode_chat([*system, {"role": "user", "content": prompt}]), form
