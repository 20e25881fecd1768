"""Group A: Meta's .pth files, damaged, hostile and strange."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..scripts import make_tiny
from .conftest import Try

RUN = ("--raw", "a", "-n", "1", "--device", "cpu", "--dtype", "float32")


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    return Path(make_tiny.make(tmp_path / "meta", "llama-3-8b") or tmp_path / "meta")


@pytest.mark.row("A01")
def test_an_empty_file(meta: Path, attempt: Try) -> None:
    (meta / "consolidated.00.pth").write_bytes(b"")
    attempt("generate", *RUN, "-m", meta).refused("consolidated.00.pth", "empty")


@pytest.mark.row("A02")
@pytest.mark.parametrize("keep", [1, 100, 0.5, -10])
def test_a_file_that_was_cut(meta: Path, attempt: Try, keep: float) -> None:
    file = meta / "consolidated.00.pth"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if 0 < keep < 1 else int(keep)])
    error = attempt("generate", *RUN, "-m", meta).refused("consolidated.00.pth")
    assert "weights_only" not in error
