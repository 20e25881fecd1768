"""Strict reading of a checkpoint's JSON files: bad input that json.loads accepts is an error here."""

from __future__ import annotations

import contextlib
import json
import math
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..checks import is_integer, is_number
from ..errors import CheckpointError, ConfigError

# Largest file in bytes. Parsing 4 MiB takes up to a second and 150 MB. The index of a 405B model has 0.1 million bytes.
LARGEST = 2**22
LARGEST_TOKENIZER = 2**28  # a tokenizer.json has 10 to 20 million bytes


def size_of(path: Path) -> int:
    """Bytes of a regular file. Raises CheckpointError for a folder, a device, or a pipe (opening one may hang)."""
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    if not stat.S_ISREG(found.st_mode):
        kind = next((kind for matches, kind in KINDS if matches(found.st_mode)), "not a regular file")
        raise CheckpointError(f"{path} is {kind}; expected a file, download it again")
    return found.st_size


@contextlib.contextmanager
def utf8_name(path: Path) -> Iterator[str]:
    """A name of the file that is valid UTF-8, which libraries written in Rust require."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with open(path, "rb") as file:
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        yield str(path)


KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_json(path: Path, largest: int = LARGEST) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError, with line and column of a syntax error.

    Also refused: duplicate keys, NaN, Infinity, numbers beyond float64 or of more than 4,300 digits, a byte order
    mark, nesting beyond Python's stack, files of more than `largest` bytes.
    """
    size = size_of(path)
    try:
        if size > largest:
            raise CheckpointError(
                f"{path} has {size:,} bytes, expected at most {largest:,}; its content does not match its name,"
                f" download it again"
            )
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    return parse_json(raw, str(path))


def parse_json(raw: bytes, where: str, damaged: str = "; the file is damaged, download it again") -> dict[str, Any]:
    """`read_json` for bytes in memory. Error messages begin with `where`, and end with `damaged` if it is not JSON."""
    if not raw.strip():
        raise CheckpointError(f"{where} is empty; download it again")
    if raw.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{where} is a git-lfs pointer, not the file itself; run 'git lfs pull' in the repository it was copied"
            " from"
        )
    try:
        text = raw.decode()
        if text.startswith("\ufeff"):
            raise CheckpointError(
                f"{where} begins with a byte order mark, which JSON does not allow; save it without one"
            )
        value = json.loads(text, object_pairs_hook=_no_repeats, parse_constant=_no_constants, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not valid JSON: byte {error.start} is not UTF-8{damaged}") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " * ("\n" in text.strip())
        place = f"{line}column {error.colno}"
        raise CheckpointError(f"{where} is not valid JSON: {error.msg} ({place}){damaged}") from None
    except _Refused as error:
        raise CheckpointError(f"{where}: {error}{damaged}") from None
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deeply{damaged}") from None
    except ValueError:  # the only cause left: Python refuses to parse an int of more than 4,300 digits
        raise CheckpointError(f"{where} contains a number of thousands of digits{damaged}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected an object {{...}}, got {_kind(value)}{damaged}")
    return value


def with_remedy(error: ConfigError, remedy: str) -> str:
    """The message of a bad configuration, with `remedy` if it names none. In messages, a remedy follows a semicolon."""
    text = str(error)
    return text if ";" in text else f"{text}; {remedy}"


class _Refused(Exception):
    pass


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise _Refused(f"the key {key!r:.60} occurs twice, so it is unclear which value applies")
        out[key] = value
    return out


def _no_constants(name: str) -> NoReturn:
    raise _Refused(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    """Parse a float; refuse what exceeds float64, which JSON allows and Python makes infinite."""
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"the number {text:.40} is too large for a float")
    return value


class Fields:
    """Typed access to a mapping. Each invalid entry is a ConfigError with its key, its value and what was expected.

    The keys that were read are remembered; `unknown` returns the others.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where
        self.keys_read: set[str] = set()

    def get(self, key: str) -> Any:
        """The value, unchecked; None if there is none."""
        self.keys_read.add(key)
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """An int. Required if there is no default, as in the methods below."""
        value = self._required(key, default)
        if not is_integer(value):
            raise ConfigError(f"{self.where}: {key} must be an integer, got {describe(value)}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """An int or a float."""
        value = self._required(key, default)
        if not is_number(value) or value in (math.inf, -math.inf):
            raise ConfigError(f"{self.where}: {key} must be a finite number, got {describe(value)}")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """True or False."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} must be true or false, got {describe(value)}")
        return value

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """An object, or None if there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {key} must be an object, got {describe(value)}")
        return value

    def unknown(self) -> list[str]:
        """The keys that were never read."""
        return sorted(self.values.keys() - self.keys_read)

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None and default is None:
            raise ConfigError(f"{self.where}: the key {key} is missing")
        return default if value is None else value


def describe(value: Any) -> str:
    """A JSON value and its type for an error message: null, true, [1, 2] (a list)."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value!r:.60} ({_kind(value)})"


def _kind(value: Any) -> str:
    names = {str: "a string", int: "an integer", float: "a float", list: "a list", dict: "an object"}
    return "null" if value is None else "true/false" if isinstance(value, bool) else names.get(type(value), "unknown")
