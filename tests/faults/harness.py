"""The contract of the command for bad inputs."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a child ended. A negative `code` is a signal: -27 is the limit of CPU time, -11 a crash."""

    args: tuple[object, ...]
    code: int
    stdout: bytes
    stderr: bytes

    @property
    def error(self) -> str:
        return self.stderr.decode()

    def refused(self, *words: str, code: int = 1) -> str:
        """Assert a refusal: the exit code, nothing on stdout, one error line on stderr that contains all the words."""
        report = f"{self.args}\nexit code {self.code}\nstdout {self.stdout[:500]!r}\nstderr {self.error}"
        assert (self.code, self.stdout) == (code, b""), report
        lines = [line for line in self.error.splitlines() if "error" in line.split(": ")[:2][-1]]
        assert len(lines) == 1, report
        assert self.error.rstrip("\n").endswith(lines[0]), report
        assert lines[0].isprintable(), report
        assert "Traceback" not in self.error, report
        assert "unexpected " not in lines[0], report
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
