"""The prefix that two texts share. Its keys and values need not be computed again."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence


def shared_prefix(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """The number of leading ids that are equal. The prompt's last id never counts: it is fed again for its logits."""
    return sum(itertools.takewhile(bool, map(operator.eq, cached, prompt[:-1])))
