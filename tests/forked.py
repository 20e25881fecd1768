"""Runs of the command in processes of their own that need not import torch: one process imports it and forks.

Started as a program, this reads requests from stdin, one JSON object a line, and answers each with an exit code.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path


class Forked:
    """The process that forks. `run` is subprocess.run for `python -m llama ARGS`, with this process' environment.

    seconds: after so long the child is killed by SIGALRM, exit code -14. memory: bytes of addresses it may take beyond
    what the process has after its imports. bound: root's right to pass over the modes of files is given up (Linux).
    """

    def __init__(self) -> None:
        self.server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(
        self, args: tuple[str, ...], stdin: bytes | None, seconds: int = 0, memory: int = 0, bound: bool = False
    ) -> subprocess.CompletedProcess[bytes]:
        with tempfile.TemporaryDirectory() as work:
            streams = [Path(work) / name for name in ("stdin", "stdout", "stderr")]
            for path, content in zip(streams, (stdin or b"", b"", b""), strict=True):
                path.write_bytes(content)
            request = {
                "args": args,
                "env": dict(os.environ),
                "cwd": os.getcwd(),
                "streams": [str(s) for s in streams],
                "seconds": seconds,
                "memory": memory,
                "bound": bound,
            }
            assert self.server.stdin is not None
            assert self.server.stdout is not None
            self.server.stdin.write(json.dumps(request).encode() + b"\n")
            self.server.stdin.flush()
            code = int(self.server.stdout.readline())
            return subprocess.CompletedProcess(args, code, streams[1].read_bytes(), streams[2].read_bytes())

    def close(self) -> None:
        self.server.communicate()  # it ends when its stdin does


def serve() -> None:
    from llama import cli, loader, text  # noqa: F401  (what the command imports)

    for line in sys.stdin.buffer:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            become(request)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def become(request: dict) -> None:
    """Turn into the command: arguments, environment, folder and streams; then leave as Python would."""
    from llama.__main__ import main

    for number, path in enumerate(request["streams"]):
        os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, closefd=False) for n, mode in enumerate("rww"))
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["clearllama", *request["args"]]
    signal.alarm(request["seconds"])  # nothing handles it: it ends a child that hangs in C as well
    if request["memory"]:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + request["memory"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if request["bound"]:
        give_up_rights()
    code = 1
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def give_up_rights() -> None:
    """Drop every capability: the modes of files then hold for root, too, as for the owner of its files."""
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)  # version 3, this process; none of the three sets
    if os.getuid() == 0 and ctypes.CDLL(None).capset(header, none):
        raise OSError("capset failed")


if __name__ == "__main__":
    serve()
