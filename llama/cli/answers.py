"""What generate and chat share: an answer and its statistics, and the session that is kept between runs."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import streams

if TYPE_CHECKING:
    from ..generation.session import Session
    from ..model import Transformer
    from ..text import Completion, Llama, Piece, Stats

DELAY = 1.5  # seconds of a prompt before its bar appears


def prompt_bar(args: argparse.Namespace) -> contextlib.AbstractContextManager[streams.Progress]:
    """A bar for a long prompt. It is removed when the answer begins."""
    return streams.progress(args.quiet, "tok", leave=False, delay=DELAY)


def write(args: argparse.Namespace, prompt: str, pieces: Generator[Piece], before: str = "", label: str = "") -> str:
    """Write an answer while it is generated, or as one JSON object at the end; then its statistics. Returns its text.

    before  written before the text, but not in JSON
    label   before the statistics

    Ctrl-C ends only the answer in a chat, and the text returned may be empty. In generate, it ends the program.
    """
    chat, text, completion = args.command == "chat", "", None
    with contextlib.closing(pieces), contextlib.suppress(*[KeyboardInterrupt] if chat else []):
        for piece in pieces:
            if not args.json:
                streams.write(before + piece.text)
                before = ""
            text += piece.text
            completion = piece.completion
    if args.json:
        streams.write_json({"prompt": prompt, **as_dict(completion, text)})
    elif chat or text:
        streams.write(before + "\n")
    streams.info(args, label + ("stopped" if completion is None else _statistics(args, completion)))
    return text


def _statistics(args: argparse.Namespace, completion: Completion) -> str:
    """Token counts, speed and seed of an answer."""
    stats: Stats = completion.stats

    def speed(tps: float | None) -> str:
        return f" ({tps:,.0f} tok/s)" if tps else ""

    prompt = f"{stats.prompt_tokens} prompt token{'s' * (stats.prompt_tokens != 1)}{speed(stats.prefill_tps)}"
    if args.load_session is not None and stats.cached_tokens:
        prompt += f", {stats.cached_tokens} of them from the session"
    new = f"{stats.new_tokens} new{speed(stats.decode_tps)}"
    if args.draft is not None:
        new += f", {stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens accepted"
    return f"{prompt}, {new}, finish: {completion.finish_reason}, seed {stats.seed}"


def as_dict(completion: Completion | None, text: str = "") -> dict[str, Any]:
    """The JSON fields of an answer. Of an interrupted one (None), only its text is known."""
    if completion is None:
        unknown = dict.fromkeys(("text", "tokens", "prompt_tokens", "finish_reason", "logprobs", "stats"))
        return {**unknown, "text": text, "finish_reason": "interrupted"}
    logprobs = completion.logprobs
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "prompt_tokens": completion.stats.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "logprobs": logprobs and [x if math.isfinite(x) else None for x in logprobs],  # JSON has no infinity
        "stats": completion.stats.as_dict(),
    }


# ----------------------------------------------------------------------------------------------------------- sessions
def check_session(args: argparse.Namespace) -> None:
    """Check --load-session and --save-session before the model is loaded.

    If both name the same file and it does not exist, the first run creates it: then --load-session is removed.
    """
    from ..generation.session import check_target, open_session

    loaded, saved = args.load_session, args.save_session
    same = None not in (loaded, saved) and os.path.realpath(loaded) == os.path.realpath(saved)
    if same and not os.path.lexists(loaded):
        streams.info(args, f"{loaded} does not exist: starting a new session")
        args.load_session = None
    elif loaded is not None:
        open_session(Path(loaded))
    if saved is not None:
        check_target(Path(saved))


def load_session(args: argparse.Namespace, llm: Llama) -> Session | None:
    """Load the session of --load-session, or create one for --save-session; None without either option."""
    from ..generation.session import Session, check_model

    if args.load_session is None and args.save_session is None:
        return None
    check_model(llm.model)
    if args.load_session is None:
        return Session()
    session = Session.load(args.load_session, llm.model, llm.tokenizer)
    streams.info(args, f"{args.load_session}: loaded {contents(session)}")
    return session


def contents(session: Session) -> str:
    """The number of tokens and messages of a session."""
    messages = f" and {len(session.messages)} messages" if session.messages else ""
    return f"{len(session.tokens):,} tokens{messages}"


def save_session(session: Session, path: Path, model: Transformer) -> str:
    """Save a session in a file, and return the line that says so."""
    size = session.save(path, model)
    return f"{path}: saved {contents(session)}, {size / 1e6:,.1f} MB"


@contextlib.contextmanager
def saving(args: argparse.Namespace, session: Callable[[], Session | None], model: Transformer) -> Iterator[None]:
    """Save the session after the block if --save-session is set, also when a signal ends the block.

    session  returns the session to save, since a chat may load another one
    """

    def save() -> None:
        kept = session()
        if args.save_session is not None:
            empty = f"{args.save_session} was not saved: the session is empty"
            streams.info(args, save_session(kept, args.save_session, model) if kept and kept.tokens else empty)

    try:
        yield
    except (KeyboardInterrupt, SystemExit, BrokenPipeError):
        if args.save_session is not None:
            streams.write_stderr("")  # the answer ended in the middle of a line
        save()
        raise
    save()
