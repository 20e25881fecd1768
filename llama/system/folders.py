"""Where the program keeps what it made or fetched and can make or fetch again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from ..errors import UsageError


def cache_folder() -> Path:
    """CLEARLLAMA_CACHE, or the user's cache folder as the operating system has it. UsageError where there is none."""
    import platformdirs

    wanted = os.environ.get("CLEARLLAMA_CACHE")
    try:
        folder = Path(wanted or platformdirs.user_cache_dir("clearllama")).expanduser()
    except RuntimeError:  # no HOME, and the system does not know this user
        folder = Path("~")
    if folder.parts[:1] == ("~",):  # older versions of platformdirs leave it so
        raise UsageError(
            "the home folder is not known, and with it where to keep what is fetched; set HOME, or CLEARLLAMA_CACHE to"
            " a folder that can be written"
        )
    return folder


def kept(folder: Path, name: str, suffix: str) -> Path | None:
    """The file that `keep` has put into a folder under a name, or None. A damaged one is removed.

    Raises UsageError where it or the folder is open to other users: what is kept here is run.
    """
    for place in (folder, folder.parent):
        if place.is_dir() and place.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise UsageError(f"{place} can be written by every user, and code is kept there: chmod o-w {place}")
    for path in sorted(folder.glob(f"{name}-*{suffix}")):
        with contextlib.suppress(OSError):
            if hasattr(os, "getuid") and path.stat().st_uid not in (os.getuid(), 0):
                raise UsageError(
                    f"{path} is another user's, and would be run as code; remove it, or set CLEARLLAMA_CACHE"
                )
            if path.name == _name_of(path, name):
                return path
            path.unlink()
    return None


def keep(made: Path, folder: Path, name: str) -> Path:
    """Move a finished file there, from the same disk: whole or not at all, also where two processes do it at once.

    The hash of its content becomes part of its name, so that `kept` can tell whether it is still what was written.
    """
    target = folder / _name_of(made, name)
    os.replace(made, target)
    return target


def _name_of(path: Path, name: str) -> str:
    return f"{name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}{path.suffix}"
