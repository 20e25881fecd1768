"""The cases of a fault fail if its defect is planted in the source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .planted import DEFECTS, Defect

ROOT = Path(__file__).parents[2]
COPIED = ("llama", "tests", "configs", "scripts", "checkpoints", "docs", "pyproject.toml", "README.md")


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: f"{defect.row} {defect.what}")
def test_a_planted_defect_makes_a_case_fail(defect: Defect, tmp_path: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copy(source, tmp_path / name)
    file = tmp_path / defect.file
    text = file.read_text()
    assert text.count(defect.old) == 1, f"expected {defect.old!r} once in {defect.file}, found {text.count(defect.old)}"
    file.write_text(text.replace(defect.old, defect.new))
    cases = [str(path) for path in (tmp_path / "tests").rglob("test_*.py") if f'"{defect.row}"' in path.read_text()]
    options = ["-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider", "--row", defect.row]
    command = [sys.executable, "-m", "pytest", *options, *cases]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}  # else child processes would import the installed package
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 1, f"no case of {defect.row} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
