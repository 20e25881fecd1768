"""The law for every harness: an input gives a result or a LlamaError, within limits of time and memory.

No other file is opened, nothing is written, no process is started and no connection made.
"""

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

SECONDS = 2.0  # processor time for one call; on a busy machine wall time means nothing
MEMORY = 500 * 2**20  # bytes of memory that one call may add

# Prefixes of sys.audit events that no reader may cause.
FORBIDDEN = (
    "os.chmod", "os.chown", "os.exec", "os.fork", "os.link", "os.mkdir", "os.posix_spawn", "os.putenv", "os.remove",
    "os.rename", "os.rmdir", "os.spawn", "os.startfile", "os.symlink", "os.system", "os.truncate", "os.utime",
    "pickle.find_class", "shutil.", "socket.", "subprocess.", "tempfile.", "urllib.",
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Readable by every call: modules are imported on demand, and libraries inspect the machine.
ROOT = Path(__file__).parents[2]
LIBRARIES = (sys.prefix, sys.base_prefix, str(ROOT / "llama"), str(ROOT / "configs"), "/proc/", "/sys/")

Call = Callable[[], object]


class Finding(Exception):
    """A call broke the law."""


class Harness(ABC):
    """One kind of input. A call may read only files in `folder`.

    words    byte strings that the mutator inserts into inputs
    seconds  limit of processor time for a call
    allowed  prefixes of audit events that a call may cause although they are in FORBIDDEN
    """

    words: tuple[bytes, ...] = ()
    seconds = SECONDS
    allowed: tuple[str, ...] = ()

    def __init__(self, folder: Path):
        self.folder = folder

    @abstractmethod
    def seeds(self) -> Iterable[bytes]:
        """Return small valid inputs."""

    @abstractmethod
    def calls(self, data: bytes) -> Iterator[Call]:
        """Yield the calls to make with an input. The law applies to each call separately."""

    def put(self, name: str, data: bytes) -> Path:
        """Write a new file in the harness' folder. It replaces the old one, which earlier calls may have mapped."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        return path


def check(harness: Harness, data: bytes, memory: int = MEMORY) -> int:
    """Make all calls with an input. Returns the number of calls that gave a result. Raises Finding."""
    worked = 0
    for call in harness.calls(data):
        worked += check_call(call, (str(harness.folder),), harness.seconds, memory, harness.allowed)
    return worked


def check_call(
    call: Call, readable: tuple[str, ...], seconds: float, memory: int, allowed: tuple[str, ...] = ()
) -> bool:
    """Return whether a call gave a result rather than a LlamaError. Raises Finding if it broke the law."""
    before, start = reset_peak(), time.process_time()
    with watched((*readable, *LIBRARIES), allowed) as seen:
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
        except BaseException as error:  # panics of Rust libraries are not subclasses of Exception
            if seen:
                raise Finding(f"a reader {seen[0]}") from error
            raise Finding(f"{type(error).__name__}: {str(error)[:300]!r}") from error
    if seen:
        raise Finding(f"a reader {seen[0]}")
    spent = time.process_time() - start
    if spent > seconds:
        raise Finding(f"a call used {spent:.1f} s of processor time, more than {seconds:g}")
    grown = peak() - before
    if grown > memory:
        raise Finding(f"a call used {grown / 2**20:.0f} MB of memory, more than {memory / 2**20:.0f}")
    return worked


def inspect(checkpoint: Any) -> None:
    """Produce both outputs of `clearllama inspect`. Raises Finding if they contain unprintable characters."""
    from llama.cli import inspect

    facts = inspect.describe(checkpoint, checkpoint.config.max_seq_len, 1)
    json.dumps(facts, allow_nan=False)
    for value in facts.values():
        if not inspect._text(value).replace(inspect.NEXT, "").isprintable():
            raise Finding(f"the output of inspect is not printable: {value!r:.300}")


def peak() -> int:
    """Return the peak memory of this process in bytes since the last `reset_peak`."""
    try:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak() -> int:
    """Reset the peak to the current memory if the system can (proc(5), clear_refs). Returns the peak."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak()


# ---------------------------------------------------------------------------------------------------- audit hook
_watch: tuple[list[str], tuple[str, ...], tuple[str, ...]] | None = (
    None  # an audit hook can't be removed, so it checks this
)


@contextlib.contextmanager
def watched(readable: tuple[str, ...], allowed: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Forbid and record reads outside `readable`, writes, processes and connections, but not events in `allowed`."""
    global _watch, _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    seen: list[str] = []
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode, _watch = True, (seen, readable, allowed)
    try:
        yield seen
    finally:
        sys.dont_write_bytecode, _watch = before, None


_hooked = False


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _watch is None:
        return
    seen, readable, allowed = _watch
    violation = ""
    if event == "open":
        path, _, flags = args
        if not isinstance(path, str | bytes | os.PathLike):
            return  # the descriptor of an open file
        name = os.path.abspath(os.fsdecode(path))
        if name == os.devnull:
            return
        if isinstance(flags, int) and flags & WRITING:
            violation = f"opened {name!r} for writing"
        elif not name.startswith(readable):
            violation = f"opened {name!r}"
    elif (
        event.startswith(FORBIDDEN)
        and not event.startswith(allowed)
        and not (event == "os.truncate" and isinstance(args[0], int))
    ):
        violation = f"caused {event} {args!r:.200}"
    if violation:
        seen.append(violation)
        raise PermissionError(f"forbidden by the fuzzer: the reader {violation}")
