"""The cache folder: files that the program built or downloaded and can build or download again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from ..errors import UsageError


def cache_folder() -> Path:
    """CLEARLLAMA_CACHE, or the user's cache folder on this operating system. Raises UsageError if there is none."""
    import platformdirs

    try:
        folder = Path(os.environ.get("CLEARLLAMA_CACHE") or platformdirs.user_cache_dir("clearllama")).expanduser()
    except RuntimeError:  # HOME is not set and the system does not know this user
        folder = Path("~")
    if folder.parts[:1] == ("~",):  # older versions of platformdirs don't expand it
        raise UsageError(
            "the home folder is not known, so there is no folder for downloads; set HOME, or CLEARLLAMA_CACHE to a"
            " writable folder"
        )
    return folder


def kept(folder: Path, name: str, suffix: str) -> Path | None:
    """The file that `keep` moved into a folder under a name, or None. A damaged file is removed.

    Raises UsageError if other users can write to the folder or own the file, since these files are run as code.
    """
    for parent in (folder, folder.parent):
        if parent.is_dir() and parent.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise UsageError(f"every user can write to {parent}, which contains code to run; run chmod o-w {parent}")
    for path in sorted(folder.glob(f"{name}-*{suffix}")):
        with contextlib.suppress(OSError):
            if hasattr(os, "getuid") and path.stat().st_uid not in (os.getuid(), 0):
                raise UsageError(f"another user owns {path}, which is run as code; remove it, or set CLEARLLAMA_CACHE")
            if path.name == _name_of(path, name):
                return path
            path.unlink()
    return None


def keep(made: Path, folder: Path, name: str) -> Path:
    """Move a finished file into a folder of the same disk in one step, which two processes may do at the same time.

    The name gets the hash of the content, by which `kept` detects damage.
    """
    target = folder / _name_of(made, name)
    os.replace(made, target)
    return target


def _name_of(path: Path, name: str) -> str:
    return f"{name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}{path.suffix}"
