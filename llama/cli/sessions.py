"""--load-session and --save-session: the KV cache from one run to the next."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from . import streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..generation.session import Session
    from ..model import Transformer


def check_session(args: argparse.Namespace) -> None:
    """What is wrong with --load-session and --save-session, as far as it shows before the model is loaded."""
    if args.load_session is None and args.save_session is None:
        return
    from ..generation.session import check_target, open_session

    if args.load_session is not None:
        open_session(Path(args.load_session))
    if args.save_session is not None:
        check_target(Path(args.save_session))


def load_session(args: argparse.Namespace, model: Transformer) -> Session | None:
    """The session that --load-session names, or a new one to be saved; None without either option."""
    if args.load_session is None and args.save_session is None:
        return None
    from ..generation.session import Session, check_model

    check_model(model)
    if args.load_session is None:
        return Session()
    session = Session.load(args.load_session, model)
    turns = f" and {len(session.messages)} messages" if session.messages else ""
    streams.say(args, f"{args.load_session}: a session of {len(session.tokens):,} tokens{turns}")
    return session


@contextlib.contextmanager
def saving(args: argparse.Namespace, session: Session | None, model: Transformer) -> Iterator[None]:
    """Save the session behind the block, where --save-session asks for it; also where a signal ends the block."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, BrokenPipeError):
        if args.save_session is not None:
            streams.tell("")  # the answer broke off in the middle of a line
        _save_session(args, session, model)
        raise
    _save_session(args, session, model)


def _save_session(args: argparse.Namespace, session: Session | None, model: Transformer) -> None:
    if session is None or args.save_session is None:
        return
    if not session.tokens:
        streams.say(args, f"{args.save_session} was not saved: nothing has been computed yet")
        return
    size = session.save(args.save_session, model)
    streams.say(args, f"{args.save_session}: saved {len(session.tokens):,} tokens, {size / 1e6:,.1f} MB")
