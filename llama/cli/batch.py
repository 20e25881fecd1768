"""clearllama generate --prompts: a file of prompts in, a file of answers out, one JSON object per line.

Answers are written in the order of the prompts. An interrupted run leaves complete lines and at most one incomplete
line; the same command then answers the prompts whose ids have no answer (output.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import integer
from ..errors import LlamaError, UsageError
from . import answers, arguments, loading, ranks, streams
from .output import Id, Output, record_of

if TYPE_CHECKING:
    from ..generation.answer import Prompt
    from ..text import Llama

GRAMMARS = ("schema", "regex", "grammar")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
CHECKED = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", *PENALTIES, "logit_bias", "seed")
SAMPLING = (*CHECKED, "stop", *GRAMMARS)
KEYS = ("id", "prompt", "messages", "system", *SAMPLING)
NOT_WITH_PROMPTS = (
    *("text", "prompt", "file", "suffix", "parse_special"),
    *("draft", "draft_tokens", "load_session", "save_session"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `generate` for many prompts."""
    group = parser.add_argument_group(
        "many prompts",
        'one JSON object per line, {"prompt": "..."} or {"messages": [...]}; optional keys are "id" (default: the line'
        f' number), "system" and {", ".join(SAMPLING)}. The answers are JSON lines in the same order. With --output,'
        " the same command resumes an interrupted run. FILE.run.json records the model and the options; a run with a"
        " different model or options is refused. With --seed N, line n uses the seed N + n - 1",
    )
    group.add_argument("--prompts", metavar="FILE", help="the file of prompts; '-' is standard input")
    group.add_argument("--output", metavar="FILE", help="the file for the answers (default: '-', standard output)")
    group.add_argument(
        "--fresh", action="store_true", default=None, help="delete the answers in the --output file and start over"
    )
    group.add_argument("--batch-size", type=int, metavar="N", help="number of prompts to run at once (default: 16)")


def check_absent(args: argparse.Namespace) -> None:
    """Raise UsageError if an option of this file is given without --prompts."""
    for name in ("output", "fresh", "batch_size"):
        if getattr(args, name) is not None:
            raise UsageError(f"{arguments.option(name)} needs --prompts FILE")


# --------------------------------------------------------------------------------------------------------------- input
@dataclass(frozen=True)
class Item:
    """One line of the input."""

    id: Id
    number: int  # of the line, from 1
    prompt: dict[str, Any]  # {"prompt": str} or {"messages": [..]}, as in the line
    own: dict[str, Any]  # the options and the system message of the line, which override those of the command

    def messages(self, system: str | None) -> list[dict[str, Any]]:
        """The conversation to answer. system: that of the command"""
        if "messages" in self.prompt:
            conversation: list[dict[str, Any]] = self.prompt["messages"]
            return conversation
        system = self.own.get("system", system)
        first = [] if system is None else [{"role": "system", "content": system}]
        return [*first, {"role": "user", "content": self.prompt["prompt"]}]


def read_items(args: argparse.Namespace) -> list[Item]:
    """Read the prompts. Raises UsageError, which names the line and its mistake."""
    text = streams.read_stdin() if args.prompts == "-" else streams.read_text(Path(args.prompts))
    items: dict[Id, Item] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        here = f"{args.prompts} line {number}"
        values = arguments.parse_json(line.encode(), here)
        try:
            item = parse(values, number, args.system)
        except UsageError as error:
            raise UsageError(f"{here}: {error}") from None
        if item.id in items:
            raise UsageError(f"{here}: line {items[item.id].number} has the same id {item.id!r:.80}")
        items[item.id] = item
    return list(items.values())


def parse(values: dict[str, Any], number: int, system: str | None) -> Item:
    """The item of a line. Raises UsageError for a mistake that shows before the model is loaded."""
    from ..chat import check_messages
    from ..sampling import SamplingParams

    if unknown := [key for key in values if key not in KEYS]:
        raise UsageError(f"unknown key {unknown[0]!r:.80}; known: {', '.join(KEYS)}")
    if ("prompt" in values) == ("messages" in values):
        raise UsageError('expected either "prompt" or "messages"')
    if "messages" in values and (system is not None or "system" in values):
        raise UsageError("a system message belongs in messages; leave system out")
    id = values.get("id", number)
    if not isinstance(id, Id) or isinstance(id, bool):
        raise UsageError(f"id must be a string or an integer, got {id!r:.80}")
    prompt: dict[str, Any] = {key: values.pop(key) for key in ("prompt", "messages") if key in values}
    own = {key: value for key, value in values.items() if key != "id"}
    try:
        json.dumps([id, prompt, own], ensure_ascii=False).encode()
        if "logit_bias" in own:
            own["logit_bias"] = {int(token): bias for token, bias in own["logit_bias"].items()}
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, UTF-8 can't
        raise UsageError("half of a surrogate pair is not a character; write both halves") from None
    except (AttributeError, ValueError):
        raise UsageError("logit_bias must be an object of token ids and numbers") from None
    SamplingParams(**{key: own[key] for key in CHECKED if key in own})
    item = Item(id, number, prompt, own)
    check_messages(item.messages(system))
    return item


# ----------------------------------------------------------------------------------------------------------------- run
def run(args: argparse.Namespace) -> int:
    """Answer the prompts that have no answer yet. Returns 1 if some could not be run."""
    from ..text import BATCH_SIZE

    for name in NOT_WITH_PROMPTS:
        if getattr(args, name) is not None:
            what = "the PROMPT argument" if name == "text" else arguments.option(name)
            raise UsageError(f"--prompts reads the prompts from {args.prompts}: leave {what} out")
    if args.json:
        raise UsageError("--prompts always writes JSON lines: leave --json out")
    args.batch_size = integer("--batch-size", BATCH_SIZE if args.batch_size is None else args.batch_size, 1, 4096)
    options = {**arguments.sampling_options(args), "logprobs": args.logprobs}
    items = ranks.first(args, lambda: read_items(args))
    if args.output == "-":
        args.output = None
    if args.fresh and args.output is None:
        raise UsageError("--fresh needs --output FILE")
    with contextlib.closing(Output(args.output)) as output:
        llm = loading.load(args)
        raw = loading.pick_form(args, llm)
        for item in items:
            if raw and ("messages" in item.prompt or "system" in item.own):
                raise UsageError(
                    f"{args.prompts} line {item.number} needs a chat, but got {loading.why_raw(args, llm)}"
                )
        llm.prepare([0], options)  # an invalid grammar ends the run before it begins

        def resume() -> dict[Id, bool]:
            if args.output is None:
                return {}
            own = {item.id: item.own for item in items}
            record = record_of(llm, options, own, raw=raw, system=args.system)
            return output.resume(record, {item.id: item.prompt for item in items}, bool(args.fresh))

        if done := ranks.first(args, resume):
            streams.info(args, f"{args.output}: resuming, {len(done)} of {len(items)} prompts are already answered")
        left = [item for item in items if item.id not in done]
        errors = sum(done.values()) + answer_all(args, llm, left, options, raw, output)
    if errors:
        streams.error(f"{errors} of {len(items)} prompts failed; the key 'error' in their output gives the reason")
    return 1 if errors else 0


def answer_all(
    args: argparse.Namespace, llm: Llama, items: list[Item], options: dict[str, Any], raw: bool, output: Output
) -> int:
    """Answer the prompts. Returns how many of them could not be run."""
    streams.info(args, "each prompt is " + ("continued as plain text" if raw else "one user message"))
    ready: dict[Id, dict[str, Any]] = {}  # answers that wait for those before them
    running: dict[Prompt, Item] = {}
    done = tokens = errors = 0
    started = time.perf_counter()

    def encode(item: Item) -> list[int]:
        if raw:
            return llm.tokenizer.encode_prompt(item.prompt["prompt"])
        return llm.encode_chat(item.messages(args.system))

    def prompts() -> Iterator[Prompt]:
        for item in items:
            try:
                ids = ranks.first(args, partial(encode, item))
                (prompt,) = llm.prepare(ids, options_of(item, options, raw))
            except LlamaError as error:
                ready[item.id] = {"error": str(error)}
            else:
                running[prompt] = item
                yield prompt

    def write_ready() -> None:
        nonlocal done, errors
        while done < len(items) and items[done].id in ready:
            item = items[done]
            answer = ready.pop(item.id)
            output.write({"id": item.id, **item.prompt, **answer})
            errors += "error" in answer
            done += 1
            show("prompts", done, len(items))

    with streams.progress(args.quiet, "prompt") as show:
        try:
            for prompt, piece in llm.answers(prompts(), batch_size=args.batch_size):
                if isinstance(piece, LlamaError):
                    ready[running.pop(prompt).id] = {"error": str(piece)}
                elif piece.completion is not None:
                    ready[running.pop(prompt).id] = answers.as_dict(piece.completion)
                    tokens += piece.completion.stats.new_tokens
                write_ready()
            write_ready()  # prompts at the end that could not be encoded
        except (KeyboardInterrupt, SystemExit):
            if args.output is not None:
                streams.info(args, f"{done} of {len(items)} prompts are answered; run the same command again to resume")
            raise
    seconds = time.perf_counter() - started
    count = f"{len(items)} prompt{'s' * (len(items) != 1)}, {tokens:,} new tokens"
    streams.info(args, f"{count} in {seconds:.1f} s ({tokens / seconds:,.0f} tok/s)")
    return errors


def options_of(item: Item, options: dict[str, Any], raw: bool) -> dict[str, Any]:
    """The options of a line: the command's, overridden by the line's own.

    The command's seed N becomes N + number - 1. So equal prompts get different answers, and a resumed run repeats those
    of an uninterrupted one.
    """
    merged = {**options, "continues": raw}
    if "seed" in merged:
        merged["seed"] = (merged["seed"] + item.number - 1) % 2**63
    if item.own.keys() & GRAMMARS:  # it replaces a grammar of another kind
        merged = {name: value for name, value in merged.items() if name not in GRAMMARS}
    return {**merged, **{name: value for name, value in item.own.items() if name != "system"}}
