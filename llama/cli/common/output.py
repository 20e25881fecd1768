"""Functions of generate and chat: write an answer and its statistics, load and save sessions."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...hub.models import DEFAULT, suggestion
from ...system.memory import free_memory
from . import terminal

if TYPE_CHECKING:
    from ...generation.session import Session
    from ...model import Transformer
    from ...text import Completion, Llama, Piece, Stats

Message = dict[str, Any]
DELAY = 1.5  # seconds of reading a prompt before a bar appears


def write(args: argparse.Namespace, prompt: str, stream: Callable[..., Generator[Piece]], before: str = "") -> Message:
    """Write an answer while it is generated, or one JSON object at its end; then write statistics.

    stream  starts the answer; calls its argument `progress` while the model reads the prompt
    before  text to write before the answer, but not before JSON

    Returns the answer as a message. The thought is written only to a terminal. In a chat, Ctrl-C ends the answer, whose
    text may be empty. In generate, Ctrl-C ends the program.
    """
    chat, text, thought, completion = args.command == "chat", "", "", None
    bar = terminal.progress("tok", leave=False, delay=DELAY)  # the bar is removed when the answer begins
    stopping = contextlib.suppress(*[KeyboardInterrupt] if chat else [])
    with bar as show, stopping, contextlib.closing(stream(progress=partial(show, "prompt"))) as pieces:
        for piece in pieces:
            if not args.json:
                if piece.reasoning and sys.stdout.isatty():
                    terminal.write(piece.reasoning, faint=True)
                    before = "\n\n"
                if piece.text:
                    terminal.write(before + piece.text)
                    before = ""
            text, thought = text + piece.text, thought + (piece.reasoning or "")
            completion = piece.completion
    if args.json:
        fields = {"text": text, "finish_reason": "interrupted"} if completion is None else as_dict(completion)
        terminal.write_json({"prompt": prompt, **fields})
    elif chat or text:
        terminal.write(before + "\n")
    terminal.info("stopped" if completion is None else _statistics(args, completion))
    speed, room = completion and completion.stats.decode_tps, free_memory()
    if args.model == DEFAULT and speed and room and (line := suggestion(room.bytes / 1e9, speed)):
        terminal.info(line)
    return {"role": "assistant", "content": text, **({"reasoning_content": thought} if thought else {})}


def _statistics(args: argparse.Namespace, completion: Completion) -> str:
    """Token counts, speed and seed of an answer."""
    stats: Stats = completion.stats
    prompt_speed, speed = (f" ({tps:,.0f} tok/s)" if tps else "" for tps in (stats.prefill_tps, stats.decode_tps))
    prompt = f"{stats.prompt_tokens} prompt token{'s' * (stats.prompt_tokens != 1)}{prompt_speed}"
    if args.load_session is not None and stats.cached_tokens:
        prompt += f", {stats.cached_tokens} of them from the session"
    new = f"{stats.new_tokens} new{speed}"
    if stats.reasoning_tokens:
        new += f", {stats.reasoning_tokens} of them in the thought"
    if args.draft is not None:
        new += f", {stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens accepted"
    finish: str = completion.finish_reason
    if args.command == "chat" and finish == "length" and stats.new_tokens >= args.max_new_tokens:
        finish += " (-n allows longer answers)"
    return f"{prompt}, {new}, finish: {finish}, seed {stats.seed}"


def as_dict(completion: Completion) -> dict[str, Any]:
    """The JSON fields of an answer."""
    logprobs = completion.logprobs
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "prompt_tokens": completion.stats.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "logprobs": logprobs and [x if math.isfinite(x) else None for x in logprobs],  # JSON has no infinity
        "stats": completion.stats.as_dict(),
        **({} if completion.reasoning is None else {"reasoning": completion.reasoning}),
    }


def check_model(args: argparse.Namespace, llm: Llama, ids: Sequence[int], options: Mapping[str, Any]) -> None:
    """Check a prompt, the options and the session against a model whose weights are not read yet."""
    from ...generate import room_for
    from ...generation import session
    from ...generation.speculative import check_rope

    (prompt,) = llm.prepare(ids, options)
    room_for(llm.model, ids, prompt.params, None)
    if (args.load_session, args.save_session) != (None, None):
        session.check_model(llm.model)
    if args.draft is not None:
        check_rope(llm.model)


def check_options(args: argparse.Namespace) -> None:
    """Check the options of sessions and drafts before the model is loaded.

    If --load-session and --save-session name the same file, it need not exist: the first run creates it.
    """
    from ...generation.session import check_target, open_session

    if args.draft is None and args.draft_tokens is not None:
        raise UsageError("--draft-tokens needs a draft: add --draft ngram or --draft MODEL")
    loaded, saved = args.load_session, args.save_session
    same = None not in (loaded, saved) and os.path.realpath(loaded) == os.path.realpath(saved)
    if same and not os.path.lexists(loaded):
        terminal.info(f"{loaded} does not exist: starting a new session")
    elif loaded is not None:
        _, about = open_session(Path(loaded))
        if args.command == "chat" and args.system is not None and about["messages"]:
            raise UsageError(f"--system can't change the conversation in {loaded}; leave --system out")
    if saved is not None:
        check_target(Path(saved))


# ----------------------------------------------------------------------------------------------------------- sessions
def load_session(args: argparse.Namespace, llm: Llama) -> Session | None:
    """Load the session of --load-session, or create one for --save-session; None without either option."""
    from ...generation.session import Session

    if args.load_session is None and args.save_session is None:
        return None
    if args.load_session is None or not os.path.lexists(args.load_session):
        return Session()
    session = Session.load(args.load_session, llm.model, llm.tokenizer)
    terminal.info(describe_loaded(args.load_session, session))
    return session


def describe_loaded(file: str, session: Session) -> str:
    """A line with the size of a loaded session and its last question."""
    questions = [message["content"] for message in session.messages if message["role"] == "user"]
    more = f" and {len(session.messages)} messages; its last question is {questions[-1]!r:.80}" if questions else ""
    return f"{file}: loaded {len(session.tokens):,} tokens{more}"


def save_session(session: Session, path: Path, model: Transformer) -> str:
    """Save a session in a file, and return a line that reports this."""
    size = session.save(path, model)
    return f"{path}: saved {len(session.tokens):,} tokens, {size / 1e6:,.1f} MB"


@contextlib.contextmanager
def saving(args: argparse.Namespace, session: Callable[[], Session | None], model: Transformer) -> Iterator[None]:
    """Save the session after the block if --save-session is set, also when a signal or an error ends the block.

    session  returns the session to save, since a chat may load another one
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # the answer ended in the middle of a line
        if args.save_session is not None:
            terminal.write_stderr("")
        raise
    finally:
        kept = session()
        if args.save_session is not None:
            empty = f"{args.save_session} was not saved: the session is empty"
            terminal.info(save_session(kept, args.save_session, model) if kept and kept.tokens else empty)
