"""Fetch a file from the Hugging Face hub: resume an interrupted transfer, and verify the file before it gets its name.

huggingface_hub transfers the bytes. Its own downloads start over after an interruption, and compare only sizes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UsageError
from ..system.temporary import locked

PARTIAL = ".clearllama.incomplete"  # ends the name of a partial file; the library's tools recognize its last part
LOCK = ".clearllama"
CHUNK = 2**20
ALGORITHMS = {64: "sha256", 40: "git"}  # length of an ETag -> its algorithm, for large files and for small ones


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub lists it.

    path  in the repository
    size  in bytes; None if the list does not state it
    etag  its sha256, or git's object id of a small file; "" if the list states neither
    """

    path: str
    size: int | None
    etag: str


def fetch(
    url: str,
    file: RemoteFile,
    target: Path,
    headers: dict[str, str],
    *,
    force: bool,
    progress: Callable[[int], Any],
    waiting: Callable[[], None],
) -> None:
    """Fetch a file with a known ETag to `target`, unless it is there. The target appears only once it is verified.

    force     download it even if it is there
    progress  called with the number of bytes that have arrived
    waiting   called before waiting for another process that fetches the same file

    A partial file next to the target is resumed. Raises CheckpointError if the content does not match the ETag.
    """
    from huggingface_hub.file_download import http_get

    part = target.with_name(f"{target.name}{PARTIAL}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target, LOCK, waiting):
        if is_complete(target, file) and not force:
            return
        for start in (_partial_size(part, file.size), 0):
            with open(part, "ab" if start else "wb") as opened:
                sink: Any = _Sink(opened, file, progress)
                http_get(url, sink, resume_size=start, headers=headers, expected_size=file.size)
                opened.flush()
                os.fsync(opened.fileno())
            found = checksum(part, file.etag)
            if found == file.etag:
                os.replace(part, target)
                return
            size = part.stat().st_size
            part.unlink()
            if not start:  # otherwise the wrong bytes may be from the earlier transfer
                break
    raise CheckpointError(
        f"{file.path} arrived damaged: expected checksum {file.etag[:16]}…, got {found[:16]}…, {size:,} bytes; the file"
        " was removed; try again"
    )


def is_complete(path: Path, file: RemoteFile) -> bool:
    """Whether a file of the expected size is there."""
    return path.is_file() and file.size in (None, path.stat().st_size)


def partial_size(target: Path, file: RemoteFile) -> int:
    """The number of bytes of a target that need not be transferred again."""
    if is_complete(target, file):
        return target.stat().st_size
    return _partial_size(target.with_name(f"{target.name}{PARTIAL}"), file.size)


def _partial_size(part: Path, most: int | None) -> int:
    size = part.stat().st_size if part.is_file() else 0
    return size if most is None or size <= most else 0


def remove_partial(folder: Path, etags: Collection[str]) -> None:
    """Remove partial files of other versions (their ETags are not among `etags`), unless they are in use."""
    for part in folder.glob(f"*{PARTIAL}"):
        target = part.with_name(part.name.removesuffix(PARTIAL))
        if target.name not in etags:
            with contextlib.suppress(OSError, UsageError), locked(target, LOCK):
                part.unlink()


def checksum(path: Path, etag: str) -> str:
    """The checksum of a file, of the same kind as an ETag; the ETag itself if it is not a checksum."""
    if not re.fullmatch(r"[0-9a-f]+", etag) or len(etag) not in ALGORITHMS:
        return etag
    return file_sum(path, ALGORITHMS[len(etag)])


def file_sum(
    file: Path, algorithm: str, progress: Callable[[str, int, int], None] = lambda what, done, total: None
) -> str:
    """The md5, the sha256, or git's object id of a file."""
    size, done = file.stat().st_size, 0
    digest = hashlib.new("sha1" if algorithm == "git" else algorithm, usedforsecurity=False)
    if algorithm == "git":
        digest.update(f"blob {size}\0".encode())
    with open(file, "rb") as opened:
        while chunk := opened.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(f"{algorithm} {file.name}", done, size)
    return digest.hexdigest()


class _Sink:
    """What http_get writes to: a file that reports its size and accepts no more than the listed number of bytes."""

    def __init__(self, opened: Any, file: RemoteFile, progress: Callable[[int], Any]):
        self._opened, self._file, self._progress = opened, file, progress
        self.tell, self.seek, self.truncate = opened.tell, opened.seek, opened.truncate

    def write(self, data: bytes) -> int:
        most = self._file.size
        if most is not None and self.tell() + len(data) > most:
            raise CheckpointError(f"{self._file.path} is longer than the {most:,} bytes that the hub lists; try again")
        written: int = self._opened.write(data)
        self._progress(self.tell())
        return written


@contextlib.contextmanager
def progress_bar(title: str, total: int, quiet: bool) -> Iterator[Callable[[int], Any]]:
    """A progress bar on stderr, unless `quiet` or if stderr is not a terminal. Yields the function that updates it."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=title, unit="B", unit_scale=True, unit_divisor=1000) as bar:

        def show(done: int) -> None:
            bar.n = min(done, total)
            bar.refresh()

        yield show
