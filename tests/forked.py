"""Runs of the command in processes of their own that need not import torch: one process imports it and forks.

Started as a program, this reads requests from stdin, one JSON object a line, and answers each with the child's
id and then with its exit code.
"""

from __future__ import annotations

import ctypes
import io
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
from typing import Any

STEPS = re.compile(r"open$|os\.(rename|remove|mkdir|rmdir|link|truncate|chmod)|fcntl\.|tempfile\.|shutil\.")


class Forked:
    """The process that forks. `run` is subprocess.run for `python -m llama ARGS`, with this process' environment.

    seconds: after so long the child is killed by SIGALRM, exit code -14. memory: bytes of addresses it may take beyond
    what the process has after its imports. file_size: bytes that a file may grow to, for a disk that is full. stdin as
    a path is opened and not copied. env and cwd as subprocess has them, env on top of this process' own. streams:
    another file for 0, 1 or 2, or None where that one is closed. before: Python to run first, to bring a fault about
    that no input can; code: Python to run instead of the command. bound: root's right to pass over the modes of files
    is given up (Linux). `start` gives the child's id at once, and `finish` waits for it; there is one child at a time.
    """

    def __init__(self) -> None:
        self.server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(
        self, args: tuple[str, ...], stdin: bytes | Path | None, seconds: int = 0, memory: int = 0, **more: Any
    ) -> Done:
        self.start(args, stdin, seconds, memory, **more)
        return self.finish()

    def start(
        self,
        args: tuple[str, ...],
        stdin: bytes | Path | None = None,
        seconds: int = 0,
        memory: int = 0,
        *,
        file_size: int = 0,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        streams: dict[int, str | None] | None = None,
        before: str = "",
        code: str = "",
        kill: tuple[int, float, int] | None = None,
        bound: bool = False,
    ) -> int:
        """kill (N, S, SIGNAL): that signal, S seconds after the child's N-th step, which is a thing it does to files.

        `steps` of the result says how many there were.
        """
        self.args, self.work = args, tempfile.TemporaryDirectory()
        self.kept = [Path(self.work.name) / name for name in ("stdin", "stdout", "stderr")]
        if isinstance(stdin, Path):
            self.kept[0] = stdin
        for path, content in zip(self.kept, (stdin or b"", b"", b""), strict=True):
            if isinstance(content, bytes):
                path.write_bytes(content)
        request = {
            "args": args,
            "env": {**os.environ, **(env or {})},
            "cwd": str(cwd or os.getcwd()),
            "streams": [(streams or {}).get(number, str(path)) for number, path in enumerate(self.kept)],
            "seconds": seconds,
            "memory": memory,
            "file_size": file_size,
            "before": before,
            "code": code,
            "kill": kill,
            "bound": bound,
        }
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(request).encode() + b"\n")
        self.server.stdin.flush()
        return self._answer()[0]

    def finish(self) -> Done:
        with self.work:
            code, steps = self._answer()
            return Done(self.args, code, self.kept[1].read_bytes(), self.kept[2].read_bytes(), steps=steps)

    def _answer(self) -> list[int]:
        assert self.server.stdout is not None
        return [int(word) for word in self.server.stdout.readline().split()]

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
        print(child, flush=True)
        steps = 0
        while said := os.read(told, 2**16):  # a byte for each step, until the child ends
            before, steps = steps, steps + len(said)
            if request["kill"] and before < request["kill"][0] <= steps:
                time.sleep(request["kill"][1])
                os.kill(child, request["kill"][2])
        os.close(told)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), steps, flush=True)


def become(request: dict, tell: int) -> None:
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
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"], request["file_size"]))
    if request["bound"]:
        give_up_rights()
    code = 1
    if request["before"]:
        exec(request["before"], {})
    if request["kill"]:
        sys.addaudithook(lambda event, args: STEPS.match(event) and os.write(tell, b"."))  # type: ignore[func-returns-value]
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


def give_up_rights() -> None:
    """Drop every capability: the modes of files then hold for root, too, as for the owner of its files."""
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)  # version 3, this process; none of the three sets
    if os.getuid() == 0 and ctypes.CDLL(None).capset(header, none):
        raise OSError("capset failed")


if __name__ == "__main__":
    serve()
