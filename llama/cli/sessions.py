"""--load-session and --save-session: keep the KV cache between runs."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from . import streams

if TYPE_CHECKING:
    from ..generation.session import Session
    from ..model import Transformer
    from ..text import Llama


def check_session(args: argparse.Namespace) -> None:
    """Check --load-session and --save-session before the model is loaded.

    If both name the same file and it does not exist, the first run creates it: then --load-session is removed.
    """
    from ..generation.session import check_target, open_session

    if args.load_session is not None and args.save_session is not None:
        same = os.path.realpath(args.load_session) == os.path.realpath(args.save_session)
        if same and not os.path.lexists(args.load_session):
            streams.info(args, f"{args.load_session} does not exist: starting a new session")
            args.load_session = None
    if args.load_session is not None:
        open_session(Path(args.load_session))
    if args.save_session is not None:
        check_target(Path(args.save_session))


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


@contextlib.contextmanager
def saving(args: argparse.Namespace, session: Callable[[], Session | None], model: Transformer) -> Iterator[None]:
    """Save the session after the block if --save-session is set, also when a signal ends the block.

    session  returns the session to save, since a chat may load another one
    """
    ended: BaseException | None = None
    try:
        yield
    except (KeyboardInterrupt, SystemExit, BrokenPipeError) as error:
        ended = error
    if args.save_session is not None:
        if ended is not None:
            streams.write_stderr("")  # the answer ended in the middle of a line
        kept = session()
        if kept is None or not kept.tokens:
            streams.info(args, f"{args.save_session} was not saved: the session is empty")
        else:
            size = kept.save(args.save_session, model)
            streams.info(args, f"{args.save_session}: saved {contents(kept)}, {size / 1e6:,.1f} MB")
    if ended is not None:
        raise ended
