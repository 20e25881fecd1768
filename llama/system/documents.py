"""Untrusted JSON: read by Python's json, then checked as a whole (`checked`) or entry by entry (`Fields`)."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeVar

from ..checks import integer, shown
from ..errors import CheckpointError, ConfigError, DamagedError, LlamaError, UsageError

# Largest file in bytes: 150 MB of JSON take gigabytes as Python objects. The index of a 405B model has 0.1 million
# bytes, a tokenizer.json 10 to 20 million.
LARGEST, LARGEST_TOKENIZER = 2**22, 2**28

ID = re.compile("0|[1-9][0-9]{0,8}")

T = TypeVar("T")
KINDS: dict[Any, str] = {
    **{int: "an integer", float: "a finite number", bool: "true or false", str: "a string"},
    **{list: "a list", dict: "an object", str | int: "a string or an integer", str | list: "a string or a list"},
}


def read_json(path: Path, largest: int = LARGEST) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError as `read_file`, or if the JSON is not an object."""
    return parse_json(read_file(path, largest), str(path), DamagedError)


def read_optional(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    return read_json(path) if path.exists() else {}


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
    """An object. Raises ValueError if a key occurs twice; json itself would keep its last value."""
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a key occurs twice in an object")
    return out


def plain(value: Any) -> Any:
    """The value in a form that JSON has: a number that is not finite becomes a string."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def check_unicode(values: Mapping[str, Any]) -> None:
    """Raise UsageError for an entry with half of a surrogate pair, which JSON can represent and UTF-8 can't."""
    for name, value in values.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UsageError(f"{name} must be valid Unicode, but it has a lone surrogate") from None


class Required(NamedTuple):
    """The kind of an entry that an object must have (`checked`)."""

    kind: Any


def checked(value: Any, kind: Any, where: str = "", error: type[LlamaError] = UsageError) -> Any:
    """The value, without null entries of objects. Raises `error` unless it is of the kind, which is one of these:

    a type of KINDS, or `object` for any value. A float may be an integer, and is finite; an int is not true or false
    (low, high)    an integer in this range
    a string       this string
    [kind]         a list of values of one kind
    {key: kind}    an object, each entry of its kind; a null counts as missing, a key that is not listed is an error
    a function     function(value, where) -> the checked value

    where  the path of the value in the document, such as "messages[0].content"
    """
    match kind:
        case type() | UnionType():
            if not _matches(value, kind):
                raise error(f"{where} must be {KINDS[kind]}, got {shown(value)}")
            return value
        case (low, high):
            return integer(where, value, low, high, error)
        case str():
            if value != kind:
                raise error(f"{where} must be {kind!r}, got {shown(value)}")
            return value
        case [inner]:
            items = checked(value, list, where, error)
            return [checked(item, inner, f"{where}[{i}]", error) for i, item in enumerate(items)]
        case dict():
            return _entries(checked(value, dict, where, error), kind, f"{where}." if where else "", error)
    return kind(value, where)


def _entries(values: Mapping[str, Any], known: Mapping[str, Any], where: str, error: type[LlamaError]) -> Any:
    found = {}
    for key, value in values.items():
        if key not in known:
            raise error(f"unknown key {f'{where}{key}'!r:.80}; known: {', '.join(known)}")
        if value is not None:
            kind = known[key].kind if isinstance(known[key], Required) else known[key]
            found[key] = checked(value, kind, f"{where}{key}", error)
    if missing := [key for key, kind in known.items() if isinstance(kind, Required) and key not in found]:
        raise error(f"{where}{missing[0]} is missing")
    return found


class Fields:
    """Typed access to a mapping. `unknown` returns the keys that were never read."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where
        self.keys_read: set[str] = set()

    def get(self, key: str, type: type[T], default: Any = Required) -> T:
        """The value of a key, of a type that `checked` accepts. A null counts as missing.

        Raises ConfigError if the value has another type, or if the key is missing and there is no default.
        """
        self.keys_read.add(key)
        value = self.values.get(key)
        if value is not None:
            return checked(value, type, f"{self.where}: {key}", ConfigError)
        if default is Required:
            raise ConfigError(f"{self.where}: {key} is missing")
        return default

    def unknown(self) -> list[str]:
        return sorted(self.values.keys() - self.keys_read)


def _matches(value: Any, type: Any) -> bool:
    if isinstance(value, bool):
        return type in (bool, object)
    if type is float:
        return isinstance(value, int | float) and abs(value) < math.inf  # false for NaN too
    return isinstance(value, Mapping if type is dict else list | tuple if type is list else type)


def by_id(value: Any, where: str) -> dict[int, Any]:
    """A kind for `checked`: an object whose keys are ids. Returns {id: value}."""
    if not all(ID.fullmatch(key) for key in checked(value, dict, where)):
        raise UsageError(f"the keys of {where} must be token ids, got {shown(value)}")
    return {int(key): item for key, item in value.items()}


def start_of(path: Path) -> bytes:
    """The first bytes of a file. Raises CheckpointError if it is empty or not regular, or left by a failed download."""
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
