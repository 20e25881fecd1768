"""--draft and --draft-tokens: speculative decoding from the command line."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..errors import CheckpointError, UsageError
from . import loading

if TYPE_CHECKING:
    from ..generation.speculative import Draft
    from ..model import Transformer


def check_draft(args: argparse.Namespace) -> None:
    """What is wrong with --draft and --draft-tokens, as far as it shows before the model is loaded."""
    from ..generation.speculative import DRAFTS
    from ..hub.named import resolve

    if args.draft_tokens is not None and args.draft is None:
        raise UsageError("--draft-tokens goes with --draft")
    if args.draft_tokens is not None and args.draft_tokens < 1:
        raise UsageError(f"--draft-tokens must be at least 1, got {args.draft_tokens}")
    if args.draft is not None and args.draft not in DRAFTS:
        try:
            resolve(args.draft, args.quiet)
        except CheckpointError as error:
            raise CheckpointError(f"--draft is {', '.join(DRAFTS)} or a model, and {error}") from None


def load_draft(args: argparse.Namespace, model: Transformer) -> Draft | None:
    """The draft that the options name, fit for the model; None without --draft."""
    from ..generation.speculative import DRAFTS, check_match, make_draft

    if args.draft is None or args.draft in DRAFTS:
        return make_draft(args.draft, args.draft_tokens)
    own = {
        "world": None,
        "model": args.draft,
        "max_seq_len": None,
        "rope_scaling": None,
        "rope_factor": None,
        "rope_theta": None,
    }
    smaller = loading.load_model(argparse.Namespace(**{**vars(args), **own}))
    check_match(smaller, model)
    return make_draft(smaller, args.draft_tokens)
