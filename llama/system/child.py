"""A child process for work on untrusted input: `python child.py WORKER FOLDER...`, started and killed by `Child`.

WORKER is a Python file with a function answer(request) -> reply, both JSON values. Some inputs crash the process that
handles them, such as a template that compares deeply nested tuples; others take minutes or gigabytes. A request
is two lines: the limits (seconds and bytes), and JSON. A reply is a line. The operating system limits the child:

    time    a timer of CPU time, whose signal ends the process even inside C code
    memory  a limit on the address space (Linux only)
    files   none can be opened or written, so code that escapes from a sandbox can't read or change any

The child imports nothing of the package, so that it starts in 0.1 s.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PER_MEGABYTE = 1.0  # additional seconds for each megabyte of the request
COPIES = 16  # bytes of memory to add for each byte of the request: it is parsed and changed, a character may take four
OUTPUT = 2**20  # bytes that a reply may have in addition to COPIES times the request
WAIT = 60.0  # seconds of real time, in case CPU time can't be limited (Windows) or the machine is very busy

NO_MEMORY = 77  # exit code
TO_START = ("SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LD_PRELOAD")  # some Pythons need these to start


class ChildError(Exception):
    """There is no reply, for the reason in the message."""


class Child:
    """A process for a worker that imports some packages; `seconds` and `space` (bytes) limit a request."""

    def __init__(self, worker: Path, packages: Sequence[str], seconds: float, space: int):
        self.worker, self.packages, self.seconds, self.space = worker, packages, seconds, space
        self._lock, self._owner = threading.Lock(), 0
        self._process: Any = None

    def start(self) -> Any:
        """The process, started if necessary. Raises ChildError."""
        import subprocess  # not above: the child starts faster without it

        # After a fork, the process belongs to the parent
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            specs: Any = map(importlib.util.find_spec, self.packages)
            folders = [Path(spec.origin).parents[1] for spec in specs]
            command: Any = [sys.executable, "-I", "-S", __file__, self.worker, *folders]
            environment = {name: os.environ[name] for name in TO_START if name in os.environ}
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            try:  # in a session of its own, so that the terminal's Ctrl-C does not reach it
                self._process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
            except OSError as error:
                raise ChildError(f"its process could not be started ({error.strerror or error})") from None
            self._owner = os.getpid()
        return self._process

    def stop(self) -> int | None:
        """Kill the process and its group. Returns the exit code of the process; None if there was no process."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # the process did not read all of the request
                pipe.close()
        return int(process.wait())

    def ask(self, request: Any) -> Any:
        """The worker's reply. Raises ChildError, and TypeError or ValueError if the request can't be JSON."""
        data = json.dumps(request).encode()
        seconds, space = self.seconds + PER_MEGABYTE * len(data) / 1e6, self.space + COPIES * len(data)
        with self._lock:
            process = self.start()
            timer = threading.Timer(WAIT, process.kill)
            timer.start()
            try:
                process.stdin.write(b"%r %d\n%b\n" % (seconds, space, data))
                process.stdin.flush()
                most = OUTPUT + COPIES * len(data)
                reply = process.stdout.readline(most)
                if len(reply) == most:
                    raise ChildError(f"it wrote more than {most:,} bytes")
                return json.loads(reply if reply.endswith(b"\n") else b"")
            except (OSError, ValueError):  # the process has ended
                raise ChildError(_reason(self.stop(), seconds, space)) from None
            except BaseException:
                self.stop()  # else the next request would read the reply to this one
                raise
            finally:
                timer.cancel()


def _reason(code: int | None, seconds: float, space: int) -> str:
    """Why a process ended, given its exit code."""
    if code == -getattr(signal, "SIGPROF", 0):
        return f"it ran for more than {seconds:.3g} seconds"
    if code == -getattr(signal, "SIGKILL", 0):
        return f"it was killed, by the system or because it took more than {WAIT:g} seconds"
    crash = "" if code == NO_MEMORY else f", or is nested too deeply (its process crashed, exit code {code})"
    return f"it needed more than {space >> 20} MiB{crash}"


# -------------------------------------------------------------------------------------------------------- in the child
def main() -> None:
    """Answer requests from standard input until it ends."""
    sys.path.extend(sys.argv[2:])
    answer = runpy.run_path(sys.argv[1])["answer"]
    resource: Any = importlib.import_module("resource") if importlib.util.find_spec("resource") else None  # no Windows
    base = 0
    if resource is not None:
        with contextlib.suppress(OSError):  # only Linux tells the size of the address space
            base = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
            resource.setrlimit(kind, (0, 0))
        _, most = resource.getrlimit(resource.RLIMIT_AS)
    for limits in sys.stdin.buffer:
        seconds, space = map(float, limits.split())
        if resource is not None:
            signal.setitimer(signal.ITIMER_PROF, seconds)
        if base:
            allowed = base + int(space)
            resource.setrlimit(resource.RLIMIT_AS, (min(allowed, most) if most > 0 else allowed, most))
        try:
            reply = json.dumps(answer(json.loads(sys.stdin.buffer.readline())))
        except MemoryError:
            os._exit(NO_MEMORY)
        print(reply, flush=True)


if __name__ == "__main__":
    main()
