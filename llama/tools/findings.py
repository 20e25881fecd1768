"""The result of one check, for `verify` and `doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..errors import LlamaError, one_line


@dataclass(frozen=True)
class Finding:
    """What one check found.

    status   "ok"; "note": it works, but slower or without a feature; "warn": it may be wrong; "fail"
    group    the kind of check
    item     what was checked
    remedy   what to do if the status is not "ok"
    """

    status: Literal["ok", "note", "warn", "fail"]
    group: str
    item: str
    message: str
    remedy: str = ""


def check(group: str, item: str, look: Callable[[], str]) -> Finding:
    """The finding of a check that returns a message. An exception is a finding too: it must not end the report."""
    try:
        return Finding("ok", group, item, look())
    except Exception as error:
        return failure(group, item, error)


def failure(group: str, item: str, error: Exception) -> Finding:
    """The finding of a check that raised an exception."""
    known = isinstance(error, LlamaError)
    message = str(error) if known else f"{type(error).__name__}: {one_line(str(error))[:300]}"
    return Finding("fail", group, item, message)
