"""clearllama generate --prompts: a file of prompts in, a file of answers out, one JSON object per line.

Answers are written in the order of the prompts. An interrupted run therefore leaves complete lines and at most one
incomplete line, and the same command resumes after the last complete line. record.py refuses to resume with another
model or other options.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import integer, is_number
from ..errors import LlamaError, UsageError
from . import answers, arguments, loading, ranks, record, streams

if TYPE_CHECKING:
    from ..generation.answer import Prompt
    from ..text import Completion, Llama
    from ..tokenizer import Tokenizer

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NUMBERS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", *PENALTIES, "seed")
GRAMMARS = ("schema", "regex", "grammar")
SAMPLING = (*NUMBERS, "stop", "logit_bias", *GRAMMARS)
KEYS = ("id", "prompt", "messages", "system", *SAMPLING)
NOT_WITH_PROMPTS = (
    *("text", "prompt", "file", "suffix", "parse_special"),
    *("draft", "draft_tokens", "load_session", "save_session"),
)
REFRESH = 0.5  # seconds between updates of the progress bar


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
    """One line of the input: its prompt, and the options that override those of the command."""

    id: str | int
    input: dict[str, Any]  # {"prompt": str} or {"messages": [..]}, as in the line
    system: str | None
    options: dict[str, Any]


def read_lines(name: str) -> list[bytes]:
    """Read the lines of a file, or of stdin for '-', without line ends. Raises UsageError if there are none."""
    source = "standard input" if name == "-" else name
    if name == "-":
        if sys.stdin is None:
            raise UsageError("--prompts - reads standard input, but standard input is closed")
        data = streams.read_stdin_bytes()
    else:
        data = streams.read_file(Path(name), "a file of JSON lines")
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")  # some editors start UTF-8 with a byte order mark
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise UsageError(f'{source} is empty; expected one JSON object per line, such as {{"prompt": "..."}}')
    return lines


def parse(line: bytes, number: int, source: str) -> Item:
    """Parse line `number` (from 1) of the input. Raises UsageError, which names the line and its mistake."""
    from ..chat import check_messages
    from ..sampling import SamplingParams

    here = f"{source} line {number}"
    if not line.strip():
        raise UsageError(f'{here} is empty; expected a JSON object, such as {{"prompt": "..."}}')
    values = arguments.parse_json(line, here)
    _check_surrogates(values, here)
    if isinstance(values.get("id"), str | int) and not isinstance(values["id"], bool):
        here += f" (id {shown(values['id'])})"
    if unknown := [key for key in values if key not in KEYS]:
        raise UsageError(f"{here}: unknown key {unknown[0]!r:.80}; known: {', '.join(KEYS)}")
    if ("prompt" in values) == ("messages" in values):
        found = "both" if "prompt" in values else "none"
        raise UsageError(f'{here}: expected either "prompt" or "messages", got {found}')
    _check_types(values, here)
    if "system" in values and "messages" in values:
        raise UsageError(f"{here}: a system message belongs in messages; leave system out")
    options = {key: values[key] for key in SAMPLING if key in values}
    if "logit_bias" in options:
        options["logit_bias"] = {int(id): bias for id, bias in options["logit_bias"].items()}
    try:
        if sum(key in options for key in GRAMMARS) > 1:
            raise UsageError(f"expected at most one of {', '.join(GRAMMARS)}")
        SamplingParams(**{key: value for key, value in options.items() if key not in ("stop", *GRAMMARS)})
        check_content(values.get("messages"))
        if "messages" in values:
            check_messages(values["messages"])
    except UsageError as error:
        raise UsageError(f"{here}: {error}") from None
    prompt: dict[str, Any] = {key: values[key] for key in ("prompt", "messages") if key in values}
    return Item(values.get("id", number), prompt, values.get("system"), options)


def _check_surrogates(values: dict[str, Any], here: str) -> None:
    """Raise UsageError for half of a surrogate pair, which JSON can spell and UTF-8 cannot encode."""
    for key, value in values.items():
        try:
            json.dumps((key, value), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = str(error.object)[error.start]
            raise UsageError(
                f"{here}: {key!a:.40} contains {half!a}, half of a surrogate pair, which is not a character; write both"
                " halves"
            ) from None


TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "id": ((str, int), "a string or an integer"),
    "prompt": (str, "a string"),
    "messages": (list, "a list"),
    "system": (str, "a string"),
    "stop": ((str, list), "a string or a list of strings"),
    "logit_bias": (dict, "an object of token ids and numbers"),
    "schema": (dict, "a JSON schema"),
    "regex": (str, "a string"),
    "grammar": (str, "a string"),
}


def _check_types(values: dict[str, Any], here: str) -> None:
    """Raise UsageError for a value of the wrong type. Ranges are checked by SamplingParams."""
    for key, (kind, expected) in TYPES.items():
        if key in values and (not isinstance(values[key], kind) or isinstance(values[key], bool)):
            raise UsageError(f"{here}: {key} must be {expected}, got {shown(values[key])}")
    for key in NUMBERS:
        if key in values and not is_number(values[key]):
            raise UsageError(f"{here}: {key} must be a number, got {shown(values[key])}")
    if not all(id.isdecimal() and len(id) < 10 for id in values.get("logit_bias", {})):
        raise UsageError(f"{here}: the keys of logit_bias must be token ids, got {shown(values['logit_bias'])}")
    stop = values.get("stop", [])
    if not all(isinstance(text, str) and text for text in ([stop] if isinstance(stop, str) else stop)):
        raise UsageError(f"{here}: stop must be one or more strings that are not empty, got {shown(stop)}")


def shown(value: Any) -> str:
    """A value as JSON, shortened to 80 characters."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def check_content(messages: Any) -> None:
    """Raise UsageError for mistakes that check_messages would report with Python's names of the values."""
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            raise UsageError(f"message {number} must be an object with role and content, got {shown(message)}")
        content = message.get("content")
        valid = {
            "role": isinstance(message.get("role"), str),
            "content": isinstance(content, str) or (content is None and bool(message.get("tool_calls"))),
        }
        for key in [key for key in valid if not valid[key]]:
            found = shown(message[key]) if key in message else "none"
            raise UsageError(f"message {number}: {key} must be a string, got {found}")


def check_lines(args: argparse.Namespace, lines: list[bytes], source: str) -> None:
    """Check every line, its id against the other ids and its keys against the options of the command."""
    first: dict[tuple[type, str | int], int] = {}
    for number, line in enumerate(lines, 1):
        item = parse(line, number, source)
        if (before := first.setdefault((type(item.id), item.id), number)) != number:
            raise UsageError(
                f"{source} line {number} and line {before} both have the id {shown(item.id)} (default: the line"
                " number); make the ids unique"
            )
        if "messages" in item.input and args.raw:
            raise UsageError(f"{source} line {number} has messages, which --raw does not support; leave --raw out")
        if "messages" in item.input and args.system is not None:
            raise UsageError(f"{source} line {number}: a system message belongs in messages; leave --system out")
        if item.system is not None and args.raw:
            raise UsageError(
                f"{source} line {number} has a system message, which --raw does not support; leave --raw out"
            )


@dataclass(frozen=True)
class Chat:
    """The parts of a checkpoint that encode a conversation."""

    tokenizer: Tokenizer
    chat_template: str | Mapping[str, str] | None
    chat_format: str | None


def chat_of(args: argparse.Namespace) -> Chat:
    """Read the chat template or format of a checkpoint from its headers, without its weights."""
    from ..checkpoint import open_checkpoint
    from ..hub import resolve

    checkpoint = open_checkpoint(resolve(args.model, args.quiet), args.tokenizer)
    tokenizer, template = checkpoint.tokenizer(), checkpoint.chat_template
    return Chat(tokenizer, template, checkpoint.chat_format(tokenizer) if template is None else None)


NO_CHAT = "--system needs a chat model, but the model has no chat template: name a format with --chat-format"


def check_chats(args: argparse.Namespace, lines: list[bytes], source: str) -> None:
    """Check that the checkpoint can encode the conversations, before its weights are read. Raises UsageError.

    One line of each sequence of roles is encoded, because templates mostly refuse an order of roles. A template that
    refuses a line because of its text makes the answer of that line an error.
    """
    seen: set[tuple[str, ...]] = set()
    chat = None
    if args.system is not None and args.chat_format == "auto":
        chat = chat_of(args)
        if chat.chat_template is None:
            raise UsageError(NO_CHAT)
    for number, line in enumerate(lines, 1):
        item = parse(line, number, source)
        if "messages" not in item.input and item.system is None:
            continue
        roles = tuple(message["role"] for message in item.input.get("messages", ()))
        if roles in seen:
            continue
        seen.add(roles)
        if chat is None:
            chat = chat_of(args)
            if args.chat_format != "auto":
                chat = replace(chat, chat_format=args.chat_format)
        try:
            encode_item(chat, item, args.system, args.chat_format == "auto" and chat.chat_template is None)
        except LlamaError as error:
            raise UsageError(f"{source} line {number} (id {shown(item.id)}): {error}") from None


# -------------------------------------------------------------------------------------------------------------- output
@dataclass(frozen=True)
class Kept:
    """The answers that an output already has."""

    done: int = 0
    errors: int = 0  # how many of them are errors
    size: int = 0  # their bytes
    partial: int = 0  # bytes of the incomplete line after them
    first: bytes = b""  # the line of the first one


class Output:
    """Write one answer per line, to a file that is locked while it is open or to stdout (name None)."""

    def __init__(self, name: str | None):
        self.name, self.file = name, -1
        self.before_first: Callable[[bytes], None] | None = None  # called with the first answer's line before its write
        if name is None:
            return
        if os.path.exists(name) and not os.path.isfile(name):
            raise UsageError(f"--output {name} is not a regular file; leave --output out to write to standard output")
        try:
            self.file = os.open(name, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except OSError as error:
            raise UsageError(f"--output {name!r}: {error.strerror}; choose a writable file") from None
        try:
            import fcntl
        except ImportError:  # Windows has no such lock
            return
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise UsageError(
                f"{name} is being written by another clearllama; wait for it, or choose another --output"
            ) from None

    def answers(self, lines: list[bytes], source: str) -> Kept:
        """Compare the answers in the file with the input. Raises UsageError if they don't belong to its first lines."""
        if self.name is None:
            return Kept()
        done = errors = complete = 0
        partial = first = b""
        with open(self.file, "rb", closefd=False) as file:
            for line in file:
                if done == len(lines):
                    raise self._mismatch(f"it has a line {done + 1}, and {source} has {len(lines)} lines")
                item = parse(lines[done], done + 1, source)
                if not line.endswith(b"\n"):
                    partial, start = line, encode({"id": item.id, **item.input})[:-2]
                    if not (line.startswith(start) or start.startswith(line)):
                        raise self._mismatch(f"line {done + 1} is not an answer to line {done + 1} of {source}")
                    break
                errors += self._is_error(line, item, done + 1, source)
                first = first or line
                done, complete = done + 1, complete + len(line)
        return Kept(done, errors, complete, len(partial), first)

    def check_answers(self) -> None:
        """Raise UsageError if the file does not begin with an answer. --fresh must not delete such a file."""
        if self.name is not None:
            with open(self.file, "rb", closefd=False) as file:
                line = file.readline()
            try:
                answer = json.loads(line or b'{"id": 1, "prompt": "", "text": ""}')
            except (ValueError, RecursionError):
                answer = None
            keys = answer.keys() if isinstance(answer, dict) else set()
            if not all(keys & one_of for one_of in ({"id"}, {"prompt", "messages"}, {"text", "error"})):
                raise UsageError(f"{self.name} does not contain answers, so --fresh does not delete it; move it away")

    def truncate(self, size: int) -> None:
        if self.name is not None:
            os.ftruncate(self.file, size)

    def _is_error(self, line: bytes, item: Item, number: int, source: str) -> bool:
        """Whether an answer is an error. Raises UsageError if it does not belong to the item."""
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or not {"text", "error"} & answer.keys():
            raise self._mismatch(f"line {number} is not an answer")
        for key, value in {"id": item.id, **item.input}.items():
            if key not in answer or answer[key] != value:
                raise self._mismatch(
                    f"line {number} has the {key} {answer.get(key)!r:.60}, but line {number} of {source} has"
                    f" {value!r:.60}"
                )
        return "error" in answer

    def _mismatch(self, reason: str) -> UsageError:
        return UsageError(
            f"{self.name} does not contain answers to these prompts ({reason}); choose another --output, or move the"
            " file away"
        )

    def write(self, answer: dict[str, Any]) -> None:
        """Append a line. If the disk is full, remove the part that was written."""
        if self.name is None:
            streams.write_json(answer)
            return
        line = encode(answer)
        end = os.lseek(self.file, 0, os.SEEK_END)
        if end == 0 and self.before_first is not None:
            self.before_first(line)
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self.file, rest) :]
        except OSError as error:
            os.ftruncate(self.file, end)
            raise OSError(error.errno, error.strerror, self.name) from None

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)


def encode(answer: dict[str, Any]) -> bytes:
    """An answer as a line of the output."""
    return (json.dumps(answer, ensure_ascii=False, allow_nan=False) + "\n").encode()


# ----------------------------------------------------------------------------------------------------------------- run
def run(args: argparse.Namespace) -> int:
    """Answer the prompts that have no answer yet. Returns 1 if some could not be run."""
    from ..text import BATCH_SIZE

    source = "standard input" if args.prompts == "-" else args.prompts
    for name in NOT_WITH_PROMPTS:
        if getattr(args, name) is not None:
            what = "the PROMPT argument" if name == "text" else arguments.option(name)
            raise UsageError(f"--prompts reads the prompts from {source}: leave {what} out")
    if args.json:
        raise UsageError("--prompts always writes JSON lines: leave --json out")
    if args.raw and args.system is not None:
        raise UsageError("--system needs a chat: leave --raw out")
    size = integer("--batch-size", BATCH_SIZE if args.batch_size is None else args.batch_size, 1, 4096)
    if args.output is not None and args.prompts != "-" and os.path.exists(args.output):
        with contextlib.suppress(OSError):
            if os.path.samefile(args.prompts, args.output):
                raise UsageError("--output and --prompts name the same file; choose another --output")
    options = arguments.sampling_options(args)
    lines = ranks.first(args, lambda: read_lines(args.prompts))
    check_lines(args, lines, source)
    check_chats(args, lines, source)
    if args.output == "-":
        args.output = None
    if args.fresh and args.output is None:
        raise UsageError("--fresh needs --output FILE")
    output = Output(args.output)
    try:
        if args.fresh:
            output.check_answers()
        kept = ranks.first(args, lambda: Kept() if args.fresh else output.answers(lines, source))
        llm = loading.load(args)
        raw = pick_form(args, llm)
        llm.prepare([0], options)  # an invalid grammar ends the run before it begins
        if args.output is not None:
            chat = {"raw": raw, "system": args.system}
            settings = record.settings_of(llm, {**options, "logprobs": args.logprobs}, chat)
            made_with = record.Record(args.output, settings, own_options(lines, source))
            made_with.check(kept.done, kept.first, bool(args.fresh))
            output.truncate(kept.size)
            made_with.write()
            output.before_first = made_with.write
        if kept.partial:
            streams.info(args, f"{args.output}: removed the incomplete last line of {kept.partial} bytes")
        if kept.done:
            streams.info(args, f"{args.output}: resuming, {kept.done} of {len(lines)} prompts are already answered")
        errors = kept.errors
        if kept.done < len(lines):
            errors += answer_all(args, llm, lines, kept.done, size, options, raw, output)
    finally:
        output.close()
    if errors:
        streams.error(
            f"{errors} of {len(lines)} prompts failed; the key 'error' in their output lines gives the reason"
        )
    return 1 if errors else 0


def pick_form(args: argparse.Namespace, llm: Llama) -> bool:
    """Set the chat format that the command names. Returns whether prompts are continued as plain text."""
    if args.chat_format != "auto":
        llm.chat_format = args.chat_format
    raw: bool = args.raw or (args.chat_format == "auto" and llm.chat_template is None)
    if raw and args.system is not None:
        raise UsageError(NO_CHAT)
    return raw


def own_options(lines: list[bytes], source: str) -> dict[str, Any]:
    """{line number as text: the options and the system message of that line}, for the lines that have any."""
    own = {}
    for number, line in enumerate(lines, 1):
        item = parse(line, number, source)
        options = item.options if item.system is None else {**item.options, "system": item.system}
        if options:
            own[str(number)] = options
    return own


def answer_all(
    args: argparse.Namespace,
    llm: Llama,
    lines: list[bytes],
    done: int,
    size: int,
    options: dict[str, Any],
    raw: bool,
    output: Output,
) -> int:
    """Answer the lines from `done` on. Returns how many of them could not be run."""
    source = "standard input" if args.prompts == "-" else args.prompts
    form = "continued as plain text" if raw else "one user message"
    streams.info(args, f"each prompt is {form}; {min(size, len(lines) - done)} run at once")
    ready: dict[int, dict[str, Any]] = {}  # line (from 0) -> an answer that is not written yet
    items: dict[int, Item] = {}  # line -> a prompt that is being run
    line_of: dict[Prompt, int] = {}

    def prompts() -> Iterator[Prompt]:
        for at in range(done, len(lines)):
            item = parse(lines[at], at + 1, source)
            own = {**line_options(options, item, at + 1, args.logprobs), "continues": raw and "prompt" in item.input}
            try:
                ids = ranks.first(args, partial(encode_item, llm, item, args.system, raw))
                (prompt,) = llm.prepare(ids, own)
            except LlamaError as error:
                ready[at] = failed(item, error)
                continue
            items[at], line_of[prompt] = item, at
            yield prompt

    tokens = errors = 0
    with progress(args, len(lines), done) as show:

        def write_ready() -> None:
            """Write the answers whose predecessors are all written."""
            nonlocal done, errors
            while done in ready:
                errors += "error" in ready[done]
                output.write(ready.pop(done))
                done += 1
            show(done, tokens)

        try:
            for prompt, piece in llm.answers(prompts(), batch_size=size):
                if isinstance(piece, LlamaError):
                    at = line_of.pop(prompt)
                    ready[at] = failed(items.pop(at), piece)
                elif piece.completion is not None:
                    at = line_of.pop(prompt)
                    ready[at] = answered(items.pop(at), piece.completion)
                else:
                    tokens += 1
                write_ready()
            write_ready()  # lines at the end that could not be encoded
        except (KeyboardInterrupt, SystemExit):
            if args.output is not None:
                count = f"{done} of {len(lines)} answers"
                streams.info(args, f"{args.output} has {count}; run the same command again to resume")
            raise
    return errors


def encode_item(llm: Llama | Chat, item: Item, system: str | None, raw: bool) -> list[int]:
    """Encode the prompt of a line. Raises a LlamaError if that fails."""
    from ..chat import encode_chat

    if raw and "prompt" in item.input:
        if item.system is not None:
            raise UsageError(
                "a system message needs a chat model, but this model has no chat template; leave the system message out"
            )
        return llm.tokenizer.encode_prompt(item.input["prompt"])
    messages = item.input.get("messages")
    if messages is None:
        text = item.system if item.system is not None else system
        messages = [{"role": "system", "content": text}] if text is not None else []
        messages = [*messages, {"role": "user", "content": item.input["prompt"]}]
    return encode_chat(llm.tokenizer, llm.chat_template, messages, format=llm.chat_format)


def line_options(options: dict[str, Any], item: Item, number: int, logprobs: bool) -> dict[str, Any]:
    """The options of line `number` (from 1) for Llama.stream_ids: the command's, overridden by the line's own.

    The command's seed N becomes N + number - 1. So equal prompts get different answers, and a run that resumes at any
    line repeats the same answers.
    """
    merged = {**options, "logprobs": logprobs}
    if "seed" in merged:
        merged["seed"] = (merged["seed"] + number - 1) % 2**63
    if any(name in item.options for name in GRAMMARS):  # it replaces a grammar of another kind
        merged = {name: value for name, value in merged.items() if name not in GRAMMARS}
    return {**merged, **item.options}


def answered(item: Item, completion: Completion) -> dict[str, Any]:
    """The output object of an answer."""
    return {"id": item.id, **item.input, **answers.as_dict(completion)}


def failed(item: Item, error: LlamaError) -> dict[str, Any]:
    """The output object of a prompt that could not be run."""
    return {"id": item.id, **item.input, "error": streams.one_line(str(error))}


@contextlib.contextmanager
def progress(args: argparse.Namespace, total: int, done: int) -> Iterator[Any]:
    """Show progress: a bar on a terminal, and one line at the end.

    Yields a function to call with the number of prompts done and of new tokens so far.
    """
    started = shown_at = time.perf_counter()
    bar = None
    if sys.stderr.isatty() and not args.quiet:
        from tqdm import tqdm

        bar = tqdm(total=total, initial=done, desc="prompts", unit="prompt", dynamic_ncols=True)
    tokens = 0

    def show(done: int, so_far: int) -> None:
        nonlocal shown_at, tokens
        tokens, now = so_far, time.perf_counter()
        if bar is not None and (now - shown_at > REFRESH or done == total):
            shown_at, bar.n = now, done
            bar.set_postfix_str(f"{tokens / (now - started):,.0f} tok/s")

    first = done
    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
    seconds = time.perf_counter() - started
    speed = f"{tokens / seconds:,.0f} tok/s" if tokens else "none"
    count = f"{total - first} prompt{'s' * (total - first != 1)}"
    streams.info(args, f"{count}, {tokens} new tokens in {seconds:.1f} s ({speed})")
