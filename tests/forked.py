"""Runs of the command in processes of their own that need not import torch: one process imports it and forks.

Started as a program, this reads requests from stdin, one JSON object a line, and answers each with an exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = re.compile(r"open$|os\.(rename|remove|mkdir|rmdir|link|truncate|chmod)|fcntl\.|tempfile\.|shutil\.")


class Forked:
    """The process that forks. `run` is subprocess.run for `python -m llama ARGS`, with this process' environment.

    seconds: after so long the child is killed by SIGALRM, exit code -14. memory: bytes of addresses it may take beyond
    what the process has after its imports. file_size: bytes that a file may grow to, for a disk that is full. stdin as
    a path is opened and not copied. before: Python to run first, to bring a fault about that no input can. bound:
    root's right to pass over the modes of files is given up (Linux).
    """

    def __init__(self) -> None:
        self.server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(
        self,
        args: tuple[str, ...],
        stdin: bytes | Path | None,
        seconds: int = 0,
        memory: int = 0,
        file_size: int = 0,
        before: str = "",
        kill: tuple[int, float, int] | None = None,
        bound: bool = False,
    ) -> subprocess.CompletedProcess[bytes]:
        """kill (N, S, SIGNAL): that signal, S seconds after the child's N-th step, which is a thing it does to files.

        `steps` of the result says how many there were.
        """
        with tempfile.TemporaryDirectory() as work:
            streams = [Path(work) / name for name in ("stdin", "stdout", "stderr")]
            if isinstance(stdin, Path):
                streams[0] = stdin
            for path, content in zip(streams, (stdin or b"", b"", b""), strict=True):
                if isinstance(content, bytes):
                    path.write_bytes(content)
            request = {
                "args": args,
                "env": dict(os.environ),
                "cwd": os.getcwd(),
                "streams": [str(s) for s in streams],
                "seconds": seconds,
                "memory": memory,
                "file_size": file_size,
                "before": before,
                "kill": kill,
                "bound": bound,
            }
            assert self.server.stdin is not None
            assert self.server.stdout is not None
            self.server.stdin.write(json.dumps(request).encode() + b"\n")
            self.server.stdin.flush()
            code, steps = map(int, self.server.stdout.readline().split())
            return Done(args, code, streams[1].read_bytes(), streams[2].read_bytes(), steps=steps)

    def close(self) -> None:
        self.server.communicate()  # it ends when its stdin does


class Done(subprocess.CompletedProcess):  # type: ignore[type-arg]
    def __init__(self, *args: object, steps: int):
        super().__init__(*args)  # type: ignore[arg-type]
        self.steps = steps


def serve() -> None:
    from llama import cli, loader, text  # noqa: F401  (what the command imports)

    for line in sys.stdin.buffer:
        request = json.loads(line)
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            become(request, tell)
        os.close(tell)
        steps = 0
        while said := os.read(told, 2**16):  # a byte for each step, until the child ends
            before, steps = steps, steps + len(said)
            if request["kill"] and before < request["kill"][0] <= steps:
                time.sleep(request["kill"][1])
                os.kill(child, request["kill"][2])
        os.close(told)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)} {steps}\n")
        sys.stdout.flush()


def become(request: dict, tell: int) -> None:
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
    if request["file_size"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"], request["file_size"]))
    if request["bound"]:
        give_up_rights()
    code = 1
    if request["before"]:
        exec(request["before"], {})
    if request["kill"]:
        sys.addaudithook(lambda event, args: STEPS.match(event) and os.write(tell, b"."))  # type: ignore[func-returns-value]
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.flush()
        os._exit(code)


def give_up_rights() -> None:
    """Drop every capability: the modes of files then hold for root, too, as for the owner of its files."""
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)  # version 3, this process; none of the three sets
    if os.getuid() == 0 and ctypes.CDLL(None).capset(header, none):
        raise OSError("capset failed")


if __name__ == "__main__":
    serve()
