"""clearllama generate --prompts: read a file of prompts, write a file of answers. A line is one JSON object.

Answers are written in the order of the prompts. An interrupted run leaves complete lines and at most one incomplete
line; the same command then answers the prompts that have no answer yet (resume.py).
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...chat.messages import check_messages, continues_answer
from ...checks import integer
from ...errors import LlamaError, UsageError
from ...generation.answer import Job
from ...sampling import SamplingParams, option_names
from ...system.documents import by_id, check_unicode, checked, parse_json
from ...text import BATCH_SIZE, Llama
from . import arguments, files, loading, output, ranks, terminal
from .resume import Id, Output, record_of

OWN = option_names("", "number", "end", "grammar")  # the options that a line may have
KEYS: dict[str, Any] = {
    **{"id": Id, "prompt": str, "messages": list, "system": str},
    **dict.fromkeys(OWN, object),
    "logit_bias": by_id,
}
NOT_WITH_PROMPTS = (
    *("prompt", "file", "suffix", "parse_special", "json"),
    *("draft", "draft_tokens", "load_session", "save_session"),
)


# --------------------------------------------------------------------------------------------------------------- input
@dataclass(frozen=True)
class Item:
    """One line of the input."""

    id: Id
    number: int  # of the line, from 1
    prompt: dict[str, Any]  # {"prompt": str} or {"messages": [..]}, as in the line
    messages: list[dict[str, Any]]  # the conversation to answer
    own: dict[str, Any]  # the options and the system message of the line, which override those of the command

    def options(self, options: dict[str, Any], raw: bool) -> dict[str, Any]:
        """The options for this line: the command's options, overridden by the line's own options.

        The command's seed N becomes N + number - 1. So equal prompts get different seeds, and a resumed run gives the
        same answers as an uninterrupted run.
        """
        merged = {**options, "continues": raw or continues_answer(self.messages)}
        if "seed" in merged:
            merged["seed"] = (merged["seed"] + self.number - 1) % 2**63
        if self.own.keys() & option_names("grammar"):  # the line's grammar replaces the command's, of whatever kind
            merged |= dict.fromkeys(option_names("grammar"))
        return {**merged, **{name: value for name, value in self.own.items() if name != "system"}}


def read_items(args: argparse.Namespace) -> list[Item]:
    """Read the prompts. Raises UsageError, which says which line is wrong, and why."""
    text = files.read_text(Path(args.prompts))
    items: dict[Id, Item] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        here = f"{args.prompts} line {number}"
        if not line.strip():
            raise UsageError(f'{here} is empty; expected an object, such as {{"prompt": "a text"}}')
        values = parse_json(line.encode(), here, UsageError)
        try:
            item = parse(values, number, args.system)
        except UsageError as error:
            raise UsageError(f"{here}: {error}") from None
        if item.id in items:
            raise UsageError(f"{here}: line {items[item.id].number} has the same id {item.id!r:.80}")
        items[item.id] = item
    return list(items.values())


def parse(line: dict[str, Any], number: int, system: str | None) -> Item:
    """Make the item of a line. Raises UsageError for a mistake that can be found without the model.

    system  the command's system message
    """
    check_unicode(line)
    values = checked(line, KEYS)
    if ("prompt" in values) == ("messages" in values):
        raise UsageError('expected either "prompt" or "messages"')
    if "messages" in values and (system is not None or "system" in values):
        raise UsageError("the line has messages, which include a system message: leave system (--system) out")
    SamplingParams(**{key: values[key] for key in option_names("", "number") if key in values})
    id, prompt = values.pop("id", number), {key: values.pop(key) for key in ("prompt", "messages") if key in values}
    turns = {"system": values.get("system", system), "user": prompt.get("prompt")}
    messages = [{"role": role, "content": text} for role, text in turns.items() if text is not None]
    check_messages(messages := prompt.get("messages", messages))
    return Item(id, number, prompt, messages, values)


# ----------------------------------------------------------------------------------------------------------------- run
def run(args: argparse.Namespace) -> int:
    """Answer the prompts that have no answer yet. Returns 1 if any prompt failed."""
    for name in NOT_WITH_PROMPTS:
        if getattr(args, name) not in (None, False, []):
            what = "PROMPT" if name == "prompt" else arguments.option(name)
            raise UsageError(f"--prompts reads prompts and writes JSON lines: leave {what} out")
    size = integer("--batch-size", BATCH_SIZE if args.batch_size is None else args.batch_size, 1, 4096)
    options = arguments.sampling_options(args)
    items = ranks.first(args, lambda: read_items(args))
    target = None if args.output in (None, "-") else Output(args.output)
    llm, read_weights = loading.prepare(args)
    raw = loading.pick_form(args, llm)
    for item in items:
        if raw and ("messages" in item.prompt or "system" in item.own):
            why = loading.why_raw(args, llm)
            raise UsageError(f"{args.prompts} line {item.number} needs a chat, but prompts are plain text ({why})")
    output.check_model(args, llm, [0], options if raw else {**options, "thoughts": llm.thoughts([0])})
    read_weights()

    def resume() -> dict[Id, bool]:
        if target is None:
            return {}
        record = record_of(llm, options, {item.id: item.own for item in items}, raw=raw, system=args.system)
        return target.resume(record, {item.id: item.prompt for item in items})

    if done := ranks.first(args, resume):
        terminal.info(f"{args.output}: resuming, {len(done)} of {len(items)} prompts are already answered")
    terminal.info("each prompt is " + ("continued as plain text" if raw else "one user message"))
    left = [item for item in items if item.id not in done]
    errors, tokens, written = sum(done.values()), 0, 0
    started = time.perf_counter()
    try:
        with terminal.progress("prompt") as show:
            show("prompts", 0, len(left))
            for item, answer in answer_all(args, llm, left, options, raw, size):
                line = {"id": item.id, **item.prompt, **answer}
                terminal.write_json(line) if target is None else target.write(line)
                errors += "error" in answer
                tokens += len(answer.get("tokens", ()))
                written += 1
                show("prompts", written, len(left))
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, or another signal
        kept = f"{args.output} has {len(done) + written} of {len(items)} answers; the same command resumes the run"
        terminal.info("with --output FILE, the same command resumes a run" if target is None else kept)
        raise
    seconds = time.perf_counter() - started
    count = f"{len(left)} prompt{'s' * (len(left) != 1)}, {tokens:,} new tokens"
    terminal.info(f"{count} in {seconds:.1f} s ({tokens / seconds:,.0f} tok/s)")
    if errors:
        terminal.error(f"{errors} of {len(items)} prompts failed; the key 'error' in their output gives the reason")
    return 1 if errors else 0


def answer_all(
    args: argparse.Namespace, llm: Llama, items: list[Item], options: dict[str, Any], raw: bool, size: int
) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Yield each item with its answer or error, in the order of the items."""
    running: dict[Job, Item] = {}
    done: dict[Id, dict[str, Any]] = {}
    waiting = deque(items)

    def encode(item: Item) -> list[int]:
        return llm.tokenizer.encode_prompt(item.prompt["prompt"]) if raw else llm.encode_chat(item.messages)

    def prompts() -> Iterator[Job]:
        for item in items:
            try:
                ids = ranks.first(args, partial(encode, item))
                thoughts = {} if raw else {"thoughts": llm.thoughts(ids, item.messages)}
                (prompt,) = llm.prepare(ids, {**item.options(options, raw), **thoughts})
            except LlamaError as error:
                done[item.id] = {"error": str(error)}
            else:
                running[prompt] = item
                yield prompt

    def ready() -> Iterator[tuple[Item, dict[str, Any]]]:
        while waiting and waiting[0].id in done:
            item = waiting.popleft()
            yield item, done.pop(item.id)

    for prompt, piece in llm.answers(prompts(), batch_size=size):
        if isinstance(piece, LlamaError):
            done[running.pop(prompt).id] = {"error": str(piece)}
        elif piece.completion is not None:
            done[running.pop(prompt).id] = output.as_dict(piece.completion)
        yield from ready()
    yield from ready()
