"""Run the command in separate processes without importing torch each time: a server imports it once and forks.

Run as a program, this is the server. It reads requests from stdin, one JSON object per line, and answers each with
the child's process id, then with its exit code.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = re.compile(r"open$|os\.(rename|remove|mkdir|rmdir|link|truncate|chmod)|fcntl\.|tempfile\.|shutil\.")


class Forked:
    """The forking server. `run` works like subprocess.run for `python -m llama ARGS`, in the package of folder `root`.

    `start` returns the child's process id at once; `finish` waits for the child. There is one child at a time.

    stdin      bytes, or the path of a file to open
    seconds    limit of CPU time, after which SIGPROF kills the child (exit code -27). SIGALRM (-14) kills one that
               waits for ever, after PATIENCE seconds of real time or more
    memory     limit of address space in bytes, beyond what the server uses after its imports
    file_size  limit of a file's size in bytes, to simulate a full disk
    env        variables to add to this process' environment
    cwd        working directory
    streams    descriptor 0, 1 or 2 -> another file, or None to close it
    before     Python code to run first, to cause a fault that no input causes
    code       Python code to run instead of the command
    kill       (N, S, SIGNAL): send the signal S seconds after the child's N-th file operation; `Done.steps` is their
               total number
    """

    def __init__(self, root: Path = Path(__file__).parents[1]) -> None:
        env = {**os.environ, "PYTHONPATH": str(root)}
        command = [sys.executable, __file__]
        self.server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.child = 0  # the one that runs

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
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        streams: dict[int, str | None] | None = None,
        **more: Any,
    ) -> int:
        """Start a child and return its process id. A child that a failed test has left is killed first."""
        if self.child:
            self.kill()
            self.finish()
        self.args, self.work = args, tempfile.TemporaryDirectory()
        self.files = [Path(self.work.name) / name for name in ("stdin", "stdout", "stderr")]
        if isinstance(stdin, Path):
            self.files[0] = stdin
        for path, content in zip(self.files, (stdin or b"", b"", b""), strict=True):
            if isinstance(content, bytes):
                path.write_bytes(content)
        request = {
            "args": args,
            "env": {**os.environ, **(env or {})},
            "cwd": str(cwd or os.getcwd()),
            "streams": [(streams or {}).get(number, str(path)) for number, path in enumerate(self.files)],
            "seconds": seconds,
            "memory": memory,
            **more,
        }
        if seconds:
            from .patience import PATIENCE  # the program has no package

            request["real_seconds"] = max(seconds, PATIENCE)
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(request).encode() + b"\n")
        self.server.stdin.flush()
        (self.child,) = self._answer()
        return self.child

    def finish(self) -> Done:
        """Wait for the child and return its result."""
        with self.work:
            code, steps = self._answer()
            self.child = 0
            return Done(self.args, code, self.files[1].read_bytes(), self.files[2].read_bytes(), steps=steps)

    def _answer(self) -> list[int]:
        assert self.server.stdout is not None
        return [int(word) for word in self.server.stdout.readline().split()]

    def kill(self) -> None:
        """Kill the child, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)

    def close(self) -> None:
        if self.child:
            self.kill()
        self.server.communicate()  # the server exits at the end of its stdin


class Done(subprocess.CompletedProcess):  # type: ignore[type-arg]
    """A completed process, with the number of its file operations."""

    def __init__(self, *args: object, steps: int):
        super().__init__(*args)  # type: ignore[arg-type]
        self.steps = steps


def preload() -> None:
    """Import what any command imports while it runs, so that not every child has to."""
    import llama

    for module in pkgutil.walk_packages(llama.__path__, "llama."):
        if not module.name.startswith(("llama.__main__", "llama.server")):
            importlib.import_module(module.name)
    for name in ("platformdirs", "safetensors", "torch.utils._device"):
        importlib.import_module(name)
    inspect.getmodule(compile("", "none", "exec"))  # looks at all modules and caches their files, for torch.library
    gc.freeze()  # a child's collections then do not copy the pages of these objects


def serve() -> None:
    """Fork a child for each request."""
    preload()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            run_child(request, writer)
        os.close(writer)
        print(child, flush=True)
        steps = 0
        while written := os.read(reader, 2**16):  # one byte per file operation, until the child ends
            before, steps = steps, steps + len(written)
            step, delay, number = request.get("kill") or (0, 0, 0)
            if before < step <= steps:
                time.sleep(delay)
                os.kill(child, number)
        os.close(reader)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), steps, flush=True)


def run_child(request: dict, writer: int) -> None:
    """Set arguments, environment, directory, streams and limits; run the command; exit as Python would."""
    from llama.__main__ import main

    os.environ.clear()
    os.environ.update(request["env"])
    names = ("stdin", "stdout", "stderr")
    for number, (name, path) in enumerate(zip(names, request["streams"], strict=True)):
        if path is None:  # Python sets a stream to None if its descriptor is closed at startup
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
    # Neither signal has a handler, so that they also end a child that hangs in C
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    signal.alarm(request.get("real_seconds", 0))
    if request["memory"]:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + request["memory"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if size := request.get("file_size"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    code = 1
    exec(request.get("before", ""), {})
    if request.get("kill"):
        sys.addaudithook(lambda event, args: STEPS.match(event) and os.write(writer, b"."))  # type: ignore[func-returns-value]
    try:
        code = exec(request["code"], {"__name__": "__main__"}) or 0 if "code" in request else main()
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
                code = 120  # like Python
        os._exit(code)


if __name__ == "__main__":
    serve()
