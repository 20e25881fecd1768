"""Work in progress on disk: a folder beside its target, cleared at the end, swept later if the process is killed.

What is written gets its name by one rename, so whoever looks sees the old file or the new one. A lock beside a target
keeps two processes from working at the same one.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import UsageError

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # Windows: nothing keeps a second writer away
    flock = None  # type: ignore[assignment]

EXCHANGE = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
HERE = -100  # AT_FDCWD


@contextlib.contextmanager
def own_temporary(folder: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `folder`, whose name says which process of which machine it belongs to; gone afterwards.

    What killed processes left there under the same prefix is removed first.
    """
    sweep(folder, prefix)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}-{_host()}-{os.getpid()}-", dir=folder) as work:
        yield Path(work)


def sweep(folder: Path, prefix: str) -> None:
    """Remove what processes of this machine left behind that are no more."""
    for stale in abandoned(folder, prefix):
        shutil.rmtree(stale, ignore_errors=True)
    for lock in folder.glob(f"{glob.escape(prefix)}-*.lock"):
        with contextlib.suppress(OSError):
            _remove_locked(lock, _lock(lock, os.O_RDWR))


def abandoned(folder: Path, prefix: str) -> Iterator[Path]:
    """What lies in a folder under a name that own_temporary gave it, of processes of this machine that are no more."""
    for path in folder.glob(f"{glob.escape(prefix)}-{_host()}-*"):
        pid = path.name.removeprefix(f"{prefix}-").split("-")[1]
        with contextlib.suppress(OSError, ValueError, OverflowError):
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                yield path


def write_whole(target: Path, content: bytes, prefix: str = ".writing", new: bool = False) -> None:
    """Write a file in one step: whoever looks sees the old content or all of the new. A link stays a link.

    new  refuse to replace what is there, with FileExistsError

    What is no regular file (a pipe, a terminal, /dev/stdout) is written to as it is. Raises OSError.
    """
    if not new and (_is_device(target) or (target.exists() and not target.is_file())):
        target.write_bytes(content)
        return
    place = target if new else target.resolve()
    with own_temporary(place.parent, prefix) as work:
        made = work / place.name
        with open(made, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if not new:
            os.replace(made, place)
            return
        try:
            os.link(made, place)  # unlike a rename it does not replace
        except FileExistsError:
            raise
        except OSError:  # not every disk has links
            if os.path.lexists(place):
                raise FileExistsError(f"{place} exists") from None
            os.replace(made, place)


def check_writable(folder: Path, prefix: str = ".writing") -> None:
    """Raise OSError unless a file can be made in a folder. Made, since neither root's modes nor odd disks tell."""
    with own_temporary(folder, prefix):
        pass


def swap(one: Path, other: Path) -> bool:
    """Exchange what two names of a disk stand for, in one step. False, and nothing done, where the system can't."""
    names = os.fsencode(one), os.fsencode(other)
    try:
        if sys.platform == "linux":
            return bool(ctypes.CDLL(None).renameat2(HERE, names[0], HERE, names[1], EXCHANGE) == 0)
        if sys.platform == "darwin":
            return bool(ctypes.CDLL(None).renamex_np(*names, EXCHANGE) == 0)
    except (OSError, AttributeError):  # a C library without it
        pass
    return False


# ---------------------------------------------------------------------------------------------------------- the lock
@contextlib.contextmanager
def alone(target: Path, prefix: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a target, a file that lies beside it while it is held: only one process at a time gets here.

    waiting  called once if another process holds it, and then it is waited for

    Raises UsageError where another holds it and nobody wants to wait, OSError where there can be no lock.
    """
    path = target.with_name(f"{prefix}-{target.name[:50]}.lock")
    try:
        handle = _lock(path, os.O_RDWR | os.O_CREAT, waiting)
    except BlockingIOError:
        raise UsageError(
            f"{target} is being written by another clearllama; wait for it, or name another target"
        ) from None
    try:
        yield
    finally:
        _remove_locked(path, handle)


def _lock(path: Path, flags: int, waiting: Callable[[], None] | None = None) -> int:
    """Open and lock a file. Raises BlockingIOError where another process holds it and `waiting` is None."""
    while True:
        handle = os.open(path, flags, 0o666)
        try:
            if flock is not None:
                try:
                    flock(handle, LOCK_EX | LOCK_NB)
                except BlockingIOError:
                    if waiting is None:
                        raise
                    waiting()
                    flock(handle, LOCK_EX)
            if os.fstat(handle).st_nlink:
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its last holder has removed it


def _remove_locked(path: Path, handle: int) -> None:
    if flock is None:  # Windows removes no file that is open
        os.close(handle)
    with contextlib.suppress(OSError):
        path.unlink()
    if flock is not None:
        os.close(handle)


def _is_device(path: Path) -> bool:
    """Whether a path stands for something of the system's, as /dev/stdout, even where a file lies behind it."""
    return os.path.abspath(path).startswith(("/dev/", "/proc/"))


def _host() -> str:
    return re.sub(r"\W", "_", platform.node()) or "host"
