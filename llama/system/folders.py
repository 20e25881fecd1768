"""The state folder, and the cache folder: files that the program built or downloaded and can build or download again.

Some of them are code: the C++ kernels and the compiled steps. `load_code` runs such a file only if no other user can
have written it: this user or root owns the file and every folder above it, and nobody else can write to them. The file
is opened, checked and hashed, and the open file is loaded, so replacing the file in between has no effect.

In a user namespace, such as a container, all users outside of it have the same id. This id, which usually stands for
root, is accepted as the owner of a folder above the cache folder, because the user can't change that owner. It is not
accepted for the cache folder and its files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import UsageError
from .temporary import own_temporary

LOG = logging.getLogger(__name__)
T = TypeVar("T")
# Don't follow a link, and don't wait for the other end of a pipe. Windows has no such flags, and no users to check.
OPEN = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
NO_ACCESS_LISTS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of a file system without access lists
OVERFLOW, UID_MAP = Path("/proc/sys/kernel/overflowuid"), Path("/proc/self/uid_map")
# The open files that were loaded: {(name, device, inode): descriptor}. They stay open, because the system's loader
# identifies a library by its name, which contains the descriptor: a reused descriptor would name an older library.
LOADED: dict[tuple[str, int, int], int] = {}


def cache_folder() -> Path:
    """CLEARLLAMA_CACHE, or the user's cache folder on this operating system. Raises UsageError if there is none."""
    named = os.environ.get("CLEARLLAMA_CACHE")
    try:
        if not named:
            import platformdirs

            named = platformdirs.user_cache_dir("clearllama")
        folder = Path(named).expanduser()
    except RuntimeError:  # HOME is not set and the system does not know this user
        folder = Path("~")
    if folder.parts[:1] == ("~",):  # older versions of platformdirs don't expand it
        raise UsageError(
            "the home folder is not known, so there is no folder for downloads; set HOME, or CLEARLLAMA_CACHE to a"
            " writable folder"
        )
    return folder


def state_folder() -> Path:
    """The user's state folder on this operating system. Raises RuntimeError if the home folder is not known."""
    import platformdirs

    return Path(platformdirs.user_state_dir("clearllama")).expanduser()


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents with mode 700. Raises OSError."""
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(0o700, exist_ok=True)


def is_private(folder: Path) -> bool:
    """Whether no other user can replace a folder or its files."""
    try:
        _check_folders(Path(os.path.realpath(folder)))
    except UsageError:
        return False
    return True


def load_code(folder: Path, name: str, suffix: str, make: Callable[[Path], None], load: Callable[[str], T]) -> T:
    """Load the code that a folder keeps under a name. If there is none, make it, load it and keep it.

    make  writes the file
    load  loads the file; raises OSError or RuntimeError if that fails

    A new file is kept only after it has been loaded. A kept file that does not load is removed and made again. If
    another user could write to the folder, the file is made in a temporary folder, for this process only, and the
    reason is logged. Raises what `make` and `load` raise, and OSError if the folder is not writable.
    """
    make_folder(folder)
    try:
        found = open_kept(folder, name, suffix)
    except UsageError as error:
        LOG.warning("clearllama: %s; until then, every process compiles the code again", error)
        with tempfile.TemporaryDirectory(prefix="clearllama-") as work:
            made = Path(work, name + suffix)
            make(made)
            return load(str(made))
    if found is not None:
        path, handle = found
        try:
            return load(_opened(path, handle))
        except (OSError, RuntimeError):
            path.unlink(missing_ok=True)
    with own_temporary(folder, ".build") as work:
        made = work / (name + suffix)
        make(made)
        loaded = load(str(made))
        keep(made, folder, name)
        return loaded


def kept(folder: Path, name: str, suffix: str) -> Path | None:
    """The file of code that a folder keeps under a name, or None. Raises UsageError as `open_kept` does."""
    found = open_kept(folder, name, suffix)
    if found is None:
        return None
    os.close(found[1])
    return found[0]


def open_kept(folder: Path, name: str, suffix: str) -> tuple[Path, int] | None:
    """The file that `keep` moved into a folder under a name, with its open descriptor, or None.

    A file that is damaged, or that another user could have written, is removed. Raises UsageError if another user could
    replace the files of this folder.
    """
    folder = Path(os.path.realpath(folder))  # checked and used instead of the path with links
    _check_folders(folder)
    for path in sorted(folder.glob(f"{name}-{'[0-9a-f]' * 16}{suffix}")):
        with contextlib.suppress(OSError):
            if (handle := _open_checked(path, name)) is not None:
                return path, handle
            path.unlink()
    return None


def keep(made: Path, folder: Path, name: str) -> Path:
    """Move a finished file into a folder of the same disk in one step, which two processes may do at the same time.

    The hash of the content is added to the name; `open_kept` detects damage by it.
    """
    with open(made, "rb") as file:
        target = folder / _name_of(file.fileno(), name, made.suffix)
    made.chmod(0o644)
    os.replace(made, target)
    return target


# ------------------------------------------------------------------------------------------------------- the checks
def _open_checked(path: Path, name: str) -> int | None:
    """Open a file if it is regular, unchanged, and written by this user or root. Returns None if it is not."""
    try:
        handle = os.open(path, OPEN)
    except OSError:  # also a link
        return None
    found = os.fstat(handle)
    ours = stat.S_ISREG(found.st_mode) and _distrust(path, found) is None
    if ours and _name_of(handle, name, path.suffix) == path.name:
        return handle
    os.close(handle)
    return None


def _check_folders(folder: Path) -> None:
    """Raise UsageError if another user could replace a folder or its files. The path must be absolute, without links.

    In a sticky folder such as /tmp, others can't rename or remove what this user made.
    """
    for path in (*reversed(folder.parents), folder):  # from the root on, so that a checked path can't change
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise UsageError(
                f"the owner of {path}, from which code is loaded, can't be checked: {error.strerror or error}; set"
                " CLEARLLAMA_CACHE to a folder of your own"
            ) from None
        if problem := _distrust(path, found, parent=path != folder):
            raise UsageError(problem)


def _distrust(path: Path, found: os.stat_result, parent: bool = False) -> str | None:
    """Why other users could control a file or folder, with the remedy; None if they can't."""
    if not hasattr(os, "geteuid"):
        return None
    other = "or set CLEARLLAMA_CACHE to a folder of your own"
    sticky = parent and stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    trusted = parent if _is_outside(found.st_uid) else found.st_uid in (os.geteuid(), 0)
    if not trusted:
        return f"user {found.st_uid} owns {path}, from which code is loaded; change its owner, {other}"
    by_group = found.st_mode & stat.S_IWGRP and not _is_own_group(path, found.st_gid)
    if (found.st_mode & stat.S_IWOTH or by_group) and not sticky:
        return f"other users can write to {path}, from which code is loaded; run chmod go-w {path}, {other}"
    return None


def _is_outside(uid: int) -> bool:
    """Whether a user id stands for all users outside of the user namespace that this process runs in."""
    try:
        if uid != int(OVERFLOW.read_text()):
            return False
        ranges = [[int(number) for number in line.split()] for line in UID_MAP.read_text().splitlines()]
    except (OSError, ValueError):  # not Linux, or without /proc
        return False
    return not any(first <= uid < first + count for first, _, count in ranges)


def _is_own_group(path: Path, gid: int) -> bool:
    """Whether this user is the only member of a group, and no access list extends the group's rights to others.

    Some systems create such a group for every user and make new files writable by it. The group of root may have other
    members, so it does not count. Users of a directory service that does not list its users are not seen.
    """
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    alone = user.pw_uid != 0 and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    # gr_mem does not contain the users whose primary group this is.
    alone = alone and all(other.pw_uid == user.pw_uid for other in pwd.getpwall() if other.pw_gid == gid)
    return alone and not _has_access_list(path)


def _has_access_list(path: Path) -> bool:
    """Whether a path has an access list of Linux, which may add to its permissions. True if that is unknown."""
    if not hasattr(os, "listxattr"):
        return False
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except OSError as error:
        return error.errno not in NO_ACCESS_LISTS


def _opened(path: Path, handle: int) -> str:
    """A name that refers to an open file, even if its path is replaced. Without /proc, the path itself.

    No other file can get the name, because the descriptor in it stays open. If the same file is open already, its
    descriptor is used and this one is closed.
    """
    if not os.path.exists(f"/proc/self/fd/{handle}"):
        os.close(handle)
        return str(path)
    found = os.fstat(handle)
    loaded = LOADED.setdefault((path.name, found.st_dev, found.st_ino), handle)
    if loaded != handle:
        os.close(handle)
    return f"/proc/self/fd/{loaded}"


def _name_of(handle: int, name: str, suffix: str) -> str:
    with open(handle, "rb", closefd=False) as file:
        return f"{name}-{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}{suffix}"
