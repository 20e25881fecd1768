"""The law of every harness: an input gives a result or one LlamaError, within bounds, and no file is touched."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from llama.errors import LlamaError

SECONDS = 2.0  # of processor time for one call: a process may be held up for minutes, and that is no finding
MEMORY = 500 * 2**20  # bytes of memory that one call may add

# Events of sys.audit that no reader has a reason for, by how their names begin.
FORBIDDEN = (
    "os.chmod", "os.chown", "os.exec", "os.fork", "os.link", "os.mkdir", "os.posix_spawn", "os.putenv", "os.remove",
    "os.rename", "os.rmdir", "os.spawn", "os.startfile", "os.symlink", "os.system", "os.truncate", "os.utime",
    "pickle.find_class", "shutil.", "socket.", "subprocess.", "tempfile.", "urllib.",
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Modules are imported when they are first needed, and libraries look at the machine.
ROOT = Path(__file__).parents[2]
LIBRARIES = (sys.prefix, sys.base_prefix, str(ROOT / "llama"), str(ROOT / "configs"), "/proc/", "/sys/")

Call = Callable[[], object]


class Finding(Exception):
    """What a call did that the law forbids."""


class Harness(ABC):
    """One kind of input. `folder` is its own: what it writes there before a call, the call may read.

    words    what the mutator puts into inputs
    seconds  of processor time that a call may take
    """

    words: tuple[bytes, ...] = ()
    seconds = SECONDS

    def __init__(self, folder: Path):
        self.folder = folder

    @abstractmethod
    def seeds(self) -> Iterable[bytes]:
        """Small valid inputs."""

    @abstractmethod
    def calls(self, data: bytes) -> Iterator[Call]:
        """What is done with an input, whatever it is; each call keeps the law by itself."""

    def put(self, name: str, data: bytes) -> Path:
        """A file in the harness' folder, always a new one: calls before may have mapped the old one."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        return path


def check(harness: Harness, data: bytes, memory: int = MEMORY) -> int:
    """How many of the calls gave a result. Raises Finding."""
    worked = 0
    for call in harness.calls(data):
        worked += keep(call, (str(harness.folder),), harness.seconds, memory)
    return worked


def keep(call: Call, readable: tuple[str, ...], seconds: float, memory: int) -> bool:
    """Whether a call gave a result (and no LlamaError). Raises Finding where it does anything else."""
    held, start = forget_peak(), time.process_time()
    with watched((*readable, *LIBRARIES)) as seen:
        try:
            call()
            worked = True
        except LlamaError as error:
            worked = False
            text = str(error)
            if not text or not text.isprintable():
                raise Finding(f"the text of {type(error).__name__} is not one printable line: {text!r:.300}") from error
        except (KeyboardInterrupt, Finding):
            raise
        except BaseException as error:  # panics of Rust libraries are no Exception
            if seen:
                raise Finding(f"a reader {seen[0]}") from error
            raise Finding(f"{type(error).__name__}: {str(error)[:300]!r}") from error
    if seen:
        raise Finding(f"a reader {seen[0]}")
    took = time.process_time() - start
    if took > seconds:
        raise Finding(f"it took {took:.1f} s of processor time, more than {seconds:g}")
    grown = peak() - held
    if grown > memory:
        raise Finding(f"it took {grown / 2**20:.0f} MB of memory, more than {memory / 2**20:.0f}")
    return worked


def inspect(checkpoint: Any) -> None:
    """What `clearllama inspect` says of a checkpoint, in both its forms. Raises Finding where it is not printable."""
    from llama.cli import inspect

    facts = inspect.describe(checkpoint, checkpoint.config.max_seq_len, 1)
    json.dumps(facts, allow_nan=False)
    for value in facts.values():
        if not inspect._text(value).replace(inspect.NEXT, "").isprintable():
            raise Finding(f"what inspect shows is not printable: {value!r:.300}")


def peak() -> int:
    """The most memory this process held, in bytes, since it was last forgotten."""
    try:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):  # no Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> int:
    """Begin anew with what is held now, where the system can; returns it. (proc(5), clear_refs)"""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak()


# ------------------------------------------------------------------------------------------------- what is touched
_watch: tuple[list[str], tuple[str, ...]] | None = None  # an audit hook can't be taken away again, so it asks this


@contextlib.contextmanager
def watched(readable: tuple[str, ...]) -> Iterator[list[str]]:
    """What is done meanwhile to files outside `readable`, to any file by writing, to processes and to the network.

    It is not let happen either.
    """
    global _watch, _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    seen: list[str] = []
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode, _watch = True, (seen, readable)
    try:
        yield seen
    finally:
        sys.dont_write_bytecode, _watch = before, None


_hooked = False


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _watch is None:
        return
    seen, readable = _watch
    told = ""
    if event == "open":
        path, _, flags = args
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a number that stands for a file which is open already
        name = os.path.abspath(os.fsdecode(path))
        if isinstance(flags, int) and flags & WRITING:
            told = f"opened {name!r} for writing"
        elif not name.startswith(readable):
            told = f"opened {name!r}"
    elif event.startswith(FORBIDDEN) and not (event == "os.truncate" and isinstance(args[0], int)):
        told = f"did {event} {args!r:.200}"
    if told:
        seen.append(told)
        raise PermissionError(f"the fuzzer forbids it: {told}")  # so it does not happen
