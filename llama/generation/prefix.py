"""The prefix that two texts share: its keys and values need not be computed again."""

from __future__ import annotations

from collections.abc import Sequence


def shared_prefix(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """The number of leading ids that are equal. The last id of the prompt never counts: its logits are needed."""
    shared = 0
    for ours, theirs in zip(cached, prompt[:-1], strict=False):
        if ours != theirs:
            break
        shared += 1
    return shared
