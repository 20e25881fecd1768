"""Files that are being written: temporary folders, replacing a file in one step, and a lock for each target.

New content is written to a temporary folder next to its target and renamed, so a reader sees the old file or the new
one. The folder is removed at the end, or by the next process if this one is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import UsageError

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # Windows: a second writer is not kept out
    flock = None  # type: ignore[assignment]

EXCHANGE = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
HERE = -100  # AT_FDCWD


@contextlib.contextmanager
def own_temporary(folder: Path, prefix: str) -> Iterator[Path]:
    """Make a temporary folder in `folder`, named after this machine and process, and remove it on exit.

    The folder is locked while its process runs. Other processes check the lock, because a process in another container
    may have the same number. Folders with the same prefix that killed processes left are removed first.
    """
    sweep(folder, prefix)
    handle = None
    while handle is None:
        work = tempfile.TemporaryDirectory(prefix=f"{prefix}-{_host()}-{os.getpid()}-", dir=folder)
        if (handle := _hold(Path(work.name))) is None:
            work.cleanup()
    try:
        with work:
            yield Path(work.name)
    finally:
        if handle >= 0:
            os.close(handle)


def _hold(path: Path) -> int | None:
    """Lock a new folder and return its handle; None if another process is removing it; -1 if there are no locks."""
    if flock is None:
        return -1
    handle = os.open(path, os.O_RDONLY)
    try:
        flock(handle, LOCK_EX | LOCK_NB)
        if os.fstat(handle).st_nlink:
            return handle
    except BlockingIOError:
        pass
    except OSError:  # a file system without locks; then no other process removes the folder
        return handle
    os.close(handle)
    return None


def sweep(folder: Path, prefix: str) -> None:
    """Remove the temporary folders and locks that killed processes of this machine left."""
    for stale in abandoned(folder, prefix):
        shutil.rmtree(stale, ignore_errors=True)
    for lock in folder.glob(f"{glob.escape(prefix)}-*.lock"):
        with contextlib.suppress(OSError):
            _remove_locked(lock, _lock(lock, os.O_RDWR))


def abandoned(folder: Path, prefix: str) -> Iterator[Path]:
    """Temporary folders that own_temporary made for processes of this machine that no longer exist.

    Only folders that can be locked are included. Where there are no locks (Windows), the folders of killed processes
    therefore remain. The process is checked too, since older versions did not lock their folders.
    """
    for path in folder.glob(f"{glob.escape(prefix)}-{_host()}-*"):
        pid = path.name.removeprefix(f"{prefix}-").split("-")[1]
        with contextlib.suppress(OSError, ValueError, OverflowError):
            if flock is None or not _is_gone(int(pid)):
                continue
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                flock(handle, LOCK_EX | LOCK_NB)
                yield path
            finally:
                os.close(handle)


def _is_gone(pid: int) -> bool:
    """Whether no other process has a number. In containers, this process may have the number of a killed one."""
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def write_atomically(target: Path, content: bytes, prefix: str = ".writing", *, follow: bool = True) -> None:
    """Write a file in one step: a reader sees the old content or the complete new content.

    An existing file keeps its permissions.

    follow  write to the target of a symbolic link; False: replace the link

    A target that is not a regular file (a pipe, a terminal, /dev/stdout) is written to directly. Raises OSError.
    """
    if _is_device(target) or (target.exists() and not target.is_file()):
        target.write_bytes(content)
        return
    path = target.resolve() if follow else target
    with own_temporary(path.parent, prefix) as work:
        made = work / path.name
        with open(made, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        keep_mode(made, path)
        os.replace(made, path)


def move_new(made: Path, path: Path) -> None:
    """Move a finished file to a path on the same disk. Raises FileExistsError if the path exists."""
    try:
        os.link(made, path)  # unlike a rename, a link never replaces a file
    except FileExistsError:
        raise
    except OSError:  # not every file system has links
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(made, path)


def keep_mode(made: Path, target: Path, new: int | None = None) -> None:
    """Give a new file or folder the permissions of the one that it will replace, or `new` if there is none.

    So new content is not readable by users who could not read the old content.
    """
    with contextlib.suppress(FileNotFoundError):
        old, mine = target.lstat(), made.stat()
        if stat.S_IFMT(old.st_mode) == stat.S_IFMT(mine.st_mode):
            new = old.st_mode & 0o777
            if old.st_gid != mine.st_gid:
                try:
                    os.chown(made, -1, old.st_gid)
                except OSError:
                    new &= 0o707  # the new file has another group, which gets no permissions
    if new is not None:
        made.chmod(new)


def check_writable(folder: Path, prefix: str = ".writing") -> None:
    """Raise OSError unless a file can be made in a folder. Permissions do not show this for root or special disks."""
    with own_temporary(folder, prefix):
        pass


def swap(one: Path, other: Path) -> bool:
    """Exchange two paths of a disk in one step. Returns False, and changes nothing, where the system can't do it."""
    names = os.fsencode(one), os.fsencode(other)
    try:
        if sys.platform == "linux":
            return bool(ctypes.CDLL(None).renameat2(HERE, names[0], HERE, names[1], EXCHANGE) == 0)
        if sys.platform == "darwin":
            return bool(ctypes.CDLL(None).renamex_np(*names, EXCHANGE) == 0)
    except (OSError, AttributeError):  # a C library without this function
        pass
    return False


# ---------------------------------------------------------------------------------------------------------- the lock
@contextlib.contextmanager
def locked(target: Path, prefix: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a target, a file next to it, which one process at a time can hold.

    waiting  called once before waiting for another process that holds the lock; None: don't wait

    Raises UsageError if another process holds the lock and `waiting` is None, OSError if no lock can be made.
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
    """Open and lock a file. Raises BlockingIOError if another process holds it and `waiting` is None."""
    while True:
        handle = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)  # a link could point to any file
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
        os.close(handle)  # its last holder has removed the file


def _remove_locked(path: Path, handle: int) -> None:
    if flock is None:  # Windows can't remove an open file
        os.close(handle)
    with contextlib.suppress(OSError):
        path.unlink()
    if flock is not None:
        os.close(handle)


def _is_device(path: Path) -> bool:
    """Whether a path is in /dev or /proc, like /dev/stdout, even if it links to a regular file."""
    return os.path.abspath(path).startswith(("/dev/", "/proc/"))


def _host() -> str:
    return re.sub(r"\W", "_", platform.node()) or "host"
