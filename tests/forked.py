"""Runs of the command in processes of their own that need not import torch: one process imports it and forks.

Started as a program, this reads requests from stdin, one JSON object a line, and answers each with the child's
id and then with its exit code.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


class Forked:
    """The process that forks. `run` is subprocess.run for `python -m llama ARGS`, with this process' environment.

    seconds: after so long the child is killed by SIGALRM, exit code -14. memory: bytes of addresses it may take beyond
    what the process has after its imports. file_size: bytes that a file may grow to. env and cwd as subprocess has
    them, env on top of this process' own. streams: another file for 0, 1 or 2, or None where that one is closed.
    code: Python to run instead of the command. `start` gives the child's id at once, and `finish` waits for it; there
    is one child at a time.
    """

    def __init__(self) -> None:
        self.server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(
        self, args: tuple[str, ...], stdin: bytes | None, seconds: int = 0, memory: int = 0, **more: Any
    ) -> subprocess.CompletedProcess[bytes]:
        self.start(args, stdin, seconds, memory, **more)
        return self.finish()

    def start(
        self,
        args: tuple[str, ...],
        stdin: bytes | None = None,
        seconds: int = 0,
        memory: int = 0,
        *,
        file_size: int = 0,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        streams: dict[int, str | None] | None = None,
        code: str = "",
    ) -> int:
        self.args, self.work = args, tempfile.TemporaryDirectory()
        self.kept = [Path(self.work.name) / name for name in ("stdin", "stdout", "stderr")]
        for path, content in zip(self.kept, (stdin or b"", b"", b""), strict=True):
            path.write_bytes(content)
        request = {
            "args": args,
            "env": {**os.environ, **(env or {})},
            "cwd": str(cwd or os.getcwd()),
            "streams": [(streams or {}).get(number, str(path)) for number, path in enumerate(self.kept)],
            "seconds": seconds,
            "memory": memory,
            "file_size": file_size,
            "code": code,
        }
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(request).encode() + b"\n")
        self.server.stdin.flush()
        return self._answer()

    def finish(self) -> subprocess.CompletedProcess[bytes]:
        with self.work:
            code = self._answer()
            return subprocess.CompletedProcess(self.args, code, self.kept[1].read_bytes(), self.kept[2].read_bytes())

    def _answer(self) -> int:
        assert self.server.stdout is not None
        return int(self.server.stdout.readline())

    def close(self) -> None:
        self.server.communicate()  # it ends when its stdin does


def serve() -> None:
    from llama import cli, loader, text  # noqa: F401  (what the command imports)

    for line in sys.stdin.buffer:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            become(request)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def become(request: dict) -> None:
    """Turn into the command: arguments, environment, folder and streams; then leave as Python would."""
    from llama.__main__ import main

    os.environ.clear()
    os.environ.update(request["env"])
    names = ("stdin", "stdout", "stderr")
    for number, (name, path) in enumerate(zip(names, request["streams"], strict=True)):
        if path is None:  # Python begins with None where a stream is closed
            os.close(number)
            setattr(sys, name, None)
            continue
        opened = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(opened, number)
        os.close(opened)
        stream = os.fdopen(number, ("rb", "wb", "wb")[number], 0 if number == 2 else -1, closefd=False)
        encoding = os.environ.get("PYTHONIOENCODING")
        setattr(sys, name, io.TextIOWrapper(stream, encoding, write_through=number == 2))
    os.chdir(request["cwd"])
    sys.argv = ["clearllama", *request["args"]]
    signal.alarm(request["seconds"])  # nothing handles it: it ends a child that hangs in C as well
    if request["memory"]:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + request["memory"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if request["file_size"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"],) * 2)
    code = 1
    try:
        code = exec(request["code"], {"__name__": "__main__"}) or 0 if request["code"] else main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None:
                    stream.flush()
            except OSError:
                code = 120  # as Python's own
        os._exit(code)


if __name__ == "__main__":
    serve()
