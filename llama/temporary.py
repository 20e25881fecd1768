"""Work in progress on disk: a folder beside its target, cleared at the end, swept later if the process is killed."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def own_temporary(folder: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `folder`, whose name says which process of which machine it belongs to; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=f"{prefix}-{_host()}-{os.getpid()}-", dir=folder) as work:
        yield Path(work)


def sweep(folder: Path, prefix: str) -> None:
    """Remove what processes of this machine left behind that are no more."""
    for stale in folder.glob(f"{prefix}-{_host()}-*"):
        pid = stale.name.removeprefix(f"{prefix}-").split("-")[1]
        with contextlib.suppress(OSError, ValueError, OverflowError):
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                shutil.rmtree(stale, ignore_errors=True)


def _host() -> str:
    return re.sub(r"\W", "_", platform.node()) or "host"
