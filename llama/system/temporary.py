"""Files that are being written: a temporary folder next to the target, and one rename at the end.

A reader sees the old file or the complete new one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def own_temporary(folder: Path, prefix: str) -> Iterator[Path]:
    """Make a temporary folder in `folder` and remove it on exit. Also remove those that killed processes left."""
    for left in folder.glob(f"{prefix}-*.tmp/.lock"):
        with contextlib.suppress(ImportError, OSError), open(left, "r+") as file:
            lock(file)
            shutil.rmtree(left.parent, ignore_errors=True)
            left.touch()  # if a program still writes there, the next call tries again; else the folder is gone: fails
    unique = tempfile.TemporaryDirectory(prefix=f"{prefix}-", suffix=".tmp", dir=folder, ignore_cleanup_errors=True)
    with unique as work, open(Path(work, ".new"), "w") as file:
        with contextlib.suppress(ImportError, OSError):  # without a lock, no other process removes the folder
            lock(file)
            os.rename(file.name, Path(work, ".lock"))
        yield Path(work)


def lock(file: IO[Any]) -> None:
    """Lock a file until it is closed or the process is killed. Raises OSError if another process has locked it."""
    import fcntl  # not on Windows

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
