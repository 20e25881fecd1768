"""JSON from somebody else: read by Python's json, then each entry checked for its type where it is used."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointError, ConfigError, DamagedError, LlamaError

# Largest file in bytes: 150 MB of JSON take gigabytes as Python objects. The index of a 405B model has 0.1 million
# bytes, a tokenizer.json 10 to 20 million.
LARGEST, LARGEST_TOKENIZER = 2**22, 2**28

T = TypeVar("T")
REQUIRED: Any = object()
KINDS = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string", list: "a list",
         dict: "an object"}  # fmt: skip


def read_json(path: Path, largest: int = LARGEST) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError as `read_file`, or if it is not an object."""
    return parse_json(read_file(path, largest), str(path), DamagedError)


def read_file(path: Path, largest: int) -> bytes:
    """The bytes of a file. Raises CheckpointError as `start_of`, or if it is too large."""
    start_of(path)
    if (size := path.stat().st_size) > largest:
        raise CheckpointError(f"{path} has {size:,} bytes, expected at most {largest:,}")
    return path.read_bytes()


def parse_json(raw: bytes, where: str, error: type[LlamaError] = CheckpointError) -> dict[str, Any]:
    """`read_json` for bytes in memory. Error messages begin with `where`."""
    try:
        value = json.loads(raw, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as cause:  # not UTF-8, not JSON, or nested too deeply
        raise error(f"{where} is not valid JSON ({cause})") from None
    if not isinstance(value, dict):
        raise error(f"{where} must be an object, got {value!r:.80}")
    return value


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; json itself would keep the last of two values of one key."""
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a key occurs twice in an object")
    return out


def plain(value: Any) -> Any:
    """A value that JSON has: a number that is not finite becomes a string."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Fields:
    """Typed access to a mapping. `unknown` returns the keys that were never read."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where
        self.keys_read: set[str] = set()

    def get(self, key: str, type: type[T], default: T | None = REQUIRED) -> T:
        """The value of a key, which must have the type; `object` accepts all. A null counts as missing.

        float accepts integers too, and refuses NaN and infinity; int refuses true and false. Raises ConfigError with
        the key, the value and the type; also if the key is missing and there is no default.
        """
        self.keys_read.add(key)
        value = self.values.get(key)
        if value is None:
            if default is REQUIRED:
                raise ConfigError(f"{self.where}: the key {key} is missing")
            return default  # type: ignore[return-value]
        if not _matches(value, type):
            raise ConfigError(f"{self.where}: {key} must be {KINDS[type]}, got {value!r:.80}")
        return value

    def unknown(self) -> list[str]:
        return sorted(self.values.keys() - self.keys_read)


def _matches(value: Any, type: type) -> bool:
    if isinstance(value, bool):
        return type in (bool, object)
    if type is float:
        return isinstance(value, int | float) and abs(value) < math.inf  # false for NaN too
    return isinstance(value, Mapping if type is dict else type)


def start_of(path: Path) -> bytes:
    """The first bytes of a file. Raises CheckpointError if it is not regular, or those of a failed download."""
    try:
        if not path.is_file():  # opening a pipe could block
            reason = "is missing" if not os.path.lexists(path) else "is not a regular file"
            raise CheckpointError(f"{path} {reason}")
        with open(path, "rb") as file:
            start = file.read(64)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    if not start:
        raise DamagedError(f"{path} is empty")
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a git-lfs pointer, not the file itself; run 'git lfs pull'")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError(f"{path} is a web page in place of the file; open its address in a browser to see why")
    return start
