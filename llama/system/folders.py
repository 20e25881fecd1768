"""The cache folder: models and compiled code that the program can download or build again."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import UsageError
from .temporary import own_temporary, replace

T = TypeVar("T")


def cache_folder() -> Path:
    """CLEARLLAMA_CACHE, or the user's cache folder on this operating system. Raises UsageError if there is none."""
    import platformdirs

    try:
        return Path(os.environ.get("CLEARLLAMA_CACHE") or platformdirs.user_cache_dir("clearllama")).expanduser()
    except RuntimeError:  # HOME is not set and the system does not know this user
        raise UsageError("the home folder is not known; set HOME, or CLEARLLAMA_CACHE to a writable folder") from None


def is_private(folder: Path) -> bool:
    """Whether this user or root owns a folder and nobody else can write to it."""
    found = folder.stat()
    return not hasattr(os, "geteuid") or (found.st_uid in (os.geteuid(), 0) and not found.st_mode & 0o022)


def load_code(path: Path, make: Callable[[Path], None], load: Callable[[str], T]) -> T:
    """Load a file of code in the cache folder with `load`; if there is none or it does not load, `make` it first.

    The file ends with its SHA-256, since loading a truncated library can end the process. If `load` raises OSError
    or RuntimeError, the file is made again. Raises OSError if the folder is not writable, or if other users can write
    to it: their code would run.
    """
    folder = path.parent
    folder.mkdir(0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise OSError(f"other users can write to {folder}; run chmod 700 on it, or set CLEARLLAMA_CACHE to another")
    if path.is_file():
        with contextlib.suppress(OSError, RuntimeError):
            content = path.read_bytes()
            if content[-32:] == hashlib.sha256(content[:-32]).digest():
                return load(str(path))
        path.unlink(missing_ok=True)
    with own_temporary(folder, ".build") as work:
        made = work / path.name
        make(made)
        with open(made, "ab") as file:  # loaders of libraries and packages ignore bytes after the end
            file.write(hashlib.sha256(made.read_bytes()).digest())
        loaded = load(str(made))
        replace(made, path)
        return loaded
