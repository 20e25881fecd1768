"""Whether standard input belongs to a command that already has a prompt.

In `cat notes | clearllama generate "Summarise:"` it does. But scripts, loops and services pass their own standard input
to every command that they start. Reading it could consume the lines of a `while read` loop, or of a script that a shell
is reading, or could wait forever. So standard input is not read if

- it is a file that has been read in part;
- it is a pipe or socket, and also the standard input of the program that started the command (Linux only);
- it is a pipe or socket without data, unless a program that is not a caller of this command writes to it (Linux only).

With `-` as prompt or file, these rules do not apply.
"""

from __future__ import annotations

import argparse
import os
import select
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from . import streams

PROC = Path("/proc")
WAIT = 1.0 if PROC.is_dir() else 5.0  # seconds to wait for data of a writer that can't be found
WRAPPERS = {"sudo", "time", "timeout", "uv"}  # programs that run one command and do not read their standard input


def text_beside_prompt(args: argparse.Namespace) -> str:
    """The text on standard input that belongs to the prompt, or an empty string. A line on stderr reports which."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        descriptor = sys.stdin.fileno()
        reason = not_ours(args, descriptor)
        unread = available(descriptor) if reason else 0
    except (OSError, ValueError):  # closed, or replaced by an object without a descriptor
        return ""
    if reason is not None:
        if unread or reason == SILENT:
            streams.info(args, f"standard input is not part of the prompt: {reason}; to read it, add -f -")
        return ""
    text = streams.decode(streams.read_stdin_bytes(), "standard input").removesuffix("\n")
    if text:
        streams.info(args, f"standard input is part of the prompt: {len(text):,} characters")
    return text


SILENT = f"no data arrived within {WAIT:g} s"


def not_ours(args: argparse.Namespace, descriptor: int) -> str | None:
    """The reason not to read an input; None to read it, which will end. Waits for the first data of a pipe."""
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and os.lseek(descriptor, 0, os.SEEK_CUR) > 0:
        return "a part of the file has been read already"
    piped = stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)
    if piped and (name := reader_before(status)) is not None:  # of a file, dash has the same one while it waits
        return f"{name}, which started this command, may need it"
    if piped and not has_data(descriptor, WAIT):
        if not has_other_writer(status) and not has_data(descriptor, 0):  # a writer may have written and ended since
            return SILENT
        streams.info(args, "waiting for standard input from another program")
    return None


def available(descriptor: int) -> int:
    """The number of bytes that can be read now."""
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return max(0, status.st_size - os.lseek(descriptor, 0, os.SEEK_CUR))
    try:
        import array
        import fcntl
        import termios
    except ImportError:  # Windows
        return 0
    count = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]


def has_data(descriptor: int, seconds: float) -> bool:
    """Whether a pipe or socket has data, or has ended, after at most so many seconds. True where this is unknown."""
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    except (OSError, ValueError):  # Windows
        return True


# ---------------------------------------------------------------------------------------------- other processes (Linux)
def callers() -> Iterator[tuple[int, str]]:
    """Process id and name of the parent of this process, of its parent, and so on."""
    number = os.getppid()
    while number > 0:
        try:
            name, _, rest = (PROC / str(number) / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
        except OSError:
            return
        yield number, name
        number = int(rest.split()[1])


def is_same(status: os.stat_result, path: Path) -> bool:
    """Whether a path, such as /proc/1/fd/0, is the file, pipe or socket of `status`."""
    try:
        other = path.stat()
    except OSError:
        return False
    return (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino)


def reader_before(status: os.stat_result) -> str | None:
    """The name of the calling process that has the same standard input and may read it, or None."""
    for number, name in callers():
        if not is_same(status, PROC / str(number) / "fd" / "0"):
            return None
        if name not in WRAPPERS and os.environ.get("CLEARLLAMA_PARENT") != str(number):
            return name
    return None


def has_other_writer(status: os.stat_result) -> bool:
    """Whether a process that is not a caller of this one can write to a pipe, as in `other | clearllama`."""
    own = {os.getpid(), *(number for number, _ in callers())}
    for process in PROC.glob("[0-9]*"):
        if int(process.name) in own:
            continue
        try:
            descriptors = list((process / "fd").iterdir())
        except OSError:  # another user's process, or one that has ended
            continue
        for path in descriptors:
            if is_same(status, path) and _is_writable(process / "fdinfo" / path.name):
                return True
    return False


def _is_writable(info: Path) -> bool:
    try:
        flags = next(line.split()[1] for line in info.read_text().splitlines() if line.startswith("flags:"))
    except (OSError, StopIteration):
        return False
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
