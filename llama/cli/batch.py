"""clearllama generate --prompts: a file of prompts in, a file of answers out, line by line.

The output is in the order of the input, so what was done can be counted: an interrupted run leaves whole lines and at
most one that is cut, and the same command goes on behind the last whole one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, LlamaError, UsageError
from . import answers, arguments, loading, streams

if TYPE_CHECKING:
    from ..text import Completion, Llama
    from ..tokenizer import Tokenizer

SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
KEYS = ("id", "prompt", "messages", "system", *SAMPLING)
REFRESH = 0.5  # seconds between two states of the progress bar


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `generate` takes for many prompts."""
    group = parser.add_argument_group(
        "many prompts",
        'one JSON object a line: {"prompt": "..."} or {"messages": [...]}, with an "id" (else the line\'s number),'
        f' "system" and sampling options of its own ({", ".join(SAMPLING)}) if wanted. The answers come as JSON lines'
        " in the same order; with --output an interrupted run goes on where it was. With --seed N line n draws with"
        " seed N + n - 1",
    )
    group.add_argument("--prompts", metavar="FILE", help="a file of prompts, - for standard input")
    group.add_argument("--output", metavar="FILE", help="where the answers go (default: standard output, or -)")
    group.add_argument("--batch-size", type=int, metavar="N", help="answers under way at once (default: 16)")


def check_absent(args: argparse.Namespace) -> None:
    """Without --prompts the other options of this file mean nothing. Raises UsageError."""
    for name in ("output", "batch_size"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} goes with --prompts FILE")


# ---------------------------------------------------------------------------------------------------------- the input
@dataclass(frozen=True)
class Item:
    """A line of the input: what it asks, and the options that it says itself."""

    id: str | int
    asked: dict[str, Any]  # {"prompt": str} or {"messages": [..]}, as given
    system: str | None
    options: dict[str, Any]


def read_lines(name: str) -> list[bytes]:
    """The lines of a file or of stdin, without their ends. Raises UsageError where there is none."""
    where = "standard input" if name == "-" else name
    if name == "-":
        if sys.stdin is None:
            raise UsageError("--prompts - reads standard input, and it is closed")
        data = streams.read_input()
    else:
        try:
            if stat.S_ISCHR(os.stat(name).st_mode):
                raise UsageError(f"{name} is a device, which may have no end; expected a file of JSON lines")
            data = Path(name).read_bytes()
        except OSError as error:
            raise UsageError(f"{name}: {error.strerror or error}; expected a file of JSON lines") from None
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")  # some editors begin UTF-8 with a mark
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise UsageError(f'{where} is empty; expected one JSON object a line, as {{"prompt": "..."}}')
    return lines


def parse(line: bytes, number: int, where: str) -> Item:
    """Line `number` (from 1) of the input. Raises UsageError that names the line and what is wrong with it."""
    from ..chat import check_messages
    from ..checkpoint.documents import parse_json
    from ..sampling import SamplingParams

    here = f"{where} line {number}"
    if not line.strip():
        raise UsageError(f'{here} is empty; expected a JSON object, as {{"prompt": "..."}}')
    try:
        found = parse_json(line, here)
    except CheckpointError as error:
        told = str(error).replace("; it is damaged or not JSON", "; it is not JSON")
        raise UsageError(told.removesuffix("; it is damaged or forged")) from None
    for key, value in found.items():
        try:
            json.dumps((key, value), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = str(error.object)[error.start]
            raise UsageError(
                f"{here}: {key!a:.40} holds {half!a}, half of a surrogate pair, which is no character; write both"
            ) from None
    if isinstance(found.get("id"), str | int) and not isinstance(found["id"], bool):
        here += f" (id {spelled(found['id'])})"
    if unknown := [key for key in found if key not in KEYS]:
        raise UsageError(f"{here}: unknown key {unknown[0]!r:.80}; known: {', '.join(KEYS)}")
    if ("prompt" in found) == ("messages" in found):
        raise UsageError(
            f'{here}: expected either "prompt" or "messages", got {"both" if "prompt" in found else "none"}'
        )
    kinds: dict[str, tuple[type | tuple[type, ...], str]] = {
        "id": ((str, int), "a string or a whole number"),
        "prompt": (str, "a string"),
        "messages": (list, "a list"),
        "system": (str, "a string"),
        "stop": ((str, list), "a string or a list of strings"),
    }
    for key, (kind, told) in kinds.items():
        if key in found and (not isinstance(found[key], kind) or isinstance(found[key], bool)):
            raise UsageError(f"{here}: {key} must be {told}, got {spelled(found[key])}")
    for key in SAMPLING:
        if key != "stop" and key in found and (isinstance(found[key], bool) or not isinstance(found[key], int | float)):
            raise UsageError(f"{here}: {key} must be a number, got {spelled(found[key])}")
    if "system" in found and "messages" in found:
        raise UsageError(f"{here}: messages hold their own system message; leave system out")
    stop = found.get("stop", [])
    if not all(isinstance(text, str) and text for text in ([stop] if isinstance(stop, str) else stop)):
        raise UsageError(f"{here}: stop must be strings that are not empty, got {spelled(stop)}")
    options = {key: found[key] for key in SAMPLING if key in found}
    try:
        SamplingParams(**{key: value for key, value in options.items() if key != "stop"})
        check_content(found.get("messages"))
        if "messages" in found:
            check_messages(found["messages"])
    except UsageError as error:
        raise UsageError(f"{here}: {error}") from None
    asked: dict[str, Any] = {key: found[key] for key in ("prompt", "messages") if key in found}
    return Item(found.get("id", number), asked, found.get("system"), options)


def spelled(value: Any) -> str:
    """A value as JSON writes it, for a message."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def check_content(messages: Any) -> None:
    """Refuse in JSON's words what check_messages would refuse in Python's. Raises UsageError."""
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            raise UsageError(f"message {number} must be an object with role and content, got {spelled(message)}")
        if not isinstance(message.get("role"), str):
            told = spelled(message["role"]) if "role" in message else "none"
            raise UsageError(f"message {number}: role must be a string, got {told}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            told = spelled(content) if "content" in message else "none"
            raise UsageError(f"message {number}: content must be a string, got {told}")


def check_lines(args: argparse.Namespace, lines: list[bytes], where: str) -> None:
    """All lines, before the model is loaded, against themselves, each other and the options of the command."""
    first: dict[tuple[type, str | int], int] = {}
    for number, line in enumerate(lines, 1):
        item = parse(line, number, where)
        if (before := first.setdefault((type(item.id), item.id), number)) != number:
            raise UsageError(
                f"{where} line {number} and line {before} both have the id {spelled(item.id)} (a line without one has"
                " its number); give each its own"
            )
        if "messages" in item.asked and args.raw:
            raise UsageError(f"{where} line {number} has messages, and --raw continues plain text; leave --raw out")
        if "messages" in item.asked and args.system is not None:
            raise UsageError(f"{where} line {number}: messages hold their own system message; leave --system out")
        if item.system is not None and args.raw:
            raise UsageError(f"{where} line {number} has a system message, which needs a chat: leave --raw out")


@dataclass(frozen=True)
class Chat:
    """What a conversation is written by."""

    tokenizer: Tokenizer
    chat_template: str | None
    chat_format: str | None


def chat_of(args: argparse.Namespace) -> Chat:
    """A checkpoint's, from its headers: no weight is read."""
    from ..checkpoint import open_checkpoint
    from ..hub.named import resolve

    checkpoint = open_checkpoint(resolve(args.model))
    tokenizer, template = checkpoint.tokenizer(), checkpoint.chat_template
    return Chat(tokenizer, template, checkpoint.chat_format(tokenizer) if template is None else None)


NO_CHAT = "--system needs a chat, and the model has no chat template: name a format with --chat-format"


def check_chats(args: argparse.Namespace, lines: list[bytes], where: str) -> None:
    """Hold the lines that need a chat against the checkpoint's, before its weights are read. Raises UsageError.

    One line of each sequence of roles is written out: what a template refuses is mostly an order of roles. What it
    refuses for the text's sake becomes that line's own error.
    """
    seen: set[tuple[str, ...]] = set()
    chat = None
    if args.system is not None and args.chat_format == "auto":
        chat = chat_of(args)
        if chat.chat_template is None:
            raise UsageError(NO_CHAT)
    for number, line in enumerate(lines, 1):
        item = parse(line, number, where)
        if "messages" not in item.asked and item.system is None:
            continue
        roles = tuple(message["role"] for message in item.asked.get("messages", ()))
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
            raise UsageError(f"{where} line {number} (id {spelled(item.id)}): {error}") from None


# --------------------------------------------------------------------------------------------------------- the output
class Output:
    """Where answers go, one line each: a file that is this process' own while it is open, or stdout for None."""

    def __init__(self, name: str | None):
        self.name, self.file = name, -1
        if name is None:
            return
        if os.path.exists(name) and not os.path.isfile(name):
            raise UsageError(f"--output {name} is no regular file; leave --output out to write to standard output")
        try:
            self.file = os.open(name, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except OSError as error:
            raise UsageError(f"--output {name!r}: {error.strerror}; name a file that can be written to") from None
        try:
            import fcntl
        except ImportError:  # Windows: nothing keeps a second writer away
            return
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise UsageError(
                f"{name} is being written by another clearllama; wait for it, or take another --output"
            ) from None

    def resume(self, lines: list[bytes], where: str) -> tuple[int, int, int]:
        """Hold what is there against the input: how many answers it has, how many of them errors, how many bytes cut.

        Raises UsageError, and leaves the file as it is, where it is not the beginning of this input's answers.
        """
        if self.name is None:
            return 0, 0, 0
        done = errors = whole = 0
        cut = b""
        with open(self.file, "rb", closefd=False) as file:
            for line in file:
                if done == len(lines):
                    raise self._other(f"line {done + 1} is there, and {where} has {len(lines)}")
                item = parse(lines[done], done + 1, where)
                if not line.endswith(b"\n"):
                    cut, start = line, encode({"id": item.id, **item.asked})[:-2]
                    if not (line.startswith(start) or start.startswith(line)):
                        raise self._other(f"line {done + 1} is no answer to line {done + 1} of {where}")
                    break
                errors += self._matches(line, item, done + 1, where)
                done, whole = done + 1, whole + len(line)
        if cut:
            os.ftruncate(self.file, whole)
        return done, errors, len(cut)

    def _matches(self, line: bytes, item: Item, number: int, where: str) -> bool:
        """Whether the answer in a line is an error. Raises UsageError where it answers something else."""
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not {"text", "error"} & found.keys():
            raise self._other(f"line {number} is no answer")
        for key, value in {"id": item.id, **item.asked}.items():
            if key not in found or found[key] != value:
                raise self._other(
                    f"line {number} has the {key} {found.get(key)!r:.60}, and line {number} of {where} {value!r:.60}"
                )
        return "error" in found

    def _other(self, what: str) -> UsageError:
        return UsageError(
            f"{self.name} holds answers to other prompts ({what}); take another --output, or move it away"
        )

    def write(self, answer: dict[str, Any]) -> None:
        """Append a line. Where the disk is full, none of it stays."""
        if self.name is None:
            streams.write_json(answer)
            return
        rest = memoryview(encode(answer))
        end = os.lseek(self.file, 0, os.SEEK_END)
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
    """A line of the output."""
    return (json.dumps(answer, ensure_ascii=False, allow_nan=False) + "\n").encode()


# ---------------------------------------------------------------------------------------------------------------- run
def run(args: argparse.Namespace) -> int:
    """Answer the lines that have no answer yet; 1 where some could not be run."""
    from ..text import BATCH_SIZE

    where = "standard input" if args.prompts == "-" else args.prompts
    for name in ("text", "prompt", "suffix", "draft", "draft_tokens", "load_session", "save_session"):
        if getattr(args, name) is not None:
            told = "a prompt" if name == "text" else f"--{name.replace('_', '-')}"
            raise UsageError(f"--prompts reads the prompts from {where}: leave {told} out")
    if args.json:
        raise UsageError("--prompts writes JSON lines anyway: leave --json out")
    if args.raw and args.system is not None:
        raise UsageError("--system needs a chat: leave --raw out")
    size = BATCH_SIZE if args.batch_size is None else args.batch_size
    if not 1 <= size <= 4096:
        raise UsageError(f"--batch-size must be a whole number from 1 to 4096, got {size}")
    if args.output is not None and args.prompts != "-" and os.path.exists(args.output):
        with contextlib.suppress(OSError):
            if os.path.samefile(args.prompts, args.output):
                raise UsageError("--output is the file that --prompts reads; take another one")
    options = arguments.sampling_options(args)
    lines = read_lines(args.prompts)
    check_lines(args, lines, where)
    check_chats(args, lines, where)
    if args.output == "-":
        args.output = None
    output = Output(args.output)
    try:
        done, errors, cut = output.resume(lines, where)
        if cut:
            streams.say(args, f"{args.output}: dropped the last line, which was cut after {cut} bytes")
        if done:
            streams.say(args, f"{args.output}: {done} of {len(lines)} prompts done already")
        if done < len(lines):
            llm = loading.load(args)
            errors += answer_all(args, llm, lines, done, size, options, output)
    finally:
        output.close()
    if errors:
        held = f"{'this' if errors == 1 else 'these'} answer{'s' if errors > 1 else ''} hold{'s' * (errors == 1)}"
        streams.tell(f"clearllama: error: {errors} of {len(lines)} prompts could not be run; {held} an error")
    return 1 if errors else 0


def answer_all(
    args: argparse.Namespace,
    llm: Llama,
    lines: list[bytes],
    done: int,
    size: int,
    options: dict[str, Any],
    output: Output,
) -> int:
    """Answer the lines from `done` on: how many of them could not be run."""
    where = "standard input" if args.prompts == "-" else args.prompts
    if args.chat_format != "auto":
        llm.chat_format = args.chat_format
    raw = args.raw or (args.chat_format == "auto" and llm.chat_template is None)
    if raw and args.system is not None:
        raise UsageError(NO_CHAT)
    how = "continued as it is" if raw else "one user message"
    streams.say(args, f"a prompt is {how}, {min(size, len(lines) - done)} at once")
    ready: dict[int, dict[str, Any]] = {}  # answers that wait for their turn, by line (from 0)
    items: dict[int, Item] = {}  # under way, by line
    line_of: list[int] = []  # of the prompts that the batch has been given

    def prompts() -> Iterator[tuple[list[int], dict[str, Any]]]:
        for at in range(done, len(lines)):
            item = parse(lines[at], at + 1, where)
            try:
                ids = encode_item(llm, item, args.system, raw)
            except LlamaError as error:
                ready[at] = failed(item, error)
                continue
            items[at] = item
            line_of.append(at)
            yield ids, line_options(options, item, at + 1, args.logprobs)

    tokens = errors = 0
    with progress(args, len(lines), done) as show:
        try:
            for number, piece in llm.stream_batch(prompts(), batch_size=size):
                if isinstance(piece, LlamaError):
                    at = line_of[number]
                    ready[at] = failed(items.pop(at), piece)
                elif piece.completion is not None:
                    at = line_of[number]
                    ready[at] = answered(items.pop(at), piece.completion)
                else:
                    tokens += 1
                while done in ready:
                    errors += "error" in ready[done]
                    output.write(ready.pop(done))
                    done += 1
                show(done, tokens)
            while done in ready:  # lines at the end that could not be encoded
                errors += "error" in ready[done]
                output.write(ready.pop(done))
                done += 1
            show(done, tokens)
        except (KeyboardInterrupt, SystemExit):
            if args.output is not None:
                told = f"{done} of {len(lines)} answers are in {args.output}"
                streams.say(args, f"{told}; the same command goes on there")
            raise
    return errors


def encode_item(llm: Llama | Chat, item: Item, system: str | None, raw: bool) -> list[int]:
    """The ids of a line's prompt. Raises a LlamaError where it has none."""
    from ..chat import encode_chat

    if raw and "prompt" in item.asked:
        if item.system is not None:
            raise UsageError("a system message needs a chat, and the model has no chat template")
        return llm.tokenizer.encode_prompt(item.asked["prompt"])
    messages = item.asked.get("messages")
    if messages is None:
        spoken = item.system if item.system is not None else system
        messages = [{"role": "system", "content": spoken}] if spoken is not None else []
        messages = [*messages, {"role": "user", "content": item.asked["prompt"]}]
    return encode_chat(llm.tokenizer, llm.chat_template, messages, format=llm.chat_format)


def line_options(options: dict[str, Any], item: Item, number: int, logprobs: bool) -> dict[str, Any]:
    """The options of Llama.stream_ids for line `number` (from 1): the command's, then the line's own.

    The command's seed N becomes N + number - 1, so that equal prompts draw different answers and a run can be repeated
    from any line.
    """
    made = {**options, "logprobs": logprobs}
    if "seed" in made:
        made["seed"] = (made["seed"] + number - 1) % 2**63
    return {**made, **item.options}


def answered(item: Item, completion: Completion) -> dict[str, Any]:
    """The line of the output for an answer."""
    return {"id": item.id, **item.asked, **answers.answer_facts(completion)}


def failed(item: Item, error: LlamaError) -> dict[str, Any]:
    """The line of the output for a prompt that can't be run."""
    return {"id": item.id, **item.asked, "error": streams.one_line(str(error))}


@contextlib.contextmanager
def progress(args: argparse.Namespace, total: int, done: int) -> Iterator[Any]:
    """What to call with the prompts done and the new tokens so far: a bar on a terminal, one line at the end."""
    started = shown = time.perf_counter()
    bar = None
    if sys.stderr.isatty() and not args.quiet:
        from tqdm import tqdm

        bar = tqdm(total=total, initial=done, desc="prompts", unit="prompt", dynamic_ncols=True)
    tokens = 0

    def show(done: int, so_far: int) -> None:
        nonlocal shown, tokens
        tokens, now = so_far, time.perf_counter()
        if bar is not None and (now - shown > REFRESH or done == total):
            shown, bar.n = now, done
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
    streams.say(args, f"{count}, {tokens} new tokens in {seconds:.1f} s ({speed})")
