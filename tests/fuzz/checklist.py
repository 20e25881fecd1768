"""checklist.chk of Meta's folders: parsing it, and that no line leads out of the folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from llama.tools import verify

from . import law

FILES = {"consolidated.00.pth": b"PK\x03\x04 no weights", "params.json": b"{}", "tokenizer.model": b"IQ== 0\n"}


class Harness(law.Harness):
    words = (*(name.encode() for name in FILES), b"  ", b" *", b"/etc/passwd", b"#", b"\\", b"0" * 32)

    def __init__(self, folder: Path):
        super().__init__(folder)
        for name, data in FILES.items():
            (folder / name).write_bytes(data)

    def seeds(self) -> Iterable[bytes]:
        for mark in (" ", "*"):
            lines = [f"{hashlib.md5(data).hexdigest()} {mark}{name}" for name, data in FILES.items()]
            yield ("\n".join(lines) + "\n").encode()

    def calls(self, data: bytes) -> Iterator[law.Call]:
        path = self.put("checklist.chk", data)
        yield partial(read, path)
        yield partial(list, verify.verify(self.folder))


def read(path: Path) -> None:
    """Read a checklist. Raises Finding if a file name in it leads out of the folder."""
    sums, faults = verify.read_checklist(path)
    if not sums and not faults:
        raise law.Finding("read_checklist returned neither a checksum nor a fault")
    for known in sums:
        if known.file.parent != path.parent or known.file.name in ("", ".", ".."):
            raise law.Finding(f"a line leads to {known.file}")
