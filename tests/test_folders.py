"""What the cache folder keeps: found again while it is what was written, removed and made again when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama.folders import keep, kept


def put(folder: Path, content: bytes) -> Path:
    made = folder / "made.so"
    made.write_bytes(content)
    return keep(made, folder, "avx2-0123")


def test_what_was_kept_is_found_by_its_name(tmp_path: Path) -> None:
    assert kept(tmp_path / "absent", "avx2-0123", ".so") is None
    path = put(tmp_path, b"library")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"library"
    assert kept(tmp_path, "avx2-0123", ".so") == path
    assert kept(tmp_path, "avx2-0124", ".so") is None
    assert kept(tmp_path, "avx2-0123", ".pt2") is None


@pytest.mark.row("F03")
@pytest.mark.parametrize("damage", [b"", b"librar", b"librarz", b"library\0"])
def test_what_was_damaged_is_removed(tmp_path: Path, damage: bytes) -> None:
    path = put(tmp_path, b"library")
    path.write_bytes(damage)
    assert kept(tmp_path, "avx2-0123", ".so") is None
    assert not path.exists()
    assert kept(tmp_path, "avx2-0123", ".so") is None


def test_a_folder_in_its_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "avx2-0123-ffff.so").mkdir()
    path = put(tmp_path, b"library")
    assert kept(tmp_path, "avx2-0123", ".so") == path
