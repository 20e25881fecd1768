"""--draft and --draft-tokens: speculative decoding."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..checks import integer
from ..errors import CheckpointError, UsageError
from . import loading

if TYPE_CHECKING:
    from ..generation.speculative import Draft
    from ..model import Transformer


def check_draft(args: argparse.Namespace) -> None:
    """Check --draft and --draft-tokens before a model is loaded."""
    from ..generation.speculative import DRAFTS
    from ..hub import resolve

    if args.draft_tokens is not None:
        if args.draft is None:
            raise UsageError("--draft-tokens needs --draft")
        integer("--draft-tokens", args.draft_tokens)
    if args.draft is not None and args.draft not in DRAFTS:
        try:
            resolve(args.draft, args.quiet)
        except CheckpointError as error:
            raise CheckpointError(f"--draft must be {', '.join(DRAFTS)} or a model: {error}") from None


def load_draft(args: argparse.Namespace, model: Transformer) -> Draft | None:
    """Load the draft of --draft and check that it fits the model; None without --draft."""
    from ..generation.speculative import DRAFTS, check_match, make_draft

    if args.draft is None or args.draft in DRAFTS:
        return make_draft(args.draft, args.draft_tokens)
    own = {
        "world": None,
        "model": args.draft,
        "adapter": [],
        "tokenizer": None,
        "max_seq_len": None,
        "rope_scaling": None,
        "rope_factor": None,
        "rope_theta": None,
    }
    smaller = loading.load_model(argparse.Namespace(**{**vars(args), **own}))
    check_match(smaller, model)
    return make_draft(smaller, args.draft_tokens)
