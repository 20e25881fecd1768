"""The prefix that two texts share: its keys and values need not be computed again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def shared_prefix(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """The number of leading ids that are equal. The last id of the prompt never counts: its logits are needed."""
    equal = (ours == theirs for ours, theirs in zip(cached, prompt[:-1], strict=False))
    return sum(itertools.takewhile(bool, equal))
