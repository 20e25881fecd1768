"""Files that are being written: a temporary folder next to the target, and one rename at the end.

A reader sees the old file or the complete new one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def own_temporary(folder: Path, prefix: str) -> Iterator[Path]:
    """Make a temporary folder in `folder` and remove it on exit. Remove those of killed processes, too."""
    for left in folder.glob(f"{prefix}-*.tmp"):
        with contextlib.suppress(ImportError, OSError), _locked(left):
            # A new one is empty until it is locked
            if any(left.iterdir()) or time.time() - left.stat().st_mtime > 60:
                shutil.rmtree(left)
    with (
        tempfile.TemporaryDirectory(prefix=f"{prefix}-", suffix=".tmp", dir=folder, ignore_cleanup_errors=True) as work,
        contextlib.ExitStack() as lock,
    ):
        with contextlib.suppress(ImportError, OSError):  # Windows and some network disks have no such lock
            lock.enter_context(_locked(Path(work)))
        yield Path(work)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; a killed process loses its lock. Raises OSError if another process has locked it."""
    import fcntl

    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def write_atomically(target: Path, content: bytes) -> None:
    """Write a file in one step. It keeps its permissions, and a link stays a link. Raises OSError.

    A target that is not a regular file (a pipe, a terminal, /dev/stdout) is written to directly.
    """
    if os.path.abspath(target).startswith(("/dev/", "/proc/")) or (target.exists() and not target.is_file()):
        target.write_bytes(content)
        return
    path = target.resolve()
    with own_temporary(path.parent, ".writing") as work:
        (work / path.name).write_bytes(content)
        replace(work / path.name, path)


def replace(made: Path, target: Path) -> None:
    """Rename a finished file or folder to its target on the same disk. A file gets the permissions of the old one."""
    for file in made.iterdir() if made.is_dir() else [made]:
        with open(file, "rb+") as opened:
            os.fsync(opened.fileno())
    if target.exists():
        shutil.copymode(target, made)
    os.replace(made, target)


def check_writable(folder: Path) -> None:
    """Raise OSError unless a file can be made in a folder. Permissions do not show this for root or special disks."""
    with own_temporary(folder, ".writing"):
        pass
