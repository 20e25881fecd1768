"""JSON files of a checkpoint, read with suspicion: what json.loads lets through in silence is an error here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..errors import CheckpointError, ConfigError

LARGEST = 200 * 2**20  # bytes; a tokenizer.json has 10 million, an index of a 405B model 0.1 million


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError, with line and column, on anything else.

    Refused besides what is not JSON: a key that occurs twice, NaN and Infinity, a byte order mark, numbers beyond
    4,300 digits, nesting beyond Python's stack, files beyond 200 MiB.
    """
    try:
        size = path.stat().st_size
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
        value = json.loads(raw.decode(), object_pairs_hook=_no_repeats, parse_constant=_no_constants)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8 (byte {error.start}); it is damaged or not JSON") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{where}:{error.lineno}:{error.colno}: {error.msg}; it is damaged or not JSON") from None
    except (_Refused, ValueError, RecursionError) as error:
        reason = "it nests too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())[:200]
        raise CheckpointError(f"{where}: {reason}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds {type(value).__name__} where an object {{...}} is expected")
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
            raise ConfigError(f"{self.where}: {key} must be a whole number, got {value!r:.60} ({_kind(value)})")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; without a default it must be there."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value in (float("inf"), float("-inf")):
            raise ConfigError(f"{self.where}: {key} must be a finite number, got {value!r:.60} ({_kind(value)})")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} must be true or false, got {value!r:.60} ({_kind(value)})")
        return value

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """An object, or None where there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {key} must be an object, got {value!r:.60} ({_kind(value)})")
        return value

    def unknown(self) -> list[str]:
        """Keys that nobody asked for."""
        return sorted(self.values.keys() - self.asked)

    def _given(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None and default is None:
            raise ConfigError(f"{self.where}: the key {key} is missing")
        return default if value is None else value


def _kind(value: Any) -> str:
    names = {str: "a string", float: "a fraction", bool: "true/false", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
