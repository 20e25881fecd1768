"""The messages and commands that were typed in earlier chats, in a file in the user's state folder.

Each line of the file is one entry as a JSON string, since an entry may have several lines.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from ..system.folders import state_folder
from ..system.temporary import write_atomically

NOT_KEPT = "what you type is not kept for later chats"
MOST_ENTRIES, MOST_BYTES = 1000, 2**20  # the newest ones are kept


def open_history(warn: Callable[[str], None]) -> History:
    """The history of this user."""
    try:
        path = state_folder() / "chat-history.jsonl"
    except RuntimeError:  # HOME is not set and the system does not know this user
        warn(f"{NOT_KEPT}: the home folder is not known; set HOME")
    except ImportError:
        warn(f"{NOT_KEPT}: the package platformdirs is missing; pip install platformdirs")
    else:
        return History(path, warn)
    return History(None, warn)


class History:
    """The entries of a file that only its owner can read. The first entry creates the file.

    path     None: entries are not kept after this process
    warn     called once, with the reason, if the file can't be read or written; new entries are then not kept
    """

    def __init__(self, path: Path | None, warn: Callable[[str], None]):
        self.path, self._warn = path, warn
        self.entries = self._read() if path else []

    def add(self, entry: str) -> bool:
        """Add an entry. Returns False if it is the same as the one before."""
        if self.entries[-1:] == [entry]:
            return False
        self.entries.append(entry)
        if self.path is not None:
            try:
                self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
                handle = os.open(
                    self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o600
                )
                with open(handle, "ab") as file:
                    if stat.S_ISREG(os.fstat(handle).st_mode) and hasattr(os, "fchmod"):
                        os.fchmod(handle, 0o600)
                    file.write(_line(entry))
            except OSError as error:
                self._fail(error)
        return True

    def _read(self) -> list[str]:
        """The entries of the file. A file that is too large is shortened. Lines that are not entries are ignored."""
        path = self.path
        try:
            if path is None or not path.is_file():  # also a device
                return []
            data = path.read_bytes()
            found = [entry for line in data.splitlines() if (entry := _entry(line)) is not None]
            kept = newest(found)
            if len(kept) < len(found):
                write_atomically(path, b"".join(map(_line, kept)))
            return kept
        except OSError as error:
            self._fail(error)
            return []

    def _fail(self, error: OSError) -> None:
        self._warn(f"{NOT_KEPT}: {self.path}: {error.strerror or error}")
        self.path = None


def newest(entries: Sequence[str]) -> list[str]:
    """The most recent entries, at most MOST_ENTRIES and MOST_BYTES."""
    size, first = 0, len(entries)
    while first > 0 and len(entries) - first < MOST_ENTRIES:
        size += len(_line(entries[first - 1]))
        if size > MOST_BYTES:
            break
        first -= 1
    return list(entries[first:])


def _line(entry: str) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _entry(line: bytes) -> str | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, str) else None
