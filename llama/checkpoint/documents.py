"""JSON files of a checkpoint, read with suspicion: what json.loads lets through in silence is an error here."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..errors import CheckpointError, ConfigError

LARGEST = 200 * 2**20  # bytes; a tokenizer.json has 10 million, an index of a 405B model 0.1 million


def size_of(path: Path) -> int:
    """Bytes of a file. Raises CheckpointError where it is a pipe, which may never answer, a device or a folder."""
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    if not stat.S_ISREG(found.st_mode):
        kind = next((kind for holds, kind in KINDS if holds(found.st_mode)), "no regular file")
        raise CheckpointError(f"{path} is {kind}; expected a file, fetch it again")
    return found.st_size


KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError, with line and column, on anything else.

    Refused besides what is not JSON: a key that occurs twice, NaN, Infinity and numbers as large, a byte order mark,
    numbers beyond 4,300 digits, nesting beyond Python's stack, files beyond 200 MiB.
    """
    size = size_of(path)
    try:
        if size > LARGEST:
            raise CheckpointError(f"{path} has {size} bytes; a JSON file of a checkpoint has at most {LARGEST}")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    return parse_json(raw, str(path))


def parse_json(raw: bytes, where: str) -> dict[str, Any]:
    """`read_json` for bytes that were read already; `where` names them in errors."""
    if not raw.strip():
        raise CheckpointError(f"{where} is empty; fetch it again")
    if raw.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{where} is a git-lfs pointer, not the file itself; run 'git lfs pull' where it came from"
        )
    try:
        text = raw.decode()
        if text.startswith("\ufeff"):
            raise CheckpointError(f"{where} begins with a byte order mark, which JSON has none of; save it without one")
        value = json.loads(text, object_pairs_hook=_no_repeats, parse_constant=_no_constants, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8 (byte {error.start}); it is damaged or not JSON") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{where}:{error.lineno}:{error.colno}: {error.msg}; it is damaged or not JSON") from None
    except _Refused as error:
        raise CheckpointError(f"{where}: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{where}: it nests too deep; it is damaged or forged") from None
    except ValueError:  # all that is left: Python turns no longer text into a number
        raise CheckpointError(f"{where}: it holds a number of thousands of digits; it is damaged or forged") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds {_kind(value)} where an object {{...}} is expected")
    return value


class _Refused(Exception):
    pass


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise _Refused(f"the key {key!r:.60} occurs twice, so which value holds is unclear")
        out[key] = value
    return out


def _no_constants(name: str) -> NoReturn:
    raise _Refused(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    """JSON sets no limit to numbers; Python makes infinity of what is too large."""
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"the number {text:.40} is larger than any that can be computed with")
    return value


class Fields:
    """Typed access to a mapping, so that each wrong entry is an error that names key, value and expectation.

    What was asked for is remembered; `unknown` names the rest.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where
        self.asked: set[str] = set()

    def get(self, key: str) -> Any:
        """The value as it is; None if there is none."""
        self.asked.add(key)
        return self.values.get(key)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number; without a default it must be there."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.where}: {key} must be a whole number, got {told(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; without a default it must be there."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value in (float("inf"), float("-inf")):
            raise ConfigError(f"{self.where}: {key} must be a finite number, got {told(value)}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} must be true or false, got {told(value)}")
        return value

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """An object, or None where there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {key} must be an object, got {told(value)}")
        return value

    def unknown(self) -> list[str]:
        """Keys that nobody asked for."""
        return sorted(self.values.keys() - self.asked)

    def _given(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None and default is None:
            raise ConfigError(f"{self.where}: the key {key} is missing")
        return default if value is None else value


def told(value: Any) -> str:
    """A value for a message, in JSON's words and with its kind: null, true, [1, 2] (a list)."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value!r:.60} ({_kind(value)})"


def _kind(value: Any) -> str:
    names = {str: "a string", int: "a whole number", float: "a fraction", list: "a list", dict: "an object"}
    return "null" if value is None else "true/false" if isinstance(value, bool) else names.get(type(value), "no number")
