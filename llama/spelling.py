"""Names that a user may have meant, for error messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


def nearest(name: str, known: Iterable[str], most: int = 3, cutoff: float = 0.85) -> list[str]:
    """The known names that are most similar to a name. Neither case nor the separators - _ . and space count."""
    spelled = {re.sub(r"[-_. ]", "", one.lower()): one for one in known}
    return [
        spelled[one] for one in difflib.get_close_matches(re.sub(r"[-_. ]", "", name.lower()), spelled, most, cutoff)
    ]


def did_you_mean(names: Sequence[str]) -> str:
    """'did you mean A, B or C? ', to stand before another sentence; '' for no names."""
    return f"did you mean {' or '.join([', '.join(names[:-1])] * (len(names) > 1) + [names[-1]])}? " if names else ""
