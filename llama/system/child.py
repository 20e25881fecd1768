"""A child process for work on untrusted input: `python child.py WORKER FOLDER...`, started and killed by `Child`.

WORKER is a Python file with a function answer(request) -> reply, both JSON values. Some inputs crash the process that
handles them, such as a chat template that compares deeply nested tuples or a grammar of 5,000 rules; others take
minutes or gigabytes. The operating system limits what the child can use:

    time    a timer of CPU time, whose signal ends the process even inside C code
    memory  a limit on the address space (Linux only)
    files   none can be opened or written, so code that escapes from a sandbox can't read or change any

The child imports nothing of the package, so that it starts in less than 0.1 s. It then answers many requests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import struct
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import subprocess

PER_MEGABYTE = 1.0  # additional seconds for each megabyte of the request
COPIES = 16  # additional memory, in sizes of the request: it is parsed and changed, and a character may take four bytes
OUTPUT = 2**20  # bytes that a reply may have in addition to four times the request
WAIT = 60.0  # seconds of real time, in case CPU time can't be limited (Windows) or the machine is very busy

REQUEST = struct.Struct(">QdQ")  # before a request: its length, seconds of CPU time, bytes of memory
REPLY = struct.Struct(">Q?")  # before a reply: its length, and whether the process keeps much memory
NO_MEMORY = 77  # exit code
STATM = "/proc/self/statm"  # the size of the address space, on Linux
TO_START = ("SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LD_PRELOAD")  # some Pythons can't start without


class ChildError(Exception):
    """There is no reply. The message is the reason."""


class Child:
    """A child process for one worker. It serves one thread at a time.

    worker    the file
    packages  what it imports, apart from Python's own modules
    seconds   CPU time for a request, apart from PER_MEGABYTE
    space     bytes of memory for a request, apart from COPIES
    """

    def __init__(self, worker: Path, packages: Sequence[str], seconds: float, space: int):
        self.worker, self.packages, self.seconds, self.space = worker, packages, seconds, space
        self._lock, self._process, self._owner = threading.Lock(), cast("subprocess.Popen[bytes] | None", None), 0

    def start(self) -> None:
        """Start the process, which takes 0.1 s, in the background. The first request reports a failure."""
        with contextlib.suppress(ChildError):
            self._running()

    def _running(self) -> subprocess.Popen[bytes]:
        import subprocess  # not above: the child starts faster without it

        # After a fork, the process belongs to the parent
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            command = [sys.executable, "-I", "-S", __file__, str(self.worker), *map(_folder, self.packages)]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={name: os.environ[name] for name in TO_START if name in os.environ},
                    start_new_session=True,  # the terminal's Ctrl-C must not reach it
                )
            except OSError as error:
                raise ChildError(f"its process could not be started ({error.strerror or error})") from None
            self._owner = os.getpid()
        return self._process

    def stop(self) -> int | None:
        """Kill the process with its group. Returns its exit code, None if there was none."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # the process did not read all of the request
                cast(IO[bytes], pipe).close()
        return process.wait()

    def ask(self, request: Any) -> Any:
        """The worker's reply. Raises ChildError, and TypeError or ValueError if the request can't be JSON."""
        data = encoded(request)
        seconds, space = self.seconds + PER_MEGABYTE * len(data) / 1e6, self.space + COPIES * len(data)
        most = OUTPUT + 4 * len(data)
        with self._lock:
            process = self._running()
            into, out = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
            timer = threading.Timer(WAIT, process.kill)
            timer.start()
            try:
                into.write(REQUEST.pack(len(data), seconds, space) + data)
                into.flush()
                length, large = REPLY.unpack(out.read(REPLY.size))
                if length > most:
                    raise ChildError(f"it wrote {length:,} bytes, expected at most {most:,}")
                reply = json.loads(out.read(length))
            except (OSError, struct.error):  # the process has ended
                raise ChildError(_reason(self.stop(), seconds, space)) from None
            except BaseException:
                self.stop()  # else the next request would read the reply to this one
                raise
            finally:
                timer.cancel()
            if large:
                self.stop()  # so that the next request has all of its memory
            return reply


def _folder(package: str) -> str:
    """The folder that contains a package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ChildError(f"it needs {package}, which is not installed; run: pip install {package}")
    return str(Path(spec.origin).parents[1])


def _reason(code: int | None, seconds: float, space: int) -> str:
    """Why a process ended, given its exit code."""
    if code == NO_MEMORY:
        return f"it needed more than {space >> 20} MiB"
    if code == -getattr(signal, "SIGPROF", 0):
        return f"it ran for more than {seconds:.3g} seconds"
    if code == -getattr(signal, "SIGKILL", 0):
        return f"it was killed, by the system or because it took more than {WAIT:g} seconds"
    return f"it is nested too deeply, or needs more than {space >> 20} MiB (its process crashed, exit code {code})"


def encoded(value: Any) -> bytes:
    """A value as JSON. A text may contain a lone surrogate."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


# -------------------------------------------------------------------------------------------------------- in the child
def main() -> None:
    """Answer requests from standard input until it ends."""
    worker, *folders = sys.argv[1:]
    sys.path.extend(folders)
    spec = cast(Any, importlib.util.spec_from_file_location("worker", worker))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    resource: Any = importlib.import_module("resource") if importlib.util.find_spec("resource") else None  # no Windows
    statm = os.open(STATM, os.O_RDONLY) if os.path.exists(STATM) else None

    def size() -> int:
        return int(os.pread(statm, 99, 0).split()[0]) * resource.getpagesize() if statm is not None else 0

    base, requests, replies = size(), sys.stdin.buffer, sys.stdout.buffer
    if resource is not None:
        for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
            resource.setrlimit(kind, (0, 0))
    if hasattr(signal, "SIGPROF"):  # the parent may have ignored or blocked the timer's signal
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    while header := requests.read(REQUEST.size):
        length, seconds, space = REQUEST.unpack(header)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        if base:
            most = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (min(base + space, most) if most > 0 else base + space, most))
        try:
            reply = encoded(module.answer(json.loads(requests.read(length))))
        except MemoryError:
            os._exit(NO_MEMORY)
        replies.write(REPLY.pack(len(reply), size() > base + space // 4) + reply)
        replies.flush()


if __name__ == "__main__":
    main()
