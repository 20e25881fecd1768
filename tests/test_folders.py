"""A file in the cache folder is found again while it is unchanged, and removed if it is damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llama.errors import UsageError
from llama.system.folders import keep, kept


def put(folder: Path, content: bytes) -> Path:
    made = folder / "made.so"
    made.write_bytes(content)
    return keep(made, folder, "avx2-0123")


def test_a_file_is_found_by_its_name(tmp_path: Path) -> None:
    assert kept(tmp_path / "absent", "avx2-0123", ".so") is None
    path = put(tmp_path, b"library")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"library"
    assert kept(tmp_path, "avx2-0123", ".so") == path
    assert kept(tmp_path, "avx2-0124", ".so") is None
    assert kept(tmp_path, "avx2-0123", ".pt2") is None


@pytest.mark.row("F03")
@pytest.mark.parametrize("damage", [b"", b"librar", b"librarz", b"library\0"])
def test_a_damaged_file_is_removed(tmp_path: Path, damage: bytes) -> None:
    path = put(tmp_path, b"library")
    path.write_bytes(damage)
    assert kept(tmp_path, "avx2-0123", ".so") is None
    assert not path.exists()
    assert kept(tmp_path, "avx2-0123", ".so") is None


def test_a_folder_with_a_files_name_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "avx2-0123-ffff.so").mkdir()
    path = put(tmp_path, b"library")
    assert kept(tmp_path, "avx2-0123", ".so") == path


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs POSIX users")
def test_code_that_another_user_could_have_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    made = tmp_path / "made.so"
    made.write_bytes(b"code")
    target = keep(made, folder, "form")
    assert kept(folder, "form", ".so") == target
    for parent in (folder, folder.parent):
        mode = parent.stat().st_mode
        parent.chmod(0o777)
        with pytest.raises(UsageError, match="every user can write to"):
            kept(folder, "form", ".so")
        parent.chmod(mode)
    owner = target.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    if owner == 0:  # every user trusts root's files
        assert kept(folder, "form", ".so") == target
        os.chown(target, 12345, -1)
    with pytest.raises(UsageError, match="another user owns"):
        kept(folder, "form", ".so")
