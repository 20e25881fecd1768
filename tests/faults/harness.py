"""The contract of the command for bad inputs, and helpers that damage good inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

# Values to write over a count, a length or an offset in a file, wrapped to its width.
INTEGERS = (0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


@dataclasses.dataclass(frozen=True)
class Trial:
    args: tuple[object, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a child ended. A negative `code` is a signal: -14 is the time limit, -11 a crash."""

    trial: Trial
    code: int
    stdout: bytes
    stderr: bytes

    @property
    def error(self) -> str:
        return self.stderr.decode()

    def refused(self, *words: str, code: int = 1) -> str:
        """Assert a refusal: the exit code, nothing on stdout, one error line on stderr that contains all the words."""
        report = f"{self.trial.args}\nexit code {self.code}\nstdout {self.stdout[:500]!r}\nstderr {self.error}"
        assert self.code == code, report
        assert self.stdout == b"", report
        self._assert_one_error(report)
        for word in words:
            assert word in self.error, f"expected {word!r} in\n{report}"
        return self.error

    def survived(self) -> bool:
        """True if it ran (exit code 0), False if it was refused by the contract. Anything else fails the test."""
        if self.code != 0:
            self.refused(code=self.code if self.code in (1, 2) else 1)
            return False
        assert b"Traceback" not in self.stderr, self.error
        return True

    def _assert_one_error(self, report: str) -> None:
        """Assert that the last line on stderr is the only error, printable and not an unexpected exception."""
        lines = [line for line in self.error.splitlines() if "error" in line.split(": ")[:2][-1]]
        assert len(lines) == 1, report
        assert self.error.rstrip("\n").endswith(lines[0]), report
        assert lines[0].isprintable(), report
        assert "Traceback" not in self.error, report
        assert "unexpected " not in lines[0], report


def loads(path: Path, what: str) -> bool:
    """Whether a model can be loaded and run in this process. If not, the error must be a LlamaError."""
    import llama
    from llama.errors import CheckpointError, LlamaError, TokenizerError

    try:
        llama.load(path, device="cpu", dtype="float32").generate("a", max_new_tokens=1)
        return True
    except LlamaError as error:
        caught = error
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    report = f"{what}: {caught}"
    if isinstance(caught, CheckpointError | TokenizerError):
        assert path.name in str(caught), report
    assert "\n" not in report, report
    assert len(report) < 2000, report
    return False


def snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    """Mode and content hash of everything below a folder; for a link its target."""
    found: dict[str, tuple[int, str]] = {}
    for path in sorted(folder.rglob("*")):
        at = path.lstat()
        if path.is_symlink():
            content = os.readlink(path)
        else:
            try:
                content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            except PermissionError:  # some tests remove the permission
                content = "closed"
        found[str(path.relative_to(folder))] = at.st_mode, content
    return found


def cuts(data: bytes, header: int, every: int = 1) -> Iterator[tuple[str, bytes]]:
    """The file cut at every byte of its header and at two positions after it."""
    for end in [*range(0, header, every), (header + len(data)) // 2, len(data) - 1]:
        yield f"cut at {end}", data[:end]


def integers(data: bytes, at: int, width: int) -> Iterator[tuple[str, bytes]]:
    """The file with the little-endian integer of `width` bytes at `at` replaced by each of INTEGERS."""
    there = int.from_bytes(data[at : at + width], "little")
    for value in (*INTEGERS, there - 1, there + 1):
        new = (value % (1 << 8 * width)).to_bytes(width, "little")
        if new != data[at : at + width]:
            yield f"{value} at {at}", data[:at] + new + data[at + width :]


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
